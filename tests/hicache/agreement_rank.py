"""One rank of a tensor-parallel group, as a process; `test_agreement` starts them and compares.

`agreement_rank.py RANK SIZE FOLDER PLANS`, with a JSON `Plan` for each of some folders in that one, one
after the other. What is asked of the caches comes from one
random sequence, the same on every rank; how long it takes and what of it fails, from one of the rank's
own. After each step the rank checks its own cache, and writes down the state of it (`rankN.trees`) and
the events of the step (`rankN.events`), a line each; at the end, what happened (`rankN.counts`).
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple, TextIO

import msgspec
import torch

from hicache import (
    Flight,
    GroupAgreement,
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    KVShape,
    Node,
    PagePool,
    Prefetch,
    PrefetchPolicy,
    Tier,
    WritePolicy,
)
from hicache.faults import Fault, FaultyStorage, FaultyTransfers
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from hicache.tier import MEDIUM
from hicache.transfer import CpuTransfers
from kvevents.hashing import BlockHash, block_hashes
from kvevents.index import BlockIndex, Oddities

PAGE = 2
SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.uint8)
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
DELAYS = {"exists_prefix": (0, 0, 2, 8), "get": (0, 6, 12)}
GROUP_TIMEOUT = timedelta(seconds=20)
SETTLE_TIMEOUT_S = 20.0


class Plan(msgspec.Struct, frozen=True):
    """`events`: as the cache takes it. `restarts`: a round goes on with the files of the one before."""

    seed: int
    rounds: int
    steps: int
    events: bool | None
    restarts: bool


class Choices(NamedTuple):
    """Where a rank's random choices come from."""

    shared: Random
    own: Random


@dataclass(slots=True)
class Counts:
    """What happened in all rounds, to see that the test was one."""

    stored: dict[str, int]
    failed_flights: int = 0
    abandoned_flights: int = 0
    num_landed: int = 0
    """Pages that came from storage."""
    lost: int = 0
    """Pages that this rank's store lost."""
    restored: int = 0


@dataclass(slots=True)
class Loading:
    """A locked node, until what brings it to the device is done."""

    node: Node
    flight: Flight | None


