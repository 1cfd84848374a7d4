"""The thread that looks after the link and its sidecar, so that the scheduler's need not.

It waits for connections at the door, for what the child logs and for its end, and for nothing else;
it starts the child, again if that ended, and hands on who is let in.

A1  The scheduler's thread never waits for this one: what passes between them is one slot.
A2  A child's end is followed by its next start after a pause that doubles, until too many in a row
    ended early: then the sidecar is given up, which is logged once and visible as `state`.
A3  Leaving takes at most the time that is given, and two short ones: to end on request, to be ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from publisher.host_log import host_log
from publisher.worker.child import Child, LogLine
from publisher.worker.client import SidecarClient
from publisher.worker.door import ABSENT, SLOW, Admitted, Left, TurnedAway

__all__ = ["Attendant", "Respawn", "SidecarState"]

_JOIN_S = 1.0  # for what happens after the last deadline
_SAY_S = 1.0  # between lines about those who are turned away
_MAX_READS = 64  # of a log that has ended
_MOST_EARLY = 1000

_log = host_log("kvevents.sidecar")
_levels = logging.getLevelNamesMapping()


class SidecarState(StrEnum):
    """How it stands with the sidecar."""

    AWAITED = "awaited"
    READY = "ready"
    GIVEN_UP = "given_up"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Respawn:
    """When a sidecar that ended is started again: after `first_s`, then twice as long each time, at
    most `most_s`; from the beginning once one has lived `steady_s`; given up after `attempts` in a row.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    steady_s: float = 30.0
    attempts: int = 20

    def pause(self, failures: int) -> float | None:
        """Before the next start, after so many failures in a row; None: there is none."""
        if failures > self.attempts:
            return None
        return float(min(self.most_s, self.first_s * 2 ** min(failures - 1, 32)))


