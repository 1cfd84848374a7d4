"""Token sequences as little-endian u32 bytes: compared, sliced, hashed and sent without a loop."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NewType, overload

__all__ = ["MAX_TOKEN", "TOKEN_BYTES", "TokenBytes", "TokenIds", "pack_tokens"]

TokenBytes = NewType("TokenBytes", bytes)
"""Token ids, four bytes each, little-endian."""

TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1
_SWAP = sys.byteorder == "big"


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids over packed bytes; equal to any sequence of the same ids.

    Events carry this instead of a list: a list of 64 ids takes 2.5 KB, this 300 bytes.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: TokenBytes) -> None:
        self.packed = packed

    def tolist(self) -> list[int]:
        """The ids as a new list."""
        return _unpack(self.packed).tolist()

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(_unpack(self.packed))  # by index, as Sequence does it, each id unpacks all

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = _unpack(self.packed)[index]
        return found.tolist() if isinstance(found, array) else found

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        if isinstance(other, Sequence):
            return self.tolist() == list(other)
        return NotImplemented

    def __repr__(self) -> str:
        return repr(self.tolist())


def pack_tokens(tokens: Any) -> TokenBytes:
    """Return `tokens` as `TokenBytes`.

    Takes bytes that are packed already, arrays, numpy arrays, torch tensors and sequences of ints;
    one dimension. A u32 array costs one copy, anything else one pass in C. Raises TypeError for
    what is not a sequence of ints, ValueError for an id below 0 or above 2**32 - 1.
    """
    if type(tokens) is list:  # first, and at once: of a block's tokens the calls take half the time
        ids = array("I")
        try:
            ids.fromlist(tokens)  # a third faster than the constructor
        except (OverflowError, TypeError):
            _explain(tokens)
            raise
        if _SWAP:
            ids.byteswap()
        return ids.tobytes()  # type: ignore[return-value]
    if isinstance(tokens, TokenIds):
        return tokens.packed
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens: {len(tokens)} packed bytes are not a multiple of 4")
        return TokenBytes(tokens)
    if hasattr(tokens, "detach"):
        tokens = _from_tensor(tokens)
    if hasattr(tokens, "astype"):
        return _from_numpy(tokens)
    if isinstance(tokens, array) and tokens.typecode == "I" and not _SWAP:
        return TokenBytes(tokens.tobytes())
    return _from_ints(tokens)


def _unpack(packed: bytes) -> array[int]:
    ids = array("I", packed)
    if _SWAP:
        ids.byteswap()
    return ids


def _from_tensor(tensor: Any) -> Any:
    if tensor.dim() != 1:
        raise ValueError(f"tokens: shape {tuple(tensor.shape)} is not one-dimensional")
    if tensor.is_floating_point():
        raise TypeError(f"tokens: dtype {tensor.dtype} is not an integer type")
    host = tensor.detach().cpu()
    try:
        return host.numpy()
    except RuntimeError:  # torch works without numpy
        return host.tolist()


def _from_numpy(values: Any) -> TokenBytes:
    if values.ndim != 1:
        raise ValueError(f"tokens: shape {values.shape} is not one-dimensional")
    if values.dtype.kind not in "iu":
        raise TypeError(f"tokens: dtype {values.dtype} is not an integer type")
    if values.size and values.dtype.str != "<u4":
        for position in (int(values.argmin()), int(values.argmax())):
            _check(int(values[position]), position)
    return TokenBytes(values.astype("<u4", copy=False).tobytes())


def _from_ints(tokens: Any) -> TokenBytes:
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytearray, memoryview)):
        raise TypeError(f"tokens: {type(tokens).__name__} is not a sequence of ints")
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        _explain(tokens)
        raise
    if _SWAP:
        packed.byteswap()
    return TokenBytes(packed.tobytes())


def _explain(tokens: Sequence[Any]) -> None:
    """Raise the error that names the first id that cannot be packed."""
    for position, token in enumerate(tokens):
        try:
            value = operator.index(token)
        except TypeError:
            raise TypeError(f"tokens[{position}]: {token!r} is not an int") from None
        _check(value, position)


def _check(token: int, position: int) -> None:
    if not 0 <= token <= MAX_TOKEN:
        raise ValueError(f"tokens[{position}]: {token} is not in 0..{MAX_TOKEN}") from None
