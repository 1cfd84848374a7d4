"""TCP ports on loopback that a test may give out before anything is bound to them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from itertools import cycle, islice
from random import Random

__all__ = ["free_endpoints", "free_port", "free_ports"]

_LOOPBACK = "127.0.0.1"

# Below those that the kernel gives to connections and to who binds port 0, above those that Mooncake's
# clients take (15,000 to 17,000): what is free now stays free.
_PORTS = range(18_000, 32_000)
_SHARE = 1000

_state: dict[int, Iterator[int]] = {}
"""Of this process (a fork begins anew): the ports it may give out, those last given out last."""
_locks: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at, that no other process is given, and this one not soon again."""
    pid = os.getpid()
    if pid not in _state:
        _state[pid] = _own_ports()
    return list(islice(filter(_is_free, _state[pid]), count))


def free_port() -> int:
    """One of `free_ports`."""
    (port,) = free_ports(1)
    return port


def free_endpoints(count: int) -> list[str]:
    """The same as ZeroMQ writes them."""
    return [f"tcp://{_LOOPBACK}:{port}" for port in free_ports(count)]


def _own_ports() -> Iterator[int]:
    """A share that no process of the tests has; random ones of all once there is none."""
    dice = Random(os.urandom(8))
    for first in dice.sample(_PORTS[::_SHARE], len(_PORTS) // _SHARE):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0kvevents tests' ports from {first}")  # until this process ends
        except OSError:
            lock.close()
        else:
            _locks.append(lock)
            return cycle(dice.sample(range(first, first + _SHARE), _SHARE))
    return iter(lambda: dice.choice(_PORTS), None)


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((_LOOPBACK, port)):
        return True
    return False
