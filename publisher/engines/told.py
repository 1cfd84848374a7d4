"""What an engine's `--kv-events-config` and the file of KVEVENTS_CONFIG make of a sidecar.

The engine's keys are the first sink, as `kvevents serve --kv-events-config` takes them; ours stand beside
them, those of the sidecar and of the worker too. Where the engine knows no other keys than its own, all
that is ours is in the file. What the option says goes before the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvevents.hashing import HashFormat
from publisher.config.checks import ConfigError, check_int, shown
from publisher.config.config_file import read_file
from publisher.config.engine_config import read_engine_sink
from publisher.config.settings import pod_facts
from publisher.config.sidecar_config import (
    SidecarConfig,
    SinkConfig,
    WorkerInfo,
    check_ports,
    check_worker,
    read_config,
    unknown_key,
)
from publisher.config.topic import render_topic, topic_fields

__all__ = ["FILE", "OPTION", "Told", "changed", "read_told"]

Data = dict[str, Any]

OPTION = "--kv-events-config"
FILE = "KVEVENTS_CONFIG"
"""The variable that names the file."""

_ENGINES = {
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10_000,
    "hwm": 100_000,
    "max_queue_size": 100_000,
    "topic": "",
    "bind": None,
    "format": "default",
}
"""What SGLang and vLLM have in place of what is unsaid."""
_ONLY_ENGINES = ("publisher", "enable_kv_cache_events", "max_queue_size", "bind", "format")
_OF_WORKER = ("block_size", "model", "worker_id", "dp_size")
_OF_SIDECAR = tuple(
    name for name in SidecarConfig.__struct_fields__ if name not in ("sinks", "relay")
)
_KNOWN = (*SinkConfig.__struct_fields__, *_ONLY_ENGINES, *_OF_WORKER, *_OF_SIDECAR, "sinks")
_OF_ANOTHER = {"sglang": ("enable_kv_cache_events",), "vllm": ("bind", "format")}
"""What an engine has no such key for, by its dialect: taken, and not offered."""


@dataclass(frozen=True, slots=True)
class Told:
    """`worker`: what was said of it, as WorkerInfo has it. `max_queue_size`: batches that wait at most,
    for the sidecar's start or for room on the link; 0: any number.
    """

    config: SidecarConfig
    worker: Mapping[str, Any]
    max_queue_size: int

    def worker_info(self, dp_rank: int, **engine: Any) -> WorkerInfo:
        """The worker, with what the engine says of itself where nothing was said. Raises ConfigError that
        begins with the key, for what is out of bounds, cannot be bound, or has no value in a topic.
        """
        found = {name: value for name, value in engine.items() if value is not None}
        try:
            worker = read_config(WorkerInfo, {**found, **self.worker, "dp_rank": dp_rank})
            check_ports(self.config, worker)
            check_worker(self.config, worker)
            self._check_topics(worker)
        except ConfigError as error:
            raise ConfigError(f"{OPTION}: {error}") from None
        return worker

    def first_topic(self, worker: WorkerInfo, port: int | None) -> str:
        """What the first sink, at `port`, puts before its messages."""
        return render_topic("topic", self.config.sinks[0].topic, _facts(worker, port)).decode()

    def _check_topics(self, worker: WorkerInfo) -> None:
        for place, sink in enumerate(self.config.sinks):
            if topic_fields(sink.topic):
                render_topic(f"sinks[{place}].topic", sink.topic, _facts(worker, 0))


def _facts(worker: WorkerInfo, port: int | None) -> dict[str, str]:
    known = {} if port is None else {"port": str(port)}
    return {**pod_facts(os.environ), **worker.facts(), **known}


def changed(keys: Mapping[str, Any]) -> Data:
    """Of keys that an engine has filled up with its defaults, those that somebody said."""
    return {
        name: value
        for name, value in keys.items()
        if name not in _ENGINES or value != _ENGINES[name]
    }


def read_told(said: Mapping[str, Any], environ: Mapping[str, str], *, dialect: str) -> Told:
    """`said`: the keys of the option that somebody said. `dialect`: of the first sink, where neither a
    key nor `format` says it. Raises ConfigError that begins with the option or the variable, and the key.
    """
    file, file_worker = _read_file(environ.get(FILE, ""))
    try:
        for key, value in said.items():
            if key not in _KNOWN:
                offered = [one for one in _KNOWN if one not in _OF_ANOTHER.get(dialect, ())]
                raise unknown_key(key, key, offered)
            _check_text(key, value)
        max_queue_size = said.get("max_queue_size", _ENGINES["max_queue_size"])
        check_int("max_queue_size", max_queue_size, 0)
        worker = {name: said[name] for name in _OF_WORKER if name in said}
        own = {name: said[name] for name in _OF_SIDECAR if name in said}
        sinks = [*_first_sinks(said, file, dialect), *_more_sinks(said)]
        config = read_config(SidecarConfig, {**file, **own, "sinks": sinks})
    except ConfigError as error:
        raise ConfigError(f"{OPTION}: {error}") from None
    if said.get("format") == "dynamo":
        worker["hash_format"] = HashFormat.DYNAMO
    return Told(config, {**file_worker, **worker}, max_queue_size)


def _check_text(key: str, value: object) -> None:
    """Raises ConfigError for half a character, which JSON can write, and nobody else."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise ConfigError(f"{key}: {shown(value)} is no text") from None


