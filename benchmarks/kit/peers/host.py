"""Serve one peer over JSON lines: a request a line on stdin, an answer a line on stdout.

The first line, unasked, is {"ready": {"peer": ..., "version": ...}}. A request is
{"do": NAME, ...arguments}; the answer is {"ok": {...}} or {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.kit.workloads.cache import CacheWorkload
from benchmarks.kit.workloads.publisher import PublisherWorkload

from .interface import CachePeer, PublisherPeer

__all__ = ["serve"]


def serve(peer: PublisherPeer | CachePeer, *, name: str, version: str) -> None:
    """Answer requests until stdin closes, then leave without waiting for the peer's threads."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peer prints is no answer
    workload = PublisherWorkload(peer) if isinstance(peer, PublisherPeer) else CacheWorkload(peer)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({"ready": {"peer": name, "version": version}})
    for line in sys.stdin:
        say(_answer(workload, json.loads(line)))
    os._exit(0)


def _answer(workload: PublisherWorkload | CacheWorkload, request: dict[str, Any]) -> dict[str, Any]:
    name = request.pop("do")
    run: Callable[..., dict[str, Any]] | None = workload.requests.get(name)
    if run is None:
        return {"error": f"no such request: {name}"}
    try:
        return {"ok": run(**request)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
