"""One engine's batches put in order: which to pass on, which to ask for, where the state begins anew.

No I/O: feed it what arrived and do what it says. An engine counts its batches from 0 in each run, gives
runs no name, and keeps the latest batches for replays; it has no snapshots.

E1  Of one run, what is passed on ascends, each batch once. A hole is asked for before it is passed over;
    the jump in the numbers tells of it.
E2  Batches of two runs never follow each other without a FRESH input between. Every replay begins with
    the batch that was passed on last: if it is another one there, so is the run. Where no replay can
    tell, a connection made again is taken for another run.
E3  An answer that stops short or has holes is asked for again from where it got to, as long as it gets
    further.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from kvevents.codec import encode_batch
from kvevents.events import KVEventBatch
from publisher.link.messages import BATCH, FRESH
from publisher.stream.input import Input

__all__ = ["Ask", "EngineStream", "RelayStats", "Step"]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a replay from `start`; drop what an earlier one still answers."""

    start: int


Step: TypeAlias = Input | Ask


@dataclass(slots=True)
class RelayStats:
    """Counts since the start, of batches but for `gaps` (holes), `restarts` and `malformed` (messages).

    `received`: came live. `lost`: could not be had. `unanswered`: replays of which nothing came in time;
    `given_up`: holes, or beginnings, that were passed over for that. `departures`: how often it was away
    for so long that what it held was given up.
    """

    received: int = 0
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    restarts: int = 0
    malformed: int = 0
    unanswered: int = 0
    given_up: int = 0
    departures: int = 0


class _Why(Enum):
    """What a replay was asked for. Live batches wait for the end of the first two, not of the others."""

    JOIN = auto()
    HOLE = auto()
    PROBE = auto()
    """Perhaps something was lost after the last batch that came."""
    REPAIR = auto()
    """What was given up when the engine did not answer may be there still: tell all of it anew."""


