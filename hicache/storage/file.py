"""Pages in a directory of local files, one file a page.

The index of what is stored is in memory: it is read from the files' trailers at the start, and nobody
else changes the files meanwhile. Somebody who does loses pages, and is found out when they are read.

F1  What is stored is closed: a page's parent is stored too, or it starts a prompt. So pages are given up
    from the ends of prompts, the least recently used first, and a lost page takes along all behind it.
F2  Only the writing thread changes files. The reading thread takes what it finds damaged out of the index
    and leaves the file to the writing thread, which does not touch one that was stored again by then.
F3  The index's lock is never held while a file is read, written or removed.
F4  A page that is written may take the file of one that was given up, which then is no more: a reader
    who is in it still finds another page, or a mixture, whose checksum is wrong.

The checksums of large pages are computed by a third thread, as far ahead of the writing one as it comes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from hicache.arguments import check_kind
from hicache.background import BackgroundThread
from hicache.node import PageIndices
from hicache.pool import HostPool
from hicache.storage.backend import StorageError, StorageStats, StoredPage
from hicache.storage.chains import Chains, Entry
from hicache.storage.keys import KeyScheme, PageFormat, file_keys
from hicache.storage.page_file import PASSING, BadPage, page_sum
from hicache.storage.page_folder import PageFolder
from hicache.tier import Tier

__all__ = ["FileStorage"]

_LARGE = 256 << 10
"""Bytes whose checksum takes longer than to pass it on."""


class _Refused(Exception):
    """A page that is not stored, though nothing is wrong with the file system. The message says why."""


class FileStorage:
    """Pages that outlive the process, on a file system; a `StorageBackend`.

    `max_bytes`: the files' size together, None for no bound. `min_free_bytes`: what is left free on the
    file system. To stay within both, the least recently used pages go, but never those of the prompt
    that is being stored. After a restart a page counts as used when it was written.

    It holds the directory from here on, until `close`, which the cache that it is given to calls too;
    that cache needs a host pool. Reads every file's trailer before it returns. Raises StorageError for
    bounds out of range, and for a directory that cannot be had: not writable, or held by another store of
    the same format; TypeError.
    """

    tier = Tier.DISK
    audit_interval_s: float | None = None

    def __init__(
        self,
        directory: Path | str,
        form: PageFormat,
        *,
        max_bytes: int | None = None,
        min_free_bytes: int = 1 << 30,
        keys: Callable[[PageFormat], KeyScheme] = file_keys,
    ) -> None:
        check_kind("form", form, PageFormat)
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"directory: {directory!r} is not a path")
        for name, value, low in (
            ("max_bytes", max_bytes, 1),
            ("min_free_bytes", min_free_bytes, 0),
        ):
            if name == "max_bytes" and value is None:
                continue
            if not isinstance(value, int | float):
                raise TypeError(f"{name}: {value!r} is not a number")
            if not value >= low:
                raise StorageError(f"{name}: {value} is below {low}")
        self.stats = StorageStats()
        self._form = form
        self._pool: HostPool | None = None
        self._max_bytes, self._min_free_bytes = max_bytes, min_free_bytes
        self._lock = threading.Lock()
        self._chains = Chains()
        self._lost: deque[bytes] = deque()
        self._closing = False
        self._cleared = 0
        self._folder = PageFolder(directory, form, keys)
        try:
            self._restore()
        except OSError as error:
            self._folder.close()
            raise StorageError(f"directory: {directory}: {error}") from None
        self._writer = BackgroundThread("kv-storage-write")
        self._summer = BackgroundThread("kv-storage-sum")
        self._reader = BackgroundThread("kv-storage-read")

    def attach(self, pool: HostPool) -> None:
        """Called once, before all else. Raises StorageError for a pool of another format."""
        if self._pool is not None:
            raise StorageError("attach: the store has a cache already, or had: open another")
        self._form.check(pool)
        self._pool = pool

    def held(self) -> list[StoredPage]:
        """All that is stored, parents before children."""
        with self._lock:
            return self._chains.pages()

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        """How many leading keys are stored. A use of them; no I/O, but waits for earlier `get`s."""
        return self._reader.submit(self._guarded, self._exists_prefix, tuple(keys))

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        """Store pages; how many leading ones are stored now. Stops at one whose parent is not.

        The host pages must not change until the future is done. Raises ValueError for host pages that
        are not one for each page, in the pool.
        """
        contents = self._contents(len(pages), host_pages)
        return self._writer.submit(self._put, tuple(pages), contents, self._cleared)

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        """Fill host pages; how many leading ones have their bytes now. A use of them.

        Raises ValueError for host pages that are not one for each key, in the pool.
        """
        contents = self._contents(len(keys), host_pages)
        return self._reader.submit(self._get, tuple(keys), contents)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Remove pages; how many have no file any more. What follows them in a prompt is lost."""
        return self._writer.submit(self._guarded, self._delete, tuple(keys))

    def clear(self) -> None:
        """Forget every page at once: none is found any more, not even after a crash, and no earlier `put`
        stores one. The space is free as soon as the writing thread comes to it, before any later `put`.

        In a directory shared with others' files the pages' files are removed one by one, then. After
        `close` the directory may be another store's: the index is empty, and the files stay.
        """
        with self._lock:
            self._cleared += 1
            self._chains, old = Chains(), self._chains
            self._lost.clear()
        if self._closing:
            return
        keys: list[bytes] = []
        try:
            if not self._folder.set_aside():
                keys = [entry.page.key for entry in old.order()]
        except OSError as error:
            self._note(f"clear: {error}")
            keys = [entry.page.key for entry in old.order()]
        self._writer.submit(self._guarded, self._remove_all, keys)

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        """Look for the files of pages, and report what is lost; how many."""
        return self._writer.submit(self._guarded, self._audit, tuple(keys))

    def take_lost(self) -> list[bytes]:
        """Keys that are not stored any more, though nobody deleted them; children before parents."""
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def close(self) -> None:
        """Finish the page at hand, cancel the rest, and let others have the directory."""
        self._closing = True
        self._reader.close()
        self._writer.close()
        self._summer.close()
        self._folder.close()

    # ------------------------------------------------------------------------- the reading thread

    def _exists_prefix(self, keys: Sequence[bytes]) -> int:
        return len(self._use_prefix(keys))

    def _get(self, keys: Sequence[bytes], contents: list[memoryview]) -> int:
        entries = self._use_prefix(keys)
        filled = 0
        for entry, content in zip(entries, contents, strict=False):
            if not self._fill(entry, content):
                break
            filled += 1
        with self._lock:
            self.stats.read += filled
            self.stats.failed_gets += len(entries) - filled
        return filled

    def _fill(self, entry: Entry, content: memoryview) -> bool:
        try:
            self._folder.read(entry.page.key, entry.num_bytes, content)
        except BadPage as error:
            self._lose(entry, f"get: {error}", num_rejected=1)
        except OSError as error:
            if error.errno in PASSING:
                self._note(f"get: {error}")
            else:
                self._lose(entry, f"get: {error}")
        except Exception as error:  # no future raises
            self._note(f"get: {error!r}")
        else:
            return True
        return False

    def _use_prefix(self, keys: Sequence[bytes]) -> list[Entry]:
        with self._lock:
            entries = self._chains.prefix(keys)
            self._chains.use(keys[: len(entries)])
            return entries

    # ------------------------------------------------------------------------- the writing thread

    def _put(self, pages: Sequence[StoredPage], contents: list[memoryview], cleared: int) -> int:
        reason = "put: lost again meanwhile"
        sums = self._summed(pages, contents)
        try:
            self._make_room(pages)
            for page, content in zip(pages, contents, strict=True):
                if self._closing:
                    raise _Refused("the store is being closed")
                if cleared != self._cleared:
                    raise _Refused("cleared meanwhile")
                self._store(page, content, cleared, sums.get(page.key))
        except Exception as error:  # no future raises
            reason = f"put: {error if isinstance(error, (OSError, _Refused)) else repr(error)}"
        self._folder.trim()
        for one in sums.values():
            one.cancel()
        stored = self._use_prefix([page.key for page in pages])
        num_stored = len(stored) if cleared == self._cleared else 0
        if num_stored < len(pages):
            self._note(reason)
        with self._lock:
            self.stats.failed_puts += len(pages) - num_stored
        return num_stored

    def _summed(
        self, pages: Sequence[StoredPage], contents: list[memoryview]
    ) -> dict[bytes, Future[int]]:
        """The checksums of those that are to be written, where they are large."""
        if self._form.bytes_per_page < _LARGE:
            return {}
        with self._lock:
            new = {page.key for page in self._storable(pages)}
        return {
            page.key: self._summer.submit(page_sum, content)
            for page, content in zip(pages, contents, strict=True)
            if page.key in new
        }

    def _store(
        self, page: StoredPage, content: memoryview, cleared: int, checksum: Future[int] | None
    ) -> None:
        with self._lock:
            if page.key in self._chains:
                return
            if not self._chains.has_parent(page):
                raise _Refused(f"the page before {page.key.hex()} is not stored")
        size, room = self._folder.size_of(page), self._room(1)
        if size > room:
            raise _Refused(f"no room for {size} bytes within max_bytes and min_free_bytes")
        self._folder.write(page, content, checksum.result if checksum else None)
        with self._lock:
            closed = self._chains.has_parent(page) and cleared == self._cleared
            if closed:
                self._chains.add(page, size)
                self.stats.written += 1
        if not closed:
            self._folder.remove(page.key)
            raise _Refused(f"the page before {page.key.hex()} was lost meanwhile")

    def _make_room(self, pages: Sequence[StoredPage]) -> None:
        """Evict until the pages fit, or as many leading ones as can. Raises OSError."""
        with self._lock:
            chain = self._chains.use([key for page in pages for key in page[:2] if key])
            evictable = self._chains.num_bytes - self._chains.size_of(chain)
            new = self._storable(pages)
        count, needed = 0, 0
        for size in map(self._folder.size_of, new):
            if needed + size > self._room(count + 1) + evictable:
                break
            count, needed = count + 1, needed + size
        while count and needed > self._room(count) and self._evict_one(chain):
            pass

    def _storable(self, pages: Sequence[StoredPage]) -> list[StoredPage]:
        """The new ones among the leading pages that are stored or follow one that will be."""
        new: dict[bytes, StoredPage] = {}
        for page in pages:
            if page.key in self._chains:
                continue
            if not self._chains.has_parent(page) and page.parent not in new:
                break
            new[page.key] = page
        return list(new.values())

    def _evict_one(self, chain: set[bytes]) -> bool:
        """Give up the least recently used page, unless it is of `chain`. Raises OSError."""
        with self._lock:
            oldest = self._chains.oldest()
        if oldest is None or oldest.page.key in chain:
            return False
        self._folder.spare(oldest.page.key)
        with self._lock:
            if self._chains.get(oldest.page.key) is oldest:
                self._report(self._chains.drop(oldest.page.key))
                self.stats.evicted += 1
        return True

    def _room(self, num_pages: int) -> int:
        """Bytes that the files of so many pages can have together now. Raises OSError."""
        free = self._folder.free_bytes(num_pages) - self._min_free_bytes
        if self._max_bytes is None:
            return free
        return min(free, self._max_bytes - self._chains.num_bytes)

    def _delete(self, keys: Sequence[bytes]) -> int:
        asked = set(keys)
        with self._lock:
            gone = [entry for key in keys for entry in self._chains.drop(key)]
            behind = [entry for entry in gone if entry.page.key not in asked]
            self._report(behind)
            self.stats.lost += len(behind)
        left = [entry.page.key for entry in gone if not self._removed(entry.page.key)]
        return len(keys) - len(asked.intersection(left))

    def _audit(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            entries = [entry for key in keys if (entry := self._chains.get(key))]
        return sum(
            self._lose(entry, "audit: a file is gone or has another length")
            for entry in entries
            if not self._folder.has(entry.page.key, entry.num_bytes)
        )

    def _remove_unless_stored(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self._lock:
                stored = key in self._chains  # again; only this thread could have
            if not stored:
                self._removed(key)

    def _remove_all(self, keys: Sequence[bytes]) -> int:
        self._folder.remove_aside()
        return sum(map(self._removed, keys))

    def _removed(self, key: bytes) -> bool:
        try:
            self._folder.remove(key)
        except OSError as error:
            self._note(f"remove: {error}")
            return False
        return True

    # --------------------------------------------------------------------------------------- both

    def _lose(self, entry: Entry, reason: str, num_rejected: int = 0) -> int:
        """A page cannot be had: forget it and what follows it, if it is this entry still; how many."""
        with self._lock:
            if self._chains.get(entry.page.key) is not entry:
                return 0
            gone = self._chains.drop(entry.page.key)
            self._report(gone)
            self.stats.lost += len(gone)
            self.stats.rejected += num_rejected
            self.stats.last_error = reason
        keys = [one.page.key for one in gone]
        self._writer.submit(self._remove_unless_stored, keys)
        return len(gone)

    def _guarded(self, call: Callable[[Sequence[bytes]], int], keys: Sequence[bytes]) -> int:
        try:
            return call(keys)
        except Exception as error:  # no future raises
            self._note(f"{call.__name__}: {error!r}")
            return 0

    def _report(self, gone: list[Entry]) -> None:
        self._lost.extend(entry.page.key for entry in gone)

    def _note(self, reason: str) -> None:
        with self._lock:
            self.stats.last_error = reason

    def _contents(self, num_pages: int, host_pages: PageIndices) -> list[memoryview]:
        pool = self._pool
        if pool is None:
            raise ValueError("attach: there is no pool yet")
        if len(host_pages) != num_pages:
            raise ValueError(f"host_pages: {len(host_pages)} for {num_pages} pages")
        if host_pages and not 0 <= min(host_pages) <= max(host_pages) < pool.num_pages:
            raise ValueError(f"host_pages: not all in 0..{pool.num_pages - 1}")
        return [pool.page(page) for page in host_pages]

    def _restore(self) -> None:
        """Fill the index from the files, and give up what is unreachable or too much."""
        self._folder.remove_aside()
        found, self.stats.rejected = self._folder.scan()
        for page in self._chains.restore(found):
            self._folder.remove(page.key)
            self.stats.lost += 1
        while self._max_bytes is not None and self._chains.num_bytes > self._max_bytes:
            self._evict_one(set())
        self._folder.trim()
        self._lost.clear()  # nobody believed in them
