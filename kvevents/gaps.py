"""Which frames to apply, when to ask for a replay, and what was lost: the subscriber's state machine.

No I/O: feed it what arrived and do what it says.

G1  Delivered seqs ascend, each once, without a hole that `Lost` did not report; only the answer to a
    JOIN may begin anywhere, since it begins with AllBlocksCleared.
G2  A hole is asked for before it is given up. What arrives meanwhile is held, at most `max_held`
    frames and `max_held_bytes`; beyond that the oldest go, and are asked for again.
    A replay that comes to no end is asked for again from where it got to; one that tells the state, whose
    seqs mean something else in another answer, by a JOIN.
G3  The live stream going back to a seq it had already sent means that the publisher started over. A
    new connection may mean it too, although the seq has gone on: `reconnected` asks for the mark, a
    batch that was delivered, and what follows. If that batch is another one there, or gone, so is the
    run: what was held is dropped and the state asked for again. Nothing live is delivered before the
    answer, unless none can be had.
G4  After a hole was given up, or the question of G3, the tracker is `diverged`, until a JOIN was
    answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from kvevents.frames import JOIN

__all__ = ["MAX_HELD_BYTES", "Action", "Ask", "Deliver", "Gap", "GapTracker", "Lost", "Restarted"]

MAX_HELD_BYTES: Final = 256 << 20

_FRAME_BYTES = 256
"""What holding a frame takes besides its payload."""

P = TypeVar("P", bound=Sized)
"""A payload: anything that tells by == whether it says the same as another, and its bytes by len."""


@dataclass(frozen=True, slots=True)
class Deliver(Generic[P]):
    """Apply this batch. `replayed`: it came in answer to a replay."""

    seq: int
    payload: P
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


Action: TypeAlias = Deliver[P] | Ask | Gap | Lost | Restarted


class _Held(Generic[P]):
    """The newest frames that came while a replay is under way, oldest first. One is always kept."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._frames: deque[tuple[int, P]] = deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def first(self) -> int | None:
        """The oldest one's seq."""
        return self._frames[0][0] if self._frames else None

    def append(self, seq: int, payload: P) -> None:
        """Beyond the bounds the oldest go."""
        self._frames.append((seq, payload))
        self.num_bytes += len(payload) + _FRAME_BYTES
        while len(self._frames) > self._max_frames or (
            self.num_bytes > self._max_bytes and len(self._frames) > 1
        ):
            self.popleft()

    def popleft(self) -> tuple[int, P]:
        seq, payload = self._frames.popleft()
        self.num_bytes -= len(payload) + _FRAME_BYTES
        return seq, payload

    def last_first(self) -> None:
        """The newest is the oldest again."""
        self._frames.rotate(1)

    def clear(self) -> None:
        self._frames.clear()
        self.num_bytes = 0


