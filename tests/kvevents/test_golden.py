"""kvevents.codec against bytes that real engines made, and against our own pinned bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvevents_data import Golden, golden, ours
from kvevents_reference import reference_hashes

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    TokenIds,
    decode_batch,
    encode_batch,
    pack_tokens,
)

# ------------------------------------------------------------------------------------ the engines

MEDIA = {
    None: None,
    "GPU": StorageMedium.GPU,
    "CPU": StorageMedium.CPU,
    "CPU_PINNED": StorageMedium.CPU,
    "DISK": StorageMedium.DISK,
    "STORAGE": StorageMedium.DISK,
    "EXTERNAL": StorageMedium.EXTERNAL,
}


def meaning(given: dict[str, Any]) -> Event:
    """The event that the engine was given, in our words."""
    match given["type"]:
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case "BlockRemoved":
            medium = MEDIA[given["medium"]]
            where = given.get("locality")
            return BlockRemoved(given["block_hashes"], medium, given.get("group_idx"), where)
        case "BlockStored":
            metadata = given.get("metadata") or {}
            return BlockStored(
                block_hashes=given["block_hashes"],
                parent_block_hash=given["parent_block_hash"],
                token_ids=given["token_ids"],
                block_size=given["block_size"],
                lora_id=given["lora_id"],
                medium=MEDIA[given["medium"]],
                lora_name=given.get("lora_name"),
                cache_salt=given.get("cache_salt") or metadata.get("cache_salt"),
                session_id=given.get("session_id"),
                extra_keys=given.get("extra_keys"),
                group_idx=given.get("group_idx"),
                kv_cache_spec_kind=given.get("kv_cache_spec_kind"),
                locality=given.get("locality"),
            )
    raise AssertionError(given)


def is_bigram(given: dict[str, Any]) -> bool:
    return any(isinstance(token, list) for token in given.get("token_ids", []))


@pytest.mark.parametrize("batch", golden(), ids=str)
def test_engine_batches_mean_what_the_engine_was_given(batch: Golden) -> None:
    """Each batch of each engine decodes to the time, rank and events it was made from."""
    decoded = decode_batch(batch.payload)
    assert (decoded.batch.ts, decoded.batch.dp_rank) == (batch.ts, batch.dp_rank)
    understood = [given for given in batch.events if not is_bigram(given)]
    assert decoded.batch.events == [meaning(given) for given in understood]
    assert len(decoded.skipped) == len(batch.events) - len(understood)


BIGRAMS = [batch for batch in golden() if any(map(is_bigram, batch.events))]


@pytest.mark.parametrize("batch", BIGRAMS, ids=str)
def test_bigram_stores_cost_only_themselves(batch: Golden) -> None:
    """Case 37: EAGLE's pairs of tokens are skipped with a reason; the batch is read."""
    decoded = decode_batch(batch.payload)
    assert [(it.position, "bigrams" in it.reason) for it in decoded.skipped] == [(0, True)]
    assert decoded.batch == KVEventBatch(batch.ts, [], batch.dp_rank)


def test_every_engine_is_covered() -> None:
    """The golden files hold both encodings of both engines, with one bigram batch per SGLang."""
    assert len(golden()) == 101
    assert {str(batch) for batch in BIGRAMS} == {
        "sglang/store_bigram",
        "sglang-array/store_bigram",
    }


# --------------------------------------------------------------------------------------- our own

TS = 1700000000.25
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
H = reference_hashes(range(1, 13), 4)
EVERYTHING = {"lora_name": "adapter", "cache_salt": "tenant-a", "extra_key": "ek"}
E = reference_hashes(range(1, 9), 4, **EVERYTHING)  # type: ignore[arg-type]  # str | bool
LARGE = [0, 151643, 2**31, 2**32 - 1]


def stored(hashes: list[int], parent: int | None, tokens: Any, **more: Any) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=TokenIds(pack_tokens(tokens)),
        block_size=4,
        **{"medium": GPU, **more},
    )


LORA = reference_hashes(range(1, 5), 4, lora_name="adapter")
SALT = reference_hashes(range(1, 5), 4, cache_salt="tenant-a")
OURS: dict[str, tuple[list[Event], int]] = {
    "empty": ([], 0),
    "store_root": ([stored(H[:2], None, range(1, 9))], 0),
    "store_child": ([stored(H[2:], H[1], range(9, 13))], 0),
    "store_lora": ([stored(LORA, None, range(1, 5), lora_name="adapter")], 0),
    "store_salt": ([stored(SALT, None, range(1, 5), medium=CPU, cache_salt="tenant-a")], 0),
    "store_everything": (
        [stored(E[1:], E[0], range(5, 9), lora_id=7, session_id="session-1", **EVERYTHING)],
        0,
    ),
    "store_large_tokens": ([stored(reference_hashes(LARGE, 4), None, LARGE)], 0),
    "remove": ([BlockRemoved([H[1], H[0]], CPU)], 0),
    "remove_hash_range": ([BlockRemoved([-(2**63), -1, 0, 2**63 - 1], GPU)], 0),
    "clear": ([AllBlocksCleared()], 0),
    "mixed": (
        [
            *[stored(H[:1], None, range(1, 5), medium=medium) for medium in StorageMedium],
            *[BlockRemoved([H[0]], medium) for medium in StorageMedium],
            AllBlocksCleared(),
        ],
        0,
    ),
    "rank_3": ([stored(H[:1], None, range(1, 5))], 3),
}
each_of_ours = pytest.mark.parametrize("case", OURS)


@each_of_ours
def test_our_bytes_are_pinned(case: str) -> None:
    """Case 103: the encoder makes exactly the golden bytes, and they decode to the same batch."""
    events, rank = OURS[case]
    batch = KVEventBatch(TS, events, rank)
    assert encode_batch(batch) == ours()[case]
    decoded = decode_batch(ours()[case])
    assert decoded.batch == batch
    assert decoded.skipped == ()


@each_of_ours
def test_lists_of_tokens_encode_like_token_ids(case: str) -> None:
    """TokenIds is spelled on the wire as the list of its ids."""
    events, rank = OURS[case]
    plain: list[Event] = [
        msgspec.structs.replace(event, token_ids=list(event.token_ids))
        if isinstance(event, BlockStored)
        else event
        for event in events
    ]
    assert encode_batch(KVEventBatch(TS, plain, rank)) == ours()[case]


def test_no_golden_case_is_left_out() -> None:
    """Every line of ours.hex has a test, and the other way round."""
    assert ours().keys() == OURS.keys()


@each_of_ours
def test_batches_are_arrays_of_three_with_complete_maps(case: str) -> None:
    """A plain reader sees three elements, a float, a rank, and maps with the keys consumers need."""
    ts, events, rank = msgspec.msgpack.decode(ours()[case])
    assert type(ts) is float
    assert type(rank) is int
    for event in events:
        match event.pop("type"):
            case "BlockStored":
                assert event.keys() >= {
                    "block_hashes",
                    "parent_block_hash",
                    "token_ids",
                    "block_size",
                    "lora_id",
                    "medium",
                    "lora_name",
                }
            case "BlockRemoved":
                assert event.keys() == {"block_hashes", "medium"}
            case _:
                assert event == {}


def test_sglangs_own_root_is_ours_too() -> None:
    """For the same prompt SGLang's golden batch carries the hashes that we compute."""
    batch = next(it for it in golden() if str(it) == "sglang/store_root")
    (event,) = decode_batch(batch.payload).batch.events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == H[:2]
