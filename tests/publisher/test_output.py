"""publisher.stream.output: one sink's stream as it is made, and as the journal makes it again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from core_rig import BLOCK_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_inputs import pack, story

from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    KVEventsError,
    StorageMedium,
)
from kvevents.codec import decode_batch
from kvevents.dialect import NAMESPACES, PRESETS, Dialect
from kvevents.index import Oddities
from kvevents.records import BlockId, StoreKnown, StoreNew
from kvevents.speller import Speller, Spells
from kvevents.store_form import StoreSpeller
from kvevents.tokens import pack_tokens
from kvevents.view import View
from publisher.config.sidecar_config import WorkerInfo
from publisher.link.packed import pack_plain
from publisher.stream.input import Input
from publisher.stream.journal import Entry, Kind
from publisher.stream.output import SNAPSHOT_BLOCKS, Frame, Output
from publisher.stream.replica import Replica, Told

WORKER = WorkerInfo(block_size=BLOCK_SIZE)
GPU = StorageMedium.GPU
CLEAR: list[Event] = [AllBlocksCleared()]


def new_speller(dialect: Dialect) -> Spells:
    if dialect.event_form != "mooncake":
        return Speller(dialect, 0)
    return StoreSpeller(
        *(0,),
        block_size=BLOCK_SIZE,
        hash_format=WORKER.hash_format,
        media=dict(dialect.media),
        object_key=dialect.object_key,
        model="m",
        worker_id="w",
    )


@dataclass
class Bench:
    """A replica, one output, and the journal of both."""

    coalesce_s: float = 0.0
    dialect: Dialect = Dialect()  # noqa: RUF009 - frozen
    rebase_after: int | None = None
    max_batches: int = 1000
    next_seq: int = 0
    journal: list[Entry] = field(default_factory=list)
    sent: list[Frame] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.replica = Replica(WORKER)
        self.output = self.new_output(self.next_seq)

    def new_output(self, next_seq: int) -> Output:
        return Output(
            2,
            "bench",
            View(self.dialect),
            new_speller(self.dialect),
            self.journal.append,
            lambda: 77.0,
            max_batches=self.max_batches,
            max_bytes=1 << 20,
            coalesce_s=self.coalesce_s,
            rebase_after=self.rebase_after,
            next_seq=next_seq,
        )

    def tell(self, given: Input) -> None:
        self.journal.append(Entry(Kind.INPUT, given.body, given.number, given.flags))
        told = self.replica.apply(given)
        if told is not None and told.events:
            self.sent += self.output.tell(told, self.now)

    def work(self) -> None:
        """What the core does in a turn."""
        self.now += 0.01
        if self.output.rebase_due:
            self.output.rebase(self.replica.freeze())
        if self.output.cut_at() <= self.now:
            self.sent += self.output.cut()
        self.sent += self.output.snapshot_part(self.now)

    def finish(self) -> None:
        for _ in range(10_000):
            if not (self.output.held or self.output.rebase_due):
                return
            self.now += 10
            self.work()
        raise AssertionError("it is never done")

    def replayed(self) -> Output:
        """The output that a later process makes of the journal, from its beginning."""
        replica, output = Replica(WORKER), self.new_output(self.next_seq)
        replay(self.journal[:], replica, output)
        return output


def replay(entries: list[Entry], replica: Replica, output: Output) -> None:
    for entry in entries:
        if entry.kind == Kind.INPUT:
            told = replica.apply(Input(entry.number, entry.flags, entry.body))
            if told is not None and told.events:
                output.tell(told, 0.0)
        else:
            output.replay_entry(entry)


def retained(output: Output) -> list[tuple[int, bytes]]:
    return list(output.replay(output.log.oldest_seq))


def view(payloads: list[bytes]) -> BlockIndex:
    index = BlockIndex()
    for payload in payloads:
        index.apply(decode_batch(payload).batch.events)
    return index


OPERATIONS = ("step", "step", "step", "step", "work", "work", "cut", "own", "snapshot", "rebase")


def do(bench: Bench, worker: Any, operation: str) -> None:
    match operation:
        case "step":
            worker.step()
            bench.tell(worker.messages.pop())
        case "work":
            bench.work()
        case "cut":
            bench.sent += bench.output.cut()
        case "own":
            bench.sent.append(bench.output.own(bench.now, []))
        case "snapshot":
            bench.output.begin_snapshot(bench.replica.freeze())
        case "rebase":
            bench.output.rebase(bench.replica.freeze())
            bench.sent += bench.output.snapshot_part(bench.now)  # at once, as the core does


Benches = st.builds(
    Bench,
    coalesce_s=st.sampled_from([0.0, 0.015, 1.0]),
    dialect=st.sampled_from(
        [Dialect(token_ids=False), *(preset.dialect for preset in PRESETS.values())]
    ),
    rebase_after=st.sampled_from([None, 5]),
    max_batches=st.sampled_from([2, 1000]),
    next_seq=st.sampled_from([0, 40]),
)
Plans = st.lists(st.sampled_from(OPERATIONS), max_size=40)


# ---------------------------------------------------------------------------------- properties


@settings(max_examples=max(100, settings().max_examples))
@given(bench=Benches, plan=Plans, seed=st.integers(0, 50), foreign=st.booleans())
def test_the_journal_makes_the_same_stream(
    bench: Bench, plan: list[str], seed: int, foreign: bool
) -> None:
    """O2: after any sequence of operations the entries give the same log, byte for byte, the same next
    seq, and the same of what is held.
    """
    worker = story(seed, 0, foreign=foreign)
    for operation in plan:
        do(bench, worker, operation)
        if bench.output.rebase_due:
            break  # the core begins it before anything else
    again, output = bench.replayed(), bench.output
    assert retained(again) == retained(output)
    assert again.next_seq == output.next_seq
    assert again.snapshotting == output.snapshotting
    assert (again.held, again.num_held_events) == (output.held, output.num_held_events)
    if output.log.oldest_seq:
        whole = [view([payload for _, payload in one.replay(0)]) for one in (again, output)]
        assert whole[0].resident == whole[1].resident


@settings(max_examples=max(60, settings().max_examples // 2))
@given(bench=Benches, before=Plans, plan=Plans, seed=st.integers(0, 50), foreign=st.booleans())
def test_so_it_does_from_a_checkpoint(
    bench: Bench, before: list[str], plan: list[str], seed: int, foreign: bool
) -> None:
    """O2: the same from a checkpoint, taken whenever nothing is held."""
    worker = story(seed, 0, foreign=foreign)
    for operation in before:
        do(bench, worker, operation)
    bench.finish()
    start, first = len(bench.journal), bench.output.next_seq
    replica = Replica(WORKER)
    replica.load(
        list(bench.replica.freeze().saved()),
        expected=bench.replica.expected,
        in_step=bench.replica.in_step,
        tells_batches=bench.replica.tells_batches,
        ts=bench.replica.ts,
    )
    output = bench.new_output(first)
    output.load(replica.freeze().snapshot(SNAPSHOT_BLOCKS))
    for operation in plan:
        do(bench, worker, operation)
    replay(bench.journal[start:], replica, output)
    ours = [one for one in retained(bench.output) if one[0] >= output.log.oldest_seq]
    theirs = [one for one in retained(output) if one[0] >= bench.output.log.oldest_seq]
    assert theirs == ours
    assert output.next_seq == bench.output.next_seq
    whole = [view([payload for _, payload in one.replay(0)]) for one in (output, bench.output)]
    assert whole[0].resident == whole[1].resident


READABLE = [one for name in PRESETS if (one := PRESETS[name].dialect).event_form != "mooncake"]


def seen(truth: dict[StorageMedium, set[Any]], dialect: Dialect) -> dict[StorageMedium, set[Any]]:
    """What is held, by the first of the media that are told alike."""
    found: dict[StorageMedium, set[Any]] = {medium: set() for medium in StorageMedium}
    first: dict[str, StorageMedium] = {}
    for medium, text in dialect.media:
        found[first.setdefault(text, medium)] |= truth[medium]
    return found


@settings(max_examples=max(100, settings().max_examples))
@given(bench=Benches, plan=Plans, seed=st.integers(0, 50), dialect=st.sampled_from(READABLE))
def test_a_subscriber_of_all_frames_is_right(
    bench: Bench, plan: list[str], seed: int, dialect: Dialect
) -> None:
    """O1, O3: seqs follow each other, starting over only for a rebase; at the end the subscriber believes
    what is so, as its dialect tells it, and was never told of a block twice, or before its parent.
    """
    bench = replace(bench, dialect=msgspec.structs.replace(dialect, namespaces=NAMESPACES))
    worker = story(seed, 0)
    for operation in plan:
        do(bench, worker, operation)
        if bench.output.rebase_due:
            bench.work()
    bench.finish()
    index, expected = BlockIndex(), bench.next_seq
    for frame in bench.sent:
        if frame.seq == 0 != expected:
            expected = 0
            assert frame.events[0] == CLEAR[0]
        assert frame.seq == expected
        expected += 1
        index.apply(decode_batch(frame.payload).batch.events)
    assert index.resident == seen(worker.truth, dialect)
    assert index.oddities == Oddities()
    assert expected == bench.output.next_seq
    recent = {frame.seq: frame.payload for frame in bench.sent}
    assert all(recent[seq] == payload for seq, payload in retained(bench.output))


@settings(max_examples=max(60, settings().max_examples // 2))
@given(entries=st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=9)), max_size=8))
def test_arbitrary_entries(entries: list[tuple[Kind, bytes]]) -> None:
    """What no process can have written is refused with KVEventsError, and nothing else."""
    bench = Bench(coalesce_s=1.0)
    bench.output.tell(Told(1.0, CLEAR), 0.0)
    for kind, body in entries:
        try:
            bench.output.replay_entry(Entry(kind, body))
        except KVEventsError:
            continue


# -------------------------------------------------------------------------------------- merging


def told_by(worker: Any) -> list[Told]:
    replica = Replica(WORKER)
    found = [replica.apply(one) for one in worker.messages]
    return [told for told in found if told is not None]


def test_what_comes_within_the_time_is_one_batch() -> None:
    """Held from the first for `coalesce_s`; then one frame with the last's ts, and an entry says so."""
    bench = Bench(coalesce_s=0.5)
    worker = story(1, 9)
    for bench.now, message in enumerate(worker.messages, 10):
        bench.tell(message)
        assert (bench.sent, bench.output.cut_at()) == ([], 10.5)
    assert bench.output.num_held_events == bench.replica.counts.events
    (frame,) = bench.output.cut()
    assert (frame.seq, frame.ts) == (0, 8.0)
    assert bench.journal[9:] == [Entry(Kind.CUT, sink=2)]
    assert len(frame.events) <= bench.replica.counts.events
    assert view([frame.payload]).resident == worker.truth
    assert bench.output.cut() == []
    assert (bench.output.held, bench.output.cut_at()) == (False, float("inf"))


