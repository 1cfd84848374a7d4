"""The demo's engine: all of one but the model. It fills real KV pages, and checks them on every hit."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator

import torch

from hicache import (
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    KVShape,
    PageIndices,
    PagePool,
    WritePolicy,
)
from hicache.storage.backend import StorageBackend
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from hicache.tier import MEDIUM
from kvevents.events import StorageMedium
from publisher.demo.options import DemoOptions
from publisher.demo.trace import Request, pages_of, prompt, reply

__all__ = ["Engine"]

_SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
_MODEL = "kvevents-demo"
_BATCH = 8
"""Requests at work at the same time, most of them waiting for their pages."""
_PAUSE_S = 0.0002
"""When all wait: for pages, which other threads bring."""
_SETTLE_S = 60.0
_MOONCAKE_BYTES = 256 << 20
"""The worker's part of the external store."""


class Engine:
    """Runs requests through a cache, several at a time. Raises StorageError and ValueError."""

    def __init__(self, options: DemoOptions) -> None:
        self._page_size = size = options.page_size
        self._pool = PagePool(options.device_pages, size, _SHAPE)
        host = HostPool(options.host_pages, size, _SHAPE) if options.host_pages else None
        storage = _storage(options)
        self.storage_medium = MEDIUM[storage.tier] if storage is not None else None
        self.media = [
            StorageMedium.GPU,
            *([StorageMedium.CPU] if host is not None else []),
            *([self.storage_medium] if self.storage_medium is not None else []),
        ]
        self.cache = HiRadixCache(
            self._pool,
            host_pool=host,
            storage=storage,
            config=HiCacheConfig(
                write_policy=WritePolicy(options.write_policy),
                load_back_threshold=size,
                prefetch_threshold=size,
            ),
        )
        self.num_restored = self.cache.stats().resident[StorageMedium.DISK]
        """Pages that the store had from an earlier run."""
        self.hits = dict.fromkeys(StorageMedium, 0)
        self.prompt_pages = self.too_large = self.checked_pages = self.wrong_pages = 0
        self.num_served = 0
        self._running: deque[Iterator[None]] = deque()

    def step(self, waiting: Iterator[tuple[int, Request]]) -> bool:
        """Let every request at work go on, and take new ones; whether any is left."""
        while len(self._running) < _BATCH and (arrived := next(waiting, None)) is not None:
            self._running.append(self._serve(*arrived))
        self.cache.tick()
        at_work = len(self._running)
        for _ in range(at_work):
            request = self._running.popleft()
            if next(request, "served") == "served":
                self.num_served += 1
            else:
                self._running.append(request)
        if at_work == len(self._running):
            time.sleep(_PAUSE_S)
        return at_work > 0

    def settle(self) -> bool:
        """Whether everything between the tiers came to its end."""
        return self.cache.settle(_SETTLE_S)

    def close(self) -> None:
        """Stop the cache's threads and close its store."""
        self.cache.close()

    # ------------------------------------------------------------------------------ a request

    def _serve(self, number: int, request: Request) -> Iterator[None]:
        """Find what is cached, compute the rest, cache prompt and reply. Yields while it waits."""
        asked = prompt(request, self._page_size)
        tokens = asked + reply(number, request, self._page_size)
        if len(tokens) // (self._page_size * 4) > self._pool.num_pages:
            self.too_large += 1
            return
        fetched = self.cache.prefetch(asked)
        while fetched is not None and not self.cache.prefetch_done(fetched):
            yield
        landed = fetched.num_landed if fetched is not None else 0
        while not (yield from self._run(asked, tokens, landed)):
            yield  # the others have all the room

    def _run(self, asked: bytes, tokens: bytes, landed: int) -> Generator[None, None, bool]:
        """False, with nothing kept, when there is no room now."""
        cache, page_bytes = self.cache, self._page_size * 4
        found = cache.match_prefix(asked)
        node = found.host_node
        cache.lock(node)
        flight = cache.load_back(node)
        while flight is not None and not flight.done:
            yield
        held = cache.match_prefix(asked)
        cache.lock(held.node)
        cache.unlock(node)
        new = cache.allocate(len(tokens) // page_bytes - held.num_pages)
        if new is not None:
            self._compute(tokens, held.page_indices, new)
            insertion = cache.insert(tokens, new, first_page=held.num_pages)
            cache.free(new[: insertion.num_existing - held.num_pages])
            self._count(len(asked) // page_bytes, found.num_pages, held.num_pages, landed)
        cache.unlock(held.node)
        return new is not None

    def _count(self, asked: int, on_device: int, held: int, landed: int) -> None:
        """The prompt's pages by the tier they came from."""
        loaded = max(0, held - on_device)
        stored = min(loaded, landed)
        self.prompt_pages += asked
        self.hits[StorageMedium.GPU] += held - loaded
        self.hits[StorageMedium.CPU] += loaded - stored
        if self.storage_medium is not None:
            self.hits[self.storage_medium] += stored

    def _compute(self, tokens: bytes, hit: PageIndices, new: PageIndices) -> None:
        """Fill the new pages with what their prefix makes them, and check those that were hit."""
        sums, crc = [], 0
        for page in pages_of(tokens, self._page_size):
            crc = zlib.crc32(page, crc)
            sums.append(crc & 0xFFFFFF)  # exact in a float32
        values = torch.tensor(sums, dtype=torch.float32)
        for layer in range(_SHAPE.num_layers):
            fresh = (values[len(hit) :] + layer)[:, None, None, None]
            fresh = fresh.expand(-1, self._page_size, _SHAPE.num_kv_heads, _SHAPE.head_dim)
            self._pool.write(layer, new, fresh, -fresh)
        self.checked_pages += len(hit)
        index = self._pool.index(hit)
        for layer in range(_SHAPE.num_layers):
            for planes, sign in ((self._pool.k, 1), (self._pool.v, -1)):
                held = planes[layer][index, -1, 0, 0] * sign
                self.wrong_pages += int((held != values[: len(hit)] + layer).sum())


def _storage(options: DemoOptions) -> StorageBackend | None:
    form = PageFormat(_MODEL, _SHAPE, options.page_size)
    match options.storage:
        case "file":
            return FileStorage(options.storage_dir, form)
        case "mooncake":
            from hicache.storage.mooncake import MooncakeConfig, MooncakeStorage

            config = MooncakeConfig(
                local_hostname="127.0.0.1",
                master_server_address=options.mooncake_master,
                global_segment_size=_MOONCAKE_BYTES,
            )
            return MooncakeStorage(config, form)
        case _:
            return None
