"""One run: real processes under load, the faults of a plan, and what must be so when it is quiet again.

R1  Every subscriber's view is the cache, per tier.
R2  On no sink was a seq repeated with other bytes, or skipped (V1 to V5 of `stress_evidence`).
R3  The engine's thread spends less than 1 ms in 99 of 100 pumps that hand something over, not counting
    when it was stopped, or ready to run and without a core: the machine's load is not the product's.
R4  Every process's memory is bounded.
R5  What /metrics says adds up: all that was offered was published, or refused, or is pending; the
    sidecar is ready, and its blocks are the cache's.
R6  After the worker has left, every view is empty, and no process, thread, descriptor or file is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import stat
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from stress_child import Body, Child, descendants, peak_mb
from stress_consumer import run_consumer
from stress_evidence import check_clears, check_evidence, read_evidence
from stress_metrics import check_metrics
from stress_plan import SUBSCRIBERS, Fault, Kind, Plan
from stress_proxy import run_proxy
from stress_site import SINKS, Site, told_media
from stress_subscriber import run_subscriber
from stress_vandal import run_vandal
from stress_worker import PATIENCE_S, read_costs, run_worker

from publisher.demo.trace import Request

__all__ = ["LIMITS_MB", "Outcome", "can_mount", "run"]

PUMP_P99_US = 1000
LIMITS_MB = {"worker": 80, "sidecar": 96, "A": 64, "B": 64, "C": 64}
"""Of a sidecar, all; of the others, what is not shared with the harness that forked them. About twice
what hundreds of runs came to.
"""

_END_S = 30.0
"""In which everybody must have heard that the worker left, and ended."""

_STATE_BYTES = 96 << 20
_LOOK_S = 0.02


@dataclass(slots=True)
class Outcome:
    """What came of a run. `problems`: violations of R1 to R6; none is a success."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    injected: Counter[Kind] = field(default_factory=Counter)
    skipped: Counter[Kind] = field(default_factory=Counter)
    requests: int = 0
    refused: int = 0
    retellings: int = 0
    pump_us: list[tuple[int, int]] = field(default_factory=list)
    """What each took, and how much of that the thread waited for a core."""
    peaks_mb: dict[str, float] = field(default_factory=dict)
    seqs: tuple[int, ...] = ()
    seconds: float = 0.0
    kept: Path | None = None
    """The folder with the logs of a run that failed."""

    def pump_percentile_us(self, percent: float, *, with_waits: bool = False) -> int:
        """How long that part of the pumps took at most."""
        costs = sorted(took - (0 if with_waits else waited) for took, waited in self.pump_us)
        return costs[min(len(costs) - 1, int(len(costs) * percent / 100))] if costs else 0


class _Broken(Exception):
    """The run cannot go on. The message says what did not happen."""


