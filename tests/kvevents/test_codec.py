"""kvevents.codec: strict out, with the field and the bound; lenient in, event by event."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials
from msgspec.structs import replace

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
    KVEventBatch,
    KVEventsError,
    StorageMedium,
    TokenIds,
    block_hashes,
    decode_batch,
    encode_batch,
    pack_tokens,
)
from kvevents.codec import Decoded
from kvevents.store_form import StoreSpeller

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
GPU = StorageMedium.GPU
I64 = st.integers(-(2**63), 2**63 - 1)


def stored(**changes: Any) -> BlockStored:
    """A valid store of two blocks, with changes."""
    fields: dict[str, Any] = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [10, 11, 12, 13],
        "block_size": 2,
        "medium": GPU,
    }
    return BlockStored(**(fields | changes))


def batch(*events: Any, ts: Any = 1.5, rank: Any = 0) -> KVEventBatch:
    return KVEventBatch(ts, list(events), rank)


# ------------------------------------------------------------------------------------------- out

EXTRA_KEYS: list[tuple[str, Any, type[Exception], str]] = [
    ("no list", "ab", TypeError, "str is not a list"),
    ("one for two blocks", [["a"]], ValueError, "1 entries for 2 blocks"),
    ("text", [None, "a"], TypeError, "[1]: str is neither None nor a list"),
    ("map", [[{}], None], TypeError, "[0]: dict is no plain value"),
    (
        "large",
        [[2**64], None],
        ValueError,
        f"[0]: {2**64} is not in {-(2**63)}..{2**64 - 1}",
    ),
    ("infinite", [[float("inf")], None], ValueError, "[0]: inf is not finite"),
    (
        "no UTF-8",
        [["\ud800"], None],
        ValueError,
        "[0]: '\\ud800' cannot be encoded: surrogates not allowed",
    ),
    ("deep", [[[[[["a"]]]]], None], ValueError, "[0]: lists are more than 4 deep"),
]
REFUSED: list[tuple[str, KVEventBatch, type[Exception], str]] = [
    ("int ts", batch(ts=5), TypeError, "ts: 5 is not a float"),
    ("no ts", batch(ts=None), TypeError, "ts: None is not a float"),
    ("no rank", batch(rank=None), ValueError, "dp_rank: None is not in 0..2147483647"),
    ("negative rank", batch(rank=-1), ValueError, "dp_rank: -1 is not in 0..2147483647"),
    ("large rank", batch(rank=2**31), ValueError, "dp_rank: 2147483648 is not in 0..2147483647"),
    ("bool rank", batch(rank=True), ValueError, "dp_rank: True is not in 0..2147483647"),
    ("no event", batch("clear"), TypeError, "events[0]: str is not an event"),
    (
        "no medium",
        batch(AllBlocksCleared(), stored(medium=None)),
        TypeError,
        "events[1].BlockStored.medium: None is not a StorageMedium",
    ),
    (
        "text medium",
        batch(BlockRemoved([1], "GPU")),  # type: ignore[arg-type]
        TypeError,
        "events[0].BlockRemoved.medium: 'GPU' is not a StorageMedium",
    ),
    (
        "no blocks",
        batch(stored(block_hashes=[], token_ids=[])),
        ValueError,
        "events[0].BlockStored.block_hashes: an event needs at least one block",
    ),
    (
        "no removed blocks",
        batch(BlockRemoved([], GPU)),
        ValueError,
        "events[0].BlockRemoved.block_hashes: an event needs at least one block",
    ),
    (
        "large hash",
        batch(stored(block_hashes=[1, 2**63])),
        ValueError,
        f"events[0].BlockStored.block_hashes: {2**63} is not in {-(2**63)}..{2**63 - 1}",
    ),
    (
        "small hash",
        batch(BlockRemoved([-(2**63) - 1, 5], GPU)),
        ValueError,
        f"events[0].BlockRemoved.block_hashes: {-(2**63) - 1} is not in {-(2**63)}..{2**63 - 1}",
    ),
    (
        "bytes hash",
        batch(stored(block_hashes=[b"12345678", 1])),
        TypeError,
        "events[0].BlockStored.block_hashes: b'12345678' is not an int",
    ),
    (
        "float hash between ints",
        batch(BlockRemoved([1, 2.5, 3], GPU)),  # type: ignore[list-item]
        TypeError,
        "events[0].BlockRemoved.block_hashes: 2.5 is not an int",
    ),
    (
        "bool hash between ints",
        batch(BlockRemoved([0, True, 3], GPU)),
        TypeError,
        "events[0].BlockRemoved.block_hashes: True is not an int",
    ),
    (
        "hashes as bytes",
        batch(stored(block_hashes=b"ab")),
        TypeError,
        "events[0].BlockStored.block_hashes: bytes is not a list",
    ),
    (
        "hashes as array",
        batch(stored(block_hashes=array("q", [1, 2]))),
        TypeError,
        "events[0].BlockStored.block_hashes: array is not a list",
    ),
    (
        "large parent",
        batch(stored(parent_block_hash=2**63)),
        ValueError,
        f"events[0].BlockStored.parent_block_hash: {2**63} is not in {-(2**63)}..{2**63 - 1}",
    ),
    (
        "bytes parent",
        batch(stored(parent_block_hash=b"p")),
        TypeError,
        "events[0].BlockStored.parent_block_hash: b'p' is not an int",
    ),
    (
        "own parent",
        batch(stored(parent_block_hash=1)),
        ValueError,
        "events[0].BlockStored.parent_block_hash: 1 is the block itself",
    ),
    (
        "block size 0",
        batch(stored(block_size=0, token_ids=[])),
        ValueError,
        "events[0].BlockStored.block_size: 0 is below 1",
    ),
    (
        "float block size",
        batch(stored(block_size=2.0)),
        ValueError,
        "events[0].BlockStored.block_size: 2.0 is below 1",
    ),
    (
        "few tokens",
        batch(stored(token_ids=[1, 2, 3])),
        ValueError,
        "events[0].BlockStored.token_ids: 3 ids, but 2 blocks of 2 need 4",
    ),
    (
        "many tokens",
        batch(stored(token_ids=TokenIds(pack_tokens(range(5))))),
        ValueError,
        "events[0].BlockStored.token_ids: 5 ids, but 2 blocks of 2 need 4",
    ),
    (
        "negative token",
        batch(stored(token_ids=[1, 2, 3, -1])),
        ValueError,
        "events[0].BlockStored.token_ids: -1 is not in 0..4294967295",
    ),
    (
        "large token",
        batch(stored(token_ids=[1, 2, 3, 2**32])),
        ValueError,
        "events[0].BlockStored.token_ids: 4294967296 is not in 0..4294967295",
    ),
    (
        "float token",
        batch(stored(token_ids=[1, 2, 3, 4.0])),
        ValueError,
        "events[0].BlockStored.token_ids: 4.0 is not in 0..4294967295",
    ),
    (
        "tokens as bytes",
        batch(stored(token_ids=b"abcd")),
        TypeError,
        "events[0].BlockStored.token_ids: bytes is neither TokenIds nor a list",
    ),
    (
        "tokens as array",
        batch(stored(token_ids=array("I", range(4)))),
        TypeError,
        "events[0].BlockStored.token_ids: array is neither TokenIds nor a list",
    ),
    (
        "lora_id as text",
        batch(stored(lora_id="7")),
        ValueError,
        f"events[0].BlockStored.lora_id: '7' is not in {-(2**63)}..{2**64 - 1}",
    ),
    (
        "large lora_id",
        batch(stored(lora_id=2**64)),
        ValueError,
        f"events[0].BlockStored.lora_id: {2**64} is not in {-(2**63)}..{2**64 - 1}",
    ),
    *[
        (
            f"{name} as int",
            batch(stored(**{name: 7})),
            TypeError,
            f"events[0].BlockStored.{name}: 7 is not a string",
        )
        for name in (
            *("lora_name", "cache_salt", "session_id", "extra_key", "kv_cache_spec_kind"),
            "locality",
        )
    ],
    *[
        (
            f"extra keys: {what}",
            batch(stored(extra_keys=keys)),
            kind,
            f"events[0].BlockStored.extra_keys: {message}",
        )
        for what, keys, kind, message in EXTRA_KEYS
    ],
    *[
        (
            f"group {group!r} of a {type(event).__name__}",
            batch(event),
            ValueError,
            f"events[0].{type(event).__name__}.group_idx: {group!r} is not in 0..{2**63 - 1}",
        )
        for group in (-1, True, "0", 2**63)
        for event in (stored(group_idx=group), BlockRemoved([1], GPU, group))  # type: ignore[arg-type]
    ],
]


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_strict_out(refused: KVEventBatch, kind: type[Exception], message: str) -> None:
    """A batch that breaks the contract is refused with the field's path, the value and the bound."""
    with pytest.raises(kind) as error:
        encode_batch(refused)
    assert str(error.value) == message


