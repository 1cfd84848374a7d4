"""kvevents.follower: a capture shows again what was seen live, and anything may be in it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvevents.follower import Arrival, Follower, Malformed, Told
from kvevents.frames import (
    JOIN,
    MAX_SEQ,
    live_frames,
    replay_answer,
    replay_end,
    replay_request,
    reset_frames,
)
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel, Message

END = replay_end(delimited=True)


def live(seq: int, payload: bytes = b"x", topic: bytes = b"t") -> Message:
    return Message(seq * 10, Channel.LIVE, live_frames(topic, seq, payload))


def asked(start: int) -> Message:
    return Message(1, Channel.ASKED, replay_request(start))


def answer(seq: int, payload: bytes = b"x", topic: bytes | None = b"t") -> Message:
    return Message(2, Channel.ANSWER, replay_answer(topic, seq, payload, delimited=True))


def other(channel: Channel, frames: list[bytes] | None = None) -> Message:
    return Message(3, channel, frames or [])


CONNECTED, OVER, ENDED = other(Channel.CONNECTED), other(Channel.OVER), other(Channel.ANSWER, END)


def told(seq: int, *, replayed: bool = False, topic: bytes = b"t") -> Told:
    return Told(seq, b"x", replayed, topic, 2 if replayed else seq * 10)


def of(messages: list[Message], follower: Follower) -> list[Arrival]:
    """All that these bring."""
    return [arrival for message in messages for arrival in follower.take(message)]


def of_capture(*messages: Message, can_replay: bool = True) -> list[Arrival]:
    """What a capture brings, to its end."""
    follower = Follower(can_replay=can_replay, start=None)
    return [*of(list(messages), follower), *follower.close()]


# -------------------------------------------------------------------------------------- live


def test_the_first_request_is_due_at_once() -> None:
    """From where it was told to start; nothing, where it was told so or cannot ask."""
    assert Follower(can_replay=True).asking == JOIN
    assert Follower(can_replay=True, start=7).asking == 7
    assert Follower(can_replay=True, start=None).asking is None
    assert Follower(can_replay=False).asking is None


def test_a_join_and_what_came_meanwhile() -> None:
    """The state, then what follows, each once, with its time and topic."""
    follower = Follower(can_replay=True)
    messages = [CONNECTED, asked(JOIN), live(22), live(23), answer(20), answer(21, topic=None)]
    assert of([*messages, answer(22), ENDED], follower) == [
        told(20, replayed=True),
        told(21, replayed=True, topic=b""),
        told(22, replayed=True),
        told(23),
    ]
    assert (follower.next_seq, follower.recovering, follower.asking) == (24, False, None)


def test_a_gap_is_asked_for() -> None:
    """It is said, asked for, and filled before what is behind it is told."""
    follower = Follower(can_replay=True, start=None)
    assert of([CONNECTED, live(0), live(3)], follower) == [told(0), Gap(1, 2)]
    assert follower.asking == 1
    messages = [asked(1), answer(1), answer(2), answer(3), ENDED]
    assert of(messages, follower) == [told(seq, replayed=True) for seq in (1, 2, 3)]


def test_a_replay_that_is_over_is_asked_for_again() -> None:
    """As many times as it was told, then what is missing is lost, and it can be tried anew."""
    follower = Follower(can_replay=True, start=None, attempts=2)
    of([live(0), live(3), asked(1), OVER], follower)
    assert follower.asking == 1
    assert of([asked(1), OVER], follower) == [Lost(1, 2), told(3)]
    assert follower.diverged and not follower.recovering
    assert follower.rejoin() == []
    assert follower.asking == JOIN


def test_a_request_that_was_not_made_has_failed() -> None:
    """Whoever has no socket to ask with is not waited for."""
    follower = Follower(can_replay=True)
    assert of([live(3), live(4)], follower) == [Lost(0, 3), told(3), told(4)]
    assert follower.asking is None


def test_an_answer_whose_seq_cannot_be() -> None:
    """It is no answer: were it taken for one, whatever came live would count as told."""
    follower = Follower(can_replay=True, attempts=2)
    assert of([asked(JOIN), live(3)], follower) == []
    for end in ([], [Lost(0, 3), told(3)]):
        malformed, *others = follower.take(answer(MAX_SEQ + 1))
        assert isinstance(malformed, Malformed) and "9223372036854775808" in malformed.reason
        assert others == end
        if follower.asking is not None:
            follower.take(asked(JOIN))
    assert of([live(4)], follower) == [told(4)]


def test_an_answer_of_another_topic() -> None:
    """It is another stream's, and as good as none; one that says no topic is believed."""
    follower = Follower(can_replay=True, attempts=1, topic=b"kv@a")
    assert of([asked(JOIN), answer(7, topic=None), answer(8, topic=b"kv@a@m")], follower) == [
        told(7, replayed=True, topic=b""),
        told(8, replayed=True, topic=b"kv@a@m"),
    ]
    (malformed,) = follower.take(answer(9, topic=b""))  # an empty one is one too
    assert isinstance(malformed, Malformed)
    assert malformed.reason == "replay answer: its topic is '', not 'kv@a'"
    follower = Follower(can_replay=True, attempts=1, topic=b"kv@a")
    of([asked(JOIN)], follower)
    (malformed,) = follower.take(answer(9, topic=b"kv@b\xff\n"))
    assert isinstance(malformed, Malformed)
    assert malformed.reason == r"replay answer: its topic is 'kv@b\\xff\n', not 'kv@a'"
    assert not follower.recovering


