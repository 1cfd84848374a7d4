"""Text that a stranger has a part in, for terminals and programs."""

from __future__ import annotations

__all__ = ["json_text", "printable"]

_ESCAPES = {
    code: f"\\u{code:04x}"
    for code in (
        *(*range(0x7F, 0xA0), 0xAD, 0x61C, 0x180E, *range(0x200B, 0x2010), *range(0x2028, 0x202F)),
        *(*range(0x2060, 0x2070), 0xFEFF),
    )
}
"""Controls, line ends, and what turns or hides text, which JSON leaves as they are; outside its strings
there are none.
"""


def printable(text: str) -> str:
    """`text` with escapes for what moves a cursor, changes a colour, or starts a line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def json_text(data: bytes) -> str:
    """JSON as it may be written anywhere."""
    return data.decode().translate(_ESCAPES)
