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


def delivered(*seqs: int, replayed: bool = False) -> list[Action]:
    return [Deliver(seq, body(seq), replayed) for seq in seqs]


def live(tracker: GapTracker, *seqs: int) -> list[Action]:
    return [action for seq in seqs for action in tracker.live(seq, body(seq))]


def answers(tracker: GapTracker, *seqs: int) -> list[Action]:
    return [action for seq in seqs for action in tracker.replayed(seq, body(seq))]


def following(expected: int) -> GapTracker:
    """A tracker in step, whose next seq is `expected`."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    answers(tracker, *range(expected))
    tracker.end()
    tracker.end()
    assert tracker.expected == expected
    return tracker


# ------------------------------------------------------------------------------------------ join


def test_joining_asks_for_the_state_now() -> None:
    """A subscriber with a replay endpoint asks first; what arrives meanwhile is held."""
    tracker = GapTracker(can_replay=True)
    assert tracker.start() == [Ask(JOIN)]
    assert tracker.recovering
    assert live(tracker, 7, 8) == []
    assert tracker.expected is None


def test_a_snapshot_is_where_the_stream_begins() -> None:
    """The first answer to a join is no hole, whatever its seq; held frames that it covers go."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    assert live(tracker, 7, 8, 9) == []
    assert answers(tracker, 6, 7) == delivered(6, 7, replayed=True)
    assert tracker.end() == delivered(8, 9)
    assert not tracker.recovering
    assert live(tracker, 10) == delivered(10)


def test_a_publisher_without_snapshots_is_asked_from_0() -> None:
    """It has nothing as late as a join; all it has is asked for instead."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    assert tracker.end() == [Ask(0)]
    assert answers(tracker, 0, 1) == delivered(0, 1, replayed=True)
    assert tracker.end() == []
    assert tracker.expected == 2


def test_what_a_rolling_log_has_dropped_is_lost() -> None:
    """A replay from 0 that begins later leaves a hole, which is reported before the first frame."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    tracker.end()
    assert answers(tracker, 5, 6) == [Lost(0, 5), *delivered(5, 6, replayed=True)]


def test_joining_before_the_first_batch() -> None:
    """When nothing was ever published, the stream begins at 0."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    assert tracker.end() == [Ask(0)]
    assert tracker.end() == []
    assert tracker.expected == 0
    assert live(tracker, 0) == delivered(0)


def test_a_first_frame_missed_while_joining_is_asked_for() -> None:
    """G2: an answer given before the first batch says nothing of the batches after it."""
    tracker = GapTracker(can_replay=True)
    tracker.start()
    tracker.end()
    assert live(tracker, 1) == []  # 0 did not arrive
    assert tracker.end() == [Gap(0, 1), Ask(0)]
    assert answers(tracker, 0) == delivered(0, replayed=True)
    assert tracker.end() == delivered(1)


def test_joining_without_a_replay_endpoint() -> None:
    """Without one, what came before the first frame is lost at once."""
    tracker = GapTracker(can_replay=False)
    assert tracker.start() == []
    assert live(tracker, 7, 8) == [Lost(0, 7), *delivered(7, 8)]
    from_0 = GapTracker(can_replay=False)
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
    actions: list[Action] = live(tracker, 7)
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
    tracker = GapTracker(can_replay=False)
    live(tracker, 0)
    assert live(tracker, 3) == [Gap(1, 2), Lost(1, 2), *delivered(3)]
    assert not tracker.recovering


def test_too_many_held_frames_are_asked_for_again() -> None:
    """G2: at most `max_held` are held; the oldest go, and are part of the next hole."""
    tracker = GapTracker(can_replay=True, max_held=2)
    tracker.start()
    answers(tracker, 0)
    tracker.end()
    live(tracker, 2, 3, 4, 5)
    answers(tracker, 1, 2)
    assert tracker.end() == [Gap(3, 1), Ask(3)]
    assert answers(tracker, 3, 4, 5) == delivered(3, 4, 5, replayed=True)
    assert tracker.end() == []


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
    tracker = GapTracker(can_replay=True, attempts=2)
    tracker.start()
    live(tracker, 7)
    assert tracker.failed() == [Ask(JOIN)]
    assert tracker.failed() == [Lost(0, 7), *delivered(7)]
    assert live(tracker, 8) == delivered(8)


def test_a_join_that_fails_with_nothing_held() -> None:
    """The first frame afterwards says how much is lost."""
    tracker = GapTracker(can_replay=True, attempts=1)
    tracker.start()
    assert tracker.failed() == []
    assert tracker.expected is None
    assert live(tracker, 2) == [Lost(0, 2), *delivered(2)]


def test_attempts_are_counted_for_each_replay() -> None:
    """Failures of one replay, once it has ended, are not held against the next."""
    tracker = GapTracker(can_replay=True, attempts=2)
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
    tracker = GapTracker(can_replay=False)
    live(tracker, 0, 1, 2)
    assert live(tracker, 1) == [Restarted(1), Lost(0, 1), *delivered(1)]
    assert live(tracker, 1) == [Restarted(1), Lost(0, 1), *delivered(1)]


@pytest.mark.parametrize("argument", ["max_held", "attempts"])
def test_arguments_have_bounds(argument: str) -> None:
    """A bound below 1 is the caller's error, named."""
    with pytest.raises(ValueError, match=f"{argument}: 0 is below 1"):
        GapTracker(can_replay=True, **{argument: 0})