def test_what_is_held_can_be_seen() -> None:
    """How much waits for a replay, by frames, and no more than may."""
    follower = Follower(can_replay=True, max_held_bytes=3000)
    of([asked(JOIN), *(live(seq, bytes(1000)) for seq in range(5))], follower)
    assert (follower.held, follower.recovering) == (2, True)
    of([OVER, asked(JOIN), OVER, asked(JOIN), OVER], follower)
    assert (follower.held, follower.recovering) == (0, False)


def test_what_may_be_our_own_loss() -> None:
    """Between these two, and they bring nothing else."""
    follower = Follower(can_replay=False)
    seen = []
    for channel in (Channel.BEHIND, Channel.LIVE, Channel.ABREAST):
        message = live(0) if channel == Channel.LIVE else other(channel)
        seen.append((len(follower.take(message)), follower.behind))
    assert seen == [(0, True), (1, True), (0, False)]


def test_a_new_connection_asks_for_the_mark() -> None:
    """The batch that was told last; if it is another one there, the state is asked for."""
    follower = Follower(can_replay=True, start=None)
    of([CONNECTED, live(0), live(1), other(Channel.DISCONNECTED), CONNECTED], follower)
    assert follower.connections == 2 and follower.asking == 1
    assert of([asked(1), answer(1), ENDED, live(2)], follower) == [told(2)]
    of([CONNECTED, asked(2), answer(2, b"other")], follower)
    assert follower.asking == JOIN


def test_malformed_messages_cost_themselves() -> None:
    """They are told as such; an answer that is none has failed its replay."""
    follower = Follower(can_replay=True, start=None, attempts=1)
    odd = [other(Channel.LIVE, [b"x"]), other(Channel.LIVE, reset_frames(b"")), other(Channel.LIVE)]
    got = of([live(0), *odd, live(2), asked(1), other(Channel.ANSWER, [b"", b"x"])], follower)
    malformed = [one for one in got if isinstance(one, Malformed)]
    assert [one.message for one in malformed] == [*odd, other(Channel.ANSWER, [b"", b"x"])]
    assert all(one.reason for one in malformed)
    assert [one for one in got if one not in malformed] == [
        told(0),
        Gap(1, 1),
        Lost(1, 1),
        told(2),
    ]


def test_seqs_that_go_back_are_a_restart() -> None:
    """It is said, and the state asked for."""
    follower = Follower(can_replay=True, start=None)
    assert of([live(0), live(1), live(0)], follower)[-1] == Restarted(0)
    assert follower.asking == JOIN
    assert of([asked(JOIN), ENDED, asked(0), ENDED], follower) == [told(0)]


# ---------------------------------------------------------------------------------- captures


def test_what_is_held_at_the_end_of_a_capture_is_told() -> None:
    """A replay that has no end in it is given up."""
    assert of_capture(CONNECTED, asked(JOIN), live(5)) == [Lost(0, 5), told(5)]
    assert of_capture(live(0), live(2), asked(1)) == [told(0), Gap(1, 1), Lost(1, 1), told(2)]


def test_requests_of_a_capture_without_a_replay_endpoint_are_nothing() -> None:
    """It says that there was none."""
    messages = (live(0), live(2), asked(1), answer(1), ENDED)
    expected = [told(0), Gap(1, 1), Lost(1, 1), told(2)]
    assert of_capture(*messages, can_replay=False) == expected


def test_another_recorder_may_ask_for_what_it_likes() -> None:
    """A request that we would not make is no reason to lose anything; JOIN is a new beginning."""
    messages = [
        live(0),
        asked(0),
        answer(0),
        ENDED,
        live(1),
        asked(JOIN),
        answer(1),
        ENDED,
        live(2),
    ]
    assert of_capture(*messages) == [
        told(0),
        told(1),
        told(1, replayed=True),
        told(2),
    ]


def test_a_recorder_that_does_not_close_gaps() -> None:
    """What we would have asked for and it did not is lost, as it was for it."""
    assert of_capture(CONNECTED, live(0), live(2), live(3)) == [
        told(0),
        Gap(1, 1),
        Lost(1, 1),
        told(2),
        told(3),
    ]


def test_a_recorder_that_asks_elsewhere() -> None:
    """For the whole instead of the hole: what was due has failed, and nothing is told twice."""
    got = of_capture(live(0), live(2), asked(0), answer(0), answer(1), answer(2), ENDED, live(3))
    seqs = [one.seq for one in got if isinstance(one, Told)]
    assert seqs == sorted(set(seqs)) and {0, 2, 3} <= set(seqs)


