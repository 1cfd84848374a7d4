"""publisher.link.packed: what is packed is sound and is read back; anything else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

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
from kvevents.codec import check_batch
from kvevents.columns import Columns
from kvevents.errors import KVEventsError
from kvevents.index import BlockIndex
from kvevents.tokens import TokenIds, pack_tokens
from publisher.link.messages import BATCH, COLUMNS, PACKED
from publisher.link.packed import (
    Unpacked,
    head_of,
    load_columns,
    load_events,
    pack_plain,
    save_columns,
    save_events,
    unpack,
)
from publisher.stream.foreign import ForeignState

BUFFER = bytearray()
"""Of all of them: what was packed before leaves nothing."""

I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
Texts = st.none() | st.text(max_size=5)
Media = st.sampled_from(StorageMedium)


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    hashes = draw(st.lists(I64, min_size=1, max_size=3))
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(U32, min_size=size * len(hashes), max_size=size * len(hashes)))
    keys = st.lists(st.none() | st.just(["a"]), min_size=len(hashes), max_size=len(hashes))
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=draw(st.none() | I64.filter(lambda one: one != hashes[0])),
        token_ids=TokenIds(pack_tokens(tokens)) if draw(st.booleans()) else tokens,
        block_size=size,
        lora_id=draw(st.none() | st.integers(0, 9)),
        medium=draw(Media),
        lora_name=draw(Texts),
        cache_salt=draw(Texts),
        session_id=draw(Texts),
        extra_key=draw(Texts),
        extra_keys=draw(st.none() | keys),
        group_idx=draw(st.none() | st.integers(0, 3)),
        kv_cache_spec_kind=draw(Texts),
    )


@st.composite
def plain_events(draw: st.DrawFn) -> Event:
    """Of few blocks, so that they meet; of one size and medium."""
    names = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    if draw(st.booleans()):
        return BlockRemoved(list(names), StorageMedium.CPU)
    parent = draw(st.none() | st.integers(0, 6).filter(lambda one: one != names[0]))
    tokens = [300 + name for name in names for _ in range(2)]
    return BlockStored(list(names), parent, tokens, 2, None, StorageMedium.CPU)


def packed_of(batch: KVEventBatch) -> tuple[bytes, int]:
    flags = pack_plain(batch, BUFFER)
    assert flags & (BATCH | PACKED) == BATCH | PACKED
    return bytes(BUFFER), flags


Removals = st.builds(BlockRemoved, st.lists(I64, min_size=1, max_size=3), Media)
Events = st.one_of(stores(), Removals, st.just(AllBlocksCleared()))
Batches = st.builds(
    KVEventBatch,
    st.floats(0, 2e9),
    st.lists(Events, max_size=4),
    st.integers(0, 7),
)


@given(Batches)
def test_what_is_packed_is_read_back(batch: KVEventBatch) -> None:
    """With the payload that the codec would have made, and tokens as lists nowhere; in place of a payload
    that names a group, the group.
    """
    body, flags = packed_of(batch)
    ts, events, rank, payload, group = unpack(body, flags)
    assert (ts, rank) == (batch.ts, batch.dp_rank)
    if group is None:
        assert payload == encode_batch(batch)
        assert list(events) == batch.events == decode_batch(payload).batch.events
    else:
        assert payload is None
        assert [in_group(event, group) for event in events] == list(map(without_keys, batch.events))
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert all(type(event.token_ids) is TokenIds for event in stored)


def in_group(event: Event, group: int | None) -> Event:
    assert not isinstance(event, AllBlocksCleared)
    return replace(event, group_idx=group)


def without_keys(event: Event) -> Event:
    """Keys left out that are none of any block."""
    if isinstance(event, BlockStored) and not any(event.extra_keys or ()):
        return replace(event, extra_keys=None)
    return event


@given(st.lists(plain_events(), min_size=1, max_size=5), st.integers(0, 2), st.booleans())
def test_events_of_one_group_are_in_columns(events: list[Event], group: int, keyed: bool) -> None:
    """As vLLM's are, whose stores list the keys of each block though there are none."""
    named = [in_group(event, group) for event in events]
    for event in named:
        if isinstance(event, BlockStored) and keyed:
            event.extra_keys = [None] * len(event.block_hashes)
    body, flags = packed_of(KVEventBatch(1.0, named, 0))
    assert flags & COLUMNS
    read = unpack(body, flags)
    assert (read.events, read.group, read.payload) == (events, group, None)


