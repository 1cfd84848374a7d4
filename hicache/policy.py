"""When pages move between tiers, by the names and with the defaults that SGLang's users know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache.arguments import check_int, check_seconds
from hicache.eviction import eviction_policy

__all__ = ["HiCacheConfig", "PrefetchPolicy", "WritePolicy"]

_OPTIONAL = ("prefetch_max_pages", "storage_queue_pages")


class WritePolicy(StrEnum):
    """When a page is copied to the host, and from there to storage."""

    WRITE_THROUGH = "write_through"
    """As soon as it is inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it was inserted `write_through_threshold` times."""
    WRITE_BACK = "write_back"
    """When it is evicted from the device, which waits for the copy; what stays there goes nowhere."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for its pages from storage."""

    BEST_EFFORT = "best_effort"
    """Not at all: it takes what is there when it could run."""
    WAIT_COMPLETE = "wait_complete"
    """Until all are there."""
    TIMEOUT = "timeout"
    """Until a deadline that grows with the number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheConfig:
    """Settings of the tiers below the device. Raises ValueError or TypeError naming the field."""

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    write_through_threshold: int = 2
    eviction_policy: str = "lru"
    """Of device and host: lru, lfu, fifo, mru, filo, priority or slru."""
    load_back_threshold: int = 10
    """Tokens; fewer are computed anew rather than copied."""
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold: int = 256
    """Tokens; for fewer storage is not asked."""
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    prefetch_max_pages: int | None = None
    """Host pages that all prefetches together may be filling; None: half of the host pool."""
    transfer_timeout_s: float = 30.0
    """After this a copy counts as failed. Its pages stay out of use until it ends."""
    storage_queue_pages: int | None = None
    """Pages on their way to storage at most, but for one path; their host pages cannot be evicted
    meanwhile. None: a quarter of the host pool.
    """

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "write_policy", _one_of(WritePolicy, "write_policy", self.write_policy)
        )
        object.__setattr__(
            self,
            "prefetch_policy",
            _one_of(PrefetchPolicy, "prefetch_policy", self.prefetch_policy),
        )
        for field, low in (
            ("write_through_threshold", 1),
            ("load_back_threshold", 0),
            ("prefetch_threshold", 0),
            ("prefetch_max_pages", 1),
            ("storage_queue_pages", 1),
        ):
            value = getattr(self, field)
            if value is None and field in _OPTIONAL:
                continue
            check_int(field, value, low)
        for field in (
            *("prefetch_timeout_base_s", "prefetch_timeout_per_ki_token_s"),
            "transfer_timeout_s",
        ):
            check_seconds(field, getattr(self, field))
        if self.transfer_timeout_s == 0:
            raise ValueError(f"transfer_timeout_s: {self.transfer_timeout_s} is not above 0")
        eviction_policy(self.eviction_policy)


def _one_of(kind: type[StrEnum], field: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind)
        raise ValueError(f"{field}: {value!r} is none of {names}") from None
