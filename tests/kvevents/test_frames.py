"""kvevents.frames: multipart messages, pinned to what engines send, safe against what strangers send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_data import frames as golden_frames
from kvevents_data import golden
from kvevents_reference import trials

from kvevents.errors import KVEventsError
from kvevents.frames import (
    END,
    JOIN,
    MAX_SEQ,
    Frame,
    ReplayRequest,
    live_frames,
    parse_live,
    parse_replay_answer,
    parse_replay_request,
    replay_answer,
    replay_end,
    replay_request,
)

FRAMES = golden_frames()
ENGINES = ("sglang", "vllm", "sglang-array", "vllm-array")
BATCHES = {str(batch): batch.payload for batch in golden()}
TOPIC = b"kv-events"
each_engine = pytest.mark.parametrize("engine", ENGINES)
Seqs = st.integers(0, MAX_SEQ)


def payloads(engine: str) -> list[bytes]:
    return [BATCHES[f"{engine}/store_root"], BATCHES[f"{engine}/clear"]]


# ---------------------------------------------------------------------------------------- golden


@each_engine
def test_live_messages_of_engines(engine: str) -> None:
    """An engine's live message is topic, seq and payload; ours has the same frames."""
    for seq, payload in enumerate(payloads(engine)):
        message = FRAMES[f"{engine}/live_{seq}"]
        assert parse_live(message) == Frame(TOPIC, seq, payload)
        assert live_frames(TOPIC, seq, payload) == message


@each_engine
def test_replay_requests_of_engines(engine: str) -> None:
    """An engine's client asks as we do."""
    message = FRAMES[f"{engine}/replay_request"]
    assert parse_replay_request(message) == ReplayRequest(0, delimited=True)
    assert replay_request(0) == message


@each_engine
def test_replay_answers_of_engines(engine: str) -> None:
    """Answers are read with the topic frame (map engines) and without it (array engines)."""
    topic = b"" if engine.endswith("-array") else TOPIC
    for seq, payload in enumerate(payloads(engine)):
        message = FRAMES[f"{engine}/replay_{seq}"]
        found = parse_replay_answer(message)
        assert isinstance(found, Frame)
        assert (found.topic, found.seq, found.payload) == (topic, seq, payload)
        if topic:
            assert replay_answer(topic, seq, payload, delimited=True) == message


@each_engine
def test_replay_ends_of_engines(engine: str) -> None:
    """The end is known with and without a topic frame; ours is that of the newer engines."""
    message = FRAMES[f"{engine}/replay_end"]
    assert parse_replay_answer(message) is END
    if not engine.endswith("-array"):
        assert replay_end(delimited=True) == message


# ---------------------------------------------------------------------------------- our messages


@trials(100)
@given(st.binary(max_size=9), Seqs, st.binary(max_size=9))
def test_live_messages_have_three_frames(topic: bytes, seq: int, payload: bytes) -> None:
    """Case 101: always three frames, the seq in eight bytes, whether the topic is empty or not."""
    message = live_frames(topic, seq, payload)
    assert [len(frame) for frame in message] == [len(topic), 8, len(payload)]
    assert int.from_bytes(message[1], "big") == seq
    assert parse_live(message) == Frame(topic, seq, payload)


@trials(100)
@given(st.binary(max_size=9), Seqs, st.binary(min_size=1, max_size=9))
def test_replayed_frames_are_the_live_frames(topic: bytes, seq: int, payload: bytes) -> None:
    """Case 56: behind the envelope an answer is byte for byte the live message."""
    live = live_frames(topic, seq, payload)
    assert replay_answer(topic, seq, payload, delimited=True) == [b"", *live]
    assert replay_answer(topic, seq, payload, delimited=False) == live
    for delimited in (True, False):
        answer = replay_answer(topic, seq, payload, delimited=delimited)
        assert parse_replay_answer(answer) == Frame(topic, seq, payload)
    assert parse_replay_answer([b"", *live[1:]]) == Frame(b"", seq, payload)  # no topic


