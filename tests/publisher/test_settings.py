"""publisher.config.settings: file, flags, environment and engines' JSON become one configuration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from publisher.config.config_file import load_config
from publisher.config.resolved import resolved
from publisher.config.settings import Settings, add_options, pod_facts, read_settings, unread
from publisher.config.sidecar_config import (
    ConfigError,
    CurveConfig,
    RelayConfig,
    SidecarConfig,
    SinkConfig,
    WorkerInfo,
)

POD = {"POD_IP": "10.1.2.3", "POD_NAME": "worker-0", "NAMESPACE": "kv"}
LINK = ("--link", "/run/link")
RELAY = ("--relay", "tcp://127.0.0.1:6000", "--block-size", "16")


def settings(*arguments: str, environ: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return read_settings(parser.parse_args(arguments), environ or {})


def config(*arguments: str, environ: dict[str, str] | None = None) -> SidecarConfig:
    return settings(*LINK, *arguments, environ=environ).config


def sink(*arguments: str) -> SinkConfig:
    (only,) = config(*arguments).sinks
    return only


def refusal(*arguments: str, environ: dict[str, str] | None = None) -> str:
    """What is said of it: one line."""
    with pytest.raises(ConfigError) as error:
        settings(*arguments, environ=environ)
    assert str(error.value).splitlines() == [str(error.value)]
    return str(error.value)


def engines(**keys: Any) -> tuple[str, str]:
    return ("--kv-events-config", json.dumps(keys))


# ---------------------------------------------------------------------------------------- sources


def test_nothing_said_is_the_default() -> None:
    """A link, and defaults for all else."""
    assert settings(*LINK) == Settings(Path("/run/link"), SidecarConfig(), {}, forever=False)
    assert settings(*LINK, "--forever", environ=POD).forever
    assert settings(*LINK, environ=POD).facts == pod_facts(POD)


def test_a_file_says_the_same_in_json_and_toml(tmp_path: Path) -> None:
    """Both have the keys of SidecarConfig; the suffix says which it is."""
    in_toml = tmp_path / "sidecar.toml"
    in_toml.write_text(
        'linger_s = 2\npersist = "seq"\n[[sinks]]\nname = "a"\ntopic = "é"\n'
        '[[sinks]]\nmode = "connect"\nendpoint = ["tcp://r:1", "tcp://s:1"]\n'
        '[curve]\nsecret_key = "k"\nclient_keys = "c"\n'
    )
    expected = SidecarConfig(
        linger_s=2.0,
        persist="seq",
        sinks=(
            SinkConfig(name="a", topic="é"),
            SinkConfig(mode="connect", endpoint=("tcp://r:1", "tcp://s:1")),
        ),
        curve=CurveConfig(secret_key="k", client_keys="c"),
    )
    in_json = tmp_path / "sidecar.json"
    in_json.write_bytes(msgspec.json.encode(expected))
    assert config("--config", str(in_toml)) == expected == config("--config", str(in_json))


def test_flags_are_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    """Each key comes from the first that says it."""
    for name in ("file", "variable"):
        (tmp_path / name).touch()
    file = tmp_path / "sidecar.json"
    said = {
        "sinks": [{"topic": "file", "hwm": 7, "endpoint": "tcp://127.0.0.1:7000"}],
        "log_level": "debug",
        "log_format": "json",
        "curve": {"secret_key": str(tmp_path / "file"), "client_keys": "c"},
    }
    file.write_text(json.dumps(said))
    made = config(
        *("--config", str(file), "--topic", "flag", "--log-level", "error"),
        environ={"KVEVENTS_CURVE_SECRET_KEY": str(tmp_path / "variable")},
    )
    assert made == SidecarConfig(
        sinks=(SinkConfig(topic="flag", hwm=7, endpoint="tcp://127.0.0.1:7000"),),
        log_level="error",
        log_format="json",
        curve=CurveConfig(secret_key=str(tmp_path / "variable"), client_keys="c"),
    )


def test_every_flag_sets_its_key(tmp_path: Path) -> None:
    """Of the sink, and of the sidecar; `none` is None where that is a choice."""
    assert config(
        *("--mode", "connect", "--endpoint", "tcp://a:1", "--endpoint", "tcp://b:1"),
        *("--replay-endpoint", "tcp://127.0.0.1:9", "--topic", "t", "--state-dir", str(tmp_path)),
        *("--http-endpoint", "http://127.0.0.1:80", "--log-format", "json", "--log-level", "debug"),
    ) == SidecarConfig(
        sinks=(
            SinkConfig(
                mode="connect",
                endpoint=("tcp://a:1", "tcp://b:1"),
                replay_endpoint="tcp://127.0.0.1:9",
                topic="t",
            ),
        ),
        state_dir=str(tmp_path),
        http_endpoint="http://127.0.0.1:80",
        log_format="json",
        log_level="debug",
    )
    made = config("--http-endpoint", "none", "--replay-endpoint", "none", "--endpoint", "ipc://x")
    assert made.http_endpoint is None
    assert made.sinks[0] == SinkConfig(name="sink0", endpoint="ipc://x", replay_endpoint=None)


def test_a_relay_is_told_who_the_worker_is(tmp_path: Path) -> None:
    """By flags, by a file, or by a file that flags change; then there is no link."""
    told = settings(
        *RELAY,
        *("--relay-replay-endpoint", "tcp://127.0.0.1:6001", "--dp-rank", "1", "--dp-size", "2"),
        *("--model", "m", "--worker-id", "w", "--replay-endpoint", "none"),
    )
    silent = settings(*RELAY, "--relay-replay-endpoint", "none").config.relay
    assert silent is not None and silent.replay_endpoint is None
    relay = RelayConfig(
        endpoint="tcp://127.0.0.1:6000",
        replay_endpoint="tcp://127.0.0.1:6001",
        worker=WorkerInfo(block_size=16, dp_rank=1, dp_size=2, model="m", worker_id="w"),
    )
    assert told.link is None
    assert told.config == SidecarConfig(relay=relay, sinks=(SinkConfig(replay_endpoint=None),))
    file = tmp_path / "sidecar.json"
    file.write_bytes(msgspec.json.encode(told.config))
    assert settings("--config", str(file)) == told
    changed = settings("--config", str(file), "--dp-rank", "0").config.relay
    assert changed is not None
    assert changed.worker.dp_rank == 0
    assert changed.endpoint == relay.endpoint


def test_the_environment_says_what_is_of_a_pod() -> None:
    """POD_IP, POD_NAME and NAMESPACE; empty ones are not there."""
    assert pod_facts(POD) == {"pod_ip": "10.1.2.3", "pod_name": "worker-0", "namespace": "kv"}
    assert pod_facts({"POD_IP": "", "NAMESPACE": "kv"}) == {"namespace": "kv"}


def test_a_file_can_say_none(tmp_path: Path) -> None:
    """TOML has no null: the text "none" is what flags take too."""
    file = tmp_path / "sidecar.toml"
    file.write_text('http_endpoint = "none"\n[[sinks]]\nreplay_endpoint = "none"\n')
    made = config("--config", str(file))
    assert (made.http_endpoint, made.sinks[0].replay_endpoint) == (None, None)


def test_a_file_is_loaded_as_it_is_read(tmp_path: Path) -> None:
    """For `spawn()`: `load_config` gives what --config would; what is wrong names `path`, or the key."""
    file = tmp_path / "sidecar.toml"
    file.write_text('linger_s = 2\n[[sinks]]\nmode = "connect"\nendpoint = "tcp://r:1"\n')
    assert load_config(file) == load_config(str(file)) == config("--config", str(file))
    file.write_text("linger_s = 99")
    with pytest.raises(ConfigError, match=rf"^linger_s: 99\.0 is not in 0\.\.60 \(in {file}\)$"):
        load_config(file)
    for path, said in (
        (tmp_path / "missing.json", rf"^path: {tmp_path}/missing\.json: No such file"),
        (tmp_path / "a.yaml", r"^path: .*/a\.yaml: ends in neither \.json nor \.toml$"),
        ("-", "^path: - is no file$"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(path)


def test_a_file_is_named_for_its_own_keys_alone(tmp_path: Path) -> None:
    """Not for what a flag or a variable says, nor for a key that is not in it."""
    file = tmp_path / "sidecar.toml"
    file.write_text('log_level = "info"\n[[sinks]]\ntopic = "{pod_ip}"')
    given = ("--check", "--config", str(file))
    assert refusal(*given).endswith(f"the environment has no POD_IP (in {file})")
    for flags in (("--topic", "{"), ("--http-endpoint", "x")):
        assert str(file) not in refusal(*given, *flags)


def test_variables_that_nobody_reads_are_named() -> None:
    """One line for those that look like ours; not for what Kubernetes sets of a service, nor for what is
    read.
    """
    read = ["POD_IP", "POD_NAME", "NAMESPACE"]
    read += ["KVEVENTS_CURVE_SECRET_KEY", "KVEVENTS_CURVE_CLIENT_KEYS"]
    links = [
        *("KVEVENTS_SERVICE_HOST", "KVEVENTS_SERVICE_PORT", "KVEVENTS_SERVICE_PORT_PUB"),
        *("KVEVENTS_PORT", "KVEVENTS_PORT_5557_TCP", "KVEVENTS_PORT_5557_TCP_ADDR"),
        "KVEVENTS_EPP_SERVICE_HOST",
    ]
    harmless = dict.fromkeys([*read, *links, "PATH", "MY_KVEVENTS_X", "kvevents_x"], "x")
    assert unread(harmless) is None
    these = f"not read; of the environment these are: {', '.join(read)}"
    assert unread(harmless | {"KVEVENTS_STATE_DIR": "/x"}) == f"KVEVENTS_STATE_DIR is {these}"
    misspelled = {"KVEVENTS_CURVE_SECRETKEY": "/x", "KVEVENTS_": ""}
    assert unread(misspelled) == f"KVEVENTS_, KVEVENTS_CURVE_SECRETKEY are {these}"
    many = {f"KVEVENTS_\n{number}" + "x" * 999: "" for number in range(99)}
    said = unread(many)
    assert said is not None and said.isprintable() and len(said) < 1000
    assert "91 more are not read" in said


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ((), []),
        (("--dp-size", "3"), [0, 1, 2]),
        (("--dp-size", "3", "--dp-rank", "1"), [1]),
        (("--dp-rank", "2"), [2]),
        (("--model", "m"), [0]),
        (("--dp-size", "40"), list(range(16))),
        ((*RELAY, "--dp-rank", "1", "--dp-size", "4"), [1]),
        (RELAY, [0]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_the_ranks_that_were_asked_for_are_shown(
    arguments: tuple[str, ...], ranks: list[int]
) -> None:
    """Those of --dp-size, sixteen at most, or the one of --dp-rank; a relay's own; none if none is told
    of, or without --check.
    """
    apart = ("--endpoint", "tcp://*:7000", "--replay-endpoint", "tcp://*:8000")
    made = settings(*apart, *arguments, "--check")
    assert [worker.dp_rank for worker in made.shown] == ranks
    assert settings(*LINK, *apart).shown == settings(*RELAY, *apart).shown == ()


def test_what_a_rank_comes_to_is_told() -> None:
    """Its addresses, moved, and its topic where all that it names is known by now."""
    given = (*("--topic", "kv@{pod_ip}:{port}@{model}"), "--endpoint", "tcp://*:7000")
    made = settings("--check", *given, "--model", "m", "--dp-rank", "2", environ=POD)
    (worker,) = made.shown
    assert resolved(made.config, worker, made.facts) == {
        "dp_rank": 2,
        "sinks": [
            {
                "name": "sink0",
                "endpoints": ("tcp://*:7002",),
                "replay_endpoint": "tcp://127.0.0.1:5560",
                "topic": "kv@10.1.2.3:7002@m",
            }
        ],
        "http_endpoint": "http://127.0.0.1:0",
    }
    for topic, endpoint in (("{port}", "tcp://*:0"), ("{worker_id}", "tcp://*:7000")):
        made = settings("--check", "--topic", topic, "--endpoint", endpoint, "--model", "m")
        (told,) = resolved(made.config, made.shown[0], made.facts)["sinks"]
        assert "topic" not in told
    said = refusal("--check", "--topic", "kv@h@{model}", "--model", "a@b")
    assert said.startswith("--topic: {model} of 'kv@h@{model}' is 'a@b'; llm-d splits")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--link: needed, or --relay"),
        ((*LINK, "--block-size", "4"), "--block-size: is for --relay; the worker at a link says"),
        ((*LINK, "--relay-replay-endpoint", "x"), "--relay-replay-endpoint: is for --relay"),
        (("--relay-replay-endpoint", "x", "--check"), "--relay-replay-endpoint: is for --relay"),
        (("--relay", "tcp://h:1"), "--block-size: needed, and not there"),
        ((*RELAY, "--block-size", "0"), "--block-size: 0 is below 1"),
        ((*RELAY, "--dp-rank", "-1"), "--dp-rank: -1 is not in 0..2147483647"),
        ((*RELAY, "--dp-rank", "2", "--dp-size", "2"), "--dp-size: 2 is not above dp_rank 2"),
        ((*RELAY, "--relay", "tcp://*:1"), "--relay: 'tcp://*:1' cannot be connected to"),
        ((*RELAY, "--relay-replay-endpoint", "x"), "--relay-replay-endpoint: 'x' is neither"),
        ((*RELAY, "--relay", "tcp://localhost:5557"), "--relay: tcp://localhost:5557 is our own"),
        ((*RELAY, "--topic", "{model}"), "--topic: {model} of '{model}' has no value"),
        (
            (*RELAY, "--topic", "kv@x@{model}", "--model", "a@b"),
            "--topic: {model} of 'kv@x@{model}' is 'a@b'; llm-d splits",
        ),
        ((*LINK, "--endpoint", "x"), "--endpoint: 'x' is neither tcp://HOST:PORT nor ipc://PATH"),
        ((*LINK, "--endpoint", "ipc://x", "--endpoint", "ipc://y"), "--endpoint: ('ipc://x', "),
        ((*LINK, "--mode", "connect", "--endpoint", "tcp://*:1"), "--endpoint: 'tcp://*:1' cannot"),
        ((*LINK, "--replay-endpoint", "x"), "--replay-endpoint: 'x' is neither"),
        ((*LINK, "--topic", "{"), "--topic: '{' has a { alone"),
        (
            (*LINK, "--mode", "connect", "--topic", "kv@h:{port}@m"),
            "--topic: {port} of 'kv@h:{port}@m': the port of what it connects to says nothing",
        ),
        (
            (*LINK, "--topic", "kv@{pod_ip}@m"),
            "--topic: {pod_ip} of 'kv@{pod_ip}@m' has no value: the environment has no POD_IP",
        ),
        ((*LINK, "--http-endpoint", "x"), "--http-endpoint: 'x' is not http://HOST:PORT"),
        ((*LINK, "--state-dir", ""), "--state-dir: '' is not a path"),
        (
            ("--check", "--dp-size", "2", "--replay-endpoint", "tcp://*:5558"),
            "--replay-endpoint: tcp://*:5558 (ranks 0..1) is on the address of sinks[0].endpoint",
        ),
        (("--check", "--dp-size", "2"), "sinks[0].replay_endpoint: tcp://127.0.0.1:5558 (ranks"),
        (("--check", "--dp-size", "0"), "--dp-size: 0 is not in 1..2147483648"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_a_flag_that_cannot_be_is_named(arguments: tuple[str, ...], said: str) -> None:
    """Case 106: the message begins with the flag as it was written, then says the value and why."""
    assert refusal(*arguments).startswith(said)


def test_flags_of_one_sink_are_refused_with_several(tmp_path: Path) -> None:
    """Which one is meant is not guessed; and there is one source."""
    file = tmp_path / "sidecar.json"
    file.write_text('{"sinks": [{"endpoint": "ipc://a"}, {}]}')
    given = (*LINK, "--config", str(file))
    assert refusal(*given, "--topic", "x") == "--topic: is for one sink, and --config has 2"
    assert refusal(*given, *engines()) == "--kv-events-config: --config has sinks already"
    file.write_text('{"relay": {"endpoint": "tcp://h:1", "worker": {"block_size": 1}}}')
    assert refusal(*given) == "--link: --config has a relay, and there is one source"


def test_what_is_secret_is_not_told(tmp_path: Path) -> None:
    """A variable of a secret is a path; what is none, perhaps the key itself, is refused unseen. The
    clients' keys can be said there too.
    """
    key = "Xk(1y-{W0[#vN" * 3
    environ = {"KVEVENTS_CURVE_SECRET_KEY": key}
    said = refusal(*LINK, environ=environ)
    assert said.startswith("KVEVENTS_CURVE_SECRET_KEY: no such path; it is where the key is")
    assert key[:5] not in said
    environ = {"KVEVENTS_CURVE_SECRET_KEY": str(tmp_path)}
    assert refusal(*LINK, environ=environ) == "curve.client_keys: needed, and not there"
    environ["KVEVENTS_CURVE_CLIENT_KEYS"] = str(tmp_path)
    curve = CurveConfig(secret_key=str(tmp_path), client_keys=str(tmp_path))
    assert config(environ=environ).curve == curve


def test_a_topic_of_a_pod_is_taken_where_there_is_one() -> None:
    """Fields of the pod have values by the environment; those of the worker and its port come later."""
    topic = "kv@{pod_ip}:{port}@{model}/{pod_name}.{namespace}"
    assert config("--topic", topic, environ=POD).sinks[0].topic == topic


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", b"{", "--config: {file}: Input data was truncated"),
        ("a.json", b"", "--config: {file}: Input data was truncated"),
        ("a.json", b"[]", "--config: {file}: [] is not an object"),
        ("a.json", b'{"a": "\xff"}', "--config: {file}: Invalid UTF-8"),
        ("a.json", b'{"linger_s": NaN}', "--config: {file}: JSON is malformed"),
        ("a.json", b'{"linger_s": 1e999}', "--config: {file}: Number out of range"),
        ("a.json", b'{"hwm": 1' + b"0" * 5000 + b"}", "--config: {file}: "),
        ("a.json", b'{"sinks": ' + b"[" * 100_000, "--config: {file}: nested too deeply"),
        ("a.json", b" " * (1 << 20) + b"{}", "--config: {file}: longer than 1048576 bytes"),
        ("a.toml", b"a = ", "--config: {file}: Invalid value (at end of document)"),
        ("a.toml", b"\xff", "--config: {file}: 'utf-8' codec can't decode"),
        ("a.toml", b"linger_s = nan", "linger_s: nan is not in 0..60 (in {file})"),
        ("a.toml", b"linger_s = inf", "linger_s: inf is not in 0..60"),
        ("a.toml", b"linger_s = 1" + b"0" * 5000, "--config: {file}: "),
        ("a.toml", b"linger_s = 2000-01-01", "linger_s: Expected `float`, got `date"),
        ("a.toml", b"sinks = " + b"[" * 100_000, "--config: {file}: nested too deeply"),
        ("a.toml", b"sinks = [{hwm = 0}]", "sinks[0].hwm: 0 is not in 1..2147483647 (in {file})"),
        ("a.toml", b"a" + b".a" * 300 + b" = 1", "a: no such key"),
        ("a.toml", b'"a\\nb" = 1', "a b: no such key"),
        ("a.toml", b"relay = 1", "relay: Expected `object | null`, got `int` (in {file})"),
        (
            "a.toml",
            b'[relay]\nendpoint = "tcp://h:1"\nworker.block_size = "x"',
            "relay.worker.block_size: Expected `int`, got `str` (in {file})",
        ),
        ("a.yaml", b"", "--config: {file}: ends in neither .json nor .toml"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, text: bytes, said: str) -> None:
    """Cut short, not UTF-8, nested without end, of numbers beyond all bounds, too long, of no known kind:
    the message says which, and the file, in one line of a bounded length.
    """
    file = tmp_path / name
    file.write_bytes(text)
    message = refusal("--check", "--config", str(file))
    assert message.startswith(said.replace("{file}", str(file)))
    assert len(message) < 600


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Not there, a folder, without end."""
    missing = tmp_path / "missing.json"
    folder = tmp_path / "folder.json"
    folder.mkdir()
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    for path, said in (
        (missing, f"--config: {missing}: No such file or directory"),
        (folder, f"--config: {folder}: Is a directory"),
        (endless, f"--config: {endless}: longer than 1048576 bytes"),
    ):
        assert refusal(*LINK, "--config", str(path)) == said


