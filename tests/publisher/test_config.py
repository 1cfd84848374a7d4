"""publisher.config: what cannot be is refused, by key, value and bound."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from publisher.config import (
    ConfigError,
    SidecarConfig,
    SinkConfig,
    WorkerInfo,
    check_endpoint,
    read_config,
)

GOOD_ENDPOINTS = [
    "tcp://127.0.0.1:5557",
    "tcp://0.0.0.0:0",
    "tcp://*:*",
    "tcp://*:65535",
    "tcp://worker-0.pool.svc:5557",
    "tcp://[::1]:5557",
    "tcp://[::]:0",
    "tcp://[fe80::1%eth0]:1",
    "ipc:///run/kv/events",
    "ipc://tcp/inproc",
    "ipc://" + "x" * 107,
]

BAD_ENDPOINTS = [
    "",
    "5557",
    "127.0.0.1:5557",
    "tcp://",
    "tcp://:5557",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:",
    "tcp://127.0.0.1:x",
    "tcp://127.0.0.1:-1",
    "tcp://127.0.0.1:٣",
    "tcp://127.0.0.1:5557/",
    "tcp://::1:5557",
    "tcp://[::1:5557",
    "tcp://a:b:5557",
    "udp://127.0.0.1:5557",
    "inproc://x",
    "TCP://127.0.0.1:5557",
    " tcp://127.0.0.1:5557",
]

BOUNDS: list[tuple[type[SinkConfig | SidecarConfig | WorkerInfo], str, Any, str]] = [
    (SinkConfig, "endpoint", "tcp://h:65536", "port 65536 of 'tcp://h:65536' is not in 0..65535"),
    (SinkConfig, "endpoint", "ipc://", "'ipc://' needs a path of 1..107 bytes"),
    (
        SinkConfig,
        "replay_endpoint",
        "nonsense",
        "'nonsense' is neither tcp://HOST:PORT nor ipc://PATH",
    ),
    (SinkConfig, "replay_endpoint", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557 is the endpoint"),
    (SinkConfig, "buffer_steps", 0, "0 is below 1"),
    (SinkConfig, "buffer_bytes", 0, "0 is below 1"),
    (SinkConfig, "hwm", 0, "0 is not in 1..2147483647"),
    (SinkConfig, "hwm", 2**31, "2147483648 is not in 1..2147483647"),
    (SinkConfig, "heartbeat_s", 0.009, "0.009 is not in 0.01..3600"),
    (SinkConfig, "heartbeat_s", 3600.1, "3600.1 is not in 0.01..3600"),
    (SinkConfig, "heartbeat_s", math.nan, "nan is not in 0.01..3600"),
    (SidecarConfig, "sinks", (), "at least one is needed"),
    (SidecarConfig, "linger_s", -0.1, "-0.1 is not in 0..60"),
    (SidecarConfig, "linger_s", 60.5, "60.5 is not in 0..60"),
    (SidecarConfig, "linger_s", math.inf, "inf is not in 0..60"),
    (SidecarConfig, "replay_timeout_s", 0.05, "0.05 is not in 0.1..3600"),
    (SidecarConfig, "replay_timeout_s", 3601.5, "3601.5 is not in 0.1..3600"),
    (WorkerInfo, "block_size", 0, "0 is below 1"),
    (WorkerInfo, "dp_rank", -1, "-1 is not in 0..2147483647"),
    (WorkerInfo, "dp_rank", 2**31, "2147483648 is not in 0..2147483647"),
]


@pytest.mark.parametrize("endpoint", GOOD_ENDPOINTS)
def test_endpoints_that_can_be_bound_are_taken(endpoint: str) -> None:
    """TCP with a host and a port, IPv6 in brackets, any path (cases 96, 97)."""
    check_endpoint("endpoint", endpoint)
    assert SinkConfig(endpoint=endpoint, replay_endpoint=None).endpoint == endpoint


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_endpoints_that_cannot_be_are_named(endpoint: str) -> None:
    """The message begins with the key and quotes the value."""
    with pytest.raises(ConfigError) as error:
        check_endpoint("--endpoint", endpoint)
    assert str(error.value).startswith("--endpoint: ")
    assert repr(endpoint) in str(error.value)


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"), BOUNDS, ids=[f"{one[1]}={one[2]}"[:40] for one in BOUNDS]
)
def test_every_bound_is_checked(
    kind: type[SinkConfig | SidecarConfig | WorkerInfo], key: str, value: Any, said: str
) -> None:
    """A value beyond its bound is a ConfigError that says `key: value and bound`, constructed or read;
    it is a ValueError too.
    """
    needed: dict[str, Any] = {"block_size": 4} if kind is WorkerInfo else {}
    with pytest.raises(ConfigError) as error:
        kind(**needed | {key: value})
    assert str(error.value).startswith(f"{key}: {said}")
    with pytest.raises(ConfigError) as read:
        read_config(kind, needed | {key: value})
    assert str(read.value) == str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("buffer_steps", [1, 10**9]),
        ("buffer_bytes", [1, 1 << 50]),
        ("hwm", [1, 2**31 - 1]),
        ("heartbeat_s", [0.01, 3600]),
    ],
)
def test_the_bounds_themselves_are_taken(key: str, values: list[Any]) -> None:
    """Both ends of a range are in it."""
    for value in values:
        assert getattr(SinkConfig(**{key: value}), key) == value


def test_two_sockets_may_both_ask_for_any_port() -> None:
    """`:0` and `:*` twice are two ports, not the same one."""
    for endpoint in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
        SinkConfig(endpoint=endpoint, replay_endpoint=endpoint)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sink": []}, "`sink`"),
        ({"sinks": [{"endpont": "tcp://h:1"}]}, "`endpont`"),
        ({"sinks": [{"hwm": "10"}]}, "$.sinks[0].hwm"),
        ({"sinks": {}}, "$.sinks"),
        ({"linger_s": None}, "$.linger_s"),
        ([], "object"),
    ],
)
def test_unknown_keys_and_types_are_named(data: Any, said: str) -> None:
    """Case 106: a key that is none of ours is an error, and so is a value of another type."""
    with pytest.raises(ConfigError) as error:
        read_config(SidecarConfig, data)
    assert said in str(error.value)


def test_a_config_crosses_json() -> None:
    """What `spawn` writes is what `serve` reads."""
    config = SidecarConfig(
        sinks=(SinkConfig(topic="a", hwm=7), SinkConfig(replay_endpoint=None)), linger_s=0.5
    )
    assert read_config(SidecarConfig, msgspec.json.decode(msgspec.json.encode(config))) == config
    assert read_config(SidecarConfig, {}) == SidecarConfig()


def test_the_default_is_loopback() -> None:
    """Case 107: nobody outside the host hears of prompts unless told to."""
    (sink,) = SidecarConfig().sinks
    assert sink.endpoint.startswith("tcp://127.0.0.1:")
    assert str(sink.replay_endpoint).startswith("tcp://127.0.0.1:")