def test_limits_are_accepted() -> None:
    """The ends of every range are on the good side of it."""
    fine = stored(
        block_hashes=[-(2**63), 2**63 - 1],
        parent_block_hash=0,
        token_ids=[0, 1, 2, 2**32 - 1],
        lora_id=0,
    )
    sent = batch(fine, rank=2**31 - 1)
    assert decode_batch(encode_batch(sent)).batch == sent


def test_keys_that_strict_consumers_need_are_always_there() -> None:
    """lora_id, medium, lora_name and parent_block_hash are sent as nil, the other options not at all."""
    _, [event], _ = unpack(encode_batch(batch(stored())))
    assert list(event) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]
    assert [event[key] for key in ("parent_block_hash", "lora_id", "lora_name")] == [None] * 3


@pytest.mark.parametrize(
    "empty", [[], (), TokenIds(pack_tokens([]))], ids=["list", "tuple", "TokenIds"]
)
def test_tokens_may_be_left_out(empty: Any) -> None:
    """Case 108: an event without any tokens is sent and read; the key is there, for strict consumers."""
    payload = encode_batch(batch(stored(token_ids=empty)))
    _, [event], _ = unpack(payload)
    assert event["token_ids"] == []
    decoded = decode_batch(payload)
    assert decoded.skipped == ()
    assert decoded.batch.events == [stored(token_ids=[])]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_tokens_are_all_there_or_none(count: int) -> None:
    """Some of the tokens are not what a block is: two blocks of two have four or none."""
    for tokens in (list(range(count)), TokenIds(pack_tokens(range(count)))):
        with pytest.raises(ValueError, match=f"token_ids: {count} ids, but 2 blocks of 2 need 4"):
            encode_batch(batch(stored(token_ids=tokens)))


