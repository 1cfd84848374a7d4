"""The contract: event types, codec, block hashes, frames, and the router's side of them.

Facts and bytes only: standard library and msgspec, no I/O, no clock, no threads.
"""

from kvevents.codec import Decoded, Skipped, decode_batch, encode_batch
from kvevents.errors import KVEventsError
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
)
from kvevents.gaps import GapTracker
from kvevents.hashing import BlockHash, HashFormat, block_hashes
from kvevents.index import BlockIndex, FleetIndex, Overlap
from kvevents.materializer import Materializer
from kvevents.namespace import BASE, Namespace
from kvevents.tokens import TokenIds, pack_tokens

__all__ = [
    "BASE",
    "AllBlocksCleared",
    "BlockHash",
    "BlockIndex",
    "BlockRemoved",
    "BlockStored",
    "Decoded",
    "Event",
    "FleetIndex",
    "GapTracker",
    "HashFormat",
    "KVEventBatch",
    "KVEventsError",
    "Materializer",
    "Namespace",
    "Overlap",
    "Skipped",
    "StorageMedium",
    "TokenIds",
    "block_hashes",
    "decode_batch",
    "encode_batch",
    "pack_tokens",
]
