"""publisher.config.sidecar_config: what cannot be is refused, by key, value and bound."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvevents.dialect import DIALECTS, PRESETS
from kvevents.events import StorageMedium
from kvevents.hashing import HashFormat
from publisher.config.sidecar_config import (
    ConfigError,
    CurveConfig,
    RelayConfig,
    SidecarConfig,
    SinkConfig,
    WorkerInfo,
    check_endpoint,
    check_ports,
    is_same,
    read_config,
    sink_names,
)

GPU, _, DISK, _ = StorageMedium

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

WORKER = WorkerInfo(block_size=16)

BOUNDS: list[tuple[Any, str, Any, str]] = [
    (SinkConfig, "name", "a b", "'a b' is not 1..64 of"),
    (SinkConfig, "name", "x" * 65, "'xxx"),
    (SinkConfig, "name", "\u00e9", "'\u00e9' is not 1..64 of"),
    (SinkConfig, "dialect", "latin", "'latin' is not one of sglang"),
    (SinkConfig, "event_form", "xml", "'xml' is not one of map, vllm, array, mooncake"),
    (SinkConfig, "hash_form", "i32", "'i32' is not one of i64, u64, bytes"),
    (SinkConfig, "media", {"CPU": "CPU"}, "'CPU' is not one of GPU, CPU_PINNED, DISK, EXTERNAL"),
    (SinkConfig, "media", {one.value: "none" for one in StorageMedium}, "at least one is needed"),
    (SinkConfig, "namespaces", ["salt"], "'salt' is not one of lora_name, cache_salt, extra_key"),
    (SinkConfig, "blocks_per_event", 0, "0 is below 1"),
    (SinkConfig, "replay_frames", 5, "5 is not in 3..4"),
    (SinkConfig, "object_key", "\ud800{digest}", "'\\ud800{digest}' cannot be encoded"),
    (SinkConfig, "object_key", "{digest}" * 600, "4800 bytes are above 4096"),
    (SinkConfig, "replay_padding", -1, "-1 is below 0"),
    (SinkConfig, "mode", "both", "'both' is not one of bind, connect"),
    (SinkConfig, "endpoint", (), "at least one is needed"),
    (SinkConfig, "endpoint", ("tcp://h:1", "tcp://i:1"), "('tcp://h:1', 'tcp://i:1') are several"),
    (SinkConfig, "endpoint", ("tcp://h:1", "nonsense"), "('tcp://h:1', 'nonsense') are several"),
    (SinkConfig, "topic", "{pod}", "'pod' in '{pod}' is not one of pod_ip, port, pod_name"),
    (SinkConfig, "topic", "\ud800", "'\\ud800' cannot be encoded"),
    (SidecarConfig, "http_endpoint", "None", "'None' is not http://HOST:PORT"),
    (RelayConfig, "replay_endpoint", "", "'' is neither tcp://HOST:PORT nor ipc://PATH"),
    (SinkConfig, "topic", "x" * 4097, "4097 bytes are above 4096"),
    (SinkConfig, "buffer_bytes", 2**63, "9223372036854775808 is above 9223372036854775807"),
    (SinkConfig, "coalesce_s", -0.5, "-0.5 is not in 0..10"),
    (SinkConfig, "coalesce_s", 10.5, "10.5 is not in 0..10"),
    (SinkConfig, "coalesce_s", math.nan, "nan is not in 0..10"),
    (SinkConfig, "rebase_after", 999, "999 is below 1000"),
    (SidecarConfig, "state_dir", "", "'' is not a path"),
    (SidecarConfig, "state_dir", "a\0b", "'a\\x00b' is not a path"),
    (SidecarConfig, "persist", "some", "'some' is not one of all, seq, none"),
    (SidecarConfig, "on_lost_state", "guess", "'guess' is not one of reset, refuse"),
    (SidecarConfig, "http_endpoint", "tcp://h:1", "'tcp://h:1' is not http://HOST:PORT"),
    (SidecarConfig, "http_endpoint", "http://*:80", "'http://*:80' has a *; say http://0.0.0.0:0"),
    (SidecarConfig, "log_format", "xml", "'xml' is not one of text, json"),
    (SidecarConfig, "log_level", "loud", "'loud' is not one of debug, info, warning, error"),
    (CurveConfig, "secret_key", "", "'' is not a path"),
    (CurveConfig, "client_keys", "\0", "'\\x00' is not a path"),
    (RelayConfig, "endpoint", "tcp://*:5557", "'tcp://*:5557' cannot be connected to; name a host"),
    (RelayConfig, "endpoint", "tcp://h:0", "'tcp://h:0' cannot be connected to; name its port"),
    (RelayConfig, "endpoint", "ipc://*", "'ipc://*' cannot be connected to; name a path"),
    (RelayConfig, "replay_endpoint", "tcp://h:5557", "tcp://h:5557 is the endpoint as well"),
    (WorkerInfo, "dp_size", 0, "0 is not in 1..2147483648"),
    (WorkerInfo, "block_size", 2**63, "9223372036854775808 is above"),
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
def test_every_bound_is_checked(kind: Any, key: str, value: Any, said: str) -> None:
    """A value beyond its bound is a ConfigError that says `key: value and bound`, constructed or read;
    it is a ValueError too.
    """
    needs: dict[Any, dict[str, Any]] = {
        WorkerInfo: {"block_size": 4},
        CurveConfig: {"secret_key": "s", "client_keys": "c"},
        RelayConfig: {"endpoint": "tcp://h:5557", "worker": WORKER},
    }
    needed = needs.get(kind, {})
    with pytest.raises(ConfigError) as error:
        kind(**needed | {key: value})
    assert str(error.value).startswith(f"{key}: {said}")
    with pytest.raises(ConfigError) as read:
        read_config(kind, msgspec.to_builtins(needed) | {key: value})
    assert str(read.value) == str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("buffer_steps", [1, 10**9]),
        ("buffer_bytes", [1, 1 << 50]),
        ("hwm", [1, 2**31 - 1]),
        ("heartbeat_s", [0.01, 3600]),
        ("coalesce_s", [0, 10]),
        ("rebase_after", [None, 1000, 1 << 50]),
        ("blocks_per_event", [None, 1, 1 << 50]),
        ("replay_padding", [None, 0, 1 << 50]),
        ("replay_frames", [3, 4]),
        ("name", ["x" * 64, "A-z_0.9"]),
        ("topic", ["x" * 4096, "{{}}"]),
    ],
)
def test_the_bounds_themselves_are_taken(key: str, values: list[Any]) -> None:
    """Both ends of a range are in it."""
    for value in values:
        assert getattr(SinkConfig(**{key: value}), key) == value


@pytest.mark.parametrize("said", [None, "none"])
def test_none_can_be_said_where_toml_has_no_word_for_it(said: str | None) -> None:
    """The text "none", in a file and in Python, is None: no replay, no HTTP."""
    data = {
        "sinks": [{"replay_endpoint": said}],
        "http_endpoint": said,
        "relay": {
            "endpoint": "tcp://h:1",
            "replay_endpoint": said,
            "worker": {"block_size": 16},
        },
    }
    read = read_config(SidecarConfig, data)
    relay = RelayConfig(endpoint="tcp://h:1", replay_endpoint=said, worker=WORKER)
    sinks = (SinkConfig(replay_endpoint=said),)
    assert read == SidecarConfig(sinks=sinks, http_endpoint=said, relay=relay)
    assert read.relay is not None
    settled = (read.sinks[0].replay_endpoint, read.http_endpoint, read.relay.replay_endpoint)
    assert settled == (None, None, None)


def test_who_connects_has_no_replay_unless_told_to() -> None:
    """Unsaid, it is the default address to bind and none to connect; what is there afterwards is settled,
    and is what a sidecar elsewhere reads.
    """
    binding, connecting = SinkConfig(), SinkConfig(mode="connect", endpoint="tcp://h:5557")
    assert binding.replay_endpoint == "tcp://127.0.0.1:5558"
    assert connecting.replay_endpoint is None
    for replay in ("tcp://127.0.0.1:5558", "tcp://*:0"):
        told = SinkConfig(mode="connect", endpoint="tcp://h:5557", replay_endpoint=replay)
        assert told.replay_endpoint == replay
        assert told != connecting
    for sink in (binding, connecting):
        assert msgspec.structs.replace(sink, hwm=5).replay_endpoint == sink.replay_endpoint
        crossed = read_config(SinkConfig, msgspec.json.decode(msgspec.json.encode(sink)))
        assert crossed == sink
        assert read_config(SinkConfig, {"mode": sink.mode, "endpoint": sink.endpoint}) == sink


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mode": "connect"}, "the port of what it connects to says nothing of this worker"),
        ({"endpoint": "ipc:///run/kv"}, "'ipc:///run/kv' has none"),
    ],
)
def test_a_port_that_says_nothing_is_in_no_topic(settings: dict[str, Any], why: str) -> None:
    """`{port}` is of a bound tcp socket: a router's, or none, is refused before any socket is open."""
    with pytest.raises(ConfigError) as error:
        SinkConfig(topic="kv@h:{port}@m", **settings)
    assert str(error.value) == (
        f"topic: {{port}} of 'kv@h:{{port}}@m': {why}; write the port itself"
    )
    SinkConfig(topic="kv@h:8000@{{port}}", **settings)
    SinkConfig(topic="kv@h:{port}@m")


