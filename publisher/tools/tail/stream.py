"""What `kvevents tail` knows of one source while it is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvevents.appearance import Appearance
from kvevents.check import Checker, Finding
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    medium_of,
)
from kvevents.frames import JOIN
from kvevents.gaps import Gap, Lost
from kvevents.message import Channel, Message
from kvevents.reading import Reading
from publisher.config.checks import one_line
from publisher.tools.source import Capture, Live, Source
from publisher.tools.tail.hints import Seen, Watch
from publisher.tools.tail.kept import Kept

__all__ = ["Stream", "labels_of"]

_LOOKED_AT = 64
"""Batches whose form is looked at, all of them; after that, every so many."""

_MOST, _MOST_RANKS = 17, 1024
"""Names and ranks that are kept; a stranger may send any number."""

_LABEL = 24

OUR_LOSS = "we read too slowly, or were stopped: it may be our own loss"
RECORDERS_LOSS = "the recorder read too slowly, or was stopped: it may be its own loss"
_ENDS_IN_REPLAY = "or the replay had it: the capture ends before that does"


@dataclass(slots=True)
class Stream:
    """One source. `kept`: the last batches so far, while what comes before them is not to be written.
    `watch`: of one that is listened to.
    """

    source: Source
    label: str
    checker: Checker | None
    kept: Kept | None = None
    done: bool = False
    """Whether nothing more of it is to be written."""
    begun: bool = False
    """Whether something was told, or is known to be missing."""
    gap: Gap | None = None
    """The last one."""
    gap_is_own: bool = False
    """Whether it may be the loss of who listens alone."""
    batches_shown: int = 0
    """Those that are not before what was asked for."""
    passed: int | None = None
    """The seq of the batch behind the last that is to be shown."""
    watch: Watch | None = None
    came: int = 0
    """Batches from the PUB socket."""
    fits: bool = False
    """Whether something of a topic that was asked for came."""
    asked_for: str = ""
    """What the replay under way was asked for."""
    answered: bool = False
    """Whether something came of it."""
    last_seq: int | None = None
    ranks: set[int] = field(default_factory=set)
    media: set[StorageMedium] = field(default_factory=set)
    loras: set[str] = field(default_factory=set)
    """Some of the adapters, once there are more than a few."""
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
    """Whether something of it may be the loss of who listens alone."""
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

    @property
    def seen(self) -> Seen:
        """It as it is now, if it is listened to."""
        live = self.live
        assert live is not None, "captures are not looked at"
        follower = live.follower
        return Seen(
            connected=live.connected,
            refused=self.refused > 0,
            came=self.came,
            fits=self.fits,
            told=self.begun,
            before=None if self.batches_shown else self.last_seq,
            held=follower.held,
            recovering=follower.recovering,
            unanswered_s=live.listener.unanswered_s,
            ahead=follower.ahead,
            behind=live.is_behind,
        )

    def see_message(self, message: Message) -> None:
        """Count one."""
        if not self.first_ns:
            self.first_ns = message.at_ns
        self.last_ns = message.at_ns
        match message.channel:
            case Channel.LIVE:
                self.came += 1
                self.fits = True
            case Channel.ANSWER:
                self.answered = True
                if not message.ends_replay:
                    self.answers_of.add(len(message.frames))
            case Channel.ASKED:
                start = int.from_bytes(message.frames[-1][:8], "big") if message.frames else 0
                self.asked_for = (
                    "the state" if start == JOIN else f"what there is from seq {start} on"
                )
                self.answered = False
        if message.channel in (Channel.LIVE, Channel.ANSWER):
            self.bytes += sum(map(len, message.frames))

    def see_gap(self, gap: Gap) -> str:
        """Count it. Returns why it may be the loss of who listens alone; empty: it is not."""
        self.gaps += 1
        self.gap, self.gap_is_own = gap, self.source.is_behind
        return self._own(is_own=self.gap_is_own)

    def see_lost(self, lost: Lost) -> str:
        """The same of what a gap has become: by then we may have caught up."""
        self.lost += lost.count
        gap = self.gap
        was_in_gap = gap is not None and gap.first <= lost.first < gap.first + gap.count
        own = self._own(is_own=self.source.is_behind or (was_in_gap and self.gap_is_own))
        ends_in_replay = isinstance(self.source, Capture) and self.source.ends_in_replay
        return _ENDS_IN_REPLAY if ends_in_replay and not own else own

    def see_restart(self) -> None:
        """Count it: seqs are counted anew."""
        self.restarts += 1
        self.gap = None

    @property
    def unfinished(self) -> str:
        """What is said of a replay that was given up."""
        source = self.source
        head = source.head if isinstance(source, Capture) else source.address
        where = "" if head is None else f" {head.replay_endpoint}"
        how = "did not finish its answer" if self.answered else "did not answer"
        return f"the replay endpoint{where} {how}: it was asked for {self.asked_for}"

    def _own(self, *, is_own: bool) -> str:
        if not is_own:
            return ""
        self.behind = True
        return OUR_LOSS if self.live is not None else RECORDERS_LOSS

    def see(self, reading: Reading) -> None:
        """Count a batch."""
        told = reading.told
        self.begun, self.last_seq = True, told.seq
        self.fits |= bool(told.topic)
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
        if len(self.ranks) < _MOST_RANKS:
            self.ranks.add(reading.rank)
        if self.appearance.payloads < _LOOKED_AT or not self.batches % _LOOKED_AT:
            self.appearance.add(told.payload)
        for event in events:
            if type(event) is BlockStored:
                self.stored += 1
                self.blocks_stored += len(event.block_hashes)
                self.media.add(medium_of(event))
                if event.lora_name is not None and len(self.loras) < _MOST:
                    self.loras.add(event.lora_name)
            elif type(event) is AllBlocksCleared:
                self.cleared += 1
            elif type(event) is BlockRemoved:
                self.removed += 1
                self.blocks_removed += len(event.block_hashes)
                if event.medium is not None:
                    self.media.add(event.medium)

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
