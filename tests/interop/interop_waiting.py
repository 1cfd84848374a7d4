"""Bounded waits."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LOOPBACK", "PATIENCE_S", "wait_until"]

LOOPBACK = "127.0.0.1"
PATIENCE_S = 30.0
"""How long to wait for what must come; a test that needs it all has failed."""


def wait_until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, interval_s: float = 0.02
) -> bool:
    """Try until `condition()` is true; False once the time is up. It is tried at least once."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True
