"""Events to the bytes of one dialect. What of the events is told at all, kvevents.view says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from kvevents.codec import pack_batch
from kvevents.columns import Columns
from kvevents.dialect import Dialect, HashForm
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)
from kvevents.pieces import piece_of, without_tokens
from kvevents.tokens import TokenIds

__all__ = ["Speller", "Spells"]

_U64 = 2**64 - 1
_Form: TypeAlias = Callable[[int], int | bytes]

_encode = msgspec.msgpack.Encoder().encode


class Spells(Protocol):
    """What makes payloads of events. One that keeps count of what is held does so as they are spelled.

    `verbatim`: whether a payload says all of the events, as kvevents.codec encodes them.
    `clears_by_gap`: whether a seq is to be missing before AllBlocksCleared, for that is how some who read
    it forget.
    """

    verbatim: bool
    clears_by_gap: bool

    def spell(self, ts: float, events: Sequence[Event], /) -> bytes:
        """The payload of these events, which must not change any more. `ts`: seconds since the epoch."""

    def fresh(self) -> Spells:
        """One that spells alike, with nothing held: for a state that is told from its beginning."""

    def hold(self, events: Iterable[Event], /) -> None:
        """Take what was told by another before."""


class Speller:
    """Of every event form but `mooncake`; knows of nothing held.

    Sinks that spell alike share one: a batch that is spelled for one of them is not encoded again for the
    next.
    """

    clears_by_gap = False

    def __init__(self, dialect: Dialect, dp_rank: int) -> None:
        self._dialect, self._dp_rank = dialect, dp_rank
        self._medium = dict(dialect.media)
        self._hash = _HASH_FORMS[dialect.hash_form]
        self._event = _EVENT_FORMS[dialect.event_form]
        named = dialect.event_form == "array" and "lora_name" in dialect.namespaces
        forms = _PLAIN_FORMS["named array" if named else dialect.event_form]
        self._plain_stored, self._plain_removed = forms
        self._ours = (
            dialect.event_form == "map"
            and dialect.hash_form == "i64"
            and all(text == medium.value for medium, text in dialect.media)
        )
        """Whether our own encoding is the one wanted."""
        self._cuts = dialect.blocks_per_event is not None or not dialect.token_ids
        self.verbatim = self._ours and not self._cuts
        self._last: tuple[float, Sequence[Event]] | None = None
        self._payload = b""

    def spell(self, ts: float, events: Sequence[Event]) -> bytes:
        """See `Spells`. The events are sound, as `check_batch` has it; that is not looked at again."""
        last = self._last
        if last is None or last[0] != ts or last[1] is not events:
            self._payload = self._spell(ts, events)
            self._last = (ts, events)
        return self._payload

    def fresh(self) -> Speller:
        """Itself."""
        return self

    def hold(self, events: Iterable[Event]) -> None:
        """Nothing is to be done."""

    def _spell(self, ts: float, events: Sequence[Event]) -> bytes:
        if type(events) is Columns and not self._cuts:
            return _encode((ts, self._spell_columns(events), self._dp_rank))
        told = list(self._cut(events)) if self._cuts else events
        if self._ours:
            return pack_batch(KVEventBatch(ts, list(told), self._dp_rank))
        return _encode((ts, [self._event(self, event) for event in told], self._dp_rank))

    def _cut(self, events: Sequence[Event]) -> Iterator[Event]:
        """The events without what is left out of each, of at most so many blocks."""
        most = self._dialect.blocks_per_event
        for event in events:
            if isinstance(event, BlockStored) and not self._dialect.token_ids:
                event = without_tokens(event)  # noqa: PLW2901
            if (
                most is None
                or isinstance(event, AllBlocksCleared)
                or len(event.block_hashes) <= most
            ):
                yield event
                continue
            for start in range(0, len(event.block_hashes), most):
                stop = min(start + most, len(event.block_hashes))
                if isinstance(event, BlockStored):
                    yield piece_of(event, start, stop)
                else:
                    hashes = event.block_hashes[start:stop]
                    yield msgspec.structs.replace(event, block_hashes=hashes)

    def _spell_columns(self, columns: Columns) -> list[Any]:
        """The same for a batch in columns, of which no event is made."""
        form, size, text = self._hash, columns.block_size, self._medium[columns.medium]
        stored, removed = self._plain_stored, self._plain_removed
        names = columns.hashes if form is int else list(map(form, columns.hashes))
        ids = TokenIds(columns.packed).tolist()
        told: list[Any] = []
        at = start = 0
        for count, parent in zip(columns.counts, columns.parents, strict=True):
            if count < 0:
                told.append(removed(names[at : at - count], text))
                at -= count
                continue
            stop = start + count * size
            before = parent if parent is None else form(parent)
            told.append(stored(names[at : at + count], before, ids[start:stop], size, text))
            at += count
            start = stop
        return told

    # ------------------------------------------------------------------------------- forms

    def _hashes(self, event: BlockStored | BlockRemoved) -> list[int | bytes]:
        form = self._hash
        return [form(value) for value in event.block_hashes]  # type: ignore[arg-type]  # checked

    def _parent(self, event: BlockStored) -> int | bytes | None:
        parent = event.parent_block_hash
        return None if parent is None else self._hash(parent)  # type: ignore[arg-type]  # checked

    def _text(self, event: BlockStored | BlockRemoved) -> str:
        assert event.medium is not None, "the view tells media by name"
        return self._medium[event.medium]

    def _map(self, event: Event) -> Any:
        match event:
            case BlockStored():
                told: dict[str, Any] = self._stored(event)
                for name in _OPTIONAL:
                    if (value := getattr(event, name)) is not None:
                        told[name] = value
                return told
            case BlockRemoved():
                removed: dict[str, Any] = self._removed(event)
                return removed if event.group_idx is None else removed | _group(event)
            case AllBlocksCleared():
                return event

    def _vllm(self, event: Event) -> Any:
        if not isinstance(event, BlockStored):
            return self._map(event)
        told: _VllmStored = self._stored(event)
        keys = event.extra_keys
        told.extra_keys = _vllm_keys(event) if keys is None else keys
        told.group_idx = event.group_idx
        told.kv_cache_spec_kind = event.kv_cache_spec_kind
        told.session_id = event.session_id
        return told

    def _array(self, event: Event) -> Any:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return self._removed(event)
            case AllBlocksCleared():
                return ("AllBlocksCleared",)

    def _stored(self, event: BlockStored) -> Any:
        """What every store says."""
        return self._plain_stored(
            self._hashes(event),
            self._parent(event),
            _ids(event),
            event.block_size,
            self._text(event),
            event.lora_id,
            event.lora_name,
        )

    def _removed(self, event: BlockRemoved) -> Any:
        return self._plain_removed(self._hashes(event), self._text(event))


_OPTIONAL = (
    "cache_salt",
    "session_id",
    "extra_key",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
"""Keys of a store that are absent when there is nothing to say."""

_EVENT_FORMS: dict[str, Callable[[Speller, Event], Any]] = {
    "map": Speller._map,
    "vllm": Speller._vllm,
    "array": Speller._array,
}
_HASH_FORMS: dict[HashForm, _Form] = {
    "i64": int,
    "u64": lambda value: value & _U64,
    "bytes": lambda value: value.to_bytes(8, "big", signed=True),
}


class _VllmStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    """BlockStored of vLLM 0.33, with room for all of its keys: their number is in the map's header."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


