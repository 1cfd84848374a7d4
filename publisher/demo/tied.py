"""Processes on loopback that end when this one does, however it ends.

As a program: it becomes the command it is given, to end when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from random import SystemRandom

__all__ = ["free_ports", "tied"]

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """The command, as one that ends with who starts it."""
    return [sys.executable, "-P", "-m", "publisher.demo.tied", *command]


def free_ports(count: int) -> list[int]:
    """From below those that the kernel gives to connections: they stay free while a process restarts."""
    found: list[int] = []
    for port in SystemRandom().sample(range(10_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


def main() -> None:
    """Become the command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
