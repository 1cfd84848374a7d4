"""A Mooncake master for the demo, on loopback."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from publisher.demo.tied import free_ports, tied

__all__ = ["MasterError", "master"]

_START_S = 30.0


class MasterError(Exception):
    """It cannot be started; the message says why."""


@contextmanager
def master() -> Iterator[str]:
    """Its address; it ends with the block, or with this process. Raises MasterError."""
    if importlib.util.find_spec("mooncake") is None:
        raise MasterError("--storage: mooncake is not installed: pip install 'kvevents[mooncake]'")
    rpc, metrics = free_ports(2)
    command = [
        *(sys.executable, "-m", "mooncake.cli"),
        *("--rpc_address=127.0.0.1", f"--rpc_port={rpc}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}"),
        *("--default_kv_lease_ttl=1000", "--logtostderr=true", "--minloglevel=2"),
    ]
    process = subprocess.Popen(
        tied(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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