# ----------------------------------------------------------------------------------- there and back

Names = st.none() | st.text(min_size=1, max_size=5)
Groups = st.none() | st.integers(0, 2**63 - 1)
Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
Keys = st.none() | st.lists(Plain, max_size=2)
"""A block's extra keys."""


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    """Any BlockStored that may be sent."""
    size = draw(st.integers(1, 4))
    hashes = draw(st.lists(I64, min_size=1, max_size=4))
    count = size * len(hashes)
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=draw(st.none() | I64.filter(lambda parent: parent != hashes[0])),
        token_ids=draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)),
        block_size=size,
        lora_id=draw(st.none() | st.integers(-(2**63), 2**64 - 1)),
        medium=draw(st.sampled_from(StorageMedium)),
        lora_name=draw(Names),
        cache_salt=draw(Names),
        session_id=draw(Names),
        extra_key=draw(Names),
        extra_keys=draw(st.none() | st.lists(Keys, min_size=len(hashes), max_size=len(hashes))),
        group_idx=draw(Groups),
        kv_cache_spec_kind=draw(Names),
    )


Removals = st.builds(
    BlockRemoved, st.lists(I64, min_size=1, max_size=4), st.sampled_from(StorageMedium), Groups
)
Events: st.SearchStrategy[Event] = stores() | Removals | st.just(AllBlocksCleared())
Batches = st.builds(
    KVEventBatch,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(Events, max_size=4),
    st.integers(0, 2**31 - 1),
)


@trials(150)
@given(Batches)
def test_what_is_sent_is_read(sent: KVEventBatch) -> None:
    """Decoding an encoded batch gives it back; on the wire it has exactly three elements."""
    payload = encode_batch(sent)
    decoded = decode_batch(payload)
    assert decoded.batch == sent
    assert decoded.skipped == ()
    raw = unpack(payload)
    assert len(raw) == 3
    assert [type(part) for part in raw] == [float, list, int]
    assert all(
        event.keys() >= {"lora_id", "medium", "lora_name", "parent_block_hash"}
        for event in raw[1]
        if event["type"] == "BlockStored"
    )


def vllm_array(event: Event) -> list[Any]:
    """As vLLM wrote it up to 0.23, at full length."""
    if isinstance(event, BlockStored):
        head = [event.block_hashes, event.parent_block_hash, list(event.token_ids)]
        told = ["BlockStored", *head, event.block_size, event.lora_id, event.medium]
        kind = event.kv_cache_spec_kind
        return [*told, event.lora_name, event.extra_keys, event.group_idx, kind, 128]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    return ["AllBlocksCleared"]


