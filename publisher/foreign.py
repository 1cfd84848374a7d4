"""What a foreign engine holds, and of its events those that keep our stream sound.

An engine's own events are repetitive, incomplete or odd at times, and more so to one who joins midway.
What comes out here:

F1  A block is stored on a medium only while it is not on it, and removed only while it is.
F2  A stored block's parent is None or held, on whichever medium, and never the block itself.
F3  Hashes are signed 64-bit integers, media are named, and tokens are whole blocks of the worker's size.
F4  An event has at least one block. One that needs no change comes out as the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import BlockHash, canonical_hash
from kvevents.index import BlockIndex
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds, pack_tokens

__all__ = ["ForeignCounts", "ForeignState"]

_BITS = {medium: 1 << position for position, medium in enumerate(StorageMedium)}


@dataclass(slots=True)
class ForeignCounts:
    """Blocks that events told of and that were dropped, by why.

    `orphans`: the parent is not held, or is the block itself. `malformed`: tokens that are not one block
    each or no u32, a name that is too long, an event whose first block is its own parent.
    `wrong_block_size`: not the worker's.
    """

    stored_again: int = 0
    orphans: int = 0
    removed_unknown: int = 0
    malformed: int = 0
    wrong_block_size: int = 0


class _Index(BlockIndex):
    """An index that says where a block is."""

    def media_of(self, block_hash: BlockHash) -> int:
        """Bit i is set for the i-th `StorageMedium`; 0 for a block that is not held."""
        held = self._blocks.get(block_hash)
        return 0 if held is None else held.media


class ForeignState:
    """Of one rank. `block_size` is the worker's."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self._block_size = block_size
        self.other_block_size: int | None = None
        """The last block size told that is not the worker's."""
        self._index = _Index()
        self.counts = ForeignCounts()

    @property
    def index(self) -> BlockIndex:
        """What is held, as told by the events that came out."""
        return self._index

    def apply(self, events: Iterable[Event]) -> list[Event]:
        """Take an engine's events, in order; those to publish (F1-F4). Never raises for what they say."""
        told: list[Event] = []
        for event in events:
            match event:
                case BlockStored():
                    told += self._store(event)
                case BlockRemoved():
                    told += self._remove(event)
                case AllBlocksCleared():
                    self._index.clear()
                    told.append(event)
        return told

    def clear(self) -> None:
        """Forget everything but the counts."""
        self._index.clear()

    # ---------------------------------------------------------------------------------- stores

    def _store(self, event: BlockStored) -> list[Event]:
        hashes = [canonical_hash(value) for value in event.block_hashes]
        raw_parent = event.parent_block_hash
        parent = None if raw_parent is None else canonical_hash(raw_parent)
        packed = self._sound_tokens(event, hashes, parent)
        if packed is None:
            return []
        medium = StorageMedium.GPU if event.medium is None else event.medium
        plain = parent == raw_parent and hashes == event.block_hashes
        told: list[Event] = []
        for start, stop in self._new_runs(hashes, parent, _BITS[medium]):
            before = hashes[start - 1] if start else parent
            whole = stop - start == len(hashes)
            if whole and event.medium is not None and plain:
                told.append(event)
                continue
            step = self._block_size * TOKEN_BYTES
            text = TokenBytes(packed[start * step : stop * step])
            told.append(
                msgspec.structs.replace(
                    event,
                    block_hashes=list[int | bytes](hashes[start:stop]),
                    parent_block_hash=before,
                    token_ids=TokenIds(text),
                    medium=medium,
                )
            )
        self._index.apply(told)
        return told

    def _sound_tokens(
        self, event: BlockStored, hashes: list[BlockHash], parent: BlockHash | None
    ) -> TokenBytes | None:
        """The event's tokens, packed; None when it is no sound store (F3), which is counted."""
        if event.block_size != self._block_size:
            self.counts.wrong_block_size += len(hashes)
            self.other_block_size = event.block_size
            return None
        try:
            packed = pack_tokens(event.token_ids)
            Namespace(event.lora_name, event.cache_salt, event.extra_key)
        except (TypeError, ValueError):
            packed = None
        needed = len(hashes) * self._block_size * TOKEN_BYTES
        if packed is None or len(packed) != needed or (hashes and parent == hashes[0]):
            self.counts.malformed += len(hashes)
            return None
        return packed

    def _new_runs(
        self, hashes: list[BlockHash], parent: BlockHash | None, bit: int
    ) -> list[tuple[int, int]]:
        """The stretches, each (start, stop), of blocks that come to the medium and whose parents are
        held.
        """
        media_of = self._index.media_of
        runs: list[tuple[int, int]] = []
        new: set[BlockHash] = set()
        start: int | None = None
        for position, block_hash in enumerate(hashes):
            again = block_hash in new or bool(media_of(block_hash) & bit)
            placed = parent is None or parent in new or bool(media_of(parent))
            orphan = not placed or parent == block_hash
            self.counts.stored_again += again
            self.counts.orphans += orphan and not again
            if not again and not orphan:
                new.add(block_hash)
                start = position if start is None else start
            elif start is not None:
                runs.append((start, position))
                start = None
            parent = block_hash
        return runs if start is None else [*runs, (start, len(hashes))]

    # -------------------------------------------------------------------------------- removals

    def _remove(self, event: BlockRemoved) -> list[Event]:
        left: dict[BlockHash, int] = {}
        gone: dict[StorageMedium, list[int | bytes]] = {}
        wanted = _BITS if event.medium is None else {event.medium: _BITS[event.medium]}
        for value in event.block_hashes:
            block_hash = canonical_hash(value)
            held = left.get(block_hash, self._index.media_of(block_hash))
            left[block_hash] = held
            for medium, bit in wanted.items():
                if held & bit:
                    left[block_hash] &= ~bit
                    gone.setdefault(medium, []).append(block_hash)
            if left[block_hash] == held:
                self.counts.removed_unknown += 1
        told: list[Event] = [BlockRemoved(hashes, medium) for medium, hashes in gone.items()]
        if told == [event]:
            told = [event]
        self._index.apply(told)
        return told
