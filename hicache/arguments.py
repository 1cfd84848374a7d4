"""What the cache's parts are told at the start is looked at here: its type, and the lower bound."""

from __future__ import annotations

__all__ = ["check_int", "check_kind", "check_seconds"]


def check_int(name: str, value: object, low: int) -> None:
    """Raises TypeError for what is no int, ValueError for one below `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not an int")
    if value < low:
        raise ValueError(f"{name}: {value} is below {low}")


def check_seconds(name: str, value: object) -> None:
    """Raises TypeError for what is no number, ValueError for one below 0 or that is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r} is not a number")
    if not value >= 0:
        raise ValueError(f"{name}: {value} is below 0")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: a {type(value).__name__} is not a {kind.__name__}")
