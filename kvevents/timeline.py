"""What happened when, in a bounded number of stretches of time, however long it goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["KINDS", "MARKS", "Stretch", "Timeline"]

KINDS = ("stored", "removed", "cleared")
MARKS = ("gap", "lost", "restarted", "cleared", "undecodable")
"""What a picture marks, besides what was told."""

_FIRST_WIDTH_NS = 1_000_000


@dataclass(slots=True)
class Stretch:
    """A stretch of time, of `Timeline.width_ns` from `start_ns` on, in which something happened."""

    start_ns: int
    events: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    """How many, by kind; of what was published then."""
    blocks: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    """How many blocks they told of; for cleared, those that were there."""
    resident: tuple[int, ...] = ()
    """Blocks by tier, at its end."""
    marks: Counter[str] = field(default_factory=Counter)
    """How many of each."""

    def absorb(self, later: Stretch) -> None:
        """Become one with what came after it."""
        self.events = [a + b for a, b in zip(self.events, later.events, strict=True)]
        self.blocks = [a + b for a, b in zip(self.blocks, later.blocks, strict=True)]
        self.marks.update(later.marks)
        self.resident = later.resident


class Timeline:
    """Stretches of one width, at most `most` of them. Once there would be more, the width is doubled.

    Where nothing happened there is no stretch.
    """

    def __init__(self, most: int = 2000) -> None:
        if most < 2:
            raise ValueError(f"most: {most} is below 2")
        self._most = most
        self.width_ns = _FIRST_WIDTH_NS
        self.start_ns: int | None = None
        """When the first thing happened."""
        self.end_ns = 0
        """When the last did."""
        self.stretches: list[Stretch] = []

    def at(self, at_ns: int) -> Stretch:
        """The stretch of this time; to be changed by whoever asks. Time that goes back stands still."""
        if self.start_ns is None:
            self.start_ns = self.end_ns = at_ns
        self.end_ns = at_ns = max(at_ns, self.end_ns)
        while (place := (at_ns - self.start_ns) // self.width_ns) >= self._most:
            self._widen()
        start = self.start_ns + place * self.width_ns
        if not self.stretches or self.stretches[-1].start_ns != start:
            before = self.stretches[-1].resident if self.stretches else ()
            self.stretches.append(Stretch(start, resident=before))
        return self.stretches[-1]

    def _widen(self) -> None:
        assert self.start_ns is not None
        self.width_ns *= 2
        merged: list[Stretch] = []
        for stretch in self.stretches:
            start = stretch.start_ns - (stretch.start_ns - self.start_ns) % self.width_ns
            if merged and merged[-1].start_ns == start:
                merged[-1].absorb(stretch)
            else:
                stretch.start_ns = start
                merged.append(stretch)
        self.stretches = merged
