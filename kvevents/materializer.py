"""From residency records to events: the owner of id → hash.

The sidecar runs it on what the link brings; a cache without a sidecar runs the same class.

M1  A record speaks only of ids that were told and not forgotten, and stores only new ids as new.
M2  A block is stored on a medium at most once at a time, and removed only from where it is.
M3  An id whose last copy is gone is forgotten.
M4  Events come in the order of the records. Consecutive records become one event only when kind,
    medium and namespace are the same and the blocks form one chain (for removals: the same medium).

A record that breaks M1 or M2 raises KVEventsError; what the materializer holds is then worthless until
the next Clear.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import msgspec

from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import (
    DIGEST_BYTES,
    BlockHash,
    HashFormat,
    block_digests,
    chain_seed,
    namespace_seed,
    wire_hash,
)
from kvevents.namespace import BASE, Namespace
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds

__all__ = ["FrozenRuns", "Materializer", "SavedRun"]

_BIT = {medium: 1 << i for i, medium in enumerate(StorageMedium)}
_ALL = (1 << len(_BIT)) - 1


class SavedRun(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Consecutive blocks as they are kept in a file. `media`: a byte for each, bit i for the i-th
    `StorageMedium`; 0 for a block that is forgotten. `hashes`: 8 bytes each, in the machine's order.
    """

    first_id: BlockId
    parent_hash: int | None
    namespace: Namespace
    tokens: bytes
    digests: bytes
    hashes: bytes
    media: bytes


class FrozenRuns:
    """What a materializer held at one moment, in runs that it no longer changes."""

    def __init__(self, runs: list[_Run], block_size: int) -> None:
        self._runs, self._block_size = runs, block_size

    def _live(self) -> Iterator[_Run]:
        return (run for run in self._runs if run.live)

    def saved(self) -> Iterator[SavedRun]:
        """The runs, parents before children; `Materializer.load` takes them."""
        for run in self._live():
            yield SavedRun(
                BlockId(run.first),
                run.parent_hash,
                run.space.namespace,
                run.tokens,
                run.digests,
                run.hashes.tobytes(),
                bytes(run.media),
            )

    def snapshot(self, blocks_per_event: int) -> Iterator[list[Event]]:
        """Events that tell all of it, parents before children on every medium; a list for each stretch
        of at most `blocks_per_event` blocks, one event for each medium that has it.
        """
        for run in self._live():
            for start, stop in run.stretches(blocks_per_event):
                media = run.media[start]
                yield [
                    _stretch_event(run, start, stop, medium, self._block_size)
                    for medium, bit in _BIT.items()
                    if media & bit
                ]


def _stretch_event(
    run: _Run, start: int, stop: int, medium: StorageMedium, block_size: int
) -> BlockStored:
    size, namespace = block_size * TOKEN_BYTES, run.space.namespace
    return BlockStored(
        block_hashes=list(run.hashes[start:stop]),
        parent_block_hash=run.parent_of(start),
        token_ids=TokenIds(TokenBytes(run.tokens[start * size : stop * size])),
        block_size=block_size,
        medium=medium,
        lora_name=namespace.lora_name,
        cache_salt=namespace.cache_salt,
        extra_key=namespace.extra_key,
    )


class _Space:
    """A namespace with its seeds, shared by all blocks in it."""

    __slots__ = ("chain_seed", "fold_seed", "namespace")

    def __init__(self, namespace: Namespace, hash_format: HashFormat) -> None:
        self.namespace = namespace
        self.chain_seed = chain_seed(namespace)
        self.fold_seed = namespace_seed(namespace, hash_format)