# ------------------------------------------------------------------------------------ simulation


@dataclass
class Publisher:
    """Batch n adds block n. `retain` newest are kept; with `snapshots` older state is re-told.

    A snapshot says which blocks there are in up to two parts, of which the first one clears.
    """

    retain: int
    snapshots: bool
    count: int = 0

    def answer(self, start: int) -> deque[tuple[int, bytes]]:
        first = max(0, self.count - self.retain)
        frames = [(seq, b"add %d" % seq) for seq in range(max(first, start), self.count)]
        if not self.snapshots:
            return deque(frames)
        if start == JOIN:
            start = max(0, first - 2)
            frames = [(seq, b"add %d" % seq) for seq in range(first, self.count)]
        if start >= first:
            return deque(frames)
        parts = min(2, first - start)
        told = [b"clear"] + [b""] * (parts - 1)
        for part in range(parts):
            told[part] += b" tell" + b"".join(b" %d" % n for n in range(part, first, parts))
        fill = [b"nothing"] * (first - start - parts)
        return deque([*zip(range(start, first), told + fill, strict=True), *frames])


@dataclass
class Subscriber:
    """Does what a tracker says, checks G1 and G2 on the way, and holds what a router would believe."""

    tracker: GapTracker
    publisher: Publisher
    faithful: bool
    asked: Ask | None = None
    answers: deque[tuple[int, bytes]] | None = None
    last: int | None = None
    lost: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    latest_ask: Ask | None = None

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    self.asked, self.answers = action, None
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

    def check_order(self, action: Deliver) -> None:
        """G1: ascending, once each, and every hole is in `lost`."""
        joined = self.last is None and action.replayed and self.asked == Ask(JOIN)
        assert action.seq >= self.expected
        assert joined or self.lost.issuperset(range(self.expected, action.seq))
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
        self.do(self.tracker.live(seq, b"add %d" % seq))

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
            self.do(self.tracker.replayed(*self.answers.popleft()))
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
    steps: list[str], publisher: Publisher, tracker: GapTracker, *, faithful: bool
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
    tracker = GapTracker(can_replay=can_replay, max_held=max_held, attempts=attempts)
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
    tracker = GapTracker(can_replay=True, max_held=max_held)
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
    tracker = GapTracker(can_replay=False)
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
    answers(tracker, 3)
    assert tracker.failed() == [Ask(4)]
    assert live(tracker, 5) == []
    assert tracker.end() == [Gap(4, 1), Ask(4)]
    assert answers(tracker, 4) == delivered(4, replayed=True)
    assert tracker.end() == delivered(5)
