"""What a configuration comes to for one rank, before any socket is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import SidecarConfig, SinkConfig, WorkerInfo
from publisher.config.topic import render_topic, topic_fields

__all__ = ["resolved"]


def resolved(config: SidecarConfig, worker: WorkerInfo, facts: Mapping[str, str]) -> dict[str, Any]:
    """The sockets of `worker`, for people. A topic is there if all that it names is known by now."""
    return {
        "dp_rank": worker.dp_rank,
        "sinks": [_sink(sink, worker, facts) for sink in config.sinks],
        "http_endpoint": config.http_endpoint_of(worker.dp_rank),
    }


def _sink(sink: SinkConfig, worker: WorkerInfo, facts: Mapping[str, str]) -> dict[str, Any]:
    endpoints = sink.endpoints_of(worker.dp_rank)
    made = {
        "name": sink.name,
        "endpoints": endpoints,
        "replay_endpoint": sink.replay_endpoint_of(worker.dp_rank),
    }
    port = Endpoint.parse("endpoint", endpoints[0]).port
    known = {**facts, **worker.facts(), "port": str(port or "")}
    if all(known.get(field) for field in topic_fields(sink.topic)):
        made["topic"] = render_topic("topic", sink.topic, known).decode()
    return made
