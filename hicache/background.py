"""Threads that copy and do I/O, so that the engine's thread does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["BackgroundThread"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


class BackgroundThread:
    """Runs calls one after the other, in the order given.

    A daemon: a call that never returns keeps neither `close` nor the interpreter from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
        with self._lock:
            self._closed = True
            self._calls.put(None)
        self._thread.join(timeout_s)
        while self._thread.is_alive() and not self._calls.empty():  # behind a call that hangs
            if (call := self._calls.get()) is not None:
                call()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
