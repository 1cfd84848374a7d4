"""publisher.stream.replica: R1 to R3, for sound workers and for arbitrary inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core_rig import BLOCK_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_inputs import any_inputs, pack, sound_inputs, story

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventsError,
    StorageMedium,
)
from kvevents.codec import decode_batch, encode_batch
from kvevents.dialect import Dialect
from kvevents.events import KVEventBatch
from kvevents.index import Oddities
from kvevents.records import Clear
from kvevents.speller import Speller
from publisher.config.sidecar_config import WorkerInfo
from publisher.link.messages import BATCH, FRESH, LOST
from publisher.link.packed import pack_plain
from publisher.stream.input import Input
from publisher.stream.replica import Replica, Told

WORKER = WorkerInfo(block_size=BLOCK_SIZE)
CLEAR: list[Event] = [AllBlocksCleared()]
FEWER = settings(max_examples=max(60, settings().max_examples // 2))


def applied(inputs: list[Input]) -> tuple[Replica, list[Told | None]]:
    replica = Replica(WORKER)
    return replica, [replica.apply(one) for one in inputs]


def reloaded(replica: Replica) -> Replica:
    """A later process's, from what a checkpoint of this one says."""
    copy = Replica(WORKER)
    copy.load(
        list(replica.freeze().saved()),
        expected=replica.expected,
        in_step=replica.in_step,
        tells_batches=replica.tells_batches,
        last_batch=replica.last_batch,
        ts=replica.ts,
    )
    return copy


def wire(told: Told | None) -> bytes | None:
    """As bytes: what a subscriber could tell apart, NaN and all."""
    return None if told is None else Speller(Dialect(), 0).spell(told.ts, told.events)


def view(events: Sequence[Event], index: BlockIndex | None = None) -> BlockIndex:
    index = BlockIndex() if index is None else index
    index.apply(events)
    return index


def snapshot(replica: Replica, blocks_per_event: int = 3) -> list[Event]:
    return [event for events in replica.freeze().snapshot(blocks_per_event) for event in events]


# --------------------------------------------------------------------------------------- R1, R2


def test_the_events_are_what_the_worker_holds() -> None:
    """A router's view is the truth, of a worker's records as of an engine's own events."""
    for foreign in (False, True):
        worker = story(7, 300, foreign=foreign)
        index = BlockIndex()
        replica = Replica(WORKER)
        for message in worker.messages:
            told = replica.apply(message)
            assert told is not None
            assert told.ts == float(message.number)
            index.apply(told.events)
        assert index.resident == worker.truth
        assert index.oddities == Oddities()
        counts = {medium: len(held) for medium, held in worker.truth.items()}
        assert {medium: replica.count(medium) for medium in StorageMedium} == counts
        assert (replica.counts.applied, replica.expected) == (300, 300)
        assert replica.tells_batches == foreign


def test_a_missing_number_ends_it_until_the_retelling() -> None:
    """R1: from the gap on nothing is told and nothing changes; the re-telling is told whole."""
    worker = story(1, 20)
    replica = Replica(WORKER)
    for message in worker.messages:
        replica.apply(message)
    before = snapshot(replica)
    worker.messages = []
    worker.step(refused=True)
    worker.step()
    worker.step()
    for message in worker.messages:
        assert replica.apply(message) is None
        assert not replica.in_step
        assert snapshot(replica) == before
    assert replica.last_loss == "the ring was full"
    assert (replica.counts.resyncs, replica.counts.skipped, replica.counts.missed) == (1, 2, 1)
    worker.retell()
    told = replica.apply(worker.messages[-1])
    assert told is not None
    assert told.events[0] == AllBlocksCleared()
    assert view(told.events).resident == worker.truth
    assert replica.in_step


