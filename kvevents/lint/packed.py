"""A payload as it was packed: what is where, of which kind and how wide, before anyone's decoder.

Any bytes can be read: what is no value at all has a reason in its place.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = [
    "HashPlaces",
    "PackedBatch",
    "PackedEvent",
    "Place",
    "Tokens",
    "TooLarge",
    "Unreadable",
    "kind_of",
    "read_batch",
    "shown",
]

_U32_MAX, _I64_MAX, _U64_MAX = 2**32 - 1, 2**63 - 1, 2**64 - 1
_MAX_BYTES, _MAX_EVENTS, _MAX_ELEMENTS = 16 << 20, 20_000, 1_000_000
"""Of a payload, of its events, and of any other array in it: what is larger would take too long."""

_WIDE = 9
"""Bytes of an int that is packed with 64 bits, head included."""

_split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_entries = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_plain = msgspec.msgpack.Decoder().decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)

_STORED_SLOTS = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_REMOVED_SLOTS = ("type", "block_hashes", "medium", "group_idx")
_SLOTS = {"BlockStored": _STORED_SLOTS, "BlockRemoved": _REMOVED_SLOTS}
"""Positions of the array form, vLLM 0.23's."""

_HEADS = (
    *(("int", 0x80), ("map", 0x90), ("array", 0xA0), ("text", 0xC0), ("nil", 0xC1), ("ext", 0xC2)),
    *(
        ("bool", 0xC4),
        ("bytes", 0xC7),
        ("ext", 0xCA),
        ("float", 0xCC),
        ("int", 0xD4),
        ("ext", 0xD9),
    ),
    *(("text", 0xDC), ("array", 0xDE), ("map", 0xE0), ("int", 0x100)),
)
"""A kind, and up to which first byte a value is of it."""
_KIND_OF = tuple(next(kind for kind, end in _HEADS if head < end) for head in range(256))

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 40
_shorten.maxlong = 24


class Unreadable(Exception):
    """Bytes that are not the value that they should be; the message says why, in one line."""


class TooLarge(Exception):
    """A payload that is not looked into; the message says what of it is too large."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a payload something is, and what it is, as a message quotes it."""

    where: str
    value: str

    def __str__(self) -> str:
        return f"{self.where} is {self.value}"


@dataclass(frozen=True, slots=True)
class HashPlaces:
    """The first place of each kind of hash, parent included; None where there is none.

    `narrow`: an int that is packed with fewer than 64 bits. `broken`: neither int nor bytes. `repeated`:
    a hash that the event has already, or that is its own parent.
    """

    count: int = 0
    negative: Place | None = None
    large: Place | None = None
    digest: Place | None = None
    narrow: Place | None = None
    broken: Place | None = None
    repeated: Place | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """What `token_ids` is. `count`: ids, or pairs. `nil`: it is. `broken`: none of these, at the first
    place that is not.
    """

    count: int = 0
    nil: Place | None = None
    pairs: Place | None = None
    broken: Place | None = None
    out_of_range: Place | None = None


