"""kvevents.speller: every spelling of a batch, and what is left out of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from kvevents.columns import Columns
from kvevents.dialect import PRESETS, Dialect
from kvevents.hashing import BlockHash, canonical_hash
from kvevents.speller import Speller
from kvevents.tokens import TokenIds, pack_tokens

GPU, CPU, DISK, EXT = StorageMedium
I64 = st.integers(-(2**63), 2**63 - 1)
Names = st.none() | st.text(min_size=1, max_size=5)
SECRET = 0xDEAD_BEEF


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    """Any store that may be sent; its tokens are SECRET, and nothing else is."""
    hashes = draw(st.lists(I64, min_size=1, max_size=4))
    size = draw(st.integers(1, 3))
    tokens: Any = [SECRET] * (size * len(hashes))
    if draw(st.booleans()):
        tokens = TokenIds(pack_tokens(tokens))
    return BlockStored(
        [*hashes],
        draw(st.none() | I64.filter(lambda parent: parent != hashes[0])),
        tokens,
        size,
        draw(st.none() | st.integers(0, 9)),
        draw(st.sampled_from(StorageMedium)),
        draw(Names),
        draw(Names),
        draw(Names),
        draw(Names),
    )


Removals = st.builds(
    BlockRemoved, st.lists(I64, min_size=1, max_size=4), st.sampled_from(StorageMedium)
)
Events: st.SearchStrategy[Event] = stores() | Removals | st.just(AllBlocksCleared())
Batches = st.lists(Events, max_size=4)


NAMED = {name: preset.dialect for name, preset in PRESETS.items()}
OBJECTS = "mooncake-store"  # has a speller of its own
SPELLED = [pytest.param(one, id=name) for name, one in NAMED.items() if name != OBJECTS]


def spell(dialect: Dialect, *events: Event, rank: int = 0) -> Any:
    """What a consumer finds in the payload."""
    return msgspec.msgpack.decode(Speller(dialect, rank).spell(1.5, list(events)))


def raw(*events: Any, rank: int = 0) -> Any:
    return [1.5, list(events), rank]


def readable(dialect: Dialect, event: Event) -> Event:
    """`event` as a reader of this dialect has it: with what a form cannot say left out."""
    if not isinstance(event, BlockStored):
        return event
    if dialect.event_form == "array":
        named = event.lora_name if "lora_name" in dialect.namespaces else None
        changes: dict[str, Any] = {"cache_salt": None, "session_id": None, "extra_key": None}
        return msgspec.structs.replace(event, lora_name=named, **changes)
    if dialect.event_form == "vllm":
        keys = None
        names = [one for one in (event.lora_name,) if one is not None]
        first = [*names, event.cache_salt] if event.cache_salt is not None else names
        if event.parent_block_hash is not None:
            first = names
        if first:
            keys = [first, *[names or None] * (len(event.block_hashes) - 1)]
        return msgspec.structs.replace(event, cache_salt=None, extra_key=None, extra_keys=keys)
    return event


def told_media(dialect: Dialect) -> dict[StorageMedium, StorageMedium]:
    return {medium: StorageMedium(text) for medium, text in dialect.media}


@pytest.mark.parametrize("dialect", SPELLED)
@trials(60)
@given(event=Events, rank=st.integers(0, 9))
def test_what_is_spelled_is_read(dialect: Dialect, event: Event, rank: int) -> None:
    """Every dialect is read back by our own reader, all of what it says; whatever the hash's sign and
    form, it is the same hash.
    """
    media = told_media(dialect)
    if not isinstance(event, AllBlocksCleared):
        event.medium = next(iter(dict(dialect.media)))
    if isinstance(event, BlockStored) and dialect.event_form == "vllm":
        event.extra_key = None
    read = decode_batch(Speller(dialect, rank).spell(1.5, [event]))
    assert read.skipped == ()
    assert (read.batch.ts, read.batch.dp_rank) == (1.5, rank)
    index, expected = BlockIndex(), BlockIndex()
    index.apply(read.batch.events)
    wanted = readable(dialect, event)
    if not isinstance(wanted, AllBlocksCleared):
        wanted = msgspec.structs.replace(wanted, medium=media[wanted.medium or GPU])
    expected.apply([wanted])
    assert index.resident == expected.resident
    if len(read.batch.events) > 1:
        return  # of a block each
    (found,) = read.batch.events
    if not isinstance(found, AllBlocksCleared):
        found.block_hashes = [*map(canonical_hash, found.block_hashes)]
    if isinstance(found, BlockStored) and found.parent_block_hash is not None:
        found.parent_block_hash = canonical_hash(found.parent_block_hash)
    assert found == wanted


STORE = BlockStored([-1, 2], -3, [1, 2, 3, 4], 2, medium=CPU)
MAP = {
    "type": "BlockStored",
    "block_hashes": [-1, 2],
    "parent_block_hash": -3,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "CPU_PINNED",
    "lora_name": None,
}
UNSIGNED = MAP | {"block_hashes": [2**64 - 1, 2], "parent_block_hash": 2**64 - 3}
BYTES = MAP | {
    "block_hashes": [b"\xff" * 8, bytes(7) + b"\2"],
    "parent_block_hash": b"\xff" * 7 + b"\xfd",
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sglang", MAP),
        ("dynamo", MAP),
        ("sgl-router", MAP),
        ("smg", MAP),
        ("vllm", UNSIGNED | {"medium": "CPU"}),
        ("vllm-router", UNSIGNED | {"medium": "CPU"}),
        ("mooncake", UNSIGNED),
        ("llm-d", BYTES | {"medium": "CPU"}),
        ("legacy", ["BlockStored", [-1, 2], -3, [1, 2, 3, 4], 2, None, "CPU_PINNED"]),
    ],
)
def test_a_store_of_each_preset(name: str, wanted: Any) -> None:
    """Keys and their order, or slots; hashes in their form; the medium's name."""
    found = spell(NAMED[name], STORE)
    assert found == raw(wanted)
    if isinstance(wanted, dict):
        assert list(found[1][0]) == list(wanted)