def test_two_sockets_may_both_ask_for_any_port() -> None:
    """`:0` and `:*` twice are two ports, not the same one."""
    for endpoint in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
        SinkConfig(endpoint=endpoint, replay_endpoint=endpoint)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sink": []}, "sink: no such key; did you mean sinks?"),
        ({"x" * 999: 1}, "x" * 256 + ": no such key; there are sinks, linger_s, "),
        ({"a\nb": 1}, "a b: no such key"),
        ({"sinks": [{"endpont": 1}]}, "sinks[0].endpont: no such key; did you mean endpoint?"),
        ({"sinks": [{"hwm": "10"}]}, "sinks[0].hwm: Expected `int`, got `str`"),
        ({"sinks": [{}, {"hwm": 0}]}, "sinks[1].hwm: 0 is not in 1..2147483647"),
        ({"sinks": [{}, {"topic": "{"}]}, "sinks[1].topic: '{' has a { alone"),
        ({"sinks": [{"mode": "x"}]}, "sinks[0].mode: 'x' is not one of bind, connect"),
        ({"sinks": [{"endpoint": ["tcp://h:1", 2]}]}, "sinks[0].endpoint[1]: Expected `str`"),
        ({"sinks": {}}, "sinks: Expected `array`, got `object`"),
        ({"sinks": [{"name": "a"}, {"name": "a"}]}, "sinks[1].name: 'a' is another sink's"),
        ({"linger_s": None}, "linger_s: Expected `float`, got `null`"),
        ({"curve": {"secret_key": "x"}}, "curve.client_keys: needed, and not there"),
        ({"relay": {"endpoint": "tcp://h:1"}}, "relay.worker: needed, and not there"),
        (
            {"relay": {"endpoint": "tcp://h:1", "worker": {"block_size": 0}}},
            "relay.worker.block_size: 0 is below 1",
        ),
        (
            {"relay": {"endpoint": "tcp://h:1", "worker": {"block_size": 1, "hash_format": "md5"}}},
            "relay.worker.hash_format: 'md5' is not one of",
        ),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_unknown_keys_and_types_are_named(data: Any, said: str) -> None:
    """Case 106: a key that is none of ours is an error, and so is a value of another type: the message
    begins with the path of the key, whatever is in it, and is one line.
    """
    with pytest.raises(ConfigError) as error:
        read_config(SidecarConfig, data)
    assert str(error.value).startswith(said)
    assert str(error.value).isprintable()


