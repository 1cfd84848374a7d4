"""A Mooncake master for the demo, on loopback. As a program: it becomes that master."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MasterError", "master"]

_START_S = 30.0
_PR_SET_PDEATHSIG = 1


class MasterError(Exception):
    """It cannot be started; the message says why."""


@contextmanager
def master() -> Iterator[str]:
    """Its address; it ends with the block, or with this process. Raises MasterError."""
    if importlib.util.find_spec("mooncake") is None:
        raise MasterError("--storage: mooncake is not installed: pip install 'kvevents[mooncake]'")
    rpc, metrics = _free_ports(2)
    command = [sys.executable, "-P", "-m", "publisher.demo.mooncake", str(rpc), str(metrics)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _await(process, rpc)
        yield f"127.0.0.1:{rpc}"
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    """Until it listens; the kernel tells nobody when, so this asks."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise MasterError("--storage: mooncake_master did not start (it needs libibverbs1)")


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def main() -> None:
    """Become the master, to end when the parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rpc, metrics = sys.argv[1:]
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "mooncake.cli"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={rpc}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}"),
            *("--default_kv_lease_ttl=1000", "--logtostderr=true", "--minloglevel=2"),
        ],
    )


if __name__ == "__main__":
    main()
