"""The entry points, where there is no engine or another one: a line in the log, and no more."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

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


@pytest.mark.parametrize("switch", ["1", "true", "Yes", "on"])
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
    assert f"`{switch.lower()}`" in (ROOT / "docs/engines.md").read_text()


@pytest.mark.parametrize(("switch", "said"), [("", False), ("0", False), ("perhaps", True)])
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
