"""kvevents.gaps: nothing twice, nothing out of order, no hole that nobody hears of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents.frames import JOIN
from kvevents.gaps import Action, Ask, Deliver, Gap, GapTracker, Lost, Restarted


def body(seq: int) -> bytes:
    return b"%d" % seq


def delivered(*seqs: int, replayed: bool = False) -> list[Action[bytes]]:
    return [Deliver(seq, body(seq), replayed) for seq in seqs]


def live(tracker: GapTracker[bytes], *seqs: int) -> list[Action[bytes]]:
    return [action for seq in seqs for action in tracker.live(seq, body(seq))]


def answers(tracker: GapTracker[bytes], *seqs: int) -> list[Action[bytes]]:
    return [action for seq in seqs for action in tracker.replayed(seq, body(seq))]


def following(expected: int) -> GapTracker[bytes]:
    """A tracker in step, whose next seq is `expected`."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    answers(tracker, *range(expected))
    tracker.end()
    tracker.end()
    assert tracker.expected == expected
    return tracker


# ------------------------------------------------------------------------------------------ join


def test_joining_asks_for_the_state_now() -> None:
    """A subscriber with a replay endpoint asks first; what arrives meanwhile is held."""
    tracker = GapTracker[bytes](can_replay=True)
    assert tracker.start() == [Ask(JOIN)]
    assert tracker.recovering
    assert live(tracker, 7, 8) == []
    assert tracker.expected is None


def test_a_snapshot_is_where_the_stream_begins() -> None:
    """The first answer to a join is no hole, whatever its seq; held frames that it covers go."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    assert live(tracker, 7, 8, 9) == []
    assert answers(tracker, 6, 7) == delivered(6, 7, replayed=True)
    assert tracker.end() == delivered(8, 9)
    assert not tracker.recovering
    assert live(tracker, 10) == delivered(10)


def test_a_publisher_without_snapshots_is_asked_from_0() -> None:
    """It has nothing as late as a join; all it has is asked for instead."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    assert tracker.end() == [Ask(0)]
    assert answers(tracker, 0, 1) == delivered(0, 1, replayed=True)
    assert tracker.end() == []
    assert tracker.expected == 2


def test_what_a_rolling_log_has_dropped_is_lost() -> None:
    """A replay from 0 that begins later leaves a hole, which is reported before the first frame."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    tracker.end()
    assert answers(tracker, 5, 6) == [Lost(0, 5), *delivered(5, 6, replayed=True)]


def test_joining_before_the_first_batch() -> None:
    """When nothing was ever published, the stream begins at 0."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    assert tracker.end() == [Ask(0)]
    assert tracker.end() == []
    assert tracker.expected == 0
    assert live(tracker, 0) == delivered(0)