# ------------------------------------------------------------------------------------ engines' JSON

ENGINES = SinkConfig(name="sink0", endpoint="tcp://*:5557", replay_endpoint=None, add_dp_rank=True)
"""What SGLang 0.5.23 and vLLM 0.33 do when they are told nothing but to publish."""

EVERY_KEY = """{
    "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5600",
    "replay_endpoint": "tcp://*:5700", "buffer_steps": 5, "hwm": 6, "max_queue_size": 7,
    "topic": "kv@{pod_ip}@m"
}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"publisher": "zmq"}', ENGINES),
        (
            '{"publisher":"zmq","topic":"kv-events"}',
            SinkConfig(endpoint="tcp://*:5557", replay_endpoint=None, topic="kv-events"),
        ),
        (
            EVERY_KEY,
            SinkConfig(
                endpoint="tcp://*:5600",
                replay_endpoint="tcp://*:5700",
                buffer_steps=5,
                hwm=6,
                topic="kv@{pod_ip}@m",
            ),
        ),
        ('{"publisher": "zmq", "format": "default", "bind": null}', ENGINES),
        (
            '{"endpoint": "tcp://*:5557", "dialect": "kthena"}',
            SinkConfig(
                dialect="kthena", endpoint="tcp://*:5557", replay_endpoint=None, add_dp_rank=True
            ),
        ),
        (
            '{"endpoint": "tcp://*:5557", "format": "dynamo"}',
            SinkConfig(
                dialect="dynamo", endpoint="tcp://*:5557", replay_endpoint=None, add_dp_rank=True
            ),
        ),
        (
            '{"publisher": "zmq", "bind": true, "endpoint": "tcp://127.0.0.1:5557"}',
            SinkConfig(replay_endpoint=None),
        ),
        (
            '{"publisher": "zmq", "bind": false, "endpoint": "tcp://127.0.0.1:5557"}',
            SinkConfig(mode="connect", replay_endpoint=None),
        ),
        (
            '{"endpoint": ["tcp://a:1", "tcp://b:1"], "name": "x", "token_ids": false}',
            SinkConfig(
                name="x",
                token_ids=False,
                mode="connect",
                endpoint=("tcp://a:1", "tcp://b:1"),
                replay_endpoint=None,
            ),
        ),
    ],
)
def test_what_engines_are_told_is_taken_as_it_is(text: str, expected: SinkConfig) -> None:
    """Keys and defaults are SGLang's and vLLM's; a sink's own keys may be there too."""
    made = config("--kv-events-config", text, environ=POD).sinks
    expected = msgspec.structs.replace(expected, name=expected.name or "sink0", add_dp_rank=True)
    assert made == (expected,)


