"""Batches to bytes and back: strict out, lenient in.

Out: a batch that breaks the contract of docs/wire.md is refused with the field's path. In: one bad
or unknown event costs itself, never its batch; maps and the positional arrays of older engines are
both read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kvevents.tokens import MAX_TOKEN, TokenIds

__all__ = ["Decoded", "Skipped", "decode_batch", "encode_batch"]

_I64 = (-(2**63), 2**63 - 1)


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
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


_encode = msgspec.msgpack.Encoder(enc_hook=_tokens_to_list).encode
_decode_strict = msgspec.msgpack.Decoder(KVEventBatch).decode
_decode_plain = msgspec.msgpack.Decoder().decode


def encode_batch(batch: KVEventBatch) -> bytes:
    """The payload of `batch`. Raises ValueError or TypeError naming the field and the bound."""
    _check_batch(batch)
    return _encode(batch)


def decode_batch(payload: bytes) -> Decoded:
    """Read a payload of any known engine.

    Raises KVEventsError when it is no batch at all; events that cannot be read are skipped.
    """
    try:
        return Decoded(_decode_strict(payload))
    except (msgspec.ValidationError, OverflowError):
        pass
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVEventsError(f"payload: {error}") from error
    return _decode_leniently(payload)


# ------------------------------------------------------------------------------------------- out


def _check_batch(batch: KVEventBatch) -> None:
    if type(batch.ts) is not float:
        raise TypeError(f"ts: {batch.ts!r} is not a float")
    rank = batch.dp_rank
    if type(rank) is not int or not 0 <= rank < 2**31:
        raise ValueError(f"dp_rank: {rank!r} is not in 0..{2**31 - 1}")
    for position, event in enumerate(batch.events):
        if isinstance(event, AllBlocksCleared):
            continue
        if not isinstance(event, (BlockStored, BlockRemoved)):
            raise TypeError(f"events[{position}]: {type(event).__name__} is not an event")
        path = f"events[{position}].{type(event).__name__}"
        if type(event.medium) is not StorageMedium:
            raise TypeError(f"{path}.medium: {event.medium!r} is not a StorageMedium")
        _check_hashes(event.block_hashes, f"{path}.block_hashes")
        if isinstance(event, BlockStored):
            _check_stored(event, path)


def _check_hashes(hashes: Sequence[int | bytes], path: str) -> None:
    if not hashes:
        raise ValueError(f"{path}: an event needs at least one block")
    try:
        low, high = min(cast("list[int]", hashes)), max(cast("list[int]", hashes))
    except TypeError:
        raise TypeError(f"{path}: hashes must all be ints") from None
    if type(low) is not int or low < _I64[0] or high > _I64[1]:
        raise ValueError(f"{path}: a hash is not a signed 64-bit int")


def _check_stored(event: BlockStored, path: str) -> None:
    if type(event.block_size) is not int or event.block_size < 1:
        raise ValueError(f"{path}.block_size: {event.block_size!r} is below 1")
    needed = len(event.block_hashes) * event.block_size
    if len(event.token_ids) != needed:
        raise ValueError(
            f"{path}.token_ids: {len(event.token_ids)} ids, but {len(event.block_hashes)} blocks of"
            f" {event.block_size} need {needed}"
        )
    if not isinstance(event.token_ids, TokenIds):  # which cannot hold any other
        for token in event.token_ids:
            if type(token) is not int or not 0 <= token <= MAX_TOKEN:
                raise ValueError(f"{path}.token_ids: {token!r} is not in 0..{MAX_TOKEN}")
    parent = event.parent_block_hash
    if parent is not None:
        _check_hashes([parent], f"{path}.parent_block_hash")
        if parent == event.block_hashes[0]:
            raise ValueError(f"{path}.parent_block_hash: {parent!r} is the block itself")


# -------------------------------------------------------------------------------------------- in

#: Positions of the array form. Slot 7 is SGLang 0.5.18's metadata map or vLLM 0.23's lora_name.
_STORED_SLOTS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)
_REMOVED_SLOTS = ("block_hashes", "medium")
_TYPES: dict[str, tuple[type[Event], tuple[str, ...]]] = {
    "BlockStored": (BlockStored, _STORED_SLOTS),
    "BlockRemoved": (BlockRemoved, _REMOVED_SLOTS),
    "AllBlocksCleared": (AllBlocksCleared, ()),
}


def _decode_leniently(payload: bytes) -> Decoded:
    try:
        plain = _decode_plain(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVEventsError(f"payload: {error}") from error
    if not isinstance(plain, list) or len(plain) < 2:
        raise KVEventsError("payload: a batch is an array of three, [ts, events, dp_rank]")
    ts, events, rank = (*plain[:3], None)[:3]
    if isinstance(ts, bool) or not isinstance(ts, (int, float)):
        raise KVEventsError(f"ts: {_short(ts)} is not a number")
    if not isinstance(events, list):
        raise KVEventsError(f"events: {_short(events)} is not an array")
    if rank is not None and type(rank) is not int:
        raise KVEventsError(f"dp_rank: {_short(rank)} is not an int")
    kept: list[Event] = []
    skipped: list[Skipped] = []
    for position, raw in enumerate(events):
        try:
            kept.append(_event(raw))
        except (msgspec.ValidationError, KVEventsError) as error:
            skipped.append(Skipped(position, str(error)))
    return Decoded(KVEventBatch(float(ts), kept, rank), tuple(skipped))


def _event(raw: Any) -> Event:
    if isinstance(raw, dict):
        fields = dict(raw)
        tag = fields.pop("type", None)
    elif isinstance(raw, list) and raw:
        tag, fields = raw[0], None
    else:
        raise KVEventsError(f"{_short(raw)} is neither a map nor an array with a tag")
    known = _TYPES.get(tag) if isinstance(tag, str) else None
    if known is None:
        raise KVEventsError(f"type: {_short(tag)} is unknown")
    kind, slots = known
    if fields is None:
        fields = dict(zip(slots, raw[1:], strict=False))
        if isinstance(fields.get("lora_name"), dict):
            metadata = fields.pop("lora_name")
            fields["cache_salt"] = metadata.get("cache_salt")
    tokens = fields.get("token_ids")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        raise KVEventsError("token_ids: pairs of tokens (EAGLE bigrams) are not understood")
    convert = cast("Callable[[Any, type[Event]], Event]", msgspec.convert)
    return convert(fields | {"type": tag}, kind)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
