"""How often which values came, in little room."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Histogram"]

_BITS = 4
"""2^4 buckets for each power of two: a value is known to 1/16 of itself."""
_EXACT = 2 << _BITS


class Histogram:
    """Of ints that are not negative: those below 32 exactly, others by a bucket at most 1/16 wide.

    What is said of a bucket is said of its highest value.
    """

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0

    def add(self, value: int, times: int = 1) -> None:
        """`value` came. Raises ValueError below 0."""
        if value < 0:
            raise ValueError(f"value: {value} is below 0")
        bucket = value
        if value >= _EXACT:
            shift = value.bit_length() - _BITS - 1
            bucket = (shift << _BITS) + (value >> shift)
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self.count += times

    def merge(self, other: Histogram) -> None:
        """What came to `other` came here too."""
        for bucket, times in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + times
        self.count += other.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Values that came and how often, ascending."""
        for bucket in sorted(self._counts):
            yield _highest(bucket), self._counts[bucket]

    def at_most(self, value: int) -> int:
        """How many are certainly not above `value`."""
        return sum(times for highest, times in self if highest <= value)

    def quantile(self, share: float) -> int | None:
        """A value that `share` of them do not exceed; None without any."""
        seen = 0
        for highest, times in self:
            seen += times
            if seen >= share * self.count:
                return highest
        return None


def _highest(bucket: int) -> int:
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _BITS) - 1
    return ((bucket - (shift << _BITS) + 1) << shift) - 1
