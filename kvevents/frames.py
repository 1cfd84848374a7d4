"""Multipart messages: live frames, replay requests and answers. See docs/wire.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvevents.errors import KVEventsError

__all__ = [
    "END",
    "JOIN",
    "MAX_SEQ",
    "End",
    "Frame",
    "ReplayRequest",
    "answered_topic",
    "live_frames",
    "parse_live",
    "parse_replay_answer",
    "parse_replay_request",
    "replay_answer",
    "replay_end",
    "replay_request",
    "reset_frames",
]

_SEQ_BYTES = 8
_END_SEQ = b"\xff" * _SEQ_BYTES

MAX_SEQ: Final = 2**63 - 1
"""The largest seq a batch may have; some consumers read seqs as signed."""

JOIN: Final = 2**64 - 2
"""A replay start beyond every seq: "the state now, then what follows".

A publisher with a base state answers with a snapshot at the latest seqs it can; any other has nothing
that late and answers END alone, upon which the subscriber asks from 0.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """One batch as sent: topic, seq, payload."""

    topic: bytes
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The last answer of a replay."""


END: Final = End()
"""The only one."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A replay request. `delimited`: it came behind an empty frame, and so do its answers."""

    start: int
    delimited: bool


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """`[topic, seq as 8 bytes big-endian, payload]`."""
    return [topic, seq.to_bytes(_SEQ_BYTES, "big"), payload]


def reset_frames(topic: bytes) -> list[bytes]:
    """What tells some consumers that the seqs begin anew: the seq of END, and no payload."""
    return [topic, _END_SEQ, b""]


def parse_live(frames: Sequence[bytes]) -> Frame:
    """Raises KVEventsError unless there are three frames and a seq of 8 bytes, at most `MAX_SEQ`."""
    if len(frames) != 3:
        raise KVEventsError(f"live message: {len(frames)} frames, not 3")
    return Frame(frames[0], _batch_seq(frames[1]), frames[2])


def replay_request(start: int) -> list[bytes]:
    """What a DEALER sends to ask for every batch from `start` on."""
    return [b"", start.to_bytes(_SEQ_BYTES, "big")]


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest:
    """`frames` without the identity: `["", start]` of a DEALER or REQ, or a bare `[start]`.

    Raises KVEventsError for anything else.
    """
    match list(frames):
        case [b"", start]:
            return ReplayRequest(_seq(start), delimited=True)
        case [start]:
            return ReplayRequest(_seq(start), delimited=False)
    raise KVEventsError(f'replay request: {len(frames)} frames, not ["", start]')


def replay_answer(topic: bytes | None, seq: int, payload: bytes, *, delimited: bool) -> list[bytes]:
    """One batch of a replay: the live frames behind the request's envelope; None: without their topic, as
    older engines answer.
    """
    return _answer(topic, seq.to_bytes(_SEQ_BYTES, "big"), payload, delimited=delimited)


def replay_end(*, delimited: bool, with_topic: bool = True) -> list[bytes]:
    """The message that ends every replay, shaped as its answers are."""
    return _answer(b"" if with_topic else None, _END_SEQ, b"", delimited=delimited)


def _answer(topic: bytes | None, seq: bytes, payload: bytes, *, delimited: bool) -> list[bytes]:
    frames = [seq, payload] if topic is None else [topic, seq, payload]
    return [b"", *frames] if delimited else frames


def parse_replay_answer(frames: Sequence[bytes]) -> Frame | End:
    """`frames` without the identity, with or without the delimiter and the topic frame.

    Raises KVEventsError for anything else, and for a seq above `MAX_SEQ` that is not the end's.
    """
    match list(frames):
        case [b"", topic, seq, payload]:
            pass
        case [topic, seq, payload]:  # no topic, or no delimiter: seq and payload stand the same
            pass
        case _:
            raise KVEventsError(f"replay answer: {len(frames)} frames, not 3 or 4")
    if seq == _END_SEQ or not payload:
        return END
    return Frame(topic, _batch_seq(seq), payload)


def answered_topic(frames: Sequence[bytes]) -> bytes | None:
    """The topic that a replay answer names, with the delimiter or without it; None: it names none."""
    return frames[1] if len(frames) == 4 else frames[0] or None


def _batch_seq(raw: bytes) -> int:
    seq = _seq(raw)
    if seq > MAX_SEQ:
        raise KVEventsError(f"seq: {seq} is above {MAX_SEQ}")
    return seq


def _seq(raw: bytes) -> int:
    if len(raw) != _SEQ_BYTES:
        raise KVEventsError(f"seq: {len(raw)} bytes, not 8")
    return int.from_bytes(raw, "big")