class Attendant:
    """Looks after `client`'s door and, with `start`, after the child that it starts."""

    def __init__(
        self,
        client: SidecarClient,
        start: Callable[[], Child] | None = None,
        respawn: Respawn | None = None,
        *,
        ready_s: float,
    ) -> None:
        """Without `respawn` a child that ended is given up. Raises OSError, RuntimeError where there are
        no descriptors or threads.
        """
        self._client, self._door = client, client.door
        self._start, self._respawn, self._ready_s = start, respawn, ready_s
        self._door.ready_s = ready_s
        client.expecting = client.attended = True
        self.state = SidecarState.AWAITED
        self.pid = 0
        """The child's or, without one, the sidecar's that was let in last."""
        self.exit_code = 0
        """How the last child ended."""
        self.restarts = 0
        self.error = ""
        """Why the first child did not get ready."""
        self.settled = threading.Event()
        """Set once the first sidecar is ready, or will never be."""
        self._child: Child | None = None
        self._started_at = 0.0
        self._start_at = 0.0 if start is not None else math.inf
        self._ready_by = math.inf
        self._failures = 0
        self._leave_by: float | None = None
        self._term_s = 0.0
        self._insisted = False
        self._say_at = 0.0
        self._last_line = ""
        self._early: list[LogLine] = []
        """What the first child logs before it is ready."""
        self._done = False
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="kvevents-attendant", daemon=True)
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread.start()
        except BaseException:
            client.attended = False  # or it would never let go of the ring
            self.close_copies()
            raise

    # ------------------------------------------------------------------------- from other threads

    def leave(self, timeout_s: float, term_s: float) -> None:
        """Wait until the child has ended by itself, at most so long, then end it (A3)."""
        self._term_s, self._leave_by = term_s, time.monotonic() + timeout_s
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + term_s + _JOIN_S)
        if (child := self._child) is not None:  # the thread is held up, by a log handler say
            child.send(signal.SIGKILL)
            child.wait(_JOIN_S)
        if not self._thread.is_alive():
            self.close_copies()

    def close_copies(self) -> None:
        """Let go of the descriptors, as a forked child does."""
        if self._child is not None:
            self._child.close_copies()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while not self._done:
                self._turn()
        finally:
            if not self.settled.is_set():
                self.error = self.error or "the link was closed before the sidecar was ready"
            self._client.give_up()
            if self.state is not SidecarState.GIVEN_UP:
                self.state = SidecarState.CLOSED
            self._end_child()
            self._client.attended = False
            self._door.close()
            self.settled.set()
            self._forward([])

    def _turn(self) -> None:
        self._wait()
        now = time.monotonic()
        self._attend_door(now)
        if self._child is not None:
            self._attend_child(self._child, now)
        if self._leave_by is not None:
            self._leaving(now, self._leave_by)
        if now >= self._start_at and not self._done:
            self._start_child(now)

    def _attend_door(self, now: float) -> None:
        for outcome in self._door.attend(now):
            match outcome:
                case Admitted():
                    self._let_in(outcome)
                case TurnedAway(pid=pid, reason=reason):
                    self._turned_away(pid, reason, now)
                case Left(pid=pid):
                    self._left(pid, now)

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd, events in self._door.watched():
            poller.register(fd, events)
        for fd in self._child.watched() if self._child is not None else ():
            poller.register(fd, select.POLLIN)
        until = min(self._door.wake_at(), self._start_at, self._ready_by)
        if self._leave_by is not None:
            until = min(until, self._leave_by)
        wait_s = until - time.monotonic()
        poller.poll(None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _let_in(self, sidecar: Admitted) -> None:
        if self._child is None:
            self.pid = sidecar.pid
        self._ready_by = math.inf
        self._client.let_in(sidecar)
        self.state = SidecarState.READY
        if self.settled.is_set():
            _log.info("the sidecar of pid %d is ready", sidecar.pid)
        self.settled.set()
        self._forward([])

    def _turned_away(self, pid: int, reason: str, now: float) -> None:
        if self._child is not None and pid == self._child.pid and not self.settled.is_set():
            self.error, self._done = reason, True
        elif now >= self._say_at:
            self._say_at = now + _SAY_S
            _log.warning("pid %d did not become the sidecar: %s", pid, reason)

    def _left(self, pid: int, now: float) -> None:
        self._client.note_left()
        if self._child is not None:  # it is about to end
            self._ready_by = now + self._ready_s
        elif self._leave_by is None:
            _log.warning("the sidecar of pid %d has left", pid)
        if self._leave_by is None:
            self.state = SidecarState.AWAITED

    # ----------------------------------------------------------------------------------- the child

    def _start_child(self, now: float) -> None:
        assert self._start is not None
        self._start_at, self._started_at = math.inf, now
        self._ready_by = now + self._ready_s
        self.restarts += self.settled.is_set()
        try:
            self._child = self._start()
        except OSError as error:
            self._ended(now, f"cannot be started: {error}")
            return
        self.pid = self._door.only_pid = self._child.pid

    def _attend_child(self, child: Child, now: float) -> None:
        self._forward(child.read_log())
        if (code := child.returncode()) is not None:
            self._attend_door(now)  # what it said last
            self._read_to_end(child)
            child.close_copies()
            self._child, self.exit_code = None, code
            self._ended(now, f"ended with {code}")
        elif now >= self._ready_by:
            if not self.settled.is_set():
                self.error = SLOW if self._door.busy else ABSENT
                self._done = True
            _log.warning("the sidecar of pid %d did not get ready in time", child.pid)
            self._ready_by = math.inf
            child.send(signal.SIGKILL)

    def _ended(self, now: float, how: str) -> None:
        self._ready_by = math.inf
        if not self.settled.is_set():
            last = f": {self._last_line}" if self._last_line else ""
            self.error = self.error or f"the sidecar {how} before it was ready{last}"
            self._done = True
            return
        if self._leave_by is not None:
            self._done = True
            return
        policy = self._respawn
        steady = policy is not None and now - self._started_at >= policy.steady_s
        self._failures = 1 if steady else self._failures + 1
        pause = policy.pause(self._failures) if policy is not None else None
        if pause is None:
            self._client.give_up()
            self.state, self._done = SidecarState.GIVEN_UP, True
            _log.error(
                "the sidecar of pid %d %s and is given up, after %d in a row: nothing is published"
                " any more",
                *(self.pid, how, self._failures),
            )
            return
        self.state = SidecarState.AWAITED
        self._start_at = now + pause
        _log.warning("the sidecar of pid %d %s; the next starts in %g s", self.pid, how, pause)

    def _leaving(self, now: float, leave_by: float) -> None:
        if self._child is None:
            # One that is awaited still has the ring to publish, and that the worker leaves.
            self._start_at = now
            self._done = self._done or self._start is None or now >= leave_by
        elif now >= leave_by:
            self._child.send(signal.SIGKILL if self._insisted else signal.SIGTERM)
            self._leave_by = math.inf if self._insisted else now + self._term_s
            self._insisted = True

    def _end_child(self) -> None:
        if self._child is not None:
            child = self._child
            child.send(signal.SIGKILL)
            code = child.wait(_JOIN_S)
            self._read_to_end(child)
            child.close_copies()
            self._child, self.exit_code = None, code if code is not None else -signal.SIGKILL

    def _read_to_end(self, child: Child) -> None:
        for _ in range(_MAX_READS):
            if not (lines := child.read_log()):
                break
            self._forward(lines)

    def _forward(self, lines: list[LogLine]) -> None:
        """Hand on what the child logs; of one that does not get ready, not what is its error anyway."""
        for line in lines:
            self._last_line = line.message
        if not self.settled.is_set():
            self._early += lines
            del self._early[:-_MOST_EARLY]
            return
        early, self._early = self._early, []
        for line in early + lines:
            if line.message == self.error:
                continue
            level = _levels.get(line.level, logging.WARNING)
            _log.log(level, "%s", line.message, extra={"sidecar": line.fields})
