"""Dynamo's standalone KV indexer (`python -m dynamo.indexer`), asked over HTTP."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Self

from dynamo_answers import Blocks, Tiers, believed
from interop_process import Child, loopback_env, on_free_ports, venv_python
from interop_waiting import LOOPBACK, wait_until
from interop_worker import BLOCK

from kvevents.namespace import BASE, Namespace

__all__ = ["DynamoIndexer", "IndexerError"]

_MODEL, _GROUP = "org/model", "default"
_NOTICE = "Mounting listener-control test endpoints"
_READY_S = 30.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class IndexerError(RuntimeError):
    """It answered with another status than 2xx."""


class DynamoIndexer:
    """A running indexer, as a context manager. It knows workers by the number they register with."""

    def __init__(self, url: str, child: Child) -> None:
        self._url, self._child = url, child

    @classmethod
    def start(cls) -> DynamoIndexer:
        """On a free loopback port; returns once it answers. Skips the test where it is not installed."""
        python, env = venv_python("dynamo"), loopback_env()
        env |= {"DYN_LOG": "info", "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"}

        def on(ports: list[int]) -> DynamoIndexer:
            child = Child(python, "dynamo.indexer", ["--port", str(ports[0])], env=env)
            indexer = cls(f"http://{LOOPBACK}:{ports[0]}", child)
            wait_until(lambda: indexer._healthy() or not child.running(), _READY_S)
            if not (child.running() and indexer._healthy()):
                failure = child.failure("did not become healthy")
                indexer.stop()
                raise failure
            return indexer

        return on_free_ports(1, on)

    def _healthy(self) -> bool:
        try:
            self._http("GET", "/health")
        except (OSError, IndexerError):
            return False
        return True

    def stop(self) -> None:
        """Safe to call twice."""
        self._child.stop(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------ workers

    def register(self, worker: int, endpoint: str, replay_endpoint: str) -> None:
        """Returns once it listens, or has begun to connect."""
        body = {
            "instance_id": worker,
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "model_name": _MODEL,
            "routing_group": _GROUP,
            "block_size": BLOCK,
            "dp_rank": 0,
        }
        self._http("POST", "/register", body)
        assert wait_until(lambda: self.status(worker) == "active"), self.status(worker)

    def unregister(self, worker: int) -> None:
        """Forget a worker: its cursor and its blocks."""
        body = {"instance_id": worker, "model_name": _MODEL, "routing_group": _GROUP}
        self._http("POST", "/unregister", body)

    def status(self, worker: int) -> str:
        """Of the worker's listener."""
        for one in self._http("GET", "/workers"):
            if one["instance_id"] == worker:
                return str(one["listeners"].get("0", {}).get("status"))
        return "none"

    def pause(self, worker: int) -> None:
        """It misses what is published until `resume`."""
        self._http("POST", "/test/pause_listener", {"instance_id": worker, "dp_rank": 0})

    def resume(self, worker: int) -> None:
        """It subscribes again."""
        self._http("POST", "/test/resume_listener", {"instance_id": worker, "dp_rank": 0})

    # ------------------------------------------------------------------------- what it believes

    def blocks(self, worker: int) -> Blocks:
        """Each tier's blocks by /dump, which comes after all that was received."""
        items = self._http("GET", "/dump").get(f"{_MODEL}:{_GROUP}", {}).get("events", [])
        return believed([item for item in items if item["worker_id"] == worker])

    def score(self, prompt: Sequence[int], worker: int, namespace: Namespace = BASE) -> Tiers:
        """What it says of a prompt by /query, which counts tokens down to each tier."""
        body: dict[str, Any] = {
            "token_ids": list(prompt),
            "model_name": _MODEL,
            "routing_group": _GROUP,
        }
        for name in ("lora_name", "cache_salt"):
            if (value := getattr(namespace, name)) is not None:
                body[name] = value
        found = self._http("POST", "/query", body)["instances"].get(str(worker))
        if found is None:
            return Tiers()
        gpu, cpu, disk = (found[tier] // BLOCK for tier in ("gpu", "cpu", "disk"))
        return Tiers(gpu, cpu - gpu, disk - cpu)

    # ------------------------------------------------------------------------------------- its log

    def log_size(self) -> int:
        """Where its log ends now, in characters."""
        return len(self._child.log())

    def warnings(self, since: int) -> list[str]:
        """Warnings and errors after `since`, without the times."""
        lines = [one for one in self._child.log()[since:].splitlines() if _NOTICE not in one]
        return [re.sub(r"^\S+\s+", "", one) for one in lines if " WARN " in one or " ERROR " in one]

    def _http(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with _direct.open(request, timeout=10.0) as response:
                text = response.read().decode()
                kind = response.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            with error:
                raise IndexerError(f"HTTP {error.code}: {error.read().decode()}") from None
        return json.loads(text) if "json" in kind else text