def _map_stored(
    names: list[Any],
    parent: Any,
    ids: list[int],
    size: int,
    text: str,
    lora_id: int | None = None,
    lora_name: str | None = None,
) -> Any:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
        "lora_id": lora_id,
        "medium": text,
        "lora_name": lora_name,
    }


def _map_removed(names: list[Any], text: str) -> Any:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": text}


def _vllm_stored(
    names: list[Any],
    parent: Any,
    ids: list[int],
    size: int,
    text: str,
    lora_id: int | None = None,
    lora_name: str | None = None,
) -> Any:
    return _VllmStored(names, parent, ids, size, lora_id, text, lora_name)


def _array_stored(
    names: list[Any],
    parent: Any,
    ids: list[int],
    size: int,
    text: str,
    lora_id: int | None = None,
    _lora_name: str | None = None,
) -> Any:
    return ("BlockStored", names, parent, ids, size, lora_id, text)


def _named_array_stored(
    names: list[Any],
    parent: Any,
    ids: list[int],
    size: int,
    text: str,
    lora_id: int | None = None,
    lora_name: str | None = None,
) -> Any:
    return ("BlockStored", names, parent, ids, size, lora_id, text, lora_name)


def _array_removed(names: list[Any], text: str) -> Any:
    return ("BlockRemoved", names, text)


_PLAIN_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "map": (_map_stored, _map_removed),
    "vllm": (_vllm_stored, _map_removed),
    "array": (_array_stored, _array_removed),
    "named array": (_named_array_stored, _array_removed),
}
"""A store and a removal of which nothing unusual is said."""


def _ids(event: BlockStored) -> list[int]:
    tokens = event.token_ids
    return tokens.tolist() if isinstance(tokens, TokenIds) else list(tokens)


def _vllm_keys(event: BlockStored) -> list[list[str] | None] | None:
    """What vLLM's hash covers besides tokens: the adapter, and in a prompt's first block the salt."""
    names = [event.lora_name] if event.lora_name else []
    first = names
    if event.cache_salt and event.parent_block_hash is None:
        first = [*names, event.cache_salt]
    if not first:
        return None
    return [first, *[names or None] * (len(event.block_hashes) - 1)]


def _group(event: BlockRemoved) -> dict[str, Any]:
    return {"group_idx": event.group_idx}
