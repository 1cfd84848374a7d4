"""Colours of a terminal, where there is one and nobody minds (https://no-color.org)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TextIO

__all__ = ["Paint", "When", "painter", "wants_colour"]

When = Literal["auto", "always", "never"]
Paint = Callable[[str, str], str]
"""Text and a style, such as "red" or "bold red"; returns what to write."""

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}


def wants_colour(when: When, stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to write colours: `auto` only to a terminal, and not where NO_COLOR or TERM=dumb is set."""
    if when != "auto":
        return when == "always"
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def painter(*, colours: bool) -> Paint:
    """What puts styles around text, or leaves it as it is."""
    if not colours:
        return lambda text, _style: text
    return _paint


def _paint(text: str, style: str) -> str:
    codes = ";".join(_CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text