class _Run:
    """Consecutive blocks with consecutive ids: one chain, some of it possibly forgotten already.

    `freezes`: how often the materializer had been frozen when this was made for it alone.
    """

    __slots__ = (
        "digests",
        "first",
        "freezes",
        "hashes",
        "live",
        "media",
        "parent_hash",
        "space",
        "tokens",
    )

    def __init__(
        self,
        first: int,
        space: _Space,
        parent_hash: BlockHash | None,
        tokens: bytes,
        digests: bytes,
        hashes: array[int],
        media: bytearray,
        freezes: int,
    ) -> None:
        self.freezes = freezes
        self.first, self.space, self.parent_hash = first, space, parent_hash
        self.tokens, self.digests, self.hashes, self.media = tokens, digests, hashes, media
        self.live = len(media) - media.count(0)

    def parent_of(self, offset: int) -> BlockHash | None:
        return BlockHash(self.hashes[offset - 1]) if offset else self.parent_hash

    def cut(self, start: int, stop: int) -> _Run:
        """A copy of the blocks `start` to `stop`."""
        size = len(self.tokens) // len(self.media)
        return _Run(
            self.first + start,
            self.space,
            self.parent_of(start),
            self.tokens[start * size : stop * size],
            self.digests[start * DIGEST_BYTES : stop * DIGEST_BYTES],
            self.hashes[start:stop],
            self.media[start:stop],
            self.freezes,
        )

    def copy(self, freezes: int) -> _Run:
        """A copy that shares what never changes."""
        return _Run(
            self.first,
            self.space,
            self.parent_hash,
            self.tokens,
            self.digests,
            self.hashes,
            bytearray(self.media),
            freezes,
        )

    def stretches(self, longest: int) -> Iterator[tuple[int, int]]:
        """Starts and stops of what is on the same media, and on any."""
        start, media = 0, self.media
        while start < len(media):
            stop = start + 1
            while stop < len(media) and stop - start < longest and media[stop] == media[start]:
                stop += 1
            if media[start]:
                yield start, stop
            start = stop

    def empty(self) -> None:
        """Keep the place in the order of runs, and nothing else."""
        self.tokens = self.digests = b""
        self.hashes, self.media = array("q"), bytearray()