def test_a_first_frame_missed_while_joining_is_asked_for() -> None:
    """G2: an answer given before the first batch says nothing of the batches after it."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    tracker.end()
    assert live(tracker, 1) == []  # 0 did not arrive
    assert tracker.end() == [Gap(0, 1), Ask(0)]
    assert answers(tracker, 0) == delivered(0, replayed=True)
    assert tracker.end() == delivered(1)


def test_joining_without_a_replay_endpoint() -> None:
    """Without one, what came before the first frame is lost at once."""
    tracker = GapTracker[bytes](can_replay=False)
    assert tracker.start() == []
    assert live(tracker, 7, 8) == [Lost(0, 7), *delivered(7, 8)]
    from_0 = GapTracker[bytes](can_replay=False)
    assert live(from_0, 0) == delivered(0)


# ------------------------------------------------------------------------------------------- gap


def test_a_gap_is_asked_for_and_filled() -> None:
    """G1, G2: a hole is reported, asked for, filled, and what was held follows."""
    tracker = following(3)
    assert live(tracker, 3, 6, 7) == [*delivered(3), Gap(4, 2), Ask(4)]
    assert answers(tracker, 4, 5, 6) == delivered(4, 5, 6, replayed=True)
    assert tracker.end() == delivered(7)


def test_replay_and_live_overlap() -> None:
    """Case 64: replay 3..9 while live 7..12 arrive: each once, in order 3..12."""
    tracker = following(3)
    actions: list[Action[bytes]] = live(tracker, 7)
    assert actions == [Gap(3, 4), Ask(3)]
    for seq in range(3, 10):
        actions += answers(tracker, seq)
        if seq + 5 <= 12:
            actions += live(tracker, seq + 5)
    actions += tracker.end()
    assert [it.seq for it in actions if isinstance(it, Deliver)] == list(range(3, 13))
    assert not any(isinstance(it, Lost) for it in actions)


def test_a_second_gap_while_a_first_one_is_filled() -> None:
    """A hole among the held frames is asked for after the first replay has ended."""
    tracker = following(3)
    assert live(tracker, 5, 6, 9) == [Gap(3, 2), Ask(3)]
    answers(tracker, 3, 4)
    assert tracker.end() == [*delivered(5, 6), Gap(7, 2), Ask(7)]
    assert answers(tracker, 7, 8) == delivered(7, 8, replayed=True)
    assert tracker.end() == delivered(9)


def test_frames_behind_a_second_gap_keep_their_order() -> None:
    """What waits for the second replay is delivered in order when that one brings nothing."""
    tracker = following(3)
    assert live(tracker, 5, 9, 10, 12) == [Gap(3, 2), Ask(3)]
    answers(tracker, 3, 4)
    assert tracker.end() == [*delivered(5), Gap(6, 3), Ask(6)]
    assert tracker.end() == [Lost(6, 3), *delivered(9, 10), Gap(11, 1), Ask(11)]
    assert tracker.end() == [Lost(11, 1), *delivered(12)]


def test_a_hole_that_cannot_be_had_is_lost() -> None:
    """A replay that brings nothing of a hole ends it as a loss, and the stream goes on."""
    tracker = following(3)
    live(tracker, 5)
    assert tracker.end() == [Lost(3, 2), *delivered(5)]
    assert live(tracker, 6) == delivered(6)


def test_a_truncated_replay_is_asked_for_again() -> None:
    """One that brought some of a hole is asked for the rest, until it brings nothing more."""
    tracker = following(3)
    live(tracker, 7)
    assert answers(tracker, 3) == delivered(3, replayed=True)
    assert tracker.end() == [Gap(4, 3), Ask(4)]
    assert answers(tracker, 4) == delivered(4, replayed=True)
    assert tracker.end() == [Gap(5, 2), Ask(5)]
    assert tracker.end() == [Lost(5, 2), *delivered(7)]


def test_answers_that_were_had_already_are_no_progress() -> None:
    """An endpoint that answers everything it has, and never the hole, is not asked for ever."""
    tracker = following(3)
    live(tracker, 5)
    assert answers(tracker, 0, 1, 2) == []
    assert tracker.end() == [Lost(3, 2), *delivered(5)]


def test_a_replay_that_skips_frames_loses_them() -> None:
    """A hole inside a replay is a loss at once: it was asked for."""
    tracker = following(3)
    live(tracker, 9)
    assert answers(tracker, 3, 6) == [
        *delivered(3, replayed=True),
        Lost(4, 2),
        *delivered(6, replayed=True),
    ]


def test_held_frames_are_not_lost_with_the_log() -> None:
    """Frames that came live are delivered even if the log has dropped them when it answers."""
    tracker = following(3)
    live(tracker, 5, 6, 7, 9)
    assert answers(tracker, 10) == [
        Lost(3, 2),
        *delivered(5, 6, 7),
        Lost(8, 1),
        *delivered(9),
        *delivered(10, replayed=True),
    ]
    assert tracker.end() == []


def test_a_gap_without_a_replay_endpoint_is_lost() -> None:
    """Nobody can be asked: gap, loss and frame come together."""
    tracker = GapTracker[bytes](can_replay=False)
    live(tracker, 0)
    assert live(tracker, 3) == [Gap(1, 2), Lost(1, 2), *delivered(3)]
    assert not tracker.recovering


def test_too_many_held_frames_are_asked_for_again() -> None:
    """G2: at most `max_held` are held; the oldest go, and are part of the next hole."""
    tracker = GapTracker[bytes](can_replay=True, max_held=2)
    tracker.start()
    answers(tracker, 0)
    tracker.end()
    live(tracker, 2, 3, 4, 5)
    answers(tracker, 1, 2)
    assert tracker.end() == [Gap(3, 1), Ask(3)]
    assert answers(tracker, 3, 4, 5) == delivered(3, 4, 5, replayed=True)
    assert tracker.end() == []


def test_too_many_held_bytes_are_asked_for_again() -> None:
    """G2: large frames are not held beyond `max_held_bytes` either; the newest always is."""
    tracker = GapTracker[bytes](can_replay=True, max_held_bytes=5000)
    tracker.start()
    answers(tracker, 0)
    tracker.end()
    for seq in range(2, 9):
        assert tracker.live(seq, bytes(2000)) in ([], [Gap(1, 1), Ask(1)])
        assert tracker.held <= 2
    assert tracker.live(9, bytes(9000)) == []
    assert tracker.held == 1
    answers(tracker, 1, 2)
    assert tracker.end() == [Gap(3, 6), Ask(3)]
    for seq in range(3, 10):
        tracker.replayed(seq, bytes(2000 if seq < 9 else 9000))
    assert tracker.end() == []
    assert (tracker.expected, tracker.held) == (10, 0)
    for seq in (11, 12):  # what was held before does not count any more
        tracker.live(seq, bytes(2000))
    assert tracker.held == 2


def test_an_answer_ahead_of_the_live_stream() -> None:
    """By how much it is; it stays so where the answers are another stream's."""
    tracker = following(0)
    assert tracker.ahead == 0
    live(tracker, 0, 2)
    answers(tracker, 1, 2, 3, 4)
    tracker.end()
    assert tracker.ahead == 2
    assert live(tracker, 3) == []
    assert tracker.ahead == 1
    live(tracker, 4, 5)
    assert tracker.ahead == 0


# ------------------------------------------------------------------------------------- failures


def test_a_failed_replay_is_asked_for_again_from_where_it_stopped() -> None:
    """What it brought is kept; after the last attempt the hole is lost."""
    tracker = following(3)
    live(tracker, 9)
    answers(tracker, 3)
    assert tracker.failed() == [Ask(4)]
    answers(tracker, 4)
    assert tracker.failed() == [Ask(5)]
    assert tracker.failed() == [Lost(5, 4), *delivered(9)]
    assert not tracker.recovering
    assert tracker.failed() == []