def test_engines_add_the_rank_to_every_port() -> None:
    """As theirs do, also to a router's; it can be said otherwise, and "none" can be said too."""
    keys = {"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5558"}
    assert sink(*engines(**keys)).endpoints_of(2) == ("tcp://router:5559",)
    assert sink(*engines(**keys, add_dp_rank=False)).endpoints_of(2) == ("tcp://router:5557",)
    assert sink(*engines(**keys, add_dp_rank=None)).replay_endpoint_of(2) == "tcp://*:5560"
    assert sink(*engines(**keys | {"replay_endpoint": "none"})).replay_endpoint is None


@pytest.mark.parametrize(
    ("endpoint", "mode"),
    [
        ("tcp://*:5557", "bind"),
        ("tcp://0.0.0.0:5557", "bind"),
        ("tcp://[::]:5557", "bind"),
        ("tcp://[::1]:5557", "bind"),
        ("tcp://127.0.0.1:*", "bind"),
        ("ipc:///run/kv", "bind"),
        ("tcp://router:5557", "connect"),
        ("tcp://10.0.0.1:5557", "connect"),
    ],
)
def test_engines_bind_and_connect_by_the_address(endpoint: str, mode: str) -> None:
    """Case 95: where nothing is said, theirs is the rule; what is said goes before."""
    assert sink(*engines(publisher="zmq", endpoint=endpoint)).mode == mode
    assert sink(*engines(endpoint=endpoint, mode="bind")).mode == "bind"
    assert sink(*engines(endpoint=endpoint), "--mode", "bind").mode == "bind"


