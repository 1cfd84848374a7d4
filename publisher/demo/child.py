"""What the demo's processes say to each other: a JSON object a line, down stdin and up stdout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import msgspec

__all__ = ["ParentPipe", "say"]

_DEATH_S = 0.3
_GONE_S = 30.0


def say(**fields: Any) -> None:
    """Tell the parent. Where that is gone, leave the end of this process to its `ParentPipe`."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        Event().wait(_GONE_S)
        raise


class ParentPipe:
    """The parent's lines. Its end, however the parent ends, is the end of this process at once.

    `on_orphaned`: what is to be done even then, when the parent can do it no more.
    """

    def __init__(self) -> None:
        self.on_orphaned: Callable[[], object] = lambda: None
        self._parent = os.getppid()
        self._lines: SimpleQueue[Any] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def wait(self) -> Any:
        """The next line."""
        return self._lines.get()

    def poll(self) -> Any | None:
        """The next line if there is one."""
        return None if self._lines.empty() else self._lines.get()

    def _read(self) -> None:
        partial = b""
        while data := os.read(sys.stdin.fileno(), 1 << 16):
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                self._lines.put(msgspec.json.decode(line))
        if self._orphaned():
            self.on_orphaned()
        os._exit(0)

    def _orphaned(self) -> bool:
        """Whether the parent is dead. Its end of the pipe closes a moment before it is."""
        deadline = time.monotonic() + _DEATH_S
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.01)
        return os.getppid() != self._parent
