"""What a doctor says of bytes of any kind, and what its findings come to. No sockets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import payload_of

from kvevents import BlockStored, StorageMedium
from kvevents.frames import live_frames, replay_answer, replay_end
from kvevents.lint import CONSUMERS
from publisher.checks import one_line
from publisher.endpoint import Endpoint
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
from publisher.tools.doctor.listening import Heard

OK = Finding("connect", "ok", "all is well")
WRONG = Finding("replay", "wrong", "it is red", "paint it")
STOPS = Finding("topic", "wrong", "it is cut", "mend it", stops=True)
OFFLINE = Finding("connect", "wrong", "nobody is there", stops=True, offline=True)
IDLE = Finding("events", "unknown", "nothing happens", "send it a prompt", stops=True)
VOID = Finding("fit", "wrong", "it reads maps only", "send maps", voids=True)
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
    assert " → do this do this" in line
    assert lines(OK, painter(colours=True), None) == ["\x1b[32mok\x1b[0m  connect    all is well"]


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
            "source": JSON | st.fixed_dictionaries({"worker_up": JSON, "messages": JSON}),
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
    (finding,) = judge_ready("there", Page(503, b"the worker is not there\n"))
    assert (finding.verdict, finding.stops) == ("wrong", True)
    assert "the worker is not there" in finding.text
