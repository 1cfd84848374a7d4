"""kvevents.records: what the link carries is read back, or refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import BASE, KVEventsError, Namespace, StorageMedium
from kvevents.records import (
    BlockId,
    Clear,
    Record,
    Remove,
    StoreKnown,
    StoreNew,
    decode_records,
    encode_records,
)

pack = msgspec.msgpack.encode
GPU = StorageMedium.GPU
Media = st.sampled_from(StorageMedium)
Ids = st.integers(0, 2**63 - 1).map(BlockId)
Counts = st.integers(1, 2**31)
Names = st.none() | st.text(max_size=3)
Records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        StoreNew,
        Media,
        Ids,
        Counts,
        st.none() | Ids,
        st.none() | st.builds(Namespace, Names, Names, Names),
        st.binary(max_size=16),
    ),
    st.builds(StoreKnown, Media, Ids, Counts),
    st.builds(Remove, Media, st.lists(st.tuples(Ids, Counts), max_size=3)),
    st.just(Clear()),
)


@trials(150)
@given(st.lists(Records, max_size=5))
def test_records_travel(records: list[Record]) -> None:
    """Decoding what was encoded gives equal records, in order, from bytes and from a memoryview."""
    data = encode_records(records)
    assert decode_records(data) == records
    assert decode_records(memoryview(data)) == records


def test_records_are_small() -> None:
    """A record costs the same for one block and for a thousand, tokens apart."""
    one, many = (len(encode_records([StoreKnown(GPU, BlockId(9), n)])) for n in (1, 100))
    assert one == many < 10


BAD: dict[str, bytes] = {
    "nothing": b"",
    "no array": pack(5),
    "truncated": encode_records([StoreKnown(GPU, BlockId(1), 1)])[:-1],
    "trailing": encode_records([]) + b"\x00",
    "unknown tag": pack([[9, "GPU", 1, 1]]),
    "no tag": pack([[]]),
    "few fields": pack([[2, "GPU", 1]]),
    "unknown medium": pack([[2, "HBM3", 1, 1]]),
    "text id": pack([[2, "GPU", "1", 1]]),
    "float count": pack([[2, "GPU", 1, 1.5]]),
    "nil ranges": pack([[3, "GPU", None]]),
    "long range": pack([[3, "GPU", [[1, 2, 3]]]]),
    "text tokens": pack([[1, "GPU", 0, 1, None, None, "abcd"]]),
    "int lora_name": pack([[1, "GPU", 0, 1, None, [7, None, None], b"abcd"]]),
    "no UTF-8": pack([[2, "~", 1, 1]]).replace(b"~", b"\xff"),
    "pickle": b"\x80\x04N.",
    "deep": b"\x91\x92\x04" + b"\x91" * 100_000 + b"\x01",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    """Bytes that are no records raise KVEventsError."""
    with pytest.raises(KVEventsError, match=r"^records: ."):
        decode_records(data)


def test_an_empty_name_is_no_name_on_the_link_too() -> None:
    """A namespace of empty strings arrives as the base."""
    (record,) = decode_records(pack([[1, "GPU", 0, 1, None, ["", "", ""], b"abcd"]]))
    assert isinstance(record, StoreNew)
    assert record.namespace == BASE


Values = st.recursive(
    st.none() | st.integers(-9, 9) | st.sampled_from(["GPU", "x", b"abcd"]) | st.floats(),
    lambda inner: st.lists(inner, max_size=7),
    max_leaves=20,
)


@trials(300)
@given(st.binary(max_size=40), Values)
def test_arbitrary_bytes(garbage: bytes, value: Any) -> None:
    """A stranger's bytes raise KVEventsError or are records, nothing else."""
    for data in (garbage, pack(value), pack([[2, *value]]) if isinstance(value, list) else b""):
        try:
            assert isinstance(decode_records(data), list)
        except KVEventsError:
            continue
