"""How many in the last seconds, and how late: in memory that does not grow."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Lags", "Rates"]

_MOST_LAGS = 512


class Rates:
    """Counts of several kinds in one ring of seconds. `window_s`: how far back; None: all the time."""

    def __init__(self, kinds: int, window_s: int | None = 10) -> None:
        self._window_s = window_s
        self._total = [0] * kinds
        self._seconds: deque[tuple[int, list[int]]] = deque()
        self._since: float | None = None
        self._last = 0.0

    def look(self, at: float) -> None:
        """It was looked at then too, whether or not there was something."""
        if self._since is None:
            self._since = self._last = at
        self._last = max(self._last, at)

    def add(self, at: float, counts: tuple[int, ...]) -> None:
        """So many more of each kind, at this time in seconds."""
        self.look(at)
        for kind, count in enumerate(counts):
            self._total[kind] += count
        if self._window_s is None:
            return
        second = int(at)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, [0] * len(self._total)))
        for kind, count in enumerate(counts):
            self._seconds[-1][1][kind] += count

    def per_second(self, now: float | None) -> list[float]:
        """Of each kind, until `now`; None: until it was looked at last."""
        if self._since is None:
            return [0.0] * len(self._total)
        now = self._last if now is None else now
        elapsed = now - self._since
        if self._window_s is not None:
            while self._seconds and self._seconds[0][0] < int(now) - self._window_s:
                for kind, count in enumerate(self._seconds.popleft()[1]):
                    self._total[kind] -= count
            elapsed = min(elapsed, self._window_s + now % 1)
        return [total / max(1.0, elapsed) for total in self._total]


class Lags:
    """How long after its time stamp a batch has come, in seconds, of the last ones."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=_MOST_LAGS)

    def add(self, lag_s: float) -> None:
        """One more; what is no number is left out."""
        if math.isfinite(lag_s):
            self._lags.append(lag_s)

    def quantiles(self, *shares: float) -> list[float | None]:
        """Nearest rank; None where there are none."""
        lags = sorted(self._lags)
        if not lags:
            return [None for _ in shares]
        return [lags[min(len(lags) - 1, int(share * len(lags)))] for share in shares]
