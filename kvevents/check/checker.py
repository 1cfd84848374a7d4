"""One stream, held to the invariants of docs/check.md."""

from __future__ import annotations

from kvevents.check.finding import Finding
from kvevents.follower import Malformed
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Message
from kvevents.reading import Reading

__all__ = ["Checker"]


class Checker:
    """One stream's. Each message goes to `message`, then what it brought to `read` and `other`, in
    order. Nothing that comes is trusted: any bytes give findings, and no exception.
    """

    def message(self, message: Message) -> list[Finding]:
        """A message as it came, before it has its turn: frames, replays, what goes back."""
        return []

    def read(self, reading: Reading) -> list[Finding]:
        """A batch in its turn."""
        return []

    def other(self, arrival: Gap | Lost | Restarted | Malformed) -> list[Finding]:
        """What else the stream has brought."""
        return []

    def close(self) -> list[Finding]:
        """There is no more."""
        return []
