"""hicache over a real Mooncake Store: what the cache believes of it, and tells, stays true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mooncake_rig import Lender, Master, config_of, wait_until

from hicache import HiCacheConfig, HiRadixCache, HostPool, KVShape, PagePool, PrefetchPolicy, Tier
from hicache.storage import MooncakeStorage, PageFormat
from kvevents import AllBlocksCleared, BlockIndex, BlockStored, Event, StorageMedium
from kvevents.hashing import block_digests, page_key
from kvevents.tokens import pack_tokens

pytestmark = pytest.mark.integration

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
PAGE_SIZE = 4
PROMPT = list(range(40))


def _short(event: Event) -> str:
    match event:
        case AllBlocksCleared():
            return "C"
        case BlockStored():
            return f"S {event.medium} {len(event.block_hashes)}"
        case _:
            return f"R {event.medium} {len(event.block_hashes)}"


class Worker:
    """A cache, and a router that hears of it."""

    def __init__(self, cache: HiRadixCache) -> None:
        self.cache, self.index = cache, BlockIndex()

    def heard(self) -> list[str]:
        """The events since the last look, by medium and number of blocks."""
        events = self.cache.take_events()
        self.index.apply(events)
        assert self.index.resident == self.cache.resident_blocks()
        assert self.cache.violations() == []
        return [_short(one) for one in events]

    def believed(self) -> int:
        """Blocks that the router believes in the external store."""
        self.heard()
        return len(self.index.resident[StorageMedium.EXTERNAL])

    def compute(self, tokens: list[int]) -> None:
        """Cache a prompt on every tier."""
        pages = self.cache.allocate(len(tokens) // PAGE_SIZE)
        assert pages is not None
        self.cache.device_pool.raw[:, list(pages)] = len(tokens)
        found = self.cache.insert(tokens, pages)
        self.cache.free(pages[: found.num_existing])
        assert self.cache.settle(30)

    def drop_all_but_storage(self) -> None:
        """Fill device and host with another prompt, then drop that from both."""
        self.compute(list(range(1000, 1000 + PAGE_SIZE * self.cache.device_pool.num_pages)))
        self.cache.reset_device()

    def fetch(self, tokens: list[int]) -> int:
        """Prefetch to the end; how many pages landed."""
        prefetch = self.cache.prefetch(tokens)
        assert prefetch is not None
        wait_until(lambda: self.tick() or self.cache.prefetch_done(prefetch))
        assert self.cache.settle(30)
        return prefetch.num_landed

    def tick(self) -> bool:
        self.cache.tick()
        return False


@contextmanager
def joined(master: Master, audit_interval_s: float = 3600.0) -> Iterator[Worker]:
    pool = PagePool(10, PAGE_SIZE, SHAPE)
    storage = MooncakeStorage(
        config_of(master.address),
        PageFormat.of(pool, "model"),
        audit_interval_s=audit_interval_s,
    )
    config = HiCacheConfig(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold=0, prefetch_max_pages=10
    )
    host = HostPool(10, PAGE_SIZE, SHAPE)
    with HiRadixCache(pool, host_pool=host, storage=storage, config=config) as cache:
        yield Worker(cache)


def test_pages_of_one_worker_are_hits_of_another() -> None:
    """They land on the other's host, byte for byte, and are told there as exactly that."""
    with Master() as master, Lender(master), joined(master) as one, joined(master) as other:
        one.compute(PROMPT)
        assert one.heard() == ["S GPU 10", "S CPU_PINNED 10", "S EXTERNAL 10"]
        assert other.fetch(PROMPT) == 10
        assert other.heard() == ["S CPU_PINNED 10"]
        pages = other.cache.resident_pages(Tier.HOST).values()
        host = other.cache.host_pool
        assert host is not None
        assert all(
            bytes(host.page(page)) == bytes([len(PROMPT)]) * len(host.page(page)) for page in pages
        )
        one.cache.flush()
        assert one.heard() == ["C"]
        other.cache.flush()
        assert other.fetch(PROMPT) == 10, "one worker's flush leaves the pages to the others"


def test_a_page_whose_owner_died_is_retracted_when_it_is_asked_for() -> None:
    """The store says it is there; the read fails; EXTERNAL is taken back, and the prompt is computed."""
    with Master() as master, Lender(master) as lender, joined(master) as worker:
        worker.compute(PROMPT)
        worker.drop_all_but_storage()
        worker.heard()
        held = worker.index.overlap(PROMPT).blocks
        assert (held[StorageMedium.GPU], held[StorageMedium.EXTERNAL]) == (0, 10)
        lender.kill()
        assert worker.fetch(PROMPT) == 0
        assert worker.heard() == ["R CPU_PINNED 10", "R EXTERNAL 10"]  # room made, in vain
        assert worker.cache.match_prefix(PROMPT).num_pages == 0
        worker.compute(PROMPT)
        assert worker.heard()[-1] == "S CPU_PINNED 10"


def test_what_is_gone_behind_our_back_is_retracted_by_an_audit() -> None:
    """Nobody asks for it, and it is taken back all the same."""
    with Master() as master, Lender(master), joined(master, 0.05) as worker:
        worker.compute(PROMPT)
        worker.heard()
        storage = MooncakeStorage(config_of(master.address), PageFormat("model", SHAPE, PAGE_SIZE))
        storage.attach(HostPool(1, PAGE_SIZE, SHAPE))
        keys = [
            page_key(digest, None) for digest in block_digests(b"", pack_tokens(PROMPT), PAGE_SIZE)
        ]
        assert storage.delete(keys[4:]).result(30) == 6
        storage.close()
        wait_until(lambda: worker.tick() or worker.believed() == 4)


def test_a_master_that_dies_takes_no_lock_and_no_page() -> None:
    """Writes fail, reads fail, everything ends; what was believed stored is retracted when asked for."""
    with Master() as master, Lender(master), joined(master) as worker:
        worker.compute(PROMPT)
        worker.drop_all_but_storage()
        worker.heard()
        master.kill()
        assert worker.fetch(PROMPT) == 0
        worker.compute([token + 5000 for token in PROMPT])
        worker.heard()
        stats = worker.cache.stats()
        assert stats.storage is not None and stats.storage.failed_puts > 0
        assert stats.storage.last_error.startswith("put: ")
        worker.cache.flush()
        assert worker.heard() == ["C"]
        for pool in (worker.cache.device_pool, worker.cache.host_pool):
            assert pool is not None and pool.allocator.num_free == pool.num_pages
