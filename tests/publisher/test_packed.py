"""publisher.packed: what is packed is sound and is read back; anything else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kvevents.errors import KVEventsError
from kvevents.tokens import TokenIds, pack_tokens
from publisher.packed import load_events, pack_plain, save_events, unpack_plain

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
    """With the payload that the codec would have made, and tokens as lists nowhere."""
    body = pack_plain(batch)
    assert body is not None
    payload, read = unpack_plain(body)
    assert payload == encode_batch(batch)
    assert read == batch == decode_batch(payload).batch
    stored = [event for event in read.events if isinstance(event, BlockStored)]
    assert all(type(event.token_ids) is TokenIds for event in stored)


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
    body = pack_plain(batch)
    if body is not None:
        check_batch(batch)
        payload, read = unpack_plain(body)
        assert read == decode_batch(encode_batch(batch)).batch
        assert payload in (None, encode_batch(batch))


@pytest.mark.parametrize("tokens", [[True, 2], [1, False], [0, True], [2**32, 1], [1, 1.0]])
def test_what_only_looks_like_a_token_is_not_packed(tokens: list[Any]) -> None:
    """A bool packs as the int that it equals, and is told as a bool."""
    event = BlockStored([1], None, tokens, 2, None, StorageMedium.GPU)
    assert pack_plain(KVEventBatch(1.0, [event], 0)) is None


def test_small_tokens_are_tokens() -> None:
    event = BlockStored([1], None, [0, 1, 255, 256], 4, None, StorageMedium.GPU)
    assert pack_plain(KVEventBatch(1.0, [event], 0)) is not None


def test_an_event_that_is_odd_costs_itself_alone() -> None:
    """A removal's locality is looked at by nobody before it is read."""
    odd = BlockRemoved([1], StorageMedium.GPU, locality=3)  # type: ignore[arg-type]
    good: list[Event] = [AllBlocksCleared()]
    body = pack_plain(KVEventBatch(1.0, [odd, *good], 0))
    assert body is not None
    assert unpack_plain(body) == (None, KVEventBatch(1.0, good, 0))


@given(Batches, st.data())
def test_a_body_that_is_none_is_refused(batch: KVEventBatch, data: st.DataObject) -> None:
    """Bytes cut off, put in or changed: a batch or an error of ours, and tokens that are there."""
    body = bytearray(pack_plain(batch) or b"")
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        _, read = unpack_plain(bytes(body))
    except KVEventsError:
        return
    for event in read.events:
        assert not isinstance(event, BlockStored) or len(event.token_ids) >= 0


@pytest.mark.parametrize("length", [0, 1, 15, 17, 32])
def test_tokens_that_are_not_those_of_the_events_are_refused(length: int) -> None:
    """Or an event would be told with another's."""
    events: list[Event] = [BlockStored([1], None, [1, 2, 3, 4], 4, None, StorageMedium.GPU)]
    payload = encode_batch(KVEventBatch(1.0, events, 0))
    packed = pack_tokens([1, 2, 3, 4])
    assert unpack_plain(msgspec.msgpack.encode((payload, packed)))[1].events == events
    with pytest.raises(KVEventsError, match="its tokens are not those of its events"):
        unpack_plain(msgspec.msgpack.encode((payload, (packed * 2)[:length])))


@given(st.lists(stores(), max_size=4))
def test_what_is_kept_is_taken_up_again(events: list[BlockStored]) -> None:
    """All that an index tells of its blocks."""
    for event in events:
        event.token_ids = TokenIds(pack_tokens(event.token_ids))
        event.group_idx = event.kv_cache_spec_kind = None
    assert load_events(save_events(events)) == events


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x01", b"\x80"])
def test_what_was_not_kept_is_not_taken_up(data: bytes) -> None:
    with pytest.raises(KVEventsError, match=r"^saved events: "):
        load_events(data)
