"""What came of a stream, or of a replay: how much of what, counted as it comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvevents.appearance import Appearance
from kvevents.errors import KVEventsError
from kvevents.events import AllBlocksCleared, BlockStored, Event
from kvevents.follower import Told
from kvevents.frames import END, Frame, parse_live, parse_replay_answer
from kvevents.reading import read

__all__ = ["Content", "Kept"]

_MOST_TOPICS, _TOPIC_BYTES = 20, 200
_KEPT_MESSAGES, _KEPT_BYTES = 1000, 8 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A message as it came, with so many events in it that store or remove."""

    frames: list[bytes]
    stored: int
    removed: int


class Content:
    """Messages in any number. `start`: what was asked for, of a replay; None: they came live."""

    def __init__(self, *, start: int | None = None) -> None:
        self.start = start
        self.messages = self.bytes = 0
        self.batches = 0
        """Messages with a topic, a seq and a payload, or answers of a replay that are not its END."""
        self.empty = 0
        """Of `batches`: without events."""
        self.unreadable = 0
        """Of `batches`: the payload is no batch; why: `reason`."""
        self.malformed = 0
        """Messages that are no batches; why: `malformed_reason`."""
        self.reason = self.malformed_reason = ""
        self.stored = self.removed = self.cleared = self.skipped = 0
        """Events; `skipped` could not be read, for `skipped_reason`."""
        self.skipped_reason = ""
        self.stored_blocks = 0
        self.mismatched = 0
        """Stores whose token_ids are not block_hashes × block_size, where there are any."""
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self.topics: Counter[bytes] = Counter()
        self.frame_counts: Counter[int] = Counter()
        self.appearance = Appearance()
        self.kept: list[Kept] = []
        """The first of the messages."""
        self._kept_bytes = 0

    @property
    def events(self) -> int:
        """All of them, read or not."""
        return self.stored + self.removed + self.cleared + self.skipped

    @property
    def all_kept(self) -> bool:
        """Whether `kept` is all of it."""
        return len(self.kept) == self.messages

    def take(self, frames: list[bytes]) -> None:
        """One message; anything may be in it."""
        size = sum(map(len, frames))
        before = self.stored, self.removed
        keep = self.all_kept and len(self.kept) < _KEPT_MESSAGES and self._kept_bytes < _KEPT_BYTES
        self._take(frames, size)
        if keep:
            counts = self.stored - before[0], self.removed - before[1]
            self.kept.append(Kept(frames, *counts))
            self._kept_bytes += size

    def _take(self, frames: list[bytes], size: int) -> None:
        self.messages += 1
        self.bytes += size
        self.frame_counts[len(frames)] += 1
        try:
            frame = parse_live(frames) if self.start is None else parse_replay_answer(frames)
        except KVEventsError as error:
            self.malformed += 1
            self.malformed_reason = self.malformed_reason or str(error)
            if self.start is None and frames:
                self._see_topic(frames[0])
            return
        if frame == END:
            return
        assert isinstance(frame, Frame)
        if self.start is None or len(frames) == 4:
            self._see_topic(frame.topic)
        self._take_batch(frame)

    def _see_topic(self, topic: bytes) -> None:
        topic = topic[:_TOPIC_BYTES]
        if topic in self.topics or len(self.topics) < _MOST_TOPICS:
            self.topics[topic] += 1

    def _take_batch(self, frame: Frame) -> None:
        self.batches += 1
        self.first_seq = frame.seq if self.first_seq is None else self.first_seq
        self.last_seq = frame.seq
        self.appearance.add(frame.payload)
        reading = read(Told(frame.seq, frame.payload, replayed=self.start is not None))
        if reading.batch is None:
            self.unreadable += 1
            self.reason = self.reason or reading.reason
            return
        self.empty += not reading.events and not reading.skipped
        self.skipped += len(reading.skipped)
        if reading.skipped and not self.skipped_reason:
            self.skipped_reason = reading.skipped[0].reason
        for event in reading.events:
            self._take_event(event)

    def _take_event(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.cleared += 1
        elif isinstance(event, BlockStored):
            self.stored += 1
            blocks = len(event.block_hashes)
            self.stored_blocks += blocks
            tokens = len(event.token_ids)
            self.mismatched += bool(tokens) and tokens != blocks * event.block_size
        else:
            self.removed += 1