def test_a_join_that_fails_for_good_goes_on_live() -> None:
    """A dead replay endpoint costs the history, not the stream."""
    tracker = GapTracker[bytes](can_replay=True, attempts=2)
    tracker.start()
    live(tracker, 7)
    assert tracker.failed() == [Ask(JOIN)]
    assert tracker.failed() == [Lost(0, 7), *delivered(7)]
    assert live(tracker, 8) == delivered(8)


def test_a_join_that_fails_with_nothing_held() -> None:
    """The first frame afterwards says how much is lost."""
    tracker = GapTracker[bytes](can_replay=True, attempts=1)
    tracker.start()
    assert tracker.failed() == []
    assert tracker.expected is None
    assert live(tracker, 2) == [Lost(0, 2), *delivered(2)]


def test_attempts_are_counted_for_each_replay() -> None:
    """Failures of one replay, once it has ended, are not held against the next."""
    tracker = GapTracker[bytes](can_replay=True, attempts=2)
    tracker.start()
    assert tracker.failed() == [Ask(JOIN)]
    assert tracker.end() == [Ask(0)]  # the join was answered: another replay
    assert tracker.failed() == [Ask(0)]
    answers(tracker, 0)
    tracker.end()
    live(tracker, 3)
    assert tracker.failed() == [Ask(1)]


def test_answers_outside_a_replay_are_ignored() -> None:
    """Late answers, ends and failures of a replay given up change nothing."""
    tracker = following(3)
    assert answers(tracker, 3, 9) == []
    assert tracker.end() == []
    assert tracker.failed() == []
    assert live(tracker, 3) == delivered(3)


# -------------------------------------------------------------------------------------- restart


def test_a_restart_is_noticed() -> None:
    """G3: a seq that the live stream had sent already is a new run; the state is asked for anew."""
    tracker = following(0)
    live(tracker, 0, 1, 2)
    assert live(tracker, 0) == [Restarted(0), Ask(JOIN)]
    assert tracker.expected is None
    assert live(tracker, 1) == []
    assert tracker.end() == [Ask(0)]
    assert answers(tracker, 0) == delivered(0, replayed=True)
    assert tracker.end() == delivered(1)


def test_a_restart_during_a_replay_ends_it() -> None:
    """What was held and asked for of the old run is dropped."""
    tracker = following(3)
    live(tracker, 9, 10)
    assert tracker.recovering
    assert live(tracker, 0) == [Restarted(0), Ask(JOIN)]
    assert answers(tracker, 0) == delivered(0, replayed=True)
    assert tracker.end() == []
    assert live(tracker, 1) == delivered(1)


def test_a_restart_without_a_replay_endpoint() -> None:
    """What the new run said before its first frame seen is lost."""
    tracker = GapTracker[bytes](can_replay=False)
    live(tracker, 0, 1, 2)
    assert live(tracker, 1) == [Restarted(1), Lost(0, 1), *delivered(1)]
    assert live(tracker, 1) == [Restarted(1), Lost(0, 1), *delivered(1)]


@pytest.mark.parametrize("argument", ["max_held", "attempts"])
def test_arguments_have_bounds(argument: str) -> None:
    """A bound below 1 is the caller's error, named."""
    with pytest.raises(ValueError, match=f"{argument}: 0 is below 1"):
        GapTracker[bytes](can_replay=True, **{argument: 0})


# ------------------------------------------------------------------------------------ simulation


@dataclass
class Publisher:
    """Batch n adds block n. `retain` newest are kept; with `snapshots` older state is re-told.

    A snapshot says which blocks there are in up to two parts, of which the first one clears, as does the
    batch with seq 0 of a publisher that has them. With `overlay` they take the seqs of batches that are
    kept, where those before are too few.
    """

    retain: int
    snapshots: bool
    count: int = 0
    run: int = 0
    """Runs have no block in common."""
    overlay: bool = False

    def block(self, seq: int) -> int:
        return self.run * 1000 + seq

    def payload(self, seq: int) -> bytes:
        clear = b"clear " if self.snapshots and not seq else b""
        return clear + b"add %d" % self.block(seq)

    @property
    def truth(self) -> set[int]:
        return set(range(self.block(0), self.block(self.count)))

    def answer(self, start: int) -> deque[tuple[int, bytes]]:
        first = max(0, self.count - self.retain)
        frames = [(seq, self.payload(seq)) for seq in range(max(first, start), self.count)]
        if not self.snapshots:
            return deque(frames)
        if self.overlay and (start == JOIN or first - 2 < start < first):
            start = min(start, max(0, self.count - 2))
            first = min(self.count, start + 2)
            frames = frames[len(frames) - (self.count - first) :]
        elif start == JOIN:
            start = max(0, first - 2)
            frames = [(seq, self.payload(seq)) for seq in range(first, self.count)]
        if start >= first:
            return deque(frames)
        parts = min(2, first - start)
        told = [b"clear"] + [b""] * (parts - 1)
        for part in range(parts):
            told[part] += b" tell"
            told[part] += b"".join(b" %d" % self.block(n) for n in range(part, first, parts))
        fill = [b"nothing"] * (first - start - parts)
        return deque([*zip(range(start, first), told + fill, strict=True), *frames])