def test_a_config_crosses_json() -> None:
    """What `spawn` writes is what `serve` reads."""
    config = SidecarConfig(
        sinks=(
            SinkConfig(topic="a", hwm=7, rebase_after=2000, token_ids=False),
            SinkConfig(dialect="vllm-router", rebase_after=None, media={GPU: "x", DISK: None}),
            SinkConfig(replay_endpoint=None, mode="connect", endpoint=("tcp://a:1", "tcp://b:1")),
        ),
        linger_s=0.5,
        relay=RelayConfig(endpoint="tcp://h:1", worker=WorkerInfo(block_size=4, dp_size=2)),
        state_dir="/tmp/x",
        http_endpoint=None,
        curve=CurveConfig(secret_key="s", client_keys="c"),
    )
    assert read_config(SidecarConfig, msgspec.json.decode(msgspec.json.encode(config))) == config
    assert read_config(SidecarConfig, {}) == SidecarConfig()


PRESET_KEYS = ("topic", "replay_frames", "replay_padding", "rebase_after", "reset_sentinel")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_preset_says_what_is_unsaid(name: str) -> None:
    """Each preset is a configuration; all that it says is there to see."""
    sink, preset = SinkConfig(dialect=name), PRESETS[name]
    assert sink.spelling == preset.dialect
    for key in (*PRESET_KEYS, "tells_joiners", "coalesce_s"):
        assert getattr(sink, key) == getattr(preset, key)
    assert all(one is not msgspec.UNSET for one in msgspec.structs.astuple(sink))


