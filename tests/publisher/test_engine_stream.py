"""publisher.sidecar.engine_stream: engines that crash, forget, drop and fall silent, without a socket."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.codec import decode_batch
from publisher.link.messages import BATCH, FRESH
from publisher.sidecar.engine_stream import Ask, EngineStream, RelayStats, Step
from publisher.stream.input import Input

BUFFER = 5
"""How many batches the simulated engine keeps for replays."""


def body_of(run: int, number: int) -> bytes:
    """What batch `number` of a run says."""
    return b"%d:%d" % (run, number)


class Believer:
    """Who is told: the batches it has applied since its state began. Checks E1 and E2."""

    def __init__(self) -> None:
        self.state: list[bytes] = []
        self.expected = 0
        self.last: bytes | None = None

    def take(self, given: Input) -> None:
        assert given.flags & BATCH
        if given.flags & FRESH:
            assert decode_batch(given.body).batch.events == []
            self.state = []
        else:
            if given.number != self.expected:
                self.state = []
            self.state.append(given.body)
        self.expected, self.last = given.number + 1, given.body
        runs = {body.split(b":")[0] for body in self.state}
        numbers = [int(body.split(b":")[1]) for body in self.state]
        assert len(runs) <= 1  # E2
        assert not numbers or numbers == list(range(numbers[0], numbers[-1] + 1))  # E1


class World:
    """An engine, its two sockets, and a relay that is killed and started like everything else."""

    def __init__(self, *, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.believer = Believer()
        self.run, self.count = 0, 0
        self.connected = False
        self.live: deque[tuple[int, bytes]] = deque()
        self.answers: deque[tuple[int, bytes] | None] = deque()
        self.asked: int | None = None
        self.stream = EngineStream(can_replay=can_replay, clock=lambda: 1.0)

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                assert self.can_replay
                self.asked = step.start
                self.answers.clear()
            else:
                self.believer.take(step)
        if not self.stream.asking:
            self.asked = None
            self.answers.clear()

    # ------------------------------------------------------------------------ what may happen

    def publish(self, *, arrives: bool = True) -> None:
        if arrives and self.connected:
            self.live.append((self.count, body_of(self.run, self.count)))
        self.count += 1

    def lose(self) -> None:
        self.publish(arrives=False)

    def hear(self) -> None:
        if self.live and not self.stream.recovering:
            self.do(self.stream.live(*self.live.popleft()))

    def serve(self, keep: int | None = None, *, skip: int = 0) -> None:
        """Answer the request. `keep`: so many arrive, and no end marker; `skip`: so many after the first
        do not.
        """
        if self.asked is None:
            return
        found = range(max(self.asked, self.count - BUFFER, 0), self.count)
        answers = [(number, body_of(self.run, number)) for number in found]
        del answers[1 : 1 + skip]
        self.answers.extend(answers[:keep] if keep is not None else [*answers, None])
        self.asked = None

    def serve_short(self) -> None:
        self.serve(keep=2)

    def serve_with_a_hole(self) -> None:
        self.serve(skip=2)

    def answer(self) -> None:
        if self.answers:
            answer = self.answers.popleft()
            self.do(self.stream.ended() if answer is None else self.stream.answered(*answer))

    def fail(self) -> None:
        self.do(self.stream.failed())

    def cut(self) -> None:
        if self.connected:
            self.connected = False
            self.live.clear()
            self.stream.disconnected()
            self.do([])

    def crash(self) -> None:
        self.cut()
        self.run, self.count = self.run + 1, 0

    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            self.do(self.stream.connected())

    def give_up(self) -> None:
        if not self.connected:
            self.do(self.stream.gone())

    def probe(self) -> None:
        if self.connected:
            self.do(self.stream.probe())

    def kill_the_relay(self) -> None:
        """The next one knows what was told last, and by it what number is due."""
        self.cut()
        self.stream = EngineStream(can_replay=self.can_replay, clock=lambda: 1.0)
        self.stream.start(self.believer.expected, self.believer.last)

    # ------------------------------------------------------------------------------- the end

    def settle(self) -> None:
        """All is well, and quiet, until everything has been said."""
        self.connect()
        for _ in range(10_000):
            if self.asked is not None:
                self.serve()
            elif self.answers:
                self.answer()
            elif self.live and not self.stream.recovering:
                self.hear()
            elif self.stream.asking:
                self.do(self.stream.failed())
            elif self._is_told():
                return
            else:
                self.do(self.stream.probe())
                if not self.can_replay:
                    return
        raise AssertionError("it does not settle")

    def _is_told(self) -> bool:
        return not self.stream.diverged and self.stream.expected == self.count


Happenings = st.lists(
    st.sampled_from(
        [World.publish] * 6
        + [World.hear] * 6
        + [World.lose, World.serve, World.serve] * 2
        + [World.answer] * 6
        + [World.serve_short, World.serve_with_a_hole, World.fail, World.cut, World.crash]
        + [World.connect] * 4
        + [World.give_up, World.probe, World.kill_the_relay]
    ),
    min_size=40,
    max_size=150,
)


@given(Happenings)
def test_whatever_happens_the_engines_state_is_what_is_believed_in_the_end(
    happenings: list[object],
) -> None:
    """Never two runs mixed or a hole unnoticed on the way; when all is quiet, the newest batch is there,
    with all before it that the engine still had.
    """
    world = World(can_replay=True)
    world.connect()
    for happening in happenings:
        happening(world)  # type: ignore[operator]
    world.settle()
    state, count = world.believer.state, world.count
    assert state == [body_of(world.run, number) for number in range(count - len(state), count)]
    assert len(state) >= min(count, BUFFER)


@given(Happenings)
def test_without_a_replay_no_two_runs_are_mixed(happenings: list[object]) -> None:
    """A hole and a new connection each begin anew, and never is anything asked for."""
    world = World(can_replay=False)
    world.connect()
    for happening in happenings:
        happening(world)  # type: ignore[operator]
    world.settle()
    world.publish()
    world.hear()
    assert world.believer.state[-1] == body_of(world.run, world.count - 1)


# ---------------------------------------------------------------------------------- one at a time


def passed(*numbers: int, run: int = 0) -> list[Step]:
    return [Input(number, BATCH, body_of(run, number)) for number in numbers]


def fresh(stream: EngineStream, steps: list[Step]) -> list[Step]:
    """The steps after the first, which says that the state begins anew."""
    first = steps[0]
    assert isinstance(first, Input)
    assert (first.number, first.flags) == (0, BATCH | FRESH)
    assert decode_batch(first.body).batch.ts == 1.0
    return steps[1:]


def flags_of(stream: EngineStream) -> set[str]:
    """The properties of a stream that are true now."""
    return {name for name in ("asking", "recovering", "diverged") if getattr(stream, name)}


def joined(count: int, *, can_replay: bool = True, attempts: int = 3) -> EngineStream:
    """A stream that has been told `count` batches of run 0."""
    stream = EngineStream(can_replay=can_replay, attempts=attempts, clock=lambda: 1.0)
    assert stream.connected() == ([Ask(0)] if can_replay else [])
    if can_replay:
        assert stream.ended() == []
    for number in range(count):
        assert stream.live(number, body_of(0, number)) == passed(number)
    return stream


def test_a_hole_is_asked_for_from_the_last_that_came() -> None:
    """Its answer shows that the run is the same; the batch behind the hole waits for the end."""
    stream = joined(3)
    assert stream.live(5, body_of(0, 5)) == [Ask(2)]
    assert "recovering" in flags_of(stream)
    assert stream.answered(2, body_of(0, 2)) == []
    assert stream.answered(3, body_of(0, 3)) == passed(3)
    assert stream.answered(4, body_of(0, 4)) == passed(4)
    assert stream.ended() == passed(5)
    assert stream.stats == RelayStats(received=4, gaps=1, replayed=2)


def test_a_hole_that_nobody_can_fill_is_a_jump() -> None:
    """The log begins after it, or has nothing at all."""
    stream = joined(2)
    stream.live(9, body_of(0, 9))
    assert stream.answered(8, body_of(0, 8)) == passed(8)
    assert stream.answered(9, body_of(0, 9)) == passed(9)
    assert stream.ended() == []
    assert stream.live(12, body_of(0, 12)) == [Ask(9)]
    assert stream.ended() == passed(12)
    assert stream.stats.lost == 6 + 2


def test_an_answer_that_stops_short_is_continued_as_long_as_it_gets_further() -> None:
    """However often; and in vain only so often as was allowed, then the hole is passed over."""
    stream = joined(1, attempts=2)
    assert stream.live(90, body_of(0, 90)) == [Ask(0)]
    for number in range(1, 30):
        assert stream.answered(number, body_of(0, number)) == passed(number)
        assert stream.failed() == [Ask(number)]
    assert stream.answered(29, body_of(0, 29)) == []
    assert stream.failed() == [Ask(29)]
    assert stream.failed() == passed(90)
    assert "diverged" in flags_of(stream)
    assert stream.stats.lost == 60


def test_a_hole_in_an_answer_is_asked_for_once_more() -> None:
    """A full queue drops from the middle; but a number that the engine skipped will never come."""
    stream = joined(1)
    stream.live(9, body_of(0, 9))
    assert stream.answered(1, body_of(0, 1)) == passed(1)
    assert stream.answered(4, body_of(0, 4)) == [Ask(1)]
    assert stream.answered(1, body_of(0, 1)) == []
    assert stream.answered(4, body_of(0, 4)) == passed(4)
    assert stream.stats.lost == 2


def test_another_batch_in_the_last_ones_place_is_another_run() -> None:
    """Behind a new connection or in an answer to a hole: all begins anew, and is asked for from 0."""
    stream = joined(3)
    stream.disconnected()
    assert stream.connected() == [Ask(2)]
    assert fresh(stream, stream.answered(2, body_of(1, 2))) == [Ask(0)]
    assert stream.answered(0, body_of(1, 0)) == passed(0, run=1)
    assert stream.ended() == []
    stream.live(4, body_of(2, 4))
    assert fresh(stream, stream.answered(0, body_of(2, 0))) == [Ask(0)]
    assert stream.stats.restarts == 2


def test_an_engine_that_has_less_than_was_told_is_another_run() -> None:
    """It answers nothing; asked again from 0 it may have nothing at all, and begins with what comes."""
    stream = joined(3)
    stream.disconnected()
    stream.connected()
    assert fresh(stream, stream.ended()) == [Ask(0)]
    assert stream.ended() == []
    assert stream.live(0, body_of(1, 0)) == passed(0, run=1)


def test_a_log_that_begins_after_the_last_one_cannot_tell_the_run() -> None:
    """After a new connection that is another run, even if the numbers would go on."""
    stream = joined(3)
    stream.disconnected()
    stream.connected()
    assert fresh(stream, stream.answered(3, body_of(1, 3))) == [Ask(0)]
    assert stream.answered(3, body_of(1, 3)) == passed(3, run=1)


def test_the_same_run_goes_on_after_a_cut() -> None:
    """What came meanwhile is replayed, and nothing begins anew."""
    stream = joined(3)
    stream.disconnected()
    assert stream.connected() == [Ask(2)]
    assert stream.answered(2, body_of(0, 2)) == []
    assert stream.answered(3, body_of(0, 3)) == passed(3)
    assert stream.ended() == []
    assert stream.live(3, body_of(0, 3)) == []
    assert stream.live(4, body_of(0, 4)) == passed(4)
    assert stream.stats == RelayStats(received=5, replayed=1)


@pytest.mark.parametrize("can_replay", [True, False])
def test_live_numbers_that_go_back_are_another_run(can_replay: bool) -> None:
    """On one connection too, through a proxy that keeps it."""
    stream = joined(3, can_replay=can_replay)
    rest = fresh(stream, stream.live(0, body_of(1, 0)))
    if can_replay:
        assert rest == [Ask(0)]
        assert stream.answered(0, body_of(1, 0)) == passed(0, run=1)
        assert stream.ended() == []
    else:
        assert rest == passed(0, run=1)
    assert stream.live(1, body_of(1, 1)) == passed(1, run=1)
    assert stream.stats.restarts == 1


def test_without_a_replay_a_new_connection_is_another_run() -> None:
    """Though the numbers go on: what came meanwhile might have been of another one."""
    stream = joined(2, can_replay=False)
    stream.disconnected()
    assert stream.connected() == []
    assert fresh(stream, stream.live(2, body_of(0, 2))) == passed(2)


def test_a_death_is_told_once() -> None:
    """And not at all when nothing was told; the next run begins at its 0."""
    stream = joined(2)
    stream.disconnected()
    assert fresh(stream, stream.gone()) == []
    assert stream.gone() == []
    assert stream.expected == 0
    assert stream.connected() == [Ask(0)]


def test_a_quiet_engine_may_have_said_more() -> None:
    """A probe finds what was lost at the end; one that finds nothing or has no answer does not harm."""
    stream = joined(2)
    assert stream.probe() == [Ask(1)]
    assert "recovering" not in flags_of(stream)
    assert stream.probe() == []
    assert stream.answered(1, body_of(0, 1)) == []
    assert stream.answered(2, body_of(0, 2)) == passed(2)
    assert "recovering" in flags_of(stream)
    assert stream.ended() == []
    assert stream.stats.gaps == 1
    assert stream.probe() == [Ask(2)]
    assert stream.failed() == []
    assert "asking" not in flags_of(stream)
    assert stream.probe() == [Ask(2)]
    assert stream.ended() == []
    assert "diverged" not in flags_of(stream)
    assert stream.probe() == [Ask(2)]
    assert stream.live(3, body_of(0, 3)) == passed(3)
    assert "asking" not in flags_of(stream)


def test_what_was_given_up_is_asked_for_later() -> None:
    """When the engine answers again all of it is told anew; until then the live batches are passed on."""
    stream = joined(1, attempts=1)
    stream.live(3, body_of(0, 3))
    assert stream.failed() == passed(3)
    assert "diverged" in flags_of(stream)
    assert stream.probe() == [Ask(0)]
    assert stream.live(4, body_of(0, 4)) == passed(4)
    assert stream.failed() == []
    assert "diverged" in flags_of(stream)
    assert stream.probe() == [Ask(0)]
    assert fresh(stream, stream.answered(0, body_of(0, 0))) == passed(0)
    assert "diverged" not in flags_of(stream)
    for number in range(1, 5):
        assert stream.answered(number, body_of(0, number)) == passed(number)
    assert stream.ended() == []
    assert stream.live(5, body_of(0, 5)) == passed(5)


def test_a_join_that_is_not_answered_is_another_run() -> None:
    """Whether it still is the same cannot be known; what comes live begins anew."""
    stream = joined(2, attempts=1)
    stream.disconnected()
    stream.connected()
    assert fresh(stream, stream.failed()) == []
    assert "diverged" in flags_of(stream)
    assert stream.live(0, body_of(1, 0)) == passed(0, run=1)


@pytest.mark.parametrize(("last", "same"), [(b"0:6", True), (None, True), (b"9:6", False)])
def test_a_later_process_goes_on_where_the_first_one_ended(last: bytes | None, same: bool) -> None:
    """With the batch that was told last it knows the run; without, it has to trust the number."""
    stream = EngineStream(can_replay=True, clock=lambda: 1.0)
    stream.start(7, last)
    assert stream.expected == 7
    assert stream.connected() == [Ask(6)]
    steps = stream.answered(6, body_of(0, 6))
    if same:
        assert steps == []
        assert stream.answered(7, body_of(0, 7)) == passed(7)
    else:
        assert fresh(stream, steps) == [Ask(0)]


def test_what_answers_no_question_is_ignored() -> None:
    """A late answer, end or failure changes nothing."""
    stream = joined(1)
    assert stream.answered(1, body_of(0, 1)) == []
    assert stream.ended() == []
    assert stream.failed() == []
    assert stream.expected == 1


def test_at_least_one_attempt() -> None:
    """Anything below 1 is refused."""
    with pytest.raises(ValueError, match="attempts: 0 is below 1"):
        EngineStream(can_replay=True, attempts=0)


def test_who_was_never_there_has_not_gone() -> None:
    """Nothing was told of it, so nothing is cleared, and it counts as no departure."""
    stream = EngineStream(can_replay=True, clock=lambda: 1.0)
    assert stream.gone() == []
    assert stream.stats == RelayStats()
    stream = joined(1)
    stream.disconnected()
    assert fresh(stream, stream.gone()) == [] == stream.gone()
    assert stream.stats == RelayStats(received=1, departures=1)


def test_a_new_connection_has_all_the_attempts() -> None:
    """What was not answered on the old one is not held against it."""
    stream = joined(1, attempts=2)
    stream.live(3, body_of(0, 3))
    assert stream.failed() == [Ask(0)]
    stream.disconnected()
    assert stream.connected() == [Ask(0)]
    assert stream.failed() == [Ask(0)]
    assert stream.stats.given_up == 0


def test_what_is_given_up_is_not_asked_for_again_at_once() -> None:
    """Though the engine answered with the last batch, and then no more; it is counted."""
    stream = joined(1, attempts=1)
    stream.live(3, body_of(0, 3))
    assert stream.answered(0, body_of(0, 0)) == []
    assert stream.failed() == passed(3)
    assert stream.stats == RelayStats(received=2, gaps=1, lost=2, given_up=1)


def test_a_new_run_may_have_a_hole_where_the_old_one_had() -> None:
    """E3: that it was asked for once more in the old one is no reason not to in the new one."""
    stream = joined(1)
    stream.live(9, body_of(0, 9))
    stream.answered(0, body_of(0, 0))
    assert stream.answered(8, body_of(0, 8)) == [Ask(0)]
    assert stream.answered(0, body_of(0, 0)) == []
    assert stream.answered(8, body_of(0, 8)) == passed(8)
    assert stream.ended() == passed(9)
    assert fresh(stream, stream.live(0, body_of(1, 0))) == [Ask(0)]
    assert stream.answered(0, body_of(1, 0)) == passed(0, run=1)
    assert stream.answered(2, body_of(1, 2)) == [Ask(0)]


def test_what_waits_on_a_connection_that_is_cut_is_dropped() -> None:
    """E2: the run behind the next one may be another, and what waited is of the old one."""
    stream = joined(3)
    assert stream.live(5, body_of(0, 5)) == [Ask(2)]
    stream.disconnected()
    assert stream.connected() == [Ask(2)]
    assert fresh(stream, stream.answered(2, body_of(1, 2))) == [Ask(0)]
    for number in range(3):
        assert stream.answered(number, body_of(1, number)) == passed(number, run=1)
    assert stream.ended() == []
    assert stream.live(3, body_of(1, 3)) == passed(3, run=1)


def test_the_same_number_again_is_another_run() -> None:
    """Of an engine that ended after its first batch, as the next one does, unnoticed in between."""
    stream = joined(1)
    assert fresh(stream, stream.live(0, body_of(1, 0))) == [Ask(0)]
    assert stream.answered(0, body_of(1, 0)) == passed(0, run=1)
    assert stream.ended() == []


def test_an_answer_that_goes_beyond_what_waits_brings_it_once() -> None:
    """E1: the engine published more while it answered."""
    stream = joined(3)
    stream.live(5, body_of(0, 5))
    assert stream.answered(2, body_of(0, 2)) == []
    for number in range(3, 8):
        assert stream.answered(number, body_of(0, number)) == passed(number)
    assert stream.ended() == []
    assert stream.expected == 8
    assert stream.stats == RelayStats(received=4, gaps=1, replayed=5)


def test_an_engine_that_keeps_nothing_any_more_is_asked_no_more_for_all() -> None:
    """What was given up is not there: a later probe is for what follows."""
    stream = joined(1, attempts=1)
    stream.live(3, body_of(0, 3))
    stream.failed()
    assert stream.probe() == [Ask(0)]
    assert stream.ended() == []
    assert "diverged" not in flags_of(stream)
    assert stream.probe() == [Ask(3)]
