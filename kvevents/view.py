"""What one dialect tells of the events: some media, some of them as one, some namespaces.

V1  A block is stored on a told medium when it comes to the first of the media told as that one, and
    removed when it has left the last.
V2  A block whose namespace the dialect cannot tell is left out, and so is every block after it.
V3  What is told is a function of what is held, not of how it came to be: the state told anew, from
    AllBlocksCleared on, gives the same.
V4  Events that need no change come out as the same objects; where all are told as they are, so does the
    list. Where a dialect leaves tokens out, no token comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvevents.columns import Columns
from kvevents.dialect import NAMESPACES, Dialect
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StorageMedium,
    medium_of,
)
from kvevents.extra_keys import has_own_keys
from kvevents.hashing import BlockHash, canonical_hash
from kvevents.pieces import piece_of, runs_of, without_tokens

__all__ = ["View"]

_BIT = {medium: 1 << position for position, medium in enumerate(StorageMedium)}


class View:
    """Of one stream. Events name their medium, and hashes are ints; none is mutated."""

    def __init__(self, dialect: Dialect) -> None:
        first = {text: medium for medium, text in reversed(dialect.media)}
        self._told = {medium: first[text] for medium, text in dialect.media}
        """By medium that is told: the one it is told as."""
        self._group = dict.fromkeys(self._told.values(), 0)
        """By medium that is told as such: the bits of those told as it."""
        for medium, told in self._told.items():
            self._group[told] |= _BIT[medium]
        self._unspoken = tuple(name for name in NAMESPACES if name not in dialect.namespaces)
        self._media: dict[BlockHash, int] = {}
        """Of blocks on media told as one with others: bits of those they are on."""
        self._hidden: dict[BlockHash, int] = {}
        """Of blocks that are left out for their namespace: bits of the media they are on."""
        self._redacts = not dialect.token_ids and dialect.event_form != "mooncake"
        """Whether tokens are left out. A store's objects have none, and are named by them."""
        self.left_out = 0
        """Events of which nothing was told."""
        whole = len(self._group) == len(StorageMedium) and not self._unspoken
        self.plain = whole and not self._redacts
        """Whether every event is told as it is."""

    def apply(self, events: Sequence[Event]) -> Sequence[Event]:
        """What of these events is told."""
        if self.plain or (type(events) is Columns and self._tells_columns(events)):
            return events
        told: list[Event] = []
        for event in events:
            before = len(told)
            match event:
                case BlockStored():
                    told += self._store(event)
                case BlockRemoved():
                    told += self._remove(event)
                case AllBlocksCleared():
                    self._media.clear()
                    self._hidden.clear()
                    told.append(event)
            self.left_out += len(told) == before
        if not self._redacts:
            return told
        return [without_tokens(one) if isinstance(one, BlockStored) else one for one in told]

    def _tells_columns(self, columns: Columns) -> bool:
        """Whether they are told as they are: in no namespace, and behind nothing that is left out."""
        return (
            not self._redacts
            and not self._hidden
            and self._group.get(columns.medium) == _BIT[columns.medium]
        )

    def _store(self, event: BlockStored) -> Iterator[Event]:
        medium = medium_of(event)
        spoken = self._spoken(event)
        for raw in event.block_hashes[spoken:]:
            block_hash = canonical_hash(raw)
            self._hidden[block_hash] = self._hidden.get(block_hash, 0) | _BIT[medium]
        if not spoken:
            return
        event = piece_of(event, 0, spoken)
        told = self._told.get(medium)
        if told is None:
            return
        if self._group[told] == _BIT[medium]:
            yield event
            return
        come: list[bool] = []
        for raw in event.block_hashes:
            block_hash = canonical_hash(raw)
            held = self._media.get(block_hash, 0)
            self._media[block_hash] = held | _BIT[medium]
            come.append(not held & self._group[told])
        for start, stop in runs_of(come):
            yield piece_of(event, start, stop, told)

    def _spoken(self, event: BlockStored) -> int:
        """How many of its blocks, from the first on, can be told (V2)."""
        parent = event.parent_block_hash
        if parent is not None and canonical_hash(parent) in self._hidden:
            return 0
        for name in self._unspoken:
            if name == "extra_keys":
                for position, keys in enumerate(event.extra_keys or ()):
                    if has_own_keys(keys, event.lora_name):
                        return position
            elif getattr(event, name) is not None:
                return 0
        return len(event.block_hashes)

    def _remove(self, event: BlockRemoved) -> Iterator[Event]:
        medium = medium_of(event)
        told = self._told.get(medium)
        alone = told is None or self._group[told] == _BIT[medium]
        if alone and not self._hidden:
            if told is not None:
                yield event
            return
        left: list[int | bytes] = []
        for raw in event.block_hashes:
            block_hash = canonical_hash(raw)
            if block_hash in self._hidden:
                _drop(self._hidden, block_hash, _BIT[medium])
            elif alone or not self._stays(block_hash, medium):
                left.append(raw)
        if told is None or not left:
            return
        if told is medium and len(left) == len(event.block_hashes):
            yield event
        else:
            yield msgspec.structs.replace(event, block_hashes=left, medium=told)

    def _stays(self, block_hash: BlockHash, medium: StorageMedium) -> bool:
        """Note that a block has left `medium`; whether it is on another that is told as the same."""
        _drop(self._media, block_hash, _BIT[medium])
        return bool(self._media.get(block_hash, 0) & self._group[self._told[medium]])


def _drop(media: dict[BlockHash, int], block_hash: BlockHash, bit: int) -> None:
    left = media.get(block_hash, 0) & ~bit
    if left:
        media[block_hash] = left
    else:
        media.pop(block_hash, None)
