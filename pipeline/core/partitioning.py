"""Which partition a task belongs to: Kafka's murmur2, the one function that every upstream must share.

Source: `org.apache.kafka.common.utils.Utils.murmur2` (Austin Appleby's MurmurHash2, 32 bit, seed 0x9747b28c) and
`BuiltInPartitioner.partitionForKey`. librdkafka calls it `murmur2_random`.

A batch of keys is hashed at once, all of a length together, in the lanes of one long integer: SIMD within a register
(Leslie Lamport, "Multiple Byte Processing with Full-Word Instructions", CACM 18(8), 1975), the register being as wide
as the batch. A lane has 64 bits for a word of 32, so that no product runs over into its neighbour.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

__all__ = ["keys_of_other_partitions", "murmur2", "partition_for_key"]

_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_SEED: Final = 0x9747B28C
_LANE_BYTES: Final = 8


@lru_cache(maxsize=256)
def _words(count: int) -> Struct:
    return Struct(f"<{count}I")


def murmur2(key: bytes) -> int:
    """The 32-bit MurmurHash2 of `key` as Kafka computes it, unsigned."""
    length = len(key)
    h = _SEED ^ length
    whole = length & ~3
    for k in _words(length >> 2).unpack_from(key):
        k = k * _M & _MASK  # noqa: PLW2901  # the algorithm's own mixing of the word
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    if whole != length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    """The partition of `key` among `partition_count`, as Java producers and `murmur2_random` choose it."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


def keys_of_other_partitions(keys: Iterable[bytes], partition: int, partition_count: int) -> frozenset[bytes]:
    """Those of `keys` that belong to another partition than `partition`, as `partition_for_key` has it.

    About a tenth of the time of asking for each key, where there are many of a length.
    """
    by_length: dict[int, list[bytes]] = {}
    for key in keys:
        by_length.setdefault(len(key), []).append(key)
    return frozenset(
        key
        for length, alike in by_length.items()
        for key, number in zip(alike, _murmur2_of_all(alike, length), strict=True)
        if (number & 0x7FFFFFFF) % partition_count != partition
    )


def _murmur2_of_all(keys: Sequence[bytes], length: int) -> tuple[int, ...]:
    """`murmur2` of each of these keys, all of them `length` bytes long."""
    count = len(keys)
    ones = int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little")  # times a word: that word in every lane
    mask = ones * _MASK
    h = ones * (_SEED ^ length)
    words = _words_of_all(b"".join(keys), count, length)
    for _ in range(length >> 2):
        k = next(words) * _M & mask
        # A shift to the right brings bits of the next lane along, above the 32 that count.
        h = (h * _M & mask) ^ ((k ^ k >> 24 & mask) * _M & mask)
    for tail in words:
        h = (h ^ tail) * _M & mask
    h = (h ^ h >> 13 & mask) * _M & mask
    h ^= h >> 15 & mask
    return _lanes(count).unpack(h.to_bytes(_LANE_BYTES * count, "little"))


def _words_of_all(joined: bytes, count: int, length: int) -> Iterator[int]:
    """The first four bytes of every key, each in a lane of its own; then the next four; the last may be fewer."""
    for start in range(0, length, 4):
        lanes = bytearray(_LANE_BYTES * count)
        for at in range(start, min(start + 4, length)):
            lanes[at - start :: _LANE_BYTES] = joined[at::length]
        yield int.from_bytes(lanes, "little")


@lru_cache(maxsize=256)
def _lanes(count: int) -> Struct:
    return Struct(f"<{count}Q")
