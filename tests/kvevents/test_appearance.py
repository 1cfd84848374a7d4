"""kvevents.appearance: what a payload looks like, whoever wrote it, and whatever it is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEventBatch, StorageMedium
from kvevents.appearance import Appearance
from kvevents.codec import encode_batch

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
pack = msgspec.msgpack.encode


def stored(*hashes: int | bytes, **fields: Any) -> dict[str, Any]:
    told = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None}
    return told | {"token_ids": [1, 2], "block_size": 2, "medium": "GPU"} | fields


def seen(*events: object, ts: object = 1.5, rank: object = 0) -> Appearance:
    return Appearance.of(pack([ts, list(events), rank]))


def test_our_own() -> None:
    """Maps, signed hashes, our media, a float and an int."""
    events: list[Event] = [
        AllBlocksCleared(),
        BlockStored([-1, 2], None, [1, 2], 1, medium=GPU),
        BlockRemoved([3], CPU),
    ]
    found = Appearance.of(encode_batch(KVEventBatch(1.5, events, 3)))
    assert (found.events_as, found.hashes_as) == ("maps", "signed")
    assert found.media == {"GPU", "CPU_PINNED"}
    assert (found.block_sizes, found.tokens_left_out) == ({1}, False)
    assert (found.ts_as, found.dp_rank, found.ranks) == ("float seconds", "int", {3})
    assert found.types == {"AllBlocksCleared": 1, "BlockStored": 1, "BlockRemoved": 1}
    assert found.unknown_types == set()
    assert (found.payloads, found.unreadable) == (1, 0)


def test_arrays_of_older_engines() -> None:
    """By position: hashes, tokens, block size, medium; `dp_rank` may be missing."""
    told = ["BlockStored", [b"\1" * 32], None, [1] * 16, 16, None, "cpu"]
    found = Appearance.of(
        pack([1.5, [told, ["BlockRemoved", [b"\2" * 32], "cpu"], ["AllBlocksCleared"]]])
    )
    assert (found.events_as, found.hashes_as) == ("arrays", "bytes32")
    assert (found.media, found.block_sizes, found.dp_rank) == ({"cpu"}, {16}, "absent")
    assert found.without_medium == 0


def test_objects_of_a_store() -> None:
    """An `event_type`, milliseconds, no tokens."""
    told = {"event_type": "stored", "seq_hashes": [2**63], "medium": "cpu", "block_size": None}
    found = seen(told, ts=1_700_000_000_000, rank=None)
    assert (found.events_as, found.hashes_as) == ("objects", "unsigned")
    assert (found.ts_as, found.dp_rank) == ("int milliseconds", "nil")
    assert found.tokens_left_out


@pytest.mark.parametrize(
    ("hashes", "name"),
    [
        ([], "unknown"),
        ([1, 2**63 - 1], "ints"),
        ([1, -1], "signed"),
        ([1, 2**64 - 1], "unsigned"),
        ([-1, 2**63], "mixed"),
        ([b"12345678"], "bytes8"),
        ([b"12345678", 5], "mixed"),
        (["text"], "str"),
    ],
)
def test_forms_of_hashes(hashes: list[Any], name: str) -> None:
    """What can only be one of them is named; small ones may be either."""
    assert seen(stored(*hashes)).hashes_as == name


def test_what_is_unusual_is_said() -> None:
    """Unknown types, pairs of tokens, no medium, times as ints; in words as well."""
    found = seen(
        stored(1, token_ids=[[1, 2]], medium=None), {"type": "Zap"}, ["Zip"], ts=3, rank="x"
    )
    assert found.events_as == "mixed"
    assert (found.bigrams, found.without_medium) == (1, 1)
    assert found.unknown_types == {"Zap", "Zip"}
    assert (found.ts_as, found.dp_rank) == ("int seconds", "unknown")
    for word in ("events as mixed", "(none)", "pairs", "int seconds", "Zap Zip"):
        assert word in str(found)


def test_it_adds_up() -> None:
    """Several payloads make one appearance."""
    found = Appearance()
    assert str(found) == "nothing yet"
    found.add(b"\xc1")
    assert str(found) == "no batch"
    for medium in ("GPU", "DISK"):
        found.add(pack([1.5, [stored(1, medium=medium)], 0]))
    found.add(pack([1.5, [], None]))
    assert (found.payloads, found.unreadable) == (4, 1)
    assert (found.media, found.types["BlockStored"]) == ({"GPU", "DISK"}, 2)
    assert found.dp_rank == "mixed"


def test_it_stays_small() -> None:
    """A stranger's inventions are not kept without bound, and none of them at length."""
    found = Appearance()
    for number in range(1000):
        event = stored(b"\0" * number, medium=f"{number}" * 100, block_size=number)
        found.add(pack([1.5, [event, {"type": f"{number}" * 100}], number]))
    for kept in (found.media, found.types, found.block_sizes, found.ranks, found.hash_widths):
        assert len(kept) <= 33
    assert max(map(len, found.media | set(found.types))) <= 64


def test_a_crowd_of_what_can_be_no_event_is_not_looked_at() -> None:
    """Each element would cost a hundred times its byte: a megabyte of them stays one."""
    crowd = b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\xc0" * (1 << 20)
    found = Appearance()
    tracemalloc.start()
    try:
        found.add(b"\x93" + pack(1.5) + crowd + b"\0")
        found.add(crowd)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.unreadable == 2
    assert peak < 16 << 20


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(list(stored(1))), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    st.binary()
    | anything.map(pack)
    | st.lists(anything, max_size=3).map(lambda e: pack([1.0, e, 0]))
)
def test_nothing_is_too_strange(payload: bytes) -> None:
    """Any bytes at all have an appearance, and it can be said."""
    found = Appearance.of(payload)
    assert found.payloads == 1
    assert str(found)
    assert found.unknown_types.isdisjoint({"BlockStored"})
