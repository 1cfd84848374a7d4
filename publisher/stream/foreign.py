"""What a foreign engine holds, and of its events those that keep our stream sound.

An engine's own events are repetitive, incomplete or odd at times, and more so to one who joins midway.
What comes out here:

F1  A block is stored on a medium only while it is not on it, and removed only while it is.
F2  A held block's parent is None or held, on whichever medium, and never the block itself: a block that
    leaves its last medium takes those behind it along.
F3  Hashes are signed 64-bit integers, media are named, and tokens are whole blocks of the worker's size.
F4  An event has at least one block, no empty name or list in place of none, and no keys for each block
    that are none of any. One that needs no change comes out as the same object.
F5  Of a hybrid model's KV cache groups one comes out, the main one, and without its number: what another
    group stores or removes touches nothing. The main group is the first that is told to be of full
    attention; until one is, it is group 0. Events without a group are always of the main one.
F6  Of blocks that the engine says are not its own nothing comes out.
F7  A held block is what it was when it came: the same parent, tokens, namespace, adapter and extra keys
    are told of it on every medium, whatever the engine says meanwhile.
F8  What comes out depends on what is held, not on how it came to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvevents.behind import Behind
from kvevents.block import Block
from kvevents.columns import Columns
from kvevents.events import (
    FULL_ATTENTION,
    LOCAL,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StorageMedium,
    medium_of,
)
from kvevents.extra_keys import check_extra_keys
from kvevents.hashing import BlockHash, are_canonical, canonical_hash
from kvevents.index import BlockIndex
from kvevents.merge import merge_events
from kvevents.namespace import Namespace
from kvevents.pieces import piece_of, runs_of
from kvevents.tokens import TOKEN_BYTES, pack_tokens
from publisher.link.packed import MAX_GROUP

__all__ = ["ForeignCounts", "ForeignState"]

_BITS = {medium: 1 << position for position, medium in enumerate(StorageMedium)}


@dataclass(slots=True)
class ForeignCounts:
    """Blocks that events told of and that were dropped, by why.

    `orphans`: the parent is not held, or is the block itself. `malformed`: tokens that are not one block
    each or no u32, a name that is too long, extra keys that cannot be sent, an event whose first block is
    its own parent; and no tokens, where the block is on no other medium. `wrong_block_size`: not the
    worker's. `other_groups`: of a KV cache group that is not the main one, removals too.
    `removed_with_parent`: blocks that had come out, and that the engine may still hold (F2). `remote`:
    held by another, removals too.
    """

    stored_again: int = 0
    orphans: int = 0
    removed_unknown: int = 0
    malformed: int = 0
    wrong_block_size: int = 0
    other_groups: int = 0
    removed_with_parent: int = 0
    remote: int = 0


class Groups(msgspec.Struct, frozen=True, array_like=True):
    """What is known of KV cache groups (F5). `guessed`: blocks came out because their group is 0."""

    main: int | None = None
    guessed: bool = False


class _Index(BlockIndex):
    """An index that can be asked for one block, and for those behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._behind = Behind()

    def clear(self) -> None:
        super().clear()
        self._behind.clear()

    def _put(self, block_hash: BlockHash, block: Block) -> None:
        BlockIndex._put(self, block_hash, block)
        if block.parent is not None:
            self._behind.add(block.parent, block_hash)

    def _store_new(self, event: BlockStored) -> bool:
        if not super()._store_new(event):
            return False
        hashes, parent = event.block_hashes, event.parent_block_hash
        if parent is not None:
            self._behind.add(canonical_hash(parent), canonical_hash(hashes[0]))
        if len(hashes) > 1 and are_canonical(hashes):
            self._behind.add_chain(hashes)
        return True

    def _store_columns(self, columns: Columns) -> bool:
        if not super()._store_columns(columns):
            return False
        at, firsts = 0, columns.hashes
        if len(columns) != len(firsts):
            firsts = []
            for count in columns.counts:
                chain = columns.hashes[at : at + count]
                firsts.append(chain[0])
                self._behind.add_chain(chain)
                at += count
        self._behind.add_all(columns.parents, firsts)
        return True

    def store_plain(self, event: BlockStored) -> bool:
        """Store blocks that are new, and told as we write it, behind one that is held (F1-F4). False, and
        nothing done, for any other.
        """
        return (
            event.group_idx is None
            and event.kv_cache_spec_kind is None
            and event.locality is None
            and self._store_new(event)
        )

    def remove_last(self, event: BlockRemoved) -> bool:
        """Remove blocks that are on this medium alone, each with nothing behind it by then. False, and
        nothing done, for any other.
        """
        hashes, medium = event.block_hashes, event.medium
        if (
            medium is None
            or event.group_idx is not None
            or event.locality is not None
            or not are_canonical(hashes)
        ):
            return False
        blocks, bit, behind = self._blocks, _BITS[medium], self._behind
        going: set[BlockHash] = set()
        for block_hash in hashes:
            held = blocks.get(block_hash)
            if held is None or held.media != bit or block_hash in going:
                return False
            if not going.issuperset(behind.of(block_hash)):
                return False
            going.add(block_hash)
        self.apply([event])
        return True

    def _drop(self, block_hash: BlockHash, block: Block) -> None:
        super()._drop(block_hash, block)
        if block.parent is not None:
            self._behind.discard(block.parent, block_hash)

    def with_behind(self, block_hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """These blocks, which are held, and all behind them, each before its parent."""
        all_of_them = self._walk(block_hashes)
        first = [name for name in all_of_them if self._blocks[name].parent not in all_of_them]
        return list(reversed(self._walk(first)))

    def _walk(self, start: Iterable[BlockHash]) -> dict[BlockHash, None]:
        found: dict[BlockHash, None] = {}
        left = list(start)
        while left:
            block_hash = left.pop()
            if block_hash not in found:
                found[block_hash] = None
                left += self._behind.of(block_hash)
        return found

    def block(self, block_hash: BlockHash) -> Block | None:
        """None for a block that is not held."""
        return self._blocks.get(block_hash)

    def media_of(self, block_hash: BlockHash) -> int:
        """Bit i is set for the i-th `StorageMedium`; 0 for a block that is not held."""
        held = self._blocks.get(block_hash)
        return 0 if held is None else held.media

    def told_on(self, block_hash: BlockHash, medium: StorageMedium) -> BlockStored:
        """A block that is held, as if stored on `medium`."""
        return msgspec.structs.replace(self._chain_events([block_hash])[0], medium=medium)


class ForeignState:
    """Of one rank. `block_size` is the worker's."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self._block_size = block_size
        self.other_block_size: int | None = None
        """The last block size told that is not the worker's."""
        self._index = _Index()
        self.groups = Groups()
        self.counts = ForeignCounts()
        self._orphans_at_clear = 0

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self._block_size

    @property
    def orphans_since_clear(self) -> int:
        """How many of `counts.orphans` came after all was last forgotten."""
        return self.counts.orphans - self._orphans_at_clear

    def count_from_here(self) -> None:
        """Begin all counts at 0."""
        self.counts, self._orphans_at_clear = ForeignCounts(), 0

    @property
    def index(self) -> BlockIndex:
        """What is held, as told by the events that came out."""
        return self._index

    def apply(self, events: Iterable[Event], group: int | None = None) -> Sequence[Event]:
        """Take an engine's events, in order; those to publish (F1-F8). Never raises for what they say.

        Columns that are sound as a whole come out as they are. `group`: of columns, the KV cache group
        that all their events are of, if it was named.
        """
        index = self._index
        if group is not None and type(events) is Columns and not self._takes(events, group):
            return []
        if type(events) is Columns and events.block_size == self._block_size:
            if index._store_columns(events):
                return events
            events = events.events
        told: list[Event] = []
        for event in events:
            if isinstance(event, BlockStored):
                if index.block_size == self._block_size and index.store_plain(event):
                    told.append(event)
                    continue
            elif isinstance(event, BlockRemoved) and index.remove_last(event):
                told.append(event)
                continue
            if not isinstance(event, AllBlocksCleared) and event.locality not in LOCAL:
                self.counts.remote += len(event.block_hashes)
                continue
            match event:
                case BlockStored():
                    told += self._choose_group(event.group_idx, event.kv_cache_spec_kind)
                    if self._is_main(event.group_idx, len(event.block_hashes)):
                        told += self._store(event)
                case BlockRemoved():
                    if self._is_main(event.group_idx, len(event.block_hashes)):
                        told += self._remove(event)
                case AllBlocksCleared():
                    self._index.clear()
                    self._orphans_at_clear = self.counts.orphans
                    self.groups = Groups(self.groups.main)
                    told.append(event)
        return told

    def clear(self) -> None:
        """Forget everything but the counts."""
        self._index.clear()
        self._orphans_at_clear = self.counts.orphans
        self.groups = Groups()

    # ---------------------------------------------------------------------------------- groups

    def _takes(self, columns: Columns, group: int) -> bool:
        """Whether these are of the main group; counted if not. Their kind is not known."""
        if max(columns.counts) > 0:
            self._choose_group(group, None)
        return self._is_main(group, len(columns.hashes))

    def _choose_group(self, group: int | None, kind: str | None) -> list[Event]:
        """See whether a store's is the main group, and forget what came of another in its place."""
        known = self.groups
        if known.main is not None or group is None:
            return []
        if kind in FULL_ATTENTION and 0 <= group <= MAX_GROUP:
            self.groups = Groups(group)
            if group != 0 and known.guessed:
                self._index.clear()
                return [AllBlocksCleared()]
        elif group == 0 and not known.guessed:
            self.groups = Groups(guessed=True)
        return []

    def _is_main(self, group: int | None, num_blocks: int) -> bool:
        """Whether it is the main group; what these blocks are counted for if not."""
        if group is None or group == (self.groups.main or 0):
            return True
        self.counts.other_groups += num_blocks
        return False

    # ---------------------------------------------------------------------------------- stores

    def _store(self, event: BlockStored) -> list[Event]:
        hashes = [canonical_hash(value) for value in event.block_hashes]
        raw_parent = event.parent_block_hash
        parent = None if raw_parent is None else canonical_hash(raw_parent)
        medium = medium_of(event)
        told: list[Event]
        if not self._is_of_our_size(event):
            return []
        if hashes and not len(event.token_ids):
            told = self._told_without_tokens(hashes, medium)
        elif not self._is_sound(event, hashes, parent):
            return []
        else:
            event = _plain(event, hashes, parent, medium)
            runs = self._new_runs(hashes, parent, _BITS[medium])
            told = [piece for run in runs for piece in self._as_held(event, *run)]
        self._index.apply(told)
        return told

    def _is_of_our_size(self, event: BlockStored) -> bool:
        """Whether its blocks are of the worker's size; counted if not. Who tells no tokens may tell 0."""
        size = event.block_size
        if size == self._block_size or (size == 0 and not len(event.token_ids)):
            return True
        self.counts.wrong_block_size += len(event.block_hashes)
        self.other_block_size = size
        return False

    def _is_sound(
        self, event: BlockStored, hashes: list[BlockHash], parent: BlockHash | None
    ) -> bool:
        """Whether it is a store that can be published (F3); counted if not."""
        sound = len(event.token_ids) == len(hashes) * self._block_size
        sound = sound and not (hashes and parent == hashes[0])
        try:
            pack_tokens(event.token_ids)
            Namespace(event.lora_name, event.cache_salt, event.extra_key)
            if event.extra_keys:
                check_extra_keys(event.extra_keys, len(hashes))
        except (TypeError, ValueError):
            sound = False
        self.counts.malformed += 0 if sound else len(hashes)
        return sound

    def _as_held(self, event: BlockStored, start: int, stop: int) -> Iterator[Event]:
        """Those of its blocks; which are held already as what they are held (F7)."""
        names = [canonical_hash(value) for value in event.block_hashes[start:stop]]
        held = [(at, self._index.block(name)) for at, name in enumerate(names, start)]
        told = _blocks_of(event) if any(block for _, block in held) else []
        for at, block in held:
            if block is not None and msgspec.structs.replace(block, media=0) != told[at]:
                if start < at:
                    yield piece_of(event, start, at)
                yield self._index.told_on(names[at - stop], medium_of(event))
                start = at + 1
        if start < stop:
            yield piece_of(event, start, stop)

    def _told_without_tokens(self, hashes: list[BlockHash], medium: StorageMedium) -> list[Event]:
        """Blocks that come to `medium` from another, told by their hashes alone and in any order, as
        vLLM's offloading does: what they are is what the index has of them.
        """
        told: dict[BlockHash, Event] = {}
        for block_hash in hashes:
            held = self._index.block(block_hash)
            if held is None:
                self.counts.malformed += 1
            elif held.media & _BITS[medium] or block_hash in told:
                self.counts.stored_again += 1
            elif held.parent is not None and not self._index.media_of(held.parent):
                self.counts.orphans += 1
            else:
                told[block_hash] = self._index.told_on(block_hash, medium)
        return merge_events(told.values())

    def _new_runs(
        self, hashes: list[BlockHash], parent: BlockHash | None, bit: int
    ) -> list[tuple[int, int]]:
        """The stretches, each (start, stop), of blocks that come to the medium and whose parents are
        held.
        """
        media_of = self._index.media_of
        come: list[bool] = []
        new: set[BlockHash] = set()
        for block_hash in hashes:
            again = block_hash in new or bool(media_of(block_hash) & bit)
            placed = parent is None or parent in new or bool(media_of(parent))
            orphan = not placed or parent == block_hash
            self.counts.stored_again += again
            self.counts.orphans += orphan and not again
            come.append(not again and not orphan)
            if come[-1]:
                new.add(block_hash)
            parent = block_hash
        return runs_of(come)

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
        last = [name for name, media in left.items() if not media and self._index.media_of(name)]
        doomed = self._index.with_behind(last)
        self.counts.removed_with_parent += len(doomed) - len(last)
        told: list[Event]
        if len(doomed) == len(last) and len(gone) <= 1:
            told = [BlockRemoved(hashes, medium) for medium, hashes in gone.items()]
        else:
            told = self._in_order(left, doomed)
        if told == [event]:
            told = [event]
        self._index.apply(told)
        return told

    def _in_order(self, left: dict[BlockHash, int], doomed: list[BlockHash]) -> list[Event]:
        """Removals that leave of blocks what is `left` and of the doomed nothing, which come last and in
        their order: no block outlives its parent.
        """
        told: list[Event] = []
        going = dict.fromkeys(doomed, 0)
        staying = {name: media for name, media in left.items() if name not in going}
        for name, media in (staying | going).items():
            gone = self._index.media_of(name) & ~media
            told += [BlockRemoved([name], medium) for medium, bit in _BITS.items() if gone & bit]
        return merge_events(told)


def _blocks_of(event: BlockStored) -> list[Block]:
    """Each of its blocks, as told; on no medium."""
    namespace = Namespace(event.lora_name, event.cache_salt, event.extra_key)
    names: list[int | bytes | None] = [event.parent_block_hash, *event.block_hashes]
    parents = [None if name is None else canonical_hash(name) for name in names[:-1]]
    keys = event.extra_keys or [None] * len(parents)
    packed, step = pack_tokens(event.token_ids), event.block_size * TOKEN_BYTES
    return [
        Block(
            parent,
            packed[at * step : (at + 1) * step],
            keys[at] or None,
            namespace,
            event.lora_id,
            0,
        )
        for at, parent in enumerate(parents)
    ]


def _plain(
    event: BlockStored,
    hashes: list[BlockHash],
    parent: BlockHash | None,
    medium: StorageMedium,
) -> BlockStored:
    """The event as we write it; itself when it is."""
    named = event.medium is not None and "" not in (
        event.lora_name,
        event.cache_salt,
        event.extra_key,
    )
    keys = event.extra_keys if event.extra_keys and any(event.extra_keys) else None
    whole = event.group_idx is None and event.kv_cache_spec_kind is None
    whole = whole and event.locality is None and keys == event.extra_keys
    signed = parent == event.parent_block_hash and hashes == event.block_hashes
    if named and whole and signed:
        return event
    return msgspec.structs.replace(
        event,
        block_hashes=list[int | bytes](hashes),
        parent_block_hash=parent,
        medium=medium,
        lora_name=event.lora_name or None,
        cache_salt=event.cache_salt or None,
        extra_key=event.extra_key or None,
        extra_keys=keys,
        group_idx=None,
        kv_cache_spec_kind=None,
        locality=None,
    )
