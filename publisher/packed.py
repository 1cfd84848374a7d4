"""Events with their tokens packed, as they are passed on and kept among ourselves.

An engine's batch on the link is the payload that its subscribers are sent, and its tokens once more,
packed. So the worker's thread encodes a batch once, and the sidecar neither reads the tokens one by one
nor encodes them again.

An event's tokens are a fifth of what it says and four fifths of what encoding and decoding it takes.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from kvevents.codec import check_event, decode_batch, pack_batch
from kvevents.errors import KVEventsError
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
)
from kvevents.hashing import are_canonical
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds

__all__ = ["load_events", "pack_plain", "save_events", "unpack_plain"]

_LITTLE = sys.byteorder == "little"
_MAX_RANK, _MIN_INT, _MAX_INT = 2**31 - 1, -(2**63), 2**63 - 1
_FIRST_OPTIONAL = BlockStored.__struct_fields__.index("lora_name")
_NONE = (None,) * (len(BlockStored.__struct_fields__) - _FIRST_OPTIONAL)
_INTS = {int}
_OTHER_TOKENS = "packed batch: its tokens are not those of its events"
_SMALL = bytes(TOKEN_BYTES - 1)
"""What ends each token below 256, and so False and True, which pack as the ints that they equal."""


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """BlockStored without its tokens, which a decoder passes over."""

    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: int
    lora_id: int | None = None
    medium: StorageMedium | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    extra_key: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode
_decode_batch = msgspec.msgpack.Decoder(
    tuple[float, list[_Stored | BlockRemoved | AllBlocksCleared], int]
).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def pack_plain(batch: KVEventBatch) -> bytes | None:
    """The body for `batch`, or None for one that may be unsound or that has something unusual: what
    kvevents.codec has to look at. Whatever is packed here, `check_batch` accepts.
    """
    tokens = array("I")
    try:
        if not (_LITTLE and _is_plain(batch, tokens)):
            return None
        packed = tokens.tobytes()
        if _has_small(packed) and not _all_ints(batch):
            return None
        return _encode((pack_batch(batch), packed))
    except (TypeError, ValueError, OverflowError, AttributeError, MemoryError):
        return None


def _is_plain(batch: KVEventBatch, tokens: array[int]) -> bool:
    """Whether all of it is as it should be. Packs the tokens too; raises what `array` does for what are
    none. One function, for this is what the worker's thread does at each step.
    """
    rank, events = batch.dp_rank, batch.events
    if type(batch.ts) is not float or not math.isfinite(batch.ts):
        return False
    if type(rank) is not int or not 0 <= rank <= _MAX_RANK or type(events) is not list:
        return False
    for event in events:
        if type(event) is BlockStored:
            hashes, ids, size = event.block_hashes, event.token_ids, event.block_size
            parent = event.parent_block_hash
            if type(hashes) is not list or type(size) is not int or size < 1:
                return False
            if len(ids) != len(hashes) * size or type(event.medium) is not StorageMedium:
                return False
            if len(hashes) == 1:
                first = hashes[0]
                if type(first) is not int or not _MIN_INT <= first <= _MAX_INT:
                    return False
            elif not are_canonical(hashes):
                return False
            if parent is not None and (
                type(parent) is not int or not _MIN_INT <= parent <= _MAX_INT or parent == hashes[0]
            ):
                return False
            if type(ids) is list:
                tokens.fromlist(ids)
            elif type(ids) is TokenIds:
                tokens.frombytes(ids.packed)
            else:
                return False
            if astuple(event)[_FIRST_OPTIONAL:] != _NONE or event.lora_id is not None:
                check_event(event, "event")
        elif type(event) is BlockRemoved:
            check_event(event, "event")
        elif type(event) is not AllBlocksCleared:
            return False
    return True


def _has_small(packed: bytes) -> bool:
    at = packed.find(_SMALL)
    while at >= 0 and at % TOKEN_BYTES != 1:
        at = packed.find(_SMALL, at + 1)
    return at >= 0


def _all_ints(batch: KVEventBatch) -> bool:
    """Whether no token is a bool."""
    return all(
        type(event.token_ids) is TokenIds or set(map(type, event.token_ids)) == _INTS
        for event in batch.events
        if type(event) is BlockStored
    )


def unpack_plain(body: bytes) -> tuple[bytes | None, KVEventBatch]:
    """The payload, and the batch that it says; None where it says more than that, which is unusual.

    Raises KVEventsError for what `pack_plain` did not make.
    """
    try:
        payload, packed = _decode(body)
    except _UNREADABLE as error:
        raise KVEventsError(f"packed batch: {error}") from error
    try:
        ts, found, rank = _decode_batch(payload)
    except _UNREADABLE:  # one event that is odd is to cost itself alone
        return None, decode_batch(payload).batch
    events: list[Event] = []
    at = 0
    for event in found:
        if type(event) is not _Stored:
            events.append(event)  # type: ignore[arg-type]  # of the other two
            continue
        end = at + len(event.block_hashes) * event.block_size * TOKEN_BYTES
        if not at < end <= len(packed):
            raise KVEventsError(_OTHER_TOKENS)
        events.append(
            BlockStored(
                event.block_hashes,  # type: ignore[arg-type]  # a list of ints is one of ints or bytes
                event.parent_block_hash,
                TokenIds(TokenBytes(packed[at:end])),
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
                event.cache_salt,
                event.session_id,
                event.extra_key,
                event.extra_keys,
                event.group_idx,
                event.kv_cache_spec_kind,
                event.locality,
            )
        )
        at = end
    if at != len(packed):
        raise KVEventsError(_OTHER_TOKENS)
    return payload, KVEventBatch(ts, events, rank)


# ------------------------------------------------------------------------------------------ kept


class _Saved(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """BlockStored with its tokens packed."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: bytes
    block_size: int
    lora_id: int | None = None
    medium: StorageMedium | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    extra_key: str | None = None
    extra_keys: list[Any] | None = None


def _packed(value: object) -> bytes:
    if isinstance(value, TokenIds):
        return value.packed
    raise TypeError(f"{type(value).__name__} cannot be kept")


_encode_saved = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decode_saved = msgspec.msgpack.Decoder(list[_Saved]).decode


def save_events(events: Sequence[BlockStored]) -> bytes:
    """Stores, of TokenIds, as `load_events` takes them."""
    return _encode_saved(events)


def load_events(data: bytes) -> list[Event]:
    """The reverse. Raises KVEventsError for what it is not."""
    try:
        saved = _decode_saved(data)
    except _UNREADABLE as error:
        raise KVEventsError(f"saved events: {error}") from error
    return [
        BlockStored(
            one.block_hashes,  # type: ignore[arg-type]  # a list of ints is one of ints or bytes
            one.parent_block_hash,
            TokenIds(TokenBytes(one.token_ids)),
            one.block_size,
            one.lora_id,
            one.medium,
            one.lora_name,
            one.cache_salt,
            one.session_id,
            one.extra_key,
            one.extra_keys,
        )
        for one in saved
    ]
