"""publisher.stream.log: L1 to L3, and the join that a subscriber makes of them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import payload_of
from publisher_story import BLOCK_SIZE, Steps, Story, facts_of, steps

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    GapTracker,
    StorageMedium,
    decode_batch,
)
from kvevents.frames import JOIN, MAX_SEQ
from kvevents.gaps import Ask, Deliver
from publisher.stream.log import RetainedLog
from publisher.stream.weight import weight


def believing(payloads: Sequence[bytes], index: BlockIndex | None = None) -> BlockIndex:
    """An index after applying what payloads say, as read off the wire."""
    index = BlockIndex() if index is None else index
    for payload in payloads:
        decoded = decode_batch(payload)
        assert decoded.skipped == ()
        index.apply(decoded.batch.events)
    return index


def junk() -> BlockIndex:
    """An index that believes what was never so: names that clash, parents that are gone."""
    index = BlockIndex()
    for medium in StorageMedium:
        index.apply(
            [BlockStored([n, n + 1000], None, [9] * 4, BLOCK_SIZE, medium=medium) for n in range(9)]
        )
    return index


def new_log(max_batches: int, max_bytes: int = 1 << 20, snapshot_blocks: int = 2) -> RetainedLog:
    return RetainedLog(
        lambda: lambda events: payload_of(*events),
        max_batches=max_batches,
        max_bytes=max_bytes,
        snapshot_blocks=snapshot_blocks,
    )


@settings(max_examples=250)
@given(
    told=steps,
    later=steps,
    max_batches=st.integers(1, 8),
    max_bytes=st.sampled_from((1, 2000, 10_000, 1 << 20)),
    snapshot_blocks=st.integers(1, 4),
)
def test_a_replay_from_any_start_gives_the_state_now(
    told: Steps, later: Steps, max_batches: int, max_bytes: int, snapshot_blocks: int
) -> None:
    """L1, L2, L3: whatever the log has forgotten, from every start and from JOIN, applied to what was
    known before that start and, when it begins with a snapshot, to any junk. What is appended later
    changes no answer.
    """
    log, story = new_log(max_batches, max_bytes, snapshot_blocks), Story()
    payloads: list[bytes] = []
    weights: list[int] = []
    indexes = [BlockIndex()]

    def append(batch: list[tuple[int, int, int]]) -> None:
        events = [event for step in batch for event in story.tell(*step)]
        payload = payload_of(*events)
        assert log.append(payload, events) == len(payloads)  # L1
        payloads.append(payload)
        weights.append(weight(payload, events))
        indexes.append(believing([payload], indexes[-1].fork()))
        kept = weights[log.oldest_seq :]
        assert log.num_bytes == sum(kept)
        assert 1 <= len(kept) <= max_batches  # L2
        assert log.num_bytes <= max_bytes or len(kept) == 1
        wider = [*weights[log.oldest_seq - 1 : log.oldest_seq], *kept]
        assert len(wider) == len(kept) or len(wider) > max_batches or sum(wider) > max_bytes

    for batch in told:
        append(batch)
    now, end, oldest, facts = indexes[-1], log.next_seq, log.oldest_seq, story.facts
    assert facts_of(now) == facts
    base = indexes[oldest]
    replays = [(start, log.replay(start)) for start in (*range(end + 3), JOIN)]
    for batch in later:
        append(batch)

    for start, replay in replays:
        answers = list(replay)
        seqs, texts = [seq for seq, _ in answers], [payload for _, payload in answers]
        if start == JOIN:
            start = seqs[0] if seqs else end  # noqa: PLW2901
            assert start <= oldest
            needed = -(-len(base) // snapshot_blocks) or 1
            assert start == (max(0, oldest - needed) if oldest else 0)
        assert seqs == list(range(start, end))  # contiguous, to the newest
        if start >= oldest:
            assert texts == payloads[start:end]
        else:
            first = decode_batch(texts[0]).batch.events
            assert isinstance(first[0], AllBlocksCleared)
            if (oldest - start) * snapshot_blocks >= len(base):
                assert texts[oldest - start :] == payloads[oldest:end]
            assert facts_of(believing(texts, junk())) == facts
        known = indexes[min(start, end)].fork()
        assert facts_of(believing(texts, known)) == facts
        assert known.resident == now.resident


@pytest.mark.parametrize("start", [2, 3, MAX_SEQ - 1, MAX_SEQ, MAX_SEQ + 1, JOIN - 1, 2**64 - 1])
def test_a_start_beyond_the_log_is_answered_with_nothing(start: int) -> None:
    """Any 8 bytes can be asked for; those that were never published have no answer, and no error."""
    log = new_log(1)
    for _ in range(2):
        log.append(payload_of(), [])
    assert list(log.replay(start)) == []


def test_a_snapshot_keeps_no_more_than_the_log() -> None:
    """L2, L4: what has fallen off since it was told counts by its weight too, not by frames alone."""
    log, story = new_log(10_000, max_bytes=100_000), Story()
    for _ in range(50):
        log.append(b"x" * 10_000, story.tell(0, 0, 1))
    assert list(log.replay(JOIN))
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(500):
            log.append(bytes(10_000), [])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000


def test_an_empty_log_answers_nothing() -> None:
    """Before anything was published there is nothing to replay, from 0 or from JOIN."""
    log = new_log(5)
    assert (log.next_seq, log.oldest_seq, log.num_bytes) == (0, 0, 0)
    assert list(log.replay(0)) == list(log.replay(JOIN)) == []


def test_one_frame_larger_than_the_bound_is_kept() -> None:
    """L2: the newest frame is always there to replay, however large; it alone."""
    log = new_log(10, max_bytes=10)
    for seq in range(3):
        log.append(b"x" * (100 + seq), [])
    assert (log.oldest_seq, log.num_bytes) == (2, weight(b"x" * 102, []))
    assert list(log.replay(2)) == [(2, b"x" * 102)]


def test_a_state_too_large_for_the_seqs_before_the_log_still_fits() -> None:
    """L3: with one seq to put a large state in, the batch gets large; nothing is left out."""
    log, story = new_log(1, snapshot_blocks=1), Story()
    for _ in range(2):
        events = story.tell(0, 0, 50)
        log.append(payload_of(*events), events)
    answers = dict(log.replay(0))
    assert sorted(answers) == [0, 1]
    assert facts_of(believing([answers[0], answers[1]])) == story.facts


def test_an_empty_state_before_the_log_is_a_clear() -> None:
    """L3: when all was removed again, the answer still begins by clearing what the asker believes."""
    log = new_log(1)
    stored = BlockStored([1], None, [1, 2], BLOCK_SIZE, medium=StorageMedium.GPU)
    for event in (stored, BlockRemoved([1], StorageMedium.GPU), AllBlocksCleared()):
        log.append(payload_of(event), [event])
    answers = [payload for _, payload in log.replay(1)]
    assert decode_batch(answers[0]).batch.events == [AllBlocksCleared()]
    assert facts_of(believing(answers, junk())) == {}


def test_a_join_carries_the_real_last_seq() -> None:
    """Case 66: after the snapshot a subscriber takes the next live batch without another recovery."""
    log = new_log(2, snapshot_blocks=4)
    for seq in range(50):
        event = BlockStored([seq], None, [seq, 0], BLOCK_SIZE, medium=StorageMedium.CPU)
        log.append(payload_of(event), [event])
    tracker = GapTracker[bytes](can_replay=True)
    assert tracker.start() == [Ask(JOIN)]
    for seq, payload in log.replay(JOIN):
        assert tracker.replayed(seq, payload) == [Deliver(seq, payload, replayed=True)]
    assert tracker.end() == []
    assert tracker.expected == log.next_seq == 50
    assert tracker.live(50, b"next") == [Deliver(50, b"next", replayed=False)]
    assert not tracker.recovering
