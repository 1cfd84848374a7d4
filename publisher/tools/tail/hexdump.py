"""Frames as they are: a dump for people, with offsets, or MessagePack for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvevents.frames import live_frames
from kvevents.reading import Reading
from publisher.tools.tail.lines import Lines, clock
from publisher.tools.tail.notice import Notice
from publisher.tools.tail.stream import Stream
from publisher.tools.text import printable

__all__ = ["Hex", "Raw", "hexdump"]

_ROW = 16
_DOTS = bytes(code if 0x20 <= code < 0x7F else 0x2E for code in range(256))
_encode = msgspec.msgpack.Encoder().encode


def hexdump(data: bytes) -> Iterator[str]:
    """A line for each 16 bytes: offset, hex, and what of it is ASCII."""
    for at in range(0, len(data), _ROW):
        row = data[at : at + _ROW]
        text = row.translate(_DOTS).decode()
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        yield f"{at:08x}  {left:<23}  {right:<23}  {text}"


class Hex:
    """Writes whole batches, frame by frame, in their turn; and what is said besides, as text."""

    whole = True

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def batch(self, stream: Stream, reading: Reading) -> str:
        """One batch."""
        told = reading.told
        frames = live_frames(told.topic, told.seq, told.payload)
        how = "replayed" if told.replayed else "live"
        title = f"{clock(told.at_ns / 1e9)} {printable(stream.label)} seq {told.seq} {how}"
        return title + _dump(frames, ("topic", "seq", "payload"))

    def notice(self, stream: Stream, notice: Notice) -> str:
        """With all frames of a message that is none."""
        text = self._lines.notice(stream, notice)
        if notice.kind == "Malformed":
            frames = [bytes.fromhex(one) for one in notice.fields["frames"]]
            text = text.rstrip("\n") + _dump(frames, ())
        return text


def _dump(frames: Sequence[bytes], names: Sequence[str]) -> str:
    lines = [f", {sum(map(len, frames))} bytes in {len(frames)} frames"]
    for at, frame in enumerate(frames):
        name = names[at] if at < len(names) else f"frame {at}"
        lines.append(f"  {name}: {len(frame)} bytes")
        lines += [f"    {line}" for line in hexdump(frame)]
    return "\n".join(lines) + "\n"


class Raw:
    """Writes each batch as a MessagePack array [topic, seq, payload], one behind the other."""

    whole = True

    def batch(self, _stream: Stream, reading: Reading) -> bytes:
        """One batch."""
        told = reading.told
        return _encode([told.topic, told.seq, told.payload])

    def notice(self, _stream: Stream, _notice: Notice) -> None:
        """There is no room for it among the bytes."""