def run(plan: Plan, requests: Sequence[Request]) -> Outcome:
    """Never raises for what the product does; whatever was started is ended."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvstress-"))
    outcome = Outcome(plan)
    site = Site.choose(folder)
    running = _Run(plan, site, requests, outcome)
    mounted = can_mount() and _mount(site.state)
    try:
        running.go(disk=mounted)
    except _Broken as broken:
        outcome.problems.append(str(broken))
    finally:
        running.end()
        outcome.problems += running.judge()
        if outcome.problems:
            outcome.kept = folder
            _keep_state(folder)
        if mounted:
            _unmount(site.state)
        if not outcome.problems:
            shutil.rmtree(folder)
    outcome.seconds = time.monotonic() - began
    return outcome


class _Run:
    def __init__(
        self, plan: Plan, site: Site, requests: Sequence[Request], outcome: Outcome
    ) -> None:
        self._plan, self._site, self._requests, self._outcome = plan, site, requests, outcome
        self._children: dict[str, Child] = {}
        self._dead: list[Child] = []
        self._incarnations: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._stopped: set[int] = set()
        self._began = time.monotonic()
        self._said: dict[str, list[tuple[Any, ...]]] = {}
        self._journal = site.log("harness").open("w", buffering=1)
        self._disk = False

    # --------------------------------------------------------------------------------- phases

    def go(self, *, disk: bool) -> None:
        """Load, faults, quiet, checks, end. Raises _Broken."""
        self._disk = disk
        os.environ["TMPDIR"] = str(self._site.folder / "tmp")
        for name in ("proxy", "vandal", "worker", *SUBSCRIBERS):
            self._start(name)
        self._hear("worker", "ready")
        self._note("ready")
        start = time.monotonic()
        for fault in self._plan.faults:
            self._at(start + fault.at, partial(self._inject, fault))
        self._run_agenda(start + self._plan.load_s)
        self._heal()
        self._check_views()
        self._leave()

    def end(self) -> None:
        """Whatever still runs, of this run, is ended."""
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        for child in self._children.values():
            child.close()
        for child in self._dead:
            child.close()
        deadline = time.monotonic() + _END_S
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for pid, command in left.items():
            self._outcome.problems.append(f"R6: process {pid} is left: {command}")
            _signal(pid, signal.SIGKILL)
        _reap()
        self._journal.close()

    def judge(self) -> Iterator[str]:
        """What the files say."""
        outcome = self._outcome
        for path in sorted((self._site.folder / "tmp").rglob("*")):
            yield f"R6: left in the temporary folder: {path.name}"
        for path in sorted(self._site.state.rglob("*")):
            if stat.S_ISSOCK(path.lstat().st_mode):
                yield f"R6: a socket is left in the state directory: {path.name}"
        for number in range(self._incarnations["worker"]):
            outcome.pump_us += read_costs(self._site.costs(f"worker{number}"))
        if (p99 := outcome.pump_percentile_us(99)) > PUMP_P99_US:
            yield f"R3: 1 % of {len(outcome.pump_us)} pumps took more than {p99} µs"
        for name, peak in outcome.peaks_mb.items():
            if peak > LIMITS_MB.get(name, float("inf")):
                yield f"R4: {name} had {peak:.0f} MB, more than {LIMITS_MB[name]}"
        if outcome.retellings and self._uninterrupted():
            yield f"R2: {outcome.retellings} re-tellings, and nothing was missed"
        if outcome.seqs:
            for sink in SINKS:
                witnesses, end = self._witnesses(sink), outcome.seqs[sink]
                for problem in check_evidence(witnesses, end):
                    yield f"sink {sink}: {problem}"
                if self._uninterrupted():
                    for problem in check_clears(witnesses, end):
                        yield f"sink {sink}: {problem}"

    def _uninterrupted(self) -> bool:
        """Whether nothing was missed, though a sidecar may have been killed, and nothing flushed."""
        outcome = self._outcome
        replaced = self._incarnations["worker"] > 1
        kept = not outcome.injected[Kind.DISK_FULL]
        return kept and not replaced and not outcome.refused and not self._plan.flushes

    def _witnesses(self, sink: int) -> dict[str, list[Any]]:
        found = {}
        for name in SUBSCRIBERS:
            for number in range(self._incarnations[name]):
                path = self._site.evidence(f"{name}{number}", sink)
                if path.exists():
                    found[path.name] = read_evidence(path)
        return found

    def _check_views(self) -> None:
        """R1, once all is quiet."""
        outcome = self._outcome
        self._child("worker").say("quiet")
        blocks, next_seqs, counts, problems = self._hear("worker", "quiet")
        outcome.problems += [f"worker: {problem}" for problem in problems]
        outcome.requests, outcome.refused = counts["requests"], counts["refused"]
        outcome.retellings = counts["retellings"]
        if next_seqs is None:
            raise _Broken("R1: the sidecar did not publish all in time")
        self._note(f"quiet: {counts}, next seqs {next_seqs}")
        outcome.seqs = tuple(next_seqs)
        self._child("vandal").say("hang up")
        for name in SUBSCRIBERS:
            self._child(name).say("show", next_seqs)
        for name in SUBSCRIBERS:
            views, oddities = self._hear(name, "view")
            outcome.problems += [f"{name}: {problem}" for problem in oddities]
            for sink, view in views.items():
                told = {
                    medium: held
                    for medium, held in blocks.items()
                    if medium in told_media(self._plan, sink)
                }
                outcome.problems += _differences(f"{name}, sink {sink}", told, view)
        outcome.problems += check_metrics(self._site.http, blocks)
        self._measure()

    def _leave(self) -> None:
        """R6."""
        sidecars = self._sidecars()
        worker = self._child("worker")
        for name in SUBSCRIBERS:
            self._child(name).say("await end")
        worker.say("leave")
        code, threads, fds = self._hear("worker", "left")
        problems = self._outcome.problems
        if code:
            problems.append(f"R6: the sidecar ended with {code}")
        problems += [f"R6: thread {name} is left" for name in threads]
        problems += [f"R6: descriptor {fd} is left" for fd in fds]
        self._settle(worker)
        for name in SUBSCRIBERS:
            self._hear(name, "end", _END_S)
        for name in ("proxy", "vandal", *SUBSCRIBERS):
            self._child(name).say("leave")
        for name in ("proxy", "vandal", *SUBSCRIBERS):
            self._settle(self._child(name))
        _reap()
        problems += [
            f"R6: sidecar {pid} is left" for pid in sidecars if pid in descendants(os.getpid())
        ]

    def _settle(self, child: Child) -> None:
        if not child.wait(_END_S):
            self._outcome.problems.append(f"R6: {child.name} did not end")
        elif child.status:
            self._outcome.problems.append(f"{child.name} ended with {child.status}")

    # ------------------------------------------------------------------------------ processes

    def _start(self, name: str) -> None:
        number = self._incarnations[name]
        self._incarnations[name] += 1
        plan, site, full = self._plan, self._site, f"{name}{number}"
        bodies: dict[str, Body] = {
            "worker": lambda parent: run_worker(parent, plan, site, number, self._requests),
            "proxy": lambda parent: run_proxy(parent, site),
            "vandal": lambda parent: run_vandal(parent, site),
            "A": lambda parent: run_subscriber(
                *(parent, site, full, 0), proxied=False, tokens=True, dialect="sglang"
            ),
            "B": lambda parent: run_subscriber(
                *(parent, site, full, 1),
                proxied=True,
                tokens=plan.token_ids,
                dialect=plan.dialect,
            ),
            "C": lambda parent: run_consumer(parent, site, full, plan.hwm),
        }
        self._children[name] = Child(name, site.log(full), bodies[name])
        self._said[name] = []
        self._note(f"{full} is {self._children[name].pid}")

    def _child(self, name: str) -> Child:
        return self._children[name]

    def _restart(self, name: str) -> None:
        self._measure()
        child = self._children[name]
        self._stopped.discard(child.pid)
        child.kill()
        self._dead.append(child)
        self._start(name)

    def _sidecars(self) -> list[int]:
        """The worker's, and one that has outlived the worker before."""
        found = descendants(os.getpid())
        return [pid for pid, command in found.items() if " serve " in command]

    def _target(self, name: str) -> int | None:
        """The pid to stop."""
        if name != "sidecar":
            return self._child(name).pid
        return next(iter(self._sidecars()), None)

    def _measure(self) -> None:
        """R4: the most memory each had so far."""
        found = {
            name: peak_mb(self._child(name).pid) - self._child(name).base_mb
            for name in ("worker", *SUBSCRIBERS)
        }
        for pid in self._sidecars():
            found["sidecar"] = max(found.get("sidecar", 0.0), peak_mb(pid))
        peaks = self._outcome.peaks_mb
        for name, peak in found.items():
            peaks[name] = max(peaks.get(name, 0.0), peak)

    # --------------------------------------------------------------------------------- faults

    def _inject(self, fault: Fault) -> None:
        """Do it, and put its end on the agenda."""
        if self._do(fault):
            self._outcome.injected[fault.kind] += 1
            self._note(str(fault))
        else:
            self._outcome.skipped[fault.kind] += 1
            self._note(f"skipped: {fault}")

    def _do(self, fault: Fault) -> bool:
        match fault.kind:
            case Kind.KILL_SIDECAR:
                return self._kill_sidecar()
            case Kind.KILL_WORKER:
                if fault.target != "alone":
                    self._kill_sidecar()
                self._restart("worker")
            case Kind.KILL_SUBSCRIBER:
                self._restart(fault.target)
            case Kind.STOP:
                return self._stop(fault.target, fault.seconds)
            case Kind.FULL_RING:
                return self._stop("sidecar", fault.seconds + 0.5)
            case Kind.DEAF:
                self._child(fault.target).say("pause", fault.seconds)
            case Kind.STUCK_REPLAY:
                self._child("vandal").say("stuck replay")
            case Kind.GARBAGE:
                self._child("vandal").say("garbage", hash((self._plan.seed, fault.at)))
            case Kind.CUT:
                self._child("proxy").say("cut", fault.seconds)
            case Kind.DELAY:
                self._child("proxy").say("delay", fault.seconds)
            case Kind.DISK_FULL:
                return self._fill_disk(fault.seconds)
            case Kind.CLOCK_JUMP:
                with self._site.clock.open("r+b") as file:  # others have it mapped
                    file.write(struct.pack("<d", fault.seconds))
        return True

    def _kill_sidecar(self) -> bool:
        self._measure()
        sidecars = self._sidecars()
        for pid in sidecars:
            self._stopped.discard(pid)
            _signal(pid, signal.SIGKILL)
        return bool(sidecars)

    def _stop(self, name: str, seconds: float) -> bool:
        pid = self._target(name)
        if pid is None or pid in self._stopped:
            return False
        self._stopped.add(pid)
        _signal(pid, signal.SIGSTOP)
        self._at(time.monotonic() + seconds, partial(self._continue, pid))
        return True

    def _continue(self, pid: int) -> None:
        if pid in self._stopped:
            self._stopped.discard(pid)
            _signal(pid, signal.SIGCONT)
            self._note(f"{pid} goes on")

    def _fill_disk(self, seconds: float) -> bool:
        filler = self._site.state / "filler"
        if not self._disk or filler.exists():
            return False
        with filler.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 4
        self._at(time.monotonic() + seconds, partial(self._empty_disk, filler))
        return True

    def _empty_disk(self, filler: Path) -> None:
        filler.unlink(missing_ok=True)
        self._note("the disk has room again")

    def _heal(self) -> None:
        """What lasts comes to its end now."""
        self._run_agenda(time.monotonic())
        while self._agenda:
            heappop(self._agenda)[2]()
        self._child("proxy").say("cut", 0.0)
        self._child("proxy").say("delay", 0.0)

    # --------------------------------------------------------------------------------- waiting

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._agenda, (when, len(self._agenda) + id(action), action))

    def _run_agenda(self, until: float) -> None:
        while True:
            now = time.monotonic()
            while self._agenda and self._agenda[0][0] <= now:
                heappop(self._agenda)[2]()
            if now >= until:
                return
            self._listen(min(until, self._agenda[0][0] if self._agenda else until) - now)

    def _listen(self, timeout_s: float) -> None:
        """Take what the children say. Raises _Broken when one has ended that nobody killed."""
        by_fd = {
            child.fileno(): name
            for name, child in self._children.items()
            if child.status is None  # whose end was awaited has nothing more to say
        }
        for fd in select.select(list(by_fd), [], [], max(0.0, timeout_s))[0]:
            name = by_fd[fd]
            child = self._children[name]
            message = child.hear()
            if message is not None:
                self._said[name].append(message)
            elif child.wait(_END_S):
                raise _Broken(f"{name} ended with {child.status}: {_tail(self._log_of(name))}")

    def _hear(self, name: str, word: str, timeout_s: float = PATIENCE_S) -> tuple[Any, ...]:
        """The rest of a message that begins with `word`. Raises _Broken when it does not come."""
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._said[name]:
                if message[0] == word:
                    self._said[name].remove(message)
                    return message[1:]
            if time.monotonic() > deadline:
                raise _Broken(f"{name} did not say {word!r}: {_tail(self._log_of(name))}")
            self._listen(_LOOK_S)

    def _log_of(self, name: str) -> Path:
        return self._site.log(f"{name}{self._incarnations[name] - 1}")

    def _note(self, what: str) -> None:
        self._journal.write(f"{time.monotonic() - self._began:7.3f} {what}\n")


