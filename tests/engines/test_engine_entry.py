"""The entry points, where there is no engine or another one: a line in the log, and no more."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import zmq

from publisher.config.settings import unread
from publisher.engines import sglang, told, vllm

ROOT = Path(__file__).parents[2]


def test_the_entry_points_are_there() -> None:
    """What pyproject.toml names can be loaded and called."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(declared) == {"sglang.srt.plugins", "vllm.general_plugins"}
    for names in declared.values():
        for value in names.values():
            module, _, name = value.partition(":")
            assert callable(getattr(import_module(module), name))


def test_without_an_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised, and what is missing is said."""
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv(vllm.SWITCH, "1")
    with caplog.at_level(logging.WARNING):
        sglang.register()
        vllm.register()
    assert "SGLang's publishers are not where they were" in caplog.text
    assert "vLLM's publishers are not where they were" in caplog.text


@pytest.mark.parametrize("switch", ["1", "true", "Yes", " ON "])
def test_all_values_of_the_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that the page names puts our publisher in the place of vLLM's."""
    kv_events = ModuleType("vllm.distributed.kv_events")
    registry: dict[str, object] = {"zmq": object}
    factory = SimpleNamespace(_registry=registry)
    monkeypatch.setattr(kv_events, "EventPublisherFactory", factory, raising=False)
    monkeypatch.setitem(sys.modules, kv_events.__name__, kv_events)
    monkeypatch.setenv(vllm.SWITCH, switch)
    vllm.register()
    assert registry == {"zmq": vllm.SidecarPublisher}
    assert f"`{switch.strip().lower()}`" in (ROOT / "docs/engines.md").read_text()


@pytest.mark.parametrize(
    ("switch", "said"),
    [
        ("", False),
        ("0", False),
        ("false", False),
        ("no", False),
        (" Off ", False),
        ("perhaps", True),
    ],
)
def test_vllm_is_left_alone_without_the_switch(
    switch: str, said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a switch that is neither on nor off is said."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv(vllm.SWITCH, switch)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert ("is none of 1, true, yes, on, 0, false, no, off" in caplog.text) == said


def test_vllms_publisher_says_that_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a block size that nobody told; as a warning, since vLLM shows no other line of ours."""
    monkeypatch.delenv(told.FILE, raising=False)
    with caplog.at_level(logging.WARNING):
        made = vllm.SidecarPublisher(3, endpoint=f"ipc://{tmp_path}/pub")
        made.shutdown()
    (line,) = caplog.messages
    assert line.startswith("the sidecar of rank 3 waits for the first stored block")
    assert "worker.block_size" in line


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("ipc:///tmp/pub", "ipc:///tmp/pub"),
        ("ipc://pub", f"ipc://{Path.cwd()}/pub"),
        ("ipc://@pub", "ipc://@pub"),
    ],
)
def test_where_another_process_of_the_host_finds_a_sink(endpoint: str, local: str) -> None:
    """At loopback for a wildcard, and at a path in full."""
    assert sglang._local(endpoint) == local


@pytest.mark.integration
def test_sglangs_sink_without_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang says nothing of itself, not even the option's text, the sidecar starts with the block
    size that SGLang asks with, and of the keys those count that are no defaults. A sink that connects is
    nowhere to be found.
    """
    path = tmp_path / "kvevents.json"
    own = {"state_dir": f"{tmp_path}/state", "http_endpoint": "none"}
    for number, mode in enumerate(("bind", "connect")):
        at = f"ipc://{tmp_path}/{number}"
        sink = {"endpoint": at, "replay_endpoint": "none", "mode": mode}
        path.write_text(json.dumps({**own, "sinks": [sink]}))
        monkeypatch.setenv(told.FILE, str(path))
        publisher = sglang.SidecarPublisher(0, endpoint="tcp://*:5557", hwm=100_000, topic="")
        with closing(publisher._sidecar):
            source = publisher.describe_local_source(4)
            assert publisher._sidecar.sidecar is not None
        found = {"dp_rank": 0, "endpoint": at, "topic": "", "block_size": 4}
        assert source == (found if mode == "bind" else None)


@pytest.mark.integration
def test_the_topic_that_is_described_is_the_one_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it names filled in, the port that was found too."""
    path = tmp_path / "kvevents.json"
    worker = {"model": "m", "block_size": 4}
    own = {"state_dir": f"{tmp_path}/state", "http_endpoint": "none", "worker": worker}
    sink = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "none", "topic": "{model}:{port}"}
    path.write_text(json.dumps({**own, "sinks": [sink]}))
    monkeypatch.setenv(told.FILE, str(path))
    publisher = sglang.SidecarPublisher(0)
    with closing(publisher._sidecar):
        source = publisher.describe_local_source(4)
        assert source is not None
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as router:
            router.setsockopt(zmq.RCVTIMEO, 20_000)
            router.subscribe(source["topic"].encode())
            router.connect(source["endpoint"])
            assert (
                router.recv_multipart()[0] == b"m:" + source["endpoint"].rpartition(":")[2].encode()
            )


def test_a_sidecar_does_not_complain_of_the_engines_variables() -> None:
    """It has the engine's environment; of another of ours it says that it is not read."""
    ours = {told.FILE: "/etc/kvevents.toml", vllm.SWITCH: "1"}
    assert unread(ours) is None
    assert unread({**ours, "KVEVENTS_SIDECARS": "1"}) is not None


@pytest.mark.integration
def test_loading_a_plugin_costs_an_engines_processes_little() -> None:
    """All of them load it: it brings no library of ours but itself."""
    code = "import sys, publisher.engines.sglang, publisher.engines.vllm; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "zmq", "prometheus_client", "hicache", "kvevents"}
