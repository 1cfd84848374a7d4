"""What Dynamo believes, beside what a cache holds: both in blocks, hashes as u64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from interop_worker import BLOCK, Resident

from kvevents import StorageMedium
from kvevents.hashing import block_hashes
from kvevents.namespace import BASE, Namespace

__all__ = ["TIER", "Blocks", "Tiers", "believed", "held", "score", "stored_blocks", "u64"]

TIER = {
    StorageMedium.GPU: "device",
    StorageMedium.CPU: "host_pinned",
    StorageMedium.DISK: "disk",
    StorageMedium.EXTERNAL: "external",
}
"""Dynamo's names."""

Blocks = dict[str, set[int]]
"""Of each tier that has any."""


class Tiers(NamedTuple):
    """How much of a prompt is found, each tier's own part. `lower`: disk and external together."""

    gpu: int = 0
    cpu: int = 0
    lower: int = 0


def u64(value: int) -> int:
    """The same bits, unsigned."""
    return value & ((1 << 64) - 1)


def held(resident: Resident) -> Blocks:
    """What a router should believe of a worker."""
    return {TIER[on]: set(map(u64, blocks)) for on, blocks in resident.items() if blocks}


def score(prompt: Sequence[int], resident: Resident, namespace: Namespace = BASE) -> Tiers:
    """What a router should say of a prompt: from tier to tier, downwards and never back."""
    hashes, at = block_hashes(prompt, BLOCK, namespace), 0
    counts = []
    for medium in (
        StorageMedium.GPU,
        StorageMedium.CPU,
        StorageMedium.DISK,
        StorageMedium.EXTERNAL,
    ):
        start = at
        while at < len(hashes) and hashes[at] in resident.get(medium, {}):
            at += 1
        counts.append(at - start)
    return Tiers(counts[0], counts[1], counts[2] + counts[3])


def stored_blocks(item: dict[str, Any]) -> tuple[int, str, set[int]]:
    """Rank, tier and blocks of one stored event in a dump."""
    event = item["event"]
    data = event["data"]
    stored = data.get("stored") if isinstance(data, dict) else None
    hashes = {block["block_hash"] for block in stored["blocks"]} if stored else set()
    return event.get("dp_rank", 0), item.get("storage_tier", "device"), hashes


def believed(items: Sequence[dict[str, Any]], dp_rank: int = 0) -> Blocks:
    """What the events of a dump that are of one rank add up to."""
    found: Blocks = {}
    for item in items:
        rank, tier, hashes = stored_blocks(item)
        if hashes and rank == dp_rank:
            found.setdefault(tier, set()).update(hashes)
    return found