@dataclass(frozen=True, slots=True)
class PackedEvent:
    """One event.

    `form`: "map", "array", or what else it is. `length`: of an array. `fields`: by name, for an array by
    the positions of vLLM 0.23. `unreadable`: why nothing of it could be read. `extra`: whether
    `extra_keys` say anything; vLLM's also repeat the adapter's name.
    """

    path: str
    form: str
    fields: Mapping[str, msgspec.Raw]
    length: int = 0
    unreadable: str | None = None
    hashes: HashPlaces = HashPlaces()
    tokens: Tokens | None = None
    extra: bool = False

    def text(self, key: str) -> str | None:
        """The text of a field; None where it is absent or something else."""
        raw = self.fields.get(key)
        value = None if raw is None else _scalar(raw)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """The int of a field; None where it is absent or something else."""
        raw = self.fields.get(key)
        value = None if raw is None else _scalar(raw)
        return value if type(value) is int else None

    def given(self, key: str) -> bool:
        """Whether the field is there and not nil."""
        raw = self.fields.get(key)
        return raw is not None and kind_of(raw) != "nil"

    def place(self, key: str) -> Place:
        """A field, as a message quotes it."""
        raw = self.fields.get(key)
        return Place(f"{self.path}.{key}", "absent" if raw is None else shown(raw))

    @property
    def stored(self) -> int:
        """How many blocks it says are stored. An event of a store, which has both tags, is of one."""
        if self.text("event_type") == "stored":
            return 1
        return self.hashes.count if self.text("type") == "BlockStored" else 0


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A payload whose outermost value is an array that can be split.

    `ts`, `rank`: None where the array ends before them. `events`: None where there is no array of them,
    and `events_are` says what is there. `trailing`: bytes after the value. `blocks`: how many are stored.
    """

    length: int
    ts: msgspec.Raw | None
    rank: msgspec.Raw | None
    events: tuple[PackedEvent, ...] | None
    events_are: str
    trailing: int
    blocks: int = 0


def read_batch(payload: bytes) -> PackedBatch:
    """Raises Unreadable when it is no array of values, and TooLarge when that would take too long."""
    if len(payload) > _MAX_BYTES:
        raise TooLarge(f"has {len(payload)} bytes: {_MAX_BYTES} at most are looked into")
    _check_length(payload, "elements", _MAX_ELEMENTS)
    end = len(payload)
    try:
        parts = _elements(payload)
    except Unreadable:
        end = _end_of(payload)
        if end == len(payload):
            raise
        parts = _elements(payload[:end])
    events, events_are = None, "absent"
    if len(parts) > 1:
        events_are = kind_of(parts[1])
        _check_length(parts[1], "events", _MAX_EVENTS)
        try:
            events = tuple(map(_event, range(len(parts[1])), _elements(parts[1])))
        except Unreadable as error:
            events_are = f"{shown(parts[1])} ({error})"
    return PackedBatch(
        length=len(parts),
        ts=parts[0] if parts else None,
        rank=parts[2] if len(parts) > 2 else None,
        events=events,
        events_are=events_are,
        trailing=len(payload) - end,
        blocks=sum(event.stored for event in events or ()),
    )


def kind_of(raw: bytes | msgspec.Raw) -> str:
    """nil, bool, int, float, text, bytes, array, map, or ext."""
    return _KIND_OF[memoryview(raw)[0]]


def shown(raw: bytes | msgspec.Raw) -> str:
    """A value as a message quotes it: bounded, and only characters that can be printed."""
    kind = kind_of(raw)
    if kind in ("array", "map", "ext"):
        return f"{'a map' if kind == 'map' else f'an {kind}'} of {len(memoryview(raw))} bytes"
    value = _scalar(raw)
    return "nil" if value is None else quoted(value)


def quoted(value: object) -> str:
    """A decoded value, likewise."""
    return ascii(_shorten.repr(value))[1:-1].replace("\\\\", "\\")


class _NotText:
    def __repr__(self) -> str:
        return "text that is not UTF-8"


def _scalar(raw: bytes | msgspec.Raw) -> Any:
    """The decoded value of anything but array, map and ext, which are None."""
    if kind_of(raw) in ("array", "map", "ext"):
        return None
    try:
        return _plain(raw)
    except _UNREADABLE:
        return _NotText()


def _elements(data: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _split(data)
    except _UNREADABLE as error:
        raise Unreadable(_reason(error)) from None


def _reason(error: Exception) -> str:
    return ascii(str(error))[1:-1][:120]


def _event(position: int, raw: msgspec.Raw) -> PackedEvent:
    path, form = f"events[{position}]", kind_of(raw)
    fields: Mapping[str, msgspec.Raw] = {}
    length = 0
    try:
        if form == "map":
            fields = _entries(raw)
        elif form == "array":
            parts = _split(raw)
            length = len(parts)
            tag = _scalar(parts[0]) if parts else None
            slots = _SLOTS.get(tag, ("type",)) if isinstance(tag, str) else ("type",)
            fields = dict(zip(slots, parts, strict=False))
    except _UNREADABLE as error:
        return PackedEvent(path, form, {}, unreadable=_reason(error))
    hashes, tokens = fields.get("block_hashes"), fields.get("token_ids")
    return PackedEvent(
        path,
        form,
        fields,
        length,
        hashes=_hash_places(path, hashes, fields.get("parent_block_hash")),
        tokens=None if tokens is None else _tokens(f"{path}.token_ids", tokens),
        extra="extra_keys" in fields and _says_more(fields["extra_keys"], fields.get("lora_name")),
    )


def _says_more(keys: msgspec.Raw, name: msgspec.Raw | None) -> bool:
    told = None if name is None else _scalar(name)
    told = told if isinstance(told, str) else None
    try:
        value = _plain(keys)
    except _UNREADABLE:
        return False
    entries = value if isinstance(value, list) else []
    return any(part != told for entry in entries if isinstance(entry, list) for part in entry)


def _hash_places(path: str, hashes: msgspec.Raw | None, parent: msgspec.Raw | None) -> HashPlaces:
    if hashes is not None:
        _check_length(hashes, f"hashes in {path}", _MAX_ELEMENTS)
    of_parent = [parent] if parent is not None and kind_of(parent) != "nil" else []
    before = _Hashes(
        of_parent, list(map(_scalar, of_parent)), f"{path}.parent_block_hash", only=True
    )
    where = f"{path}.block_hashes"
    if hashes is None:
        return HashPlaces(0, **before.found)
    try:
        parts = _elements(hashes)
    except Unreadable:
        return HashPlaces(0, **{**before.found, "broken": Place(where, shown(hashes))})
    inside = _Hashes(parts, _values(hashes, parts), where)
    repeated = inside.repeated(before.bits)
    found = {**before.found, **inside.found}
    if repeated is not None:
        found["repeated"] = repeated
    return HashPlaces(len(parts), **found)


def _values(raw: msgspec.Raw, parts: list[msgspec.Raw]) -> list[Any]:
    """The elements, decoded at once where they can be."""
    try:
        return list(_plain(raw))
    except _UNREADABLE:
        return list(map(_scalar, parts))


class _Hashes:
    """Hashes of one field. `found`: the first place of each kind; `bits`: those that are ints, as u64."""

    def __init__(
        self, parts: list[msgspec.Raw], values: list[Any], where: str, *, only: bool = False
    ) -> None:
        self._parts, self._where, self._only = parts, where, only
        ints = [value if type(value) is int else 0 for value in values]
        self.bits = [value & _U64_MAX for value in ints]
        self.found: dict[str, Place] = {}
        self._are_ints = all(type(value) is int for value in values)
        if not parts:
            return
        if min(ints) < 0:
            self._first("negative", (value < 0 for value in ints))
        if max(ints) > _I64_MAX:
            self._first("large", (value > _I64_MAX for value in ints))
        if not self._are_ints:
            self._first("digest", (type(value) is bytes for value in values))
            self._first("broken", (type(value) not in (int, bytes) for value in values))
        if min(map(abs, ints)) <= _U32_MAX:  # else they take 64 bits however they are packed
            narrow = (
                type(value) is int and len(memoryview(part)) < _WIDE
                for value, part in zip(values, parts, strict=True)
            )
            self._first("narrow", narrow)

    def repeated(self, before: list[int]) -> Place | None:
        """The first that is there already, or that is in `before`; of ints only."""
        if not self._parts or not self._are_ints:
            return None
        seen = set(before)
        if len(seen.union(self.bits)) == len(seen) + len(self.bits):
            return None
        for position, bits in enumerate(self.bits):
            if bits in seen:
                return self._place(position)
            seen.add(bits)
        return None

    def _first(self, kind: str, matches: Iterable[bool]) -> None:
        for position, match in enumerate(matches):
            if match:
                self.found[kind] = self._place(position)
                return

    def _place(self, position: int) -> Place:
        where = self._where if self._only else f"{self._where}[{position}]"
        return Place(where, shown(self._parts[position]))


def _tokens(path: str, raw: msgspec.Raw) -> Tokens:
    if kind_of(raw) == "nil":
        return Tokens(nil=Place(path, "nil"))
    try:
        value = _plain(raw)
    except _UNREADABLE:
        value = None
    if not isinstance(value, list):
        return Tokens(broken=Place(path, shown(raw)))
    kinds = set(map(type, value))
    if kinds == {list}:
        return Tokens(len(value), pairs=Place(path, f"{len(value)} lists"))
    if kinds <= {int}:
        if value and (min(value) < 0 or max(value) > _U32_MAX):
            at, token = next((i, t) for i, t in enumerate(value) if not 0 <= t <= _U32_MAX)
            return Tokens(len(value), out_of_range=Place(f"{path}[{at}]", str(token)))
        return Tokens(len(value))
    at, token = next((i, t) for i, t in enumerate(value) if type(t) is not int)
    return Tokens(len(value), broken=Place(f"{path}[{at}]", quoted(token)))


_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def _end_of(data: bytes) -> int:
    """Where the first value ends; the length of `data` where it does not end, or is no array."""
    try:
        _split(data)
    except _UNREADABLE as error:
        if (found := _TRAILING.search(str(error))) is not None:
            return int(found[1])
    return len(data)


def _check_length(raw: bytes | msgspec.Raw, what: str, most: int) -> None:
    """Raises TooLarge for an array that says that it has more elements, before any is read."""
    head = bytes(memoryview(raw)[:5])
    width = {0xDC: 2, 0xDD: 4}.get(head[0] if head else 0, 0)
    length = int.from_bytes(head[1 : 1 + width], "big")
    if most < length <= len(memoryview(raw)):  # with fewer bytes than elements, it cannot be read
        raise TooLarge(f"has {length} {what}: {most} at most are looked into")