@dataclass
class Subscriber:
    """Does what a tracker says, checks G1 and G2 on the way, and holds what a router would believe."""

    tracker: GapTracker[bytes]
    publisher: Publisher
    faithful: bool
    asked: Ask | None = None
    answers: deque[tuple[int, bytes]] | None = None
    last: int | None = None
    lost: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    latest_ask: Ask | None = None
    joins: bool = False
    """Whether the state was asked for, and nothing of it has come."""

    def do(self, actions: list[Action[bytes]]) -> None:
        for action in actions:
            match action:
                case Ask():
                    self.asked, self.answers = action, None
                    self.joins = self.joins or action == Ask(JOIN)
                case Deliver():
                    self.check_order(action)
                    self.last = action.seq
                    self.apply(action.payload)
                case Lost(first, count):
                    self.check_loss(first, count)
                    self.lost.update(range(first, first + count))
                case Gap(first, count):
                    assert first == self.expected
                    assert count > 0
                case Restarted():
                    raise AssertionError("the publisher did not restart")
        assert self.tracker.recovering == (self.asked is not None)

    @property
    def expected(self) -> int:
        return 0 if self.last is None else self.last + 1

    def check_order(self, action: Deliver[bytes]) -> None:
        """G1: ascending, once each, and every hole is in `lost`."""
        if self.joins and action.replayed and self.asked == Ask(JOIN):
            self.lost.clear()
        else:
            assert action.seq >= self.expected
            assert self.lost.issuperset(range(self.expected, action.seq))
        self.joins = False
        assert action.seq not in self.lost

    def check_loss(self, first: int, count: int) -> None:
        """G1, G2: a loss is of what was not delivered, is told once, and was asked for."""
        assert count > 0
        assert first >= self.expected
        assert self.lost.isdisjoint(range(first, first + count))
        if self.latest_ask is not None:
            assert self.latest_ask in (Ask(JOIN), Ask(0)) or self.latest_ask.start <= first
        assert not self.faithful

    def apply(self, payload: bytes) -> None:
        for word in payload.split():
            if word == b"clear":
                self.blocks.clear()
            elif word.isdigit():
                self.blocks.add(int(word))

    # what arrives

    def live(self, seq: int) -> None:
        self.arrived.add(seq)
        self.do(self.tracker.live(seq, self.publisher.payload(seq)))

    def serve(self) -> None:
        """The publisher takes up the request: what it will say is fixed."""
        if self.asked is not None and self.answers is None:
            self.answers = self.publisher.answer(self.asked.start)

    def answer(self) -> None:
        """One more message of the replay under way."""
        self.serve()
        if self.asked is None:
            return
        self.latest_ask = self.asked
        if self.answers:
            seq, payload = self.answers.popleft()
            self.do(self.tracker.replayed(seq, payload, clears=b"clear" in payload))
        else:
            self.asked = None
            self.do(self.tracker.end())

    def truncate(self) -> None:
        """The replay ends early."""
        if self.asked is not None:
            self.latest_ask, self.asked = self.asked, None
            self.do(self.tracker.end())

    def fail(self) -> None:
        """The replay does not end in time."""
        if self.asked is not None:
            self.latest_ask, self.asked = self.asked, None
            self.do(self.tracker.failed())


FAITHFUL = ["publish", "lose", "arrive", "serve", "answer"]
STEPS = [*FAITHFUL, "fail", "truncate", "stale"]


def run(
    steps: list[str], publisher: Publisher, tracker: GapTracker[bytes], *, faithful: bool
) -> Subscriber:
    subscriber = Subscriber(tracker, publisher, faithful)
    wire: deque[int] = deque()
    subscriber.do(tracker.start())
    for step in [*steps, "publish"]:  # the last one arrives: a heartbeat
        match step:
            case "publish" | "lose":
                if step == "publish":
                    wire.append(publisher.count)
                publisher.count += 1
            case "arrive" if wire:
                subscriber.live(wire.popleft())
            case "serve":
                subscriber.serve()
            case "answer":
                subscriber.answer()
            case "fail":
                subscriber.fail()
            case "truncate":
                subscriber.truncate()
            case "stale" if tracker.recovering and subscriber.last is not None:
                subscriber.do(tracker.replayed(subscriber.last, b"stale"))
    while wire:
        subscriber.live(wire.popleft())
    for _ in range(10 * publisher.count + 10):
        subscriber.answer()
    return subscriber


Steps = st.lists(st.sampled_from(STEPS), max_size=60)
MaxHeld = st.integers(1, 9) | st.just(100)
FaithfulSteps = st.lists(st.sampled_from(FAITHFUL), max_size=60)


