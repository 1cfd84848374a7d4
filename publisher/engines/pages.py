"""Pages in files, and what is told of them as DISK, for an engine that stores pages by their hashes.

Tokens and parents come from the engine's events (publisher.engines.disk): a page of which no event was
seen is kept all the same, and is not told.

D1  A page is told as stored once it is, and as removed when it is not any more, in this order.
D2  A page is kept behind the one before it or at a prompt's start; behind one that is not kept it is not
    kept either. Where neither the engine's events nor its prefix keys tell which, it counts as a start.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path

import torch

from hicache.background import BackgroundThread
from hicache.pool import HostPool
from hicache.storage import FileStorage, PageFormat, StoredPage
from kvevents.events import BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import BlockHash, wire_hash
from kvevents.merge import merge_events
from kvevents.namespace import BASE, Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds
from publisher.engines.disk import MEETING, KnownBlock, Meeting
from publisher.host_log import host_log
from publisher.once import Once

__all__ = ["ToldPages"]

_STAGING_BYTES = 64 << 20
"""Of pages on their way in, and as many on their way out."""
_CALL_PAGES = 128
"""SGLang asks for no more at once."""
_TOLD_BLOCKS = 256
"""In one batch."""
_NO_PUBLISHER = 'this process has no publisher "sidecar"'

_log = host_log("kvevents.engines")


class ToldPages:
    """A FileStorage, and what is told of it. Any thread. Raises StorageError as FileStorage does.

    `told`: whether a publisher is to be in this process, so that without one it is said.
    """

    def __init__(
        self,
        directory: Path | str,
        form: PageFormat,
        *,
        max_bytes: int | None = None,
        min_free_bytes: int = 1 << 30,
        told: bool = True,
        meeting: Meeting = MEETING,
    ) -> None:
        self._meeting, self._is_told = meeting, told
        self._store = FileStorage(
            directory, form, max_bytes=max_bytes, min_free_bytes=min_free_bytes
        )
        self._page_size = form.page_size
        self._step = max(1, min(_CALL_PAGES, _STAGING_BYTES // form.bytes_per_page))
        self._pool = HostPool(2 * self._step, form.page_size, form.shape)
        self._pages = self._pool.raw.view(2 * self._step, -1)
        self._store.attach(self._pool)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        """Of the first half of the staging pages, and of the second."""
        self._telling = threading.Lock()
        """Of what follows, and of the order in which things are told (D1)."""
        self._by_hash = {wire_hash(page.key, None): page.key for page in self._store.held()}
        """What is stored. Who only looks needs no lock."""
        self._coming: set[bytes] = set()
        """Pages of the `put` under way that were not lost again."""
        self._closed = False
        self._said = Once()
        self._teller = BackgroundThread("kv-storage-tell")
        self._meeting.join_storage(self)

    # --------------------------------------------------------------------------------- storing

    def exists_prefix(self, keys: list[bytes]) -> int:
        """How many leading keys are stored; none once it is closed, as with all that follows."""
        return _result(self._store.exists_prefix(keys))

    def read(self, keys: list[bytes], fill: Callable[[int, torch.Tensor], None]) -> int:
        """Call `fill` with each leading page's place and bytes, which are there until it returns."""
        done = 0
        with self._reading:
            for start in range(0, len(keys), self._step):
                part = keys[start : start + self._step]
                staged = array("q", range(self._step, self._step + len(part)))
                filled = _result(self._store.get(part, staged))
                for place in range(filled):
                    fill(start + place, self._pages[self._step + place])
                done += filled
                if filled < len(part):
                    break
        self._tell_lost()
        return done

    def write(
        self, keys: list[bytes], prefix: list[bytes] | None, page: Callable[[int], torch.Tensor]
    ) -> int:
        """Store pages that follow each other; how many leading ones are. `prefix`: what is before them,
        its last page at least; empty at a prompt's start, None where it is not known.
        """
        done = 0
        with self._writing:
            named, known = self._named(keys, prefix)
            for start in range(0, len(named), self._step):
                part = named[start : start + self._step]
                for place in range(len(part)):
                    content = page(start + place).contiguous().view(torch.uint8)
                    self._pages[place].copy_(content.flatten())
                stored = self._put(part, known[start:])
                done += stored
                if stored < len(part):
                    break
        return done

    def _named(
        self, keys: list[bytes], prefix: list[bytes] | None
    ) -> tuple[list[StoredPage], list[KnownBlock | None]]:
        """The pages in full, up to the first behind one that is not stored (D2)."""
        named: list[StoredPage] = []
        known = [self._meeting.known.get(wire_hash(key, None)) for key in keys]
        before = prefix[-1] if prefix else None
        for key, block in zip(keys, known, strict=True):
            if block is None:
                named.append(StoredPage(key, before, BASE, b""))
            else:
                parent = block.parent
                if parent is None:
                    before = None
                elif before is None or wire_hash(before, None) != parent:
                    before = self._by_hash.get(BlockHash(parent))
                    if before is None:
                        break
                named.append(StoredPage(key, before, block.namespace, block.tokens))
            before = key
        return named, known

    def _put(self, pages: list[StoredPage], known: list[KnownBlock | None]) -> int:
        with self._telling:
            self._coming = {page.key for page in pages}
        stored = _result(self._store.put(pages, array("q", range(len(pages)))))
        with self._telling:
            self._take_lost()
            events: list[Event] = []
            for page, block in zip(pages[:stored], known, strict=False):
                if page.key not in self._coming:
                    continue
                block_hash = wire_hash(page.key, None)
                self._by_hash[block_hash] = page.key
                if block is not None:
                    events.append(self._stored(block_hash, block.parent, page))
            self._coming = set()
            if not self._closed:
                self._meeting.tell(merge_events(events))
        if stored and self._is_told and not self._meeting.has_publisher:
            self._say("pages are stored, and no router hears of them: %s", _NO_PUBLISHER)
        if stored < len(pages) and not self._closed:
            reason = self._store.stats.last_error.removeprefix("put: ")
            self._say("pages were not stored: %s", reason)
        return stored

    def _say(self, message: str, reason: str) -> None:
        """Each kind once: what begins alike, as numbers and paths come last."""
        kind = " ".join(reason.split()[:3])
        if self._said.is_new(kind):
            _log.warning(message, reason)

    def clear(self) -> None:
        with self._writing, self._telling:
            gone = [wire_hash(page.key, None) for page in reversed(self._store.held())]
            self._store.clear()
            self._by_hash.clear()
            self._tell_removed(gone)

    # --------------------------------------------------------------------------------- telling

    def tell_all(self) -> None:
        """Have all that is stored told, by another thread."""
        self._teller.submit(self._tell_all)

    def _tell_all(self) -> None:
        with self._telling:
            if self._closed:
                return
            self._take_lost()
            events: list[Event] = []
            for page in self._store.held():
                if len(page.tokens) == self._page_size * TOKEN_BYTES:
                    parent = None if page.parent is None else wire_hash(page.parent, None)
                    events.append(self._stored(wire_hash(page.key, None), parent, page))
            for start in range(0, len(events), _TOLD_BLOCKS):
                self._meeting.tell(merge_events(events[start : start + _TOLD_BLOCKS]))

    def _tell_lost(self) -> None:
        with self._telling:
            self._take_lost()

    def _take_lost(self) -> None:
        lost = self._store.take_lost()
        self._coming.difference_update(lost)
        gone = [wire_hash(key, None) for key in lost]
        for block_hash in gone:
            self._by_hash.pop(block_hash, None)
        self._tell_removed(gone)

    def _tell_removed(self, gone: list[BlockHash]) -> None:
        for start in range(0, len(gone), _TOLD_BLOCKS):  # all at once is more than a link may hold
            part = gone[start : start + _TOLD_BLOCKS]
            self._meeting.tell([BlockRemoved([*part], StorageMedium.DISK)])

    def _stored(self, block_hash: BlockHash, parent: int | None, page: StoredPage) -> BlockStored:
        space: Namespace = page.namespace
        return BlockStored(
            [block_hash],
            parent,
            TokenIds(TokenBytes(page.tokens)),
            self._page_size,
            None,
            StorageMedium.DISK,
            space.lora_name,
            space.cache_salt,
            None,
            space.extra_key,
        )

    def close(self) -> None:
        """The pages stay; an engine that goes on without them has none: they are told as removed."""
        with self._telling:
            self._closed = True
            if self._meeting.leave_storage(self):
                self._tell_removed([*reversed(self._by_hash)])
        self._teller.close()
        self._store.close()


def _result(future: Future[int]) -> int:
    """0 for a call that the store's end has cancelled."""
    try:
        return future.result()
    except CancelledError:
        return 0