class Materializer:
    """Turns records into events. `block_size` is in tokens, the same for every block."""

    def __init__(self, block_size: int, hash_format: HashFormat = HashFormat.SGLANG) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self._block_size = block_size
        self._hash_format = hash_format
        self._spaces: dict[Namespace, _Space] = {}
        self._runs: list[_Run] = []
        """Live runs and, until the next sweep, forgotten ones, by ascending first id."""
        self._starts: list[int] = []
        self._freezes = 0
        self._dead = 0
        self._resident = 0
        self._counts = dict.fromkeys(StorageMedium, 0)
        self._out = _EventBuilder(block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks with a copy on at least one medium."""
        return self._resident

    def count(self, medium: StorageMedium) -> int:
        """Blocks with a copy on `medium`."""
        return self._counts[medium]

    def freeze(self) -> FrozenRuns:
        """What is held now; later records do not change it: they copy the runs that they change."""
        self._freezes += 1
        return FrozenRuns(self._runs.copy(), self._block_size)

    def load(self, saved: Iterable[SavedRun]) -> None:
        """Hold what `FrozenRuns.saved` gave, in place of what is held. Raises KVEventsError for runs that
        cannot be.
        """
        self._forget_all()
        for one in saved:
            count = len(one.media)
            sizes = (len(one.tokens), len(one.digests), len(one.hashes))
            needed = (self._block_size * TOKEN_BYTES, DIGEST_BYTES, 8)
            if not count or any(
                have != count * size for have, size in zip(sizes, needed, strict=True)
            ):
                raise KVEventsError(f"run of id {one.first_id}: {sizes} bytes for {count} blocks")
            if max(one.media) > _ALL or not any(one.media):
                raise KVEventsError(f"run of id {one.first_id}: it has blocks on no known medium")
            hashes = array("q", one.hashes)
            parent = None if one.parent_hash is None else BlockHash(one.parent_hash)
            if parent is not None and (not -(2**63) <= parent < 2**63 or parent == hashes[0]):
                raise KVEventsError(f"run of id {one.first_id}: {parent} cannot be its parent")
            space = self._space(one.namespace)
            media = bytearray(one.media)
            run = _Run(
                one.first_id,
                space,
                parent,
                one.tokens,
                one.digests,
                hashes,
                media,
                self._freezes,
            )
            self._add(run)
            self._resident += run.live
            for medium, bit in _BIT.items():
                self._counts[medium] += sum(1 for held in media if held & bit)

    def apply(self, records: Iterable[Record]) -> list[Event]:
        """The events of these records, in order. Raises KVEventsError (M1, M2)."""
        for record in records:
            match record:
                case StoreNew():
                    self._store_new(record)
                case StoreKnown():
                    self._store_known(record)
                case Remove():
                    for first, count in record.ranges:
                        self._remove(record.medium, first, count)
                case Clear():
                    self._forget_all()
                    self._out.clear()
        return self._out.take()

    # -------------------------------------------------------------------------------- records

    def _store_new(self, record: StoreNew) -> None:
        first, count = record.first_id, record.count
        if count < 1 or len(record.tokens) != count * self._block_size * TOKEN_BYTES:
            raise KVEventsError(
                f"store of id {first}: {len(record.tokens)} token bytes are not {count} blocks of"
                f" {self._block_size} tokens"
            )
        if record.parent_id is None:
            space = self._space(record.namespace or BASE)
            parent_hash, parent_digest = None, space.chain_seed
        else:
            run, offset = self._find(record.parent_id)
            space, parent_hash = run.space, BlockHash(run.hashes[offset])
            parent_digest = run.digests[offset * DIGEST_BYTES : (offset + 1) * DIGEST_BYTES]
        digests = list(block_digests(parent_digest, TokenBytes(record.tokens), self._block_size))
        hashes = array("q", (wire_hash(digest, space.fold_seed) for digest in digests))
        media = bytearray([_BIT[record.medium]]) * count
        joined, freezes = b"".join(digests), self._freezes
        run = _Run(first, space, parent_hash, record.tokens, joined, hashes, media, freezes)
        self._add(run)
        self._resident += count
        self._counts[record.medium] += count
        self._out.stored(record.medium, run, 0, count)

    def _store_known(self, record: StoreKnown) -> None:
        bit = _BIT[record.medium]
        for run, start, stop in self._spans(record.first_id, record.count):
            for offset in range(start, stop):
                held = run.media[offset]
                if not held or held & bit:
                    what = "is on it already" if held else "is forgotten"
                    raise KVEventsError(f"store on {record.medium}: id {run.first + offset} {what}")
                run.media[offset] = held | bit
            self._counts[record.medium] += stop - start
            self._out.stored(record.medium, run, start, stop)

    def _remove(self, medium: StorageMedium, first: int, count: int) -> None:
        bit = _BIT[medium]
        for run, start, stop in reversed(list(self._spans(first, count))):
            gone = 0
            for offset in range(start, stop):
                held = run.media[offset]
                if not held & bit:
                    raise KVEventsError(
                        f"remove from {medium}: id {run.first + offset} is not there"
                    )
                run.media[offset] = held & ~bit
                gone += held == bit
            self._counts[medium] -= stop - start
            self._out.removed(medium, run.hashes[start:stop])
            if gone:
                self._forget(run, gone)

    # ------------------------------------------------------------------------------------ runs

    def _space(self, namespace: Namespace) -> _Space:
        found = self._spaces.get(namespace)
        if found is None:
            found = self._spaces[namespace] = _Space(namespace, self._hash_format)
        return found

    def _locate(self, block_id: int) -> int:
        """The place in `_runs` of the run that holds this id."""
        place = bisect_right(self._starts, block_id) - 1
        if place >= 0:
            run = self._runs[place]
            if run.live and block_id < run.first + len(run.media):
                return place
        raise KVEventsError(f"id {block_id} is unknown or forgotten")

    def _find(self, block_id: int) -> tuple[_Run, int]:
        run = self._runs[self._locate(block_id)]
        offset = block_id - run.first
        if not run.media[offset]:
            raise KVEventsError(f"id {block_id} is forgotten")
        return run, offset

    def _spans(self, first: int, count: int) -> Iterable[tuple[_Run, int, int]]:
        """The pieces of runs that make up a range of ids, ascending. They may be changed."""
        if count < 1:
            raise KVEventsError(f"range of ids {first}+{count}: a range has at least one")
        spans = []
        while count:
            run = self._own(self._locate(first))
            start = first - run.first
            stop = min(start + count, len(run.media))
            spans.append((run, start, stop))
            first, count = first + stop - start, count - (stop - start)
        return spans

    def _own(self, place: int) -> _Run:
        """The run at this place, which is no frozen state's."""
        run = self._runs[place]
        if run.freezes != self._freezes:
            run = self._runs[place] = run.copy(self._freezes)
        return run

    def _add(self, run: _Run) -> None:
        last = self._runs[-1] if self._runs else None
        if last is None or run.first >= last.first + len(last.media):
            self._runs.append(run)
            self._starts.append(run.first)
            return
        place = bisect_right(self._starts, run.first)
        before = self._runs[place - 1] if place else None
        after = self._runs[place] if place < len(self._runs) else None
        if (before and before.live and run.first < before.first + len(before.media)) or (
            after and after.live and after.first < run.first + len(run.media)
        ):
            raise KVEventsError(f"store of id {run.first}: it is known already")
        self._runs.insert(place, run)
        self._starts.insert(place, run.first)

    def _forget(self, run: _Run, count: int) -> None:
        """`count` more blocks of `run` have no copy left; give their memory back before long."""
        self._resident -= count
        run.live -= count
        if not run.live:
            run.empty()
            self._dead += 1
            if self._dead > 32 and self._dead * 2 > len(self._runs):
                self._sweep()
        elif run.live * 2 < len(run.media):
            self._shrink(run)

    def _shrink(self, run: _Run) -> None:
        """Replace a mostly forgotten run by the pieces that live."""
        pieces, start = [], None
        for offset, held in enumerate(run.media):
            if held and start is None:
                start = offset
            elif not held and start is not None:
                pieces.append(run.cut(start, offset))
                start = None
        if start is not None:
            pieces.append(run.cut(start, len(run.media)))
        place = self._runs.index(run, bisect_right(self._starts, run.first) - 1)
        self._runs[place : place + 1] = pieces
        self._starts[place : place + 1] = [piece.first for piece in pieces]

    def _sweep(self) -> None:
        self._runs = [run for run in self._runs if run.live]
        self._starts = [run.first for run in self._runs]
        self._dead = 0
        used = {run.space.namespace for run in self._runs}
        self._spaces = {name: space for name, space in self._spaces.items() if name in used}

    def _forget_all(self) -> None:
        self._runs, self._starts, self._spaces = [], [], {}
        self._dead = self._resident = 0
        self._counts = dict.fromkeys(StorageMedium, 0)


class _EventBuilder:
    """Collects events, joining what M4 lets it join."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []
        self._medium: StorageMedium | None = None
        self._space: _Space | None = None
        self._parent: BlockHash | None = None
        self._hashes: list[int | bytes] = []
        self._tokens: list[bytes] = []

    def stored(self, medium: StorageMedium, run: _Run, start: int, stop: int) -> None:
        parent = run.parent_of(start)
        joins = (
            self._space is run.space
            and self._medium is medium
            and bool(self._hashes)
            and parent == self._hashes[-1]
        )
        if not joins:
            self._close()
            self._medium, self._space, self._parent = medium, run.space, parent
        self._hashes.extend(run.hashes[start:stop])
        whole = stop - start == len(run.media)
        size = self._block_size * TOKEN_BYTES
        self._tokens.append(run.tokens if whole else run.tokens[start * size : stop * size])

    def removed(self, medium: StorageMedium, hashes: array[int]) -> None:
        if self._space is not None or self._medium is not medium:
            self._close()
            self._medium = medium
        hashes.reverse()
        self._hashes.extend(hashes)

    def clear(self) -> None:
        self._close()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._hashes:
            if self._space is None:
                self._events.append(BlockRemoved(self._hashes, self._medium))
            else:
                self._events.append(self._stored_event(self._space.namespace))
        self._hashes, self._tokens, self._medium, self._space = [], [], None, None

    def _stored_event(self, namespace: Namespace) -> BlockStored:
        tokens = self._tokens[0] if len(self._tokens) == 1 else b"".join(self._tokens)
        return BlockStored(
            block_hashes=self._hashes,
            parent_block_hash=self._parent,
            token_ids=TokenIds(TokenBytes(tokens)),
            block_size=self._block_size,
            medium=self._medium,
            lora_name=namespace.lora_name,
            cache_salt=namespace.cache_salt,
            extra_key=namespace.extra_key,
        )
