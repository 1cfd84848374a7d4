"""The worker of a run: a real cache under load from the trace, and its sidecar."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stress_child import Parent
from stress_clock import skew_clock, skew_spawned
from stress_plan import Plan
from stress_site import Site, sidecar_config, worker_info

from publisher import LinkError, Sidecar, spawn
from publisher.demo.engine import Engine
from publisher.demo.options import DemoOptions
from publisher.demo.trace import Request

__all__ = ["PATIENCE_S", "read_costs", "run_worker"]

PATIENCE_S = 30.0
"""For what must come; who needs it all has failed."""

_STEP_S = 0.001
_RETRY_S = 0.1
_FLUSH_S = 1.0
_FLUSH_EVERY_S = 0.7
_BEHIND_S = 0.1
_MOST_COSTS = 1 << 18
_INCARNATION = 1_000_000
"""Requests of one, so that no two make the same replies."""


def run_worker(
    parent: Parent, plan: Plan, site: Site, incarnation: int, requests: Sequence[Request]
) -> None:
    """Serve until told to leave."""
    skew_clock(site.clock)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    skew_spawned(site.clock, site.folder / f"python{incarnation}")
    costs = _Costs(site.costs(f"worker{incarnation}"))
    waits = _CoreWaits()
    open_before = _open_fds()
    engine = Engine(_options(plan))
    sidecar = _spawn(plan, site)
    arrivals = _Arrivals(plan, requests, incarnation)
    _Worker(parent, plan, engine, sidecar, arrivals, costs, waits).run()
    code = sidecar.close()
    engine.close()
    threads = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    parent.say("left", code, threads, sorted(_open_fds() - open_before))


class _Worker:
    def __init__(
        self,
        parent: Parent,
        plan: Plan,
        engine: Engine,
        sidecar: Sidecar,
        arrivals: _Arrivals,
        costs: _Costs,
        waits: _CoreWaits,
    ) -> None:
        self._parent, self._plan, self._engine = parent, plan, engine
        self._sidecar, self._arrivals = sidecar, arrivals
        self._costs = costs
        self._stopped = False
        self._waits = waits
        signal.signal(signal.SIGCONT, self._continued)

    def run(self) -> None:
        """Under load until told to be quiet, then until told to leave."""
        self._parent.say("ready", self._sidecar.pid)
        flush_at = time.monotonic() + _FLUSH_EVERY_S
        busy = True
        while (message := self._parent.poll(0.0 if busy else _STEP_S)) is None:
            busy = self._step()
            if self._plan.flushes and time.monotonic() > flush_at:
                flush_at = time.monotonic() + _FLUSH_EVERY_S
                self._finish()
                self._engine.cache.flush()
                self._arrivals.open = True
        while message != ("leave",):
            if message == ("quiet",):
                self._parent.say("quiet", *self._quiet())
            message = self._parent.poll(_STEP_S)
            self._step()

    def _step(self) -> bool:
        busy = self._engine.step(self._arrivals)
        client, cache = self._sidecar.client, self._engine.cache
        handed_over = client.stats.written + client.stats.refused
        self._stopped = False
        waited, before = self._waits.total_ns(), time.perf_counter_ns()
        self._sidecar.pump(cache)
        took = time.perf_counter_ns() - before
        waited = self._waits.total_ns() - waited
        if not self._stopped and client.stats.written + client.stats.refused != handed_over:
            self._costs.add(took, waited)
        return busy

    def _finish(self) -> None:
        """Let the requests at work come to their end."""
        self._arrivals.open = False
        while self._step():
            pass

    def _quiet(self) -> tuple[Any, ...]:
        """The state of the cache once nothing moves and all of it is published."""
        self._finish()
        deadline = time.monotonic() + PATIENCE_S
        settled, flushed = self._engine.settle(), None
        while flushed is None and time.monotonic() < deadline:
            flushed = self._sidecar.client.flush(self._engine.cache, _FLUSH_S)
            if flushed is None:
                time.sleep(_RETRY_S)
        stats = self._sidecar.client.stats
        problems = self._engine.cache.violations()
        if not settled:
            problems.append("copies between the tiers did not end")
        if self._engine.wrong_pages:
            problems.append(f"{self._engine.wrong_pages} pages had wrong KV")
        blocks = {
            str(medium): held for medium, held in self._engine.cache.resident_blocks().items()
        }
        return (
            blocks,
            None if flushed is None else flushed.next_seqs,
            {
                "requests": self._engine.num_served,
                "written": stats.written,
                "refused": stats.refused,
                "retellings": stats.retellings,
            },
            problems,
        )

    def _continued(self, _signal: int, _frame: object) -> None:
        """This process was stopped: what was being measured is not the pump."""
        self._stopped = True


class _Arrivals(Iterator[tuple[int, Request]]):
    """The next request of the trace once it is due; ends for now when none is."""

    def __init__(self, plan: Plan, requests: Sequence[Request], incarnation: int) -> None:
        self._requests, self._every_s = requests, 1 / plan.requests_per_s
        self._at = plan.first_request
        self._first_number = incarnation * _INCARNATION
        self._due = time.monotonic()
        self.open = True

    def __next__(self) -> tuple[int, Request]:
        now = time.monotonic()
        self._due = max(self._due, now - _BEHIND_S)
        if not self.open or now < self._due:
            raise StopIteration
        self._due += self._every_s
        self._at += 1
        return self._first_number + self._at, self._requests[self._at % len(self._requests)]


class _CoreWaits:
    """How long this thread was ready to run and had no core: the machine's doing, not the pump's."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def total_ns(self) -> int:
        return int(os.pread(self._file, 64, 0).split()[1])


class _Costs:
    """How long the pumps took that handed something over, and how much of that the thread waited for a
    core; in a file that survives the process.
    """

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_MOST_COSTS * 8)
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("I")
        self._at = 0

    def add(self, took_ns: int, waited_ns: int) -> None:
        if self._at < len(self._cells):
            self._cells[self._at] = max(1, took_ns // 1000)
            self._cells[self._at + 1] = waited_ns // 1000
            self._at += 2


def read_costs(path: Path) -> list[tuple[int, int]]:
    """Microseconds: how long, and how much of it for want of a core."""
    cells = memoryview(path.read_bytes()).cast("I") if path.exists() else ()
    return [(cells[at], cells[at + 1]) for at in range(0, len(cells), 2) if cells[at]]


def _spawn(plan: Plan, site: Site) -> Sidecar:
    """Again and again, while the last worker's sidecar still has the sockets."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return spawn(worker_info(plan), sidecar_config(plan, site), ring_bytes=plan.ring_bytes)
        except LinkError as error:
            logging.getLogger(__name__).warning("spawn: %s", error)
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _options(plan: Plan) -> DemoOptions:
    return DemoOptions(
        trace="",
        requests=0,
        device_pages=plan.device_pages,
        host_pages=plan.host_pages,
        storage="none",
        storage_dir="",
        mooncake_master="",
        write_policy=plan.write_policy,
        page_size=plan.page_size,
        endpoint="",
        replay_endpoint="",
        movable=(),
        as_json=False,
    )


def _open_fds() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return found
