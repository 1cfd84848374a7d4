"""Messages as they come, before they have their turn: seqs on the PUB socket, replays, heartbeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvevents.check.finding import Finding, Place
from kvevents.check.ranks import finding_of
from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, BlockStored
from kvevents.follower import Told
from kvevents.frames import JOIN, End, parse_live, parse_replay_answer
from kvevents.message import Channel, Message
from kvevents.reading import Reading, read

__all__ = ["Wire"]

_END_SEQ = b"\xff" * 8
_SEQ_BYTES = 8
_KEPT = 10_000
"""Live batches that an answer is compared with."""
_NS = 1_000_000_000
_CLEARS = b"leared"
"""Some of what a payload that clears has in it, in any form."""


class Wire:
    """One stream's messages. `silence_s`: how long one that sends heartbeats may say nothing."""

    def __init__(self, silence_s: float) -> None:
        self._silence_ns = silence_s * _NS
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By seq: hash and size of the payload that came live, in this run."""
        self._last_seq = 0
        self._last_ns: int | None = None
        self._beats = False
        """Whether it sends empty batches."""
        self._behind = False
        """Whether messages have the time at which they were read, long after they came."""
        self._asked: int | None = None
        """The start of the replay under way."""
        self._answered: int | None = None
        """The seq of its last answer."""
        self._began_at = 0
        """That of its first."""
        self._spoken = False
        """Whether one of them had events."""
        self._snapshot = False
        """Whether the answer is in the middle of a snapshot."""

    def take(self, message: Message) -> Iterator[Finding]:
        """What is wrong with a message of whatever channel."""
        match message.channel:
            case Channel.LIVE:
                yield from self._take_live(message)
            case Channel.ASKED:
                frames = message.frames
                known = bool(frames) and len(frames[-1]) == _SEQ_BYTES
                self._asked = int.from_bytes(frames[-1], "big") if known else 0
                self._answered, self._spoken, self._snapshot = None, False, False
            case Channel.ANSWER:
                yield from self._take_answer(message)
            case Channel.OVER:
                yield from self._over()
            case Channel.BEHIND | Channel.ABREAST:
                self._behind = message.channel == Channel.BEHIND
            case Channel.CONNECTED | Channel.DISCONNECTED | Channel.REFUSED:
                self._live.clear()  # the run behind the next connection may be another
                self._last_ns = None
                if message.channel != Channel.CONNECTED:
                    self._asked = None

    # ------------------------------------------------------------------------------------ live

    def _take_live(self, message: Message) -> Iterator[Finding]:
        try:
            frame = parse_live(message.frames)
        except KVEventsError:
            if len(message.frames) == 3 and message.frames[1] == _END_SEQ:
                yield self._end_on_pub(message.frames[2])
            return
        payload, last = frame.payload, self._last_ns
        told = hash(payload), len(payload)
        if frame.seq <= self._last_seq and self._live.get(frame.seq) != told:
            self._live.clear()  # another run, behind a connection that has stayed, as a proxy's does
        silent_ns = 0 if last is None else message.at_ns - last
        if silent_ns > self._silence_ns and self._beats and not self._behind:
            what = f"nothing came for {silent_ns / _NS:.0f} s of a publisher that sends heartbeats"
            yield finding_of("silence", Place(frame.seq), what, earlier=Place(self._last_seq))
        self._last_ns, self._last_seq = message.at_ns, frame.seq
        self._live[frame.seq] = told
        if len(self._live) > _KEPT:
            self._live.popitem(last=False)

    def beat(self) -> None:
        """A batch without events came."""
        self._beats = True

    def _end_on_pub(self, payload: bytes) -> Finding:
        place = Place(2**64 - 1)
        if payload:
            return finding_of("end-seq", place, "a batch whose seq is that of END")
        what = "END on the PUB socket: it resets those that wait for it, and stops others"
        return finding_of("end-seq", place, what, severity="note")

    # --------------------------------------------------------------------------------- replays

    def _take_answer(self, message: Message) -> Iterator[Finding]:
        try:
            answer = parse_replay_answer(message.frames)
        except KVEventsError:
            return
        if isinstance(answer, End):
            self._asked = None
            return
        if self._asked is None:
            return
        seq, previous = answer.seq, self._answered
        place = Place(seq)
        first = previous is None
        if previous is not None and seq != previous + 1:
            what = f"a replay has {seq} after {previous}"
            yield finding_of("replay-order", place, what, earlier=Place(previous))
        elif first and self._asked != JOIN and seq < self._asked:
            yield finding_of("replay-order", place, f"a replay from {self._asked} begins before it")
        if first:
            self._began_at = seq
        self._answered = seq
        live = self._live.get(seq)
        same = live == (hash(answer.payload), len(answer.payload))
        self._snapshot = self._snapshot and not same
        differs = live is not None and not same
        if differs or not self._spoken or (live is None and _CLEARS in answer.payload):
            told = read(Told(seq, answer.payload, replayed=True))
            yield from self._look_into(told, same=same, differs=differs)

    def _look_into(self, reading: Reading, *, same: bool, differs: bool) -> Iterator[Finding]:
        """One of those that an answer begins with, or that is not what came live."""
        place, asked = Place(reading.seq), self._asked or 0
        clears = bool(reading.events) and isinstance(reading.events[0], AllBlocksCleared)
        if not self._spoken and (reading.batch is None or reading.events or reading.skipped):
            self._spoken = True
            if asked == JOIN and not clears:
                what = "the answer with the state does not begin with AllBlocksCleared"
                yield finding_of("snapshot", place, what)
            elif asked != JOIN and self._began_at > asked and not clears:
                what = f"a replay from {asked} begins with {self._began_at}: the rest is not kept"
                yield finding_of("replay-start", place, what)
        self._snapshot = self._snapshot or (clears and not same)
        if not differs:
            return
        rest = reading.events[1:] if clears else reading.events
        odd = next((at for at, one in enumerate(rest) if not isinstance(one, BlockStored)), None)
        if reading.batch is not None and self._snapshot and odd is None:
            return
        if self._snapshot and odd is not None:
            what = f"a snapshot with {type(rest[odd]).__name__} in it"
            where = Place(reading.seq, odd + clears)
            yield finding_of("snapshot", where, what, earlier=place)
            return
        what = "a replayed batch is not the one that came live with this seq"
        yield finding_of("replay-bytes", place, what, earlier=place)

    def _over(self) -> Iterator[Finding]:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        replay = "the replay of the state" if asked == JOIN else f"the replay from {asked}"
        if self._answered is None:
            what = f"{replay} was not answered"
            yield finding_of("replay-no-end", Place(self._last_seq), what)
        else:
            what = f"{replay} has no end"
            yield finding_of("replay-no-end", Place(self._answered), what)
