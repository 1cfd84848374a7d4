"""hicache: what once broke it, on real threads, files and processes."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
import torch
from units_rig import MemoryStore

from hicache import HiCacheConfig, HiRadixCache, HostPool, KVShape, PagePool, PrefetchPolicy
from hicache.background import BackgroundThread
from hicache.storage import FileStorage, PageFormat, StorageBackend, StoredPage
from kvevents import StorageMedium

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32)
CONFIG = HiCacheConfig(prefetch_threshold=0, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
ROOT = Path(__file__).parents[2]


def new_cache(storage: StorageBackend | None, num_pages: int = 64) -> HiRadixCache:
    return HiRadixCache(
        PagePool(num_pages, 4, SHAPE),
        host_pool=HostPool(num_pages, 4, SHAPE),
        storage=storage,
        config=CONFIG,
    )


def file_store(directory: Path) -> FileStorage:
    return FileStorage(directory, PageFormat("model", SHAPE, 4), min_free_bytes=0)


def put(cache: HiRadixCache, tokens: Sequence[int]) -> None:
    pages = cache.allocate(len(tokens) // 4)
    assert pages is not None
    cache.free(pages[: cache.insert(tokens, pages).num_existing])


def fetched(cache: HiRadixCache, tokens: Sequence[int]) -> int:
    prefetch = cache.prefetch(tokens)
    assert prefetch is not None
    assert cache.settle(30)
    return prefetch.num_landed


@pytest.mark.integration
def test_what_was_flushed_is_not_fetched(tmp_path: Path) -> None:
    """A flush empties the store at once, though a hundred writes are under way: nothing of before comes
    back, and nothing is told after the clear.
    """
    prompts = [list(range(start, start + 16)) for start in range(0, 1600, 16)]
    with new_cache(file_store(tmp_path), 512) as cache:
        put(cache, prompts[0])
        assert cache.settle(30)
        for prompt in prompts[1:]:
            put(cache, prompt)
        cache.tick()
        cache.tick()
        cache.take_events()
        cache.flush()
        assert all(fetched(cache, prompt) == 0 for prompt in prompts[:3])
        assert cache.settle(30)
        assert [type(event).__name__ for event in cache.take_events()] == ["AllBlocksCleared"]
        assert cache.violations() == []


@pytest.mark.integration
def test_what_was_flushed_is_not_found_after_a_crash(tmp_path: Path) -> None:
    """The process that flushed is killed at once: the next one starts with an empty store."""
    code = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_tiers_faults import *
cache = new_cache(file_store(Path({str(tmp_path)!r})), 512)
put(cache, list(range(4 * 500)))
assert cache.settle(30)
assert cache.stats().resident["DISK"] == 500
cache.flush()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with closing(file_store(tmp_path)) as store:
        assert store.held() == []
        assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.integration
def test_a_process_may_end_while_copies_are_under_way() -> None:
    """Without close, with a copy in the middle: no abort, exit code 0."""
    code = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}]
import torch
from hicache import HiRadixCache, HostPool, KVShape, PagePool
for _ in range(4):
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
    else:
        shape = KVShape(4, 4, 64, torch.float32)
        pool = PagePool(256, 16, shape)
        cache = HiRadixCache(pool, host_pool=HostPool(256, 16, shape))
        cache.insert(list(range(16 * 256)), cache.allocate(256))
        cache.tick()
        break
"""
    done = subprocess.run(  # whoever forks is warned of threads, which there are none of then
        [sys.executable, "-W", "ignore", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0"] * 4


def test_closing_a_thread_never_hangs() -> None:
    """However close comes upon the thread's own end."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(1000):
            thread = BackgroundThread("test")
            thread.submit(int)
            thread.close(timeout_s=0)
    finally:
        sys.setswitchinterval(interval)


def test_losses_of_a_long_node_cut_it_once() -> None:
    """Of a long prompt the store loses the last two thirds, page by page, children first: a few nodes are
    left, not hundreds.
    """
    store = MemoryStore()
    tokens = list(range(4 * 300))
    with new_cache(store, 300) as cache:
        put(cache, tokens)
        assert cache.settle(30)
        keys = list(store.pages)
        store.lose(*keys[:99:-1])
        cache.tick()
        assert cache.stats().resident[StorageMedium.DISK] == 100
        assert len(cache._tree) <= 3
        assert cache.violations() == []


class Nonsense(MemoryStore):
    """A store that answers whatever it likes."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    def answer(self) -> Future[int]:
        if self._answer is NotImplementedError:
            raise NotImplementedError
        future: Future[int] = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        else:
            future.set_result(cast("int", self._answer))
        return future

    def put(self, pages: Sequence[StoredPage], host_pages: array[int]) -> Future[int]:
        return self.answer()

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        return self.answer()

    def get(self, keys: Sequence[bytes], host_pages: array[int]) -> Future[int]:
        return self.answer()


@pytest.fixture(params=[-7, 10**9, None, "3", 2.0, OSError("no"), NotImplementedError], ids=repr)
def nonsense(request: pytest.FixtureRequest) -> Iterator[HiRadixCache]:
    with new_cache(Nonsense(request.param)) as cache:
        yield cache


def test_a_store_that_says_nonsense_does_no_harm(nonsense: HiRadixCache) -> None:
    """A future that raises, a count out of range, what is no count, a call that raises: the cache goes
    on, with no lock and no page gone.
    """
    put(nonsense, range(40))
    assert nonsense.settle(30)
    fetched(nonsense, range(100, 140))
    assert nonsense.settle(30)
    assert nonsense.violations() == []
    nonsense.flush()
    assert nonsense.settle(30)
    for pool in (nonsense.device_pool, nonsense.host_pool):
        assert pool is not None and pool.allocator.num_free == pool.num_pages


def test_audits_keep_up_with_a_store_that_evicts() -> None:
    """However many pages are believed in, all of them have been looked for after six intervals."""
    now = [0.0]
    store = MemoryStore()
    store.audit_interval_s = 1.0
    cache = HiRadixCache(
        PagePool(3000, 4, SHAPE),
        host_pool=HostPool(3000, 4, SHAPE),
        storage=store,
        config=CONFIG,
        clock=lambda: now[0],
    )
    with cache:
        put(cache, range(4 * 3000))
        assert cache.settle(30)
        gone = list(store.pages)[-1]
        del store.pages[gone]
        for now[0] in range(1, 9):
            cache.tick()
        assert cache.stats().resident[StorageMedium.DISK] == 2999
