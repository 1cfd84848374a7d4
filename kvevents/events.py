"""The event types of the wire. Field names are those of SGLang and vLLM; never renamed.

A struct that omits defaults has at most 15 keys, the tag among them: from 16 on its maps get a header of
16 bits, however few there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

__all__ = [
    "FULL_ATTENTION",
    "LOCAL",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "KVEventBatch",
    "StorageMedium",
    "medium_of",
]

FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
"""`kv_cache_spec_kind` of the main KV cache group of a hybrid model, as vLLM names it."""
LOCAL = (None, "LOCAL")
"""`locality` of the engine's own blocks."""


class StorageMedium(StrEnum):
    """Where a block lives, as spelled on the wire. Other systems' spellings are understood."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"

    @classmethod
    def _missing_(cls, value: object) -> StorageMedium | None:
        return _ALIASES.get(value.upper()) if isinstance(value, str) else None


_ALIASES = {
    "": StorageMedium.GPU,
    "GPU": StorageMedium.GPU,
    "DEVICE": StorageMedium.GPU,
    "CPU": StorageMedium.CPU,
    "CPU_PINNED": StorageMedium.CPU,
    "CPU_TIER1": StorageMedium.CPU,
    "DISK": StorageMedium.DISK,
    "STORAGE": StorageMedium.DISK,
    "NVME": StorageMedium.DISK,
    "CPU_TIER2": StorageMedium.DISK,
    "EXTERNAL": StorageMedium.EXTERNAL,
    "NETWORK": StorageMedium.EXTERNAL,
    "REMOTE": StorageMedium.EXTERNAL,
    "SHARED": StorageMedium.EXTERNAL,
}


def _none() -> None:
    """A default that `omit_defaults` does not omit: strict consumers reject a map without the key."""


class BlockStored(
    msgspec.Struct,
    tag_field="type",
    tag="BlockStored",
    omit_defaults=True,
    forbid_unknown_fields=False,
):
    """Consecutive blocks became readable on `medium`.

    `token_ids` are exactly the tokens of `block_hashes`, `block_size` each. Block i's parent is block
    i-1; `parent_block_hash` is the block before the first, None at the start of a prompt.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_none)
    medium: StorageMedium | None = msgspec.field(default_factory=_none)
    lora_name: str | None = msgspec.field(default_factory=_none)
    cache_salt: str | None = None
    session_id: str | None = None
    extra_key: str | None = None
    extra_keys: list[Any] | None = None
    """vLLM's: one entry a block, each None or a list of what its hash covers besides the tokens."""
    group_idx: int | None = None
    """vLLM's: which of a hybrid model's KV cache groups the blocks are of; None where there is one."""
    kv_cache_spec_kind: str | None = None
    """What that group is: "full_attention", "sliding_window", …"""
    locality: str | None = None
    """vLLM's: "REMOTE" where the blocks are another's."""


class BlockRemoved(
    msgspec.Struct,
    tag_field="type",
    tag="BlockRemoved",
    omit_defaults=True,
    forbid_unknown_fields=False,
):
    """Blocks are gone from `medium`; children come before their parents."""

    block_hashes: list[int | bytes]
    medium: StorageMedium | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """Nothing is held any more, on any medium, by the batch's rank."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""What a batch may hold."""


def medium_of(event: BlockStored | BlockRemoved) -> StorageMedium:
    """Where its blocks are; without a word, on the device."""
    return StorageMedium.GPU if event.medium is None else event.medium


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events published together: on the wire an array of exactly three, `[ts, events, dp_rank]`.

    `ts` is seconds since the epoch, always a float; `dp_rank` is always sent as an int.
    """

    ts: float
    events: list[Event]
    dp_rank: int | None = 0
