"""The example engine: in this process, a step at a time, or as a process of its own behind HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from ports_rig import free_ports
from publisher_rig import children_of

from examples.completions import Request
from examples.decoder import Decoder, DecoderConfig
from examples.engine import Engine
from examples.options import read_options
from hicache import PageIndices, PagePool
from publisher import WorkerInfo, listen

__all__ = [
    "PAGE",
    "PATIENCE_S",
    "EngineProcess",
    "Reply",
    "Stepped",
    "eventually",
    "greedy",
    "is_gone",
]

ROOT = Path(__file__).parents[2]
PAGE = 4
PATIENCE_S = 30.0

torch.set_num_threads(1)  # as the engine does; for so little, threads are slower


def greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says without a cache, a batch or chunks: everything anew for every token."""
    sizes = DecoderConfig(128, num_layers=2, num_kv_heads=1, dtype=torch.float64)
    num_pages = -(-(len(prompt) + max_tokens) // PAGE)
    decoder = Decoder(sizes, PagePool(num_pages, PAGE, sizes.shape))
    tokens = list(prompt)
    for _ in range(max_tokens):
        logits = decoder.prefill(tokens, _first_pages(num_pages))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def _first_pages(count: int) -> PageIndices:
    """The first pages of a pool, in order."""
    return array("q", range(count))


def eventually(what: Callable[[], object]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


# ----------------------------------------------------------------------------------- in this process


class Stepped:
    """An engine whose steps the test takes. Its sidecar is awaited, and never comes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        link = folder / "link"
        link.mkdir(mode=0o700, exist_ok=True)
        options = read_options(["--page-size", str(PAGE), "--link", str(link), *arguments])
        self._sidecar = listen(WorkerInfo(block_size=PAGE, model=options.model), link)
        self.engine = Engine(options, self._sidecar)
        self.cache = self.engine.cache

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """As HTTP does."""
        request = Request(list(prompt), max_tokens)
        assert self.engine.submit(request)
        return request

    def step(self) -> None:
        """As the scheduler does; then nothing is wrong with the cache."""
        self.engine._take()
        self.engine.step()
        assert self.cache.violations() == []

    def finish(self, *requests: Request) -> None:
        """Step until they are answered."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(self.is_answered(one) for one in requests):
            self.step()
            assert time.monotonic() < deadline

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """One request, to its end."""
        request = self.submit(prompt, max_tokens)
        self.finish(request)
        return request

    @staticmethod
    def is_answered(request: Request) -> bool:
        """Whether its last token has come."""
        return len(request.reply) == request.max_tokens

    @property
    def running(self) -> int:
        """Requests that have their pages."""
        return len(self.engine._running)

    def all_is_let_go(self) -> bool:
        """Whether every page is free or evictable: nobody has a lock, and none is lost."""
        assert self.cache.settle(PATIENCE_S)
        free = self.cache.device_pool.allocator.num_free
        whole = free + self.cache.num_resident == self.cache.device_pool.num_pages
        return whole and self.cache.num_protected == 0

    def close(self) -> None:
        """Safe to call twice."""
        self.engine.close()
        self._sidecar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -------------------------------------------------------------------------------- a process of its own


class Reply(NamedTuple):
    """What HTTP said."""

    status: int
    body: Any


class EngineProcess:
    """`python -m examples.engine`; its sink has ports that it keeps when its sidecar is killed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ports = free_ports(2)
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        sink = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        config = {"sinks": [{**sink, "heartbeat_s": 0.1}], "state_dir": str(folder / "state")}
        (folder / "kv-events.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "examples.engine", "--port", "0"]
        command += ["--page-size", str(PAGE), "--kv-events", str(folder / "kv-events.json")]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first.startswith("serves http://"), (first, self.process.communicate()[1])
        self.port = int(first.split(";")[0].rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        """A connection of one's own."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def get(self, path: str) -> Reply:
        """JSON as what it says, else text."""
        return self._call("GET", path, None)

    def post(self, body: object, path: str = "/v1/completions") -> Reply:
        """`body`: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._call("POST", path, data)

    def _call(self, method: str, path: str, data: bytes | None) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, data)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers["content-type"] == "application/json"
            return Reply(response.status, json.loads(text) if is_json else text)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, up to [DONE]."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
            response = connection.getresponse()
            assert response.headers["content-type"] == "text/event-stream"
            *events, done, end = response.read().decode().split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            for event in events:
                yield json.loads(event.removeprefix("data: "))

    def metric(self, name: str) -> float:
        """One value of /metrics."""
        lines = dict(line.rsplit(" ", 1) for line in self.get("/metrics").body.splitlines())
        return float(lines[f"engine_{name}"])

    def sidecar(self) -> int:
        """The process id of its child."""
        (pid,) = children_of(self.process.pid)
        return pid

    def end(self, signum: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what it left on stderr."""
        self.process.send_signal(signum)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        """Safe to call twice."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):  # somebody else reaps it at any time
        return True