def test_a_number_again_ends_it_too() -> None:
    """R1: records that come twice would be applied twice."""
    worker = story(1, 5)
    replica, _ = applied(worker.messages)
    assert replica.apply(worker.messages[-1]) is None
    assert not replica.in_step
    assert (replica.counts.unreadable, replica.counts.skipped) == (0, 1)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", pack((1.0, [[9]])), pack((1.0, [[2, "GPU", 99, 1]]))]
)
def test_a_record_that_cannot_be_read_ends_it(body: bytes) -> None:
    """R1: bytes that are no records, or records that cannot be, alike; the re-telling mends it."""
    worker = story(2, 10)
    replica, _ = applied([*worker.messages, Input(10, 0, body)])
    assert not replica.in_step
    assert replica.last_loss
    assert (replica.counts.unreadable, replica.counts.resyncs) == (1, 1)
    assert replica.apply(Input(11, FRESH, body)) is None, "nor does a re-telling that is unreadable"
    assert replica.counts.resyncs == 2
    worker.number = 12
    worker.retell()
    told = replica.apply(worker.messages[-1])
    assert told is not None
    assert view(told.events).resident == worker.truth


def test_lost_is_a_loss_once() -> None:
    """R1: what is said to be lost ends it, with the reason; more of it changes nothing more."""
    worker = story(3, 4)
    replica, _ = applied(worker.messages)
    assert replica.apply(Input(9, LOST, b"why \xff")) is None
    assert replica.apply(Input(12, LOST, b"again")) is None
    assert (replica.in_step, replica.expected, replica.counts.missed) == (False, 12, 8)
    assert replica.last_loss.startswith("why ")
    assert replica.counts.resyncs == 1


@pytest.mark.parametrize("number", [3, 7, 5])
def test_a_batch_that_does_not_follow_begins_anew(number: int) -> None:
    """R2: one that is missing, one that came before, or a FRESH one: cleared first, then what it says."""
    worker = story(4, 5, foreign=True)
    replica, _ = applied(worker.messages)
    later = story(5, 1, foreign=True).messages[0]
    flags = BATCH | (FRESH if number == 5 else 0)
    told = replica.apply(Input(number, flags, later.body))
    assert told is not None
    assert told.events == [*CLEAR, *decode_batch(later.body).batch.events]
    assert view(snapshot(replica)).resident == view(told.events).resident
    assert (replica.in_step, replica.expected) == (True, number + 1)


def test_a_batch_that_cannot_be_read_clears() -> None:
    """R2: what it said is unknown, so nothing is held any more; the next is applied to that."""
    worker = story(4, 5, foreign=True)
    replica, _ = applied(worker.messages)
    assert replica.apply(Input(5, BATCH, b"\xc1")) == Told(4.0, CLEAR)
    assert snapshot(replica) == []
    assert replica.in_step
    assert replica.apply(Input(9, LOST, b"gone")) == Told(4.0, CLEAR)
    assert (replica.last_loss, replica.expected) == ("gone", 9)


def test_a_batch_behind_records_that_were_lost_begins_anew() -> None:
    """R1, R2: though its number is the next, what the records had told is not believed any more."""
    worker = story(2, 10)
    replica, _ = applied([*worker.messages, Input(10, 0, b"\xff")])
    assert snapshot(replica) != []
    later = story(5, 1, foreign=True).messages[0]
    told = replica.apply(Input(11, BATCH, later.body))
    assert told is not None
    assert told.events == [*CLEAR, *decode_batch(later.body).batch.events]
    assert view(snapshot(replica)).resident == view(told.events).resident


@pytest.mark.parametrize(("rank", "as_it_is"), [(0, True), (1, False)])
def test_a_batch_of_another_rank_is_encoded_anew(rank: int, as_it_is: bool) -> None:
    """What is published names the worker's own rank, so the bytes of another's are not passed on."""
    body, stored = bytearray(), BlockStored([7], None, [1] * BLOCK_SIZE, BLOCK_SIZE)
    stored.medium = StorageMedium.GPU
    flags = pack_plain(KVEventBatch(1.0, [stored], rank), body)
    assert flags
    replica = Replica(WORKER)
    told = replica.apply(Input(0, flags, bytes(body)))
    assert told is not None
    assert list(told.events) == [stored]
    assert (told.payload is not None) is as_it_is
    assert replica.other_rank == (None if as_it_is else 1)


