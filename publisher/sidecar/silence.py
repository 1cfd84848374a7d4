"""Notices that events are on and none come."""

from __future__ import annotations

from math import inf

__all__ = ["SilenceWatch"]


class SilenceWatch:
    """Says once that a worker, or `who` it is, has told nothing for `after_s` since `began`. `began`,
    `now`: monotonic.

    A worker that has ever told an event may be idle as long as it likes.
    """

    def __init__(self, after_s: float, began: float, who: str = "worker") -> None:
        self._after_s, self._who = after_s, who
        self.wake_at = began + after_s
        """When to call `check` though nothing has come; inf once there is nothing more to say."""

    def check(self, now: float, *, messages: int, events: int) -> str | None:
        """What is wrong, when it is time to say so. Counts of all that has come from the worker."""
        if self.wake_at == inf:
            return None
        if events:
            self.wake_at = inf
            return None
        if now < self.wake_at:
            return None
        self.wake_at = inf
        if messages:
            return (
                f"{messages} messages in {self._after_s:g} s, but not one event: is prefix caching on, "
                "and does every request's prompt fill at least one block?"
            )
        return (
            f"no events: nothing has come from the {self._who} in "
            f"{self._after_s:g} s: is prefix caching on, is it getting requests, "
            "and is it told to publish?"
        )