@pytest.mark.parametrize("name", DIALECTS)
def test_any_of_it_can_be_said_otherwise(name: str) -> None:
    """A single setting changes that alone; of the media, those that are named."""
    plain = SinkConfig(dialect=name)
    changes: dict[str, Any] = {
        "hash_form": "bytes",
        "blocks_per_event": 7,
        "topic": "t",
        "replay_frames": 3,
        "replay_padding": 5,
        "rebase_after": 5000,
        "reset_sentinel": True,
        "tells_joiners": not PRESETS[name].tells_joiners,
        "token_ids": False,
        "namespaces": ("lora_name",),
    }
    for key, value in changes.items():
        read = read_config(SinkConfig, {"dialect": name, key: value})
        assert read == msgspec.structs.replace(plain, **{key: value})
        assert getattr(read, key) == value
    changed = SinkConfig(dialect=name, media={DISK: "SSD"})
    assert changed.media == plain.media | {DISK: "SSD"}


def test_another_form_tells_what_it_can_of_namespaces() -> None:
    """Those that were not asked for and cannot be told are left out of the view."""
    assert SinkConfig(event_form="array").namespaces == ("lora_name",)
    assert "extra_key" not in SinkConfig(event_form="vllm").namespaces
    assert SinkConfig(dialect="legacy", event_form="map").namespaces == ()


def test_none_in_a_file_is_none() -> None:
    """What a preset sets, TOML can unset: "none" for numbers and media."""
    data = {
        "dialect": "llm-d",
        "rebase_after": "none",
        "blocks_per_event": "none",
        "replay_padding": "none",
        "media": {"CPU_PINNED": "none", "DISK": "disk"},
    }
    sink = read_config(SinkConfig, data)
    assert (sink.rebase_after, sink.blocks_per_event, sink.replay_padding) == (None, None, None)
    assert sink.spelling.media == ((GPU, "GPU"), (DISK, "disk"))
    assert read_config(SidecarConfig, {"sinks": [data]}).sinks[0].spelling == sink.spelling


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dialect": "aibrix", "namespaces": ["cache_salt"]}, "namespaces: 'cache_salt' cannot be"),
        (
            {"dialect": "mooncake-store", "media": {"GPU": "gpu"}},
            "media.GPU: event_form 'mooncake'",
        ),
        ({"dialect": "mooncake-store", "object_key": "{x}"}, "object_key: {x} is not one of"),
        ({"media": {"GPU": ""}}, "media.GPU: '' is not of 1..64 characters"),
        ({"media": {"GPU": "\x1b"}}, "media.GPU: '\\x1b' is not of 1..64 characters"),
        ({"media": {"DISK": "x" * 65}}, "media.DISK: 'xxx"),
        ({"media": {"DISK": 5}}, "media"),
        ({"namespaces": "lora_name"}, "namespaces"),
        ({"media": []}, "media"),
    ],
)
def test_what_a_dialect_cannot_say_is_refused(settings: dict[str, Any], said: str) -> None:
    """The message names the key, what is wrong and what can be, from a file and in Python."""
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        read_config(SidecarConfig, {"sinks": [settings]})
    assert str(error.value).startswith("sinks[0].")
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        SinkConfig(**settings)


def test_the_default_is_loopback() -> None:
    """Case 107: nobody outside the host hears of prompts unless told to."""
    (sink,) = SidecarConfig().sinks
    assert str(sink.endpoint).startswith("tcp://127.0.0.1:")
    assert str(sink.replay_endpoint).startswith("tcp://127.0.0.1:")
    assert str(SidecarConfig().http_endpoint).startswith("http://127.0.0.1:")