def sglang_array(event: Event) -> list[Any]:
    """As SGLang wrote it up to 0.5.18: a salt is in a map after the medium."""
    if isinstance(event, BlockStored):
        salt = event.cache_salt
        return vllm_array(event)[:7] + ([] if salt is None else [{"cache_salt": salt}])
    return vllm_array(event)[:3]


def in_an_array(event: Event, *, vllm: bool) -> Event:
    """The event without what the array has no slot for."""
    if isinstance(event, BlockStored):
        event = replace(event, session_id=None, extra_key=None)
        if vllm:
            return replace(event, cache_salt=None)
        event = replace(event, lora_name=None, extra_keys=None)
        return replace(event, group_idx=None, kv_cache_spec_kind=None)
    if isinstance(event, BlockRemoved) and not vllm:
        return BlockRemoved(event.block_hashes, event.medium)
    return event


@trials(100)
@given(st.lists(Events, max_size=4), st.lists(Plain, max_size=2), st.booleans())
def test_positional_events_mean_the_same_as_maps(
    events: list[Event], more: list[Any], vllm: bool
) -> None:
    """Arrays decode like maps; fields appended to them are ignored (case 103)."""
    wanted: list[Event] = []
    raw: list[list[Any]] = []
    for event in events:
        array = vllm_array(event) if vllm else sglang_array(event)
        salted = isinstance(event, BlockStored) and event.cache_salt is not None
        complete = vllm or salted or isinstance(event, AllBlocksCleared)
        raw.append([*array, *more] if complete else array)
        wanted.append(in_an_array(event, vllm=vllm))
    decoded = decode_batch(pack([1.5, raw, 0]))
    assert decoded.batch.events == wanted
    assert decoded.skipped == ()


@trials(100)
@given(st.lists(st.tuples(Events, st.integers(0, 1)), max_size=6))
def test_maps_and_arrays_may_be_in_one_batch(events: list[tuple[Event, int]]) -> None:
    """Each is read as what it is."""
    wanted = [in_an_array(event, vllm=True) for event, _ in events]
    told = [
        vllm_array(event) if array else event
        for event, (_, array) in zip(wanted, events, strict=True)
    ]
    decoded = decode_batch(pack([1.5, told, 0], enc_hook=list))
    assert decoded.batch.events == wanted
    assert decoded.skipped == ()


# -------------------------------------------------------------------------------- a store's objects

MS = 1_790_841_000_123
EXTERNAL, DISK = StorageMedium.EXTERNAL, StorageMedium.DISK


def master_event(event_type: str, value: int, **more: Any) -> dict[str, Any]:
    """As Mooncake's master writes it."""
    told = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
    event = {
        "event_id": 4,
        "timestamp": MS,
        "event_type": event_type,
        "type": told.get(event_type, event_type),
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool0",
        "group_id": None,
        "medium": "cpu",
        "dp_rank": None,
        "object_key": str(value % 2**64),
        "seq_hashes": [value % 2**64],
        "block_hashes": [value],
        "base_block_idx": 0 if event_type == "stored" else None,
    }
    if event_type == "stored":
        event |= {"parent_hash": None, "token_ids": None, "parent_block_hash": None}
    return event | more


def from_the_master(*events: Any, ts: Any = MS) -> Any:
    return decode_batch(pack([ts, list(events), 0]))


def test_a_stores_objects_are_read() -> None:
    """Milliseconds become seconds; the store's memory is EXTERNAL; tokens and parent may be nil."""
    decoded = from_the_master(
        master_event("stored", -5, block_size=16),
        master_event("stored", 7, block_size=16, parent_hash=2**64 - 5, medium="DISK"),
        master_event("removed", -5),
        master_event("cleared", 0),
    )
    assert decoded.skipped == ()
    assert decoded.batch == KVEventBatch(
        MS / 1000,
        [
            BlockStored([-5], None, [], 16, None, EXTERNAL),
            BlockStored([7], 2**64 - 5, [], 16, None, DISK),
            BlockRemoved([-5], EXTERNAL),
            AllBlocksCleared(),
        ],
        0,
    )
    assert type(decoded.batch.ts) is float