@pytest.mark.parametrize("delimited", [True, False])
def test_the_end_has_an_envelope_like_the_answers(delimited: bool) -> None:
    """The end has as many frames as an answer, an impossible seq and no payload."""
    end = replay_end(delimited=delimited)
    assert len(end) == len(replay_answer(b"", 0, b"x", delimited=delimited))
    assert end[-2:] == [b"\xff" * 8, b""]
    assert parse_replay_answer(end) is END


@pytest.mark.parametrize("seq", [b"\0" * 8, b"\xff" * 8, b""])
def test_an_empty_payload_is_the_end(seq: bytes) -> None:
    """No batch is empty, so engines that end a replay by an empty payload are understood too."""
    assert parse_replay_answer([b"", seq, b""]) is END
    assert parse_replay_answer([b"", b"t", seq, b""]) is END


@trials(50)
@given(st.integers(0, 2**64 - 1))
def test_requests_are_read_in_every_shape(start: int) -> None:
    """A DEALER's and a REQ's request comes behind an empty frame, a bare one without; any u64 start."""
    asked = replay_request(start)
    assert parse_replay_request(asked) == ReplayRequest(start, delimited=True)
    assert parse_replay_request(asked[1:]) == ReplayRequest(start, delimited=False)


def test_join_is_beyond_every_seq_and_not_the_end() -> None:
    """No batch has the seq that asks for "the state now", and it does not read as the end."""
    assert MAX_SEQ < JOIN
    assert replay_request(JOIN)[-1] != replay_end(delimited=True)[-2]


# ------------------------------------------------------------------------------------- malformed

SEQ = (5).to_bytes(8, "big")
MALFORMED: list[tuple[Any, list[bytes], str]] = [
    (parse_live, [], "live message: 0 frames, not 3"),
    (
        parse_live,
        [b"", b"\xff" * 8, b"p"],
        "seq: 18446744073709551615 is above 9223372036854775807",
    ),
    (parse_live, [SEQ, b"p"], "live message: 2 frames, not 3"),
    (parse_live, [b"", b"t", SEQ, b"p"], "live message: 4 frames, not 3"),
    (parse_live, [b"t", SEQ[1:], b"p"], "seq: 7 bytes, not 8"),
    (parse_live, [b"t", b"", b"p"], "seq: 0 bytes, not 8"),
    (parse_replay_request, [], 'replay request: 0 frames, not ["", start]'),
    (parse_replay_request, [b"x", SEQ], 'replay request: 2 frames, not ["", start]'),
    (parse_replay_request, [b"", SEQ, b""], 'replay request: 3 frames, not ["", start]'),
    (parse_replay_request, [b""], "seq: 0 bytes, not 8"),
    (parse_replay_request, [b"", b""], "seq: 0 bytes, not 8"),
    (parse_replay_request, [b"", SEQ + b"\0"], "seq: 9 bytes, not 8"),
    (parse_replay_request, [b"5"], "seq: 1 bytes, not 8"),
    (parse_replay_answer, [], "replay answer: 0 frames, not 3 or 4"),
    (parse_replay_answer, [SEQ, b"p"], "replay answer: 2 frames, not 3 or 4"),
    (parse_replay_answer, [b"x", b"t", SEQ, b"p"], "replay answer: 4 frames, not 3 or 4"),
    (parse_replay_answer, [b"", b"t", SEQ[1:], b"p"], "seq: 7 bytes, not 8"),
]


@pytest.mark.parametrize(("parse", "message", "reason"), MALFORMED, ids=lambda it: repr(it)[:40])
def test_malformed_messages(parse: Any, message: list[bytes], reason: str) -> None:
    """What is no such message raises KVEventsError, which says what is wrong with it."""
    with pytest.raises(KVEventsError) as error:
        parse(message)
    assert str(error.value) == reason


@trials(300)
@given(st.lists(st.sampled_from([b"", b"t", SEQ, b"\xff" * 8]) | st.binary(max_size=9), max_size=6))
def test_arbitrary_messages(message: list[bytes]) -> None:
    """Any frames of a stranger are read or raise KVEventsError, nothing else."""
    for parse in (parse_live, parse_replay_request, parse_replay_answer):
        try:
            parse(message)
        except KVEventsError:
            continue