@trials(400)
@given(Steps, st.integers(1, 9), st.booleans(), MaxHeld, st.integers(1, 3), st.booleans())
def test_any_stream(
    steps: list[str],
    retain: int,
    snapshots: bool,
    max_held: int,
    attempts: int,
    can_replay: bool,
) -> None:
    """G1, G2: losses, truncated and failed replays, a rolling log: order, once each, every hole told.

    And it ends: when the wire is quiet, everything up to the last frame is delivered or lost; with
    room to hold what arrives, nothing that arrived is lost.
    """
    tracker = GapTracker[bytes](can_replay=can_replay, max_held=max_held, attempts=attempts)
    publisher = Publisher(retain, snapshots)
    found = run(steps, publisher, tracker, faithful=False)
    assert not tracker.recovering
    assert tracker.expected == publisher.count
    assert found.last == publisher.count - 1
    if max_held == 100:
        assert found.lost.isdisjoint(found.arrived)
    event(f"lost: {bool(found.lost)}")


@trials(400)
@given(FaithfulSteps, st.integers(1, 9), st.booleans(), MaxHeld)
def test_a_faithful_replay_loses_nothing(
    steps: list[str], retain: int, snapshots: bool, max_held: int
) -> None:
    """Whatever is lost on the wire, a replay with all frames or with snapshots restores the state."""
    tracker = GapTracker[bytes](can_replay=True, max_held=max_held)
    publisher = Publisher(retain if snapshots else 10**6, snapshots)
    found = run(steps, publisher, tracker, faithful=True)
    assert found.lost == set()
    assert found.blocks == set(range(publisher.count))


@trials(200)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_a_restart_leaves_nothing_of_the_old_run(
    before: int, missed: int, after: int, snapshots: bool
) -> None:
    """G3: a restarted publisher is noticed once, and the new run is delivered whole."""
    new = Publisher(99, snapshots)
    tracker = following(0)
    live(tracker, *range(before))
    first = min(missed, before - 1)
    new.count = first + after
    assert live(tracker, first) == [Restarted(first), Ask(JOIN)]
    subscriber = Subscriber(tracker, new, faithful=True, asked=Ask(JOIN))
    for seq in range(first + 1, new.count):
        subscriber.live(seq)
        subscriber.answer()
    for _ in range(20):
        subscriber.answer()
    assert subscriber.blocks == set(range(new.count))


@trials(400)
@given(
    st.lists(st.sampled_from([*FAITHFUL, "fail"]), max_size=60),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    MaxHeld,
)
def test_a_replay_that_stalls_loses_nothing(
    steps: list[str], retain: int, snapshots: bool, overlay: bool, max_held: int
) -> None:
    """G2: wherever an answer stops, also within a snapshot whose seqs mean something else in the next."""
    tracker = GapTracker[bytes](can_replay=True, max_held=max_held, attempts=1000)
    publisher = Publisher(retain if snapshots else 10**6, snapshots, overlay=overlay)
    found = run(steps, publisher, tracker, faithful=True)
    assert found.lost == set()
    assert found.blocks == set(range(publisher.count))


