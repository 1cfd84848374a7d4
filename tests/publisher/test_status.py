"""What a sidecar knows of itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_status_rig import EVENTS, full_status

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.columns import Columns
from kvevents.hashing import BlockHash
from kvevents.tokens import pack_tokens
from publisher.stream.status import Books, Buckets, EventCounts, is_stuck


def test_the_books_balance_when_nothing_has_vanished() -> None:
    """offered == published + refused + pending, whichever way a message was refused (89)."""
    books = Books(offered=10, published=4, missed=1, skipped=2, unreadable=1, pending=2)
    assert books.refused == 4
    assert books.balanced


@pytest.mark.parametrize(
    "what", ["offered", "published", "missed", "skipped", "unreadable", "pending"]
)
def test_a_message_that_vanished_is_seen(what: str) -> None:
    """The books do not balance when any one of their counts is one off (89)."""
    counts = {
        "offered": 5,
        "published": 1,
        "missed": 1,
        "skipped": 1,
        "unreadable": 1,
        "pending": 1,
    }
    assert Books(**counts).balanced
    assert not Books(**{**counts, what: counts[what] + 1}).balanced


def test_books_are_replaced_and_never_changed() -> None:
    """A reader in another thread has one moment's numbers: they cannot change under it."""
    with pytest.raises(AttributeError):
        Books().offered = 1  # type: ignore[misc]


def test_events_and_their_blocks_are_counted_by_kind_and_medium() -> None:
    """An event counts once, its blocks each; a removal that names no medium has a key of its own."""
    counts = EventCounts()
    counts.add(EVENTS)
    counts.add(EVENTS)
    assert {key: count for key, count in counts.events.items() if count} == {
        ("cleared", ""): 2,
        ("stored", "GPU"): 2,
        ("stored", "DISK"): 2,
        ("removed", "GPU"): 2,
        ("removed", ""): 2,
    }
    assert {key: count for key, count in counts.blocks.items() if count} == {
        ("stored", "GPU"): 4,
        ("stored", "DISK"): 2,
        ("removed", "GPU"): 4,
        ("removed", ""): 2,
    }
    assert counts.num_events == 10


media = st.sampled_from([None, *StorageMedium])
events = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=st.lists(st.integers(), max_size=3),
        parent_block_hash=st.none(),
        token_ids=st.just([]),
        block_size=st.just(1),
        medium=media,
    ),
    st.builds(BlockRemoved, block_hashes=st.lists(st.integers(), max_size=3), medium=media),
    st.builds(AllBlocksCleared),
)


@given(st.lists(events))
def test_no_event_makes_a_new_count(told: list[Event]) -> None:
    """Whatever comes, the keys stay the same: a peer makes no label, no dict grows under a reader."""
    counts, untouched = EventCounts(), EventCounts()
    counts.add(told)
    assert counts.num_events == len(told)
    assert list(counts.events) == list(untouched.events)
    assert list(counts.blocks) == list(untouched.blocks)


@given(st.lists(st.floats(0, 100)))
def test_a_duration_is_counted_in_the_first_bucket_that_holds_it(seconds: list[float]) -> None:
    """Bounds are inclusive, as Prometheus wants them, and the sum is that of the durations."""
    buckets = Buckets()
    for one in seconds:
        buckets.observe(one)
    edges = [-1.0, *Buckets.BOUNDS, float("inf")]
    expected = [
        sum(low < one <= high for one in seconds) for low, high in itertools.pairwise(edges)
    ]
    assert buckets.counts == expected
    assert buckets.seconds == pytest.approx(sum(seconds))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), float("-inf")])
def test_an_impossible_duration_spoils_nothing(seconds: float) -> None:
    """A clock set back, or a time that is no number, counts as no time; the sum never falls."""
    buckets = Buckets()
    buckets.observe(0.5)
    buckets.observe(seconds)
    assert buckets.seconds == 0.5
    assert sum(buckets.counts) == 2


def test_a_loop_that_stopped_turning_is_stuck() -> None:
    """Not one that never began, and not one that turned less than half a minute ago."""
    status = full_status()
    status.turned_at = 1000.0
    assert not is_stuck(status, 1029.0)
    assert is_stuck(status, 1031.0)
    status.turned_at = 0.0
    assert not is_stuck(status, 1031.0)


def test_columns_count_as_their_events_do() -> None:
    """Stores alone, which are not looked at one by one, and those with a removal among them."""
    one, two, three = BlockHash(1), BlockHash(2), BlockHash(3)
    stores = Columns(
        [one, two, three], [None, None], [2, 1], pack_tokens([1, 2, 3]), 1, StorageMedium.CPU
    )
    mixed = Columns([one, one], [None, None], [1, -1], pack_tokens([1]), 1, StorageMedium.CPU)
    for columns, blocks in ((stores, 3), (mixed, 1)):
        at_once, one_by_one = EventCounts(), EventCounts()
        at_once.add(columns)
        one_by_one.add(columns.events)
        assert at_once.events == one_by_one.events
        assert at_once.blocks == one_by_one.blocks
        assert at_once.blocks["stored", StorageMedium.CPU.value] == blocks
