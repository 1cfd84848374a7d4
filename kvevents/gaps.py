"""Which frames to apply, when to ask for a replay, and what was lost: the subscriber's state machine.

No I/O: feed it what arrived and do what it says.

G1  Delivered seqs ascend, each once, without a hole that `Lost` did not report; only the answer to a
    JOIN may begin anywhere, since it begins with AllBlocksCleared.
G2  A hole is asked for before it is given up. What arrives meanwhile is held, at most `max_held`
    frames; beyond that the oldest go, and are asked for again.
G3  The live stream going back to a seq it had already sent means that the publisher started over. A
    new connection may mean it too, although the seq has gone on: `rejoin` asks for the state again.
G4  After a hole was given up the tracker is `diverged`, until a JOIN was answered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from kvevents.frames import JOIN

__all__ = ["Action", "Ask", "Deliver", "Gap", "GapTracker", "Lost", "Restarted"]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply this batch. `replayed`: it came in answer to a replay."""

    seq: int
    payload: bytes
    replayed: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay from `start`; drop what an earlier one still answers."""

    start: int


@dataclass(frozen=True, slots=True)
class Gap:
    """`count` frames from `first` on have not come. They are being asked for."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """`count` frames from `first` on cannot be had. What they said is unknown."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher started over: forget what is known of it. `seq` is the first seen of the new run."""

    seq: int


Action: TypeAlias = Deliver | Ask | Gap | Lost | Restarted


class GapTracker:
    """One stream's tracker. `can_replay`: there is a replay endpoint to ask.

    `attempts`: how often one replay is asked for before it is given up.
    """

    def __init__(self, *, can_replay: bool, max_held: int = 100_000, attempts: int = 3) -> None:
        if max_held < 1:
            raise ValueError(f"max_held: {max_held} is below 1")
        if attempts < 1:
            raise ValueError(f"attempts: {attempts} is below 1")
        self._can_replay, self._attempts = can_replay, attempts
        self._held: deque[tuple[int, bytes]] = deque(maxlen=max_held)
        self._expected: int | None = None
        """The next seq to deliver; None before anything is known of the stream."""
        self._live_last = -1
        self._asked: int | None = None
        """The start of the replay under way."""
        self._answers = self._failures = 0
        self._sought = False
        """Whether the replay under way was asked for with later frames held: for a known hole."""
        self._resume: int | None = None
        """Where to go on when a JOIN after the first is not understood."""
        self._diverged = False

    @property
    def diverged(self) -> bool:
        """Whether something was given up that a `rejoin` might still bring (G4)."""
        return self._diverged and not self.recovering

    @property
    def expected(self) -> int | None:
        """The seq that would be delivered next; None while nothing is known of the stream."""
        return self._expected

    @property
    def recovering(self) -> bool:
        """Whether a replay is under way."""
        return self._asked is not None

    def start(self) -> list[Action]:
        """Join the stream: ask for the state now."""
        return [self._ask(JOIN)] if self._can_replay else []

    def rejoin(self) -> list[Action]:
        """The connection is a new one, or what was given up is to be repaired: ask for the state now.

        What was held is dropped; it is in the answer, or shows as a gap.
        """
        if not self._can_replay:
            return []
        if self._expected is not None:
            self._resume = self._expected
        self._held.clear()
        self._expected, self._failures = None, 0
        return [self._ask(JOIN)]

    def live(self, seq: int, payload: bytes) -> list[Action]:
        """A frame came on the live socket."""
        if seq <= self._live_last:
            return self._restart(seq, payload)
        self._live_last = seq
        if self.recovering:
            self._held.append((seq, payload))
            return []
        return self._next(seq, payload)

    def replayed(self, seq: int, payload: bytes) -> list[Action]:
        """A frame came in answer to a replay."""
        if self._asked is None:
            return []
        expected = self._expected
        if expected is None:  # a snapshot is where the stream begins
            expected = seq if self._asked == JOIN else self._asked
        if seq < expected:
            return []
        self._answers += 1
        actions: list[Action] = []
        while self._held and self._held[0][0] < seq:  # the log has dropped what came live
            early, text = self._held.popleft()
            if early >= expected:
                actions += [*_lost(expected, early), Deliver(early, text, replayed=False)]
                expected = early + 1
        self._expected = seq + 1
        return [*actions, *_lost(expected, seq), Deliver(seq, payload, replayed=True)]

    def end(self) -> list[Action]:
        """The replay's end marker came."""
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        self._failures = 0
        if asked == JOIN and not self._answers:
            self._expected, self._resume = self._resume, None
            return [self._ask(self._expected or 0)]
        self._resume, self._diverged = None, False
        if self._expected is None:  # nothing had been published when this was answered
            self._expected = 0
            return self._release(gave_up=False)
        return self._release(gave_up=self._sought and not self._answers)

    def failed(self) -> list[Action]:
        """The replay did not end in time, or the endpoint answered nonsense."""
        if self._asked is None:
            return []
        self._failures += 1
        if self._failures < self._attempts:
            start = self._asked if self._expected is None else self._expected
            return [self._ask(start)]
        self._asked, self._failures, self._diverged = None, 0, True
        return self._release(gave_up=True)

    # --------------------------------------------------------------------------------- inside

    def _ask(self, start: int) -> Ask:
        self._asked, self._answers = start, 0
        self._sought = bool(self._held)
        return Ask(start)

    def _next(self, seq: int, payload: bytes) -> list[Action]:
        """A frame's turn, in step."""
        if self._expected is None:  # no replay told what came before
            self._expected = seq + 1
            return [*_lost(0, seq), Deliver(seq, payload, replayed=False)]
        if seq < self._expected:
            return []  # a replay has brought it already
        if seq == self._expected:
            self._expected = seq + 1
            return [Deliver(seq, payload, replayed=False)]
        gap = Gap(self._expected, seq - self._expected)
        if self._can_replay:
            self._held.append((seq, payload))
            return [gap, self._ask(self._expected)]
        self._expected = seq + 1
        return [gap, Lost(gap.first, gap.count), Deliver(seq, payload, replayed=False)]

    def _release(self, *, gave_up: bool) -> list[Action]:
        """Deliver what was held; ask again for a hole in it unless that has just been in vain."""
        actions: list[Action] = []
        while self._held:
            seq, payload = self._held.popleft()
            expected = self._expected
            if gave_up and (expected is None or seq > expected):
                actions += _lost(expected or 0, seq)
                self._diverged = True
                self._expected = seq
                gave_up = False
            step = self._next(seq, payload)
            actions += step
            if self.recovering:  # the frame went back to the end of what is held
                self._held.rotate(1)
                return actions
        return actions

    def _restart(self, seq: int, payload: bytes) -> list[Action]:
        self._held.clear()
        self._expected, self._resume = None, None
        self._failures, self._live_last = 0, seq
        self._asked = None
        if self._can_replay:
            self._held.append((seq, payload))
            return [Restarted(seq), self._ask(JOIN)]
        return [Restarted(seq), *self._next(seq, payload)]


def _lost(first: int, end: int) -> list[Action]:
    return [Lost(first, end - first)] if end > first else []
