"""vLLM's extra keys: what a block's hash covers besides its tokens, one entry a block.

An entry is None or a list: of names, digests, offsets, and lists of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["check_extra_keys", "has_own_keys"]

_MAX_DEPTH: Final = 4
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def check_extra_keys(value: object, blocks: int) -> None:
    """Raises TypeError or ValueError unless `value` is one entry for each of `blocks` blocks, made of
    what the wire can carry: None, bool, int, float, str, bytes, and lists of these.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{type(value).__name__} is not a list")
    if len(value) != blocks:
        raise ValueError(f"{len(value)} entries for {blocks} blocks")
    for position, entry in enumerate(value):
        if entry is None:
            continue
        if not isinstance(entry, (list, tuple)):
            raise TypeError(f"[{position}]: {type(entry).__name__} is neither None nor a list")
        try:
            _check_plain(entry, 1)
        except (TypeError, ValueError) as error:
            raise type(error)(f"[{position}]: {error}") from None


def has_own_keys(entry: Sequence[Any] | None, lora_name: str | None) -> bool:
    """Whether a block's entry says more than the adapter's name, which vLLM puts there too."""
    return any(key != lora_name for key in entry or ())


def _check_plain(value: object, depth: int) -> None:
    kind = type(value)
    if value is None or kind is bool or kind is bytes:
        return
    if kind is str:
        try:
            value.encode()  # type: ignore[attr-defined]  # it is a string
        except UnicodeEncodeError as error:
            raise ValueError(f"{value!r} cannot be encoded: {error.reason}") from None
    elif kind is int:
        if not _INT_MIN <= value <= _INT_MAX:  # type: ignore[operator]  # it is an int
            raise ValueError(f"{value} is not in {_INT_MIN}..{_INT_MAX}")
    elif kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]  # it is a float
            raise ValueError(f"{value} is not finite")
    elif isinstance(value, (list, tuple)):
        if depth > _MAX_DEPTH:
            raise ValueError(f"lists are more than {_MAX_DEPTH} deep")
        for inner in value:
            _check_plain(inner, depth + 1)
    else:
        raise TypeError(f"{kind.__name__} is no plain value")
