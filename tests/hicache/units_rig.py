"""A cache whose copies and storage calls end when a test says so, and what it tells, spelled short.

Events read as in the list of cases: `S(GPU: a1 a2 | None)`, `R(CPU: a2 a1)`, `C`. `a1` is the first page
of prompt A; a page that two prompts share has the name that it has in the first of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from hicache import (
    Agreement,
    Flight,
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    Insertion,
    KVShape,
    Node,
    PageIndices,
    PagePool,
    Prefetch,
    Tier,
)
from hicache.storage.backend import StorageStats, StoredPage
from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockIndex,
    BlockStored,
    Event,
    Namespace,
    block_hashes,
)
from kvevents.hashing import block_digests, chain_seed, page_key
from kvevents.index import Oddities
from kvevents.tokens import TOKEN_BYTES, pack_tokens

__all__ = [
    "AB",
    "AC",
    "PAGE",
    "SHAPE",
    "TIMEOUT_S",
    "A",
    "Call",
    "Copies",
    "Copy",
    "D",
    "E",
    "MemoryStore",
    "Rig",
    "keys",
    "opened",
    "stored_pages",
]

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int64)
"""KV wide enough to hold a block hash."""
PAGE = 4
TIMEOUT_S = 10.0

A = list(range(16))
"""Pages a1 to a4."""
AB = [*A[:8], *range(100, 108)]
"""a1 a2 b3 b4."""
AC = [*A[:4], *range(200, 204)]
"""a1 c2."""
D = list(range(300, 312))
"""d1 to d3."""
E = list(range(400, 408))
"""e1 e2."""

_NAMES: dict[int, str] = {
    block_hash: f"{letter}{i + 1}"
    for letter, prompt in [("e", E), ("d", D), ("c", AC), ("b", AB), ("a", A)]
    for i, block_hash in enumerate(block_hashes(prompt, PAGE))
}
_SHORT = {"CPU_PINNED": "CPU", "EXTERNAL": "EXT"}


def spelled(event: Event) -> str:
    """An event in the short form."""
    if isinstance(event, AllBlocksCleared):
        return "C"
    medium = _SHORT.get(str(event.medium), str(event.medium))
    hashes = " ".join(_name(one) for one in event.block_hashes)
    if not isinstance(event, BlockStored):
        return f"R({medium}: {hashes})"
    parent = event.parent_block_hash
    return f"S({medium}: {hashes} | {None if parent is None else _name(parent)})"


def _name(block_hash: int | bytes) -> str:
    assert isinstance(block_hash, int)
    return _NAMES.get(block_hash, str(block_hash))


# ------------------------------------------------------------------------------- copies on command


class Copy:
    """A submitted copy. `ended`: None, or whether it arrived."""

    def __init__(self, target: Tier, device_pages: PageIndices, host_pages: PageIndices) -> None:
        self.target, self.device_pages, self.host_pages = target, device_pages, host_pages
        self.started = False
        self.ended: bool | None = None

    def poll(self) -> bool | None:
        return self.ended


class Copies:
    """Transfers that copy when a test calls `end`, or at once while `prompt` is set."""

    def __init__(self, device_pool: PagePool, host_pool: HostPool) -> None:
        self._device, self._host = device_pool, host_pool
        self.submitted: list[Copy] = []
        self.prompt = False
        self.wait_ends: bool | None = True
        """What `wait` does with the copies it waits for: ends them well, badly, or not."""
        self.waited: list[float] = []

    def submit(self, target: Tier, device_pages: PageIndices, host_pages: PageIndices) -> Copy:
        copy = Copy(target, device_pages[:], host_pages[:])
        self.submitted.append(copy)
        return copy

    def start(self) -> None:
        for copy in self.under_way:
            copy.started = True
            if self.prompt:
                self.end(copy)

    def wait(self, jobs: Iterable[Any], timeout_s: float) -> None:
        self.waited.append(timeout_s)
        self.start()
        for job in jobs:
            if self.wait_ends is not None and job.ended is None:
                self.end(job, arrived=self.wait_ends)

    def close(self) -> None:
        for copy in self.under_way:
            copy.ended = False

    @property
    def under_way(self) -> list[Copy]:
        """What has not ended, the oldest first."""
        return [copy for copy in self.submitted if copy.ended is None]

    def end(self, *copies: Copy, arrived: bool = True) -> None:
        """These copies, or all, are over: well, or half done."""
        for copy in copies or self.under_way:
            assert copy.ended is None
            count = len(copy.host_pages) if arrived else len(copy.host_pages) // 2
            for device, host in zip(
                copy.device_pages[:count], copy.host_pages[:count], strict=True
            ):
                for plane, raw in enumerate(self._device.raw):
                    if copy.target is Tier.HOST:
                        self._host.raw[host, plane] = raw[device]
                    else:
                        raw[device] = self._host.raw[host, plane]
            copy.ended = arrived


# ------------------------------------------------------------------------------ a store on command


class Call:
    """A storage call that has not ended."""

    def __init__(self, name: str, work: Callable[[int], int], count: int) -> None:
        self.name, self.count = name, count
        self.future: Future[int] = Future()
        self._work = work

    def end(self, count: int | None = None) -> None:
        """Do the work, of the first `count` pages only, and tell the result."""
        self.future.set_result(self._work(self.count if count is None else count))


class MemoryStore:
    """A `StorageBackend` in a dict. Calls named in `held_up` wait in `calls` for the test to end them."""

    def __init__(self, *prompts: Sequence[int], tier: Tier = Tier.DISK) -> None:
        self.tier = tier
        self.stats = StorageStats()
        self.audit_interval_s: float | None = None
        self.pages: dict[bytes, StoredPage] = {}
        self.bytes_of: dict[bytes, bytes] = {}
        for prompt in prompts:
            self.fill(prompt)
        self.held_up: set[str] = set()
        self.calls: SimpleQueue[Call] = SimpleQueue()
        self.put_at_most: int | None = None
        """Of each put, this many pages are stored."""
        self.audited: list[bytes] = []
        self.puts: list[list[bytes]] = []
        self.closed = False
        self._lost: list[bytes] = []
        self._pool: HostPool | None = None

    def attach(self, pool: HostPool) -> None:
        self._pool = pool

    def held(self) -> list[StoredPage]:
        return list(self.pages.values())

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        return self._call("exists_prefix", lambda n: self._leading(keys[:n]), len(keys))

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        self.puts.append([page.key for page in pages])

        def work(count: int) -> int:
            if self.put_at_most is not None:
                count = min(count, self.put_at_most)
            for page, place in zip(pages[:count], host_pages[:count], strict=True):
                self.pages[page.key] = page
                self.bytes_of[page.key] = bytes(self._host.page(place))
            return count

        return self._call("put", work, len(pages))

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        def work(count: int) -> int:
            found = self._leading(keys[:count])
            for key, place in zip(keys[:found], host_pages[:found], strict=True):
                self._host.page(place)[:] = self.bytes_of[key]
            return found

        return self._call("get", work, len(keys))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        while not self.calls.empty():  # it comes after every earlier put
            self.calls.get().end()
        for key in keys:
            self.pages.pop(key, None)
        return _done(len(keys))

    def clear(self) -> None:
        while not self.calls.empty():
            self.calls.get().end()
        self.pages.clear()

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        self.audited += keys
        gone = [key for key in keys if key not in self.pages]
        self._lost += gone
        return _done(len(gone))

    def take_lost(self) -> list[bytes]:
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        self.closed = True
        while not self.calls.empty():
            self.calls.get().future.cancel()

    def fill(self, prompt: Sequence[int]) -> None:
        """It has a prompt's pages; nobody tells the cache."""
        for page, block_hash in zip(stored_pages(prompt), block_hashes(prompt, PAGE), strict=True):
            self.pages[page.key] = page
            self.bytes_of[page.key] = struct.pack("<8q", *[block_hash] * 8)

    def lose(self, *keys: bytes, silently: bool = False) -> None:
        """Pages are gone, and the store knows, or does not."""
        for key in keys:
            del self.pages[key]
            if not silently:
                self._lost.append(key)

    def call(self) -> Call:
        """The next call that is held up; waits for it."""
        return self.calls.get(timeout=TIMEOUT_S)

    def _call(self, name: str, work: Callable[[int], int], count: int) -> Future[int]:
        call = Call(name, work, count)
        if self.closed:
            call.future.cancel()
        elif name in self.held_up:
            self.calls.put(call)
        else:
            call.end()
        return call.future

    def _leading(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    @property
    def _host(self) -> HostPool:
        assert self._pool is not None, "the cache attaches its pool first"
        return self._pool


def _done(result: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(result)
    return future


# ----------------------------------------------------------------------------------------- the rig


class Rig:
    """A cache with a host tier, and perhaps a store; a router hears of it.

    Thresholds are 0 unless `config` says otherwise, and a prefetch waits for its pages.
    """

    def __init__(
        self,
        num_pages: int = 16,
        host_pages: int = 16,
        store: MemoryStore | None = None,
        agreement: Agreement | None = None,
        **config: Any,
    ) -> None:
        self.device = PagePool(num_pages, PAGE, SHAPE)
        self.host = HostPool(host_pages, PAGE, SHAPE)
        self.copies = Copies(self.device, self.host)
        self.store = store or MemoryStore()
        self.now = 0.0
        defaults: dict[str, Any] = {
            "load_back_threshold": 0,
            "prefetch_threshold": 0,
            "prefetch_policy": "wait_complete",
            "transfer_timeout_s": 10.0,
            "storage_queue_pages": 64,
        }
        self.cache = HiRadixCache(
            self.device,
            host_pool=self.host,
            storage=store,
            transfers=self.copies,
            config=HiCacheConfig(**(defaults | config)),
            agreement=agreement,
            clock=lambda: self.now,
        )
        self.index = BlockIndex()

    def put(
        self, tokens: Sequence[int], namespace: Namespace = BASE, *, priority: int = 0
    ) -> Insertion:
        """Compute and cache a prompt, and free the duplicates."""
        pages = self.allocate(tokens, namespace)
        insertion = self.cache.insert(tokens, pages, namespace, priority=priority)
        self.cache.free(pages[: insertion.num_existing])
        return insertion

    def allocate(self, tokens: Sequence[int], namespace: Namespace = BASE) -> PageIndices:
        """Pages with a prompt's KV in them, not inserted yet."""
        pages = self.cache.allocate(len(tokens) // PAGE)
        assert pages is not None
        hashes = torch.tensor(block_hashes(tokens, PAGE, namespace), dtype=torch.int64)
        kv = hashes.reshape(-1, 1, 1, 1).expand(-1, PAGE, 1, 1)
        self.device.write(0, pages, kv, kv)
        return pages

    def backed_up(self, tokens: Sequence[int]) -> Node:
        """A prompt on device and host, and in the store if it takes it; all of it is told."""
        node = self.put(tokens).node
        self.land()
        self.cache.tick()
        self.heard()
        return node

    def on_host(self, tokens: Sequence[int]) -> Node:
        """A prompt on the host alone, as the only one in the cache that is there to be evicted."""
        node = self.backed_up(tokens)
        self.cache.evict(len(tokens) // PAGE)
        self.heard()
        return node

    def land(self, *, arrived: bool = True) -> None:
        """Every copy under way is over, and the cache sees it."""
        self.cache.tick()
        self.copies.end(arrived=arrived)
        self.cache.tick()

    def heard(self) -> list[str]:
        """What was told since the last call. The cache must be sound, and the router right."""
        assert self.cache.violations() == []
        events = self.cache.take_events()
        self.index.apply(events)
        assert self.index.oddities == Oddities()
        assert self.index.resident == self.cache.resident_blocks()
        self._check_bytes()
        return [spelled(event) for event in events]

    def load_back(self, node: Node, *, max_pages: int | None = None) -> Flight:
        """A load back that is not refused."""
        flight = self.cache.load_back(node, max_pages=max_pages)
        assert flight is not None
        return flight

    def prefetch(self, tokens: Sequence[int]) -> Prefetch:
        """A prefetch that is not refused."""
        prefetch = self.cache.prefetch(tokens)
        assert prefetch is not None
        return prefetch

    def fetched(self, tokens: Sequence[int]) -> Prefetch:
        """A prefetch whose calls are not held up, once it is over."""
        prefetch = self.prefetch(tokens)
        for _ in range(3):  # it looks, it reads, it lets go of its pages
            self.step(prefetch)
        return prefetch

    def step(self, prefetch: Prefetch) -> None:
        """What a prefetch is doing now is done, and the cache sees it."""
        prefetch.job.exception(TIMEOUT_S)
        self.cache.tick()

    def close(self) -> None:
        """End what is held up, and the cache."""
        self.store.held_up = set()
        while not self.store.calls.empty():
            self.store.calls.get().end()
        self.cache.close()

    @property
    def num_free(self) -> tuple[int, int]:
        """Free pages of device and host."""
        return self.device.allocator.num_free, self.host.allocator.num_free

    def _check_bytes(self) -> None:
        for block_hash, page in self.cache.resident_pages(Tier.DEVICE).items():
            k, v = self.device.read(0, array("q", [page]))
            assert (k == block_hash).all() and (v == block_hash).all()
        for block_hash, page in self.cache.resident_pages(Tier.HOST).items():
            assert (self.host.raw[page].view(torch.int64) == block_hash).all()


@contextmanager
def opened(*args: Any, **kwargs: Any) -> Iterator[Rig]:
    """A rig, closed at the end."""
    rig = Rig(*args, **kwargs)
    try:
        yield rig
    finally:
        rig.close()


def keys(tokens: Sequence[int]) -> list[bytes]:
    """The storage keys of a prompt's pages."""
    digests = block_digests(chain_seed(BASE), pack_tokens(tokens), PAGE)
    return [page_key(digest, None) for digest in digests]


def stored_pages(tokens: Sequence[int]) -> list[StoredPage]:
    """A prompt's pages, as a store names them."""
    size = PAGE * TOKEN_BYTES
    packed, found, above = bytes(pack_tokens(tokens)), list[StoredPage](), None
    for i, key in enumerate(keys(tokens)):
        found.append(StoredPage(key, above, BASE, packed[i * size : (i + 1) * size]))
        above = key
    return found
