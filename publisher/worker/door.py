"""The worker's door: who connects, shakes hands and is let in. Nothing here waits.

D1  One sidecar at a time has the ring, from the moment it is welcomed until its connection ends; any
    other is told so and turned away.
D2  Whoever connects has a deadline for each step, and its slowness costs nobody else anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from kvevents.errors import KVEventsError
from publisher.config.endpoint import PATH_BYTES
from publisher.link.messages import (
    VERSION,
    Bound,
    ControlMessage,
    Failed,
    Hello,
    Ready,
    Welcome,
    peer_pid,
    receive,
    send,
)

__all__ = ["Admitted", "Door", "Left", "Outcome", "TurnedAway"]

_HELLO_S = 2.0
_DEAF_S = 0.5  # after a connection could not be accepted
_GUESTS = 16
_BACKLOG = 128

ENDED = "the sidecar ended before it was ready"
ABSENT = "the sidecar did not connect in time"
SLOW = "the sidecar did not get ready in time"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sidecar is ready; `connection` is the receiver's to close."""

    connection: socket.socket
    pid: int
    sinks: tuple[Bound, ...]
    http_endpoint: str | None


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Someone connected and was not let in."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The connection of the sidecar that was let in has ended."""

    pid: int


Outcome: TypeAlias = Admitted | TurnedAway | Left


@dataclass(slots=True)
class _Guest:
    """A connection that is not let in yet."""

    connection: socket.socket
    pid: int
    deadline: float
    welcomed: bool = False


class Door:
    """Listens at a path. One thread uses it at a time."""

    def __init__(self, path: Path, welcome: Welcome, fds: tuple[int, ...]) -> None:
        """`fds` go along with `welcome`. Raises OSError when the socket cannot be made."""
        self._path, self._welcome, self._fds = path, welcome, fds
        self._pid = os.getpid()
        self.only_pid: int | None = None
        """The one process that may come in; None: any."""
        self.ready_s = 10.0
        """How long a sidecar may take from its welcome until it is ready."""
        self._guests: list[_Guest] = []
        self._deaf_until = 0.0
        self._inside: tuple[int, int] | None = None  # a descriptor of its connection, its pid
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.settimeout(0)
            if len(os.fsencode(path)) > PATH_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
            self._listener.bind(str(path))
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise

    def fileno(self) -> int:
        """The listening socket."""
        return self._listener.fileno()

    @property
    def busy(self) -> bool:
        """Whether someone is at the door."""
        return bool(self._guests)

    def watched(self) -> Iterator[tuple[int, int]]:
        """Descriptors and the events for which to call `attend`."""
        if not self._deaf_until:
            yield self._listener.fileno(), select.POLLIN
        for guest in self._guests:
            yield guest.connection.fileno(), select.POLLIN
        if self._inside is not None:
            yield self._inside[0], select.POLLRDHUP

    def wake_at(self) -> float:
        """Monotonic time by which to call `attend`; inf when there is none."""
        times = [guest.deadline for guest in self._guests]
        if self._deaf_until:
            times.append(self._deaf_until)
        return min(times, default=float("inf"))

    def attend(self, now: float) -> list[Outcome]:
        """Do what can be done at once."""
        outcomes: list[Outcome] = []
        if self._inside is not None and _has_ended(self._inside[0]):
            outcomes.append(Left(self._inside[1]))
            self._forget()
        self._accept(now, outcomes)
        for guest in list(self._guests):
            try:
                outcome = self._step(guest, now)
            except OSError as error:  # too many files
                outcome = TurnedAway(guest.pid, str(error))
            if outcome is not None:
                self._guests.remove(guest)
                if not isinstance(outcome, Admitted):
                    guest.connection.close()
                outcomes.append(outcome)
        return outcomes

    def _accept(self, now: float, outcomes: list[Outcome]) -> None:
        if now < self._deaf_until:
            return
        self._deaf_until = 0.0
        for _ in range(_GUESTS):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many files: it stays in the queue
                outcomes.append(TurnedAway(0, f"a connection was not accepted: {error}"))
                self._deaf_until = now + _DEAF_S
                return
            connection.settimeout(0)
            self._guests.append(_Guest(connection, peer_pid(connection), now + _HELLO_S))
            if len(self._guests) > _GUESTS:
                oldest = next((one for one in self._guests if not one.welcomed), self._guests[0])
                self._guests.remove(oldest)
                oldest.connection.close()
                outcomes.append(TurnedAway(oldest.pid, "too many at the door"))

    def _step(self, guest: _Guest, now: float) -> Outcome | None:
        try:
            message, fds = receive(guest.connection)
        except BlockingIOError:
            return TurnedAway(guest.pid, SLOW) if now >= guest.deadline else None
        except KVEventsError as error:
            return TurnedAway(guest.pid, str(error))
        for fd in fds:
            os.close(fd)
        if message is None:
            return TurnedAway(guest.pid, ENDED)
        return (
            self._heard_ready(guest, message)
            if guest.welcomed
            else self._greet(guest, message, now)
        )

    def _greet(self, guest: _Guest, message: ControlMessage, now: float) -> Outcome | None:
        match message:
            case Hello(version=version, pid=pid) if version == VERSION:
                guest.pid = guest.pid or pid  # no pid: from another pid namespace
            case other:
                return self._turn_away(
                    guest, f"the sidecar said {other}, not Hello of version {VERSION}"
                )
        if self.only_pid is not None and guest.pid != self.only_pid:
            return self._turn_away(guest, f"this link is for pid {self.only_pid} alone")
        taken_by = next((one.pid for one in self._guests if one.welcomed), None)
        if self._inside is not None:
            taken_by = self._inside[1]
        if taken_by is not None:
            return self._turn_away(guest, f"the link is taken by pid {taken_by}")
        try:
            send(guest.connection, self._welcome, self._fds)
        except OSError:
            return TurnedAway(guest.pid, ENDED)
        guest.welcomed, guest.deadline = True, now + self.ready_s
        return None

    def _turn_away(self, guest: _Guest, reason: str) -> TurnedAway:
        with contextlib.suppress(OSError):
            send(guest.connection, Failed(reason))
        return TurnedAway(guest.pid, reason)

    def _heard_ready(self, guest: _Guest, message: ControlMessage) -> Outcome:
        match message:
            case Ready(sinks=sinks, http_endpoint=http_endpoint):
                self._inside = os.dup(guest.connection.fileno()), guest.pid
                self._welcome = msgspec.structs.replace(self._welcome, before=message)
                return Admitted(guest.connection, guest.pid, sinks, http_endpoint)
            case Failed(reason=reason):
                return TurnedAway(guest.pid, reason)
            case other:
                return TurnedAway(guest.pid, f"the sidecar said {other}, not Ready")

    def _forget(self) -> None:
        if self._inside is not None:
            os.close(self._inside[0])
            self._inside = None

    def close(self) -> None:
        """Stop listening, and remove the path unless this is a forked child. Safe to call twice."""
        if self._listener.fileno() >= 0 and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
        self._listener.close()
        for guest in self._guests:
            guest.connection.close()
        self._guests = []
        self._forget()


def _has_ended(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    return bool(poller.poll(0))
