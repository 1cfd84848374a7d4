"""Canonical CBOR (RFC 8949, 4.2) of the plain values that block hashes are made of."""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["array_head", "encode"]

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in (0, 1, 2, 3, 4))
_SHORT = 24
_NAN = b"\xf9\x7e\x00"
_WIDTHS = ((1, 24), (2, 25), (4, 26), (8, 27))
_FLOATS = ((b"\xf9", ">e"), (b"\xfa", ">f"), (b"\xfb", ">d"))


def encode(value: object) -> bytes:
    """None, bool, int of 64 bits, float, str, bytes, and lists or tuples of these.

    Raises TypeError for anything else, ValueError for an int that is wider, UnicodeEncodeError for half a
    surrogate pair and RecursionError for lists that are too deep.
    """
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
        case float():
            return _float(value)
        case str():
            text = value.encode()
            return _head(_TEXT, len(text)) + text
        case bytes():
            return _head(_BYTES, len(value)) + value
        case list() | tuple():
            return array_head(len(value)) + b"".join(map(encode, value))
    raise TypeError(f"{type(value).__name__} has no canonical form here")


def array_head(length: int) -> bytes:
    """What comes before so many elements."""
    return _head(_ARRAY, length)


def encode_ints(values: Sequence[int]) -> bytes:
    """The same as `encode` of a list of ints that are not negative."""
    return array_head(len(values)) + b"".join([_head(_UNSIGNED, one) for one in values])


def _head(major: int, number: int) -> bytes:
    if number < _SHORT:
        return bytes((major | number,))
    for width, code in _WIDTHS:
        if number < 1 << 8 * width:
            return bytes((major | code,)) + number.to_bytes(width, "big")
    raise ValueError(f"{number} takes more than 64 bits")


def _float(value: float) -> bytes:
    """In the fewest bytes that say the same."""
    if value != value:
        return _NAN
    for code, form in _FLOATS:
        try:
            packed = struct.pack(form, value)
        except OverflowError:
            continue
        if struct.unpack(form, packed)[0] == value:
            return code + packed
    raise AssertionError("a float is 64 bits wide")
