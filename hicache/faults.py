"""Faults on purpose: copies and storage calls that come late, fail, or never end.

For tests of whatever is built on the cache. A plan is asked once for each call what is to become of it.
A late call does its work late, when the delay is over, so that whatever it reads or writes must still be
its own by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from hicache.node import PageIndices
from hicache.pool import HostPool
from hicache.storage.backend import StorageBackend, StorageStats, StoredPage
from hicache.tier import Tier
from hicache.transfer import TransferJob, Transfers

__all__ = ["Fault", "FaultyStorage", "FaultyTransfers"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one call.

    `delay`: how many ticks it is put off. `fails`: it does half of its work, then fails. `never`: it does
    nothing until `release`.
    """

    delay: int = 0
    fails: bool = False
    never: bool = False


Plan: TypeAlias = Callable[[str], Fault]
"""Given the name of the call: `to_host`, `to_device`, `exists_prefix`, `put`, `get`."""


class _Late:
    """A copy that is put off."""

    def __init__(self, fault: Fault, target: Tier, device: PageIndices, host: PageIndices) -> None:
        self.fault, self.delay = fault, fault.delay
        self.target, self.device, self.host = target, device, host
        self.job: TransferJob | None = None
        self.closed = False

    def poll(self) -> bool | None:
        if self.job is None:
            return False if self.closed else None
        done = self.job.poll()
        return done and not self.fault.fails


class FaultyTransfers:
    """`inner`, with faults. A tick is a call of `start`."""

    def __init__(self, inner: Transfers, plan: Plan) -> None:
        self._inner, self._plan = inner, plan
        self._late: list[_Late] = []

    def submit(
        self, target: Tier, device_pages: PageIndices, host_pages: PageIndices
    ) -> TransferJob:
        fault = self._plan("to_host" if target is Tier.HOST else "to_device")
        late = _Late(fault, target, device_pages, host_pages)
        self._late.append(late)
        return late

    def start(self) -> None:
        for late in self._late:
            late.delay -= 1
        self._begin([late for late in self._late if late.delay < 0 and not late.fault.never])

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None:
        """What is only late is done now."""
        mine = [job for job in jobs if isinstance(job, _Late)]
        self._begin([job for job in mine if job in self._late and not job.fault.never])
        self._inner.wait([job.job for job in mine if job.job is not None], timeout_s)

    def release(self) -> None:
        """What was never to end is only late from now on."""
        self._begin(list(self._late))

    def close(self) -> None:
        self._inner.close()
        for late in self._late:
            late.closed = True
        self._late.clear()

    def _begin(self, ready: list[_Late]) -> None:
        for late in ready:
            self._late.remove(late)
            count = len(late.host) // 2 if late.fault.fails else len(late.host)
            late.job = self._inner.submit(late.target, late.device[:count], late.host[:count])
        self._inner.start()


class _LateCall:
    """A call of a store that is put off."""

    def __init__(self, fault: Fault, start: Callable[[int], Future[int]], count: int) -> None:
        self.fault, self.delay = fault, fault.delay
        self.future: Future[int] = Future()
        self._start, self._count = start, count // 2 if fault.fails else count

    def begin(self) -> None:
        self._start(self._count).add_done_callback(
            lambda done: self.future.set_result(0 if done.cancelled() else done.result())
        )


class FaultyStorage:
    """`inner`, with faults. A tick is a call of `take_lost`."""

    def __init__(self, inner: StorageBackend, plan: Plan) -> None:
        self._inner, self._plan = inner, plan
        self._late: list[_LateCall] = []
        self._lock = Lock()

    @property
    def tier(self) -> Tier:
        return self._inner.tier

    @property
    def stats(self) -> StorageStats:
        return self._inner.stats

    @property
    def audit_interval_s(self) -> float | None:
        return self._inner.audit_interval_s

    def attach(self, pool: HostPool) -> None:
        self._inner.attach(pool)

    def held(self) -> list[StoredPage]:
        return self._inner.held()

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        return self._call(
            "exists_prefix", lambda count: self._inner.exists_prefix(keys[:count]), len(keys)
        )

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        return self._call(
            "put", lambda count: self._inner.put(pages[:count], host_pages[:count]), len(pages)
        )

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        return self._call(
            "get", lambda count: self._inner.get(keys[:count], host_pages[:count]), len(keys)
        )

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        self.release()  # it comes after every earlier put
        return self._inner.delete(keys)

    def clear(self) -> None:
        self.release()
        self._inner.clear()

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        return self._inner.audit(keys)

    def take_lost(self) -> list[bytes]:
        with self._lock:
            for call in self._late:
                call.delay -= 1
        self._begin(lambda call: call.delay < 0 and not call.fault.never)
        return self._inner.take_lost()

    def release(self) -> None:
        """What was never to end is only late from now on."""
        self._begin(lambda _: True)

    def close(self) -> None:
        self._inner.close()
        with self._lock:
            late, self._late = self._late, []
        for call in late:
            call.future.cancel()

    def _call(self, name: str, start: Callable[[int], Future[int]], count: int) -> Future[int]:
        call = _LateCall(self._plan(name), start, count)
        if call.delay or call.fault.never:
            with self._lock:
                self._late.append(call)
        else:
            call.begin()
        return call.future

    def _begin(self, ready: Callable[[_LateCall], bool]) -> None:
        with self._lock:
            begun = [call for call in self._late if ready(call)]
            self._late = [call for call in self._late if call not in begun]
        for call in begun:
            call.begin()
