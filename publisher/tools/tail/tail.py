"""`kvevents tail`: a stream, event by event, with what is wrong with it where it is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from kvevents.check import Checker, Finding
from kvevents.events import Event
from kvevents.follower import Arrival, Malformed, Step, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel
from kvevents.reading import Reading, read
from publisher.tools.source import Capture, Source, Sources
from publisher.tools.start import Start
from publisher.tools.tail.filters import Filter
from publisher.tools.tail.kept import Entry, Kept
from publisher.tools.tail.lines import Lines
from publisher.tools.tail.notice import (
    Notice,
    of_earlier,
    of_finding,
    of_gap,
    of_lost,
    of_malformed,
    of_restart,
    of_skipped,
    of_undecodable,
)
from publisher.tools.tail.stream import Stream, labels_of

__all__ = ["Limits", "Printer", "Tail", "Writer", "streams_of"]

_TICK_S = 0.1
_WATCH_S = 0.5
"""How often it is looked at why nothing comes, where nothing else is looked at."""

_FULL = 1 << 16
"""Characters or bytes that are written at once."""

_SAID = frozenset(("gap", "lost", "restart", "malformed", "undecodable", "skipped", "first-seq"))
"""Rules of the check that are about what is said of the stream anyway."""


class _Writer(Protocol):
    def notice(self, stream: Stream, notice: Notice, /) -> str | None: ...


class EventWriter(_Writer, Protocol):
    """Writes events one by one."""

    whole: bool

    def begin(self, stream: Stream, reading: Reading, /) -> None: ...
    def event(self, position: int, event: Event, /) -> str: ...


class BatchWriter(_Writer, Protocol):
    """Writes whole batches."""

    whole: bool

    def batch(self, stream: Stream, reading: Reading, /) -> str | bytes: ...


Writer = EventWriter | BatchWriter
"""`notice` returns None where there is no place for it among the rest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to end. `count`: so many events, or batches where those are written; what cannot be read
    counts, too, or it might never end. `until`: the last seq. `timeout_s`: in which nothing was
    written. `at_end`: once all that was there has been told.
    """

    count: int | None = None
    until: int | None = None
    timeout_s: float | None = None
    for_s: float | None = None
    at_end: bool = False


class Printer:
    """Text or bytes to a stream, in large pieces. Raises what the stream raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._bytes: list[bytes] = []
        self._size = 0

    def put(self, piece: str | bytes) -> None:
        """Write it, soon."""
        if isinstance(piece, str):
            self._texts.append(piece)
        else:
            self._bytes.append(piece)
        self._size += len(piece)
        if self._size >= _FULL:
            self.flush()

    def flush(self) -> None:
        """Write all of it, now."""
        if not self._size:
            return
        texts, self._texts = self._texts, []
        blobs, self._bytes = self._bytes, []
        self._size = 0
        if texts:
            self._stream.write("".join(texts))
        if blobs:
            self._stream.buffer.write(b"".join(blobs))
        self._stream.flush()


def streams_of(sources: Sources, start: Start | None, *, check: bool) -> list[Stream]:
    """One of each source. With `check`, each is held to the invariants."""
    streams = []
    for source, label in zip(sources.all, labels_of(sources.all), strict=True):
        kept = Kept(start.number) if start is not None and start.kind == "last" else None
        streams.append(Stream(source, label, Checker() if check else None, kept))
    return streams