def test_two_sided_connect_is_refused_where_it_is_likely() -> None:
    """Case 95: on loopback engines would connect, routers connect too, and nothing would ever arrive; so
    there the mode has to be said.
    """
    for host in ("127.0.0.1", "localhost"):
        given = engines(publisher="zmq", endpoint=f"tcp://{host}:5557")
        assert refusal(*LINK, *given) == (
            f"--kv-events-config: endpoint: 'tcp://{host}:5557' without a mode: SGLang and vLLM connect"
            " there, and so do routers, so nothing would ever arrive;"
            ' add "mode": "bind", or "mode": "connect"'
        )
        assert sink(*given, "--mode", "bind").mode == "bind"
        assert sink(*given, "--endpoint", "tcp://*:1").endpoint == "tcp://*:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Input data was truncated"),
        ("[]", "[] is not an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"publisher": "null"}', "publisher: 'null', and nothing would be published"),
        ('{"publisher": null}', "publisher: None, and nothing would be published"),
        ('{"publisher": "kafka"}', "publisher: 'kafka' is not one of zmq"),
        (
            '{"publisher": "zmq", "enable_kv_cache_events": false}',
            "enable_kv_cache_events: False, and nothing would be published",
        ),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events: 1 is neither true nor false"),
        ('{"endpont": "x"}', "endpont: no such key; did you mean endpoint?"),
        ('{"buffer_step": 1}', "buffer_step: no such key; did you mean buffer_steps?"),
        ('{"a\\nb": 1}', "a b: no such key; there are name, dialect,"),
        ('{"endpoint": "5557"}', "endpoint: '5557' is neither tcp://HOST:PORT nor ipc://PATH"),
        ('{"endpoint": "inproc://x"}', "endpoint: 'inproc://x' is neither"),
        ('{"endpoint": null}', "endpoint: Expected `str | array`, got `null`"),
        ('{"replay_endpoint": "tcp://*:5557"}', "replay_endpoint: tcp://*:5557 is the endpoint"),
        ('{"hwm": 0}', "hwm: 0 is not in 1..2147483647"),
        ('{"buffer_steps": "x"}', "buffer_steps: Expected `int`, got `str`"),
        ('{"max_queue_size": "x"}', "max_queue_size: 'x' is not an int"),
        ('{"max_queue_size": -1}', "max_queue_size: -1 is below 0"),
        ('{"format": "xml"}', "format: 'xml' is not one of default"),
        ('{"format": ["x"]}', "format: ['x'] is not one of default"),
        ('{"bind": 1}', "bind: 1 is neither true nor false"),
        ('{"bind": true, "mode": "connect"}', "bind: True, and mode is 'connect'"),
        ('{"mode": "x"}', "mode: 'x' is not one of bind, connect"),
        ('{"dialect": "x"}', "dialect: 'x' is not one of sglang"),
        ('{"add_dp_rank": "no"}', "add_dp_rank: Expected `bool | null`, got `str`"),
        ('{"endpoint": "tcp://r:1", "topic": "kv@h:{port}@m"}', "topic: {port} of 'kv@h:{port}@m'"),
    ],
)
def test_what_engines_json_cannot_say_is_named(text: str, said: str) -> None:
    """Case 106: enabled but silent, unknown keys, values out of bounds: the option, key and reason."""
    message = refusal(*LINK, "--kv-events-config", text)
    assert message.startswith(f"--kv-events-config: {said}")


