"""`kvevents top` on a terminal."""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType, TracebackType

from rich.console import Console
from rich.text import Text

from publisher.tools.fleet.top import Board, Snapshot, lines
from publisher.tools.source import Sources

__all__ = ["render", "watch"]

_ENTER, _LEAVE = b"\x1b[?1049h\x1b[?25l\x1b[H", b"\x1b[?1049l\x1b[?25h"
_HOME, _NEXT, _REST = "\x1b[H\x1b[2K", "\r\n\x1b[2K", "\x1b[J"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_TICK_S = 0.25
_PATIENCE_S = 1.0
"""How long a terminal may take nothing, as one does after Ctrl-S, before it is left as it is."""


def render(snapshot: Snapshot, width: int, height: int | None = None) -> Text:
    """The table for so many columns, and at most so many lines, as far as it can be."""
    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines(snapshot, width, height)):
        text.append("\n" if number else "")
        for cell in line:
            text.append(cell.text, style=cell.style)
    return text


def watch(
    sources: Sources, board: Board, console: Console, *, interval_s: float, until: float
) -> None:
    """Show the board, anew each `interval_s`, until the monotonic clock is at `until` or Ctrl-C. The
    terminal is then as it was, also where another signal ends it, which is a SystemExit, or where it is
    gone itself.
    """
    with _Screen(console) as screen:
        screen.begin()
        show_at = 0.0
        for one in sources.steps(until, min(interval_s, _LONGEST_TICK_S)):
            if screen.is_over:
                break
            if one is not None:
                board.take(*one)
            elif (now := time.monotonic()) >= show_at:
                screen.show(board.snapshot())
                show_at = now + interval_s
    if screen.ended_by not in (None, signal.SIGINT):
        raise SystemExit(128 + screen.ended_by)


class _Ended(BaseException):
    """A signal came."""


class _Screen:
    """The alternate screen, while it is entered. The first signal that ends it leaves the `with` at once,
    without an error; those that come later, while it is left, are ignored. Ctrl-Z leaves it meanwhile.
    Of the main thread.
    """

    def __init__(self, console: Console) -> None:
        self.ended_by: int | None = None
        self._console = console
        self._fd = console.file.fileno()
        self._encoding = console.encoding
        self._poller = select.poll()
        self._poller.register(self._fd, 0)  # for its end only
        self._inside = False
        """Whether a signal may raise."""
        self._before = {
            number: signal.getsignal(number)
            for number in (*_ENDING, signal.SIGTSTP)
            if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
        }

    @property
    def is_over(self) -> bool:
        """Whether a signal came, or the terminal is gone."""
        if self.ended_by is None and self._poller.poll(0):
            self.ended_by = signal.SIGHUP
        return self.ended_by is not None

    def begin(self) -> None:
        """Go there."""
        self._write(_ENTER)

    def show(self, snapshot: Snapshot) -> None:
        """In place of what was there."""
        console = self._console
        width, height = console.size
        with console.capture() as captured:
            console.print(render(snapshot, width, height), end="", crop=True)
        rows = captured.get().split("\n")[:height]
        text = f"{_HOME}{_NEXT.join(rows)}{_REST}"
        self._write(text.encode(self._encoding, "replace"))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _leave(self) -> None:
        """A terminal that takes nothing is not waited for, nor one that is gone."""
        try:
            if select.select([], [self._fd], [], _PATIENCE_S)[1]:
                os.write(self._fd, _LEAVE)
        except OSError:
            pass

    def _end(self, number: int, _frame: FrameType | None) -> None:
        inside, self._inside = self._inside, False
        if self.ended_by is None:
            self.ended_by = number
        if inside:
            raise _Ended

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._leave()
        signal.raise_signal(signal.SIGSTOP)  # until somebody goes on with it
        if self._inside:
            self._write(_ENTER)

    def __enter__(self) -> _Screen:
        for number in self._before:
            signal.signal(number, self._stop if number == signal.SIGTSTP else self._end)
        self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._inside = False
        self._leave()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        lost = isinstance(error, OSError)
        if lost and self.ended_by is None:
            self.ended_by = signal.SIGHUP
        return lost or isinstance(error, _Ended)
