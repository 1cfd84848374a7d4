"""What can be replayed of a capture that is played."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter

from kvevents.follower import Step, Told
from kvevents.frames import JOIN
from kvevents.gaps import Restarted
from kvevents.message import Channel

__all__ = ["History"]

_MAX_BYTES = 256 << 20
_SEQ_BYTES = 8


class History:
    """What the capture's own replays had brought, and what came live and was played.

    Answers as an engine's publisher does, which keeps its last `max_batches`: from the oldest that it
    has, if that is later than what was asked for.

    The answer to the first request of the capture, or to its last JOIN, is kept besides, for it begins
    with the state; of both parts, at most 256 MiB. JOIN is answered from there, where the capture was
    answered so, and else with nothing.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._base: list[tuple[int, bytes]] = []
        self._base_bytes = 0
        self._recent: deque[tuple[int, bytes]] = deque()
        self._recent_bytes = 0
        self._join_at: int | None = None
        self._basing = False
        """Whether what is replayed now is of the base."""
        self._asked: int | None = None
        """What was asked for last in the capture, until an answer came."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer with."""
        return not (self._base or self._recent)

    def take(self, steps: Sequence[Step]) -> None:
        """What these have brought."""
        for message, arrivals in steps:
            if message.channel == Channel.ASKED:
                start = b"".join(message.frames[-1:])
                self._asked = int.from_bytes(start, "big") if len(start) == _SEQ_BYTES else 0
            for arrival in arrivals:
                match arrival:
                    case Told():
                        self._add(arrival)
                    case Restarted():
                        self._clear()

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """What there is now from `start` on."""
        if start == JOIN:
            if self._join_at is None:
                return iter(())
            start = self._join_at
        found = self._base[bisect_left(self._base, start, key=itemgetter(0)) :]
        return iter([*found, *(one for one in self._recent if one[0] >= start)])

    def _add(self, told: Told) -> None:
        if told.replayed and self._asked is not None:  # the first that was answered
            if self._asked == JOIN or self.is_empty:
                self._clear()
                self._join_at = told.seq if self._asked == JOIN else None
                self._basing = True
            self._asked = None
        size = len(told.payload)
        self._basing = self._basing and told.replayed and self._base_bytes + size <= _MAX_BYTES
        if self._basing:
            self._base.append((told.seq, told.payload))
            self._base_bytes += size
            return
        self._recent.append((told.seq, told.payload))
        self._recent_bytes += size
        while len(self._recent) > self._max_batches or self._recent_bytes > _MAX_BYTES:
            self._recent_bytes -= len(self._recent.popleft()[1])

    def _clear(self) -> None:
        self._base, self._base_bytes = [], 0
        self._recent.clear()
        self._recent_bytes = 0
        self._join_at, self._basing = None, False
