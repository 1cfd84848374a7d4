"""Residency records: what a worker's cache says changed, in the fewest bytes.

Every block put into the cache gets the next number of a counter, its *block id*. Records speak of
ranges of ids, so they cost the same for one block and for a thousand; turning ids into hashes and
events is the materializer's work, in another process.
"""

from __future__ import annotations

from typing import NewType, Protocol, TypeAlias

import msgspec

from kvevents.errors import KVEventsError
from kvevents.events import StorageMedium
from kvevents.hashing import HashFormat
from kvevents.namespace import Namespace

__all__ = [
    "BlockId",
    "Clear",
    "Record",
    "RecordSource",
    "Remove",
    "StoreKnown",
    "StoreNew",
    "decode_records",
    "encode_records",
]

BlockId = NewType("BlockId", int)
"""A block's number among those of its cache; only worker and sidecar know it."""


class StoreNew(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """`count` consecutive blocks with ids from `first_id` on, told for the first time.

    `tokens` are theirs, packed. `parent_id` is the block before the first; None starts a prompt, and
    only then `namespace` is given: every other block is in its parent's.
    """

    medium: StorageMedium
    first_id: BlockId
    count: int
    parent_id: BlockId | None
    namespace: Namespace | None
    tokens: bytes


class StoreKnown(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Blocks told before are now on `medium` as well."""

    medium: StorageMedium
    first_id: BlockId
    count: int


class Remove(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Blocks are gone from `medium`. Ranges are `(first_id, count)`, children's before parents'."""

    medium: StorageMedium
    ranges: list[tuple[BlockId, int]]


class Clear(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Nothing is held any more on any medium; every id is forgotten."""


Record: TypeAlias = StoreNew | StoreKnown | Remove | Clear
"""One change of residency."""


class RecordSource(Protocol):
    """A cache, as the link sees it: it hands over records, and can tell its state anew."""

    @property
    def page_size(self) -> int:
        """Tokens per block."""

    @property
    def hash_format(self) -> HashFormat:
        """How its blocks' hashes are made."""

    @property
    def retelling(self) -> bool:
        """Whether a re-telling is under way."""

    def take_records(self) -> list[Record]:
        """The records since the last call, in order."""

    def begin_retell(self) -> None:
        """Drop the records not taken yet and start over: `Clear`, then all that is resident."""

    def retell(self, num_blocks: int) -> None:
        """Record about `num_blocks` more of the re-telling, parents before children."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Record]).decode


def encode_records(records: list[Record]) -> bytes:
    """The bytes the link carries."""
    return _encode(records)


def decode_records(data: bytes | memoryview) -> list[Record]:
    """Raises KVEventsError for bytes that are no records."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KVEventsError(f"records: {error}") from error
