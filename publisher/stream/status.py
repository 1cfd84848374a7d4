"""What a sidecar knows of itself: plain counts that its loop keeps and any thread may read.

There are no locks: one thread writes, single fields at a time, and no dict changes its size after it is
made. What must agree with itself is one immutable value (`Books`), replaced whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvevents.columns import Columns
from kvevents.events import AllBlocksCleared, BlockStored, Event, StorageMedium
from publisher.config.sidecar_config import WorkerInfo
from publisher.stream.foreign import ForeignCounts

__all__ = [
    "DROP_REASONS",
    "Books",
    "Buckets",
    "CurveStatus",
    "EventCounts",
    "JournalStatus",
    "Key",
    "ReplayCounts",
    "SidecarStatus",
    "SinkStatus",
    "SourceStatus",
    "is_stuck",
]

Key = tuple[str, str]
"""An event's kind and its medium; the medium is empty where the event names none."""

DROP_REASONS = ("filtered",)
"""Why events are left out of a sink: its dialect does not tell of them."""

_LONGEST_S = 1e9

STUCK_S = 30.0
"""A loop that has not turned for so long is stuck."""

_STORED: dict[StorageMedium | None, Key] = {
    None: ("stored", ""),
    **{one: ("stored", one.value) for one in StorageMedium},
}
_REMOVED: dict[StorageMedium | None, Key] = {
    None: ("removed", ""),
    **{one: ("removed", one.value) for one in StorageMedium},
}
_KEYS: tuple[Key, ...] = (*_STORED.values(), *_REMOVED.values(), ("cleared", ""))


class Buckets:
    """How long something took, as a histogram. One thread observes; about 0.3 µs each."""

    BOUNDS = (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    )
    """Upper bounds in seconds, inclusive; a last bucket is for what is above."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration. One that cannot be, of a clock that was set back, counts as none."""
        if not 0.0 <= seconds < _LONGEST_S:
            seconds = 0.0
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.seconds += seconds


class EventCounts:
    """Events and their blocks, by kind and medium. The keys are fixed: a peer cannot make more."""

    __slots__ = ("blocks", "events")

    def __init__(self) -> None:
        self.events: dict[Key, int] = dict.fromkeys(_KEYS, 0)
        self.blocks: dict[Key, int] = dict.fromkeys(_KEYS, 0)

    @property
    def num_events(self) -> int:
        """All events counted."""
        return sum(self.events.values())

    def add(self, events: Iterable[Event]) -> None:
        """Count what a batch says."""
        counted, blocks = self.events, self.blocks
        if type(events) is Columns and events.only_stores:
            key = _STORED[events.medium]
            counted[key] += len(events)
            blocks[key] += len(events.hashes)
            return
        for event in events:
            if isinstance(event, BlockStored):
                key = _STORED[event.medium]
            elif isinstance(event, AllBlocksCleared):
                counted["cleared", ""] += 1
                continue
            else:
                key = _REMOVED[event.medium]
            counted[key] += 1
            blocks[key] += len(event.block_hashes)


class Books(NamedTuple):
    """Every message that the worker numbered, by what became of it.

    `missed`: the full ring refused it, or it was lost on the way. `skipped`: read while out of step,
    told anew by a resync. `unreadable`: it could not be decoded. `pending`: not read yet.
    """

    offered: int = 0
    published: int = 0
    missed: int = 0
    skipped: int = 0
    unreadable: int = 0
    pending: int = 0

    @property
    def refused(self) -> int:
        """What was not published and will not be; each has led to a resync or to a clear."""
        return self.missed + self.skipped + self.unreadable

    @property
    def balanced(self) -> bool:
        """Whether nothing has vanished."""
        return self.offered == self.published + self.refused + self.pending


@dataclass(slots=True)
class SourceStatus:
    """Where events come from. `link_bytes`: in the ring now, of `link_capacity`."""

    kind: Literal["link", "relay"] = "link"
    worker_up: bool = False
    in_step: bool = False
    books: Books = field(default_factory=Books)
    received: EventCounts = field(default_factory=EventCounts)
    resyncs: int = 0
    last_loss: str = ""
    link_bytes: int = 0
    link_capacity: int = 0


@dataclass(slots=True)
class ReplayCounts:
    """Replay requests by what became of them, and the batches they were answered with.

    `served`: from the retained frames. `snapshot`: with the state in front of them. `bad_request`: could
    not be read. `dropped`: the client stopped reading or went away.
    """

    served: int = 0
    snapshot: int = 0
    bad_request: int = 0
    dropped: int = 0
    batches: int = 0


@dataclass(slots=True)
class SinkStatus:
    """One output: where it is, and what it has sent.

    `endpoints`: as bound, ports filled in, or the targets it connects to. `held_events`: waiting to be
    merged with the next batch. `oldest_seq`: of the retained frames; `next_seq` when there are none.
    `overflows`: how often a subscriber's queue had no room, and it has missed what followed until it had.
    `latency`: from reading a message to the socket's having its batch. `age`: from the change in the
    cache to the same.
    """

    name: str = "sink0"
    dialect: str = "sglang"
    mode: Literal["bind", "connect"] = "bind"
    endpoints: tuple[str, ...] = ()
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 0
    hwm: int = 0
    next_seq: int = 0
    oldest_seq: int = 0
    retained_batches: int = 0
    retained_bytes: int = 0
    batches: int = 0
    bytes: int = 0
    published: EventCounts = field(default_factory=EventCounts)
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    held_events: int = 0
    subscribers: int = 0
    overflows: int = 0
    replay: ReplayCounts = field(default_factory=ReplayCounts)
    latency: Buckets = field(default_factory=Buckets)
    age: Buckets = field(default_factory=Buckets)


@dataclass(slots=True)
class JournalStatus:
    """The file that a restart goes on from. `failing`: it cannot be written; a restart will resync."""

    state: Literal["off", "ok", "failing"] = "off"
    bytes: int = 0
    failures: int = 0


@dataclass(slots=True)
class CurveStatus:
    """Handshakes on the sinks' sockets. `failed`: not CURVE at all, not with our key, or broken off: a
    client without CURVE hangs up as soon as it sees ours.
    """

    keys: int = 0
    accepted: int = 0
    denied: int = 0
    failed: int = 0


@dataclass(slots=True)
class SidecarStatus:
    """The whole sidecar.

    `ready`: every socket is bound and the source has begun. `started_at`: seconds since the epoch.
    `turned_at`: monotonic, when the loop last turned; 0 before it does. `live_blocks` by medium.
    `left_out`: blocks of an engine's own events that were not passed on, by why; `orphans_since_clear`:
    of the orphans those that came after all was last cleared.
    """

    worker: WorkerInfo
    version: str
    pid: int
    started_at: float
    ready: bool = False
    turned_at: float = 0.0
    source: SourceStatus = field(default_factory=SourceStatus)
    sinks: tuple[SinkStatus, ...] = ()
    live_blocks: dict[str, int] = field(
        default_factory=lambda: {medium.value: 0 for medium in StorageMedium}
    )
    left_out: ForeignCounts = field(default_factory=ForeignCounts)
    orphans_since_clear: int = 0
    journal: JournalStatus = field(default_factory=JournalStatus)
    curve: CurveStatus | None = None
    log_lines_dropped: int = 0


def is_stuck(status: SidecarStatus, now: float) -> bool:
    """Whether the loop has begun and then stopped turning. `now`: monotonic."""
    return 0.0 < status.turned_at < now - STUCK_S