class RankUnderTest:
    """A cache, what is done to it, and what its part of the KV must be."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        choices: Choices,
        prefetch_policy: PrefetchPolicy,
        events: bool | None,
    ) -> None:
        self._shared, self._own = choices
        self._rank, self._directory = rank, directory
        self._now = self._own.random() * 1000
        self._prompts: list[list[int]] = []
        self._held: list[Loading] = []
        self._prefetches: list[Prefetch] = []
        self._index = BlockIndex()
        self._records = rank == 0 if events is None else events
        self._landed = 0
        self._settled = False
        self.pool = PagePool(24, PAGE, SHAPE)
        self.host = HostPool(14, PAGE, SHAPE)
        form = PageFormat("agreement", SHAPE, PAGE, tp_rank=rank, tp_size=size)
        self._files = FileStorage(directory, form, min_free_bytes=0)
        self.storage = FaultyStorage(self._files, self._fault)
        self.transfers = FaultyTransfers(CpuTransfers(self.pool, self.host), self._fault)
        self.cache = HiRadixCache(
            self.pool,
            host_pool=self.host,
            storage=self.storage,
            transfers=self.transfers,
            config=HiCacheConfig(
                write_policy=self._shared.choice(list(WritePolicy)),
                eviction_policy=self._shared.choice(POLICIES),
                prefetch_policy=prefetch_policy,
                load_back_threshold=0,
                prefetch_threshold=PAGE,
                prefetch_max_pages=12,
                prefetch_timeout_base_s=5.0,
                transfer_timeout_s=6.0,
            ),
            agreement=GroupAgreement(),
            events=events,
            clock=lambda: self._now,
        )

    def _fault(self, call: str) -> Fault:
        """A store that fails is left alone for a while, so its writes do so rarely; a read takes so long
        that one rank may be through with it, or out of patience, when the request asks, and another not.
        """
        luck = self._own.random() * (8 if call == "put" else 1)
        delay = self._own.choice(DELAYS.get(call, (0, 0, 0, 1, 2, 5)))
        return Fault(delay=delay, fails=luck < 0.04, never=0.04 < luck < 0.08)

    # -------------------------------------------------------------------------- what is asked

    def step(self) -> None:
        """One of the operations, then a tick; this rank's time goes on as it likes."""
        operations: list[tuple[int, Callable[[], None]]] = [
            (40, self._request),
            (14, self._load_back),
            (20, self._prefetch),
            (10, self._unlock),
            (10, self._ask_prefetch),
            (3, self._cancel_prefetch),
            (8, lambda: self._evict(self._shared.randint(1, 12))),
            (1, self._flush),
            (2, self._settle),
            (2, self._reset_device),
            (12, self._idle),
        ]
        weights = [weight for weight, _ in operations]
        self._shared.choices(operations, weights)[0][1]()
        self._meddle()
        self.cache.tick()
        for one in [one for one in self._held if one.flight is None or one.flight.done]:
            if self._shared.random() < 0.5:
                self._held.remove(one)
                self.cache.unlock(one.node)

    def _meddle(self) -> None:
        """What happens to this rank alone."""
        self._now += self._own.choice((0.0, 0.1, 0.5, 2.0))
        luck = self._own.random()
        if luck < 0.04:
            self.transfers.release()
            self.storage.release()
        elif luck < 0.055 and (files := page_files(self._directory)):
            self._own.choice(files).unlink(missing_ok=True)
            self.storage.audit([page.key for page in self._files.held()])
        elif luck < 0.5:
            time.sleep(self._own.random() * 0.002)  # a slow rank, not a wait for anything

    def _new_prompt(self) -> list[int]:
        base = self._shared.choice(self._prompts) if self._prompts else []
        kept = base[: self._shared.randint(0, len(base))]
        more = [self._shared.randint(0, 3) for _ in range(self._shared.randint(1, 14))]
        self._prompts.append(kept + more)
        del self._prompts[:-10]
        return kept + more

    def _old_prompt(self) -> list[int]:
        return self._shared.choice(self._prompts) if self._prompts else self._new_prompt()

    def _request(self) -> None:
        tokens = self._old_prompt() if self._shared.random() < 0.75 else self._new_prompt()
        match = self.cache.match_prefix(tokens)
        hashes = block_hashes(tokens, PAGE)
        for page, block in zip(match.page_indices, hashes, strict=False):
            assert self._bytes_in(Tier.DEVICE, page) == self._content(block)
        self.cache.lock(match.node)
        new = self.cache.allocate(len(tokens) // PAGE - match.num_pages)
        if new is not None:
            for page, block in zip(new, hashes[match.num_pages :], strict=True):
                self._write(page, block)
            priority = self._shared.randint(0, 2)
            insertion = self.cache.insert(
                tokens, new, first_page=match.num_pages, priority=priority
            )
            self.cache.free(new[: insertion.num_existing - match.num_pages])
        self.cache.unlock(match.node)

    def _load_back(self) -> None:
        match = self.cache.match_prefix(self._old_prompt())
        if match.num_host_pages:
            self.cache.lock(match.host_node)
            flight = self.cache.load_back(match.host_node)
            self._held.append(Loading(match.host_node, flight))

    def _prefetch(self) -> None:
        if (prefetch := self.cache.prefetch(self._old_prompt())) is not None:
            self._prefetches.append(prefetch)

    def _ask_prefetch(self) -> None:
        asked = [one for one in self._prefetches if self._shared.random() < 0.5]
        done = [one for one in asked if self.cache.prefetch_done(one)]
        self._prefetches = [one for one in self._prefetches if one not in done]
        self._landed += sum(one.num_landed for one in done)

    def _cancel_prefetch(self) -> None:
        if self._prefetches:
            which = self._shared.randrange(len(self._prefetches))
            self.cache.cancel_prefetch(self._prefetches.pop(which))

    def _unlock(self) -> None:
        if self._held:
            self.cache.unlock(self._held.pop(self._shared.randrange(len(self._held))).node)

    def _evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    def _idle(self) -> None:
        for _ in range(16):
            self._files.exists_prefix([]).result(
                SETTLE_TIMEOUT_S
            )  # what it has begun to read is read
            self._meddle()
            self.cache.tick()

    def _settle(self) -> None:
        """The ranks wait as long as the least patient of them."""
        self._settled = self.cache.settle(self._own.random() * 0.01)

    def _flush(self) -> None:
        self._unlock_all()
        self.cache.flush()

    def _reset_device(self) -> None:
        self._unlock_all()
        self.cache.reset_device()

    def _unlock_all(self) -> None:
        while self._held:
            self.cache.unlock(self._held.pop().node)

    def end(self) -> None:
        """What was never to end, ends; nothing is left under way."""
        self._unlock_all()
        for prefetch in self._prefetches:
            self.cache.cancel_prefetch(prefetch)
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while self.cache.num_in_flight:
            self.transfers.release()
            self.storage.release()
            self.cache.tick()
            assert time.monotonic() < deadline, f"{self.cache.num_in_flight} in flight"

    def count(self, counts: Counts) -> None:
        """Add what happened here."""
        stats = self.cache.stats()
        for medium, num_pages in stats.stored.items():
            counts.stored[medium] = counts.stored.get(medium, 0) + num_pages
        counts.failed_flights += stats.failed_flights
        counts.abandoned_flights += stats.abandoned_flights
        counts.num_landed += self._landed
        counts.lost += self._files.stats.lost

    # --------------------------------------------------------------------------- what must be

    def check(self) -> str:
        """The cache is sound, holds the right bytes, and told of all it holds; the events it told."""
        assert self.cache.violations() == []
        for tier in (Tier.DEVICE, Tier.HOST):
            for block, page in self.cache.resident_pages(tier).items():
                assert self._bytes_in(tier, page) == self._content(block), (tier, block)
        events = self.cache.take_events()
        self._index.apply(events)
        if self._records:
            truth = {medium: held for medium, held in self.cache.resident_blocks().items() if held}
            believed = {medium: held for medium, held in self._index.resident.items() if held}
            assert believed == truth
            assert self._index.oddities == Oddities()
        return repr(events)

    def dump(self) -> str:
        """All that the ranks must have in common."""
        tree = self.cache._tree
        nodes = []
        stack = list(tree.roots())
        while stack:
            node = stack.pop()
            nodes.append(
                (
                    *(node.first_id, node.num_pages, node.key.hex()),
                    [copy is not None for copy in node.copies],
                    *(node.lock_ref, node.host_ref, node.moving, node.hits, node.last_access),
                )
            )
            stack += node.children.values()
        free = self.pool.allocator.num_free, self.host.allocator.num_free
        return repr((nodes, free, self.cache.num_in_flight, self._settled))

    def _content(self, block: BlockHash) -> bytes:
        """This rank's part of a block's KV."""
        planes = (b"%d %d %d" % (block, self._rank, i) for i in range(SHAPE.num_planes))
        return b"".join(blake2b(plane, digest_size=32).digest() for plane in planes)

    def _write(self, page: int, block: BlockHash) -> None:
        content = torch.tensor(array("B", self._content(block)), dtype=torch.uint8)
        for raw, part in zip(self.pool.raw, content.view(-1, 32), strict=True):
            raw[page] = part

    def _bytes_in(self, tier: Tier, page: int) -> bytes:
        if tier is Tier.HOST:
            return bytes(self.host.page(page))
        return b"".join(bytes(raw[page].tolist()) for raw in self.pool.raw)


def run(rank: int, size: int, folder: Path, plan: Plan, trees: TextIO, events: TextIO) -> Counts:
    """All rounds."""
    counts = Counts({})
    for number in range(plan.rounds):
        seed = plan.seed * 100 + number
        choices = Choices(Random(seed), Random(f"{seed} of {rank}"))
        directory = folder / ("files" if plan.restarts else f"files{number}") / str(rank)
        lose_some(directory, choices.own)
        policy = list(PrefetchPolicy)[-1 - number % len(PrefetchPolicy)]
        under_test = RankUnderTest(directory, rank, size, choices, policy, plan.events)
        with closing(under_test.cache) as cache:
            counts.restored += len(cache.resident_blocks()[MEDIUM[Tier.DISK]])
            for step in range(plan.steps):
                told = under_test.check()
                print(number, step, under_test.dump(), file=trees, flush=True)
                print(number, step, told, file=events, flush=True)
                under_test.step()
            under_test.end()
            under_test.count(counts)
    return counts


def page_files(directory: Path) -> list[Path]:
    """Every page of a store, in order. Folders may go meanwhile: a store that was cleared is put aside
    and removed in the background, and `rglob` of a folder that goes raises."""
    return sorted(
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if name.endswith(".kv")
    )


def lose_some(directory: Path, own: Random) -> None:
    """While nobody has the files open, some, all or none of them are lost."""
    chance = own.choice((0.0, 0.0, 0.05, 0.3, 1.0))
    for file in page_files(directory):
        if own.random() < chance:
            file.unlink()


def main(rank: int, size: int, folder: Path, plans: dict[str, Plan]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'group'}",
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    for name, plan in plans.items():
        own = folder / name
        with (
            (own / f"rank{rank}.trees").open("w") as trees,
            (own / f"rank{rank}.events").open("w") as events,
        ):
            counts = run(rank, size, own, plan, trees, events)
        (own / f"rank{rank}.counts").write_bytes(msgspec.json.encode(counts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        msgspec.json.decode(sys.argv[4], type=dict[str, Plan]),
    )
