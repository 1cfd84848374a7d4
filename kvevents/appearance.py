"""What payloads look like on the wire: which form, which hashes, which words.

Nothing here decides how a payload is read; that is `kvevents.codec`'s business. It is for people who ask
whom they are listening to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvevents.codec import elements
from kvevents.errors import KVEventsError

__all__ = ["Appearance", "EventsAs", "Presence", "TimeAs"]

EventsAs = Literal["maps", "arrays", "objects", "mixed", "unknown"]
"""`maps`: `{"type": "BlockStored", …}`. `arrays`: `["BlockStored", …]`. `objects`: a store's,
`{"event_type": "stored", …}`. `unknown`: there was no event yet.
"""

TimeAs = Literal["float seconds", "int seconds", "int milliseconds", "mixed", "unknown"]

Presence = Literal["int", "nil", "absent", "mixed", "unknown"]

_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_OBJECTS = ("stored", "removed", "cleared")
_MOST = 32
"""Different words, sizes and types that are kept; a stranger may send any number."""

_LONGEST = 64
_HASHES = 8
"""Of one event that are looked at."""

_EVENTS = 256
"""Of one batch that are looked at."""

_LEAST_MS = 10**11
_I64_MAX = 2**63 - 1
_UNREADABLE = (
    msgspec.MsgspecError,
    UnicodeDecodeError,
    RecursionError,
    OverflowError,
    TypeError,
    ValueError,
)
_plain = msgspec.msgpack.Decoder().decode


@dataclass(slots=True)
class Appearance:
    """What was seen so far. `add` takes any bytes, and never raises."""

    payloads: int = 0
    """How many were looked at; `unreadable` of them are no batch."""
    unreadable: int = 0
    events_as: EventsAs = "unknown"
    ts_as: TimeAs = "unknown"
    dp_rank: Presence = "unknown"
    ranks: set[int] = field(default_factory=set)
    types: Counter[str] = field(default_factory=Counter)
    """Events by the type that they say, known or not."""
    media: set[str] = field(default_factory=set)
    """As they are spelled."""
    without_medium: int = 0
    """Events, of those that have one, that do not say it."""
    block_sizes: set[int] = field(default_factory=set)
    with_tokens: int = 0
    without_tokens: int = 0
    """Stores that leave `token_ids` out."""
    bigrams: int = 0
    """Stores whose `token_ids` are pairs."""
    hash_widths: set[str] = field(default_factory=set)
    """`negative`, `small`, `large` (from 2^63 on), or `bytes8`, `bytes32`, …"""

    @classmethod
    def of(cls, payload: bytes) -> Appearance:
        """That of one payload."""
        found = cls()
        found.add(payload)
        return found

    @property
    def hashes_as(self) -> str:
        """`signed`, `unsigned`, `ints` (all of them are both), `bytes8`, …, `mixed`, or `unknown`."""
        widths = self.hash_widths
        if not widths:
            return "unknown"
        if widths <= {"negative", "small", "large"}:
            if {"negative", "large"} <= widths:
                return "mixed"
            if "negative" in widths:
                return "signed"
            return "unsigned" if "large" in widths else "ints"
        return next(iter(widths)) if len(widths) == 1 else "mixed"

    @property
    def unknown_types(self) -> set[str]:
        """Those of `types` that nobody knows."""
        return set(self.types) - set(_KNOWN) - set(_OBJECTS)

    @property
    def tokens_left_out(self) -> bool:
        """Whether there were stores, and none had tokens."""
        return self.without_tokens > 0 and not self.with_tokens

    def __str__(self) -> str:
        """One line, for people; only words that were read are in it, and they may hold anything."""
        if self.payloads == self.unreadable:
            return "no batch" if self.payloads else "nothing yet"
        parts = ["no events yet" if self.events_as == "unknown" else f"events as {self.events_as}"]
        if self.hash_widths:
            parts.append(f"hashes {self.hashes_as}")
        if self.media or self.without_medium:
            words = sorted(self.media) + ["(none)"] * bool(self.without_medium)
            parts.append(f"media {' '.join(words)}")
        if self.block_sizes:
            parts.append(f"block size {' '.join(map(str, sorted(self.block_sizes)))}")
        if self.tokens_left_out:
            parts.append("token_ids left out")
        if self.bigrams:
            parts.append("token_ids as pairs")
        parts.append(f"ts {self.ts_as}")
        if self.dp_rank in ("nil", "absent", "mixed"):
            parts.append(f"dp_rank {self.dp_rank}")
        if self.unknown_types:
            parts.append(f"unknown types {' '.join(sorted(self.unknown_types))}")
        return ", ".join(parts)

    def add(self, payload: bytes) -> None:
        """Look at one more."""
        self.payloads += 1
        try:
            parts = elements(payload, "payload")
            ts = _plain(parts[0])
            events = elements(parts[1], "events")
        except (*_UNREADABLE, IndexError, KVEventsError):
            self.unreadable += 1
            return
        self._see_rank(parts)
        as_objects = False
        for raw in events[:_EVENTS]:
            try:
                event = _plain(raw)
            except _UNREADABLE:
                continue
            if isinstance(event, dict):
                as_objects |= "event_type" in event
                self._see_map(event)
            elif isinstance(event, list) and event:
                self._see_array(event)
        self._see_ts(ts, as_objects=as_objects)

    # ---------------------------------------------------------------------------------- inside

    def _see_rank(self, parts: list[msgspec.Raw]) -> None:
        try:
            rank = _plain(parts[2]) if len(parts) > 2 else ...
        except _UNREADABLE:
            return
        now: Presence
        if rank is ...:
            now = "absent"
        elif type(rank) is int:
            now = "int"
            if len(self.ranks) < _MOST:
                self.ranks.add(rank)
        elif rank is None:
            now = "nil"
        else:
            return
        self.dp_rank = now if self.dp_rank in ("unknown", now) else "mixed"

    def _see_ts(self, ts: object, *, as_objects: bool) -> None:
        now: TimeAs
        if type(ts) is float:
            now = "float seconds"
        elif type(ts) is int:
            now = "int milliseconds" if as_objects or ts >= _LEAST_MS else "int seconds"
        else:
            return
        self.ts_as = now if self.ts_as in ("unknown", now) else "mixed"

    def _see_form(self, now: EventsAs) -> None:
        self.events_as = now if self.events_as in ("unknown", now) else "mixed"

    def _see_type(self, tag: object) -> None:
        text = tag if isinstance(tag, str) else type(tag).__name__
        text = text[:_LONGEST]
        if text in self.types or len(self.types) < _MOST:
            self.types[text] += 1

    def _see_map(self, event: dict[Any, Any]) -> None:
        """Of one of the wire's, or of a store."""
        if "event_type" in event:
            self._see_form("objects")
            tag = event["event_type"]
            hashes = event.get("block_hashes") or event.get("seq_hashes")
            stored, removed = tag == "stored", tag == "removed"
        else:
            self._see_form("maps")
            tag, hashes = event.get("type"), event.get("block_hashes")
            stored, removed = tag == "BlockStored", tag == "BlockRemoved"
        self._see_type(tag)
        if stored or removed:
            self._see_blocks(hashes, event.get("medium"))
        if stored:
            self._see_store(event.get("token_ids"), event.get("block_size"))

    def _see_array(self, event: list[Any]) -> None:
        self._see_form("arrays")
        tag = event[0]
        self._see_type(tag)
        padded = event[:7] + [None] * (7 - len(event))
        if tag == "BlockStored":
            self._see_blocks(padded[1], padded[6])
            self._see_store(padded[3], padded[4])
        elif tag == "BlockRemoved":
            self._see_blocks(padded[1], padded[2])

    def _see_blocks(self, hashes: object, medium: object) -> None:
        if isinstance(medium, str):
            if len(self.media) < _MOST:
                self.media.add(medium[:_LONGEST])
        else:
            self.without_medium += 1
        if isinstance(hashes, list):
            for one in hashes[:_HASHES]:
                if len(self.hash_widths) < _MOST:
                    self.hash_widths.add(_width(one))

    def _see_store(self, tokens: object, block_size: object) -> None:
        if isinstance(tokens, list) and tokens:
            self.with_tokens += 1
            self.bigrams += isinstance(tokens[0], list)
        else:
            self.without_tokens += 1
        if type(block_size) is int and len(self.block_sizes) < _MOST:
            self.block_sizes.add(block_size)


def _width(value: object) -> str:
    if isinstance(value, bytes):
        return f"bytes{len(value)}"
    if type(value) is not int:
        return type(value).__name__
    if value < 0:
        return "negative"
    return "small" if value <= _I64_MAX else "large"
