"""Copies and storage calls that end when the test says so, and as it says.

A call does its work at the moment it is released, on the real pools and files: whatever it reads or
writes must still be its own by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum
from threading import Condition

from kv_blocks import Block, Blocks, Memory

from hicache.background import BackgroundThread
from hicache.node import PageIndices
from hicache.pool import HostPool
from hicache.storage.backend import StorageBackend, StorageStats, StoredPage
from hicache.tier import Tier
from hicache.transfer import TransferJob, Transfers

__all__ = ["WAITED", "Call", "Calls", "Kind", "Outcome", "SteppedStorage", "SteppedTransfers"]

_TIMEOUT_S = 60


class Outcome(Enum):
    """What becomes of a call."""

    OK = "ok"
    HALF = "half"
    """It does the first half of its work, and says so."""
    SILENT = "silent"
    """It does all of its work, and says that it failed."""
    LATE = "late"
    """Nothing yet. Only for copies that somebody waits for; others are late until they are released."""


class Kind(Enum):
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    EXISTS = "exists"
    PUT = "put"
    GET = "get"
    DELETE = "delete"


class Call:
    """A call under way. `source` and `target`: the pages that it reads and writes, in its tiers.

    `arrived`: how many of its leading blocks are there by what it said at its end; None before.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "future",
        "kind",
        "pages",
        "source",
        "started",
        "target",
        "work",
    )

    def __init__(
        self,
        kind: Kind,
        blocks: Sequence[Block],
        work: Callable[[int], int],
        source: PageIndices | None = None,
        target: PageIndices | None = None,
    ) -> None:
        self.kind, self.blocks, self.work = kind, tuple(blocks), work
        self.source, self.target = source, target
        self.pages: tuple[StoredPage, ...] = ()
        self.started = True
        self.arrived: int | None = None
        self.future: Future[int] = Future()

    def poll(self) -> bool | None:
        return None if self.arrived is None else self.arrived == len(self.blocks)

    def __repr__(self) -> str:
        return f"<{self.kind.name} of {self.blocks} arrived {self.arrived}>"


WAITED = object()
"""In a log: somebody waited for copies here."""


