"""Findings of one kind that come again and again: the first of them, and how many there were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Repeated", "Repeats"]

F = TypeVar("F")


@dataclass(slots=True)
class Repeated(Generic[F]):
    """One kind. `count`: all of them."""

    first: F
    last: F
    count: int = 1


class Repeats(Generic[F]):
    """Kinds, by what makes them one, in the order in which they first came."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], Repeated[F]] = {}

    def take(self, key: tuple[str, str], finding: F) -> bool:
        """Whether it is the first of its kind."""
        kind = self._kinds.get(key)
        if kind is None:
            self._kinds[key] = Repeated(finding, finding)
            return True
        kind.count += 1
        kind.last = finding
        return False

    def __iter__(self) -> Iterator[Repeated[F]]:
        return iter(self._kinds.values())
