"""A process of a run: forked, so that it starts at once, and tied to its parent's life."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Body", "Child", "Parent", "adopt_orphans", "descendants", "peak_mb"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHANNEL_FD = 3
_MOST_FDS = 1024
_BROKEN = 70


class Parent:
    """The child's end: takes the parent's messages, says things to it. A message is a tuple, its first
    element a word.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Readable when there is a message."""
        return self._connection.fileno()

    def poll(self, timeout_s: float = 0.0) -> tuple[Any, ...] | None:
        """The next message, waiting at most so long."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def say(self, *message: Any) -> None:
        self._connection.send(message)


Body: TypeAlias = Callable[[Parent], None]


class Child:
    """Starts `body` in a new process; its output goes to the file `log`."""

    def __init__(self, name: str, log: Path, body: Body) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            _run(theirs, log, body)
        theirs.close()
        self._ended = os.pidfd_open(self.pid)
        self.base_mb = peak_mb(self.pid)
        """What it shared with its parent at first."""
        self.status: int | None = None

    def fileno(self) -> int:
        """Readable when it has said something, or has ended."""
        return self._connection.fileno()

    def say(self, *message: Any) -> None:
        """It may be gone."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def hear(self) -> tuple[Any, ...] | None:
        """What it said next, if it did."""
        try:
            return self._connection.recv() if self._connection.poll() else None
        except (EOFError, OSError):
            return None

    def signal(self, number: int) -> None:
        """It is our own child, and not reaped: the pid is its."""
        if self.status is None:
            signal.pidfd_send_signal(self._ended, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, in time."""
        if self.status is None and select.select([self._ended], [], [], max(0.0, timeout_s))[0]:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status is not None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(10.0)

    def close(self) -> None:
        self.kill()
        self._connection.close()
        os.close(self._ended)


def _run(connection: Connection[Any, Any], log: Path, body: Body) -> None:
    """The child's whole life."""
    code = _BROKEN
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(connection.fileno(), _CHANNEL_FD)
        os.closerange(_CHANNEL_FD + 1, _MOST_FDS)
        tempfile.tempdir = None  # TMPDIR may be another than when the parent looked
        body(Parent(Connection(_CHANNEL_FD)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def adopt_orphans() -> None:
    """From now on, what a descendant leaves behind becomes a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(pid: int) -> dict[int, str]:
    """All of them that live: pid and command line."""
    found: dict[int, str] = {}
    for task in _listed(Path(f"/proc/{pid}/task")):
        for child in _text(task / "children").split():
            if _text(Path("/proc", child, "stat")).rpartition(")")[2].split()[:1] not in (
                [],
                ["Z"],
            ):
                found[int(child)] = _text(Path("/proc", child, "cmdline")).replace("\0", " ")
            found |= descendants(int(child))
    return found


def peak_mb(pid: int) -> float:
    """The most memory it had resident; 0 when it is gone."""
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _listed(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
