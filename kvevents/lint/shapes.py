"""What of a message the rules of lint look at, but for the values that a finding quotes.

Who lost nothing of one message loses nothing of another whose shapes were all seen by then: what a
consumer is taken to remember (`Memory`) does not change any more once it was told.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvevents.lint.packed import PackedBatch, PackedEvent, kind_of

__all__ = ["Quiet", "batch_shapes", "frames_shape"]

_I64_MAX = 2**63 - 1
_MAX_SHAPES = 4096
_MAX_TEXT = 200
"""Bytes of a topic, a field's name, or a value that is kept; what has longer ones has no shape."""
_MAX_FIELDS = 40
_MAX_EVENTS = 1000
_BY_VALUE = frozenset(
    {
        *("type", "event_type", "medium", "block_size"),
        *("ownership", "locality", "kv_cache_spec_kind", "tenant_id"),
    }
)
_MAY_BE_EMPTY = frozenset({"lora_name", "cache_salt", "extra_key"})


class Quiet:
    """By shape, which consumers have lost nothing of one, as bits."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, shapes: Sequence[Hashable]) -> int:
        """Those that lose nothing of a message with these; of none, nobody is known."""
        known = -1 if shapes else 0
        for shape in shapes:
            known &= self._known.get(shape, 0)
        return known

    def learn(self, shapes: Sequence[Hashable], bits: int) -> None:
        """These have lost nothing of it."""
        if not bits or not shapes:
            return
        if len(self._known) > _MAX_SHAPES:
            self._known.clear()
        for shape in shapes:
            self._known[shape] = self._known.get(shape, 0) | bits


def frames_shape(frames: Sequence[bytes], seq: int | None) -> Hashable:
    """Of what is around a payload; None where it has none."""
    if len(frames) < 2 or len(frames[0]) > _MAX_TEXT:
        return None
    large = seq if seq is None or seq > _I64_MAX else 0
    return len(frames), frames[0], len(frames[1]), large


def batch_shapes(batch: PackedBatch) -> list[Hashable]:
    """Of a batch and of each of its events; empty where one of them has none."""
    events = batch.events
    if events is None or len(events) > _MAX_EVENTS or batch.ts is None:
        return []
    rank = None if batch.rank is None else bytes(batch.rank)
    if rank is not None and len(rank) > _MAX_TEXT:
        return []
    shapes: list[Hashable] = [(batch.length, batch.trailing > 0, kind_of(batch.ts), rank)]
    for event in events:
        shape = _event_shape(event)
        if shape is None:
            return []
        shapes.append(shape)
    return shapes


def _event_shape(event: PackedEvent) -> Hashable:
    hashes, tokens = event.hashes, event.tokens
    if event.unreadable is not None or len(event.fields) > _MAX_FIELDS or hashes.count > 1000:
        return None
    shape: list[Hashable] = [
        event.form,
        event.length,
        event.extra,
        min(hashes.count, 2),
        hashes.broken is None,
        hashes.negative is None,
        hashes.large is None,
        hashes.digest is None,
        hashes.narrow is None,
        hashes.repeated is None,
    ]
    if tokens is not None:
        needed = hashes.count * (event.number("block_size") or 0)
        shape += (
            tokens.nil is None,
            tokens.pairs is None,
            tokens.broken is None,
            tokens.out_of_range is None,
            tokens.count == 0,
            (tokens.count > needed) - (tokens.count < needed),
        )
    for key, raw in event.fields.items():
        value: Hashable = kind_of(raw)
        if key in _BY_VALUE:
            value = bytes(raw)
            if len(value) > _MAX_TEXT:
                return None
        elif value == "text" and key in _MAY_BE_EMPTY:
            value = event.text(key) in (None, "")
        elif len(key) > _MAX_TEXT:
            return None
        shape += (key, value)
    return tuple(shape)
