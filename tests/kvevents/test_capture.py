"""kvevents.capture: messages come back as they were, and a torn or damaged file costs its tail alone."""

from __future__ import annotations

import itertools
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import KVEventsError
from kvevents.capture import CaptureHead, CaptureReader, capture_start, pack_message
from kvevents.message import Channel, Message

HEAD = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2", topic="kv@", started_ns=5)
MESSAGES = [
    Message(7, Channel.LIVE, [b"topic", bytes(8), b"payload"]),
    Message(8, Channel.ASKED, [b"", bytes(8)]),
    Message(9, Channel.ANSWER, [b"", b"", b"\xff" * 8, b""]),
    Message(10, Channel.OVER, []),
]


def captured(*messages: Message) -> bytes:
    """A whole file."""
    records = [pack_message(each.at_ns, each.channel, each.frames) for each in messages]
    return capture_start(HEAD) + b"".join(records)


def record(body: bytes) -> bytes:
    """A record of another program, as the format is told."""
    length = len(body).to_bytes(4, "little")
    return length + zlib.crc32(length + body).to_bytes(4, "little") + body


def ends_of_records() -> list[int]:
    """Where the head, and then each message, ends."""
    return [len(captured(*MESSAGES[:count])) for count in range(len(MESSAGES) + 1)]


def test_the_format_is_pinned() -> None:
    """Version 1, byte for byte: other programs may write it."""
    head = (
        "84 a8656e64706f696e74 a165 af7265706c61795f656e64706f696e74 c0 a5746f706963 a0"
        "aa737461727465645f6e73 00"
    )
    assert capture_start(CaptureHead(endpoint="e")) == b"kvevents capture 1\n" + bytes.fromhex(
        f"30000000 902549ae {head}"
    )
    assert pack_message(7, Channel.ANSWER, [b"a", b""]) == bytes.fromhex(
        "09000000 ca07a7f4 930702 92c40161c400"
    )


def test_messages_come_back() -> None:
    """Head, times, channels and frames, in order; nothing is torn."""
    reader = CaptureReader()
    assert reader.feed(captured(*MESSAGES)) == MESSAGES
    assert reader.head == HEAD
    assert (reader.torn, reader.damaged) == (0, None)


@given(st.lists(st.integers(0, 300), max_size=8))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    """Fed in any pieces, the same messages come."""
    whole = captured(*MESSAGES)
    bounds = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    reader = CaptureReader()
    got = [
        message
        for start, stop in itertools.pairwise(bounds)
        for message in reader.feed(whole[start:stop])
    ]
    assert got == MESSAGES


@pytest.mark.parametrize("length", range(len(captured(*MESSAGES)) + 1))
def test_torn_at_every_byte(length: int) -> None:
    """A kill while it was written costs what was not whole, and nothing before; it can be told."""
    ends = ends_of_records()
    whole = [end for end in ends if end <= length]
    reader = CaptureReader()
    assert reader.feed(captured(*MESSAGES)[:length]) == MESSAGES[: max(0, len(whole) - 1)]
    reader.close()
    assert reader.damaged is None
    assert (reader.head is not None) == bool(whole)
    first_line = len(b"kvevents capture 1\n")
    behind = max([0, *whole]) or (first_line if length >= first_line else 0)
    assert reader.torn == length - behind


@pytest.mark.parametrize("position", range(ends_of_records()[1], len(captured(*MESSAGES[:3]))))
def test_damage_at_every_byte(position: int) -> None:
    """A byte that is another costs its record and all behind it."""
    data = bytearray(captured(*MESSAGES))
    data[position] ^= 0x55
    reader = CaptureReader()
    got = reader.feed(bytes(data))
    whole = sum(end <= position for end in ends_of_records()[1:])
    assert got == MESSAGES[:whole]
    assert reader.torn == len(data) - ends_of_records()[whole]
    assert reader.feed(b"more") == []


@pytest.mark.parametrize("length", [9, 11, 1000, (1 << 30) - 1, 1 << 31])
def test_a_length_that_is_not_its_own(length: int) -> None:
    """Such a record looks as if it were cut off; that it is not is seen at the end."""
    data = bytearray(captured(*MESSAGES))
    at = ends_of_records()[1]
    data[at : at + 4] = length.to_bytes(4, "little")
    reader = CaptureReader()
    assert reader.feed(bytes(data)) == MESSAGES[:1]
    reader.close()
    assert reader.damaged is not None
    assert reader.torn == len(data) - at


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{}\n", "no capture"),
        (b"kvevents capture 2\n", "version 2: only 1 is known"),
        (b"kvevents capture 1 \n", "only 1 is known"),
        (b"kvevents capture \xff\x1b[31m\n", "only 1 is known"),
        (b"kvevents capture " + b"1" * 100, "no capture"),
        (b"x", "no capture"),
    ],
)
def test_what_is_no_capture(data: bytes, said: str) -> None:
    """It is refused in one line that can be printed, at the first byte that cannot be."""
    with pytest.raises(KVEventsError, match=said) as error:
        CaptureReader().feed(data)
    assert str(error.value).isprintable()


def test_what_came_from_a_newer_writer_is_read() -> None:
    """Fields that are added at the end do not matter; a channel that is not known ends it."""
    newer = capture_start(HEAD) + record(msgspec.msgpack.encode([7, 0, [b"a"], "more"]))
    assert CaptureReader().feed(newer) == [Message(7, Channel.LIVE, [b"a"])]
    reader = CaptureReader()
    unknown = record(msgspec.msgpack.encode([7, 99, []]))
    assert reader.feed(capture_start(HEAD) + unknown) == []
    assert reader.damaged == "a record that is not understood"


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Never anything but messages or a KVEventsError."""
    reader = CaptureReader()
    reader.feed(captured(MESSAGES[0]) + data)
    try:
        CaptureReader().feed(data)
    except KVEventsError:
        return
