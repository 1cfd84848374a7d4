"""Two workers with a device and a host tier, each with a sidecar, for the tests of the tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from publisher_rig import LOOPBACK, PATIENCE_S, insert, short_folder

from hicache import HiRadixCache, HostPool, KVShape, PagePool
from kvevents import BASE, Namespace
from kvevents.hashing import BlockHash, block_hashes
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn

__all__ = ["BLOCK", "Hand", "crew"]

BLOCK = 4


@dataclass(frozen=True)
class Hand:
    """A worker: its cache, its sidecar, and what a command takes for it."""

    name: str
    cache: HiRadixCache
    sidecar: Sidecar

    @property
    def source(self) -> str:
        """With its replay endpoint."""
        (bound,) = self.sidecar.client.sinks
        return f"{self.name}={bound.endpoint},{bound.replay_endpoint}"

    def serve(self, tokens: Sequence[int], namespace: Namespace = BASE) -> None:
        """One request, told at once, after its copies have finished."""
        insert(self.cache, tokens, namespace)
        assert self.cache.settle(PATIENCE_S)
        self.sidecar.pump(self.cache)

    def flush(self) -> int:
        """All is published; the seq of the last batch."""
        answer = self.sidecar.client.flush(self.cache, PATIENCE_S)
        assert answer is not None, "the sidecar did not answer"
        return answer.next_seqs[0] - 1

    def counts(self) -> dict[str, int]:
        """Resident blocks by medium, of the cache's own."""
        return {medium.value: len(held) for medium, held in self.cache.resident_blocks().items()}

    def held(self) -> set[BlockHash]:
        """The blocks that are on any medium."""
        return set().union(*self.cache.resident_blocks().values())

    def leading(self, tokens: Sequence[int]) -> dict[str, int]:
        """How many of the prompt's leading blocks are on each medium, from the cache's own."""
        names, found = block_hashes(tokens, BLOCK), {}
        for medium, held in self.cache.resident_blocks().items():
            missing = (at for at, name in enumerate(names) if name not in held)
            found[medium.value] = next(missing, len(names))
        return found

    def leading_on_any(self, tokens: Sequence[int]) -> int:
        """The same, wherever each of them is."""
        held = self.held()
        names = block_hashes(tokens, BLOCK)
        return next((at for at, name in enumerate(names) if name not in held), len(names))


@contextlib.contextmanager
def crew(*names: str, **settings: object) -> Iterator[list[Hand]]:
    """So many of them, with 16 device and 32 host blocks each. `settings`: of the sinks."""
    with contextlib.ExitStack() as stack:
        hands, folder = [], str(stack.enter_context(short_folder()))
        for name in names:
            pool = PagePool(16, BLOCK, KVShape(1, 1, 1))
            host = HostPool.beside(pool, ratio=2)
            cache = stack.enter_context(HiRadixCache(pool, host_pool=host))
            sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, **settings)  # type: ignore[arg-type]
            config = SidecarConfig(sinks=(sink,), linger_s=0.0, state_dir=folder)
            worker = WorkerInfo(block_size=BLOCK, worker_id=name)
            hands.append(Hand(name, cache, stack.enter_context(spawn(worker, config))))
        yield hands
