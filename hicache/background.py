"""Threads that copy and do I/O, so that the engine's thread does not."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar
from weakref import WeakSet

__all__ = ["BackgroundThread"]

Args = ParamSpec("Args")
Result = TypeVar("Result")

_EXIT_TIMEOUT_S = 5.0
_all: WeakSet[BackgroundThread] = WeakSet()


class BackgroundThread:
    """Runs calls one after the other, in the order given.

    A daemon: a call that never returns keeps neither `close` nor the interpreter from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _all.add(self)
        self._thread.start()

    def submit(
        self, call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Future[Result]:
        """The call's future; what it raises is the future's. Cancelled when closed meanwhile."""
        future: Future[Result] = Future()

        def run() -> None:
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:  # nothing comes after the end
            if self._closed:
                future.cancel()
            else:
                self._calls.put(run)
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what has not begun and wait for what has. Safe to call twice."""
        self.end()
        self._thread.join(timeout_s)
        with suppress(Empty):
            while self._thread.is_alive():  # cancel what is behind a call that hangs
                if (call := self._calls.get_nowait()) is not None:
                    call()
        self._calls.put(None)  # the one that was meant for the thread may be gone

    def end(self) -> None:
        """Have the thread end after the call at hand; do not wait."""
        with self._lock:
            self._closed = True
            self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


@atexit.register
def _end_all() -> None:
    """A thread that comes back from C++, torch's or Mooncake's, to an interpreter that is gone ends the
    process with SIGABRT, so none is to be in there by then.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    threads = list(_all)
    for one in threads:
        one.end()
    for one in threads:
        one.join(max(0.0, deadline - time.monotonic()))