def test_an_object_may_say_more() -> None:
    """Unsigned hashes alone, tokens, the names of the namespace; `type` may be missing."""
    given = master_event("stored", 1, block_hashes=[], seq_hashes=[2**64 - 1], token_ids=[1, 2])
    given |= {"block_size": 2, "lora_name": "a", "additional_salt": "s", "parent_block_hash": 9}
    del given["type"]
    wanted = BlockStored([2**64 - 1], 9, [1, 2], 2, None, EXTERNAL, "a", "s")
    assert from_the_master(given).batch.events == [wanted]


def test_an_object_may_be_named_by_its_page() -> None:
    """Later masters leave the hashes out and tell the page's digest: its first 8 bytes are the hash."""
    space = {"block_size": 2, "hash_format": HashFormat.SGLANG, "model": "m", "worker_id": "w"}
    speller = StoreSpeller(0, media={EXTERNAL: "cpu", DISK: "disk"}, **space)  # type: ignore[arg-type]
    first, second = block_hashes([1, 2, 3, 4], 2)
    told: list[Event] = [
        BlockStored([first, second], None, [1, 2, 3, 4], 2, None, EXTERNAL),
        BlockStored([first], None, [1, 2], 2, None, DISK),
    ]
    decoded = decode_batch(speller.spell(1790841000.0, told))
    assert decoded.skipped == ()
    index = BlockIndex()
    index.apply(decoded.batch.events)
    assert index.resident[EXTERNAL] == {first, second}
    assert index.resident[DISK] == {first}
    for event in (BlockRemoved([first], DISK), AllBlocksCleared()):
        index.apply(decode_batch(speller.spell(1790841000.0, [event])).batch.events)
        assert not index.resident[DISK]
    assert len(index) == 0
    assert decoded.batch.ts == 1790841000.0


OBJECTS = {
    "a page that is no hex": (
        master_event("removed", 1, block_hashes=[], seq_hashes=[], connector_block_hash="key"),
        "block_hashes: none",
    ),
    "a short page": (
        master_event("removed", 1, block_hashes=[], seq_hashes=[], connector_block_hash="ab" * 7),
        "block_hashes: none",
    ),
    "no size": (master_event("stored", 1), "block_size: nil"),
    "a key that is no hash": (
        master_event("removed", 1, block_hashes=[], seq_hashes=[], object_key="f67c_0_k"),
        "block_hashes: none for the object 'f67c_0_k'",
    ),
    "another type": (master_event("moved", 1), "event_type: 'moved' is unknown"),
    "no type": (master_event("removed", 1) | {"event_type": None}, "event_type: None is unknown"),
    "another medium": (master_event("removed", 1, medium="tape"), "medium: 'tape' is neither"),
    "no medium": (master_event("removed", 1, medium=None), "medium: None is neither"),
    "text hashes": (master_event("removed", 1, block_hashes=["1"]), "Expected `int | bytes`"),
    "bigrams": (master_event("stored", 1, block_size=1, token_ids=[[1, 2]]), "token_ids: pairs"),
}


@pytest.mark.parametrize(("bad", "reason"), OBJECTS.values(), ids=OBJECTS)
def test_an_object_that_names_no_blocks_costs_only_itself(bad: Any, reason: str) -> None:
    """Also a store without a block size, as the master sends it: with a reason that says so."""
    decoded = from_the_master(master_event("removed", 1), bad, master_event("removed", 2))
    assert decoded.batch.events == [BlockRemoved([1], EXTERNAL), BlockRemoved([2], EXTERNAL)]
    assert [(it.position, it.reason[: len(reason)]) for it in decoded.skipped] == [(1, reason)]


@pytest.mark.parametrize("ts", [0.0, 12345.0, 99_999_999.0, 1790841000.0])
def test_a_stores_batch_is_known_by_its_events(ts: float) -> None:
    """Whatever its time: an engine may have a clock of its own."""
    space = {"block_size": 2, "hash_format": HashFormat.SGLANG, "model": "m", "worker_id": "w"}
    speller = StoreSpeller(0, media={DISK: "disk"}, **space)  # type: ignore[arg-type]
    (name,) = block_hashes([1, 2], 2)
    for event, read in (
        (BlockStored([name], None, [1, 2], 2, medium=DISK), BlockStored([name], None, [], 2)),
        (BlockRemoved([name], DISK), BlockRemoved([name])),
    ):
        decoded = decode_batch(speller.spell(ts, [event]))
        assert decoded == Decoded(KVEventBatch(ts, [replace(read, medium=DISK)], 0))
    cleared = speller.spell(ts, [AllBlocksCleared()])
    assert decode_batch(cleared).batch == KVEventBatch(ts, [AllBlocksCleared()], 0)