class EngineStream:
    """`can_replay`: there is a replay endpoint to ask. `attempts`: how often in vain before giving up.
    `clock`: seconds since the epoch, for batches of its own.
    """

    def __init__(
        self, *, can_replay: bool, attempts: int = 3, clock: Callable[[], float] = time.time
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts: {attempts} is below 1")
        self._can_replay, self._attempts, self._clock = can_replay, attempts, clock
        self._expected = 0
        self._last: bytes | None = None
        """The batch passed on last; None when that is not known."""
        self._same_run = True
        """Whether the engine is known to be in the run that was passed on last."""
        self._live_last = -1
        self._held: tuple[int, bytes] | None = None
        """The live batch that showed a hole."""
        self._why: _Why | None = None
        """Of the replay under way."""
        self._answers = self._progress = self._failures = 0
        """Answers to the replay under way; those that were passed on; replays in vain."""
        self._retried = -1
        """The number that an answer left out, for which it was asked for again."""
        self._diverged = False
        self.stats = RelayStats()

    @property
    def expected(self) -> int:
        """The number of the next batch, as far as is known."""
        return self._expected

    @property
    def asking(self) -> bool:
        """Whether a replay is under way."""
        return self._why is not None

    @property
    def recovering(self) -> bool:
        """Whether live batches have to wait: `live` must not be called."""
        return self._why in (_Why.JOIN, _Why.HOLE)

    @property
    def diverged(self) -> bool:
        """Whether something was given up for want of an answer, which a `probe` may yet bring."""
        return self._diverged

    def start(self, expected: int, last: bytes | None = None) -> None:
        """All before `expected` was passed on earlier; `last` is the body of the one before it.

        Without `last`, an engine that still counts on from there is taken for the same run.
        """
        self._expected, self._last = expected, last

    # ----------------------------------------------------------------------------- connections

    def connected(self) -> list[Step]:
        """The live socket is connected, to who knows which run."""
        self._live_last = -1
        self._same_run = not self._expected
        return [self._ask(_Why.JOIN)] if self._can_replay else []

    def disconnected(self) -> None:
        """Nothing more comes until it is `connected` again."""
        self._why, self._held, self._failures = None, None, 0

    def gone(self) -> list[Step]:
        """The engine is not coming back: what it held is gone with it."""
        steps = self._begin_anew()
        self.stats.departures += bool(steps)
        return steps

    # ---------------------------------------------------------------------------------- frames

    def live(self, number: int, body: bytes) -> list[Step]:
        """A batch came on the live socket."""
        assert not self.recovering, "E1: live batches wait for the replay"
        self.stats.received += 1
        went_back, self._live_last = number <= self._live_last, number
        steps: list[Step] = []
        if went_back or not self._same_run:
            steps = self._restarted()
            if self._can_replay:
                self._held = (number, body)
                return [*steps, self._ask(_Why.JOIN)]
        return steps + self._in_turn(number, body)

    def answered(self, number: int, body: bytes) -> list[Step]:
        """A batch came in answer to a replay."""
        if self._why is None:
            return []
        steps: list[Step] = []
        if self._why is _Why.REPAIR:
            steps, self._why = self._begin_anew(), _Why.JOIN
        self._answers += 1
        if number < self._expected - 1:
            return steps
        if number == self._expected - 1 and self._last in (None, body):
            self._same_run = True
            return steps
        if number == self._expected - 1 or not self._same_run:
            return [*self._restarted(), self._ask(_Why.JOIN)]
        if number > self._expected > self._retried and self._answers > 1:
            self._retried = self._expected  # the engine's queue was full; or it skipped a number
            return [*steps, self._ask(self._why)]
        if self._why is _Why.PROBE:
            self._why = _Why.HOLE
            self.stats.gaps += 1
        if self._held is not None and self._expected <= self._held[0] < number:
            steps.append(self._pass_on(*self._held))
            self._held = None
        self._progress += 1
        self.stats.replayed += 1
        return [*steps, self._pass_on(number, body)]

    def ended(self) -> list[Step]:
        """The replay's end marker came."""
        why, self._why, self._failures = self._why, None, 0
        if why is None:
            return []
        if not self._same_run:  # it has not even the batch that was passed on last
            return [*self._restarted(), self._ask(_Why.JOIN)]
        if why is _Why.REPAIR:
            self._diverged = False
        return self._resume(gave_up=False)

    def failed(self) -> list[Step]:
        """The replay does not go on, or the answer is nonsense."""
        why = self._why
        if why is None:
            return []
        if self._progress:
            self._failures = 0
            return [self._ask(why)]
        self._failures += 1
        if self.recovering and self._failures < self._attempts:
            return [self._ask(why)]
        self._why, self._failures = None, 0
        if why in (_Why.PROBE, _Why.REPAIR):
            return []
        self.stats.given_up += 1
        steps = [] if self._same_run else self._restarted()
        self._diverged = True
        return steps + self._resume(gave_up=True)

    def probe(self) -> list[Step]:
        """It has been quiet: ask whether anything was missed."""
        if not self._can_replay or self.asking:
            return []
        return [self._ask(_Why.REPAIR if self._diverged else _Why.PROBE)]

    # --------------------------------------------------------------------------------- inside

    def _ask(self, why: _Why) -> Ask:
        self._why, self._answers, self._progress = why, 0, 0
        return Ask(0 if why is _Why.REPAIR else max(0, self._expected - 1))

    def _in_turn(self, number: int, body: bytes) -> list[Step]:
        if number < self._expected:
            return []  # a replay has brought it already
        if number > self._expected:
            self.stats.gaps += 1
            if self._can_replay:
                self._held = (number, body)
                return [self._ask(_Why.HOLE)]
        if self._why is _Why.PROBE:
            self._why = None
        return [self._pass_on(number, body)]

    def _resume(self, *, gave_up: bool) -> list[Step]:
        """A replay is over: go on with the live batch that waits, or ask again for what is before it."""
        if self._held is None:
            return []
        number, body = self._held
        if number > self._expected > self._retried and self._answers and not gave_up:
            self._retried = self._expected
            return [self._ask(_Why.HOLE)]
        self._held = None
        return [self._pass_on(number, body)] if number >= self._expected else []

    def _pass_on(self, number: int, body: bytes) -> Input:
        self.stats.lost += number - self._expected
        self._expected, self._last = number + 1, body
        return Input(number, BATCH, body)

    def _restarted(self) -> list[Step]:
        self.stats.restarts += 1
        return self._begin_anew()

    def _begin_anew(self) -> list[Step]:
        told, self._expected, self._last = self._expected > 0, 0, None
        self._same_run, self._diverged, self._retried = True, False, -1
        if not told:
            return []
        return [Input(0, BATCH | FRESH, encode_batch(KVEventBatch(self._clock(), [], 0)))]
