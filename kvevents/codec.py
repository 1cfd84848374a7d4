"""Batches to bytes and back: strict out, lenient in.

Out: a batch that breaks the contract of docs/wire.md is refused with the field's path. In: one bad
or unknown event costs itself, never its batch; maps, the positional arrays of older engines and a
store's objects are read, in one batch too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvevents.errors import KVEventsError
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
)
from kvevents.extra_keys import check_extra_keys
from kvevents.forms import fields_of_array, fields_of_object, refuse_bigrams, short
from kvevents.tokens import MAX_TOKEN, TokenIds

__all__ = [
    "Decoded",
    "Skipped",
    "check_batch",
    "check_event",
    "decode_batch",
    "elements",
    "encode_batch",
    "pack_batch",
    "pack_batch_into",
]

_I64_MIN, _I64_MAX, _U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


@dataclass(frozen=True, slots=True)
class Skipped:
    """An event that was not understood: its position in the batch, and why."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch as read, without the events that were skipped."""

    batch: KVEventBatch
    skipped: tuple[Skipped, ...] = ()


def _tokens_to_list(value: object) -> list[int]:
    if isinstance(value, TokenIds):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_tokens_to_list)
_decode_strict = msgspec.msgpack.Decoder(KVEventBatch).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_plain = msgspec.msgpack.Decoder().decode
_split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_convert = cast("Callable[..., Event]", msgspec.convert)
_TYPES = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def encode_batch(batch: KVEventBatch) -> bytes:
    """The payload of `batch`. Raises ValueError or TypeError naming the field and the bound."""
    check_batch(batch)
    return pack_batch(batch)


def pack_batch(batch: KVEventBatch) -> bytes:
    """The payload of a batch that is known to be sound."""
    return _encoder.encode(batch)


def pack_batch_into(batch: KVEventBatch, buffer: bytearray) -> None:
    """The same, at the end of `buffer`."""
    _encoder.encode_into(batch, buffer, -1)


def decode_batch(payload: bytes) -> Decoded:
    """Read a payload of any known engine.

    Raises KVEventsError when it is no batch at all; events that cannot be read are skipped.
    """
    if _OF_A_STORE in payload:  # whose maps may be read as ours, with no blocks
        return _decode_leniently(payload)
    try:
        batch = _decode_strict(payload)
    except _UNREADABLE:
        return _decode_leniently(payload)
    return _decode_leniently(payload) if batch.ts >= _LEAST_MS else Decoded(batch)


# ------------------------------------------------------------------------------------------- out


def check_batch(batch: KVEventBatch) -> None:
    """Raises ValueError or TypeError naming the field and the bound unless `batch` may be sent."""
    if type(batch.ts) is not float:
        raise TypeError(f"ts: {batch.ts!r} is not a float")
    if not math.isfinite(batch.ts):
        raise ValueError(f"ts: {batch.ts} is not finite")
    rank = batch.dp_rank
    if type(rank) is not int or not 0 <= rank < 2**31:
        raise ValueError(f"dp_rank: {rank!r} is not in 0..{2**31 - 1}")
    for position, event in enumerate(batch.events):
        if not isinstance(event, (BlockStored, BlockRemoved, AllBlocksCleared)):
            raise TypeError(f"events[{position}]: {type(event).__name__} is not an event")
        check_event(event, f"events[{position}].{type(event).__name__}")


def check_event(event: Event, path: str) -> None:
    """Raises ValueError or TypeError, with `path` before the field, unless the event may be sent."""
    if isinstance(event, AllBlocksCleared):
        return
    if type(event.medium) is not StorageMedium:
        raise TypeError(f"{path}.medium: {event.medium!r} is not a StorageMedium")
    _check_hashes(event.block_hashes, f"{path}.block_hashes")
    group = event.group_idx
    if group is not None and not (type(group) is int and 0 <= group <= _I64_MAX):
        raise ValueError(f"{path}.group_idx: {group!r} is not in 0..{_I64_MAX}")
    if isinstance(event, BlockStored):
        _check_stored(event, path)


def _check_hashes(hashes: object, path: str) -> None:
    if not isinstance(hashes, (list, tuple)):
        raise TypeError(f"{path}: {type(hashes).__name__} is not a list")
    if not hashes:
        raise ValueError(f"{path}: an event needs at least one block")
    if set(map(type, hashes)) != {int}:
        other = next(value for value in hashes if type(value) is not int)
        raise TypeError(f"{path}: {other!r} is not an int")
    for bound in (min(hashes), max(hashes)):
        if not _I64_MIN <= bound <= _I64_MAX:
            raise ValueError(f"{path}: {bound} is not in {_I64_MIN}..{_I64_MAX}")


def _check_stored(event: BlockStored, path: str) -> None:
    if type(event.block_size) is not int or event.block_size < 1:
        raise ValueError(f"{path}.block_size: {event.block_size!r} is below 1")
    _check_tokens(event, f"{path}.token_ids")
    parent = event.parent_block_hash
    if parent is not None:
        _check_hashes([parent], f"{path}.parent_block_hash")
        if parent == event.block_hashes[0]:
            raise ValueError(f"{path}.parent_block_hash: {parent!r} is the block itself")
    lora_id = event.lora_id
    if lora_id is not None and not (type(lora_id) is int and _I64_MIN <= lora_id <= _U64_MAX):
        raise ValueError(f"{path}.lora_id: {lora_id!r} is not in {_I64_MIN}..{_U64_MAX}")
    for name in (
        "lora_name",
        "cache_salt",
        "session_id",
        "extra_key",
        "kv_cache_spec_kind",
        "locality",
    ):
        text = getattr(event, name)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{path}.{name}: {text!r} is not a string")
    if event.extra_keys is not None:
        try:
            check_extra_keys(event.extra_keys, len(event.block_hashes))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}.extra_keys: {error}") from None