def test_sinks_are_named_by_position() -> None:
    """A sink without a name is sink0, sink1...; two of one name are refused, also with one so made."""
    config = SidecarConfig(sinks=(SinkConfig(), SinkConfig(name="llm-d"), SinkConfig()))
    assert sink_names(config) == ("sink0", "llm-d", "sink2")
    with pytest.raises(ConfigError, match=r"^sinks\[1\]\.name: 'sink1' is another sink's"):
        SidecarConfig(sinks=(SinkConfig(name="sink1"), SinkConfig()))


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("tcp://*:5557", "'tcp://*:5557' cannot be connected to; name a host"),
        ("tcp://0.0.0.0:5557", "'tcp://0.0.0.0:5557' cannot be connected to; name a host"),
        ("tcp://[::]:5557", "'tcp://[::]:5557' cannot be connected to; name a host"),
        ("tcp://h:0", "'tcp://h:0' cannot be connected to; name its port"),
        ("tcp://h:*", "'tcp://h:*' cannot be connected to; name its port"),
        (("tcp://h:1", "tcp://h:1"), "'tcp://h:1' is there twice"),
        (("tcp://[::1]:1", "tcp://[0::1]:1"), "'tcp://[0::1]:1' is there twice"),
        (("tcp://h:1", "tcp://*:2"), "'tcp://*:2' cannot be connected to"),
    ],
)
def test_what_cannot_be_connected_to_is_refused(endpoint: Any, said: str) -> None:
    """Case 95: mode is explicit, and connecting needs a host and a port, each once."""
    with pytest.raises(ConfigError) as error:
        SinkConfig(mode="connect", endpoint=endpoint)
    assert str(error.value).startswith(f"endpoint: {said}")


def test_mode_says_whether_to_bind() -> None:
    """Case 95: every address can be bound or connected to as `mode` says, whatever it looks like."""
    for endpoint in ("tcp://10.0.0.1:5557", "ipc:///run/kv", "tcp://[::1]:5557"):
        for mode in ("bind", "connect"):
            sink = SinkConfig(mode=mode, endpoint=endpoint)
            assert (sink.mode, sink.endpoints) == (mode, (endpoint,))
    assert SinkConfig(endpoint="tcp://0.0.0.0:5557", replay_endpoint=None).mode == "bind"


def test_two_sides_of_a_sink_on_one_address_are_refused_however_spelled() -> None:
    """A wildcard, `localhost` and other spellings of one address are that address."""
    for endpoint, other in (
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://localhost:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::ffff:127.0.0.1]:5557", "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "ipc:///run//kv"),
    ):
        assert is_same(endpoint, other) and is_same(other, endpoint)
        with pytest.raises(ConfigError, match=r"^replay_endpoint: .* is the endpoint as well$"):
            SinkConfig(endpoint=endpoint, replay_endpoint=other)
    assert not is_same("tcp://127.0.0.1:5557", None)
    assert not is_same("tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557")


def test_a_rank_is_below_their_number() -> None:
    """`dp_size` is above `dp_rank`; unsaid, it counts as one more than the rank."""
    with pytest.raises(ConfigError, match=r"^dp_size: 2 is not above dp_rank 2$"):
        WorkerInfo(block_size=1, dp_rank=2, dp_size=2)
    assert WorkerInfo(block_size=1, dp_rank=2).num_ranks == 3
    assert WorkerInfo(block_size=1, dp_rank=2, dp_size=8).num_ranks == 8


# ------------------------------------------------------------------------------------------ ports


def sidecar(*sinks: dict[str, Any], **settings: Any) -> SidecarConfig:
    """Sinks without replay and HTTP, unless told otherwise."""
    made = tuple(SinkConfig(**{"replay_endpoint": None} | sink) for sink in sinks)
    return SidecarConfig(sinks=made, **{"http_endpoint": None} | settings)


def refusal(config: SidecarConfig, num_ranks: int) -> str | None:
    """What every rank says, which is the same."""
    said: set[str | None] = set()
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        try:
            check_ports(config, WorkerInfo(block_size=1, dp_rank=rank, dp_size=num_ranks))
            said.add(None)
        except ConfigError as error:
            said.add(str(error))
    (only,) = said
    return only


RELAY = {"worker": WORKER, "endpoint": "tcp://127.0.0.1:5557"}

