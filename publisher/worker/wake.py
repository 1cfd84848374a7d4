"""How the sidecar is woken, without letting go of the interpreter.

`os.eventfd_write` lets go of it for a call of a microsecond. Beside threads that copy pages in Python the
scheduler's then waits until one of those is interrupted, 5 ms at a time (`sys.getswitchinterval`): with
the demo's file store that was most of what a pump took.
"""

from __future__ import annotations

import ctypes

__all__ = ["wake"]

_write = ctypes.PyDLL(None).eventfd_write
_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


def wake(eventfd: int) -> None:
    """Add one to `eventfd`, which does not block. One that is full, or closed, stays as it is."""
    _write(eventfd, 1)
