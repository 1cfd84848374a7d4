"""What the check of a stream finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvevents.events import StorageMedium
from kvevents.hashing import BlockHash

__all__ = ["Finding", "Place", "Severity"]

Severity = Literal["violation", "note"]
"""A note is what a sound publisher of another make may do as well."""


class Place(NamedTuple):
    """Where in a stream something was said. `event`: its position in the batch, or None for the batch."""

    seq: int
    event: int | None = None

    def __str__(self) -> str:
        return f"seq {self.seq}" if self.event is None else f"seq {self.seq} event {self.event}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction. `invariant`: its number in docs/check.md. `rule`: a word for this kind.

    `what`: a sentence without the place. `earlier`: the event that it contradicts, if there is one.
    `blocks`: how many are concerned; `block_hash`: the first of them.
    """

    invariant: int
    rule: str
    severity: Severity
    place: Place
    what: str
    earlier: Place | None = None
    medium: StorageMedium | None = None
    block_hash: BlockHash | None = None
    blocks: int = 0
