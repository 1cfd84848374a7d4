"""kvevents.capture: messages come back as they were, and a torn or damaged file costs its tail alone."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import KVEventsError
from kvevents.capture import (
    CaptureHead,
    CaptureReader,
    CaptureWriter,
    capture_start,
    pack_message,
)
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
    """Fields that are added at the end do not matter, nor do channels that are not known."""
    newer = capture_start(HEAD) + record(msgspec.msgpack.encode([7, 0, [b"a"], "more"]))
    assert CaptureReader().feed(newer) == [Message(7, Channel.LIVE, [b"a"])]
    reader = CaptureReader()
    unknown, more = (record(msgspec.msgpack.encode([7, number, []])) for number in (99, 0))
    assert reader.feed(capture_start(HEAD) + unknown + more) == [Message(7, Channel.LIVE, [])]
    unknown_and_longer = record(msgspec.msgpack.encode([7, 99, [b"a"], "more"]))
    assert reader.feed(unknown_and_longer + more) == [Message(7, Channel.LIVE, [])]
    assert reader.damaged is None
    reader.close()
    assert (reader.damaged, reader.torn) == (None, 0)


@pytest.mark.parametrize(
    "body", [[7, -1, []], [7, 99], [7, "99", []], [7, 99, ["text"]], {"channel": 99}, 99]
)
def test_what_is_no_message_is_damage(body: object) -> None:
    """Of an unknown channel or of none: it, and all behind it, is not read."""
    reader = CaptureReader()
    told = record(msgspec.msgpack.encode(body)) + record(msgspec.msgpack.encode([7, 0, []]))
    assert reader.feed(capture_start(HEAD) + told) == []
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


# ------------------------------------------------------------------------------------------- packed


def flushed(count: int, *, every: int = 1) -> tuple[bytes, list[int], list[Message]]:
    """A packed capture that was not closed, where each flush ends, and what is in it."""
    writer = CaptureWriter(HEAD)
    data, ends = writer.start(), []
    ends.append(len(data))
    messages = [
        Message(n, Channel.LIVE, [b"kv", n.to_bytes(8, "big"), bytes([n % 251]) * (n % 90)])
        for n in range(count)
    ]
    for number, message in enumerate(messages, 1):
        data += writer.add(message)
        if number % every == 0:
            data += writer.flush()
            ends.append(len(data))
    return data, ends, messages


def test_what_was_flushed_can_be_read() -> None:
    """At once, and whether or not the file was ever closed: that is no fault."""
    writer, reader = CaptureWriter(HEAD), CaptureReader()
    assert reader.feed(writer.start()) == []
    assert reader.head == HEAD
    for message in MESSAGES:
        assert reader.feed(writer.add(message) + writer.flush()) == [message]
        assert (reader.torn, reader.damaged) == (0, None)
    assert writer.flush() == b""
    assert reader.feed(writer.close()) == []
    reader.close()
    assert (reader.torn, reader.damaged) == (0, None)


def test_it_is_gzip_of_the_format() -> None:
    """Any program that unpacks gzip finds the plain capture in it; and packs one that is read."""
    writer = CaptureWriter(HEAD)
    packed = [writer.start(), *map(writer.add, MESSAGES), writer.flush(), writer.close()]
    assert gzip.decompress(b"".join(packed)) == captured(*MESSAGES)
    assert CaptureReader().feed(gzip.compress(captured(*MESSAGES))) == MESSAGES


@pytest.mark.parametrize("cut", [1, 2, 18, 19, 40, 200])
def test_several_members_are_one_file(cut: int) -> None:
    """As gzip has it, with zeros behind or between them, wherever the capture is cut."""
    plain = captured(*MESSAGES)
    data = gzip.compress(plain[:cut]) + gzip.compress(b"") + gzip.compress(plain[cut:]) + bytes(9)
    reader = CaptureReader()
    assert [one for byte in data for one in reader.feed(bytes([byte]))] == MESSAGES
    reader.close()
    assert (reader.torn, reader.damaged) == (0, None)


@given(st.lists(st.integers(0, 3000), max_size=8), st.booleans())
def test_pieces_of_what_is_packed_do_not_matter(cuts: list[int], closed: bool) -> None:
    """Fed in any pieces, the same messages come."""
    data, _, messages = flushed(60, every=7)
    bounds = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    reader = CaptureReader()
    got = [one for a, b in itertools.pairwise(bounds) for one in reader.feed(data[a:b])]
    assert got == messages[:56]


def test_what_is_packed_torn_at_every_byte() -> None:
    """All that was flushed before is read, whatever is missing of the last; it is no damage."""
    data, ends, messages = flushed(12)
    for length in range(len(data) + 1):
        reader = CaptureReader()
        got = reader.feed(data[:length])
        reader.close()
        whole = sum(end <= length for end in ends) - 1
        assert got == messages[: len(got)] and len(got) >= whole
        assert reader.damaged is None
        assert (reader.head is not None) >= (whole >= 0)
        if length in ends:
            assert reader.torn == 0
        assert reader.torn <= length - max([0, *(end for end in ends if end <= length)])


def test_what_is_packed_damaged_at_every_byte() -> None:
    """What was flushed before is read, and nothing that was not written; all else is refused."""
    data, ends, messages = flushed(12)
    data = data + zlib.compressobj(wbits=31).flush()
    for position in range(ends[0], len(data)):
        spoilt = bytearray(data)
        spoilt[position] ^= 0x55
        reader = CaptureReader()
        got = reader.feed(bytes(spoilt))
        reader.close()
        whole = sum(end <= position for end in ends) - 1
        assert got == messages[: len(got)] and len(got) >= min(whole, 12)
        assert got == messages or reader.damaged is not None or reader.torn


def test_what_is_packed_and_no_capture() -> None:
    """It is refused as if it were not packed."""
    with pytest.raises(KVEventsError, match="no capture"):
        CaptureReader().feed(gzip.compress(b"{}" * 100))


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (b"\x1f\x8b\x09" + bytes(20), "it cannot be unpacked: unknown compression method"),
        (b"plain", "what is behind its end is not packed"),
        (gzip.compress(captured()), "another capture begins: one file is of one"),
        (gzip.compress(b"\xff" * 8), "a record of 4294967295 bytes"),
    ],
)
def test_what_is_behind_its_end(tail: bytes, why: str) -> None:
    """It is damage, and what was before it is read."""
    data = gzip.compress(captured(*MESSAGES))
    reader = CaptureReader()
    assert reader.feed(data + tail) == MESSAGES
    assert reader.damaged is not None and reader.damaged.startswith(why)
    assert 0 < reader.torn <= len(data + tail)
    assert reader.feed(bytes(1000)) == []


@pytest.mark.parametrize("record_of", ["zeros", "messages", "one record"])
def test_a_bomb_is_read_in_little_memory(record_of: str) -> None:
    """What unpacks to a gigabyte is never in memory; a record says its size before it is taken."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    part = {
        "zeros": bytes(1 << 20),
        "messages": pack_message(1, Channel.LIVE, [bytes(4000)]) * 250,
        "one record": bytes(1 << 20),
    }[record_of]
    data = packer.compress(captured())
    if record_of == "one record":
        data += packer.compress((200 << 20).to_bytes(4, "little") + bytes(4))
    data += b"".join(packer.compress(part) for _ in range(200)) + packer.flush()
    del part
    tracemalloc.start()
    try:
        reader = CaptureReader()
        count = sum(1 for _ in reader.read(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == (50_000 if record_of == "messages" else 0)
    assert peak < 8 << 20


@pytest.mark.parametrize("size", range((1 << 20) - 400, (1 << 20) + 40, 20))
def test_what_was_fed_comes_at_once(size: int) -> None:
    """However it falls into the pieces that it is unpacked in."""
    writer, message = CaptureWriter(HEAD), Message(0, Channel.LIVE, [bytes(size)])
    data = writer.start() + writer.add(message) + writer.flush()
    assert CaptureReader().feed(data) == [message]


def test_how_much_is_torn_of_what_was_never_flushed() -> None:
    """Of what another program has packed: to some 10,000 bytes."""
    messages = [Message(n, Channel.LIVE, [random.Random(n).randbytes(700)]) for n in range(400)]
    data = gzip.compress(captured(*messages))
    reader = CaptureReader()
    assert len(reader.feed(data[:-400])) > 390
    assert 0 < reader.torn <= 32 << 10


def test_a_message_too_large_for_a_record_is_refused() -> None:
    """It is not written, and what comes after it is."""
    writer = CaptureWriter(HEAD)
    data = writer.start()
    with pytest.raises(ValueError, match="are above 134217728"):
        writer.add(Message(0, Channel.LIVE, [bytes(128 << 20)]))
    data += writer.add(MESSAGES[0]) + writer.close()
    assert CaptureReader().feed(data) == MESSAGES[:1]


@given(st.binary(max_size=300))
def test_any_packed_bytes_are_read_or_refused(data: bytes) -> None:
    """Never anything but messages or a KVEventsError."""
    reader = CaptureReader()
    reader.feed(gzip.compress(captured(MESSAGES[0])) + data)
    reader.feed(flushed(3)[0] + data)
    for start in (b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x1f"):
        reader = CaptureReader()
        try:
            reader.feed(start + data)
        except KVEventsError:
            continue
        reader.close()


def test_the_reader_of_the_documentation_reads_it(tmp_path: Path) -> None:
    """docs/capture.md has a reader of a few lines, for those with tools of their own."""
    page = Path(__file__).parents[2] / "docs" / "capture.md"
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(found) == 1
    plain, packed, members = tmp_path / "plain", tmp_path / "packed", tmp_path / "members"
    plain.write_bytes(captured(*MESSAGES))
    data, _, messages = flushed(20)
    packed.write_bytes(data[:-3])
    whole = captured(*MESSAGES)
    members.write_bytes(gzip.compress(whole[:60]) + bytes(9) + gzip.compress(whole[60:]))
    names: dict[str, object] = {}
    exec(found[0], names)
    read = names["read"]
    assert callable(read)
    told = [[one.at_ns, int(one.channel), one.frames] for one in MESSAGES]
    assert list(read(plain)) == list(read(members)) == told
    assert [one[2] for one in read(packed)] == [one.frames for one in messages]


def test_a_record_that_is_not_understood_counts_as_torn() -> None:
    """Whole as it may be: a file that is cut off there is one that can be read to its end."""
    whole, odd = captured(*MESSAGES[:2]), record(msgspec.msgpack.encode("x"))
    reader = CaptureReader()
    assert reader.feed(whole + odd) == MESSAGES[:2]
    assert reader.damaged == "a record that is not understood"
    assert reader.torn == len(odd)
