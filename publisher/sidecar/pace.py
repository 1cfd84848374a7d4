"""How often something may happen that others can bring about again and again."""

from __future__ import annotations

import math

__all__ = ["Pace"]


class Pace:
    """Some at once, then one each `every_s`. `now`: monotonic."""

    def __init__(self, every_s: float, at_once: int) -> None:
        self._every_s, self._at_once = every_s, at_once
        self.next_at = -math.inf
        """From when on there may be one."""

    def allows(self, now: float) -> bool:
        """Whether there may be one now, which counts as done."""
        if now < self.next_at:
            return False
        self.next_at = max(self.next_at, now - self._every_s * self._at_once) + self._every_s
        return True