def test_the_words_alone_make_no_store() -> None:
    """An adapter may be called as the key is; a value that cannot be read costs only itself."""
    event = replace(stored(), lora_name="event_type")
    assert decode_batch(pack([7, [event], 0])) == Decoded(KVEventBatch(7.0, [event], 0))
    broken = b"\x93\x07\x92\xa1\xff" + pack(event) + b"\0"
    assert decode_batch(broken).batch == KVEventBatch(7.0, [event], 0)


def test_other_events_in_a_batch_of_milliseconds() -> None:
    """Maps and arrays are read as ever; from a float nothing is concluded."""
    plain: list[Event] = [stored(), BlockRemoved([1], StorageMedium.CPU)]
    assert from_the_master(*plain).batch == KVEventBatch(MS / 1000, plain, 0)
    array = ["BlockRemoved", [1], "cpu"]
    assert from_the_master(array, master_event("removed", 2)).batch.events == [
        BlockRemoved([1], StorageMedium.CPU),
        BlockRemoved([2], EXTERNAL),
    ]
    assert from_the_master(*plain, ts=float(MS)).batch == KVEventBatch(float(MS), plain, 0)
    assert from_the_master(ts=10**11 - 1).batch.ts == 10**11 - 1


# -------------------------------------------------------------------------------------------- in

GOOD: list[Event] = [stored(), BlockRemoved([2], GPU), AllBlocksCleared()]
STORED: dict[str, Any] = unpack(pack(stored()))
REMOVED: dict[str, Any] = unpack(pack(BlockRemoved([1], GPU)))


def without(event: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != key}