def _first_sinks(said: Mapping[str, Any], file: Data, dialect: str) -> list[Any]:
    """The engine's own, or those of the file, which leave nothing to say of the engine's."""
    keys = {
        name: value
        for name, value in said.items()
        if name not in (*_OF_WORKER, *_OF_SIDECAR, "sinks", "publisher", "enable_kv_cache_events")
    }
    if (sinks := file.get("sinks")) is not None:
        for name in keys:
            if name not in ("format", "max_queue_size"):
                raise ConfigError(f"{name}: {FILE} has sinks already")
        return list(sinks)
    if "mode" not in keys and keys.get("bind") is None:
        endpoint = keys.get("endpoint", _ENGINES["endpoint"])
        keys["mode"] = "bind" if _is_bound(endpoint) else "connect"
    sink = read_engine_sink(msgspec.json.encode(keys).decode(), {})
    sink.setdefault("dialect", dialect)
    read_config(SinkConfig, sink)
    return [sink]


def _is_bound(endpoint: object) -> bool:
    """As both engines see it; SGLang takes 0.0.0.0 for a wildcard too."""
    return isinstance(endpoint, str) and (
        endpoint.startswith("ipc://") or any(one in endpoint for one in ("*", "::", "0.0.0.0"))
    )


def _more_sinks(said: Mapping[str, Any]) -> list[Any]:
    more = said.get("sinks", [])
    if not isinstance(more, list):
        raise ConfigError(f"sinks: {shown(more)} is not a list")
    for place, sink in enumerate(more):
        try:
            read_config(SinkConfig, sink)
        except ConfigError as error:
            raise ConfigError(f"sinks[{place}].{error}") from None
    return more


def _read_file(name: str) -> tuple[Data, Data]:
    """The sidecar's keys, and those of the table `worker`."""
    if not name:
        return {}, {}
    data = read_file(FILE, name)
    try:
        worker = data.pop("worker", {})
        if not isinstance(worker, dict):
            raise ConfigError(f"worker: {shown(worker)} is not a table")
        for key in worker:
            if key not in _OF_WORKER:
                raise unknown_key(f"worker.{key}", key, _OF_WORKER)
        try:
            read_config(WorkerInfo, {"block_size": 1} | worker)
        except ConfigError as error:
            raise ConfigError(f"worker.{error}") from None
        if data.get("relay") is not None:
            raise ConfigError("relay: the engine hands its events over itself")
        read_config(SidecarConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{FILE}: {error}") from None
    return data, worker
