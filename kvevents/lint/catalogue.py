"""The consumers that were observed, and what each takes."""

from __future__ import annotations

from typing import Final

from kvevents.lint.consumer import Consumer, Losses, Replays, Sequence

__all__ = ["CONSUMERS"]

_HISTORY = "what was stored before is unknown to it"
_MISSED = "what was in them is lost"
_STALE = "it counts the worker as stale until that is registered anew"
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_VLLM_STORED = frozenset(
    {
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name"),
    }
)
_ROUTER_REMOVED = frozenset(
    {"type", "block_hashes", "medium", "group_idx", "locality", "ownership"}
)
_ROUTER_KNOWN = {
    "BlockStored": _VLLM_STORED
    | _ROUTER_REMOVED
    | {"extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "session_id"},
    "BlockRemoved": _ROUTER_REMOVED,
    "AllBlocksCleared": frozenset({"type"}),
}
_VLLM_REMOVED = frozenset({"type", "block_hashes", "medium"})
_DYNAMO_MEDIA = frozenset(
    {
        *("", "GPU", "DEVICE", "CPU_PINNED", "CPU", "CPU_TIER1", "DISK", "STORAGE", "NVME"),
        *("CPU_TIER2", "EXTERNAL", "NETWORK", "REMOTE", "SHARED"),
    }
)
_ANY_KIND = frozenset({"nil", "bool", "int", "float", "text", "bytes", "array", "map", "ext"})
_INT, _TEXT = frozenset({"int"}), frozenset({"text"})


def _dynamo(name: str, sequence: Sequence, *, relay: bool) -> Consumer:
    """Both listeners of Dynamo have one decoder."""
    return Consumer(
        name=name,
        version="1.6.1",
        sequence=sequence,
        replays=None
        if relay
        else Replays(
            rolled="it keeps blocks that are gone",
            hole="it keeps blocks that are gone",
            empty="it takes that for the end, and the next replay loses data",
            no_end="it waits for ever, and reads no live message",
        ),
        lengths=(3, 3),
        ranks=(-(2**31), 2**31 - 1),
        rank_change=("stream", "it discards the worker for good") if relay else None,
        slot_7=frozenset({"nil", "text", "map"}),
        no_ops=frozenset({"Ignored"}),
        loose=frozenset({"lora_id"}),
        digests=False,
        repeated_hash=("event", "it takes the block for its own parent"),
        pairs=("misread", "only a query of pairs matches them"),
        no_tokens=("event", "it hashes the tokens itself"),
        token_range=True,
        few_tokens=("block", "it keeps the leading blocks that are complete"),
        block_size_change=("event", "it reads one block size only"),
        media=_DYNAMO_MEDIA,
        stored_elsewhere=("event", "it knows no such medium"),
        removed_elsewhere=("event", "it knows no such medium"),
        namespaces=frozenset({"lora_name", "cache_salt", "extra_keys"}),
        only={
            "ownership": (frozenset({None}), "it drops what has an owner"),
            "locality": (frozenset({None, "LOCAL"}), "it drops what is remote"),
            "kv_cache_spec_kind": (_FULL_ATTENTION, "it indexes full attention only"),
        },
        lora_id_alone=("misread", "it counts the blocks for the base model"),
    )


def _llm_d(name: str, engine: str) -> Consumer:
    sglang = engine == "sglang"
    return Consumer(
        name=name,
        version="ebab6879",
        topic="kv@pod@model",
        seq_bytes=(8, None),
        sequence=Sequence(
            alone=Losses(
                late=f"{_HISTORY} until it is stored anew, and orphans are skipped",
                gap="the blocks that follow the missing ones are skipped",
                back="it keeps blocks that are gone",
            ),
            replaying=Losses(
                cleared_gap="it stays stale: no replay fills the gap, and live batches are dropped"
            ),
        ),
        replays=Replays(
            frames=frozenset({4}),
            rolled="it indexes nothing: a replay must begin with the seq asked for",
            rolled_cleared="it indexes nothing: a replay must begin with the seq asked for",
            hole="it indexes nothing: a replay must have every seq",
            no_end="it gives the replay up after 2 s, and drops live batches",
        ),
        lengths=(3, 3),
        forms=frozenset({"array"}) if sglang else frozenset({"map", "array"}),
        slots=9 if sglang else None,
        narrow=False,
        no_tokens=("block", "that tells it a tier of blocks it knows, and no new one"),
        media=frozenset({"gpu", "cpu"}),
        any_case=True,
        stored_elsewhere=("misread", "it scores it as GPU"),
        namespaces=frozenset({"lora_name", "extra_keys"}),
    )


def _typed(name: str, version: str, stored: frozenset[str], removed: frozenset[str]) -> Consumer:
    """An engine's own decoder: structs of msgspec, and nothing behind."""
    return Consumer(
        name=name,
        version=version,
        forms=frozenset({"map"}),
        trailing=False,
        stored=stored,
        removed=removed,
        digests=name == "vllm",
        replays=Replays(frames=frozenset({4})) if name == "vllm" else None,
    )


_ALL_CONSUMERS = (
    _dynamo(
        "dynamo",
        Sequence(
            alone=Losses(late=_HISTORY, gap=_MISSED),
            replaying=Losses(),
            drops_old=True,
            reset="by payload",
        ),
        relay=False,
    ),
    _dynamo(
        "dynamo-relay",
        Sequence(
            alone=Losses(
                late=_HISTORY,
                gap=f"it does not look at seqs: {_MISSED}",
                back="it keeps blocks that are gone",
            )
        ),
        relay=True,
    ),
    _llm_d("llm-d", "vllm"),
    _llm_d("llm-d-sglang", "sglang"),
    Consumer(
        name="aibrix",
        version="e3e10f9e",
        sequence=Sequence(
            alone=Losses(
                late=f"{_HISTORY}: it discards replays",
                gap=f"it only counts them: {_MISSED}",
                back="it keeps blocks that are gone",
            ),
            end="it disconnects for some 2 s",
        ),
        dropping="drops the batch and disconnects",
        lengths=(2, 3),
        ts=frozenset({"float"}),
        nil_rank=("batch", "it reads an int only"),
        forms=frozenset({"array"}),
        many_hashes=("misread", "it takes all of them for children of the event's parent"),
        no_tokens=("batch", "it hashes the tokens itself"),
        few_tokens=("event", "it needs as many as the blocks have"),
        many_tokens=("event", "it needs as many as the blocks have"),
        media=frozenset({"GPU"}),
        stored_elsewhere=("misread", "it reads no medium, and counts it as GPU"),
        removed_elsewhere=("misread", "it reads no medium, and evicts the GPU copy"),
        namespaces=frozenset(),
        lora_id_alone=("misread", "it counts the blocks for the base model"),
    ),
    Consumer(
        name="mooncake",
        version="Sept 2026, type SGLang",
        observed="read",
        max_seq=2**63 - 1,
        sequence=Sequence(
            alone=Losses(
                late=f"those before are missing to it, so {_STALE}",
                gap=_STALE,
                cleared_gap=_STALE,
            ),
            replaying=Losses(cleared_gap=f"{_STALE}, unless a replay fills the gap"),
            drops_old=True,
        ),
        replays=Replays(
            rolled=_STALE,
            rolled_cleared=_STALE,
            hole=_STALE,
            no_end=f"{_STALE}, once its deadline is over",
        ),
        ts=frozenset({"float"}),
        nil_rank=("misread", "it takes the batch, and indexes nothing"),
        no_rank=("batch", "it must be the one that was registered"),
        rank_change=("batch", "it must be the one that was registered"),
        broken="event",
        forms=frozenset({"map"}),
        pairs=("block", "it takes the event, and indexes nothing"),
        no_tokens=("block", "it takes the event, and indexes nothing"),
        media=frozenset({"", "GPU", "CPU", "CPU_PINNED", "DISK"}),
        stored_elsewhere=("event", "it knows no such medium"),
        removed_elsewhere=("event", "it knows no such medium"),
        only={"lora_id": (frozenset({None}), "it refuses a lora_id")},
    ),
    Consumer(
        name="mooncake-vllm",
        version="Aug 2026, type vLLM",
        max_seq=2**63 - 1,
        sequence=Sequence(alone=Losses(late=_HISTORY, gap=f"it asks for no replay: {_MISSED}")),
        lengths=(3, 3),
        ts=frozenset({"float"}),
        rank_change=("batch", "it must be the one that was registered"),
        broken="event",
        forms=frozenset({"map"}),
        stored=_VLLM_STORED,
        negative=False,
        pairs=("event", "it reads a list of ids only"),
        block_size_change=("event", "it must be the one that was registered"),
        media=frozenset({"GPU"}),
        stored_elsewhere=("event", "it indexes GPU only"),
        removed_elsewhere=("event", "it indexes GPU only"),
        namespaces=frozenset({"lora_name"}),
    ),
    Consumer(
        name="mooncake-store",
        version="Aug 2026, type Mooncake, and Dynamo 1.6.1",
        sequence=Sequence(
            alone=Losses(
                late=_HISTORY,
                gap="Dynamo clears everything",
                back="Dynamo clears everything",
            )
        ),
        lengths=(3, 3),
        ts=_INT,
        nil_rank=("batch", "Dynamo reads an unsigned int only"),
        ranks=(0, 2**32 - 1),
        broken="event",
        forms=frozenset({"map"}),
        tag="event_type",
        types=frozenset({"stored", "removed", "cleared"}),
        stored=frozenset(
            {
                *("timestamp", "object_key", "connector_block_hash", "model_name", "block_size"),
                *("dp_rank", "medium"),
            }
        ),
        removed=frozenset({"timestamp", "object_key", "dp_rank", "medium"}),
        kinds={
            "timestamp": _INT,
            "object_key": _TEXT,
            "connector_block_hash": _TEXT,
            "model_name": _TEXT,
            "block_size": _INT,
            "dp_rank": _INT,
            "medium": _TEXT,
        },
        negative=False,
        pairs=None,
        nil_tokens=True,
        media=frozenset({"cpu", "disk"}),
        any_case=True,
        stored_elsewhere=("event", "it reads cpu and disk only"),
        removed_elsewhere=("event", "it reads cpu and disk only"),
        only={"tenant_id": (frozenset({None, "", "default"}), "Dynamo reads no other tenant")},
    ),
    Consumer(
        name="vllm-router",
        version="0.1.17",
        topic=(b"",),
        max_payload=16 << 20,
        sequence=Sequence(
            alone=Losses(
                late="it distrusts the worker until AllBlocksCleared",
                gap="it distrusts the worker until AllBlocksCleared, and all stored anew",
            ),
            replaying=Losses(),
        ),
        replays=Replays(
            frames=frozenset({4}),
            rolled="its index stays empty",
            rolled_cleared="its index stays empty",
            hole="it gives the replay up",
            no_end="it gives the replay up after 5 s",
        ),
        lengths=(2, 3),
        ranks=(0, 2**32 - 1),
        trailing=False,
        forms=frozenset({"map"}),
        stored=_VLLM_STORED,
        removed=_VLLM_REMOVED,
        known=_ROUTER_KNOWN,
        negative=False,
        no_hashes=("batch", "it needs one at least"),
        token_range=True,
        no_tokens=("block", "it hashes the tokens itself"),
        media=frozenset({"", "GPU", "CPU", "DISK", "STORAGE"}),
        stored_elsewhere=("misread", "it credits it as GPU"),
        namespaces=frozenset({"lora_name"}),
        lora_id_alone=("misread", "it counts the blocks for the base model"),
    ),
    Consumer(
        name="sgl-router",
        version="experimental, Aug 2026",
        observed="read",
        max_seq=2**63 - 1,
        sequence=Sequence(
            alone=Losses(late=f"{_HISTORY}: it asks for no replay", gap=_MISSED),
            drops_old=True,
            reset="always",
        ),
        large=False,
        digests=False,
        slot_7=frozenset({"nil", "text", "map"}),
        max_hashes=65_536,
        pairs=None,
        media=frozenset({"", "GPU", "CPU_PINNED", "DISK", "EXTERNAL"}),
        stored_elsewhere=("event", "it knows no such medium"),
        removed_elsewhere=("event", "it knows no such medium"),
    ),
    Consumer(
        name="smg",
        version="1.13.0",
        frames=(3, None),
        sequence=Sequence(
            alone=Losses(
                late=_HISTORY, gap="its gateway forgets the worker, and starts from there"
            ),
            replaying=Losses(),
            end="its relay is stuck, and later batches are never delivered",
        ),
        replays=Replays(
            rolled=_HISTORY,
            hole="its gateway forgets the worker",
            no_end="its gateway forgets the worker",
        ),
        ts=_ANY_KIND,
        rank=_ANY_KIND,
        trailing=False,
        broken="event",
        slot_7=_ANY_KIND,
        loose=frozenset({"lora_id", "lora_name", "medium"}),
        repeated_hash=("event", "it takes the block for its own parent"),
        pairs=None,
        no_tokens=("event", "it hashes the tokens itself"),
        token_range=True,
        few_tokens=("event", "it needs as many as the blocks have"),
        many_tokens=("event", "it needs as many as the blocks have"),
        media=frozenset(
            {
                *("gpu", "device", "cpu", "cpu_pinned", "cpu_tier1", "cpu_tier2", "disk", "nvme"),
                *("storage", "external", "network", "remote", "shared"),
            }
        ),
        any_case=True,
        stored_elsewhere=("event", "it knows no such medium"),
        removed_elsewhere=("event", "it knows no such medium"),
        namespaces=frozenset({"lora_name", "cache_salt", "extra_keys"}),
        only={
            "locality": (frozenset({None, "LOCAL"}), "it drops what is remote"),
            "kv_cache_spec_kind": (_FULL_ATTENTION, "it forwards full attention only"),
        },
    ),
    Consumer(
        name="kthena",
        version="Aug 2026",
        topic=(b"kv-events", b""),
        sequence=Sequence(
            alone=Losses(
                late=f"{_HISTORY}: it asks for no replay",
                gap=f"it asks for no replay: {_MISSED}",
                back="it keeps blocks that are gone",
            )
        ),
        forms=frozenset({"array"}),
        slot_7=frozenset({"nil", "text", "map"}),
        digests=False,
        media=frozenset({"GPU"}),
        stored_elsewhere=("misread", "it reads no medium, and counts it as GPU"),
        removed_elsewhere=("misread", "it reads no medium, and takes it for GPU"),
        namespaces=frozenset(),
    ),
    _typed("vllm", "0.33.0", _VLLM_STORED, _VLLM_REMOVED),
    _typed(
        "sglang",
        "0.5.23",
        _VLLM_STORED - {"medium", "lora_name"},
        frozenset({"type", "block_hashes"}),
    ),
)

CONSUMERS: Final[dict[str, Consumer]] = {each.name: each for each in _ALL_CONSUMERS}
"""By name."""
