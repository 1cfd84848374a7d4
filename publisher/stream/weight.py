"""About how much memory is taken by a batch that is kept, its payload and what that says.

Counted, not measured, so that the same batches weigh the same in every process: the sizes are those of
CPython 3.11 to 3.13, and a fifth more for what an allocator cannot use.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.columns import Columns
from kvevents.events import BlockRemoved, BlockStored, Event
from kvevents.tokens import TOKEN_BYTES, TokenIds

__all__ = ["weight"]

_BATCH, _COLUMNS, _EVENT = 150, 450, 500
_HASH = 48
"""A place in a list and an int."""
_KEYS = 350
"""Those of a block, of the usual length."""
_TOKEN = 36
"""The same, of tokens that are not packed."""


def weight(payload: bytes, events: Sequence[Event]) -> int:
    """Bytes."""
    if type(events) is Columns:
        size = _COLUMNS + len(events.packed) + _HASH * (len(events.hashes) + len(events.counts))
    else:
        size = 0
        for event in events:
            if type(event) is BlockStored:
                tokens = event.token_ids
                each = TOKEN_BYTES if type(tokens) is TokenIds else _TOKEN
                size += _EVENT + _HASH * len(event.block_hashes) + each * len(tokens)
                if event.extra_keys:
                    size += _KEYS * len(event.extra_keys)
            elif type(event) is BlockRemoved:
                size += _EVENT + _HASH * len(event.block_hashes)
    return (_BATCH + len(payload) + size) * 6 // 5
