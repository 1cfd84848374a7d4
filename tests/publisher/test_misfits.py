"""publisher.config.misfits: what a sink's own consumer would not take is said before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents.dialect import DIALECTS
from publisher import SidecarConfig, SinkConfig
from publisher.config.misfits import misfits


@pytest.mark.parametrize("name", DIALECTS)
def test_a_preset_fits_its_consumer(name: str) -> None:
    """Nothing is said of any."""
    assert list(misfits(SidecarConfig(sinks=(SinkConfig(dialect=name),)), {})) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"dialect": "vllm-router", "topic": "zz"},
            "vllm-router    drops the batch: topic is 'zz'",
        ),
        ({"dialect": "llm-d", "topic": "kv-events"}, "llm-d          drops the batch: topic is"),
        ({"dialect": "aibrix", "token_ids": False}, "token_ids is empty"),
        (
            {"dialect": "llm-d", "media": {"CPU_PINNED": "host"}},
            "medium is 'host': it scores it as",
        ),
        ({"dialect": "vllm-router", "hash_form": "i64"}, "it reads unsigned hashes only"),
        ({"dialect": "kthena", "event_form": "map"}, "kthena         drops the batch"),
    ],
)
def test_what_does_not_fit_is_said_once(settings: dict[str, Any], said: str) -> None:
    """With the sink's place; each kind of thing in one line."""
    config = SidecarConfig(
        sinks=(SinkConfig(), SinkConfig(**settings, endpoint="tcp://h:1", mode="connect"))
    )
    lines = list(misfits(config, {"model": "m"}))
    assert [line for line in lines if said in line]
    assert all(line.startswith("sinks[1]: ") and line.isprintable() for line in lines)
    assert len(set(lines)) == len(lines) <= 3
