"""Kafka's partitioner: the one function that every upstream must share, or cancels miss their schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.partitioning import keys_of_other_partitions, murmur2, partition_for_key

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_the_one_of_the_java_client(key: bytes, expected: int) -> None:
    """The vectors of Kafka's own `UtilsTest`, which Java prints as signed."""
    value = murmur2(key)

    assert (value - 2**32 if value >= 2**31 else value) == expected


def _reference(key: bytes) -> int:
    """Murmur2 written down byte by byte as Java has it, slow and plain."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(key)
    for at in range(0, len(key) - len(key) % 4, 4):
        k = key[at] | key[at + 1] << 8 | key[at + 2] << 16 | key[at + 3] << 24
        k = (k * m) & mask
        k ^= k >> 24
        k = (k * m) & mask
        h = ((h * m) & mask) ^ k
    rest = key[len(key) - len(key) % 4 :]
    if rest:
        for at in reversed(range(len(rest))):
            h ^= rest[at] << (8 * at)
        h = (h * m) & mask
    h ^= h >> 13
    h = (h * m) & mask
    return h ^ h >> 15


@given(key=st.binary(max_size=70))
def test_fast_murmur2_equals_the_plain_one(key: bytes) -> None:
    """Every length modulo four, every byte: also those above 127, which Java sees as negative."""
    assert murmur2(key) == _reference(key)


@given(key=st.binary(max_size=40), count=st.integers(1, 10_000))
def test_partition_is_within_the_count_and_ignores_the_sign(key: bytes, count: int) -> None:
    """Java masks the sign bit; `abs` would differ for half of all keys."""
    assert partition_for_key(key, count) == (_reference(key) & 0x7FFFFFFF) % count


@given(
    keys=st.lists(st.binary(max_size=9) | st.binary(min_size=30, max_size=33), max_size=40),
    count=st.integers(1, 1_000),
    partition=st.integers(0, 6),
)
def test_keys_that_are_hashed_together_fall_as_each_does_alone(keys: list[bytes], count: int, partition: int) -> None:
    """A carry from one key into its neighbour would refuse events of tasks that do belong here."""
    alone = {key for key in keys if partition_for_key(key, count) != partition}

    assert keys_of_other_partitions(keys, partition, count) == alone


def test_many_keys_of_the_largest_words_are_hashed_together() -> None:
    """All bits set: the products are as large as they get."""
    keys = [b"\xff" * 16] * 3 + [b"\xff" * 15 + bytes([last]) for last in range(256)]

    assert keys_of_other_partitions(keys, 5, 8) == {key for key in keys if partition_for_key(key, 8) != 5}