def test_records_and_batches_clear_each_other() -> None:
    """A clear of either kind of worker is of all that is held."""
    records, batches = story(6, 8), story(6, 8, foreign=True)
    replica, _ = applied(records.messages)
    later = [Input(8 + one.number, one.flags, one.body) for one in batches.messages]
    for message in later:
        replica.apply(message)
    assert replica.count(StorageMedium.GPU) > max(
        len(records.truth[StorageMedium.GPU]), len(batches.truth[StorageMedium.GPU])
    )
    replica.apply(Input(16, BATCH, encode_batch(KVEventBatch(1.0, [*CLEAR], 0))))
    assert snapshot(replica) == []
    for message in later:
        replica.apply(Input(17 + message.number - 8, message.flags, message.body))
    assert snapshot(replica)
    replica.apply(Input(99, FRESH, pack((1.0, [Clear()]))))
    assert snapshot(replica) == []


# ------------------------------------------------------------------------------------------- R3


def check_same_from_here(inputs: list[Input], at: int, chain: int = 1) -> None:
    """After `at` inputs a checkpoint is loaded, `chain` times over: it behaves like what it is of."""
    replica, _ = applied(inputs[:at])
    frozen = replica.freeze()
    saved = list(frozen.saved())
    copy = replica
    for _ in range(chain):
        copy = reloaded(copy)
    assert view(snapshot(copy)).resident == view(snapshot(replica)).resident
    for message in inputs[at:]:
        assert wire(copy.apply(message)) == wire(replica.apply(message)), message
        assert (copy.expected, copy.in_step, copy.tells_batches, copy.ts) == pytest.approx(
            (replica.expected, replica.in_step, replica.tells_batches, replica.ts), nan_ok=True
        )
        for medium in StorageMedium:
            assert copy.count(medium) == replica.count(medium)
    assert list(frozen.saved()) == saved, "what was frozen stays as it was"


@FEWER
@given(inputs=sound_inputs(), share=st.floats(0, 1), chain=st.integers(1, 3))
def test_a_loaded_replica_goes_on_the_same(inputs: list[Input], share: float, chain: int) -> None:
    """R3: from any moment of a sound stream with losses, byte for byte."""
    check_same_from_here(inputs, int(share * len(inputs)), chain)


@FEWER
@given(inputs=any_inputs(), share=st.floats(0, 1))
def test_so_does_one_that_was_told_nonsense(inputs: list[Input], share: float) -> None:
    """R3: the same whatever the inputs say."""
    check_same_from_here(inputs, int(share * len(inputs)))


def grouped(group: int, kind: str) -> BlockStored:
    """Three blocks as a hybrid model's engine tells them, of one of its KV cache groups."""
    event = BlockStored([1, 2, 3], None, [5] * (3 * BLOCK_SIZE), BLOCK_SIZE)
    event.medium, event.group_idx, event.kv_cache_spec_kind = StorageMedium.GPU, group, kind
    return event


FULL, WINDOW = (grouped(1, "full_attention"), grouped(0, "sliding_window"))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [[FULL, WINDOW], [WINDOW]], ids=["told", "guessed"])
def test_a_loaded_replica_knows_the_groups(first: list[Event], at: int) -> None:
    """R3: which of an engine's KV cache groups is the main one, or was taken for it."""
    batches: list[list[Event]] = [
        first,
        [BlockRemoved([3], StorageMedium.GPU, 1)],
        [BlockRemoved([2], StorageMedium.GPU, 0)],
        [FULL],
        [BlockRemoved([3, 2], StorageMedium.GPU, 1), WINDOW],
    ]
    inputs = [
        Input(number, BATCH, encode_batch(KVEventBatch(1.0, events, 0)))
        for number, events in enumerate(batches)
    ]
    check_same_from_here(inputs, at)