def test_too_much_is_not_held() -> None:
    """However long the time, so many blocks are published at once."""
    bench = Bench(coalesce_s=10.0)
    removed: list[Event] = [BlockRemoved(list(range(1, 4097)), GPU)]
    bench.output.tell(Told(1.0, removed), 10.0)
    assert bench.output.cut_at() == 20.0
    bench.output.tell(Told(1.0, removed), 10.0)
    assert bench.output.cut_at() == 10.0


# ------------------------------------------------------------------------------ telling it anew


def big_bench(blocks: int, **settings: Any) -> Bench:
    """A prompt of so many blocks is told and published."""
    bench = Bench(**settings)
    tokens = pack_tokens(range(blocks * BLOCK_SIZE))
    records = [
        StoreNew(GPU, BlockId(0), blocks, None, BASE, tokens),
        StoreKnown(StorageMedium.CPU, BlockId(0), blocks // 2),
    ]
    bench.tell(Input(0, 0, pack((1.0, records))))
    bench.sent += bench.output.cut()
    return bench


@pytest.mark.parametrize("coalesce_s", [0.0, 1.0])
def test_what_is_told_meanwhile_waits_behind_it(coalesce_s: float) -> None:
    """O3: the state comes whole, in batches of about SNAPSHOT_BLOCKS; then what was told, in order."""
    bench = big_bench(3 * SNAPSHOT_BLOCKS, coalesce_s=coalesce_s)
    before = len(bench.sent)
    bench.output.begin_snapshot(bench.replica.freeze())
    held = told_by(story(9, 3))
    parts: list[Frame] = []
    while bench.output.snapshotting:
        if held:
            assert bench.output.tell(held.pop(0), 1.0) == []
            assert bench.output.cut() == []
            assert bench.output.cut_at() == float("inf")
        parts += bench.output.snapshot_part(5.0)
    told = [one.events for one in told_by(story(9, 3))]
    if coalesce_s:
        assert bench.output.num_held_events == sum(map(len, told))
    else:
        assert [frame.events for frame in parts[-3:]] == told
        assert [frame.ts for frame in parts[-3:]] == [0.0, 1.0, 2.0]
        parts = parts[:-3]
    assert len(parts) >= 3
    assert parts[0].events[0] == CLEAR[0]
    whole = view([frame.payload for frame in parts])
    assert whole.oddities == Oddities()
    assert {medium: whole.count(medium) for medium in StorageMedium} == {
        medium: bench.replica.count(medium) for medium in StorageMedium
    }
    assert {frame.ts for frame in parts} == {5.0}
    assert parts[0].seq == before
    kinds = [entry.kind for entry in bench.journal if entry.kind != Kind.INPUT]
    assert kinds[-len(parts) - 2 :] == [Kind.SNAPSHOT, *[Kind.FRAME] * len(parts), Kind.TOLD]


def test_what_is_held_when_it_begins_is_in_it() -> None:
    """Held and not published: the state says it, once."""
    bench, worker = Bench(coalesce_s=5.0), story(3, 20)
    for message in worker.messages:
        if message.number == 10:
            bench.sent += bench.output.cut()
        bench.tell(message)
    assert bench.output.held
    bench.output.begin_snapshot(bench.replica.freeze())
    assert bench.output.num_held_events == 0
    bench.finish()
    index = view([frame.payload for frame in bench.sent])
    assert index.resident == worker.truth
    assert index.oddities == Oddities()


def test_the_empty_state_is_a_clear() -> None:
    """There is always a first batch, and it clears."""
    bench = Bench()
    bench.output.begin_snapshot(bench.replica.freeze())
    (frame,) = bench.output.snapshot_part(1.0)
    assert frame.events == CLEAR
    assert bench.output.snapshot_part(1.0) == []
    assert not bench.output.snapshotting
    assert bench.output.snapshot_part(1.0) == []


def due(bench: Bench) -> bool:
    return bench.output.rebase_due


def test_a_rebase_starts_over_at_0() -> None:
    """So many seqs after the state was last told whole, and not before it is told again; the old frames
    are not replayed any more.
    """
    bench = Bench(rebase_after=4)
    for _ in range(3):
        bench.output.own(1.0, [])
        assert not due(bench)
    bench.output.own(1.0, [])
    assert due(bench)
    bench.output.rebase(bench.replica.freeze())
    assert not due(bench)
    assert (bench.output.next_seq, retained(bench.output)) == (0, [])
    bench.finish()
    assert bench.sent[0].seq == 0
    for _ in range(3):
        bench.output.own(1.0, [])
        assert not due(bench)
    bench.output.own(1.0, [])
    assert due(bench)


def test_the_end_drops_what_is_held() -> None:
    """The worker is gone: one clear, whatever was under way."""
    for coalesce_s in (0.0, 1.0):
        bench = big_bench(SNAPSHOT_BLOCKS, coalesce_s=coalesce_s)
        bench.output.begin_snapshot(bench.replica.freeze())
        bench.output.snapshot_part(1.0)
        bench.output.tell(Told(1.0, [BlockRemoved([1], GPU)]), 1.0)
        frame = bench.output.end(9.0)
        assert (frame.events, frame.ts) == (CLEAR, 9.0)
        assert not bench.output.held
        assert bench.output.snapshot_part(9.0) == bench.output.cut() == []


def test_a_clock_that_stands_still() -> None:
    """Two batches of one moment are two frames, each with its own events."""
    bench = Bench()
    first = bench.output.own(1.0, CLEAR)
    second = bench.output.own(1.0, [])
    assert [first.seq, second.seq] == [0, 1]
    assert decode_batch(first.payload).batch.events == CLEAR
    assert decode_batch(second.payload).batch.events == []


def test_what_is_left_out_is_not_kept() -> None:
    """Without `token_ids` the log keeps none: `buffer_bytes` bounds what it takes."""
    bench = Bench(dialect=Dialect(token_ids=False))
    stored = BlockStored([1], None, [5] * BLOCK_SIZE, BLOCK_SIZE, medium=GPU)
    (frame,) = bench.output.tell(Told(1.0, [stored]), 0.0)
    assert [list(one.token_ids) for one in frame.events if isinstance(one, BlockStored)] == [[]]
    assert list(stored.token_ids) == [5] * BLOCK_SIZE


def test_a_seq_is_missing_before_a_clear_for_those_who_forget_by_it() -> None:
    """mooncake-store: an empty batch has the seq, and a replay tells it; it is not sent."""
    bench = Bench(dialect=PRESETS["mooncake-store"].dialect)
    first = bench.output.own(1.0, CLEAR)
    (told,) = bench.output.tell(Told(2.0, CLEAR), 0.0)
    assert (first.seq, told.seq) == (1, 3)
    kept = retained(bench.output)
    assert [seq for seq, _ in kept] == [0, 1, 2, 3]
    assert [msgspec.msgpack.decode(payload)[1] for _, payload in kept][::2] == [[], []]


def test_what_an_engine_packed_is_cut_as_all_else_is() -> None:
    """A batch that could go on as it came has too many blocks in an event for this sink's consumer."""
    bench = Bench(dialect=Dialect(blocks_per_event=2))
    store = BlockStored([10, 11, 12], None, [7] * (3 * BLOCK_SIZE), BLOCK_SIZE, medium=GPU)
    body = bytearray()
    flags = pack_plain(KVEventBatch(1.0, [store], 0), body)
    bench.tell(Input(0, flags, bytes(body)))
    ((_, replayed),) = bench.output.replay(0)
    for payload in (bench.sent[0].payload, replayed):
        told = decode_batch(payload).batch.events
        assert [one.block_hashes for one in told if isinstance(one, BlockStored)] == [
            [10, 11],
            [12],
        ]
