"""A child process that speaks JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.kit.common.home import bench_home

__all__ = ["ChildFailed", "JsonChild", "PeerProcess", "kit_module"]

LOG_END = 4000
_ROOT = Path(__file__).parents[3]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(_ROOT), "BENCH_HOME": str(bench_home())}


class ChildFailed(RuntimeError):
    """A child ended, was late, or answered with an error."""


def kit_module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module of this kit in this interpreter."""
    return [sys.executable, "-BP", "-m", f"benchmarks.kit.{name}", *map(str, arguments)]


class JsonChild:
    """Context manager: the process is stopped, and its log removed, at the end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = " ".join(command)
        self._log = tempfile.TemporaryFile(prefix="bench-log-")  # noqa: SIM115  closed in stop
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_ENVIRONMENT,
        )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(self._failure("ended")) from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises ChildFailed."""
        message = self.receive_if(timeout_s)
        if message is None:
            raise ChildFailed(self._failure(f"gave no answer for {timeout_s:.0f} s"))
        return message

    def receive_if(self, timeout_s: float) -> dict[str, Any] | None:
        """The next line, or None when none came in time. Raises ChildFailed at the end of them."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is None:
            raise ChildFailed(self._failure("ended"))
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def stop(self) -> None:
        """Close its stdin; kill it if it is still there ten seconds later."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._log.close()

    def _failure(self, what: str) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - LOG_END))
        return f"{self._name} {what}\n{self._log.read().decode(errors='replace')}"


class PeerProcess(JsonChild):
    """A peer's adapter; see benchmarks.kit.peers.host for what it is asked."""

    def __init__(self, name: str, command: Sequence[str], *, start_s: float = 180.0) -> None:
        super().__init__(command)
        self.name = name
        self.version = ""
        """Once it is ready."""
        self._start_s = start_s

    def wait_ready(self) -> Self:
        """Wait for its first line. Raises ChildFailed."""
        ready = self.receive(self._start_s).get("ready")
        if ready is None:
            raise ChildFailed(self._failure("did not say that it is ready"))
        self.version = ready["version"]
        return self

    def ask(self, do: str, *, timeout_s: float = 580.0, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises ChildFailed."""
        self.send({"do": do, **arguments})
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = 580.0) -> dict[str, Any]:
        answer = self.receive(timeout_s)
        if "ok" not in answer:
            raise ChildFailed(self._failure(f"refused: {answer.get('error')}"))
        found: dict[str, Any] = answer["ok"]
        return found
