"""kvevents.dialect: one spelling of a batch, and what is left out of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from kvevents.dialect import DIALECTS, Speller
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


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_spelled_is_read(dialect: str) -> None:
    """Every dialect that a sink may give is one our own reader knows."""
    event = BlockStored([1, 2], None, [1, 2, 3, 4], 2, medium=CPU)
    payload = Speller(dialect, 3).spell(1.5, [event])
    assert decode_batch(payload).batch == KVEventBatch(1.5, [event], 3)


@pytest.mark.parametrize("dialect", ["", "SGLang", "vllm?", "sglang "])
def test_an_unknown_dialect_is_named(dialect: str) -> None:
    """Raises ValueError with the bad value and what there is."""
    with pytest.raises(ValueError, match="dialect: ") as error:
        Speller(dialect, 0)
    assert repr(dialect) in str(error.value)
    assert all(one in str(error.value) for one in DIALECTS)


@trials(150)
@given(Batches, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 99))
def test_sglang_is_the_codec(events: list[Event], ts: float, rank: int) -> None:
    """`sglang` is what encode_batch makes, byte for byte: the golden files pin both."""
    spelled = Speller("sglang", rank).spell(ts, events)
    assert spelled == encode_batch(KVEventBatch(ts, events, rank))


@trials(150)
@given(Batches)
def test_redaction_leaves_out_the_tokens_and_nothing_else(events: list[Event]) -> None:
    """Without `token_ids` no token is in the payload; every other field is as it was, and the events
    themselves are not changed.
    """
    before = [msgspec.to_builtins(event, enc_hook=list) for event in events]
    payload = Speller("sglang", 0, token_ids=False).spell(1.0, events)
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
    speller = Speller("sglang", 0)
    events: list[Event] = [AllBlocksCleared()]
    first = speller.spell(1.0, events)
    assert speller.spell(1.0, events) is first
    assert decode_batch(speller.spell(2.0, events)).batch.ts == 2.0
    assert decode_batch(speller.spell(2.0, [])).batch.events == []
    again = speller.spell(1.0, [BlockRemoved([1], GPU)])
    assert decode_batch(again).batch.events == [BlockRemoved([1], GPU)]
    with pytest.raises(ValueError, match=r"^ts: nan is not finite"):
        speller.spell(float("nan"), events)


@trials(100)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8))
def test_what_was_spelled_before_makes_no_difference(asked: list[tuple[int, int]]) -> None:
    """In whatever order batches are asked for, each is spelled as by a new speller."""
    batches: list[list[Event]] = [[], [AllBlocksCleared()], [BlockRemoved([1], GPU)]]
    speller = Speller("sglang", 0)
    for ts, which in asked:
        fresh = Speller("sglang", 0).spell(float(ts), batches[which])
        assert speller.spell(float(ts), batches[which]) == fresh


def test_what_cannot_be_spelled_raises_and_is_not_remembered() -> None:
    """A batch that breaks the contract is the caller's error, every time."""
    speller = Speller("sglang", 0)
    bad: list[Event] = [BlockRemoved([], GPU)]
    for _ in range(2):
        with pytest.raises(ValueError, match="at least one block"):
            speller.spell(1.0, bad)
    assert decode_batch(speller.spell(1.0, [])).batch.events == []
