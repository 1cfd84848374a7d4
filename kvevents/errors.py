"""What a peer did wrong, as an exception the edge can catch."""

from __future__ import annotations

__all__ = ["KVEventsError"]


class KVEventsError(Exception):
    """A frame, payload, event or record from a peer that breaks the contract.

    The message names the frame or the field path, the value and the bound. Whoever reads from the
    peer catches this once, counts it, and drops what carried it.
    """
