"""Starts a sidecar as a child of the serving process."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import msgspec

from kvevents.records import RecordSource
from publisher.client import DEFAULT_RING_BYTES, LinkError, SidecarClient
from publisher.config import SidecarConfig, WorkerInfo

__all__ = ["Sidecar", "spawn"]

_TERM_S = 1.0


class Sidecar:
    """A spawned sidecar. `client` is the worker's end of its link."""

    def __init__(self, client: SidecarClient, process: subprocess.Popen[bytes]) -> None:
        self.client = client
        self._process = process

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def pump(self, source: RecordSource) -> bool:
        """See `SidecarClient.pump`."""
        return self.client.pump(source)

    def close(self, timeout_s: float = 5.0) -> int:
        """Leave and wait for the child to end, at most `timeout_s`; then end it. Its exit code.

        In a process forked since, it only lets go of its copies of the descriptors.

        Safe to call twice.
        """
        self.client.close()
        if not self.client.owned:  # a forked child's copy; the sidecar is its parent's
            return 0
        for wait_s, insist in ((timeout_s, self._process.terminate), (_TERM_S, self._process.kill)):
            try:
                self._process.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                insist()
        return self._process.wait()

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def spawn(
    worker: WorkerInfo,
    config: SidecarConfig | None = None,
    *,
    ring_bytes: int = DEFAULT_RING_BYTES,
    ready_s: float = 10.0,
) -> Sidecar:
    """Start a sidecar and wait until its sockets are bound, at most `ready_s`.

    The child ends when this process does, however it ends. Raises LinkError, with the child's reason
    and no process left, when it does not get ready; ValueError for a ring too small.
    """
    deadline = time.monotonic() + ready_s
    folder = Path(tempfile.mkdtemp(prefix="kvevents-"))  # mode 0700
    process: subprocess.Popen[bytes] | None = None
    client: SidecarClient | None = None
    try:
        client = SidecarClient(folder / "link", worker, ring_bytes=ring_bytes)
        process = _start(folder / "link", config or SidecarConfig())
        _await_connection(client, process, deadline)
        pid = client.accept(deadline)
        if pid != process.pid:
            raise LinkError(f"process {pid} connected, not the sidecar {process.pid}")
        return Sidecar(client, process)
    except BaseException:
        if client is not None:
            client.close()
        if process is not None:
            process.kill()
            process.wait()
        raise
    finally:  # connected or not, nobody comes by this path any more
        shutil.rmtree(folder, ignore_errors=True)


def _start(link: Path, config: SidecarConfig) -> subprocess.Popen[bytes]:
    """A child in a session of its own: a Ctrl-C at the terminal ends it through its worker."""
    module = ["-P", "-m", "publisher.cli"]  # -P: not a folder of that name in the working directory
    command = [sys.executable, *module, "serve", "--link", str(link), "--config", "-"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its end will be noticed
        pipe.write(msgspec.json.encode(config))
    return process


def _await_connection(
    client: SidecarClient, process: subprocess.Popen[bytes], deadline: float
) -> None:
    """Until the child connects or the time is up. Raises LinkError when it ends before."""
    ended = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        for fd in (client.fileno(), ended):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(ended)
    if process.poll() is not None:
        raise LinkError(f"the sidecar ended with {process.returncode} before it was ready")