class Run:
    """A live run, as a listener makes it: a request is made as soon as it is due and can be."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.messages: list[Message] = []
        self.arrivals: list[list[Arrival]] = []

    def take(self, message: Message) -> None:
        if message.channel in (Channel.ANSWER, Channel.OVER) and not self.is_asking:
            return  # there is no socket that it could come from
        if message.channel == Channel.LIVE and not self.follower.connections:
            return
        self._note(message, [])
        self._ask_next([])

    def rejoin(self) -> None:
        if self.follower.diverged:
            self._ask_next(self.follower.rejoin())

    @property
    def is_asking(self) -> bool:
        return self.follower.recovering and self.follower.asking is None

    def _ask_next(self, arrivals: list[Arrival]) -> None:
        start = self.follower.asking
        if start is not None and self.follower.connections:
            self._note(asked(start), arrivals)

    def _note(self, message: Message, before: list[Arrival]) -> None:
        self.messages.append(message)
        self.arrivals.append([*before, *self.follower.take(message)])


SEQS, PAYLOADS = st.integers(0, 7), st.sampled_from([b"x", b"y"])
MESSAGES = st.one_of(
    st.builds(live, SEQS, PAYLOADS),
    st.builds(answer, SEQS, PAYLOADS, st.sampled_from([b"t", None])),
    st.sampled_from([ENDED, ENDED, OVER, CONNECTED]),
    st.builds(other, st.sampled_from(Channel), st.lists(st.binary(max_size=9), max_size=4)).filter(
        lambda one: one.channel != Channel.ASKED
    ),
    st.just("rejoin"),
)


def run_of(steps: list[Message | str], follower: Follower) -> Run:
    run = Run(follower)
    run.take(CONNECTED)
    for step in steps:
        if isinstance(step, Message):
            run.take(step)
        else:
            run.rejoin()
    return run


@settings(max_examples=500)
@given(
    st.lists(MESSAGES, max_size=40),
    st.booleans(),
    st.sampled_from([None, JOIN, 0, 3]),
    st.integers(1, 3),
    st.integers(1, 4),
)
@example([live(0), live(2), OVER, OVER, OVER, "rejoin", ENDED], True, JOIN, 3, 4)
def test_a_capture_brings_what_came_live(
    steps: list[Message | str], can_replay: bool, start: int | None, attempts: int, max_held: int
) -> None:
    """Message by message, the same: gaps, replays, restarts, new connections, nonsense."""
    bounds = {"can_replay": can_replay, "attempts": attempts, "max_held": max_held}
    run = run_of(steps, Follower(start=start, **bounds))  # type: ignore[arg-type]
    again = Follower(start=None, **bounds)  # type: ignore[arg-type]
    assert [again.take(message) for message in run.messages] == run.arrivals
    assert again.next_seq == run.follower.next_seq
    assert again.close() == run.follower.close()


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            MESSAGES.filter(lambda one: isinstance(one, Message)),
            st.builds(asked, st.one_of(SEQS, st.just(JOIN))),
            st.builds(other, st.just(Channel.ASKED), st.lists(st.binary(max_size=9), max_size=3)),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_anything_may_be_in_a_capture(messages: list[Message], can_replay: bool) -> None:
    """Requests at any time, and what was never asked for: never an error, and G1 holds: seqs ascend,
    with each hole said, but for a restart or where a state was asked for.
    """
    follower = Follower(can_replay=can_replay, start=None, max_held=5)
    expected: int | None = None
    for message in messages:
        fresh = message.channel in (Channel.ASKED, Channel.CONNECTED)
        for arrival in follower.take(message):
            match arrival:
                case Told(seq=seq):
                    assert expected is None or seq == expected
                    expected = seq + 1
                case Lost(first=first, count=count):
                    assert expected is None or first == expected
                    expected = first + count
                case Restarted():
                    expected = None
        if fresh or (can_replay and follower.next_seq is None):
            expected = None
    follower.close()
    assert not follower.recovering


@pytest.mark.parametrize("frames", [[], [b""], [b"x" * 7], [b"\xff" * 9], [bytes(5000)]])
def test_a_forged_request_of_a_capture(frames: list[bytes]) -> None:
    """It asks for nothing in particular, and is no error."""
    assert of_capture(other(Channel.ASKED, frames), answer(0), ENDED, live(1)) == [
        told(0, replayed=True),
        told(1),
    ]


def test_half_a_state_is_asked_for_as_a_whole() -> None:
    """An answer to a hole may tell the state anew: the seqs in it mean nothing in another answer."""
    follower = Follower(can_replay=True, start=None)
    of([CONNECTED, live(0), live(5), asked(1), answer(3, b"AllBlocksCleared"), OVER], follower)
    assert follower.asking == JOIN


def test_topics_count_as_what_is_held() -> None:
    """A publisher chooses them, and they may be as long as it likes."""
    follower = Follower(can_replay=True, max_held_bytes=3000)
    of([asked(JOIN), *(live(seq, b"", bytes(1000)) for seq in range(5))], follower)
    assert follower.held == 2
