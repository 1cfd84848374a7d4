"""Stretches of a store's blocks, and a store without its tokens."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvevents.events import BlockStored, StorageMedium
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds, pack_tokens

__all__ = ["piece_of", "runs_of", "without_tokens"]

_NO_TOKENS: tuple[int, ...] = ()


def piece_of(
    event: BlockStored, start: int, stop: int, medium: StorageMedium | None = None
) -> BlockStored:
    """Blocks `start` to `stop` of `event`, on `medium` if that is given; itself when nothing differs.

    Extra keys are left out where none of these blocks has any.
    """
    if medium is None:
        medium = event.medium
    if stop - start == len(event.block_hashes) and medium is event.medium:
        return event
    tokens = event.token_ids
    if len(tokens):
        size = event.block_size
        if isinstance(tokens, TokenIds):
            step = size * TOKEN_BYTES
            tokens = TokenIds(TokenBytes(pack_tokens(tokens)[start * step : stop * step]))
        else:
            tokens = tokens[start * size : stop * size]
    keys = event.extra_keys[start:stop] if event.extra_keys else []
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[start:stop],
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        token_ids=tokens,
        medium=medium,
        extra_keys=keys if any(keys) else None,
    )


def runs_of(wanted: Iterable[bool]) -> list[tuple[int, int]]:
    """Where `wanted` is True: each stretch as (start, stop), in order."""
    runs: list[tuple[int, int]] = []
    start: int | None = None
    for position, is_wanted in enumerate([*wanted, False]):
        if is_wanted:
            start = position if start is None else start
        elif start is not None:
            runs.append((start, position))
            start = None
    return runs


def without_tokens(event: BlockStored) -> BlockStored:
    """`event` with its tokens left out; itself when it has none."""
    return msgspec.structs.replace(event, token_ids=_NO_TOKENS) if len(event.token_ids) else event