def test_a_state_that_was_told_in_part_is_asked_for_anew() -> None:
    """The rest of it is not what the log has under those seqs; of a hole in a log it is."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    assert answers(tracker, 97, 98) == delivered(97, 98, replayed=True)
    live(tracker, 100)
    assert tracker.failed() == [Ask(JOIN)]
    assert answers(tracker, 97, 98, 99) == delivered(97, 98, 99, replayed=True)
    assert tracker.end() == delivered(100)
    assert live(tracker, 103) == [Gap(101, 2), Ask(101)]
    assert tracker.replayed(101, b"101", clears=True) == delivered(101, replayed=True)
    assert tracker.failed() == [Ask(JOIN)]
    assert tracker.end() == [Ask(102)]  # it has no snapshots
    assert answers(tracker, 102) == delivered(102, replayed=True)
    assert tracker.failed() == [Ask(103)]


# ----------------------------------------------------------------------------------------- rejoin


def test_rejoining_takes_any_beginning() -> None:
    """G3: a new connection may be to a run whose seq has gone past ours; the answer to a JOIN is taken
    from wherever it begins, and what was held of the old run is dropped.
    """
    tracker = following(8)
    assert live(tracker, 20) == [Gap(8, 12), Ask(8)]
    assert tracker.rejoin() == [Ask(JOIN)]
    assert answers(tracker, 3, 4) == delivered(3, 4, replayed=True)
    assert tracker.end() == []
    assert tracker.expected == 5


def test_rejoining_a_publisher_without_snapshots_goes_on() -> None:
    """It answers END alone; it is asked for what follows the last seq, not for all it has."""
    tracker = following(8)
    assert tracker.rejoin() == [Ask(JOIN)]
    assert tracker.end() == [Ask(8)]
    assert answers(tracker, 8, 9) == delivered(8, 9, replayed=True)
    assert tracker.end() == []
    assert live(tracker, 10) == delivered(10)


def test_rejoining_without_a_replay_endpoint_is_nothing() -> None:
    """There is nobody to ask."""
    tracker = GapTracker[bytes](can_replay=False)
    live(tracker, 0)
    assert tracker.rejoin() == []
    assert live(tracker, 1) == delivered(1)


def test_what_was_given_up_is_remembered_until_a_join() -> None:
    """G4: after its attempts are over the tracker is diverged, goes on live, and a JOIN ends that."""
    tracker = following(5)
    states = [tracker.diverged]
    live(tracker, 7)
    for _ in range(3):
        actions = tracker.failed()
    assert actions == [Lost(5, 2), *delivered(7)]
    states.append(tracker.diverged)
    assert live(tracker, 8) == delivered(8)
    assert tracker.rejoin() == [Ask(JOIN)]
    answers(tracker, 7, 8)
    tracker.end()
    states.append(tracker.diverged)
    assert states == [False, True, False]
    assert live(tracker, 9) == delivered(9)


def test_a_hole_that_came_after_the_question_is_asked_for() -> None:
    """G2: a replay asked for when nothing was missing says nothing of frames lost after it."""
    tracker = following(4)
    tracker.rejoin()
    assert tracker.failed() == [Ask(JOIN)]
    answers(tracker, 3)
    assert live(tracker, 5) == []
    assert tracker.end() == [Gap(4, 1), Ask(4)]
    assert answers(tracker, 4) == delivered(4, replayed=True)
    assert tracker.end() == delivered(5)


# -------------------------------------------------------------------------------- new connections


def others(tracker: GapTracker[bytes], *seqs: int) -> list[Action[bytes]]:
    """Answers of another run."""
    return [action for seq in seqs for action in tracker.replayed(seq, b"other %d" % seq)]


def test_a_new_connection_to_the_same_run_goes_on() -> None:
    """G3: the last batch is asked for and compared; what was missed follows, and nothing is told anew."""
    tracker = following(8)
    assert tracker.reconnected() == [Ask(7)]
    assert live(tracker, 10) == []
    assert answers(tracker, 7) == []
    assert answers(tracker, 8, 9) == delivered(8, 9, replayed=True)
    assert tracker.end() == delivered(10)
    assert live(tracker, 11) == delivered(11)
    assert tracker.reconnected() == [Ask(11)]


def test_a_hole_is_closed_on_the_new_connection() -> None:
    """G2: what was held stays, and the one replay does for both; a hole after the question is one."""
    tracker = following(4)
    assert live(tracker, 6) == [Gap(4, 2), Ask(4)]
    assert tracker.reconnected() == [Ask(3)]
    assert live(tracker, 9) == []
    answers(tracker, 3)
    assert answers(tracker, 4, 5) == delivered(4, 5, replayed=True)
    assert tracker.end() == [*delivered(6), Gap(7, 2), Ask(7)]


@pytest.mark.parametrize("found", [[7], [8], [9, 10]], ids=["another", "the next", "later"])
def test_another_batch_in_its_place_is_another_run(found: list[int]) -> None:
    """G3: the state is asked for, the rest of the answer and what was held are dropped; the new run may
    begin anywhere.
    """
    tracker = following(8)
    tracker.reconnected()
    live(tracker, 8, 9)
    assert others(tracker, *found[:1]) == [Ask(JOIN)]
    assert others(tracker, 3, 4) == [
        Deliver(3, b"other 3", replayed=True),
        Deliver(4, b"other 4", replayed=True),
    ]
    assert tracker.end() == []
    assert live(tracker, 5) == delivered(5)


def test_another_run_without_snapshots_is_told_from_0() -> None:
    """G3: an engine that started over has nothing so late, and does not know JOIN: what the old run said
    is to be forgotten, and all that the new one retains is asked for.
    """
    tracker = following(8)
    tracker.reconnected()
    assert others(tracker, 0, 1) == []
    assert tracker.end() == [Ask(JOIN)]
    assert tracker.end() == [Restarted(0), Ask(0)]
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Ask(0)]
    assert len(others(tracker, 0, 1)) == 2
    assert tracker.end() == []
    assert live(tracker, 2) == delivered(2)


def test_answers_to_a_hole_are_not_taken_for_the_run() -> None:
    """G3: they may have come from the next run already, ahead of the new connection."""
    tracker = following(4)
    live(tracker, 6)
    assert len(others(tracker, 4, 5, 6)) == 3
    assert tracker.end() == []
    assert tracker.reconnected() == [Ask(3)]
    assert others(tracker, 3) == [Ask(JOIN)]


def test_a_question_without_an_answer_is_given_up() -> None:
    """G3, G4: the live stream goes on, all before it is unknown, and the tracker is diverged; once there
    is an answer, the state of the run, whichever it is, is told anew.
    """
    tracker = following(8)
    tracker.reconnected()
    assert live(tracker, 8) == []
    assert tracker.failed() == [Ask(7)]
    assert tracker.failed() == [Ask(7)]
    assert tracker.failed() == [Lost(0, 8), *delivered(8)]
    assert tracker.diverged
    assert live(tracker, 10) == [Gap(9, 1), Ask(9)]
    assert tracker.failed() == [Ask(7)]
    assert others(tracker, 9) == [Ask(JOIN)]
    for _ in range(3):
        tracker.failed()
    assert live(tracker, 11) == [Lost(0, 11), *delivered(11)]
    assert tracker.rejoin() == [Ask(JOIN)]
    assert tracker.end() == [Restarted(0), Ask(0)]
    tracker.end()
    assert not tracker.diverged


def test_a_first_batch_of_an_unknown_run_is_a_restart() -> None:
    """G3: nothing is missing before it, but for what it says of the run before."""
    tracker = following(8)
    tracker.reconnected()
    for _ in range(3):
        tracker.failed()
    assert live(tracker, 0) == [Restarted(0), *delivered(0)]


def test_a_run_that_has_told_nothing_has_no_mark() -> None:
    """The old run's batches are not asked of the next connection."""
    tracker = following(8)
    tracker.reconnected()
    for _ in range(3):
        tracker.end()
    assert tracker.expected == 0
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Ask(0)]


