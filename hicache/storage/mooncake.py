"""Pages in a Mooncake Store, which the memory of many workers makes up and all of them share.

M1  A page is one object, or two for a scheme that names K and V apart; it is there if all of them are.
M2  A page that was read counts only if it is still there afterwards. A worker that deletes it meanwhile
    gives its memory to others: 27 of 1200 pages read across processes were torn, none of those was there
    afterwards. Within a worker no page is read while others are deleted. What is left: another worker
    deletes a page, fills its memory and puts the page again, all within one read.
M3  A page that was put stays believed in until it is deleted, or reported as lost. The store evicts
    without a word, and says of a killed worker's pages for 10 s that they exist: `audit` and `get` tell.
    A page that `get` could not have is removed before it is put again.

When the master is away, calls fail within seconds, then at once, until it is back. A master that starts
anew knows no page; workers join it again within a second or two by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import ParamSpec

from hicache.background import BackgroundThread
from hicache.node import PageIndices
from hicache.pool import HostPool
from hicache.storage.backend import StorageError, StorageStats, StoredPage
from hicache.storage.keys import KeyScheme, PageFormat, default_keys
from hicache.storage.mooncake_client import (
    NOT_FOUND,
    OK,
    TRANSFER_FAILED,
    MooncakeClient,
    MooncakeConfig,
    Part,
    meaning,
)
from hicache.tier import Tier

__all__ = ["MooncakeConfig", "MooncakeStorage"]

Args = ParamSpec("Args")

_CLOSE_TIMEOUT_S = 10.0
_GROUPED = ("_k", "_v")
"""How names end that SGLang's scheme gives: those it also groups, page by page."""


