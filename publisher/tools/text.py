"""Text that a stranger has a part in, for terminals and programs."""

from __future__ import annotations

import re

__all__ = ["json_text", "printable"]

_NOT_ASCII = re.compile("[\x7f-\U0010ffff]+")
"""Among them what turns or hides text; outside the strings of JSON there is none."""


def printable(text: str) -> str:
    """`text` with escapes for what moves a cursor, changes a colour, or starts a line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def json_text(data: bytes) -> str:
    """JSON as it may be written anywhere, whatever the encoding there: all of it is ASCII."""
    return _NOT_ASCII.sub(_escape, data.decode())


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