@given(st.lists(st.lists(plain_events(), min_size=1, max_size=4), max_size=6), st.data())
def test_a_group_in_columns_is_one_that_each_event_names(
    batches: list[list[Event]], data: st.DataObject
) -> None:
    """Of the groups that are told so, some the main one and some not, what comes out is the same."""
    at_once, one_by_one = ForeignState(2), ForeignState(2)
    for events in batches:
        group = data.draw(st.integers(0, 2))
        kind = data.draw(st.none() | st.just("full_attention"))
        named = [in_group(event, group) for event in events]
        if kind is not None and isinstance(named[0], BlockStored):
            named[0].kv_cache_spec_kind = kind
        body, flags = packed_of(KVEventBatch(1.0, named, 0))
        read = unpack(body, flags)
        told = at_once.apply(read.events, read.group)
        assert list(told) == list(one_by_one.apply(named))
        assert at_once.groups == one_by_one.groups
        assert at_once.counts == one_by_one.counts
        assert at_once.index.resident == one_by_one.index.resident


@given(Batches)
def test_what_is_kept_of_columns_says_all(batch: KVEventBatch) -> None:
    """But for the payload, which the events make anew."""
    body, flags = packed_of(batch)
    if flags & COLUMNS:
        assert unpack(head_of(body), flags) == unpack(body, flags)._replace(payload=None)


@given(st.lists(plain_events(), min_size=1, max_size=5))
def test_what_is_plain_is_in_columns(events: list[Event]) -> None:
    """And an index that takes the columns knows what one does that takes the events."""
    body, flags = packed_of(KVEventBatch(1.0, events, 0))
    assert flags & COLUMNS
    columns = unpack(body, flags).events
    assert type(columns) is Columns
    assert columns == events
    assert [columns[at] for at in range(len(columns))] == events
    at_once, one_by_one = BlockIndex(), BlockIndex()
    for _ in range(2):
        at_once.apply(columns)
        one_by_one.apply(events)
        assert at_once._blocks == one_by_one._blocks
        assert at_once.resident == one_by_one.resident
        assert at_once.oddities == one_by_one.oddities
        assert at_once.block_size == one_by_one.block_size


Odd: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.floats(), st.text(max_size=2), st.binary(max_size=2)),
    *(st.integers(-(2**65), 2**65), st.just([])),
    st.lists(st.integers(-1, 2**33) | st.booleans() | st.floats(), max_size=4),
)


@given(Batches, st.data())
def test_what_is_packed_may_be_sent(batch: KVEventBatch, data: st.DataObject) -> None:
    """Whatever is put in place of a field: never an exception, and nothing that the contract forbids."""
    at = data.draw(st.integers(-1, len(batch.events) - 1))
    target: Any = batch if at < 0 else batch.events[at]
    if fields := target.__struct_fields__:
        setattr(target, data.draw(st.sampled_from(fields)), data.draw(Odd))
    if flags := pack_plain(batch, BUFFER):
        check_batch(batch)
        read = unpack(bytes(BUFFER), flags)
        whole = decode_batch(encode_batch(batch)).batch.events
        if read.group is not None:
            whole = [in_group(without_keys(event), None) for event in whole]
        assert list(read.events) == whole
        assert read.payload in (None, encode_batch(batch))


@pytest.mark.parametrize("tokens", [[True, 2], [1, False], [0, True], [2**32, 1], [1, 1.0]])
def test_what_only_looks_like_a_token_is_not_packed(tokens: list[Any]) -> None:
    """A bool packs as the int that it equals, and is told as a bool."""
    event = BlockStored([1], None, tokens, 2, None, StorageMedium.GPU)
    assert not pack_plain(KVEventBatch(1.0, [event], 0), BUFFER)


def test_small_tokens_are_tokens() -> None:
    event = BlockStored([1], None, [0, 1, 255, 256], 4, None, StorageMedium.GPU)
    assert pack_plain(KVEventBatch(1.0, [event], 0), BUFFER)