class Calls:
    """Those that are held. `log`: what was submitted and waited for; the account takes it."""

    def __init__(self) -> None:
        self.log: list[Call | object] = []
        self.reads: list[Call] = []
        """The calls of the prefetching threads, in the order in which they came."""
        self.outcomes: list[Outcome] = []
        """What becomes of the next copies that are waited for; when used up they are done."""
        self._held: list[Call] = []
        self._changed = Condition()

    @property
    def held(self) -> list[Call]:
        """What can be released, in the order of submission."""
        with self._changed:
            return [call for call in self._held if call.started]

    @property
    def under_way(self) -> list[Call]:
        """What was submitted and has not ended."""
        with self._changed:
            return list(self._held)

    def hold(self, call: Call) -> Call:
        with self._changed:
            self._held.append(call)
            if call.kind in (Kind.EXISTS, Kind.GET):
                self.reads.append(call)
            else:
                self.log.append(call)
            self._changed.notify_all()
        return call

    def start(self) -> None:
        for call in self._held:
            call.started = True

    def release(self, call: Call, outcome: Outcome = Outcome.OK) -> None:
        """Do it, and say so. A delete comes after every earlier put, and before every later one."""
        if call.kind in (Kind.PUT, Kind.DELETE):
            other = Kind.DELETE if call.kind is Kind.PUT else Kind.PUT
            held = self.under_way
            for earlier in held[: held.index(call)]:
                if earlier.kind is other and earlier.arrived is None:
                    self.release(earlier)
        with self._changed:
            self._held.remove(call)
        half = outcome is Outcome.HALF
        done = call.work(len(call.blocks) // 2 if half else len(call.blocks))
        if outcome is Outcome.SILENT or (half and call.kind in (Kind.TO_HOST, Kind.TO_DEVICE)):
            done = 0
        call.arrived = done
        call.future.set_result(done)

    def wait(self, jobs: Iterable[TransferJob]) -> None:
        """Somebody needs these copies now."""
        self.start()
        for job in jobs:
            assert isinstance(job, Call)
            if job.arrived is None:
                outcome = self.outcomes.pop(0) if self.outcomes else Outcome.OK
                if outcome is not Outcome.LATE:
                    self.release(job, outcome)
        self.log.append(WAITED)

    def cancel(self) -> None:
        """Nobody does any of it any more."""
        with self._changed:
            held, self._held = self._held, []
        for call in held:
            call.future.cancel()

    def settle(self, thread: BackgroundThread, kind: Kind) -> None:
        """Until `thread` is at rest: it has nothing to do, or waits for a call of `kind`."""
        if self._waits_for(kind):
            return
        passed = thread.submit(lambda: None)
        passed.add_done_callback(lambda _: self._notify())
        with self._changed:
            rests = self._changed.wait_for(
                lambda: passed.done() or self._waits_for(kind), _TIMEOUT_S
            )
        assert rests, f"the thread of {kind} hangs"

    def _waits_for(self, kind: Kind) -> bool:
        return any(call.kind is kind for call in self._held)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class SteppedTransfers:
    """`inner`, each copy held until it is released."""

    def __init__(self, inner: Transfers, calls: Calls, memory: Memory) -> None:
        self._inner, self._calls, self._memory = inner, calls, memory

    def submit(
        self, target: Tier, device_pages: PageIndices, host_pages: PageIndices
    ) -> TransferJob:
        def work(count: int) -> int:
            job = self._inner.submit(target, device_pages[:count], host_pages[:count])
            self._inner.wait([job], _TIMEOUT_S)
            assert job.poll()
            return count

        if target is Tier.HOST:
            kind, source, to, tier = Kind.TO_HOST, device_pages, host_pages, Tier.DEVICE
        else:
            kind, source, to, tier = Kind.TO_DEVICE, host_pages, device_pages, Tier.HOST
        call = Call(kind, self._memory.blocks_in(tier, source), work, source[:], to[:])
        call.started = False
        return self._calls.hold(call)

    def start(self) -> None:
        self._calls.start()

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None:
        self._calls.wait(jobs)

    def close(self) -> None:
        self._inner.close()


class SteppedStorage:
    """`inner`, each call but an audit held until it is released.

    `lost`: what the cache will hear of when it asks; `taken`: what it heard of, for the account.
    """

    def __init__(
        self,
        inner: StorageBackend,
        calls: Calls,
        blocks: Blocks,
        audit_interval_s: float | None = None,
        parents_first: bool = False,
    ) -> None:
        self.inner, self._calls, self._blocks = inner, calls, blocks
        self._parents_first = parents_first
        self.audit_interval_s = audit_interval_s
        self.lost: list[bytes] = []
        self.taken: list[bytes] = []

    @property
    def tier(self) -> Tier:
        return self.inner.tier

    @property
    def stats(self) -> StorageStats:
        return self.inner.stats

    def attach(self, pool: HostPool) -> None:
        self.inner.attach(pool)

    def held(self) -> list[StoredPage]:
        return self.inner.held()

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        keys = list(keys)
        return self._hold(
            Call(
                Kind.EXISTS,
                self._named(keys),
                lambda count: self._end(self.inner.exists_prefix(keys[:count])),
            )
        )

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        call = Call(
            Kind.PUT,
            self._named([page.key for page in pages]),
            lambda count: self._end(self.inner.put(pages[:count], host_pages[:count])),
            source=host_pages[:],
        )
        call.pages = tuple(pages)
        return self._hold(call)

    def put_now(self, block: Block, host_page: PageIndices) -> None:
        """Somebody else stores a page."""
        above = None if block.parent is None else block.parent.key
        page = StoredPage(block.key, above, block.namespace, block.packed)
        self._end(self.inner.put([page], host_page))

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        keys = list(keys)
        return self._hold(
            Call(
                Kind.GET,
                self._named(keys),
                lambda count: self._end(self.inner.get(keys[:count], host_pages[:count])),
                target=host_pages[:],
            )
        )

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        keys = list(keys)
        return self._hold(
            Call(
                Kind.DELETE,
                self._named(keys),
                lambda _: self._end(self.inner.delete(keys)),
            )
        )

    def clear(self) -> None:
        """At once, and no put of before stores a page any more."""
        for call in self._calls.under_way:
            if call.kind is Kind.PUT:
                call.work = lambda _: 0
        self.inner.clear()
        self.inner.audit([]).result(_TIMEOUT_S)
        self.lost = []

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        done = self.inner.audit(keys)
        self._end(done)
        return done

    def take_lost(self) -> list[bytes]:
        lost, self.lost = self.lost, []
        if self._parents_first:
            lost.reverse()
        self.taken += lost
        return lost

    def close(self) -> None:
        self.inner.close()

    def _named(self, keys: Sequence[bytes]) -> list[Block]:
        return [self._blocks.by_key[key] for key in keys]

    def _hold(self, call: Call) -> Future[int]:
        return self._calls.hold(call).future

    def _end(self, inner: Future[int]) -> int:
        """Its result, once both of the store's threads have nothing left to do because of it."""
        result = inner.result(_TIMEOUT_S)
        self.inner.audit([]).result(_TIMEOUT_S)
        self.lost += self.inner.take_lost()
        return result
