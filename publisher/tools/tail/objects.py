"""A stream as JSON, one object a line."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.events import Event
from kvevents.reading import Reading
from publisher.tools.tail.notice import Notice
from publisher.tools.tail.stream import Stream
from publisher.tools.text import json_text

__all__ = ["Objects", "hash_name"]

_MAX_DEPTH = 32


def _fallback(value: object) -> str:
    return repr(value)


_encode = msgspec.json.Encoder(enc_hook=_fallback).encode


class Objects:
    """Writes events with the fields of the wire, and their batch's `ts`, `seq`, `dp_rank` and
    `replayed`; `at` is when it came. Hashes are strings: JSON numbers lose their low bits.
    """

    whole = False

    def __init__(self) -> None:
        self._common: dict[str, Any] = {}

    def begin(self, stream: Stream, reading: Reading) -> None:
        """The batch that the next events are of."""
        told, batch = reading.told, reading.batch
        self._common = {
            "source": stream.source.name,
            "at": told.at_ns / 1e9,
            "ts": None if batch is None else batch.ts,
            "seq": told.seq,
            "dp_rank": None if batch is None else batch.dp_rank,
            "replayed": told.replayed,
        }

    def event(self, position: int, event: Event) -> str:
        """One of its events."""
        fields = {**self._common, "event": position, "type": type(event).__name__}
        for name in event.__struct_fields__:
            value = getattr(event, name)
            if name == "block_hashes":
                value = [hash_name(one) for one in value]
            elif name == "parent_block_hash" and value is not None:
                value = hash_name(value)
            elif name == "token_ids":
                value = list(value)
            fields[name] = value
        return _line(fields)

    def notice(self, stream: Stream, notice: Notice) -> str:
        """What is said besides."""
        common = {"source": stream.source.name, "at": notice.at_ns / 1e9}
        return _line({**common, "seq": notice.seq, "type": notice.kind, **notice.fields})


def hash_name(value: int | bytes) -> str:
    """A hash as it stood on the wire: decimal, or hex for bytes."""
    return value.hex() if isinstance(value, bytes) else str(value)


def _line(fields: dict[str, Any]) -> str:
    try:
        data = _encode(fields)
    except (TypeError, ValueError, RecursionError, OverflowError):  # an engine's own extra keys
        data = _encode({name: _plain(value, 0) for name, value in fields.items()})
    return json_text(data) + "\n"


def _plain(value: object, depth: int) -> object:
    """`value` as JSON can say it."""
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {str(key): _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, depth + 1) for one in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.hex() if isinstance(value, bytes) else repr(value)