def _differences(who: str, blocks: dict[str, Any], view: dict[str, Any]) -> Iterator[str]:
    for medium in sorted(blocks.keys() | view.keys()):
        held, believed = set(blocks.get(medium, ())), set(view.get(medium, ()))
        if held != believed:
            yield (
                f"R1: {who}, {medium}: {len(held - believed)} blocks unknown,"
                f" {len(believed - held)} wrong, of {len(held)}"
            )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(lines[-3:]) or "it said nothing"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    """Orphans that became ours and have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# -------------------------------------------------------------------------------------- the disk


def can_mount() -> bool:
    """Whether this process has a mount namespace of its own, and may mount in it."""
    return os.environ.get("STRESS_MOUNTS") == "1"


def _mount(path: Path) -> bool:
    mount = ctypes.CDLL(None, use_errno=True).mount
    return not mount(
        b"none", os.fsencode(path), b"tmpfs", 0, f"mode=0700,size={_STATE_BYTES}".encode()
    )


def _unmount(path: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(path), 2)


def _keep_state(folder: Path) -> None:
    """A copy of what is on the disk that goes away."""
    shutil.copytree(
        folder / "state",
        folder / "state-kept",
        ignore=lambda at, names: [
            name
            for name in names
            if name == "filler" or stat.S_ISSOCK(Path(at, name).lstat().st_mode)
        ],
    )
