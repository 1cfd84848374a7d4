"""Events with their tokens packed, as they are passed on and kept among ourselves.

An engine's batch on the link is the payload that its subscribers are sent, and before it a head: the
tokens once more, packed, and where nothing unusual is said, all the rest in columns. So the worker's
thread encodes a batch once, and the sidecar neither reads its tokens one by one nor encodes them again.

A body: the head's length as u32, the head, the payload. What is kept of one in columns is its head alone.
One whose events name a KV cache group, as vLLM's do, has no payload: no subscriber is told the group.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from kvevents.codec import check_event, decode_batch, pack_batch_into
from kvevents.columns import Columns
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
from publisher.link.messages import BATCH, COLUMNS, PACKED

__all__ = [
    "MAX_GROUP",
    "Unpacked",
    "head_of",
    "load_columns",
    "load_events",
    "pack_plain",
    "save_columns",
    "save_events",
    "unpack",
]

_LITTLE = sys.byteorder == "little"
_MAX_RANK, _MIN_INT, _MAX_INT = 2**31 - 1, -(2**63), 2**63 - 1
MAX_GROUP = 2**31 - 1
"""Of KV cache groups, the highest number there is."""
_FIRST_OPTIONAL = BlockStored.__struct_fields__.index("lora_name")
_NONE = (None,) * (len(BlockStored.__struct_fields__) - _FIRST_OPTIONAL)
_INTS = {int}
_ZEROS = bytes(TOKEN_BYTES - 1)
"""What ends each token below 256, and so False and True, which pack as the ints that they equal."""
_MIXED = -1
"""In place of a block size: events that no columns have room for."""

_length = struct.Struct("<I")


class _Head(msgspec.Struct, array_like=True, gc=False):
    """`packed`: the tokens of all stores. What follows is of columns, left out where there are none."""

    packed: bytes
    hashes: list[int] = []
    parents: list[int | None] = []
    counts: list[int] = []
    block_size: int = 0
    medium: StorageMedium = StorageMedium.GPU
    ts: float = 0.0
    dp_rank: int = 0
    group: int | None = None


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
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


_encoder = msgspec.msgpack.Encoder()
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_batch = msgspec.msgpack.Decoder(
    tuple[float, list[_Stored | BlockRemoved | AllBlocksCleared], int]
).decode
_UNREADABLE = (msgspec.MsgspecError, RecursionError, OverflowError, ValueError)


# ---------------------------------------------------------------------------------- on the link


def pack_plain(batch: KVEventBatch, buffer: bytearray) -> int:
    """Make `buffer` a body for `batch`; its flags. 0 for a batch that may be unsound or has something
    unusual in it: kvevents.codec has to look at it. Whatever is packed here, `check_batch` accepts.
    """
    tokens = array("I")
    head = _Head(b"", [], [], [])
    try:
        if not (_LITTLE and _take(batch, tokens, head)):
            return 0
        packed = head.packed = tokens.tobytes()
        if _has_small(packed) and not _all_ints(batch):
            return 0
        if head.block_size == _MIXED or not head.counts:
            _encoder.encode_into((packed,), buffer, _length.size)
            flags = BATCH | PACKED
        else:
            _encoder.encode_into(head, buffer, _length.size)
            flags = BATCH | PACKED | COLUMNS
        _length.pack_into(buffer, 0, len(buffer) - _length.size)
        if head.group is None:
            pack_batch_into(batch, buffer)
        return flags
    except (TypeError, ValueError, OverflowError, AttributeError, MemoryError):
        return 0


def _take(batch: KVEventBatch, tokens: array[int], head: _Head) -> bool:
    """Whether all of it is as it should be. Packs the tokens and fills the head; raises what `array` does
    for what are no tokens. One function, for this is what the worker's thread does at each step.
    """
    ts, rank, events = batch.ts, batch.dp_rank, batch.events
    if type(ts) is not float or not math.isfinite(ts):
        return False
    if type(rank) is not int or not 0 <= rank <= _MAX_RANK or type(events) is not list:
        return False
    all_hashes, parents, counts = head.hashes, head.parents, head.counts
    all_of_size, all_on, mixed = 0, None, False
    groups: set[int | None] = set()
    for event in events:
        if type(event) is BlockStored:
            hashes, ids, size = event.block_hashes, event.token_ids, event.block_size
            parent, medium = event.parent_block_hash, event.medium
            if type(hashes) is not list or type(size) is not int or size < 1:
                return False
            count = len(hashes)
            if len(ids) != count * size or type(medium) is not StorageMedium:
                return False
            if count == 1:
                first = hashes[0]
                if type(first) is not int or not _MIN_INT <= first <= _MAX_INT:
                    return False
                all_hashes.append(first)
            elif are_canonical(hashes):
                all_hashes += hashes
            else:
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
            parents.append(parent)
            counts.append(count)
            if size != all_of_size:
                mixed = mixed or all_of_size > 0
                all_of_size = size
            if event.lora_id is None and astuple(event)[_FIRST_OPTIONAL:] == _NONE:
                groups.add(None)
            elif _says_group(event, count):
                groups.add(event.group_idx)
            else:
                check_event(event, "event")
                mixed = True
        elif type(event) is BlockRemoved:
            check_event(event, "event")
            hashes, medium = event.block_hashes, event.medium
            all_hashes += hashes  # type: ignore[arg-type]  # ints, as was checked
            parents.append(None)
            counts.append(-len(hashes))
            groups.add(event.group_idx)
            mixed = mixed or event.locality is not None
        elif type(event) is AllBlocksCleared:
            mixed = True
            continue
        else:
            return False
        if medium is not all_on:
            mixed = mixed or all_on is not None
            all_on = medium
    mixed = mixed or len(groups) > 1
    head.group = None if mixed or not groups else groups.pop()
    head.block_size = _MIXED if mixed else all_of_size or 1
    head.medium = all_on or StorageMedium.GPU
    head.ts, head.dp_rank = ts, rank
    return True


def _says_group(event: BlockStored, count: int) -> bool:
    """Whether its group is all that is said of it besides, and perhaps that no block has keys."""
    group, keys = event.group_idx, event.extra_keys
    said = (None, None, None, None, keys, group, None, None)
    return (
        type(group) is int
        and 0 <= group <= MAX_GROUP
        and event.lora_id is None
        and astuple(event)[_FIRST_OPTIONAL:] == said
        and (keys is None or (type(keys) is list and keys.count(None) == len(keys) == count))
    )


def _has_small(packed: bytes) -> bool:
    """Whether there is a 0 or a 1 among the tokens."""
    at = packed.find(_ZEROS)
    while at >= 0 and (at % TOKEN_BYTES != 1 or packed[at - 1] > 1):
        at = packed.find(_ZEROS, at + 1)
    return at >= 0


def _all_ints(batch: KVEventBatch) -> bool:
    """Whether no token is a bool."""
    return all(
        type(event.token_ids) is TokenIds or set(map(type, event.token_ids)) == _INTS
        for event in batch.events
        if type(event) is BlockStored
    )


def head_of(body: bytes) -> bytes:
    """What is to be kept of a body in columns: all but its payload, which is made again."""
    return body[: _length.size + _length.unpack_from(body)[0]] if len(body) >= _length.size else b""


class Unpacked(NamedTuple):
    """A batch as it was packed. `payload`: what says all of it, if it is there. `group`: the KV cache
    group of all events, which they do not name then.
    """

    ts: float
    events: Sequence[Event]
    dp_rank: int | None
    payload: bytes | None
    group: int | None = None


def unpack(body: bytes, flags: int) -> Unpacked:
    """Raises KVEventsError for what `pack_plain` did not make."""
    try:
        start = _length.size + _length.unpack_from(body)[0]
        head = _decode_head(memoryview(body)[_length.size : start])
        payload = body[start:]
        if flags & COLUMNS:
            return Unpacked(head.ts, _columns(head), head.dp_rank, payload or None, head.group)
    except (*_UNREADABLE, struct.error) as error:
        raise KVEventsError(f"packed batch: {error}") from error
    try:
        ts, found, rank = _decode_batch(payload)
    except _UNREADABLE:  # one event that is odd is to cost itself alone
        batch = decode_batch(payload).batch
        return Unpacked(batch.ts, batch.events, batch.dp_rank, None)
    return Unpacked(ts, _with_tokens(found, head.packed), rank, payload)


def _columns(head: _Head) -> Columns:
    return Columns(
        head.hashes,  # type: ignore[arg-type]  # ints, whose bound it looks at
        head.parents,  # type: ignore[arg-type]
        head.counts,
        TokenBytes(head.packed),
        head.block_size,
        head.medium,
    )


def _with_tokens(
    found: list[_Stored | BlockRemoved | AllBlocksCleared], packed: bytes
) -> list[Event]:
    events: list[Event] = []
    at = 0
    for event in found:
        if type(event) is not _Stored:
            events.append(event)  # type: ignore[arg-type]  # of the other two
            continue
        end = at + len(event.block_hashes) * event.block_size * TOKEN_BYTES
        if not at < end <= len(packed):
            break
        events.append(_with(packed[at:end], event))
        at = end
    if at != len(packed) or len(events) != len(found):
        raise KVEventsError("packed batch: its tokens are not those of its events")
    return events


def _with(packed: bytes, event: _Stored) -> BlockStored:
    """The event, with these tokens."""
    return BlockStored(
        event.block_hashes,  # type: ignore[arg-type]  # a list of ints is one of ints or bytes
        event.parent_block_hash,
        TokenIds(TokenBytes(packed)),
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


# ------------------------------------------------------------------------------------------ kept


class _Saved(_Stored, tag_field="type", tag="BlockStored", gc=False):
    """BlockStored with its tokens packed."""

    token_ids: bytes = b""


def _packed(value: object) -> bytes:
    if isinstance(value, TokenIds):
        return value.packed
    raise TypeError(f"{type(value).__name__} cannot be kept")


_encode_saved = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decode_saved = msgspec.msgpack.Decoder(list[_Saved]).decode


def save_columns(columns: Columns) -> bytes:
    """Columns as `load_columns` takes them."""
    return _encoder.encode(
        _Head(
            columns.packed,
            columns.hashes,  # type: ignore[arg-type]  # ints
            columns.parents,  # type: ignore[arg-type]
            columns.counts,
            columns.block_size,
            columns.medium,
        )
    )


def load_columns(data: bytes) -> Columns:
    """The reverse. Raises KVEventsError for what it is not."""
    try:
        return _columns(_decode_head(data))
    except _UNREADABLE as error:
        raise KVEventsError(f"saved columns: {error}") from error


def save_events(events: Sequence[BlockStored]) -> bytes:
    """Stores, of TokenIds, as `load_events` takes them."""
    return _encode_saved(events)


def load_events(data: bytes) -> list[Event]:
    """The reverse. Raises KVEventsError for what it is not."""
    try:
        saved = _decode_saved(data)
    except _UNREADABLE as error:
        raise KVEventsError(f"saved events: {error}") from error
    return [_with(one.token_ids, one) for one in saved]
