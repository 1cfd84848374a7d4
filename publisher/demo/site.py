"""The processes of a run behind a real router: engines with their sidecars, and the router.

Each ends with this process, however that ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from publisher.config.sidecar_config import ConfigError
from publisher.demo.tied import free_ports, tied

__all__ = ["ENGINE", "Engine", "Router", "SiteError", "find_router"]

ENGINE = Path(__file__).parents[2] / "examples" / "engine.py"
"""Of a checkout; an installed package has none."""

MODEL = "example"
_START_S, _END_S = 60.0, 15.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DECISION = re.compile(r"KV prefix decision .*credited_prefix_tokens=([\d.]+)")


class SiteError(Exception):
    """A process that is needed did not start, or ended. The message has the end of what it said."""


class _Process:
    """A command whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, folder: Path | None = None) -> None:
        self._command, self._log, self._folder = command, log, folder
        self.start()

    def start(self) -> None:
        """Once more, after `kill`."""
        with self._log.open("ab") as log:
            self._seen = log.tell()
            self._process = subprocess.Popen(
                tied(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=_environment(),
            )

    def log(self, start: int = 0) -> str:
        """What it has said from byte `start` on."""
        with self._log.open("rb") as log:
            log.seek(start)
            return _COLOURS.sub("", log.read().decode(errors="replace"))

    @property
    def log_size(self) -> int:
        """Bytes."""
        return self._log.stat().st_size

    def await_line(self, pattern: str, count: int = 1) -> None:
        """Until it has said so, since it was started. Raises SiteError."""
        deadline = time.monotonic() + _START_S
        while len(re.findall(pattern, self.log(self._seen))) < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self.failure("did not start")
            time.sleep(0.05)

    def failure(self, what: str) -> SiteError:
        """An error that shows the end of what it said."""
        shown = self.log(self._seen)[-1500:].rstrip()
        return SiteError(f"{self._log.stem} {what}; the end of what it said:\n{shown}")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    def close(self) -> None:
        """Safe to call twice."""
        self.ask_to_end()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(_Process):
    """An examples/engine.py with device, host and file tier. It keeps ports and folder over a restart."""

    def __init__(
        self, folder: Path, number: int, page_size: int, device_pages: int, host_pages: int
    ) -> None:
        http, *ports = free_ports(3)
        self.name, self.url = f"worker{number}", f"http://127.0.0.1:{http}"
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        folder.mkdir()
        sink = {
            "dialect": "vllm-router",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "heartbeat_s": 0.5,
        }
        config = {"sinks": [sink], "state_dir": str(folder / "state")}
        (folder / "kv-events.json").write_bytes(msgspec.json.encode(config))
        options = {
            "port": http,
            "model": MODEL,
            "worker-id": self.name,
            "page-size": page_size,
            "device-pages": device_pages,
            "host-pages": host_pages,
            "storage-dir": folder / "pages",
            "kv-events": folder / "kv-events.json",
        }
        command = [sys.executable, "-m", "examples.engine"]
        command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        super().__init__(command, folder / f"{self.name}.log", ENGINE.parents[1])

    def await_ready(self) -> None:
        """Raises SiteError."""
        self.await_line("serves http")


class Router(_Process):
    """A vllm-router in front of the engines. Raises SiteError."""

    def __init__(
        self, program: str, policy: str, engines: Sequence[Engine], page_size: int, folder: Path
    ) -> None:
        port, prometheus = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        command = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)]
        command += ["--log-level", "debug", "--worker-startup-check-interval", "1"]
        command += ["--health-check-interval-secs", "1", "--cb-timeout-duration-secs", "1"]
        command += ["--worker-urls", *(engine.url for engine in engines)]
        if policy == "kv_aware":
            command += ["--kv-event-block-size", str(page_size), "--kv-event-model", MODEL]
            command += ["--router-temperature", "1"]  # spread what costs the same to the token
            for engine in engines:
                command += ["--kv-event-source", f"{engine.url}={engine.endpoint}"]
                command += ["--kv-event-replay-source", f"{engine.url}={engine.replay_endpoint}"]
        super().__init__(command, folder / f"router-{policy}.log")

    def last_seq(self, engine: Engine) -> int:
        """Of the last batch of an engine that it says it has applied; -1 before."""
        said = re.findall(rf"sequence advanced source={engine.url} rank=0 seq=(\d+)", self.log())
        return int(said[-1]) if said else -1

    def decisions(self, start: int) -> list[float]:
        """For how many tokens it gave credit, in each decision logged from byte `start` on."""
        return [float(one) for one in _DECISION.findall(self.log(start))]


def find_router(program: str) -> str:
    """The program's path. Raises ConfigError where there is none."""
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            f"--router: {program} is no program here; pip install vllm-router has one"
        )
    return found


def _environment() -> dict[str, str]:
    """Ours without proxies: all is on loopback. The router is told to say what it decides."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "NO_COLOR": "1", "RUST_LOG": "info,vllm_router_rs=debug"}