class MooncakeStorage:
    """Pages shared by workers, on their memory; a `StorageBackend`.

    A page that is there keeps its bytes, whoever puts it again. `delete` deletes for everybody, even
    what others are reading. `keys`: `default_keys`, or `sglang_mooncake_keys` to share with SGLang.

    Raises StorageError for an interval that is not positive, and when the store cannot be joined: the
    library is missing, or `master_server_address` does not answer. Joining holds up the whole process,
    for 0.1 s when the master answers.
    """

    tier = Tier.EXTERNAL

    def __init__(
        self,
        config: MooncakeConfig,
        form: PageFormat,
        *,
        keys: Callable[[PageFormat], KeyScheme] = default_keys,
        audit_interval_s: float = 5.0,
    ) -> None:
        if not audit_interval_s > 0:
            raise StorageError(f"audit_interval_s: {audit_interval_s} is not above 0")
        self.stats = StorageStats()
        self.audit_interval_s: float | None = audit_interval_s
        self._form, self._names = form, keys(form)
        self._num_parts = len(self._names(b""))
        if form.bytes_per_page % self._num_parts:
            raise StorageError(f"keys: {self._num_parts} names for {form.bytes_per_page} bytes")
        self._pool: HostPool | None = None
        self._lock = threading.Lock()
        self._believed: set[bytes] = set()
        self._lost: dict[bytes, None] = {}
        self._unreadable: set[bytes] = set()
        """There, the store says, but they could not be had: whoever has their bytes is gone."""
        self._read_or_delete = threading.Lock()
        self._client = MooncakeClient(config)
        self._writes = BackgroundThread("kv-mooncake-write")
        self._reads = BackgroundThread("kv-mooncake-read")
        self._leaving = BackgroundThread("kv-mooncake-close")
        self._left: Future[None] | None = None

    def attach(self, pool: HostPool) -> None:
        """Called once, before all else; registers the pool's memory with the store until `close`.

        Raises StorageError for a pool of another format, and for memory that cannot be registered.
        """
        if self._pool is not None:
            raise StorageError("attach: the store has a cache already, or had: open another")
        self._form.check(pool)
        code = self._client.register(pool.address, pool.num_bytes)
        if code != OK:
            raise StorageError(f"pool: {pool.num_bytes} bytes: register_buffer: {meaning(code)}")
        self._pool = pool

    def held(self) -> list[StoredPage]:
        """Nothing: what is there is others' too, and has no names to announce."""
        return []

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        """How many leading keys are stored. Keeps those from being evicted for a lease's length."""
        return self._reads.submit(self._guarded, self._exists_prefix, tuple(keys))

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        """Store pages; how many leading ones are stored now. One that was there keeps its bytes.

        The host pages must not change until the future is done. Raises ValueError for host pages that
        are not one for each page, in the pool.
        """
        keys = tuple(page.key for page in pages)
        return self._writes.submit(self._guarded, self._put, keys, self._parts(keys, host_pages))

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        """Fill host pages; how many leading ones have their bytes now.

        A page believed in that fails is reported as lost, and so is any that is there but cannot be had.
        Raises ValueError for host pages that are not one for each key, in the pool.
        """
        keys = tuple(keys)
        return self._reads.submit(self._guarded, self._get, keys, self._parts(keys, host_pages))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Remove pages for every worker, leased or not; how many are not stored any more."""
        return self._writes.submit(self._guarded, self._delete, tuple(keys))

    def clear(self) -> None:
        """Nothing: the pages are others' too."""

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        """Report those of the keys believed in that are gone as lost; how many.

        Nothing is lost for a master that does not answer.
        """
        return self._writes.submit(self._guarded, self._audit, tuple(keys))

    def take_lost(self) -> list[bytes]:
        """Keys that are not stored any more, though nobody here deleted them."""
        with self._lock:
            lost = list(self._lost)
            self._lost.clear()
        return lost

    def close(self) -> None:
        """Finish the calls at hand, cancel the rest, leave the store; the pool may go then.

        Holds up the whole process for a second or two, unless the master is away. Waits 10 s at most; a
        call that is still under way then keeps the pool's memory, and the rest is done when it ends.
        """
        self._writes.close(timeout_s=0)
        self._reads.close(timeout_s=0)
        if self._left is None:
            self._left = self._leaving.submit(self._leave)
        wait([self._left], _CLOSE_TIMEOUT_S)
        self._leaving.close(timeout_s=0)

    def _leave(self) -> None:
        self._writes.close(threading.TIMEOUT_MAX)
        self._reads.close(threading.TIMEOUT_MAX)
        self._client.close()

    # ------------------------------------------------------------------------- the reading thread

    def _exists_prefix(self, keys: Sequence[bytes]) -> int:
        codes = self._look(keys)
        self._note("exists_prefix", codes)
        return _num_leading(codes)

    def _get(self, keys: Sequence[bytes], parts: Sequence[Part]) -> int:
        with self._read_or_delete:
            with self._lock:
                believed = self._believed.intersection(keys)
            codes = self._by_page(self._client.get(parts))
            if OK in codes:  # M2
                codes = [was or now for was, now in zip(codes, self._look(keys), strict=True)]
        failed = {key: code for key, code in zip(keys, codes, strict=True) if code != OK}
        num_read = _num_leading(codes)
        with self._lock:
            self.stats.read += num_read
            self.stats.failed_gets += len(failed)
            self._lose(key for key in failed if key in believed or failed[key] != NOT_FOUND)
            self._unreadable.update(key for key in failed if failed[key] == TRANSFER_FAILED)
        self._note("get", codes, fine=(OK,))
        return num_read

    # ------------------------------------------------------------------------- the writing thread

    def _put(self, keys: Sequence[bytes], parts: Sequence[Part]) -> int:
        self._give_up_unreadable(keys)
        found = self._client.look([part.name for part in parts])
        outcome = {part.name: code for part, code in zip(parts, found, strict=True)}
        new = [part for part in parts if outcome[part.name] == NOT_FOUND]
        outcome.update(zip((part.name for part in new), self._client.put(new), strict=True))
        codes = self._by_page([outcome[part.name] for part in parts])
        was_there = self._by_page(found).count(OK)
        num_stored = _num_leading(codes)
        with self._lock:
            self._believed.update(keys[:num_stored])
            for key in keys[:num_stored]:
                self._lost.pop(key, None)
            self.stats.failed_puts += len(codes) - codes.count(OK)
            self.stats.written += codes.count(OK) - was_there
        self._note("put", codes, fine=(OK,))
        return num_stored

    def _give_up_unreadable(self, keys: Sequence[bytes]) -> None:
        """Remove what is there in name only, so that it is stored and not found (M3)."""
        with self._lock:
            stale = self._unreadable.intersection(keys)
            self._unreadable -= stale
        if stale:
            with self._read_or_delete:
                self._client.remove(self._names_of(sorted(stale)))

    def _delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._believed.difference_update(keys)
            self._unreadable.difference_update(keys)
        with self._read_or_delete:
            codes = self._by_page(self._client.remove(self._names_of(keys)))
        self._note("delete", codes)
        return codes.count(OK) + codes.count(NOT_FOUND)

    def _audit(self, keys: Sequence[bytes]) -> int:
        codes = self._look(keys)
        with self._lock:
            gone = [key for key, code in zip(keys, codes, strict=True) if code == NOT_FOUND]
            gone = [key for key in gone if key in self._believed]
            self._lose(gone)
        self._note("audit", codes)
        return len(gone)

    # --------------------------------------------------------------------------------------- both

    def _guarded(self, call: Callable[Args, int], *args: Args.args, **kwargs: Args.kwargs) -> int:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # no future raises
            with self._lock:
                self.stats.last_error = f"{call!r}: {error!r}"
            return 0

    def _look(self, keys: Sequence[bytes]) -> list[int]:
        """For each page OK, NOT_FOUND, or why that is not known."""
        return self._by_page(self._client.look(self._names_of(keys)))

    def _lose(self, keys: Iterable[bytes]) -> None:
        """Under the lock."""
        for key in keys:
            self._believed.discard(key)
            self._lost[key] = None
            self.stats.lost += 1

    def _note(
        self, call: str, codes: Sequence[int], fine: tuple[int, ...] = (OK, NOT_FOUND)
    ) -> None:
        wrong = next((code for code in codes if code not in fine), None)
        if wrong is not None:
            with self._lock:
                self.stats.last_error = f"{call}: {meaning(wrong)}"

    def _names_of(self, keys: Sequence[bytes]) -> list[str]:
        return [name for key in keys for name in self._names(key)]

    def _by_page(self, codes: Sequence[int]) -> list[int]:
        """From each object's code to each page's: NOT_FOUND if one is not there, else the first bad."""
        starts = range(0, len(codes), self._num_parts)
        pages = (codes[start : start + self._num_parts] for start in starts)
        return [NOT_FOUND if NOT_FOUND in page else next(filter(None, page), OK) for page in pages]

    def _parts(self, keys: Sequence[bytes], host_pages: PageIndices) -> list[Part]:
        pool = self._pool
        if pool is None:
            raise ValueError("attach: there is no pool yet")
        if len(host_pages) != len(keys):
            raise ValueError(f"host_pages: {len(host_pages)} for {len(keys)} pages")
        if host_pages and not 0 <= min(host_pages) <= max(host_pages) < pool.num_pages:
            raise ValueError(f"host_pages: not all in 0..{pool.num_pages - 1}")
        parts = []
        size = pool.bytes_per_page // self._num_parts
        for key, page in zip(keys, host_pages, strict=True):
            start = pool.address + page * pool.bytes_per_page
            for i, name in enumerate(self._names(key)):
                parts.append(Part(name, start + i * size, size, _group(name, key)))
        return parts


def _num_leading(codes: Sequence[int]) -> int:
    """How many at the front are OK."""
    return next((i for i, code in enumerate(codes) if code != OK), len(codes))


def _group(name: str, key: bytes) -> str | None:
    """`sglang-hicache:[{tag}_]{model}_{hash}`, as SGLang groups a page's objects; None for our names."""
    if not name.endswith(_GROUPED):
        return None
    digits = key.hex()
    return f"sglang-hicache:{name[: name.index(digits) + len(digits)]}"
