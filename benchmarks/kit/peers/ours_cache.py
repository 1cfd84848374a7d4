"""This project's HiRadixCache, its changes handed to a sidecar process that publishes them.

Run as `-m benchmarks.kit.peers.ours_cache`, in an environment that has this project.

Not timed here, as none of it is in the peers: the sidecar's start, and its work, which goes on in a
process of its own while the next requests run. Handing over is: it is what `take_events` does.
"""

from __future__ import annotations

import gc
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from time import perf_counter_ns as now
from time import sleep
from typing import Any, cast

import torch

from hicache import (
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    KVShape,
    Match,
    PageIndices,
    PagePool,
    PrefetchPolicy,
    Tier,
    WritePolicy,
)
from hicache.storage import FileStorage, PageFormat
from hicache.transfer import CpuTransfers, TransferJob, Transfers
from kvevents import StorageMedium
from kvevents.tokens import pack_tokens
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.version import VERSION

from .host import serve
from .interface import CachePeer

STEPS = ("pack", "prefetch", "match", "load", "lock", "alloc", "insert", "tick", "take")
SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float16)  # the peers' rows
LOOPBACK = "tcp://127.0.0.1:0"
WAIT_S = 60.0
STORAGE_S = 2.0
COPIES_S = 0.0001


class _Copied:
    """A copy that was over before it began."""

    def poll(self) -> bool:
        return True


class NoCopies:
    """Bookkeeping without copies: what is submitted is done."""

    def submit(
        self,
        target: Tier,  # noqa: ARG002
        device_pages: PageIndices,  # noqa: ARG002
        host_pages: PageIndices,  # noqa: ARG002
    ) -> _Copied:
        return _Copied()

    def start(self) -> None: ...

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None: ...

    def close(self) -> None: ...


