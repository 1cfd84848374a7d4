"""Kinds of things that are to be said once each."""

from __future__ import annotations

__all__ = ["Once"]

_MOST = 64


class Once:
    """Remembers kinds; a peer cannot make it remember more than 64."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def is_new(self, kind: str) -> bool:
        """Whether it is the first of its kind, and there are not too many; it counts as said."""
        if kind in self._kinds or len(self._kinds) >= _MOST:
            return False
        self._kinds.add(kind)
        return True
