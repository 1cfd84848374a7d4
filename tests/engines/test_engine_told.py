"""publisher.engines.told: what keys and file come to, and how what cannot be is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvevents.hashing import HashFormat
from publisher.config.sidecar_config import ConfigError
from publisher.engines.told import Told, changed, read_told


def read(keys: dict[str, Any], environ: dict[str, str] | None = None) -> Told:
    return read_told(keys, environ or {}, dialect="sglang")


def file_of(folder: Path, **data: Any) -> dict[str, str]:
    path = folder / "kvevents.json"
    path.write_text(json.dumps(data))
    return {"KVEVENTS_CONFIG": str(path)}


def test_what_is_unsaid_is_as_the_engines_have_it() -> None:
    """One sink at every address of port 5557, bound, without a replay, the rank added to its port."""
    (sink,) = read({}).config.sinks
    assert (sink.endpoint, sink.replay_endpoint, sink.mode) == ("tcp://*:5557", None, "bind")
    assert (sink.buffer_steps, sink.hwm, sink.topic, sink.dialect) == (
        10_000,
        100_000,
        "",
        "sglang",
    )
    assert sink.endpoints_of(2) == ("tcp://*:5559",)
    assert read({}).max_queue_size == 100_000


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({"endpoint": "tcp://router:5557"}, "connect"),
        ({"endpoint": "tcp://127.0.0.1:5557"}, "connect"),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, "bind"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "bind"),
        ({"endpoint": "tcp://[::]:5557"}, "bind"),
        ({"endpoint": "ipc:///tmp/pub"}, "bind"),
        ({"endpoint": "tcp://router:5557", "mode": "bind"}, "bind"),
    ],
)
def test_who_binds(keys: dict[str, Any], mode: str) -> None:
    """As the engines see it, loopback too, unless a key says it."""
    assert read(keys).config.sinks[0].mode == mode


def test_our_keys_beside_theirs() -> None:
    """Of the sink, of the sidecar, of the worker, and more sinks."""
    told = read(
        {
            "publisher": "sidecar",
            "endpoint": "tcp://*:6000",
            "format": "dynamo",
            "heartbeat_s": 1.0,
            "linger_s": 2.0,
            "block_size": 16,
            "worker_id": "w-0",
            "max_queue_size": 7,
            "sinks": [{"dialect": "legacy", "endpoint": "tcp://*:7000", "replay_endpoint": "none"}],
        }
    )
    first, second = told.config.sinks
    assert (first.dialect, first.heartbeat_s, second.dialect) == ("dynamo", 1.0, "legacy")
    assert (told.config.linger_s, told.max_queue_size) == (2.0, 7)
    worker = told.worker_info(3, block_size=64, model="m", dp_size=4)
    assert (worker.block_size, worker.model, worker.worker_id) == (16, "m", "w-0")
    assert (worker.dp_rank, worker.dp_size, worker.hash_format) == (3, 4, HashFormat.DYNAMO)


def test_a_file(tmp_path: Path) -> None:
    """Says what the option does not; what both say is as the option says."""
    environ = file_of(
        tmp_path, linger_s=2.0, replay_timeout_s=5.0, worker={"block_size": 8, "model": "m"}
    )
    told = read({"linger_s": 3.0, "model": "n"}, environ)
    assert (told.config.linger_s, told.config.replay_timeout_s) == (3.0, 5.0)
    assert told.config.sinks[0].endpoint == "tcp://*:5557"
    worker = told.worker_info(0, block_size=64)
    assert (worker.block_size, worker.model) == (8, "n")


def test_the_sinks_of_a_file(tmp_path: Path) -> None:
    """Are all there are; an engine's own sink has no place beside them."""
    environ = file_of(tmp_path, sinks=[{"endpoint": "tcp://*:7000"}])
    keys = {"publisher": "sidecar", "enable_kv_cache_events": True, "max_queue_size": 5}
    told = read({**keys, "format": "dynamo"}, environ)
    assert [sink.endpoint for sink in told.config.sinks] == ["tcp://*:7000"]
    assert told.worker_info(0, block_size=4).hash_format is HashFormat.DYNAMO
    with pytest.raises(ConfigError, match="hwm: KVEVENTS_CONFIG has sinks already"):
        read({"hwm": 5}, environ)


def test_what_an_engine_has_filled_up() -> None:
    """What differs from the engines' defaults is what somebody said."""
    filled = {"endpoint": "tcp://*:5557", "hwm": 5, "topic": "", "replay_endpoint": None}
    assert changed({**filled, "linger_s": 1.0}) == {"hwm": 5, "linger_s": 1.0}


def test_a_queue_of_any_length() -> None:
    """Is what 0 asks for, as of the engines."""
    assert read({"max_queue_size": 0}).max_queue_size == 0


