"""The contract: event types, codec, block hashes, frames, and the router's side of them.

Facts and bytes only: standard library and msgspec, no I/O, no clock, no threads.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
else:
    _HOMES = {
        "kvevents.codec": "Decoded Skipped decode_batch encode_batch",
        "kvevents.errors": "KVEventsError",
        "kvevents.events": "AllBlocksCleared BlockRemoved BlockStored Event KVEventBatch StorageMedium",
        "kvevents.gaps": "GapTracker",
        "kvevents.hashing": "BlockHash HashFormat block_hashes",
        "kvevents.index": "BlockIndex FleetIndex Overlap",
        "kvevents.materializer": "Materializer",
        "kvevents.namespace": "BASE Namespace",
        "kvevents.tokens": "TokenIds pack_tokens",
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name):
        """A public name, once it is asked for: whoever needs one part loads no other."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value


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
