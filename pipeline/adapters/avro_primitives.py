"""Avro's primitives by hand: zigzag variable-length integers, strings and byte strings, both ways.

A general codec spends most of its time finding out what to write next. The values of the hot path are known here, so
their bodies (`avro_bodies.py`) are put together from these pieces; tests hold them against two general codecs.

Source: Avro specification 1.12, "Binary encoding". Integers are read and written two bytes (14 bits) at a time from
tables: an instant of this age takes three look-ups instead of six turns of a loop.
"""

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Final

__all__ = [
    "INSTANT_BYTES",
    "LONG_OR_NEGATIVE",
    "ZERO",
    "MalformedBodyError",
    "blob",
    "instant_of_pairs",
    "int32",
    "long",
    "read_blob",
    "read_int32",
    "read_long",
    "read_text",
    "read_three_longs",
    "shared_long",
    "text",
    "three_pairs",
]

ZERO: Final = b"\x00"
"""Nought, the empty string, the empty map or array, the first branch of a union: all are this byte."""

_PAIR: Final = 1 << 14
_SHORT: Final = _PAIR >> 1
"""Lengths below it take one or two bytes."""
_TWO_PAIRS: Final = 1 << 28
_THREE_PAIRS: Final = 1 << 42
_PAIR_MASK: Final = _PAIR - 1
_INT32_END: Final = 1 << 31
_LAST_BYTE_MAX: Final = 0x7F
_ZIGZAG_END: Final = 1 << 64

_MORE: Final = tuple(bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(_PAIR))
_LAST: Final = tuple(bytes((n,)) if n <= _LAST_BYTE_MAX else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(_PAIR))
"""14 bits as two bytes with more to follow, and as the last one or two bytes."""

_BITS: Final = tuple((n & 0x7F) | (n >> 8 & 0x7F) << 7 for n in range(1 << 16))
"""Two bytes, read little-endian, to their 14 bits."""
three_pairs: Final = Struct("<HHH").unpack_from
_nine_pairs: Final = Struct("<9H").unpack_from
INSTANT_BYTES: Final = 6
_BOTH_MORE: Final = 0x8080
_FIRST_MORE: Final = 0x80
"""In two bytes, the bits that say that another byte follows: after both, after the first only."""
LONG_OR_NEGATIVE: Final = 0x81
"""The bits of a length's first byte that say: there are more bytes, or it is less than nought."""


class MalformedBodyError(ValueError):
    """The bytes are no such value; what was wrong is in the message."""


def long(number: int) -> bytes:
    """A long; raises `ValueError` beyond 64 bits and `TypeError` for what is no whole number."""
    z = number << 1 if number >= 0 else ~(number << 1)
    if z < _PAIR:
        return _LAST[z]
    if z < _TWO_PAIRS:
        return _MORE[z & _PAIR_MASK] + _LAST[z >> 14]
    if z < _THREE_PAIRS:
        return _MORE[z & _PAIR_MASK] + _MORE[z >> 14 & _PAIR_MASK] + _LAST[z >> 28]
    if z >= _ZIGZAG_END:
        raise ValueError(f"{number} does not fit in 64 bits")
    more = b""
    while z >= _PAIR:
        more += _MORE[z & _PAIR_MASK]
        z >>= 14
    return more + _LAST[z]


shared_long: Final[Callable[[int], bytes]] = lru_cache(maxsize=1_024, typed=True)(long)
"""As `long`, for instants that many values of a batch have in common, such as the append time of their records."""


def int32(number: int) -> bytes:
    """An int; raises `ValueError` beyond 32 bits and `TypeError` for what is no whole number."""
    if not -_INT32_END <= number < _INT32_END:
        raise ValueError(f"{number} does not fit in 32 bits")
    return long(number)


def text(value: str) -> bytes:
    """A string; raises `ValueError` for one that is not Unicode (a lone surrogate)."""
    raw = value.encode()
    length = len(raw)
    return (_LAST[length << 1] if length < _SHORT else long(length)) + raw


def blob(value: bytes) -> bytes:
    """A byte string."""
    length = len(value)
    return (_LAST[length << 1] if length < _SHORT else long(length)) + value