@pytest.mark.parametrize("name", ["aibrix", "kthena"])
def test_a_store_of_the_device_views(name: str) -> None:
    """Arrays of seven; aibrix has one block an event, each the parent of the next."""
    store = msgspec.structs.replace(STORE, medium=GPU)
    slots: list[Any] = [2, None, "GPU"]
    split = [
        ["BlockStored", [-1], -3, [1, 2], *slots],
        ["BlockStored", [2], -1, [3, 4], *slots],
    ]
    whole = [["BlockStored", [-1, 2], -3, [1, 2, 3, 4], *slots]]
    assert spell(NAMED[name], store) == raw(*(split if name == "aibrix" else whole))


@pytest.mark.parametrize("dialect", SPELLED)
def test_the_other_events(dialect: Dialect) -> None:
    """A removal names its medium, with the same hash as the store; a clear has nothing with it."""
    medium, text = dialect.media[0]
    removal = BlockRemoved([-1], medium)
    form = {"i64": -1, "u64": 2**64 - 1, "bytes": b"\xff" * 8}[dialect.hash_form]
    if dialect.event_form == "array":
        wanted: list[Any] = [["BlockRemoved", [form], text], ["AllBlocksCleared"]]
    else:
        wanted = [{"type": "BlockRemoved", "block_hashes": [form], "medium": text}]
        wanted.append({"type": "AllBlocksCleared"})
    assert spell(dialect, removal, AllBlocksCleared(), rank=4) == raw(*wanted, rank=4)
    assert spell(dialect) == raw()


def test_namespaces() -> None:
    """A name has its key where a map has one; in an array the LoRA name has slot 7 where it is told; vLLM
    has the adapter and, in a prompt's first block, the salt among the extra keys.
    """
    named = msgspec.structs.replace(STORE, lora_name="a", cache_salt="s", extra_key="x")
    wanted = MAP | {"lora_name": "a", "cache_salt": "s", "extra_key": "x"}
    assert spell(Dialect(), named) == raw(wanted)
    array = Dialect(event_form="array", namespaces=("lora_name",))
    assert spell(array, named)[1][0][7:] == ["a"]
    assert spell(array, STORE)[1][0][7:] == [None]
    vllm = Dialect(event_form="vllm")
    root = msgspec.structs.replace(named, parent_block_hash=None)
    assert spell(vllm, named)[1][0]["extra_keys"] == [["a"], ["a"]]
    assert spell(vllm, root)[1][0]["extra_keys"] == [["a", "s"], ["a"]]
    unnamed = msgspec.structs.replace(root, lora_name=None)
    assert spell(vllm, unnamed)[1][0]["extra_keys"] == [["s"], None]
    keyed = msgspec.structs.replace(STORE, extra_keys=[["i", [3]], None])
    assert spell(vllm, keyed)[1][0]["extra_keys"] == [["i", [3]], None]
    assert "extra_keys" not in spell(vllm, STORE)[1][0]


