"""An engine's event objects as ours, made on the engine's thread.

What `decode_batch` makes of the engine's own payload is made here without the payload: the same fields,
media by our names, hashes as signed 64-bit integers. Lists are passed on, not copied. An event that is
not understood costs itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvevents.codec import decode_batch
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import are_canonical, canonical_hash

__all__ = ["EventReader"]

_OPTIONAL = (
    *("lora_name", "cache_salt", "session_id", "extra_key", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "locality"),
)
"""What an engine's BlockStored may have after the medium, under the name that it has with us."""
_OF_REMOVED = ("group_idx", "locality")

_Read = Callable[[Any], "Event | None"]


class EventReader:
    """Reads events of one engine. One thread at a time. `skipped`: events that were not understood."""

    def __init__(self) -> None:
        self.skipped = 0
        self.last_error = ""
        """Why the last one was not."""
        self._readers: dict[type, _Read] = {}
        self._media: dict[Any, StorageMedium] = {None: StorageMedium.GPU}

    def read(self, events: Sequence[Any]) -> list[Event]:
        """Those that are understood. Never raises."""
        read: list[Event] = []
        for event in events:
            try:
                found = (self._readers.get(type(event)) or self._reader(type(event)))(event)
            except Exception as error:  # whatever an engine hands over, it gets no exception
                self._skip(f"{type(event).__name__}: {error}")
                continue
            if found is not None:
                read.append(found)
        return read

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        self.last_error = reason

    def _reader(self, kind: type) -> _Read:
        """For events of this class, by the fields that it has."""
        reader = self._make_reader(kind)
        self._readers[kind] = reader
        return reader

    def _make_reader(self, kind: type) -> _Read:
        fields = getattr(kind, "__struct_fields__", ())
        match kind.__name__:
            case "BlockStored" if {"block_hashes", "token_ids"}.issubset(fields):
                return self._stored(tuple(name for name in _OPTIONAL if name in fields))
            case "BlockRemoved" if "block_hashes" in fields:
                return self._removed(tuple(name for name in _OF_REMOVED if name in fields))
            case "AllBlocksCleared":
                return lambda _: AllBlocksCleared()
        return self._by_its_bytes

    def _stored(self, optional: tuple[str, ...]) -> _Read:
        def read(event: Any) -> Event | None:
            tokens = event.token_ids
            if type(tokens) is not list:  # an array's own items may be no ints
                tokens = list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
            if tokens and type(tokens[0]) in (list, tuple):
                raise ValueError("pairs of tokens (EAGLE bigrams) are not understood")
            parent = event.parent_block_hash
            return BlockStored(
                _signed(event.block_hashes),
                None if parent is None else canonical_hash(parent),
                tokens,
                event.block_size,
                event.lora_id,
                self._medium(event.medium),
                **{name: value for name in optional if (value := getattr(event, name)) is not None},
            )

        return read

    def _removed(self, optional: tuple[str, ...]) -> _Read:
        def read(event: Any) -> Event | None:
            return BlockRemoved(
                _signed(event.block_hashes),
                self._medium(event.medium),
                **{name: value for name in optional if (value := getattr(event, name)) is not None},
            )

        return read

    def _medium(self, text: Any) -> StorageMedium:
        """Raises ValueError for one that is unknown."""
        medium = self._media.get(text)
        if medium is None:
            medium = self._media[text] = StorageMedium(text)
        return medium

    def _by_its_bytes(self, event: Any) -> Event | None:
        """An event of another class, as a subscriber of the engine's would read it."""
        decoded = decode_batch(msgspec.msgpack.encode((0.0, [event], 0)))
        for one in decoded.skipped:
            self._skip(one.reason)
        return next((_named(one) for one in decoded.batch.events), None)


def _named(event: Event) -> Event:
    """With a medium and hashes as we write them."""
    if isinstance(event, AllBlocksCleared):
        return event
    event.block_hashes = _signed(event.block_hashes)
    if event.medium is None:
        event.medium = StorageMedium.GPU
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event.parent_block_hash = canonical_hash(event.parent_block_hash)
    return event


def _signed(hashes: Any) -> Any:
    """`hashes` itself where they are signed 64-bit ints already."""
    if type(hashes) is list and hashes and are_canonical(hashes):
        return hashes
    return [canonical_hash(one) for one in hashes]
