"""A batch in its turn, read once for all who look at it."""

from __future__ import annotations

from dataclasses import dataclass

from kvevents.codec import Skipped, decode_batch
from kvevents.errors import KVEventsError
from kvevents.events import Event, KVEventBatch
from kvevents.follower import Told

__all__ = ["Reading", "read"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was told. `batch`: None where nothing of it can be read, for the `reason`."""

    told: Told
    batch: KVEventBatch | None
    skipped: tuple[Skipped, ...] = ()
    reason: str = ""

    @property
    def seq(self) -> int:
        """The batch's number."""
        return self.told.seq

    @property
    def events(self) -> list[Event]:
        """Those that could be read."""
        return [] if self.batch is None else self.batch.events

    @property
    def rank(self) -> int:
        """The data-parallel rank it is of; 0 where it does not say."""
        return 0 if self.batch is None else self.batch.dp_rank or 0


def read(told: Told) -> Reading:
    """Never raises: what cannot be read has a reason."""
    try:
        decoded = decode_batch(told.payload)
    except KVEventsError as error:
        return Reading(told, None, reason=str(error))
    return Reading(told, decoded.batch, decoded.skipped)
