"""A stretch of a store's blocks as a store of its own."""

from __future__ import annotations

import msgspec

from kvevents.events import BlockStored, StorageMedium
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds, pack_tokens

__all__ = ["piece_of"]


def piece_of(
    event: BlockStored, start: int, stop: int, medium: StorageMedium | None = None
) -> BlockStored:
    """Blocks `start` to `stop` of `event`, on `medium` if that is given; itself when nothing differs."""
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
    keys = event.extra_keys
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[start:stop],
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        token_ids=tokens,
        medium=medium,
        extra_keys=None if keys is None else keys[start:stop],
    )
