"""Events of several batches as those of one: order kept, neighbours joined where they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents.tokens import TokenBytes, TokenIds, pack_tokens

__all__ = ["merge_events"]


def merge_events(events: Iterable[Event]) -> list[Event]:
    """`events` in their order, with fewer of them: consecutive stores become one when they are alike
    and the blocks form one chain, consecutive removals when they are of the same place. Events that need
    no change are the same objects; none is mutated.
    """
    merged: list[Event] = []
    group: list[Event] = []
    for event in events:
        if group and not _joins(group[-1], event):
            merged.append(_joined(group))
            group = []
        group.append(event)
    if group:
        merged.append(_joined(group))
    return merged


def _joins(last: Event, event: Event) -> bool:
    if isinstance(last, BlockStored) and isinstance(event, BlockStored):
        return (
            last.block_hashes[-1:] == [event.parent_block_hash]
            and _identity(event) == _identity(last)
            and bool(len(event.token_ids)) == bool(len(last.token_ids))
        )
    if isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved):
        return _where(last) == _where(event)
    return isinstance(last, AllBlocksCleared) and isinstance(event, AllBlocksCleared)


def _identity(event: BlockStored) -> tuple[object, ...]:
    return (
        event.medium,
        event.block_size,
        event.lora_id,
        event.lora_name,
        event.cache_salt,
        event.session_id,
        event.extra_key,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.locality,
    )


def _where(event: BlockRemoved) -> tuple[object, ...]:
    return event.medium, event.group_idx, event.locality


def _joined(group: list[Event]) -> Event:
    first = group[0]
    if len(group) == 1 or isinstance(first, AllBlocksCleared):
        return first
    hashes: list[int | bytes] = []
    tokens: list[bytes] = []
    keys: list[Any] = []
    for event in group:
        assert not isinstance(event, AllBlocksCleared)
        hashes += event.block_hashes
        if isinstance(event, BlockStored):
            tokens.append(pack_tokens(event.token_ids))
            keys += event.extra_keys or [None] * len(event.block_hashes)
    if isinstance(first, BlockRemoved):
        return msgspec.structs.replace(first, block_hashes=hashes)
    joined = TokenIds(TokenBytes(b"".join(tokens)))
    told = keys if any(keys) else None
    return msgspec.structs.replace(first, block_hashes=hashes, token_ids=joined, extra_keys=told)
