"""The levels of the hierarchy, and how each is spelled on the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvevents.events import StorageMedium

__all__ = ["DEVICE", "DISK", "EXTERNAL", "HOST", "MEDIUM", "NUM_TIERS", "STORAGE_TIERS", "Tier"]


class Tier(IntEnum):
    """A level of the hierarchy, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST
DISK: Final = Tier.DISK
EXTERNAL: Final = Tier.EXTERNAL
"""For what runs with every request: Python 3.11 takes 0.2 µs to find a member in its enumeration."""

MEDIUM: Final = {
    Tier.DEVICE: StorageMedium.GPU,
    Tier.HOST: StorageMedium.CPU,
    Tier.DISK: StorageMedium.DISK,
    Tier.EXTERNAL: StorageMedium.EXTERNAL,
}
STORAGE_TIERS: Final = (Tier.DISK, Tier.EXTERNAL)
"""Those whose pages are named by keys, not by indices into a pool."""
NUM_TIERS: Final = len(Tier)