def test_an_event_that_is_odd_costs_itself_alone() -> None:
    """A removal's locality is looked at by nobody before it is read."""
    odd = BlockRemoved([1], StorageMedium.GPU, locality=3)  # type: ignore[arg-type]
    good: list[Event] = [AllBlocksCleared()]
    body, flags = packed_of(KVEventBatch(1.0, [odd, *good], 0))
    assert unpack(body, flags) == Unpacked(1.0, good, 0, None)


@given(Batches, st.data())
def test_a_body_that_is_none_is_refused(batch: KVEventBatch, data: st.DataObject) -> None:
    """Bytes cut off, put in or changed: events or an error of ours."""
    packed, flags = packed_of(batch)
    body = bytearray(packed)
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for mask in (0, COLUMNS):
        try:
            read = unpack(bytes(body), flags ^ mask)
        except KVEventsError:
            continue
        state = ForeignState(2)
        told = state.apply(read.events, read.group)
        check_batch(KVEventBatch(1.0, list(told), 0))
    head_of(bytes(body))


HEAD = ([1, 2, 1], [None, None], [2, -1], 2, "GPU", 1.0, 0)
CHANGES: dict[str, tuple[int, Any]] = {
    "too few tokens": (0, pack_tokens([1, 2, 3])),
    "too many tokens": (0, pack_tokens([1, 2, 3, 4, 5])),
    "half a token": (0, pack_tokens([1, 2, 3, 4])[:-1]),
    "a hash too few": (1, [1, 2]),
    "a hash above all": (1, [1, 2, 2**63]),
    "a parent too few": (2, [None]),
    "no blocks": (3, [2, -1, 0]),
    "nothing at all": (3, []),
    "another count": (3, [1, -1]),
    "no block size": (4, 0),
    "a block size below 0": (4, -2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_columns_that_do_not_fit_together_are_refused(change: tuple[int, Any]) -> None:
    """Or a block would be told with another's tokens."""
    good = [pack_tokens([1, 2, 3, 4]), *HEAD]
    assert len(unpack(body_of(good), BATCH | PACKED | COLUMNS).events) == 2
    at, value = change
    good[at] = value
    with pytest.raises(KVEventsError, match=r"^packed batch: "):
        unpack(body_of(good), BATCH | PACKED | COLUMNS)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 32])
def test_tokens_that_are_not_those_of_the_events_are_refused(length: int) -> None:
    """Or an event would be told with another's."""
    events: list[Event] = [BlockStored([1], None, [1, 2, 3, 4], 4, None, StorageMedium.GPU)]
    payload = encode_batch(KVEventBatch(1.0, events, 0))
    packed = pack_tokens([1, 2, 3, 4])
    assert unpack(body_of([packed], payload), BATCH | PACKED).events == events
    with pytest.raises(KVEventsError, match="its tokens are not those of its events"):
        unpack(body_of([(packed * 2)[:length]], payload), BATCH | PACKED)


def body_of(head: list[Any], payload: bytes = b"") -> bytes:
    data = msgspec.msgpack.encode(head)
    return len(data).to_bytes(4, "little") + data + payload


@given(st.lists(stores(), max_size=4))
def test_what_is_kept_is_taken_up_again(events: list[BlockStored]) -> None:
    """All that an index tells of its blocks."""
    for event in events:
        event.token_ids = TokenIds(pack_tokens(event.token_ids))
        event.group_idx = event.kv_cache_spec_kind = None
    assert load_events(save_events(events)) == events


@given(st.lists(plain_events() | stores(), max_size=8))
def test_pieces_of_an_index_make_it_again(events: list[Event]) -> None:
    """As they are kept and read back; in the order in which its blocks came."""
    before, after = BlockIndex(), BlockIndex()
    before.apply(events)
    for piece in before.pieces(3):
        if isinstance(piece, Columns):
            assert len(piece) <= 3
            after.apply(load_columns(save_columns(piece)))
        else:
            after.apply(load_events(save_events(piece)))
    assert after._blocks == before._blocks
    assert list(after._blocks) == list(before._blocks)
    assert after.block_size == before.block_size or not after._blocks


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x01", b"\x80", b"\x91\xc4\x00"])
def test_what_was_not_kept_is_not_taken_up(data: bytes) -> None:
    with pytest.raises(KVEventsError, match=r"^saved columns: "):
        load_columns(data)
    with pytest.raises(KVEventsError, match=r"^saved events: "):
        load_events(data)