@FEWER
@given(inputs=any_inputs(most=14))
def test_arbitrary_inputs(inputs: list[Input]) -> None:
    """Nothing raises; the same inputs give the same events; these can be spelled in every dialect, and
    what they make a router believe is what the replica holds.
    """
    replica, told = applied(inputs)
    assert [wire(one) for one in told] == [wire(one) for one in applied(inputs)[1]]
    index = BlockIndex()
    for one in told:
        if one is not None:
            Speller(Dialect(token_ids=False), 3).spell(one.ts, one.events)
            payload = wire(one)
            assert payload is not None
            index.apply(decode_batch(payload).batch.events)
    for size in (1, 100):
        encode_batch(KVEventBatch(0.0, snapshot(replica, size), 0))
    if replica.in_step:
        held = {medium: index.count(medium) for medium in StorageMedium}
        believed = view(snapshot(replica)).resident
        assert all(believed[medium] <= index.resident[medium] for medium in held)


@FEWER
@given(inputs=sound_inputs())
def test_a_snapshot_is_what_was_told(inputs: list[Input]) -> None:
    """While in step, a router that comes now and reads the snapshot believes what one believes that has
    read everything; parents come first.
    """
    replica, index = Replica(WORKER), BlockIndex()
    for message in inputs:
        told = replica.apply(message)
        index.apply(told.events if told else [])
        if replica.in_step:
            late = view(snapshot(replica))
            assert late.resident == index.resident
            assert late.oddities == Oddities()


def test_an_unreadable_batch_says_the_time_of_the_one_before_after_a_restart() -> None:
    """R3: what has no time of its own has the same here and in a later process."""
    replica, _ = applied(story(4, 5, foreign=True).messages)
    assert reloaded(replica).apply(Input(9, LOST, b"")) == Told(4.0, CLEAR)


NO_PIECES: dict[str, list[bytes]] = {
    "empty": [b""],
    "of no kind": [b"x" + pack([1])],
    "a run that is none": [b"r" + pack([1, 2])],
    "a run that is no UTF-8": [
        b"r" + pack([1, 0, None, ["~"], b"", b"", b"", b"\1"]).replace(b"~", b"\xff")
    ],
    "a batch that is none": [b"b\xc1"],
    "a deep one": [b"b" + b"\x91" * 3000],
}


@pytest.mark.parametrize("pieces", NO_PIECES.values(), ids=NO_PIECES)
def test_pieces_that_are_none(pieces: list[bytes]) -> None:
    """A checkpoint that says nonsense is refused, whatever it says."""
    with pytest.raises(KVEventsError):
        Replica(WORKER).load(pieces, expected=0, in_step=True, tells_batches=False)


@FEWER
@given(st.data())
def test_damaged_pieces(data: st.DataObject) -> None:
    """A piece with a byte changed is refused or gives a state that can be told and gone on with."""
    worker = story(data.draw(st.integers(0, 9)), 12, foreign=data.draw(st.booleans()))
    replica, _ = applied(worker.messages)
    pieces = [bytearray(piece) for piece in replica.freeze().saved()] or [bytearray(b"b")]
    for _ in range(data.draw(st.integers(1, 3))):
        piece = data.draw(st.sampled_from(pieces))
        piece[data.draw(st.integers(0, len(piece) - 1))] ^= data.draw(st.integers(1, 255))
    copy = Replica(WORKER)
    try:
        copy.load(map(bytes, pieces), expected=12, in_step=True, tells_batches=False)
    except KVEventsError:
        return
    encode_batch(KVEventBatch(0.0, snapshot(copy), 0))
    worker.messages = []
    for _ in range(5):
        worker.step()
    for message in worker.messages:
        told: Any = copy.apply(message)
        wire(told)
