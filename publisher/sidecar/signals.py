"""The signals a sidecar listens to, as something its loop can poll."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["Signals"]

_WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Signals:
    """SIGTERM, SIGUSR1 and SIGHUP are noted; SIGINT is ignored: it is for the worker, whose end ends
    the sidecar. One at a time, in the main thread; `close` gives the earlier handlers back.
    """

    def __init__(self, *, ignore_interrupt: bool = True) -> None:
        self.fd, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable once one has come."""
        self._came: set[int] = set()
        watched = (*_WATCHED,) if ignore_interrupt else (*_WATCHED, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in watched}
        if ignore_interrupt:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)  # a worker may have blocked them
        self.stopping = False
        """Whether the process is to end."""

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        else:
            self._came.add(number)

    def take(self) -> set[int]:
        """Those that came since the last call, but for those that end the process."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass
        came, self._came = self._came, set()
        return came

    def close(self) -> None:
        """Safe to call twice."""
        if self.fd < 0:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._writing)
        self.fd = -1
