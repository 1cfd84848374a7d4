"""`--format`: a line per event, put together from letters, as kcat does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from kvevents.events import AllBlocksCleared, BlockStored, Event
from kvevents.hashing import short_hash
from kvevents.reading import Reading
from publisher.config.checks import shown
from publisher.tools.tail.lines import clock
from publisher.tools.tail.notice import Notice
from publisher.tools.tail.objects import hash_name
from publisher.tools.tail.stream import Stream
from publisher.tools.text import printable

__all__ = ["LETTERS", "Format"]

_NONE = "-"
_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
Part = Callable[[Stream, Reading, int, Event], str]


def _of(name: str) -> Part:
    def part(_stream: Stream, _reading: Reading, _position: int, event: Event) -> str:
        value = getattr(event, name, None)
        return _NONE if value is None else printable(str(value))

    return part


def _ts(reading: Reading) -> float:
    return 0.0 if reading.batch is None else reading.batch.ts


def _hashes(event: Event) -> list[int | bytes]:
    return [] if isinstance(event, AllBlocksCleared) else event.block_hashes


def _all_hashes(event: Event) -> str:
    return ",".join(map(hash_name, _hashes(event))) or _NONE


def _first_hash(event: Event) -> str:
    hashes = _hashes(event)
    return short_hash(hashes[0]) if hashes else _NONE


def _parent(event: Event, name: Callable[[int | bytes], str]) -> str:
    parent = getattr(event, "parent_block_hash", None)
    return _NONE if parent is None else name(parent)


def _tokens(event: Event) -> str:
    if not isinstance(event, BlockStored):
        return _NONE
    return ",".join(map(str, event.token_ids)) or _NONE


_PARTS: Final[dict[str, tuple[str, Part]]] = {
    "t": ("time of day", lambda _, r, _p, _e: clock(_ts(r))),
    "T": ("ts, in seconds since the epoch", lambda _, r, _p, _e: repr(_ts(r))),
    "a": ("when it came, likewise", lambda _, r, _p, _e: f"{r.told.at_ns / 1e9:.6f}"),
    "w": ("worker: the source's name", lambda s, _r, _p, _e: printable(s.source.name)),
    "r": ("rank", lambda _, r, _p, _e: str(r.rank)),
    "s": ("seq", lambda _, r, _p, _e: str(r.seq)),
    "i": ("position in its batch", lambda _, _r, p, _e: str(p)),
    "e": ("event", lambda _, _r, _p, e: _KINDS[type(e).__name__]),
    "m": ("medium", _of("medium")),
    "n": ("number of blocks", lambda _, _r, _p, e: str(len(_hashes(e)))),
    "h": ("hash of the first, short", lambda _, _r, _p, e: _first_hash(e)),
    "H": ("all hashes as on the wire", lambda _, _r, _p, e: _all_hashes(e)),
    "p": ("parent, short", lambda _, _r, _p, e: _parent(e, short_hash)),
    "P": ("parent as on the wire", lambda _, _r, _p, e: _parent(e, hash_name)),
    "b": ("block size", _of("block_size")),
    "c": ("count of tokens", lambda _, _r, _p, e: str(len(getattr(e, "token_ids", ())))),
    "k": ("tokens", lambda _, _r, _p, e: _tokens(e)),
    "l": ("LoRA name", _of("lora_name")),
    "S": ("cache salt", _of("cache_salt")),
    "x": ("extra key", _of("extra_key")),
    "y": ("replayed or live", lambda _, r, _p, _e: "replayed" if r.told.replayed else "live"),
}
_MOST = 1000
"""Columns."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
_PIECE = re.compile(r"([^%\\]+)|\\(.?)|%(-?[0-9]*)(.?)", re.DOTALL)
"""Plain text; an escape; a letter, with its width. Of these is all text made."""

LETTERS: Final = {letter: what for letter, (what, _) in _PARTS.items()}


class Format:
    """Writes events as `template` says: letters behind %, and \\n \\t \\r \\0 \\\\. Between % and letter
    may be how wide it is at least: %8e is right-aligned, %-8e left-aligned. A line end is added unless it
    ends with one, or with \\0. What there is none of is a `-`. Raises ValueError for a letter that is
    none, and a width above 1000.
    """

    whole = False

    def __init__(self, template: str) -> None:
        self._parts: list[str | Part] = []
        text = ""
        for found in _PIECE.finditer(template):
            plain, escape, width, letter = found.groups()
            if plain is not None:
                text += plain
            elif escape is not None:
                text += _escaped(escape)
            elif letter == "%" and not width:
                text += "%"
            else:
                self._parts += [text, _part(width, letter)]
                text = ""
        self._parts.append(text if text.endswith(("\n", "\0")) else f"{text}\n")
        self._stream: Stream | None = None
        self._reading: Reading | None = None

    def begin(self, stream: Stream, reading: Reading) -> None:
        """The batch that the next events are of."""
        self._stream, self._reading = stream, reading

    def event(self, position: int, event: Event) -> str:
        """One of its events."""
        stream, reading = self._stream, self._reading
        assert stream is not None and reading is not None, "an event is of a batch"
        return "".join(
            part if isinstance(part, str) else part(stream, reading, position, event)
            for part in self._parts
        )

    def notice(self, _stream: Stream, _notice: Notice) -> None:
        """Nothing but what was asked for."""


def _escaped(letter: str) -> str:
    if letter not in _ESCAPES:
        raise ValueError(f"--format: {shown(chr(92) + letter)} is no escape")
    return _ESCAPES[letter]


def _part(width: str, letter: str) -> Part:
    if letter not in _PARTS:
        known = " ".join(_PARTS)
        raise ValueError(f"--format: {shown(f'%{width}{letter}')} is none of {known}")
    part = _PARTS[letter][1]
    if not width:
        return part
    digits = width.removeprefix("-")
    if not digits or digits.startswith("0") or len(digits) > 4 or int(digits) > _MOST:
        raise ValueError(f"--format: {shown(f'%{width}{letter}')}: its width is not in 1..{_MOST}")
    columns, left = int(digits), width != digits

    def padded(stream: Stream, reading: Reading, position: int, event: Event) -> str:
        text = part(stream, reading, position, event)
        return text.ljust(columns) if left else text.rjust(columns)

    return padded