@trials(60)
@given(st.integers(1, 7), st.integers(1, 9), st.booleans())
def test_events_are_cut(most: int, blocks: int, packed: bool) -> None:
    """At most so many blocks an event, each the parent of the next, tokens with their blocks; no event
    more than needed.
    """
    tokens: Any = list(range(2 * blocks))
    store = BlockStored([*range(1, blocks + 1)], None, tokens, 2, medium=GPU)
    if packed:
        store.token_ids = TokenIds(pack_tokens(tokens))
    removal = BlockRemoved([*range(blocks, 0, -1)], GPU)
    _, events, _ = spell(Dialect(blocks_per_event=most), store, removal)
    pieces = -(-blocks // most)
    assert len(events) == 2 * pieces
    assert all(0 < len(event["block_hashes"]) <= most for event in events)
    chain: list[int] = []
    for event in events[:pieces]:
        assert event["parent_block_hash"] == (chain[-1] if chain else None)
        chain += event["block_hashes"]
        assert event["token_ids"] == [
            token for one in event["block_hashes"] for token in (2 * one - 2, 2 * one - 1)
        ]
    assert chain == store.block_hashes
    assert [one for event in events[pieces:] for one in event["block_hashes"]] == chain[::-1]


@trials(150)
@given(Batches, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 99))
def test_sglang_is_the_codec(events: list[Event], ts: float, rank: int) -> None:
    """`sglang` is what encode_batch makes, byte for byte: the golden files pin both."""
    spelled = Speller(Dialect(), rank).spell(ts, events)
    assert spelled == encode_batch(KVEventBatch(ts, events, rank))


@trials(150)
@given(Batches)
def test_redaction_leaves_out_the_tokens_and_nothing_else(events: list[Event]) -> None:
    """Without `token_ids` no token is in the payload; every other field is as it was, and the events
    themselves are not changed.
    """
    before = [msgspec.to_builtins(event, enc_hook=list) for event in events]
    payload = Speller(Dialect(token_ids=False), 0).spell(1.0, events)
    assert b"\xce" + SECRET.to_bytes(4, "big") not in payload
    read = decode_batch(payload)
    assert read.skipped == ()
    expected = [
        msgspec.structs.replace(event, token_ids=[]) if isinstance(event, BlockStored) else event
        for event in events
    ]
    assert read.batch.events == expected
    assert [msgspec.to_builtins(event, enc_hook=list) for event in events] == before


def test_a_batch_is_encoded_once_for_all_who_spell_alike() -> None:
    """The same events at the same time are the same bytes object; others are not mixed up with them."""
    speller = Speller(Dialect(), 0)
    events: list[Event] = [AllBlocksCleared()]
    first = speller.spell(1.0, events)
    assert speller.spell(1.0, events) is first
    assert decode_batch(speller.spell(2.0, events)).batch.ts == 2.0
    assert decode_batch(speller.spell(2.0, [])).batch.events == []
    again = speller.spell(1.0, [BlockRemoved([1], GPU)])
    assert decode_batch(again).batch.events == [BlockRemoved([1], GPU)]


@trials(100)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8))
def test_what_was_spelled_before_makes_no_difference(asked: list[tuple[int, int]]) -> None:
    """In whatever order batches are asked for, each is spelled as by a new speller."""
    batches: list[list[Event]] = [[], [AllBlocksCleared()], [BlockRemoved([1], GPU)]]
    speller = Speller(Dialect(), 0)
    for ts, which in asked:
        fresh = Speller(Dialect(), 0).spell(float(ts), batches[which])
        assert speller.spell(float(ts), batches[which]) == fresh


@pytest.mark.parametrize(
    ("cut", "tokens"),
    [(Dialect(token_ids=False), 0), (Dialect(blocks_per_event=1), 6)],
    ids=["no tokens", "one block"],
)
def test_what_is_left_out_is_left_out_of_columns(cut: Dialect, tokens: int) -> None:
    """They are spelled as their events are, and a payload that says more is never taken for theirs."""
    names = [BlockHash(name) for name in (1, 2, 3, 1, 2)]
    packed = pack_tokens([SECRET] * 6)
    columns = Columns(names, [None, None], [3, -2], packed, 2, GPU)
    payload = Speller(cut, 0).spell(1.0, columns)
    assert payload == Speller(cut, 0).spell(1.0, list(columns.events))
    assert payload.count(msgspec.msgpack.encode(SECRET)) == tokens
    assert not (tokens == 0 and Speller(cut, 0).verbatim)


_FORMS = {name: preset.dialect for name, preset in PRESETS.items()}
_RENAMED = Dialect(media=((GPU, "cuda"), (CPU, "host")))


@pytest.mark.parametrize(
    "dialect",
    [one for one in _FORMS.values() if one.event_form != "mooncake"] + [_RENAMED],
    ids=[name for name, one in _FORMS.items() if one.event_form != "mooncake"] + ["renamed"],
)
def test_columns_are_spelled_as_their_events_are(dialect: Dialect) -> None:
    """In every form: hashes and parents of either sign, and what comes behind a removal."""
    names = [BlockHash(name) for name in (-1, 2, -3, 2, -1, 5, 6)]
    parents = [BlockHash(-9), None, BlockHash(-3), None]
    columns = Columns(names, parents, [3, -2, 1, -1], pack_tokens([1, 2, 3, 5]), 1, GPU)
    payload = Speller(dialect, 0).spell(1.0, columns)
    assert payload == Speller(dialect, 0).spell(1.0, [*columns.events])
    assert msgspec.msgpack.encode(dict(dialect.media)[GPU]) in payload
