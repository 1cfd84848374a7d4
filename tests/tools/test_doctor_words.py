"""What a doctor says of bytes of any kind, and what its findings come to. No sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import payload_of

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.frames import live_frames, replay_answer, replay_end
from kvevents.lint import CONSUMERS
from publisher.config.checks import one_line
from publisher.config.endpoint import Endpoint
from publisher.tools.colour import painter
from publisher.tools.doctor.asking import Page, judge_ready, judge_state
from publisher.tools.doctor.content import Content
from publisher.tools.doctor.diagnosis import (
    Arrivals,
    Finding,
    conclusion,
    exit_code,
    last_lines,
    lines,
)
from publisher.tools.doctor.judging import (
    enough,
    judge_content,
    judge_fit,
    judge_liveness,
    judge_replay,
    judge_topic,
)
from publisher.tools.doctor.listening import Heard, has_room

OK = Finding("connect", "ok", "all is well")
WRONG = Finding("replay", "wrong", "it is red", "paint it")
STOPS = Finding("topic", "wrong", "it is cut", "mend it", stops=True)
OFFLINE = Finding("connect", "wrong", "nobody is there", stops=True, offline=True)
IDLE = Finding("events", "unknown", "nothing happens", "send it a prompt", stops=True)
VOID = Finding("fit", "wrong", "it reads maps only", "send maps", voids="all")
MOSTLY = Finding("fit", "wrong", "it drops some", "send others", voids="most")
SUM = Finding("fit", "wrong", "it loses all", sums_up=True)
SIZE = Finding("blocks", "wrong", "blocks are small", "make them large", voids="all")
MAYBE = Finding("content", "unknown", "token_ids are left out", "tell them")
STORED = BlockStored([7], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)


# -------------------------------------------------------------------------------------- the findings


@pytest.mark.parametrize(
    ("findings", "arrivals", "said", "code"),
    [
        ([OK], Arrivals(2, 3), "Events arrive: 2 batches were received, and nothing wrong", 0),
        ([OK], Arrivals(1, 0), "The stream is alive: 1 batch was received, and nothing wrong", 0),
        ([OK, WRONG], Arrivals(2, 3), "Events arrive: 2 batches were received, but it is red.", 1),
        ([WRONG, WRONG, WRONG], Arrivals(2, 3), "it is red (and 2 things more are wrong).", 1),
        ([WRONG, STOPS], Arrivals(2, 3), "Nothing arrives because it is cut.", 1),
        ([OK, WRONG], Arrivals(), "Nothing arrives because it is red.", 1),
        ([OFFLINE], Arrivals(), "Nothing arrives because nobody is there.", 3),
        ([OK, IDLE], Arrivals(), "Nothing arrives because nothing happens.", 0),
        ([WRONG, IDLE], Arrivals(), "Nothing arrives because nothing happens.", 1),
        (
            [IDLE, OK],
            Arrivals(3, 1),
            "nothing wrong was found. What may matter: nothing happens.",
            0,
        ),
        ([MAYBE, OK], Arrivals(3, 1), "What may matter: token_ids are left out.", 0),
        (
            [WRONG, VOID],
            Arrivals(1, 1),
            "but the router has no use for them: it reads maps only (and 1 thing more is wrong).",
            1,
        ),
        ([VOID, STOPS], Arrivals(1, 1), "Nothing arrives because it is cut.", 1),
        ([SIZE, VOID, SUM], Arrivals(1, 1), "them: it reads maps only (and 1 thing more is", 1),
        ([SIZE, SUM], Arrivals(2, 0), "but the router has no use for what it says: blocks are", 1),
        ([MOSTLY, SUM], Arrivals(1, 1), "no use for most of them: it drops some.", 1),
        (
            [IDLE, SUM, VOID],
            Arrivals(),
            "No message came, and the router has no use for what is",
            1,
        ),
        (
            [IDLE, WRONG, replace(VOID, voids=None)],
            Arrivals(),
            "No message came, and of what is replayed: it reads maps only (and 1 thing more is",
            1,
        ),
        ([IDLE, STOPS], Arrivals(1, 0), "Nothing arrives because it is cut.", 1),
    ],
)
def test_what_they_come_to(
    findings: list[Finding], arrivals: Arrivals, said: str, code: int
) -> None:
    """What stops everything is the reason, then what makes it useless; else what arrives, and what is
    wrong with it. What to change goes with it.
    """
    last = conclusion(findings, arrivals)
    assert said in last.text
    assert last.verdict == ("wrong" if code else "ok")
    causes = {one.text: one.advice for one in findings if one.verdict != "ok"}
    assert last.advice == next((causes[one] for one in causes if one in last.text), "")
    assert exit_code(findings) == code


def test_lines_for_80_columns() -> None:
    """Text and advice are wrapped below themselves; a pipe gets one line of each."""
    finding = Finding("handshake", "wrong", "a word " * 30 + "\x1b[2J", "do this " * 20)
    plain = painter(colours=False)
    wrapped = lines(finding, plain, 80)
    assert max(map(len, wrapped)) <= 80
    assert wrapped[0].startswith("!!  handshake  a word")
    assert wrapped[1].startswith(" " * 15 + "word a")
    assert len(lines(finding, plain, None)) == 2
    assert not any("\x1b" in line for line in wrapped)
    last = conclusion([finding], Arrivals())
    assert max(map(len, last_lines(last, 80))) <= 80
    (line,) = last_lines(last, None)
    assert line.endswith(" → see 'handshake' above")
    (line,) = last_lines(conclusion([WRONG], Arrivals()), None)
    assert line.endswith(" → paint it")
    assert lines(OK, painter(colours=True), None) == ["\x1b[32mok\x1b[0m  connect    all is well"]


# ------------------------------------------------------------------------------- what came, in order


def judged(heard: Heard, name: str, *, block_size: int | None = None) -> list[Finding]:
    """All that is said of it for a router."""
    return [
        judge_liveness(heard),
        *judge_topic(heard, ""),
        *judge_content(heard, block_size),
        *judge_fit(heard, CONSUMERS[name]),
    ]


def last_of(heard: Heard, findings: list[Finding]) -> str:
    return conclusion(findings, Arrivals(heard.live.batches, heard.live.events)).text


ARRAY = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [1], 1, None, "GPU"]], 0])
SIGNED = BlockStored([-7], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)


def of_replay(*payloads: bytes, topic: bytes = b"", ended: bool = True) -> Heard:
    """Nothing came live."""
    answers = [replay_answer(topic, seq, one, delimited=True) for seq, one in enumerate(payloads)]
    return Heard(Content(), content_of(answers, 0), 1.0, True, True, ended)


@pytest.mark.parametrize("ended", [True, False])
def test_a_replay_is_judged_where_nothing_comes(ended: bool) -> None:
    """To its end or not, by the router and the block size; a heartbeat does not change that."""
    heard = of_replay(payload_of(SIGNED), payload_of(SIGNED), ended=ended)
    for live in ([], [live_frames(b"", 9, payload_of())]):
        heard = replace(heard, live=content_of(live))
        findings = judged(heard, "vllm-router", block_size=16)
        assert "vllm-router drops the batch: events[0].block_hashes[0]" in last_of(heard, findings)
        assert [one.voids for one in findings if one.voids] == ["all", "all"]
        assert exit_code(findings) == 1
        fits = judged(heard, "smg", block_size=4)
        assert [one.verdict for one in fits if one.probe in ("blocks", "fit")] == ["ok", "ok"]


def test_a_replay_that_cannot_be_read() -> None:
    """It is not that there is no event in it."""
    for payload, what in (
        (b"\xc1", "no payload"),
        (ARRAY.replace(b"Stored", b"Stolen"), "no event"),
    ):
        finding = judge_liveness(of_replay(payload, payload))
        assert (finding.verdict, finding.stops) == ("wrong", True)
        assert finding.text.startswith(f"{what} of 2 replayed batches can be read: ")
    findings = list(judge_content(of_replay(payload_of(STORED), b"\xc1"), None))
    assert any(one.text.startswith("1 of 2 replayed payloads cannot") for one in findings)


CLEARED = AllBlocksCleared()
REMOVED = BlockRemoved([7], medium=StorageMedium.GPU)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("live", "told", "said"),
    [
        ([], [], "none has an event"),
        ([()], [], "none has an event"),
        ([], [CLEARED], "none stores a block"),
        ([()], [CLEARED], "none stores a block"),
        ([()], [REMOVED], "none stores a block"),
        ([(CLEARED,)], [CLEARED], "none stores a block"),
    ],
)
def test_a_replay_that_was_cut_proves_no_absence(
    live: list[tuple[Event, ...]], told: list[Event], said: str, ended: bool
) -> None:
    """What it was not seen to hold is said of the part that was read, and nothing is wrong for it; an
    END of an earlier replay does not change that. One that was read to its end proves it.
    """
    payloads = [payload_of(*told), payload_of()]
    messages = [live_frames(b"", 9, payload_of(*one)) for one in live]
    heard = replace(of_replay(*payloads, ended=ended), live=content_of(messages), cut=True)
    finding = judge_liveness(heard)
    assert finding.verdict == "unknown"
    assert finding.text.endswith(
        f"of the first 2 batches of its replay {said}; the rest was not looked at"
    )
    whole = judge_liveness(replace(heard, ended=True, cut=False))
    assert "not looked at" not in whole.text
    assert whole.verdict == ("unknown" if REMOVED in told else "wrong")


def test_a_replay_that_was_cut_has_more() -> None:
    """What it does hold is told as a part of it."""
    heard = replace(of_replay(payload_of(STORED)), cut=True)
    assert judge_liveness(heard).text.endswith("1 block stored, to seq 0, and more")
    assert judge_replay("there", heard).text.endswith("to seq 0, and more")
    assert judge_liveness(replace(of_replay(b"\xc1"), cut=True)).text.startswith(
        "no payload of the first 1 replayed batch can be read"
    )
    heard = Heard(Content(), Content(start=0), 1.0, True, True, cut=True)
    for finding in (judge_replay("there", heard), judge_liveness(heard)):
        assert "its replay was not read to its end" in finding.text


@pytest.mark.parametrize(
    ("start", "messages", "empty", "stored", "room"),
    [
        (0, 3000, 2999, 0, True),
        (0, 19_999, 19_999, 0, True),
        (0, 20_000, 20_000, 0, False),
        (0, 3000, 0, 0, False),
        (0, 3500, 3499, 1, False),
        (0, 2999, 0, 2999, True),
        (None, 3000, 3000, 0, False),
    ],
)
def test_empty_batches_do_not_end_a_replay(
    start: int | None, messages: int, empty: int, stored: int, room: bool
) -> None:
    """A block may be stored behind many of them; live ones, and others, are bounded as ever."""
    content = Content(start=start)
    content.messages, content.empty, content.stored = messages, empty, stored
    assert has_room(content) is room


def test_a_silence_does_not_say_whose_it_is() -> None:
    """A sidecar may have been told to beat less often."""
    advice = judge_liveness(Heard(Content(), Content(), 12.0)).advice
    assert advice.endswith("A sidecar of ours says something every 5 s unless told otherwise")
    assert "of ours" not in judge_liveness(Heard(Content(), Content(), 9.0)).advice


def test_what_a_router_looks_at_first_is_the_cause() -> None:
    """Its topic, then the form, then the events, then the block size, also of a replay alone; each is
    counted once, and nothing is written as Python does.
    """
    live = [live_frames(b"kv-events", seq, ARRAY) for seq in range(3)]
    for heard in (
        Heard(content_of(live), Content(), 1.0),
        of_replay(ARRAY, ARRAY, topic=b"kv-events"),
    ):
        findings = judged(heard, "vllm-router", block_size=64)
        last = last_of(heard, findings)
        assert "vllm-router drops the batch: topic is 'kv-events': it reads '' only (and" in last
        assert last.endswith(" (and 2 things more are wrong).")
        assert not [one for one in findings if "b'" in one.text + one.advice]
    heard = of_replay(ARRAY, topic=b"")
    assert "it reads maps only" in last_of(heard, judged(heard, "vllm-router", block_size=64))
    heard = of_replay(payload_of(STORED))
    assert "router expects 64" in last_of(heard, judged(heard, "vllm-router", block_size=64))


def test_what_costs_little_is_not_the_cause() -> None:
    """One batch that is lost is not named before the events that all others lose."""
    bare = BlockStored([8], None, [], 4, medium=StorageMedium.GPU)
    payloads = [payload_of(SIGNED), *([payload_of(bare)] * 5)]
    heard = of_replay(*payloads)
    assert "token_ids empty" in last_of(heard, judged(heard, "vllm-router")).replace(" is ", " ")
    heard = of_replay(*payloads[:1], *([payload_of(STORED)] * 5))
    findings = judged(heard, "vllm-router")
    assert [one.voids for one in findings if one.voids] == []
    assert last_of(heard, findings).startswith(
        "No message came, and of what is replayed: seq 0 vll"
    )


# ---------------------------------------------------------------------------------------- any bytes

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
EVENTS = st.lists(VALUES, max_size=8).map(lambda rest: ["BlockStored", *rest]) | VALUES
PAYLOADS = st.binary(max_size=20) | st.lists(EVENTS, max_size=3).map(
    lambda events: msgspec.msgpack.encode([1.0, events, 0])
)
LIVE = st.builds(live_frames, st.binary(max_size=12), st.integers(0, 2**63), PAYLOADS)
ANSWERS = st.builds(
    replay_answer,
    st.none() | st.binary(max_size=9),
    st.integers(0, 2**64 - 1),
    PAYLOADS,
    delimited=st.booleans(),
)
ANY = st.lists(st.binary(max_size=12), max_size=5)


def content_of(messages: list[list[bytes]], start: int | None = None) -> Content:
    content = Content(start=start)
    for frames in messages:
        content.take(frames)
    return content


@settings(max_examples=30)
@given(
    st.lists(LIVE | ANY, max_size=5),
    st.lists(ANSWERS | ANY, max_size=5),
    st.booleans(),
    st.sampled_from(sorted(CONSUMERS)),
    st.text(max_size=3),
)
def test_whatever_comes_is_judged(
    live: list[list[bytes]], told: list[list[bytes]], ended: bool, name: str, topic: str
) -> None:
    """No message makes it raise, each judgement can be printed, and silence is never ok."""
    heard = Heard(content_of(live), content_of(told, 0), 1.0, True, bool(told), ended)
    enough(heard.live, heard.told, topic, judged=True)
    liveness = judge_liveness(heard)
    findings = [
        judge_replay("there", heard),
        liveness,
        *judge_topic(heard, topic, CONSUMERS[name]),
        *judge_content(heard, 16),
        *judge_fit(heard, CONSUMERS[name]),
    ]
    for finding in findings:
        assert finding.text
        for line in lines(finding, painter(colours=False), 80):
            assert line == one_line(line)
    if not live:
        assert liveness.verdict != "ok"
    assert exit_code(findings) in (0, 1)


def test_a_replay_that_was_asked_again_counts_once() -> None:
    """What END brings is no batch, with the topic frame or without."""
    for with_topic in (True, False):
        frames = replay_answer(b"" if with_topic else None, 0, payload_of(STORED), delimited=True)
        end = replay_end(delimited=True, with_topic=with_topic)
        content = content_of([frames, end], 0)
        assert (content.batches, content.stored, content.malformed) == (1, 1, 0)
        heard = Heard(Content(), content, 1.0, True, True, True)
        assert ("3 frames an answer" in judge_replay("there", heard).text) is not with_topic


def test_a_stream_without_end_is_kept_in_part() -> None:
    """What is kept for a consumer to judge is bounded; what is counted is all."""
    frames = live_frames(b"", 0, payload_of(STORED))
    content = content_of([frames] * 1500)
    assert (content.messages, content.stored, len(content.kept)) == (1500, 1500, 1000)
    assert not content.all_kept
    topics = content_of([live_frames(b"%d" % one, 0, b"x") for one in range(100)])
    assert len(topics.topics) == 20


# --------------------------------------------------------------------------------------------- HTTP


JSON = st.recursive(
    SCALARS | st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=30)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "source": JSON
            | st.fixed_dictionaries({"worker_up": JSON, "messages": JSON, "kind": JSON}),
            "orphans_since_clear": JSON,
            "live_blocks": JSON,
            "sinks": JSON
            | st.lists(st.fixed_dictionaries({"endpoints": JSON, "mode": JSON, "dropped": JSON})),
            "curve": JSON | st.fixed_dictionaries({"denied": JSON}),
        },
    ),
    st.booleans(),
)
def test_any_document_is_judged(state: dict[str, Any], subscribed: bool) -> None:
    """/state of anybody."""
    for finding in judge_state(state, Endpoint("tcp", "h", 1), subscribed=subscribed):
        assert finding.text == one_line(finding.text)


def test_the_state_of_a_sidecar_in_trouble() -> None:
    """A resync that is awaited, refusals, a dialect that leaves out, keys that were denied."""
    state = {
        "source": {
            "worker_up": True,
            "in_step": False,
            "messages": {"offered": 9, "refused": 2},
        },
        "sinks": [
            {
                "name": "s",
                "mode": "bind",
                "endpoints": ["tcp://*:1"],
                "subscribers": 0,
                "dropped": {"filtered": 3},
            }
        ],
        "curve": {"denied": 4, "keys": 1},
    }
    told = [one.text for one in judge_state(state, Endpoint("tcp", "h", 1), subscribed=True)]
    for text in ("tell its state anew", "2 messages", "sees no subscriber", "left out 3", "4 hand"):
        assert any(text in one for one in told), (text, told)
    other = {"source": {"kind": "relay"}, "left_out_blocks": {"wrong_block_size": 5}}
    (finding,) = judge_state(other, None, subscribed=False)
    assert (finding.verdict, finding.stops) == ("wrong", True)
    assert finding.text.startswith("5 blocks of the engine were left out")
    for held in (0, 7):
        late = {
            "source": {
                "kind": "relay",
                "worker_up": True,
                "messages": {"offered": 9, "refused": 2},
            },
            "orphans_since_clear": 5,
            "live_blocks": {"GPU": held, "DISK": 0},
        }
        (unknown,) = judge_state(late, None, subscribed=False)
        assert unknown.text.startswith("5 blocks were left out")
        assert (unknown.verdict, unknown.stops) == ("wrong", not held)
        assert "flush" in unknown.advice
        late["orphans_since_clear"] = 0  # what was missed before a clear is of no consequence
        assert list(judge_state(late, None, subscribed=False)) == []
    (finding,) = judge_ready("there", Page(503, b"the engine is not connected\n"))
    assert "start the engine" in finding.advice
    (finding,) = judge_ready("there", Page(503, b"the worker is not there\n"))
    assert (finding.verdict, finding.stops) == ("wrong", True)
    assert "the worker is not there" in finding.text
