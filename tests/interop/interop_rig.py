"""Publishers of real engines, as processes; tests skip until tests/interop/install.sh has run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["RELEASES", "Engine", "engine_of"]

HOME = Path(os.environ.get("KVEVENTS_INTEROP_HOME") or Path.home() / ".cache" / "kvevents-interop")
RELEASES = ("sglang-0.5.23", "vllm-0.33.0", "sglang-0.5.18", "vllm-0.23.0")
"""The latter two write events as arrays, and replays without the topic."""


class Engine:
    """A real engine's publisher in a process of its own, at ipc endpoints that outlive it."""

    def __init__(self, release: str, folder: Path, buffer_steps: int) -> None:
        self.release = release
        self.endpoint, self.replay_endpoint = (f"ipc://{folder}/{one}" for one in ("pub", "replay"))
        self._options = {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": buffer_steps,
        }
        self._start()

    def _start(self) -> None:
        child = Path(__file__).with_name("engine_child.py")
        engine = self.release.partition("-")[0]
        folder = str(HOME / "engines" / self.release)
        self._process = subprocess.Popen(
            [HOME / "venv/bin/python", "-I", child, engine, folder, json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._await("ready")

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word, f"{self.release} is not {word}"

    def publish(self, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Returns when all of them are handed to the socket."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batches) + "\n")
        self._process.stdin.flush()
        self._await("sent")

    def crash(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        """A new process at the same endpoints."""
        self.crash()
        self._start()


@contextlib.contextmanager
def engine_of(release: str, buffer_steps: int = 10_000) -> Iterator[Engine]:
    """An engine; skips the test when it is not installed."""
    for needed in (HOME / "venv/installed", HOME / "engines" / release):
        if not needed.exists():
            pytest.skip(f"{needed} is missing: run tests/interop/install.sh")
    folder = Path(tempfile.mkdtemp(prefix="kvi-"))
    engine = None
    try:
        engine = Engine(release, folder, buffer_steps)
        yield engine
    finally:
        if engine is not None:
            engine.crash()
        shutil.rmtree(folder)