class Tail:
    """Reads `sources` and writes what passes `chosen` with `writer`. `aside`: what is said where that
    has no place for it, with `plain`; and why nothing comes. `lines`: for the header.
    """

    def __init__(
        self,
        sources: Sources,
        streams: Sequence[Stream],
        *,
        start: Start | None,
        limits: Limits,
        chosen: Filter,
        writer: Writer,
        out: Printer,
        aside: Callable[[str], None],
        lines: Lines,
        plain: Lines,
        notes: bool = False,
        header: bool = False,
    ) -> None:
        self._sources, self.streams = sources, streams
        self._start, self._limits, self._filter = start, limits, chosen
        self._writer, self._out, self._aside = writer, out, aside
        self._lines, self._plain = lines, plain
        self._notes, self._header = notes, header
        self._of = {id(one.source): one for one in streams}
        self.written = 0
        """Events, or whole batches."""
        self._counted = 0
        """The same, with what could not be read."""
        self._everything = chosen.open
        self._full = False
        self._keeping = any(one.kept is not None for one in streams)
        self._written_at = time.monotonic()
        self.read_all = not sources.captures
        """Whether captures were read to their ends."""
        self.seconds = 0.0
        """How long it took."""

    def run(self) -> None:
        """Until a limit, the end of captures, or Ctrl-C. Raises what `Printer` raises, and ValueError
        for a file that is no capture.
        """
        begun = self._written_at = time.monotonic()
        until = float("inf") if self._limits.for_s is None else begun + self._limits.for_s
        with suppress(KeyboardInterrupt):
            if self._header:
                self._out.put(self._lines.header)
            self._read(until)
        with suppress(KeyboardInterrupt):
            self._release(self.streams)
            for stream in self.streams:
                if stream.checker is not None and not stream.done:
                    self._findings(stream, stream.checker.close(), stream.last_ns)
            self._out.flush()
        self.seconds = time.monotonic() - begun

    # ---------------------------------------------------------------------------------- inside

    def _read(self, until: float) -> None:
        limits, sources = self._limits, self._sources
        looks_at_clock = limits.timeout_s is not None or limits.at_end or self._keeping
        tick_s = _TICK_S if looks_at_clock else _WATCH_S
        is_live = bool(sources.live)
        for one in sources.steps(until, min(tick_s, limits.timeout_s or tick_s)):
            is_captured = one is not None and isinstance(one[0], Capture)
            self.read_all = not is_captured
            if one is not None and self._take(*one) and self.over:
                return
            if not is_live:
                continue
            if is_captured:
                self._written_at = time.monotonic()  # whoever is live has not had its turn
                continue
            if one is None:
                self._watch()
            if sources.drained:
                self._at_rest()
                if self.over:
                    return
                if limits.at_end and self._all_told():
                    break
                self._out.flush()
            if (
                limits.timeout_s is not None
                and time.monotonic() >= self._written_at + limits.timeout_s
            ):
                break
        self.read_all = True

    def _watch(self) -> None:
        now = time.monotonic()
        for stream in self.streams:
            if stream.watch is not None and not stream.done:
                for text in stream.watch.look(stream.seen, now):
                    self._out.flush()
                    self._aside(f"kvevents tail: {text}")

    @property
    def full(self) -> bool:
        """Whether so many were written as were asked for."""
        return self._full

    @property
    def over(self) -> bool:
        """Whether all that was asked for was written."""
        return self._full or all(stream.done for stream in self.streams)

    def _all_told(self) -> bool:
        return all(
            live.follower.connections and not live.follower.recovering
            for live in self._sources.live
        )

    def _at_rest(self) -> None:
        """Nothing that has come waits to be told."""
        if self._keeping:
            self._release(
                [
                    one
                    for one in self.streams
                    if one.live is None
                    or (one.live.follower.connections and not one.live.follower.recovering)
                ]
            )

    def _take(self, source: Source, step: Step) -> bool:
        """Returns whether nothing more of it is to be written, or of any."""
        stream = self._of[id(source)]
        message, arrivals = step
        stream.see_message(message)
        if message.channel == Channel.REFUSED:
            stream.refused += 1
            stream.done = True  # ZeroMQ does not try it again
        if stream.done:
            return True
        checker = stream.checker
        if checker is not None and (found := checker.message(message)):
            self._findings(stream, found, message.at_ns)
        for arrival in arrivals:
            if isinstance(arrival, Told):
                reading = read(arrival)
                found = [] if checker is None else checker.read(reading)
                if found:
                    stream.find(found := [one for one in found if one.rule not in _SAID])
                self._told(stream, reading, found)
            else:
                self._other(stream, arrival, message.at_ns)
            if self._full or stream.done:
                return True
        return False

    def _told(self, stream: Stream, reading: Reading, found: list[Finding]) -> None:
        until = self._limits.until
        if until is not None and reading.seq > until:
            stream.done, stream.passed = True, reading.seq
            return
        stream.see(reading)
        if not self._is_before(stream, reading.seq):
            stream.batches_shown += 1
            self._emit(stream, (reading, found))
        if until is not None and reading.seq == until:
            stream.done = True

    def _is_before(self, stream: Stream, seq: int) -> bool:
        """Whether nothing was asked for that is so early."""
        start = self._start
        return (
            start is not None
            and start.kind == "seq"
            and seq < start.number
            and not stream.batches_shown
        )

    def _other(self, stream: Stream, arrival: Arrival, at_ns: int) -> None:
        hole = arrival if isinstance(arrival, (Gap, Lost)) else None
        if hole is None or not self._is_before(stream, hole.first + hole.count - 1):
            for notice in self._notices(stream, arrival, at_ns):
                self._emit(stream, notice)
        if stream.checker is not None and not isinstance(arrival, Told):
            self._findings(stream, stream.checker.other(arrival), at_ns)

    def _findings(self, stream: Stream, found: Sequence[Finding], at_ns: int) -> None:
        """Of the stream, and no batch."""
        kept = [one for one in found if one.rule not in _SAID]
        stream.find(kept)
        for one in kept:
            if self._notes or one.severity != "note":
                said = stream.unfinished if one.rule == "replay-no-end" else None
                self._emit(stream, of_finding(one, at_ns, said))

    def _notices(self, stream: Stream, arrival: Arrival, at_ns: int) -> Iterator[Notice]:
        source = stream.source
        match arrival:
            case Gap():
                own = stream.see_gap(arrival)
                yield of_gap(arrival, at_ns, can_ask=source.can_replay, own=own)
            case Lost() if not stream.begun:
                yield of_earlier(arrival, at_ns, self._why_earlier(stream))
            case Lost():
                own = stream.see_lost(arrival)
                brief = not source.can_replay and stream.gap == Gap(arrival.first, arrival.count)
                yield of_lost(arrival, at_ns, brief=brief, own=own)
            case Restarted():
                stream.see_restart()
                yield of_restart(arrival, at_ns, stream.last_seq)
            case Malformed():
                stream.malformed += 1
                yield of_malformed(arrival)
        stream.begun = True

    def _why_earlier(self, stream: Stream) -> str:
        if stream.live is None:
            return ", not in the capture"
        if not stream.live.can_replay:
            how = "SOURCE,REPLAY" if len(self.streams) > 1 else "--replay-endpoint"
            return f"; {how} asks for their state"
        if self._start is not None and self._start.kind == "live":
            return ""
        return ", not retained any more"

    # ------------------------------------------------------------------------------- writing

    def _emit(self, stream: Stream, entry: Entry) -> None:
        if stream.kept is not None:
            stream.kept.add(entry)
            self._written_at = time.monotonic()  # it will be, or makes room
        else:
            self._write(stream, entry)

    def _release(self, streams: Sequence[Stream]) -> None:
        """The last batches are known."""
        entries: list[tuple[int, Stream, Entry]] = []
        for stream in streams:
            if stream.kept is not None:
                kept, stream.kept = stream.kept, None
                entries += [(_at(entry), stream, entry) for entry in kept.entries()]
        self._keeping = any(one.kept is not None for one in self.streams)
        entries.sort(key=lambda one: one[0])
        for _, stream, entry in entries:
            if not self._full:
                self._write(stream, entry)

    def _write(self, stream: Stream, entry: Entry) -> None:
        if isinstance(entry, Notice):
            self._say(stream, entry)
            if entry.unread:
                self._count()
            return
        reading, found = entry
        if self._lines.needs_header(stream) and self._header:
            self._out.put(self._lines.header)
        events = reading.events
        everything = self._everything
        positions: Sequence[int] = range(len(events))
        if not everything:
            positions = self._filter.choose(reading, stream.label)
        if positions:
            self._written_at = time.monotonic()
        writer = self._writer
        if writer.whole:
            if positions or everything or reading.skipped or reading.batch is None:
                self._out.put(writer.batch(stream, reading))  # type: ignore[union-attr]
                self._written_at = time.monotonic()
                self.written += 1
                self._count()
            self._about(stream, reading, found, positions)
        elif found:
            self._with_findings(stream, reading, found, positions)
        elif positions:
            put, event = self._out.put, writer.event  # type: ignore[union-attr]
            writer.begin(stream, reading)  # type: ignore[union-attr]
            for at in positions:
                put(event(at, events[at]))
                self.written += 1
                if self._count():
                    return
        if not self._full or writer.whole:
            self._unread(stream, reading)

    def _with_findings(
        self, stream: Stream, reading: Reading, found: list[Finding], positions: Sequence[int]
    ) -> None:
        """Each right behind its event."""
        events = reading.events
        self._writer.begin(stream, reading)  # type: ignore[union-attr]
        for at in positions:
            self._out.put(self._writer.event(at, events[at]))  # type: ignore[union-attr]
            of_it = [one for one in found if one.place == (reading.seq, at)]
            self._about(stream, reading, of_it, (at,))
            self.written += 1
            if self._count():
                return
        shown = set(range(len(events)))
        rest = [
            one for one in found if one.place.seq != reading.seq or one.place.event not in shown
        ]
        self._about(stream, reading, rest, ())

    def _about(
        self, stream: Stream, reading: Reading, found: Sequence[Finding], positions: Sequence[int]
    ) -> None:
        """Of the batch, and of the events at `positions`."""
        for one in found:
            is_note = one.severity == "note" and not self._notes
            elsewhere = (
                one.place.event in range(len(reading.events)) and one.place.event not in positions
            )
            if not (is_note or elsewhere):
                self._say(stream, of_finding(one, reading.told.at_ns))

    def _unread(self, stream: Stream, reading: Reading) -> None:
        notices = [of_skipped(reading, skipped) for skipped in reading.skipped]
        if reading.batch is None:
            notices.append(of_undecodable(reading))
        for notice in notices:
            self._say(stream, notice)
            if not self._writer.whole and self._count():
                return

    def _say(self, stream: Stream, notice: Notice) -> None:
        text = self._writer.notice(stream, notice)
        if text is None:
            if text := self._plain.notice(stream, notice):
                self._aside(text.strip())
        elif text:
            self._out.put(text)
        if text:
            self._written_at = time.monotonic()

    def _count(self) -> bool:
        """Whether that was the last."""
        self._counted += 1
        self._full = self._full or self._counted == self._limits.count
        return self._full


def _at(entry: Entry) -> int:
    return entry.at_ns if isinstance(entry, Notice) else entry[0].told.at_ns
