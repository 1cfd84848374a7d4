"""kvevents.columns: a batch in columns is told and spelled as its events are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import BlockStored, Event, StorageMedium
from kvevents.columns import Columns
from kvevents.dialect import NAMESPACES, PRESETS, Dialect
from kvevents.hashing import BlockHash
from kvevents.speller import Speller
from kvevents.tokens import pack_tokens
from kvevents.view import View

I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
FEW = 6
"""Hashes, so that events speak of the same blocks."""

Spelled = {
    name: one.dialect for name, one in PRESETS.items() if one.dialect.event_form != "mooncake"
}
Media = st.lists(st.sampled_from("ABCD"), min_size=4, max_size=4).map(
    lambda texts: tuple(zip(StorageMedium, texts, strict=True))
)
Dialects = st.sampled_from(list(Spelled.values())) | st.builds(
    Dialect,
    event_form=st.sampled_from(["map", "vllm", "array"]),
    hash_form=st.sampled_from(["i64", "u64", "bytes"]),
    media=Media,
    namespaces=st.sets(st.sampled_from(NAMESPACES)).map(lambda names: tuple(sorted(names))),
    blocks_per_event=st.none() | st.integers(1, 2),
    token_ids=st.booleans(),
)


@st.composite
def columns(draw: st.DrawFn, hashes: st.SearchStrategy[int] = I64) -> Columns:
    counts = draw(st.lists(st.sampled_from([1, 1, 2, 3, -1, -2]), min_size=1, max_size=4))
    size = draw(st.integers(1, 3))
    stored = sum(count for count in counts if count > 0)
    names = [draw(hashes) for count in counts for _ in range(abs(count))]
    tokens = draw(st.lists(U32, min_size=stored * size, max_size=stored * size))
    behind = st.none() | hashes.map(BlockHash)
    return Columns(
        [BlockHash(name) for name in names],
        [None if count < 0 else draw(behind) for count in counts],
        counts,
        pack_tokens(tokens),
        size,
        draw(st.sampled_from(StorageMedium)),
    )


@trials(300)
@given(columns(), Dialects, st.integers(0, 99))
def test_columns_are_spelled_as_their_events(batch: Columns, dialect: Dialect, rank: int) -> None:
    """Byte for byte, in every dialect that tells of their medium."""
    if batch.medium not in dict(dialect.media):
        return
    spelled = Speller(dialect, rank).spell(1.5, batch)
    assert spelled == Speller(dialect, rank).spell(1.5, list(batch.events))


@pytest.mark.parametrize("name", Spelled)
def test_no_event_is_made_to_spell_columns(name: str) -> None:
    """Where the dialect tells of the device and cuts nothing: they would be kept with the columns."""
    dialect = Spelled[name]
    one, two = BlockHash(1), BlockHash(2)
    batch = Columns([one, two], [None, one], [1, -1], pack_tokens([1, 2]), 2, StorageMedium.GPU)
    told = View(dialect).apply(batch)
    if StorageMedium.GPU not in dict(dialect.media) or dialect.blocks_per_event is not None:
        return
    assert told is batch
    Speller(dialect, 0).spell(1.5, told)
    assert batch._events is None


Batches = st.lists(
    st.one_of(
        columns(st.integers(0, FEW)),
        st.builds(
            lambda name, parent, salt, medium: [
                BlockStored([name], parent, [1], 1, medium=medium, cache_salt=salt)
            ],
            st.integers(0, FEW),
            st.none() | st.integers(0, FEW),
            st.none() | st.just("salt"),
            st.sampled_from(StorageMedium),
        ),
    ),
    max_size=8,
)


@trials(300)
@given(Batches, Dialects)
def test_a_view_tells_of_columns_what_it_tells_of_their_events(
    batches: list[Sequence[Event]], dialect: Dialect
) -> None:
    """Whatever it was told before, of blocks that it leaves out among others."""
    one, other = View(dialect), View(dialect)
    for batch in batches:
        assert list(one.apply(batch)) == list(other.apply(list(batch)))
        assert one.left_out == other.left_out
