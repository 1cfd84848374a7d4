"""What the demo's processes say to each other: a JSON object a line, down stdin and up stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

__all__ = ["ParentPipe", "say"]


def say(**fields: Any) -> None:
    """Tell the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
    sys.stdout.buffer.flush()


class ParentPipe:
    """The parent's lines. Its end, however the parent ends, is the end of this process at once.

    `on_end`: what is to be done even then.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[], object] = lambda: None
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
        self.on_end()
        os._exit(0)
