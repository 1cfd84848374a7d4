"""SMG's protobuf batches as plain data. Runs in SMG's environment."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["plain_batch"]

_PROTO: Any = importlib.import_module("smg_grpc_proto.generated.common_pb2")
_TIERS = {
    _PROTO.KV_CACHE_TIER_DEVICE: "device",
    _PROTO.KV_CACHE_TIER_HOST: "host",
    _PROTO.KV_CACHE_TIER_DISK: "disk",
    _PROTO.KV_CACHE_TIER_EXTERNAL: "external",
}
_OPTIONAL = ("parent_block_hash", "medium", "lora_name", "cache_salt")


def plain_batch(batch: Any) -> dict[str, Any]:
    """Events as {"kind": "stored", "removed" or "cleared", …}."""
    return {
        "seq": batch.sequence_number,
        "ts": batch.timestamp,
        "dp_rank": _optional(batch, "dp_rank"),
        "events": [_event(event) for event in batch.events],
    }


def _event(event: Any) -> dict[str, Any]:
    kind = event.WhichOneof("data")
    if kind == "stored":
        stored = event.stored
        return {
            "kind": kind,
            "block_hashes": [block.block_hash for block in stored.blocks],
            "token_ids": [token for block in stored.blocks for token in block.token_ids],
            "block_size": stored.blocks[0].block_size,
            "tier": _TIERS[stored.tier],
            **{name: _optional(stored, name) for name in _OPTIONAL},
        }
    if kind == "removed":
        removed = event.removed
        return {
            "kind": kind,
            "block_hashes": list(removed.block_hashes),
            "tier": _TIERS[removed.tier],
        }
    return {"kind": kind}


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
