"""The last batches of a stream that say something, while it is not known yet which they are."""

from __future__ import annotations

from collections import deque

from kvevents.check import Finding
from kvevents.reading import Reading
from publisher.tools.tail.notice import Notice

__all__ = ["Entry", "Kept"]

Entry = tuple[Reading, list[Finding]] | Notice
"""What is written: a batch with what was found in it, or what is said of the stream."""

_BETWEEN = 100
"""Entries between two batches that say something; of more, heartbeats go, then the first."""


class Kept:
    """`number` batches at most, and what is said between and behind them; before the first of them, what
    is said of the stream only where there are not so many.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._before: deque[Notice] = deque(maxlen=_BETWEEN)
        self._groups: deque[deque[Entry]] = deque()
        """A batch that says something, and what came behind it, each."""

    def add(self, entry: Entry) -> None:
        """The newest."""
        if not isinstance(entry, Notice) and _says(entry[0]):
            self._groups.append(deque([entry]))
            if len(self._groups) > self._number:
                self._groups.popleft()
                self._before.clear()
        elif not self._groups:
            if isinstance(entry, Notice):
                self._before.append(entry)
        else:
            group = self._groups[-1]
            if len(group) <= _BETWEEN:
                group.append(entry)
            elif isinstance(entry, Notice):  # it says more than a heartbeat
                del group[1]
                group.append(entry)

    def entries(self) -> list[Entry]:
        """Oldest first."""
        return [*self._before, *(one for group in self._groups for one in group)]


def _says(reading: Reading) -> bool:
    return bool(reading.events or reading.skipped or reading.batch is None)