# ---------------------------------------------------------------------------------------- garbage

KEYS = st.sampled_from(
    ["publisher", "endpoint", "mode", "bind", "format", "hwm", "topic", "sinks", "relay", "curve"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["zmq", "bind", "connect", "tcp://*:1", "tcp://[::1]:1", "{", "10" * 3000]),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(KEYS | st.text(), VALUES).map(json.dumps)
GIVEN = st.lists(
    st.sampled_from(
        [
            ("--topic", "t"),
            ("--endpoint", "ipc://x"),
            ("--mode", "bind"),
            ("--relay", "tcp://h:1"),
            ("--block-size", "4"),
            ("--check",),
        ]
    ),
    max_size=3,
).map(lambda several: [part for one in several for part in one])


@given(DOCUMENTS | st.text(), DOCUMENTS, GIVEN, st.booleans())
@example("{", "{}", [], False)
@example('{"relay": 1}', '{"relay": 1}', ["--relay", "tcp://h:1", "--block-size", "4"], False)
@example('{"sinks": 1}', '{"sinks": [1]}', ["--topic", "t"], False)
@example("{}", '{"curve": []}', [], False)
def test_no_document_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    document: str,
    given: list[str],
    is_engines: bool,
) -> None:
    """Whatever JSON says, for a file or an engine, with flags that change it: settings, or one line."""
    file = tmp_path_factory.getbasetemp() / "garbage.json"
    file.write_bytes((document if is_engines else text).encode(errors="surrogatepass"))
    arguments = ["--config", str(file), *given]
    if is_engines:
        arguments += [f"--kv-events-config={text}"]
    environ = {"KVEVENTS_CURVE_SECRET_KEY": "/"}
    try:
        settings(*arguments, environ=environ)
        return
    except ConfigError as error:
        said = str(error)
    assert said.splitlines() == [said]
    assert len(said) < 1000