def test_half_an_answer_does_not_have_to_begin_again() -> None:
    """The same run goes on answering from where it stopped."""
    tracker = following(8)
    tracker.reconnected()
    answers(tracker, 7, 8)
    assert tracker.failed() == [Ask(9)]


@pytest.mark.parametrize("state", ["joining", "diverged"])
def test_without_the_state_a_new_connection_is_a_join(state: str) -> None:
    """G4: there is nothing whole that could go on."""
    tracker = following(8)
    if state == "joining":
        tracker.rejoin()
        answers(tracker, 3)
    else:
        live(tracker, 9)
        for _ in range(3):
            tracker.failed()
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Restarted(0), Ask(0)]


def test_before_anything_was_told_a_new_connection_is_a_join() -> None:
    """And no restart: nothing is to be forgotten."""
    tracker = GapTracker[bytes](can_replay=True)
    tracker.start()
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Ask(0)]
    tracker.end()
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Ask(0)]


def test_without_a_replay_endpoint_a_new_connection_is_nothing() -> None:
    """There is nobody to ask."""
    tracker = GapTracker[bytes](can_replay=False)
    live(tracker, 0)
    assert tracker.reconnected() == []
    assert live(tracker, 1) == delivered(1)


def test_only_a_join_ends_what_was_given_up() -> None:
    """G4: the answer to a later hole does not."""
    tracker = following(5)
    live(tracker, 7)
    for _ in range(3):
        tracker.failed()
    live(tracker, 9)
    answers(tracker, 8)
    tracker.end()
    assert tracker.diverged


def test_a_join_in_vain_loses_nothing_more() -> None:
    """When the state is still not to be had, the stream goes on where it was."""
    tracker = following(5)
    tracker.rejoin()
    live(tracker, 5)
    for _ in range(2):
        tracker.failed()
    assert tracker.failed() == delivered(5)
    assert tracker.diverged


@dataclass
class Traveller:
    """Does what a tracker says over connections that are lost and made again, to whichever run."""

    tracker: GapTracker[bytes]
    publisher: Publisher
    asked: Ask | None = None
    answers: deque[tuple[int, bytes]] | None = None
    wire: deque[tuple[int, bytes]] = field(default_factory=deque)
    unread: int | None = None
    """Of what is on the wire, so much came on the connection before; None once that is noticed."""
    blocks: set[int] = field(default_factory=set)
    expected: int | None = None
    clears: int = 0
    losses: int = 0
    restarts: int = 0

    def do(self, actions: list[Action[bytes]]) -> None:
        for action in actions:
            match action:
                case Ask(start):
                    self.asked, self.answers = action, None
                    if start == JOIN:
                        self.expected = None
                case Deliver(seq, payload):
                    assert self.expected in (None, seq), "G1"
                    self.expected = seq + 1
                    self.apply(payload)
                case Lost(first, count):
                    assert count > 0
                    assert self.expected in (None, first) or first == 0, "G1"
                    self.expected = first + count
                    self.losses += 1
                case Restarted():
                    self.blocks.clear()
                    self.restarts, self.expected = self.restarts + 1, None
                case Gap():
                    pass
        assert self.tracker.recovering == (self.asked is not None)

    def apply(self, payload: bytes) -> None:
        for word in payload.split():
            if word == b"clear":
                self.blocks.clear()
                self.clears += 1
            elif word.isdigit():
                self.blocks.add(int(word))

    def publish(self, *, lost: bool = False) -> None:
        seq = self.publisher.count
        self.publisher.count += 1
        if not lost:
            self.wire.append((seq, self.publisher.payload(seq)))

    def arrive(self) -> None:
        if self.unread == 0:
            self.notice()
        elif self.wire:
            if self.unread:
                self.unread -= 1
            self.do(self.tracker.live(*self.wire.popleft()))

    def notice(self) -> None:
        """The new connection; what is unread of the old one comes before any answer."""
        unread, self.unread = self.unread, None
        if unread is not None:
            self.do(self.tracker.reconnected())
            for _ in range(unread):
                self.do(self.tracker.live(*self.wire.popleft()))

    def reconnect(self, publisher: Publisher, *, unread: int) -> None:
        """The connection was cut with `unread` messages come and not read, and made again; replays asked
        for from here on are answered by `publisher`.
        """
        self.notice()
        self.wire = deque(list(self.wire)[:unread])
        self.unread, self.publisher = len(self.wire), publisher

    def answer(self) -> None:
        """One more message of the replay under way."""
        if self.asked is None:
            return
        if self.answers is None:
            self.answers = self.publisher.answer(self.asked.start)
        if self.answers:
            self.do(self.tracker.replayed(*self.answers.popleft()))
        else:
            self.asked = None
            self.do(self.tracker.end())

    def fail(self) -> None:
        """The replay does not end in time."""
        if self.asked is not None:
            self.asked = None
            self.do(self.tracker.failed())

    def step(self, step: str) -> None:
        match step:
            case "publish" | "lose":
                self.publish(lost=step == "lose")
            case "arrive":
                self.arrive()
            case "notice":
                self.notice()
            case "answer":
                self.answer()
            case "fail":
                self.fail()

    def settle(self) -> None:
        """What was published arrives, with a heartbeat after it, and every replay ends."""
        self.publish()
        while self.wire or self.unread is not None:
            self.arrive()
        while self.tracker.recovering or self.tracker.diverged:
            if not self.tracker.recovering:  # as the subscriber does after a while
                self.do(self.tracker.rejoin())
            self.answer()


