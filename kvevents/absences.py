"""Names that come and go: how long each was away, and how many others came meanwhile."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Absence", "Absences"]

N = TypeVar("N", bound=Hashable)

_RUN = 1024


class Absence(NamedTuple):
    """How long a name was away, and how many distinct others came between its going and its return."""

    time: int
    others: int


class Absences(Generic[N]):
    """Each arrival has a place in a line, and the line says which places are a name's latest: those
    behind where the line was when a name went are the distinct names that came since. The line is kept
    short by leaving out all other places, so it is at most twice as long as there are names.
    """

    def __init__(self) -> None:
        self._place: dict[N, int] = {}
        self._gone: dict[N, tuple[int, int]] = {}
        """By name: when it went, and how long the line was."""
        self._latest = bytearray()
        """By place: whether it is the latest of its name."""
        self._sums: list[int] = []
        """How many of each `_RUN` places are."""

    def came(self, name: N, at: int) -> Absence | None:
        """`name` is there now; None when it never was before."""
        absence = None
        if (gone := self._gone.pop(name, None)) is not None:
            since, place = gone
            absence = Absence(max(0, at - since), self._behind(place))
        self._move_to_end(name)
        return absence

    def went(self, name: N, at: int) -> None:
        """`name` is away from now on."""
        self._gone[name] = at, len(self._latest)

    def clear(self) -> None:
        """Forget all."""
        self._place.clear()
        self._gone.clear()
        self._latest.clear()
        self._sums.clear()

    # ---------------------------------------------------------------------------------- inside

    def _behind(self, place: int) -> int:
        run = place // _RUN
        end = (run + 1) * _RUN
        return self._latest.count(1, place, end) + sum(self._sums[run + 1 :])

    def _move_to_end(self, name: N) -> None:
        before = self._place.get(name)
        if before is not None:
            self._latest[before] = 0
            self._sums[before // _RUN] -= 1
        if len(self._latest) >= 2 * len(self._place) + _RUN:
            self._shorten()
        place = self._place[name] = len(self._latest)
        if place % _RUN == 0:
            self._sums.append(0)
        self._latest.append(1)
        self._sums[-1] += 1

    def _shorten(self) -> None:
        """Leave out the places that are nobody's latest."""
        latest, kept = self._latest, 0
        moved = [0] * (len(latest) + 1)
        """By place: how many latest ones are before it."""
        for place, is_latest in enumerate(latest):
            moved[place] = kept
            kept += is_latest
        moved[-1] = kept
        for name, place in self._place.items():
            self._place[name] = moved[place]
        for name, (since, place) in self._gone.items():
            self._gone[name] = since, moved[place]
        self._latest = bytearray(b"\1" * kept)
        self._sums = [min(_RUN, kept - start) for start in range(0, kept, _RUN)]