def test_what_an_engine_does_not_say_of_itself() -> None:
    """Is as if it were not asked: None is no value."""
    worker = read({}).worker_info(0, block_size=4, model=None, dp_size=None)
    assert (worker.model, worker.dp_size) == ("", None)


def test_what_a_topic_names_is_known_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pod, of the worker, and its port; what is not stops the engine."""
    told = read({"topic": "{pod_name}-{worker_id}:{port}@{model}", "worker_id": "w-0"})
    monkeypatch.setenv("POD_NAME", "pod")
    told.worker_info(0, block_size=4, model="m")
    with pytest.raises(ConfigError, match=r"--kv-events-config: sinks\[0\]\.topic: {model}"):
        told.worker_info(0, block_size=4)


def test_a_form_that_names_the_worker() -> None:
    """Stops the engine where the worker has no name."""
    told = read({"dialect": "mooncake-store", "model": "m"})
    with pytest.raises(ConfigError, match=r"--kv-events-config: .*worker_id, and it has none"):
        told.worker_info(0, block_size=4)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"lingers": 1}, "KVEVENTS_CONFIG: lingers: no such key; did you mean linger_s?"),
        ({"worker": {"rank": 1}}, "KVEVENTS_CONFIG: worker.rank: no such key"),
        ({"worker": {"dp_rank": 1}}, "KVEVENTS_CONFIG: worker.dp_rank: no such key"),
        ({"worker": {"block_size": 0}}, "KVEVENTS_CONFIG: worker.block_size: 0"),
        ({"worker": 5}, "KVEVENTS_CONFIG: worker: 5 is not a table"),
        ({"sinks": [{"hwm": 0}]}, "KVEVENTS_CONFIG: sinks[0].hwm: 0"),
        ({"relay": {"endpoint": "tcp://h:1"}}, "KVEVENTS_CONFIG: relay: "),
    ],
)
def test_a_file_that_cannot_be(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The variable and the key are named."""
    with pytest.raises(ConfigError) as refused:
        read({}, file_of(tmp_path, **data))
    assert str(refused.value).startswith(said)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is no reason to go on without it."""
    with pytest.raises(ConfigError, match=r"KVEVENTS_CONFIG: .*No such file"):
        read({}, {"KVEVENTS_CONFIG": str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"endpoint": "inproc://x"}, "--kv-events-config: endpoint: "),
        ({"format": "yaml"}, "--kv-events-config: format: "),
        ({"max_queue_size": -1}, "--kv-events-config: max_queue_size: -1"),
        ({"sinks": {}}, "--kv-events-config: sinks: "),
        ({"sinks": [{"hwm": 0}]}, "--kv-events-config: sinks[0].hwm: 0"),
        ({"lingers": 1}, "--kv-events-config: lingers: no such key; did you mean linger_s?"),
        ({"relay": {"endpoint": "tcp://h:1"}}, "--kv-events-config: relay: no such key"),
        ({"http_endpoint": "tcp://h:1"}, "--kv-events-config: http_endpoint: "),
        ({"bind": False, "mode": "bind"}, "--kv-events-config: bind: False"),
        ({"topic": "\ud800"}, "--kv-events-config: topic: '\\ud800'"),
        ({"sinks": [{"name": "\ud800"}]}, "--kv-events-config: sinks: "),
        ({"curve": [{"endpoint": 5}]}, "--kv-events-config: curve: "),
    ],
)
def test_keys_that_cannot_be(keys: dict[str, Any], said: str) -> None:
    """The option and the key are named."""
    with pytest.raises(ConfigError) as refused:
        read(keys)
    assert str(refused.value).startswith(said)


def test_what_is_another_engines_is_not_offered() -> None:
    """It is taken, for SGLang takes it, but whoever has a typo is not led to it."""
    told = [("sglang", "enable_kv_cache_events"), ("vllm", "bind")]
    for dialect, key in told:
        for typed in ("zzz", f"{key}x"):
            with pytest.raises(ConfigError, match="no such key") as refused:
                read_told({typed: 1}, {}, dialect=dialect)
            hint = str(refused.value).partition("no such key")[2]
            assert key not in re.split(r"[ ,?]+", hint)
    read({"enable_kv_cache_events": True})


def test_ports_that_meet_are_refused_by_every_rank() -> None:
    """As two ranks would be in each other's way, though one alone would not."""
    told = read({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"})
    told.worker_info(0, block_size=4)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"--kv-events-config: sinks\[0\]"):
            told.worker_info(rank, block_size=4, dp_size=2)


@pytest.mark.parametrize("size", [-1, "x", 2.5, True])
def test_a_queue_is_looked_at_beside_the_sinks_of_a_file(tmp_path: Path, size: object) -> None:
    """It is of no sink, so no sink's keys are where it would be."""
    environ = file_of(tmp_path, sinks=[{"endpoint": "tcp://*:7000"}])
    with pytest.raises(ConfigError, match=r"^--kv-events-config: max_queue_size: "):
        read({"max_queue_size": size}, environ)