def _check_tokens(event: BlockStored, path: str) -> None:
    tokens, blocks = event.token_ids, len(event.block_hashes)
    if not isinstance(tokens, (TokenIds, list, tuple)):
        raise TypeError(f"{path}: {type(tokens).__name__} is neither TokenIds nor a list")
    needed = blocks * event.block_size
    if len(tokens) not in (0, needed):  # 0: left out
        raise ValueError(
            f"{path}: {len(tokens)} ids, but {blocks} blocks of {event.block_size} need {needed}"
        )
    if isinstance(tokens, TokenIds):  # which cannot hold any other
        return
    if set(map(type, tokens)) <= {int}:
        try:
            array("I", tokens)
        except OverflowError:
            pass
        else:
            return
    for token in tokens:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"{path}: {token!r} is not in 0..{MAX_TOKEN}")


# -------------------------------------------------------------------------------------------- in

_LEAST_MS = 10**11
"""From here on a `ts` that is an int is of milliseconds: in seconds it would be of the year 5138. With a
store's events every int is.
"""

_OF_A_STORE = b"event_type"
"""The key of a store's events that no others have."""


def _decode_leniently(payload: bytes) -> Decoded:
    """Event by event: nothing in one of them, not even bytes that are no value, reaches the others."""
    parts = elements(payload, "payload")
    if len(parts) < 2:
        raise KVEventsError("payload: a batch is an array of three, [ts, events, dp_rank]")
    ts = _plain(parts[0], "ts")
    if isinstance(ts, bool) or not isinstance(ts, (int, float)):
        raise KVEventsError(f"ts: {short(ts)} is not a number")
    rank = _plain(parts[2], "dp_rank") if len(parts) > 2 else 0
    if rank is not None and type(rank) is not int:
        raise KVEventsError(f"dp_rank: {short(rank)} is not an int")
    read = _event
    events = elements(parts[1], "events")
    if type(ts) is int and (ts >= _LEAST_MS or any(map(_is_of_a_store, events))):
        ts, read = ts / 1000, _store_event
    kept: list[Event] = []
    skipped: list[Skipped] = []
    for position, raw in enumerate(events):
        try:
            kept.append(read(raw))
        except (*_UNREADABLE, KVEventsError) as error:
            skipped.append(Skipped(position, str(error)))
    return Decoded(KVEventBatch(float(ts), kept, rank), tuple(skipped))


_LEAST_EVENT_BYTES = 16
"""No event there is takes less: ["AllBlocksCleared"] is 18."""

_MAX_SMALL = 1000
"""So many elements may be smaller."""


def elements(data: bytes | msgspec.Raw, path: str) -> list[msgspec.Raw]:
    """What an array is made of. Raises KVEventsError, naming `path`, for what is none.

    Each would cost some hundred bytes, so a crowd of what can be no event is refused as a whole.
    """
    size, count = len(memoryview(data)), _length(bytes(memoryview(data)[:5]))
    most = _MAX_SMALL + size // _LEAST_EVENT_BYTES
    if count > most:
        raise KVEventsError(f"{path}: {count} elements in {size} bytes are above {most}")
    try:
        return _split(data)
    except _UNREADABLE as error:
        raise KVEventsError(f"{path}: {error}") from error


def _length(data: bytes) -> int:
    """Of a large array, by its first five bytes; 0 for anything else."""
    if data[:1] == b"\xdc":
        return int.from_bytes(data[1:3], "big")
    return int.from_bytes(data[1:5], "big") if data[:1] == b"\xdd" else 0


def _plain(data: msgspec.Raw, path: str) -> Any:
    try:
        return _decode_plain(data)
    except _UNREADABLE as error:
        raise KVEventsError(f"{path}: {error}") from error


def _event(raw: msgspec.Raw) -> Event:
    try:
        return _decode_event(raw)
    except _UNREADABLE as error:
        plain = _decode_plain(raw)
        if isinstance(plain, list):
            return _converted(fields_of_array(plain))
        if not isinstance(plain, dict):
            raise KVEventsError(f"{short(plain)} is neither a map nor an array") from error
        refuse_bigrams(plain.get("token_ids"))
        raise


def _is_of_a_store(raw: msgspec.Raw) -> bool:
    try:
        plain = _decode_plain(raw)
    except _UNREADABLE:
        return False
    return isinstance(plain, dict) and _OF_A_STORE.decode() in plain


def _store_event(raw: msgspec.Raw) -> Event:
    plain = _decode_plain(raw)
    if isinstance(plain, dict) and "event_type" in plain:
        return _converted(fields_of_object(plain))
    return _event(raw)


def _converted(fields: dict[str, Any]) -> Event:
    # Without `builtin_types` a string would be taken for bytes in base64, and so for a hash.
    return _convert(fields, _TYPES[fields["type"]], builtin_types=(bytes,))