class OurCache(CachePeer):
    def __init__(self) -> None:
        self._policy = WritePolicy.WRITE_THROUGH
        self._copies, self._storage, self._packed = True, False, True
        self._opened = ExitStack()
        self.build(page_size=64, device_tokens=4096, host_ratio=0, events=False)
        self.run_request(self.prepare(array("q", range(640))))

    def option(self, name: str, value: str) -> None:
        match name, value:
            case "policy", "write_through" | "write_back" | "write_through_selective":
                self._policy = WritePolicy(value)
            case "copy", "yes" | "no":
                self._copies = value == "yes"
            case "storage", "file" | "none":
                self._storage = value == "file"
            case "tokens", "packed" | "int64":
                self._packed = value == "packed"
            case _:
                super().option(name, value)

    def build(self, page_size: int, device_tokens: int, host_ratio: float, *, events: bool) -> None:
        self._opened.close()
        self._cache: HiRadixCache | None = None
        self._sidecar: Sidecar | None = None
        gc.collect()
        self._opened = ExitStack()
        self._page = page_size
        self._ns = dict.fromkeys(STEPS, 0)
        self._tokens = dict.fromkeys(("prompt", "hit", "host_hit", "new"), 0)
        self._unflushed = 0
        device = PagePool(device_tokens // page_size, page_size, SHAPE)
        for plane in device.planes:
            plane.fill_(0)  # has its memory now, as the peers' pools have
        self._cache = self._opened.enter_context(self._new_cache(device, host_ratio, events=events))
        if events:
            sinks = (SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK),)
            worker = WorkerInfo(block_size=page_size)
            self._sidecar = self._opened.enter_context(spawn(worker, SidecarConfig(sinks=sinks)))
            self._sidecar.pump(self._cache)  # the first tells what there is already: nothing

    def _new_cache(self, device: PagePool, host_ratio: float, *, events: bool) -> HiRadixCache:
        self._host = bool(host_ratio)
        self._transfers: Transfers | None = None
        if not host_ratio:
            return HiRadixCache(device, events=events)
        host = HostPool.beside(device, ratio=host_ratio)
        host.raw.fill_(0)
        self._transfers = CpuTransfers(device, host) if self._copies else NoCopies()
        storage = None
        if self._storage:
            folder = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-pages-"))
            storage = FileStorage(folder, PageFormat.of(device, "bench"), max_bytes=1 << 30)
        return HiRadixCache(
            device,
            host_pool=host,
            storage=storage,
            transfers=self._transfers,
            config=HiCacheConfig(
                write_policy=self._policy, prefetch_policy=PrefetchPolicy.BEST_EFFORT
            ),
            events=events,
        )

    def prepare(self, tokens: array[int]) -> Any:
        """Packed, as an engine that has this cache would keep a prompt from its arrival on; or as SGLang
        has it, an array of 64-bit integers, which is then packed in the request's time.
        """
        self._let_sidecar_catch_up()
        return pack_tokens(torch.frombuffer(tokens, dtype=torch.int64)) if self._packed else tokens

    def _let_sidecar_catch_up(self) -> None:
        """No worker computes as fast as this loop goes on. The ring is never more than a quarter full,
        and what is timed runs beside a busy sidecar.
        """
        if self._sidecar is None or self._cache is None:
            return
        written = self._sidecar.client.stats.bytes
        if written - self._unflushed > 8 << 20:
            self._unflushed = written
            assert self._sidecar.client.flush(self._cache, WAIT_S), "the sidecar is there"

    def run_request(self, tokens: Any) -> None:
        cache = self._cache
        assert cache is not None
        at = now()
        if not self._packed:
            tokens = pack_tokens(torch.frombuffer(tokens, dtype=torch.int64))
            at = self._lap("pack", at)
        if self._storage:
            cache.prefetch(tokens)
            at = self._lap("prefetch", at)
        match = cache.match_prefix(tokens)
        at = self._lap("match", at)
        if match.num_host_pages:
            match = self._load_back(cache, tokens, match)
            at = self._lap("load", at)
        cache.lock(match.node)
        at = self._lap("lock", at)
        num_pages = len(tokens) // (4 * self._page)
        new = cache.allocate(num_pages - match.num_pages)
        while new is None:  # pages are held by copies that are still under way
            sleep(COPIES_S)
            cache.tick()
            new = cache.allocate(num_pages - match.num_pages)
        at = self._lap("alloc", at)
        cache.insert(tokens, new, first_page=match.num_pages)
        at = self._lap("insert", at)
        cache.unlock(match.node)
        at = self._lap("lock", at)
        if self._host:
            cache.tick()
            self._lap("tick", at)
        self._tokens["prompt"] += num_pages * self._page
        self._tokens["hit"] += match.prefix_len
        self._tokens["new"] += (num_pages - match.num_pages) * self._page

    def _load_back(self, cache: HiRadixCache, tokens: bytes, match: Match) -> Match:
        """Wait for the copy, as SGLang's does here; an engine would go on with other requests."""
        assert self._transfers is not None
        cache.lock(match.host_node)
        flight = cache.load_back(match.host_node)
        if flight is not None:
            while not flight.done:
                self._transfers.wait(cast("list[TransferJob]", [flight.job]), WAIT_S)
                cache.tick()
            self._tokens["host_hit"] += match.num_host_pages * self._page
        found = cache.match_prefix(tokens)
        cache.unlock(match.host_node)
        return found

    def _lap(self, step: str, since: int) -> int:
        at = now()
        self._ns[step] += at - since
        return at

    def take_events(self) -> Sequence[Any]:
        at = now()
        if self._sidecar is not None and self._cache is not None:
            self._sidecar.pump(self._cache)
        self._lap("take", at)
        return ()

    def stats(self) -> dict[str, Any]:
        totals = {f"{name}_tokens": value for name, value in self._tokens.items()}
        copied = self._tokens["host_hit"]
        if self._host and self._copies:
            assert self._cache is not None
            copied += self._cache.stats().stored[StorageMedium.CPU] * self._page
        return {**totals, "copied_tokens": copied, "calls": dict(self._ns)}

    def check(self) -> None:
        cache = self._cache
        assert cache is not None
        settled = cache.settle(STORAGE_S if self._storage else WAIT_S)
        assert settled or self._storage, "copies end; a disk may have more to write than it can"
        free = cache.device_pool.allocator.num_free
        assert cache.num_resident + free == cache.device_pool.num_pages
        if self._sidecar is not None:
            assert self._sidecar.client.flush(cache, WAIT_S), "everything is published"
            assert not self._sidecar.client.stats.refused, "the ring had room"


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(OurCache(), name="ours", version=VERSION)
