"""`kvevents top` on a terminal."""

from __future__ import annotations

import signal
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from publisher.tools.fleet.top import Board, Snapshot, lines
from publisher.tools.source import Sources

__all__ = ["render", "watch"]

_SIGTERM = 128 + signal.SIGTERM


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
    terminal is then as it was, also where a SIGTERM ends it.
    """

    def look() -> Text:
        width, height = console.size
        return render(board.snapshot(), width, height)

    before = signal.signal(signal.SIGTERM, _end)
    try:
        with Live(look(), console=console, screen=True, auto_refresh=False) as shown:
            for one in sources.steps(until, interval_s):
                if one is None:
                    shown.update(look(), refresh=True)
                else:
                    board.take(*one)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(_SIGTERM)