class GapTracker(Generic[P]):
    """One stream's tracker. `can_replay`: there is a replay endpoint to ask.

    `attempts`: how often one replay is asked for before it is given up.
    """

    def __init__(
        self,
        *,
        can_replay: bool,
        max_held: int = 100_000,
        max_held_bytes: int = MAX_HELD_BYTES,
        attempts: int = 3,
    ) -> None:
        for name, value in (
            ("max_held", max_held),
            ("max_held_bytes", max_held_bytes),
            ("attempts", attempts),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        self._can_replay, self._attempts = can_replay, attempts
        self._held = _Held[P](max_held, max_held_bytes)
        self._expected: int | None = None
        """The next seq to deliver; None before anything is known of the stream."""
        self._live_last = -1
        self._asked: int | None = None
        """The start of the replay under way."""
        self._answers = self._failures = 0
        self._sought = False
        """Whether the replay under way was asked for with later frames held: for a known hole."""
        self._joining = False
        """Whether the replay under way brings the state: a JOIN, or what is asked for in place of one."""
        self._tells_state = False
        """Whether the answer under way does: what follows in it cannot be had by its seq."""
        self._resume: int | None = None
        """Where to go on when a JOIN after the first is not understood."""
        self._mark: tuple[int, P] | None = None
        """The newest batch known to be of the run that the others delivered are of: it came live, or in
        an answer that began with the mark or the state. An answer to a mere hole may be another run's.
        """
        self._vouched = False
        """Whether the answer under way began so."""
        self._same_run = True
        """Whether the publisher is known to be in the run that was delivered."""
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

    @property
    def held(self) -> int:
        """How many frames wait for the replay under way."""
        return len(self._held)

    @property
    def ahead(self) -> int:
        """By how many seqs what was delivered is ahead of the newest live frame; 0 before the first one.
        That lasts only where the answers were another stream's.
        """
        if self._expected is None or self._live_last < 0:
            return 0
        return max(0, self._expected - 1 - self._live_last)

    def start(self, at: int = JOIN) -> list[Action[P]]:
        """Join the stream: ask for the state now, or for what follows `at`."""
        return [self._ask(at)] if self._can_replay else []

    def rejoin(self) -> list[Action[P]]:
        """What was given up is to be repaired: ask for the state now.

        What was held is dropped; it is in the answer, or shows as a gap.
        """
        if not self._can_replay:
            return []
        if self._expected is not None:
            self._resume = self._expected if self._same_run else None
        self._held.clear()
        self._expected, self._failures = None, 0
        return [self._ask(JOIN)]

    def reconnected(self) -> list[Action[P]]:
        """The live connection is a new one: find out whether the run behind it is (G3).

        Not to be called after `live` with a frame of the new connection.
        """
        if not self._can_replay:
            return []
        if self._expected or self._resume:  # something was delivered
            self._same_run = False
        if self._mark is None or self._diverged or self._joining:
            return self._join_anew()
        self._failures = 0
        return [self._ask(self._mark[0])]

    def live(self, seq: int, payload: P) -> list[Action[P]]:
        """A frame came on the live socket."""
        if seq <= self._live_last:
            return self._restart(seq, payload)
        self._live_last = seq
        if self.recovering:
            self._held.append(seq, payload)
            return []
        return self._next(seq, payload)

    def replayed(self, seq: int, payload: P, *, clears: bool = False) -> list[Action[P]]:
        """A frame came in answer to a replay. `clears`: it may begin to tell the state anew."""
        if self._asked is None:
            return []
        self._tells_state = self._tells_state or clears or self._asked == JOIN
        if self._asked == JOIN:
            self._same_run = True
        elif not self._same_run:
            return self._compare(seq, payload)
        expected = self._expected
        if expected is None:  # a snapshot is where the stream begins
            expected = seq if self._asked == JOIN else self._asked
        if seq < expected:
            return []
        self._answers += 1
        actions: list[Action[P]] = []
        while (first := self._held.first) is not None and first < seq:  # the log has dropped it
            early, text = self._held.popleft()
            if early >= expected:
                actions += [*_lost(expected, early), self._deliver(early, text, replayed=False)]
                expected = early + 1
        return [*actions, *_lost(expected, seq), self._deliver(seq, payload, replayed=True)]

    def end(self) -> list[Action[P]]:
        """The replay's end marker came."""
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        self._failures = 0
        if asked == JOIN and not self._answers:
            return self._ask_without_join()
        if not self._same_run:
            return self._join_anew()
        if self._joining:
            self._joining, self._resume, self._diverged = False, None, False
        if self._expected is None:  # nothing had been published when this was answered
            self._expected = 0
            return self._release(gave_up=False)
        return self._release(gave_up=self._sought and not self._answers)

    def failed(self) -> list[Action[P]]:
        """The replay did not end in time, or the endpoint answered nonsense."""
        if self._asked is None:
            return []
        self._failures += 1
        if self._failures < self._attempts:
            return [self._ask_again(self._asked)]
        self._asked, self._failures = None, 0
        self._joining, self._diverged = False, True
        if not self._same_run:  # nor known to be in another: what was delivered may hold or not
            self._expected = None
        elif self._expected is None:
            self._expected, self._resume = self._resume, None
        return self._release(gave_up=True)

    # --------------------------------------------------------------------------------- inside

    def _ask(self, start: int) -> Ask:
        self._asked, self._answers, self._tells_state = start, 0, False
        self._sought = bool(self._held)
        self._vouched = self._expected is None
        self._joining = self._joining or start == JOIN
        return Ask(start)

    def _ask_again(self, asked: int) -> Ask:
        """The replay from `asked` came to nothing, or not to its end."""
        if self._tells_state and self._same_run:
            self._expected, self._resume = None, self._expected
            return self._ask(JOIN)
        if self._expected is None:
            return self._ask(asked)
        if self._same_run or self._mark is None:
            return self._ask(self._expected)
        return self._ask(self._mark[0])

    def _compare(self, seq: int, payload: P) -> list[Action[P]]:
        """An answer's frame tells which run it is of (G3)."""
        if self._mark is not None and seq < self._mark[0]:
            return []
        if (seq, payload) != self._mark:
            return self._join_anew()
        self._same_run = self._vouched = True
        return []

    def _join_anew(self) -> list[Action[P]]:
        """The run may be another: ask for its state."""
        self._forget()
        return [self._ask(JOIN)]

    def _ask_without_join(self) -> list[Action[P]]:
        """The publisher has no snapshots: ask for what follows, or for all of another run."""
        self._expected, self._resume = self._resume, None
        if self._same_run:
            return [self._ask(self._expected or 0)]
        self._same_run = True
        return [Restarted(0), self._ask(0)]

    def _deliver(self, seq: int, payload: P, *, replayed: bool) -> Deliver[P]:
        self._expected = seq + 1
        if self._same_run and (self._vouched or not replayed):
            self._mark = seq, payload
        return Deliver(seq, payload, replayed)

    def _next(self, seq: int, payload: P) -> list[Action[P]]:
        """A frame's turn, in step."""
        if self._expected is None:  # no replay told what came before
            before: list[Action[P]] = _lost(0, seq)
            if not seq and not self._same_run:
                self._same_run, before = True, [Restarted(0)]
            return [*before, self._deliver(seq, payload, replayed=False)]
        if seq < self._expected:
            return []  # a replay has brought it already
        if seq == self._expected:
            return [self._deliver(seq, payload, replayed=False)]
        gap = Gap(self._expected, seq - self._expected)
        if self._can_replay:
            self._held.append(seq, payload)
            return [gap, self._ask(self._expected)]
        return [gap, Lost(gap.first, gap.count), self._deliver(seq, payload, replayed=False)]

    def _release(self, *, gave_up: bool) -> list[Action[P]]:
        """Deliver what was held; ask again for a hole in it unless that has just been in vain."""
        actions: list[Action[P]] = []
        while self._held:
            seq, payload = self._held.popleft()
            expected = self._expected
            if gave_up and (expected is None or seq > expected):
                if expected is not None:
                    actions += _lost(expected, seq)
                    self._expected = seq
                self._diverged, gave_up = True, False
            step = self._next(seq, payload)
            actions += step
            if self.recovering:  # the frame went back to the end of what is held
                self._held.last_first()
                return actions
        return actions

    def _restart(self, seq: int, payload: P) -> list[Action[P]]:
        self._forget()
        self._live_last, self._same_run = seq, True
        if self._can_replay:
            self._held.append(seq, payload)
            return [Restarted(seq), self._ask(JOIN)]
        return [Restarted(seq), *self._next(seq, payload)]

    def _forget(self) -> None:
        """Whatever comes next is the first that is known of the stream."""
        self._held.clear()
        self._expected, self._resume, self._mark, self._asked = None, None, None, None
        self._failures, self._live_last = 0, -1


def _lost(first: int, end: int) -> list[Action[P]]:
    return [Lost(first, end - first)] if end > first else []
