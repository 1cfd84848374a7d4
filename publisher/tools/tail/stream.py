"""What `kvevents tail` knows of one source while it is read."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvevents.appearance import Appearance
from kvevents.check import Checker, Finding
from kvevents.events import AllBlocksCleared, BlockStored
from kvevents.gaps import Gap
from kvevents.message import Channel, Message
from kvevents.reading import Reading
from publisher.checks import one_line
from publisher.tools.source import Capture, Live, Source
from publisher.tools.tail.notice import Notice

__all__ = ["Entry", "Stream", "labels_of"]

Entry = tuple[Reading, list[Finding]] | Notice
"""What is written: a batch with what was found in it, or what is said of the stream."""

_LOOKED_AT = 64
"""Batches whose form is looked at, all of them; after that, every so many."""

_LABEL = 24


@dataclass(slots=True)
class Stream:
    """One source. `kept`: the last batches so far, while what comes before them is not to be written."""

    source: Source
    label: str
    checker: Checker | None
    kept: deque[Entry] | None = None
    done: bool = False
    """Whether nothing more of it is to be written."""
    begun: bool = False
    """Whether something was told, or is known to be missing."""
    gap: Gap | None = None
    """The last one."""
    saying: int = 0
    """Batches of `kept` that say something."""
    batches_shown: int = 0
    last_seq: int | None = None
    ranks: set[int] = field(default_factory=set)
    appearance: Appearance = field(default_factory=Appearance)
    answers_of: set[int] = field(default_factory=set)
    """How many frames the answers to replays had."""
    first_ns: int = 0
    last_ns: int = 0
    bytes: int = 0
    batches: int = 0
    replayed: int = 0
    empty: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    undecodable: int = 0
    skipped: int = 0
    malformed: int = 0
    gaps: int = 0
    lost: int = 0
    restarts: int = 0
    refused: int = 0
    behind: bool = False
    findings: Counter[str] = field(default_factory=Counter)
    """Violations by rule; notes are not among them."""
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def live(self) -> Live | None:
        """The source, if it is listened to."""
        return self.source if isinstance(self.source, Live) else None

    @property
    def events(self) -> int:
        """Those that could be read."""
        return self.stored + self.removed + self.cleared

    @property
    def troubles(self) -> int:
        """All that makes `--strict` fail."""
        return (
            self.undecodable
            + self.skipped
            + self.malformed
            + self.gaps
            + self.lost
            + self.restarts
            + self.findings.total()
        )

    def see_message(self, message: Message) -> None:
        """Count one."""
        if not self.first_ns:
            self.first_ns = message.at_ns
        self.last_ns = message.at_ns
        if message.channel <= Channel.ANSWER:
            self.bytes += sum(map(len, message.frames))
            if message.channel == Channel.ANSWER and not message.ends_replay:
                self.answers_of.add(len(message.frames))

    def see(self, reading: Reading) -> None:
        """Count a batch."""
        told = reading.told
        self.begun, self.last_seq = True, told.seq
        self.batches += 1
        self.replayed += told.replayed
        self.skipped += len(reading.skipped)
        if reading.batch is None:
            self.undecodable += 1
            self.appearance.add(told.payload)
            return
        events = reading.batch.events
        if not events:
            self.empty += not reading.skipped
            return
        self.ranks.add(reading.rank)
        if self.appearance.payloads < _LOOKED_AT or not self.batches % _LOOKED_AT:
            self.appearance.add(told.payload)
        for event in events:
            if type(event) is BlockStored:
                self.stored += 1
                self.blocks_stored += len(event.block_hashes)
            elif type(event) is AllBlocksCleared:
                self.cleared += 1
            else:
                self.removed += 1
                self.blocks_removed += len(event.block_hashes)  # type: ignore[union-attr]

    def find(self, findings: list[Finding]) -> None:
        """Count them."""
        for one in findings:
            counted = self.notes if one.severity == "note" else self.findings
            counted[one.rule] += 1


def labels_of(sources: list[Source]) -> list[str]:
    """What the lines of each begin with: short, and each another."""
    short = [one_line(one.file.name) if isinstance(one, Capture) else one.name for one in sources]
    names = short if len(set(short)) == len(short) else [one.name for one in sources]
    return [name if len(name) <= _LABEL else f"…{name[1 - _LABEL :]}" for name in names]
