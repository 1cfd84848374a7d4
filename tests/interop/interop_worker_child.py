"""The process of `interop_worker.ExampleWorker`: a cache of all tiers, and the sidecar it has spawned."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interop_rpc import claim_stdout, loads, serve

from hicache import HiCacheConfig, HiRadixCache, HostPool, KVShape, PageIndices, PagePool
from hicache.policy import PrefetchPolicy, WritePolicy
from hicache.storage.backend import StoredPage
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from hicache.tier import Tier
from kvevents import BASE, Namespace, StorageMedium
from kvevents.hashing import DIGEST_BYTES, block_hashes
from kvevents.tokens import TOKEN_BYTES
from publisher import SidecarConfig, WorkerInfo, spawn
from publisher.config.sidecar_config import read_config
from publisher.worker.attendant import SidecarState

PATIENCE_S = 20.0
PUMP_EVERY_S = 0.005
SHAPE = KVShape(1, 1, 1, torch.int64)
KEY = bytes(DIGEST_BYTES)
TICKS_OF_A_PAUSE = 101
"""So many ticks, and storage that failed is tried again."""


class GatedStorage(FileStorage):
    """Files, as DISK or as EXTERNAL; what is to be written waits until the gate is open."""

    def __init__(
        self, tier: Tier, directory: Path, form: PageFormat, most_pages: int | None
    ) -> None:
        super().__init__(directory, form, min_free_bytes=0)
        self.tier = tier
        if most_pages is not None:
            page = StoredPage(KEY, KEY, BASE, bytes(form.page_size * TOKEN_BYTES))
            self._max_bytes = most_pages * self._folder.size_of(page)
        self._open = False
        self._waiting: list[tuple[Sequence[StoredPage], PageIndices, Future[int]]] = []

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        if self._open:
            return super().put(pages, host_pages)
        answer = Future[int]()
        self._waiting.append((pages, host_pages, answer))
        return answer

    def open(self) -> None:
        """Write what waits, and all that comes until `shut`."""
        self._open = True
        for pages, host_pages, answer in self._waiting:
            written = super().put(pages, host_pages)
            written.add_done_callback(partial(_copy, answer))
        self._waiting.clear()

    def shut(self) -> None:
        """Write nothing from now on."""
        self._open = False

    def give_up(self) -> None:
        """What waits is never written."""
        for _, _, answer in self._waiting:
            answer.set_result(0)
        self._waiting.clear()


class Worker:
    """Does one thing at a time to the cache, and has the sidecar publish what came of it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._worker = read_config(WorkerInfo, config["worker"])
        size = self._worker.block_size
        self._pool = PagePool(config["device_pages"], size, SHAPE)
        self._host_pages = config["host_pages"]
        self._storage = _storage(config, size)
        self._cache = HiRadixCache(
            self._pool,
            host_pool=HostPool(self._host_pages, size, SHAPE),
            storage=self._storage,
            config=HiCacheConfig(
                write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
                load_back_threshold=0,
                prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
                prefetch_threshold=0,
            ),
        )
        self._sidecar = spawn(self._worker, read_config(SidecarConfig, config["sidecar"]))

    def facts(self) -> dict[str, Any]:
        """Where it publishes, and the sidecar's process."""
        client = self._sidecar.client
        return {
            "sinks": [[one.endpoint, one.replay_endpoint] for one in client.sinks],
            "http": client.http_endpoint,
            "sidecar": self._sidecar.pid,
        }

    async def pump(self) -> None:
        """As an idle scheduler does."""
        while True:
            self._sidecar.pump(self._cache)
            await asyncio.sleep(PUMP_EVERY_S)

    def published(self) -> list[int]:
        """The next seq of each sink, once all is published."""
        assert self._cache.violations() == []
        answer = self._sidecar.client.flush(self._cache, PATIENCE_S)
        assert answer is not None, "the sidecar did not publish in time"
        return list(answer.next_seqs)

    def close(self) -> None:
        """Leave in good order."""
        self._sidecar.close()
        self._cache.close()

    # ------------------------------------------------------------------------- what is done to it

    def insert(self, tokens: list[int], namespace: list[str | None]) -> list[int]:
        self._insert(tokens, Namespace(*namespace))
        return self.published()

    def backup(self, tokens: list[int], namespace: list[str | None]) -> list[int]:
        space = Namespace(*namespace)
        for _ in range(2):  # the second time they are worth a backup
            self._insert(tokens, space)
        hashes = set(block_hashes(tokens, self._worker.block_size, space))
        self._until(lambda: hashes <= self._cache.resident_blocks()[StorageMedium.CPU])
        return self.published()

    def evict_device(self, num_pages: int) -> list[int]:
        assert self._cache.evict(num_pages) == num_pages
        return self.published()

    def evict_host(self, num_pages: int) -> list[int]:
        """As one does that needs room; what waits to be written from there is given up first."""
        if self._storage is not None:
            self._storage.give_up()
            self._cache.tick()
        tiered, used = self._cache._tiered, self._cache.stats().resident[StorageMedium.CPU]
        pages = tiered.take_host(self._host_pages - used + num_pages)
        assert pages is not None
        tiered.free(Tier.HOST, pages)
        return self.published()

    def load_back(self, tokens: list[int], namespace: list[str | None]) -> list[int]:
        node = self._cache.match_prefix(tokens, Namespace(*namespace)).host_node
        self._cache.lock(node)
        flight = self._cache.load_back(node)
        assert flight is not None
        self._until(lambda: flight.done)
        self._cache.unlock(node)
        return self.published()

    def write_storage(self) -> list[int]:
        assert self._storage is not None
        self._storage.open()
        for _ in range(TICKS_OF_A_PAUSE):
            self._cache.tick()
        assert self._cache.settle(PATIENCE_S)
        self._storage.shut()
        return self.published()

    def prefetch(self, tokens: list[int], namespace: list[str | None]) -> list[int]:
        prefetch = self._cache.prefetch(tokens, Namespace(*namespace))
        assert prefetch is not None
        self._until(lambda: self._cache.prefetch_done(prefetch))
        return self.published()

    def flush(self) -> list[int]:
        if self._storage is not None:
            self._storage.give_up()
        self._cache.flush()
        return self.published()

    def reset_device(self) -> list[int]:
        self._cache.reset_device()
        return self.published()

    def resync(self) -> list[int]:
        told = self._sidecar.client.stats.retellings
        os.kill(self._sidecar.pid, signal.SIGUSR1)
        self._until(lambda: self._sidecar.client.stats.retellings > told)
        return self.published()

    def kill_sidecar(self) -> int:
        """Returns at once; what is done next waits for another one."""
        os.kill(self._sidecar.pid, signal.SIGKILL)
        return self._sidecar.restarts

    def await_sidecar(self, restarts: int) -> list[int]:
        self._until(lambda: self._sidecar.restarts > restarts)
        self._until(lambda: self._sidecar.state is SidecarState.READY)
        return self.published()

    def resident(self) -> dict[str, list[int]]:
        return {str(on): sorted(held) for on, held in self._cache.resident_blocks().items()}

    def _insert(self, tokens: list[int], namespace: Namespace) -> None:
        cache = self._cache
        found = cache.match_prefix(tokens, namespace)
        cache.lock(found.node)
        pages = cache.allocate(len(tokens) // self._worker.block_size - found.num_pages)
        assert pages is not None, "there is no room"
        cache.insert(tokens, pages, namespace, first_page=found.num_pages)
        cache.unlock(found.node)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "it did not come about in time"
            self._cache.tick()
            self._sidecar.pump(self._cache)
            time.sleep(0.0005)


def _copy(answer: Future[int], written: Future[int]) -> None:
    answer.set_result(written.result())


def _storage(config: Mapping[str, Any], size: int) -> GatedStorage | None:
    if config["storage"] is None:
        return None
    form = PageFormat("org/model", SHAPE, size)
    folder = Path(config["folder"]) / "pages"
    return GatedStorage(Tier[config["storage"]], folder, form, config["storage_pages"])


async def main(config: Mapping[str, Any]) -> None:
    answers = claim_stdout()
    torch.set_num_threads(1)
    worker = Worker(config)
    pumping = asyncio.create_task(worker.pump())
    names = [
        *("insert", "backup", "evict_device", "evict_host", "load_back", "write_storage"),
        *("prefetch", "flush", "reset_device", "resync", "kill_sidecar", "await_sidecar"),
        *("resident", "published", "facts"),
    ]
    handlers = {name: getattr(worker, name) for name in names}
    await serve(answers, handlers, ready=worker.facts())
    pumping.cancel()
    worker.close()


if __name__ == "__main__":
    asyncio.run(main(loads(sys.argv[1])))