BAD: dict[str, Any] = {
    "unknown type": {"type": "BlockUpdated", "block_hashes": [1]},
    "unknown array": ["BlockUpdated", [1]],
    "no type": without(STORED, "type"),
    "int type": STORED | {"type": 1},
    "list type": STORED | {"type": ["BlockStored"]},
    "no hashes": without(STORED, "block_hashes"),
    "no parent": without(STORED, "parent_block_hash"),
    "no tokens": without(STORED, "token_ids"),
    "no block size": without(STORED, "block_size"),
    "text hash": STORED | {"block_hashes": ["a", "b"]},
    "text hash that is base64": STORED | {"block_hashes": ["AAAA", "AAAB"]},
    "float hash": REMOVED | {"block_hashes": [1.5]},
    "nil hashes": REMOVED | {"block_hashes": None},
    "one hash": REMOVED | {"block_hashes": 1},
    "text parent": STORED | {"parent_block_hash": "AAAA"},
    "text token": STORED | {"token_ids": ["1", 2, 3, 4]},
    "float token": STORED | {"token_ids": [1.5, 2, 3, 4]},
    "bigrams": STORED | {"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]},
    "text tokens": STORED | {"token_ids": "abcd"},
    "text block size": STORED | {"block_size": "2"},
    "unknown medium": STORED | {"medium": "HBM3"},
    "unknown removed medium": REMOVED | {"medium": "HBM3"},
    "int medium": REMOVED | {"medium": 0},
    "int lora_name": STORED | {"lora_name": 7},
    "int salt": STORED | {"cache_salt": 7},
    "int key": STORED | {7: 7},
    "array with a text hash": ["BlockRemoved", ["AAAA"], "GPU"],
    "extra keys as a map": STORED | {"extra_keys": {"a": 1}},
    "extra keys as text": STORED | {"extra_keys": "ab"},
    "text group": REMOVED | {"group_idx": "0"},
    "int kind": STORED | {"kv_cache_spec_kind": 1},
    "array with text for extra keys": ["BlockStored", [1], None, [1], 1, None, "GPU", None, "a"],
    "array with a text group": ["BlockRemoved", [1], "GPU", "0"],
    "array with an unknown medium": ["BlockRemoved", [1], "HBM3"],
    "array with a text parent": ["BlockStored", [1], "AAAA", [1, 2], 2, None, "GPU", None],
    "short array": ["BlockStored", [1], None],
    "empty array": [],
    "metadata with an int salt": [
        "BlockStored",
        [1],
        None,
        [1, 2],
        2,
        None,
        "GPU",
        {"cache_salt": 7},
    ],
    "nil": None,
    "text": "BlockStored",
    "number": 5,
    "nested": [[["BlockStored"]]],
    "extension": msgspec.msgpack.Ext(5, b"x"),
}

#: events that a MessagePack reader cannot turn into values at all
BROKEN: dict[str, bytes] = {
    "text that is no UTF-8": pack(REMOVED | {"medium": "~"}).replace(b"~", b"\xff"),
    "a map as a key": b"\x81\x80\x01",
    "a time that is out of range": b"\xc7\x0c\xff" + b"\xff" * 12,
}


def raw_batch(*events: bytes) -> bytes:
    """A payload of events that are encoded already."""
    return b"\x93" + pack(1.5) + bytes([0x90 | len(events)]) + b"".join(events) + pack(0)


@pytest.mark.parametrize("bad", [*map(pack, BAD.values()), *BROKEN.values()], ids=[*BAD, *BROKEN])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_bad_event_costs_only_itself(bad: bytes, at: int) -> None:
    """Cases 24, 52, 53: the others are applied, and the bad one is named by position with a reason."""
    events = [pack(event) for event in GOOD]
    events.insert(at, bad)
    decoded = decode_batch(raw_batch(*events))
    assert decoded.batch == KVEventBatch(1.5, GOOD, 0)
    assert [it.position for it in decoded.skipped] == [at]
    assert decoded.skipped[0].reason


@trials(100)
@given(
    st.lists(Events, max_size=4), st.lists(st.sampled_from(sorted(BAD)), max_size=3), st.randoms()
)
def test_good_events_read_the_same_in_bad_company(
    good: list[Event], bad: list[str], random: Any
) -> None:
    """Whatever else is in the batch, a good event decodes to what it would alone, in order."""
    mixed: list[tuple[bool, Any]] = [(True, event) for event in good]
    for name in bad:
        mixed.insert(random.randint(0, len(mixed)), (False, BAD[name]))
    decoded = decode_batch(pack([1.5, [event for _, event in mixed], 3]))
    assert decoded.batch == KVEventBatch(1.5, good, 3)
    wrong = [at for at, (fine, _) in enumerate(mixed) if not fine]
    assert [it.position for it in decoded.skipped] == wrong


@pytest.mark.parametrize("company", [[], [b"\x05"]], ids=["all good", "one bad"])
def test_unknown_keys_are_ignored(company: list[bytes]) -> None:
    """Case 103: a newer engine's extra fields, be they no UTF-8, do not stop an older reader."""
    odd = pack(STORED | {"~": [{}], "ownership": "tier-1"}).replace(b"~", b"\xff")
    events = [
        pack(STORED | {"ownership": "tier-1", "lookahead_token_ids": [[9], [10]]}),
        pack({"type": "AllBlocksCleared", "why": "reset"}),
        odd,
    ]
    decoded = decode_batch(raw_batch(*events, *company))
    assert decoded.batch.events == [stored(), AllBlocksCleared(), stored()]
    assert len(decoded.skipped) == len(company)


@pytest.mark.parametrize("events", [[], [5]], ids=["all good", "one bad"])
def test_batches_of_other_lengths(events: list[Any]) -> None:
    """Two elements mean rank 0, four are read as three, alike in good and in bad company."""
    count = len(events)
    for raw, rank in (([1.5, events], 0), ([1.5, events, 3, "id"], 3), ([1.5, events, None], None)):
        decoded = decode_batch(pack(raw))
        assert decoded.batch == KVEventBatch(1.5, [], rank)
        assert len(decoded.skipped) == count


@pytest.mark.parametrize("events", [[], [5]], ids=["all good", "one bad"])
def test_an_int_ts_is_read_as_a_float(events: list[Any]) -> None:
    """Some publishers send whole seconds."""
    decoded = decode_batch(pack([1700000000, events, 0]))
    assert decoded.batch.ts == 1700000000.0
    assert type(decoded.batch.ts) is float


NO_BATCH: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "payload"),
    "truncated": (encode_batch(batch(stored()))[:-9], "payload"),
    "trailing bytes": (encode_batch(batch()) + b"\x00", "payload"),
    "reserved byte": (b"\xc1", "payload"),
    "number": (pack(5), "payload"),
    "map": (pack({"ts": 1.5, "events": []}), "payload"),
    "one element": (pack([1.5]), "payload"),
    "text ts": (pack(["now", [], 0]), "ts: 'now' is not a number"),
    "bool ts": (pack([True, [], 0]), "ts: True is not a number"),
    "nil ts": (pack([None, [], 0]), "ts: None is not a number"),
    "no events": (pack([1.5, None, 0]), "events: Expected `array`"),
    "map of events": (pack([1.5, STORED, 0]), "events: Expected `array`"),
    "text rank": (pack([1.5, [], "0"]), "dp_rank: '0' is not an int"),
    "bool rank": (pack([1.5, [], True]), "dp_rank: True is not an int"),
    "deep": (b"\x91" * 100_000, "payload"),
}


