"""What a consumer loses, and why, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Finding", "Lost"]

Lost: TypeAlias = Literal["batch", "event", "block", "misread", "stream", "unread"]
"""`batch`, `event`, `block`: it is not indexed. `misread`: it is, as something that it is not. `stream`:
what comes later, or came before, is lost or stale as well. `unread`: it was not looked into.
"""

_VERBS = {
    "event": "drops the event",
    "block": "does not index the blocks",
    "misread": "misreads",
    "stream": "cannot follow the stream",
    "unread": "is not judged",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One consumer, one thing lost.

    `seq`: of the message; None where it has none. `rule`: the same for findings of one kind. `where`: the
    frame or the field's path. `why`: what is there, and what this consumer makes of it. `dropping`: what
    a batch that is lost costs this consumer.
    """

    seq: int | None
    consumer: str
    lost: Lost
    rule: str
    where: str
    why: str
    dropping: str = "drops the batch"

    @property
    def verb(self) -> str:
        """What the consumer does, without its name."""
        return self.dropping if self.lost == "batch" else _VERBS[self.lost]

    def __str__(self) -> str:
        seq = "-" if self.seq is None else str(self.seq)
        return f"seq {seq:<8} {self.consumer:<14} {self.verb}: {self.where} {self.why}"