@given(st.binary(), st.sampled_from(["json", "toml"]))
@example(b"a = 1979-05-27T07:32:00Z", "toml")
def test_no_bytes_are_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    """Any bytes as a file of either kind: settings, or one line."""
    file = tmp_path_factory.getbasetemp() / f"bytes.{suffix}"
    file.write_bytes(data)
    try:
        settings(*LINK, "--config", str(file))
        return
    except ConfigError as error:
        said = str(error)
    assert said.splitlines() == [said]
    assert len(said) < 600


def test_a_format_is_no_other_dialect() -> None:
    """What SGLang calls a format is a dialect, and there is one of a sink; twice the same is one."""
    for told in (
        '{"format": "dynamo", "dialect": "llm-d"}',
        '{"format": "default", "dialect": "vllm"}',
    ):
        said = json.loads(told)
        message = refusal(*LINK, "--kv-events-config", told)
        wanted = f"format: {said['format']!r}, and dialect is {said['dialect']!r}"
        assert message == f"--kv-events-config: {wanted}"
    both = '{"format": "dynamo", "dialect": "dynamo", "endpoint": "tcp://*:5557"}'
    assert settings(*LINK, "--kv-events-config", both).config.sinks[0].dialect == "dynamo"


@pytest.mark.parametrize("flag", ["--model", "--worker-id"])
def test_what_a_sink_says_of_the_worker_is_needed(flag: str) -> None:
    """Before any socket is open: of a relay's worker nobody else will tell it."""
    said = {"--model": "m", "--worker-id": "w"}
    relay = ("--relay", "tcp://h:1", "--block-size", "4", "--dialect", "mooncake-store")
    del said[flag]
    (other,) = said.items()
    name = flag.removeprefix("--").replace("-", "_")
    assert f"'mooncake' names the worker's {name}" in refusal(*relay, *other)
