"""The real vllm-router with `--policy kv_aware`, in front of HTTP workers that answer with their names.

No tokenizer and no model: a completion whose prompt is a list of token ids goes to the worker whose KV
events hold the most of it.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interop_process import Child, on_free_ports, venv_python
from interop_waiting import LOOPBACK, PATIENCE_S, wait_until
from router_worker import MODEL, HttpWorker, direct

__all__ = ["CREDIT", "Decision", "Documents", "Source", "VllmRouter", "router_for"]

CREDIT = {"GPU": 10, "CPU": 8, "DISK": 3}
"""Tenths of a token that the router counts for one that is cached there; its defaults."""

_DECISION = re.compile(r"KV prefix decision .*credited_prefix_tokens=(?P<credited>[\d.]+)")
_SUBSCRIBING = "kv_index subscriber for"
_ENVIRONMENT = {"RUST_LOG": "info,vllm_router_rs=debug"}


@dataclass(frozen=True)
class Source:
    """A publisher, as the router is told of it. It takes messages with an empty topic only."""

    endpoint: str
    replay_endpoint: str


@dataclass(frozen=True)
class Documents:
    """A sidecar's HTTP endpoint, for the router to find the publisher by itself."""

    http_endpoint: str


class Decision(NamedTuple):
    """Where a prompt went, and for how many of its tokens; the router rounds down."""

    worker: int
    credit: int


class VllmRouter:
    """A running router and its workers, numbered as their sources."""

    def __init__(self, child: Child, workers: Sequence[HttpWorker], port: int) -> None:
        self._child, self._workers = child, workers
        self._url = f"http://{LOOPBACK}:{port}"

    def is_ready(self, subscribers: int) -> bool:
        """Whether it answers, and follows so many publishers; the connections may be under way."""
        return self._child.log().count(_SUBSCRIBING) >= subscribers and self._is_healthy()

    def _is_healthy(self) -> bool:
        try:
            with direct.open(f"{self._url}/health", timeout=2.0):
                return True
        except OSError:
            return False

    def decide(self, tokens: Sequence[int], model: str = MODEL) -> Decision:
        """Send a prompt."""
        start = (self._child.folder / "log").stat().st_size
        body = json.dumps({"model": model, "prompt": list(tokens), "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", body)
        request.add_header("content-type", "application/json")
        with direct.open(request, timeout=PATIENCE_S) as response:
            name = json.load(response)["choices"][0]["text"]
        found: list[str] = []

        def logged() -> bool:
            found[:] = _DECISION.findall(self._child.log(start))
            return bool(found)

        if not wait_until(logged):
            raise self._child.failure("logged no decision")
        return Decision([one.name for one in self._workers].index(name), int(float(found[-1])))

    def until(
        self, tokens: Sequence[int], good: Callable[[Decision], object], model: str = MODEL
    ) -> Decision:
        """Send a prompt until the decision is good; the last one in any case."""
        last = self.decide(tokens, model)

        def settled() -> object:
            nonlocal last
            if not good(last):
                last = self.decide(tokens, model)
            return good(last)

        wait_until(settled, interval_s=0.05)
        return last

    def unreadable(self) -> list[str]:
        """What it said of batches that it could not read; it has lost each of them."""
        return [line for line in self._child.log().splitlines() if "kv_index decode" in line]

    def log(self) -> str:
        """All that it has said."""
        return self._child.log()


@contextlib.contextmanager
def router_for(
    sources: Sequence[Source | Documents | None], block_size: int
) -> Iterator[VllmRouter]:
    """A router in front of one worker for each source; None publishes nothing. Skips where there is none.

    Ready when it follows every publisher, also those that it has to find.
    """
    python = venv_python("vllm-router")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                HttpWorker(
                    f"worker {number}",
                    source.http_endpoint if isinstance(source, Documents) else None,
                )
            )
            for number, source in enumerate(sources)
        ]
        options = _options(workers, sources, block_size)
        subscribers = sum(source is not None for source in sources)

        def start(ports: list[int]) -> VllmRouter:
            listen = ["--port", str(ports[0]), "--prometheus-port", str(ports[1])]
            module = "vllm_router.launch_router"
            child = Child(python, module, [*listen, *options], env=_ENVIRONMENT)
            router = VllmRouter(child, workers, ports[0])
            if not wait_until(
                lambda: router.is_ready(subscribers) or not child.running(), interval_s=0.05
            ):
                failure = child.failure("did not become ready")
                child.stop()
                raise failure
            if not child.running():
                child.stop()
                raise child.failure("did not become ready")
            stack.callback(child.stop)
            return router

        yield on_free_ports(2, start)


def _options(
    workers: Sequence[HttpWorker], sources: Sequence[Source | Documents | None], block_size: int
) -> list[str]:
    options = ["--host", LOOPBACK, "--prometheus-host", LOOPBACK, "--policy", "kv_aware"]
    options += ["--log-level", "debug", "--worker-startup-check-interval", "1"]
    options += ["--kv-event-block-size", str(block_size), "--kv-event-model", MODEL]
    options += ["--worker-urls", *[worker.url for worker in workers]]
    for worker, source in zip(workers, sources, strict=True):
        if isinstance(source, Source):
            options += ["--kv-event-source", f"{worker.url}={source.endpoint}"]
            options += ["--kv-event-replay-source", f"{worker.url}={source.replay_endpoint}"]
    return options
