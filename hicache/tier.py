"""The levels of the hierarchy, and how each is spelled on the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvevents.events import StorageMedium

__all__ = ["MEDIUM", "NUM_TIERS", "Tier"]


class Tier(IntEnum):
    """A level of the hierarchy, the fastest first."""

    DEVICE = 0


MEDIUM: Final = {Tier.DEVICE: StorageMedium.GPU}
NUM_TIERS: Final = len(Tier)
