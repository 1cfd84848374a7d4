"""TCP ports on loopback that a test may give out before anything is bound to them."""

from __future__ import annotations

import contextlib
import os
import socket
from random import Random

__all__ = ["free_endpoints", "free_port", "free_ports"]

_LOOPBACK = "127.0.0.1"

# Below those that the kernel gives to connections and to who binds port 0: what is free now stays free.
_PORTS = range(10_000, 32_000)

_state: dict[int, tuple[Random, set[int]]] = {}
"""Of this process (a fork begins anew): its dice, and what it has given out."""


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at, and that this process was never given before."""
    dice, given = _state.setdefault(os.getpid(), (Random(os.urandom(8)), set()))
    found: list[int] = []
    while len(found) < count:
        port = dice.choice(_PORTS)
        if port not in given and _is_free(port):
            given.add(port)
            found.append(port)
    return found


def free_port() -> int:
    """One of `free_ports`."""
    (port,) = free_ports(1)
    return port


def free_endpoints(count: int) -> list[str]:
    """The same as ZeroMQ writes them."""
    return [f"tcp://{_LOOPBACK}:{port}" for port in free_ports(count)]


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((_LOOPBACK, port)):
        return True
    return False