@pytest.mark.parametrize(("payload", "message"), NO_BATCH.values(), ids=NO_BATCH)
def test_no_batch_at_all(payload: bytes, message: str) -> None:
    """What is no batch raises KVEventsError, which says where."""
    with pytest.raises(KVEventsError) as error:
        decode_batch(payload)
    assert str(error.value).startswith(message)


@trials(300)
@given(st.binary(max_size=60))
def test_arbitrary_bytes(garbage: bytes) -> None:
    """Bytes from a stranger raise KVEventsError or are a batch."""
    for payload in (garbage, b"\x93" + pack(1.5) + garbage, raw_batch(garbage)):
        try:
            decode_batch(payload)
        except KVEventsError:
            continue


Atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.datetimes()
    | st.sampled_from(["type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU"])
)
MapKeys = st.sampled_from(sorted(STORED)) | st.text(max_size=3) | st.integers(-9, 9)
Values = st.recursive(
    Atoms,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(MapKeys, inner, max_size=5),
    max_leaves=20,
)


@trials(150)
@given(
    Values, st.lists(Values, max_size=3), st.dictionaries(st.sampled_from(sorted(STORED)), Values)
)
def test_arbitrary_values(value: Any, events: list[Any], fields: dict[str, Any]) -> None:
    """Any value in any place raises KVEventsError or costs only itself."""
    for raw in (value, [1.5, value, 0], [1.5, [*events, STORED | fields, "~"], 0]):
        try:
            decoded = decode_batch(pack(raw))
        except KVEventsError:
            continue
        count = len(decoded.batch.events) + len(decoded.skipped)
        assert isinstance(raw, list)
        assert isinstance(raw[1], list)
        assert count == len(raw[1])


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ([1.5, [None] * 1100, 0], "events: 1100 elements in 1103 bytes are above 1068"),
        ([1.5, [{}] * 200_000, 0], "events: 200000 elements in 200005 bytes are above 13500"),
        ([1.5, [None], *[0] * 2000], "payload: 2002 elements in 2014 bytes are above 1125"),
    ],
)
def test_a_crowd_of_what_can_be_no_event(raw: list[Any], why: str) -> None:
    """Each would cost some hundred times its byte; a length that is a lie costs nothing either."""
    with pytest.raises(KVEventsError) as refused:
        decode_batch(pack(raw))
    assert str(refused.value) == why
    with pytest.raises(KVEventsError, match="payload: 4294967295 elements in 5 bytes"):
        decode_batch(b"\xdd\xff\xff\xff\xff")


def test_the_smallest_events_are_never_too_many() -> None:
    """In whatever form, and in bad company."""
    for least in ({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]):
        decoded = decode_batch(pack([1.5, [least] * 30_000 + [None] * 1000, 0]))
        assert (len(decoded.batch.events), len(decoded.skipped)) == (30_000, 1000)


@pytest.mark.parametrize("key", [b"", b"\x81" + pack("type"), b"\x82" + pack("type") + pack("~")])
def test_any_depth(key: bytes) -> None:
    """However deep an event is nested, the outcome is a skip or a KVEventsError."""
    for depth in range(900, 1010):
        try:
            decoded = decode_batch(raw_batch(pack("~"), key + b"\x91" * depth + b"\x01"))
        except KVEventsError:
            continue
        assert len(decoded.skipped) == 2


@trials(100)
@given(Batches, st.data())
def test_a_flipped_byte_raises_nothing_else(sent: KVEventBatch, data: st.DataObject) -> None:
    """A batch with one byte changed is read, or refused with KVEventsError."""
    payload = bytearray(encode_batch(sent))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode_batch(bytes(payload))
    except KVEventsError:
        return