TripSteps = st.lists(
    st.sampled_from(["publish", "lose", "arrive", "notice", "answer", "answer", "fail"]),
    max_size=15,
)


def travelling(publisher: Publisher, max_held: int, attempts: int) -> Traveller:
    """One that has joined."""
    tracker = GapTracker[bytes](can_replay=True, max_held=max_held, attempts=attempts)
    traveller = Traveller(tracker, publisher)
    traveller.do(tracker.start())
    traveller.settle()
    return traveller


@trials(400)
@given(
    st.integers(0, 12),
    st.lists(st.tuples(TripSteps, st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=4),
    TripSteps,
    st.booleans(),
    MaxHeld,
)
def test_connections_to_the_same_run_clear_nothing(
    count: int,
    trips: list[tuple[list[str], int, int]],
    last: list[str],
    snapshots: bool,
    max_held: int,
) -> None:
    """G3: with a log that reaches back and whatever was missed meanwhile, each batch is delivered once,
    in order, and nothing is cleared, lost or started over, also while nothing is known yet.
    """
    publisher = Publisher(10**6, snapshots, count)
    traveller = travelling(publisher, max_held, attempts=10**6)
    clears = traveller.clears
    for steps, unread, missed in trips:
        for step in steps:
            traveller.step(step)
        traveller.reconnect(publisher, unread=unread)
        publisher.count += missed
    for step in last:
        traveller.step(step)
    traveller.settle()
    assert traveller.blocks == publisher.truth
    assert (traveller.clears, traveller.losses, traveller.restarts) == (clears, 0, 0)
    assert traveller.expected == traveller.tracker.expected == publisher.count


Ahead = st.integers(-12, 12)
Trip = st.tuples(TripSteps, st.integers(0, 3), st.booleans(), Ahead)


@trials(400)
@given(
    st.integers(0, 12),
    st.lists(Trip, min_size=1, max_size=4),
    TripSteps,
    st.integers(1, 9),
    st.booleans(),
    MaxHeld,
    st.integers(1, 3),
)
def test_whichever_run_is_behind_a_connection_the_view_is_its(
    count: int,
    trips: list[tuple[list[str], int, bool, int]],
    last: list[str],
    retain: int,
    snapshots: bool,
    max_held: int,
    attempts: int,
) -> None:
    """G3, G4: the same run, with a log that has rolled or not, or others that are behind, level or ahead,
    seen by replays before the connection is noticed or after, with answers or without: in the end the
    view is what the last run holds, and nothing of another.
    """
    if not snapshots:  # what an engine has dropped, or is never asked for again, nobody tells
        retain, attempts = 10**6, 10**6
    publisher = Publisher(retain, snapshots, count)
    traveller = travelling(publisher, max_held, attempts)
    for steps, unread, same, ahead in trips:
        for step in steps:
            traveller.step(step)
        if same:
            publisher.count += abs(ahead)
        else:
            count = max(0, publisher.count + ahead)
            publisher = Publisher(retain, snapshots, count, publisher.run + 1)
            event("another run, " + ("behind" if ahead < 0 else "ahead" if ahead else "level"))
        traveller.reconnect(publisher, unread=unread)
    for step in last:
        traveller.step(step)
    traveller.settle()
    assert traveller.blocks == publisher.truth
    event(f"cleared: {bool(traveller.clears)}")


def test_a_new_connection_before_the_state_came() -> None:
    """G3: what was told before the state was asked for anew is of the run of then, too: an engine that
    knows no JOIN is to be told of from 0, and what it held before is forgotten.
    """
    tracker = following(8)
    tracker.rejoin()
    assert tracker.reconnected() == [Ask(JOIN)]
    assert tracker.end() == [Restarted(0), Ask(0)]


def test_a_hole_is_asked_for_though_the_mark_was_all_there_was() -> None:
    """G2: the question of a new connection was for no hole, so nothing of one that came after is lost."""
    tracker = following(4)
    assert tracker.reconnected() == [Ask(3)]
    assert live(tracker, 6) == []
    answers(tracker, 3)
    assert tracker.end() == [Gap(4, 2), Ask(4)]


def test_a_new_run_has_all_the_attempts() -> None:
    """What the old one did not answer is not held against the new one."""
    tracker = GapTracker[bytes](can_replay=True, attempts=2)
    live(tracker, 0, 1, 4)
    assert tracker.failed() == [Ask(2)]
    assert live(tracker, 0) == [Restarted(0), Ask(JOIN)]
    assert tracker.failed() == [Ask(JOIN)]