LAYOUTS: list[tuple[SidecarConfig, int, str | None]] = [
    (sidecar({"endpoint": "tcp://h:5557"}), 4, None),
    (sidecar({"endpoint": "tcp://h:65532"}), 4, None),
    (sidecar({"endpoint": "tcp://h:65533"}), 4, "sinks[0].endpoint: port 65533 + rank 3"),
    (sidecar({"endpoint": "tcp://h:65533", "add_dp_rank": False}), 4, None),
    (
        sidecar(
            {"mode": "connect", "endpoint": ("tcp://h:1", "tcp://i:65535"), "add_dp_rank": True}
        ),
        2,
        "sinks[0].endpoint: port 65535 + rank 1",
    ),
    (sidecar({"mode": "connect", "endpoint": "tcp://h:65535"}), 9, None),
    (
        sidecar({"mode": "connect", "endpoint": "tcp://r:5557", "replay_endpoint": "tcp://*:5558"}),
        4,
        None,
    ),
    (
        sidecar(
            {"mode": "connect", "endpoint": "tcp://127.0.0.1:5557"},
            {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5562"},
        ),
        4,
        None,
    ),
    (
        sidecar(
            {"mode": "connect", "endpoint": "tcp://127.0.0.1:5557"},
            {"endpoint": "tcp://*:5554"},
        ),
        4,
        "sinks[0].endpoint: tcp://127.0.0.1:5557 is our own sinks[1].endpoint, tcp://*:5554 (ranks",
    ),
    (
        sidecar({"mode": "connect", "endpoint": "tcp://r:1", "replay_endpoint": "tcp://*:65535"}),
        2,
        "sinks[0].replay_endpoint: port 65535 + rank 1",
    ),
    (sidecar({"replay_endpoint": "tcp://127.0.0.1:5558", "add_dp_rank": False}), 9, None),
    (sidecar({}, http_endpoint="http://127.0.0.1:65535"), 2, "http_endpoint: port 65535 + rank 1"),
    (SidecarConfig(), 1, None),
    (SidecarConfig(), 2, "sinks[0].replay_endpoint: tcp://127.0.0.1:5558 (ranks 0..1) is on the"),
    (sidecar({"replay_endpoint": "tcp://127.0.0.1:5561"}), 4, None),
    (sidecar({"replay_endpoint": "tcp://127.0.0.1:5561"}), 5, "sinks[0].replay_endpoint: "),
    (sidecar({"replay_endpoint": "tcp://127.0.0.1:5554"}), 3, None),
    (sidecar({"replay_endpoint": "tcp://127.0.0.1:5554"}), 4, "sinks[0].replay_endpoint: "),
    (sidecar({"replay_endpoint": "tcp://127.0.0.2:5558"}), 9, None),
    (sidecar({"replay_endpoint": "tcp://*:5558"}), 2, "sinks[0].replay_endpoint: "),
    (sidecar({}, {"endpoint": "tcp://127.0.0.1:5560"}), 3, None),
    (sidecar({}, {"endpoint": "tcp://127.0.0.1:5560"}), 4, "sinks[1].endpoint: "),
    (sidecar({}, {}), 1, "sinks[1].endpoint: tcp://127.0.0.1:5557 is on the address of sinks[0]"),
    (sidecar({}, http_endpoint="http://0.0.0.0:5559"), 2, None),
    (sidecar({}, http_endpoint="http://0.0.0.0:5559"), 3, "http_endpoint: "),
    (sidecar({"endpoint": "tcp://h:0"}, {"endpoint": "tcp://h:0"}), 2**31, None),
    (sidecar({"endpoint": "tcp://h:*"}, {"endpoint": "tcp://h:0"}), 2**31, None),
    (sidecar({"endpoint": "ipc:///run/kv"}), 2**31, None),
    (sidecar({"endpoint": "ipc://" + "x" * 104}), 2, "sinks[0].endpoint: ipc://xxx"),
    (sidecar({"endpoint": "ipc:///kv"}, {"endpoint": "ipc:///kv_dp3"}), 3, None),
    (sidecar({"endpoint": "ipc:///kv"}, {"endpoint": "ipc:///kv_dp3"}), 4, "sinks[1].endpoint: "),
    (sidecar({"endpoint": "ipc:///kv_dp3"}, {"endpoint": "ipc:///kv"}), 4, "sinks[1].endpoint: "),
    (sidecar({"endpoint": "ipc:///kv"}, {"endpoint": "ipc:///kv_dp03"}), 9, None),
    (sidecar({"endpoint": "ipc:///kv"}, {"endpoint": "ipc:///./kv"}), 1, "sinks[1].endpoint: "),
    (
        sidecar({}, {"mode": "connect", "endpoint": "tcp://localhost:5557"}),
        1,
        "sinks[1].endpoint: tcp://localhost:5557 is our own sinks[0].endpoint",
    ),
    (
        sidecar({"mode": "connect", "endpoint": "tcp://r:1", "replay_endpoint": "tcp://*:1"}),
        1,
        None,
    ),
    (
        sidecar(
            {
                "mode": "connect",
                "endpoint": "tcp://127.0.0.1:1",
                "replay_endpoint": "tcp://*:2",
                "add_dp_rank": True,
            }
        ),
        2,
        "sinks[0].endpoint: tcp://127.0.0.1:1 (ranks 0..1) is our own sinks[0].replay_endpoint",
    ),
    (
        sidecar(
            {"endpoint": "tcp://127.0.0.1:5550"},
            relay=RelayConfig(**RELAY),  # type: ignore[arg-type]
        ),
        8,
        "relay.endpoint: tcp://127.0.0.1:5557 is our own sinks[0].endpoint",
    ),
    (
        sidecar({"endpoint": "tcp://h:5550"}, relay=RelayConfig(**RELAY)),  # type: ignore[arg-type]
        8,
        None,
    ),
]


@pytest.mark.parametrize(("config", "num_ranks", "said"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_ports_of_all_ranks_are_disjoint(
    config: SidecarConfig, num_ranks: int, said: str | None
) -> None:
    """Cases 91, 93: PUB, replay and HTTP of all ranks have an address each, or every rank refuses in the
    same words.
    """
    refused = refusal(config, num_ranks)
    if said is None:
        assert refused is None
    else:
        assert refused is not None and refused.startswith(said)


def test_four_ranks_have_four_ports() -> None:
    """Case 91: base to base + 3, of every address."""
    sink = SinkConfig(endpoint="tcp://[::]:5557", replay_endpoint="tcp://[::1]:6000")
    config = SidecarConfig(sinks=(sink,), http_endpoint="http://[::1]:7000")
    assert [sink.endpoints_of(rank) for rank in range(4)] == [
        (f"tcp://[::]:{port}",) for port in range(5557, 5561)
    ]
    assert [sink.replay_endpoint_of(rank) for rank in (0, 3)] == [
        "tcp://[::1]:6000",
        "tcp://[::1]:6003",
    ]
    assert config.http_endpoint_of(2) == "http://[::1]:7002"
    alone = SinkConfig(endpoint="tcp://h:5557", add_dp_rank=False)
    assert alone.endpoints_of(3) == ("tcp://h:5557",)
    assert alone.replay_endpoint_of(3) == "tcp://127.0.0.1:5558"


@pytest.mark.parametrize(
    ("add_dp_rank", "target", "replay"),
    [
        (None, "tcp://h:1", "tcp://*:12"),
        (True, "tcp://h:4", "tcp://*:12"),
        (False, "tcp://h:1", "tcp://*:9"),
    ],
)
def test_ranks_have_their_router_in_common(
    add_dp_rank: bool | None, target: str, replay: str
) -> None:
    """Unless told otherwise the rank moves what it binds, not what it connects to."""
    sink = SinkConfig(
        mode="connect",
        endpoint="tcp://h:1",
        replay_endpoint="tcp://*:9",
        add_dp_rank=add_dp_rank,
    )
    assert sink.endpoints_of(3) == (target,)
    assert sink.replay_endpoint_of(3) == replay


@given(
    st.sampled_from(["127.0.0.1", "10.0.0.1"]),
    st.sampled_from(["*", "127.0.0.1", "10.0.0.1"]),
    st.integers(5550, 5562),
    st.tuples(*[st.none() | st.booleans()] * 2),
    st.integers(1, 6),
)
def test_no_rank_connects_to_what_a_rank_binds(
    target: str, host: str, port: int, moves: tuple[bool | None, bool | None], num_ranks: int
) -> None:
    """Whichever of the two moves: what is refused is what listing every address of every rank finds."""
    connecting = {"mode": "connect", "endpoint": f"tcp://{target}:5556", "add_dp_rank": moves[0]}
    binding = {"endpoint": f"tcp://{host}:{port}", "add_dp_rank": moves[1]}
    ranks = range(num_ranks)
    targets = {5556 + (rank if moves[0] else 0) for rank in ranks}
    bound = {port + (0 if moves[1] is False else rank) for rank in ranks}
    meet = (host == target or (host == "*" and target == "127.0.0.1")) and targets & bound
    said = refusal(sidecar(connecting, binding), num_ranks)
    assert (said is not None) == bool(meet)
    assert said is None or said.startswith("sinks[0].endpoint: ")


hosts = st.sampled_from(["*", "127.0.0.1", "10.0.0.1"])
ports = st.integers(5550, 5562)


@given(
    st.lists(st.tuples(hosts, ports, st.none() | st.tuples(hosts, ports)), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_ports_are_refused_just_when_two_ranks_meet(
    layout: list[tuple[str, int, tuple[str, int] | None]], num_ranks: int
) -> None:
    """What is said of ranges is what listing every socket of every rank finds."""
    taken: list[tuple[str, int]] = []
    for host, port, replay in layout:
        taken += [(host, port), *([replay] if replay is not None else [])]
    sockets = [(host, port + rank) for host, port in taken for rank in range(num_ranks)]
    meet = any(
        mine[1] == other[1] and (mine[0] == other[0] or "*" in (mine[0], other[0]))
        for place, mine in enumerate(sockets)
        for other in sockets[:place]
    )
    try:
        config = sidecar(
            *(
                {
                    "endpoint": f"tcp://{host}:{port}",
                    "replay_endpoint": replay and f"tcp://{replay[0]}:{replay[1]}",
                }
                for host, port, replay in layout
            )
        )
    except ConfigError:  # of one sink, already
        assert meet
        return
    assert (refusal(config, num_ranks) is not None) == meet


# ---------------------------------------------------------------------------------------- garbage

KEYS = st.sampled_from(
    [
        *SidecarConfig.__struct_fields__,
        *SinkConfig.__struct_fields__,
        *RelayConfig.__struct_fields__,
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(2**63), 2**64])
    | st.floats()
    | st.text()
    | st.sampled_from(["bind", "tcp://h:1", "ipc://\n", "kv@", "{", "sglang", "\ud800"])
    | st.datetimes()
)
GARBAGE = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS | st.text(), inner), max_leaves=12
)


@given(st.dictionaries(KEYS | st.text(), GARBAGE) | GARBAGE)
@example({"linger_s": 10**400})
@example({"sinks": [{"heartbeat_s": -(10**5000)}]})
@example({"sinks": [{"buffer_steps": 10**5000}]})
@example({"a\u2028b": 1})
def test_garbage_is_refused_in_one_line(data: Any) -> None:
    """Whatever a file may hold: a config, or one ConfigError of one printable line of bounded length."""
    for kind in (SidecarConfig, SinkConfig, RelayConfig, WorkerInfo, CurveConfig):
        try:
            read_config(kind, data)
            continue
        except ConfigError as error:
            said = str(error)
        assert said.splitlines() == [said]
        assert len(said) < 1000


WHOLE: dict[type[msgspec.Struct], dict[str, Any]] = {
    SidecarConfig: {},
    SinkConfig: {},
    WorkerInfo: {"block_size": 4},
    CurveConfig: {"secret_key": "a", "client_keys": "b"},
    RelayConfig: {"endpoint": "tcp://h:1", "worker": WorkerInfo(block_size=4)},
}
ODD: list[Any] = [
    *(None, True, 3, -1, 1.5, math.nan, "x", "", b"b", (), ("x",), [1], {}, {"a": 1}, object()),
    *(SinkConfig(), WorkerInfo(block_size=1)),
]


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in WHOLE for field in kind.__struct_fields__]
)
def test_a_field_of_another_type_is_refused_by_name(kind: type[msgspec.Struct], field: str) -> None:
    """In Python too, where nothing but us looks at types: what is taken can be written and read again,
    as it is on its way to the sidecar, and what is not is one ConfigError that begins with the field.
    """
    for odd in ODD:
        try:
            made = kind(**WHOLE[kind] | {field: odd})
        except ConfigError as error:
            said = str(error)
        else:
            assert msgspec.json.decode(msgspec.json.encode(made), type=kind) == made
            continue
        assert re.match(rf"{field}\b", said), odd


def test_a_sink_by_itself_is_not_several() -> None:
    """The message says what was wanted, not what Python could not do."""
    with pytest.raises(ConfigError, match=r"^sinks: SinkConfig\(.*is not a tuple of SinkConfig$"):
        SidecarConfig(sinks=SinkConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^sinks\[1\]: 'x' is not a SinkConfig$"):
        SidecarConfig(sinks=(SinkConfig(), "x"))  # type: ignore[arg-type]


def test_a_worker_says_what_a_topic_may() -> None:
    """Its rank, its model, its id, as text."""
    worker = WorkerInfo(
        block_size=1, hash_format=HashFormat.SGLANG, dp_rank=3, model="m", worker_id="w"
    )
    assert worker.facts() == {
        "model": "m",
        "served_model": "m",
        "dp_rank": "3",
        "worker_id": "w",
    }
