"""Which partition a task belongs to: Kafka's murmur2, the one function that every upstream must share.

Source: `org.apache.kafka.common.utils.Utils.murmur2` (Austin Appleby's MurmurHash2, 32 bit, seed 0x9747b28c) and
`BuiltInPartitioner.partitionForKey`. librdkafka calls it `murmur2_random`.
"""

from functools import lru_cache
from struct import Struct
from typing import Final

__all__ = ["murmur2", "partition_for_key"]

_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_SEED: Final = 0x9747B28C


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