def read_long(value: bytes, at: int) -> tuple[int, int]:
    """The long at `at`, and where the next field begins; raises `MalformedBodyError` or `IndexError`."""
    byte = value[at]
    if byte <= _LAST_BYTE_MAX:
        return (byte >> 1) ^ -(byte & 1), at + 1
    if at + INSTANT_BYTES > len(value):
        return _read_any_long(value, at)
    low, mid, high = three_pairs(value, at)
    if low & mid & _BOTH_MORE == _BOTH_MORE:
        if high & _BOTH_MORE == _FIRST_MORE:  # six bytes, as an instant of this age has
            z, at = _BITS[low] | _BITS[mid] << 14 | _BITS[high] << 28, at + 6
        elif high & _BOTH_MORE == _BOTH_MORE:
            return _read_any_long(value, at)
        else:
            z, at = _BITS[low] | _BITS[mid] << 14 | (high & 0x7F) << 28, at + 5
    elif not low & 0x8000:
        z, at = _BITS[low], at + 2
    elif not mid & 0x80:
        z, at = _BITS[low] | (mid & 0x7F) << 14, at + 3
    else:
        z, at = _BITS[low] | _BITS[mid] << 14, at + 4
    return (z >> 1) ^ -(z & 1), at


def _read_any_long(value: bytes, at: int) -> tuple[int, int]:
    z = shift = 0
    while True:
        byte = value[at]
        at += 1
        z |= (byte & 0x7F) << shift
        if byte <= _LAST_BYTE_MAX:
            break
        shift += 7
        if shift > 63:  # noqa: PLR2004  # ten bytes hold 64 bits
            raise MalformedBodyError("a number has more than ten bytes")
    if z >= _ZIGZAG_END:
        raise MalformedBodyError("a number does not fit in 64 bits")
    return (z >> 1) ^ -(z & 1), at


def read_int32(value: bytes, at: int) -> tuple[int, int]:
    """The int at `at`, and where the next field begins; raises as `read_long`."""
    number, at = read_long(value, at)
    if not -_INT32_END <= number < _INT32_END:
        raise MalformedBodyError(f"{number} does not fit in 32 bits")
    return number, at


def read_three_longs(value: bytes, at: int) -> tuple[int, int, int, int]:
    """Three longs in a row, and where the next field begins: as `read_long` thrice, faster for instants of this age."""
    if at + 3 * INSTANT_BYTES <= len(value):
        a, b, c, d, e, f, g, h, i = _nine_pairs(value, at)
        if a & b & d & e & g & h & _BOTH_MORE == _BOTH_MORE and c & f & i & 0x80 and not (c | f | i) & 0x8000:
            x = _BITS[a] | _BITS[b] << 14 | _BITS[c] << 28
            y = x if d == a and e == b and f == c else _BITS[d] | _BITS[e] << 14 | _BITS[f] << 28
            z = _BITS[g] | _BITS[h] << 14 | _BITS[i] << 28
            return (x >> 1) ^ -(x & 1), (y >> 1) ^ -(y & 1), (z >> 1) ^ -(z & 1), at + 3 * INSTANT_BYTES
    first, at = read_long(value, at)
    second, at = read_long(value, at)
    third, at = read_long(value, at)
    return first, second, third, at


def instant_of_pairs(low: int, mid: int, high: int) -> int:
    """The long in three pairs of bytes, read little-endian; -1 unless it takes all six, as an instant of this age."""
    if low & mid & _BOTH_MORE == _BOTH_MORE and high & _BOTH_MORE == _FIRST_MORE:
        z = _BITS[low] | _BITS[mid] << 14 | _BITS[high] << 28
        return (z >> 1) ^ -(z & 1)
    return -1


def read_blob(value: bytes, at: int) -> tuple[bytes, int]:
    """The byte string at `at`, and where the next field begins; raises as `read_long`.

    One that the end of `value` cuts short is returned short: then `at` is beyond the end, which the reader of the next
    field, or of the end, meets.
    """
    byte = value[at]
    if not byte & LONG_OR_NEGATIVE:
        end = at + 1 + (byte >> 1)
        return value[at + 1 : end], end
    length, at = read_long(value, at)
    if length < 0:
        raise MalformedBodyError(f"a length is {length}")
    return value[at : at + length], at + length


def read_text(value: bytes, at: int) -> tuple[str, int]:
    """The string at `at`, and where the next field begins; raises as `read_blob`, and `UnicodeDecodeError`."""
    byte = value[at]
    if byte & LONG_OR_NEGATIVE:
        raw, at = read_blob(value, at)
        return raw.decode(), at
    start = at + 1
    at = start + (byte >> 1)
    return value[start:at].decode(), at
