"""Real engines as processes: their publishers and codecs; tests skip until `make interop` has run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from interop_process import HOME, needs
from interop_rpc import JsonChild

__all__ = ["RELEASES", "Engine", "EngineCodec", "engine_of"]

RELEASES = ("sglang-0.5.23", "vllm-0.33.0", "sglang-0.5.18", "vllm-0.23.0")
"""The latter two write events as arrays, and replays without the topic."""


def _start(release: str, publisher: dict[str, Any] | None) -> JsonChild:
    """A process that has loaded one engine's event code; skips the test where it is not installed."""
    python = needs(HOME / "venv/installed").parent / "bin/python"
    folder = needs(HOME / "engines" / release)
    engine = release.partition("-")[0]
    config = {"engine": engine, "folder": str(folder), "publisher": publisher}
    return JsonChild(python, "engine_child", config)


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
        self._child = _start(release, self._options)

    def publish(self, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Returns when all of them are handed to the socket."""
        self._child.ask("publish", batches=batches)

    def crash(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def restart(self) -> None:
        """A new process at the same endpoints."""
        self.crash()
        self._child = _start(self.release, self._options)


@contextlib.contextmanager
def engine_of(release: str, buffer_steps: int = 10_000) -> Iterator[Engine]:
    """An engine; skips the test when it is not installed."""
    folder = Path(tempfile.mkdtemp(prefix="kvi-"))
    engine = None
    try:
        engine = Engine(release, folder, buffer_steps)
        yield engine
    finally:
        if engine is not None:
            engine.crash()
        shutil.rmtree(folder)


class EngineCodec:
    """An engine's event structs and its typed decoder; skips the test when it is not installed."""

    def __init__(self, release: str) -> None:
        self.release = release
        self._child = _start(release, None)

    def encode(self, ts: float, events: Sequence[dict[str, Any]], dp_rank: int | None = 0) -> bytes:
        """What the engine puts on the wire."""
        payload: bytes = self._child.ask("encode", ts=ts, events=events, dp_rank=dp_rank)
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """{ts, events, dp_rank} with every field of the engine's structs. Raises RemoteError."""
        batch: dict[str, Any] = self._child.ask("decode", payload=payload)
        return batch

    def __enter__(self) -> EngineCodec:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop()
