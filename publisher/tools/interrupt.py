"""Ctrl-C, for those who must not be stopped between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt", "InterruptCount"]


_NO_MORE = 3


class Interrupt:
    """While it is entered, Ctrl-C ends a `wait` and is noted, and stops nothing else; a second one is
    KeyboardInterrupt, as ever. Of the main thread.
    """

    def __init__(self) -> None:
        self.came = False
        self._waiting = False

    def wait(self, wait: Callable[[], object]) -> None:
        """Until `wait` returns, or Ctrl-C comes; not at all if it has come."""
        self._waiting = True
        try:
            if not self.came:
                wait()
            self._waiting = False
        except KeyboardInterrupt:
            if not self.came:  # not from here
                raise

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        again, self.came = self.came, True
        waiting, self._waiting = self._waiting, False
        if again or waiting:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)


class InterruptCount:
    """Counts Ctrl-C instead of being stopped anywhere by it: in the middle of a batch half of it would be
    known, and the other half taken for a lie. The third is KeyboardInterrupt, as ever: a batch may be
    large beyond all patience.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def _notice(self, *_: object) -> None:
        self.count += 1
        if self.count >= _NO_MORE:
            raise KeyboardInterrupt

    def __enter__(self) -> InterruptCount:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
