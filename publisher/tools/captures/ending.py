"""SIGTERM and SIGHUP as Ctrl-C: what was made on the way is cleared away."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["like_ctrl_c"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def like_ctrl_c() -> Iterator[None]:
    """While it is entered they do what Ctrl-C does; what is ignored stays so. Of the main thread."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, _as_ctrl_c)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _as_ctrl_c(_number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # in the background of a script Ctrl-C is ignored
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
