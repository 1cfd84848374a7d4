"""docs/configuration.md says what there is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from publisher_rig import LOOPBACK, insert, make_cache, short_folder

from publisher import (
    ConfigError,
    CurveConfig,
    RelayConfig,
    Respawn,
    SidecarConfig,
    SidecarState,
    SinkConfig,
    WorkerInfo,
    listen,
    load_config,
    read_config,
    spawn,
)
from publisher.cli import main
from publisher.config.sidecar_config import check_ports
from publisher.config.topic import FIELDS, topic_fields
from publisher.worker.client import DEFAULT_RING_BYTES

DOC = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


def section(heading: str) -> str:
    return DOC.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(heading: str) -> dict[str, str]:
    """The table under a heading: defaults by key."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section(heading), re.MULTILINE))


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file at the top."""
    found = re.search(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path / "sidecar.toml"
    file.write_text(found[1])
    return file


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("The sidecar", SidecarConfig),
        ("A sink", SinkConfig),
        ("An engine's own publisher: relay", RelayConfig),
        ("CURVE", CurveConfig),
    ],
)
def test_every_key_is_there_with_its_default(heading: str, kind: type[msgspec.Struct]) -> None:
    """Keys and defaults of the tables are those of the configuration, no more and no fewer."""
    told = rows(heading)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert told.keys() == fields.keys()
    for name, default in told.items():
        field = fields[name]
        if name in ("sinks", "name"):  # said in words
            continue
        if name == "replay_endpoint" and kind is SinkConfig:
            connecting = SinkConfig(mode="connect").replay_endpoint
            assert default == f'`"{SinkConfig().replay_endpoint}"` to bind, none to connect'
            assert connecting is None
            continue
        if field.required:
            assert default == "needed", name
        elif field.default is msgspec.UNSET:
            assert default == "of the dialect", name
        elif field.default is None:
            assert default == "none", name
        else:
            assert default == f"`{msgspec.json.encode(field.default).decode()}`", name


def test_topic_fields_are_all_told() -> None:
    """The table of sinks names every field that a topic may have, and each is defined."""
    (row,) = re.findall(r"^\| `topic` .*$", DOC.read_text(), re.MULTILINE)[:1]
    assert set(re.findall(r"`\{(\w+)\}`", row)) == set(FIELDS)
    defined = "".join(re.findall(r"^\| (`\{.*?) \| ", section("A sink"), re.MULTILINE))
    assert sorted(re.findall(r"`\{(\w+)\}`", defined)) == sorted(FIELDS)


def test_the_example_is_one(example: Path) -> None:
    """The TOML at the top can be read; eight ranks of one host can have it, and their routers see one
    address each, the same.
    """
    config = load_config(example)
    routers, llm_d = config.sinks
    assert (routers.name, llm_d.name) == ("routers", "llm-d")
    assert topic_fields(llm_d.topic) == ("pod_ip", "model")
    for rank in range(8):
        check_ports(config, WorkerInfo(block_size=16, dp_rank=rank, dp_size=8))
        assert llm_d.endpoints_of(rank) == llm_d.endpoints
        assert llm_d.replay_endpoint_of(rank) == f"tcp://*:{5577 + rank}"


def test_the_example_is_checked_as_it_says(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command line prints the sockets and topics of four ranks, and needs POD_IP."""
    (line,) = re.findall(r"```sh\n(POD_IP=.*)\n```", DOC.read_text())
    variable, program, *arguments = shlex.split(line)
    assert program == "kvevents"
    monkeypatch.chdir(example.parent)
    monkeypatch.delenv("POD_IP", raising=False)
    with pytest.raises(SystemExit):
        main(arguments)
    assert "the environment has no POD_IP" in capsys.readouterr().err
    monkeypatch.setenv(*variable.split("="))
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)["resolved"]
    assert [one["dp_rank"] for one in told] == [0, 1, 2, 3]
    assert {one["sinks"][1]["topic"] for one in told} == {"kv@10.0.0.7:8000@org/model"}


def test_a_mount_is_refused_and_a_folder_in_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of mode 0777, as an emptyDir is, cannot be the link's: the error says what can. The
    example's folder in it is made with mode 0700, and has the socket that the text names.
    """
    (example,) = re.findall(r"^sidecar = (listen\(.*\))$", DOC.read_text(), re.MULTILINE)
    (path,) = re.findall(r"--link (\S+) --forever", DOC.read_text())
    worker = WorkerInfo(block_size=16)
    with short_folder() as folder:
        mount = folder / "mount"
        mount.mkdir()
        mount.chmod(0o777)
        said = r"mode 0777, which is above 0700; give a folder inside it, which is made, or mode="
        with pytest.raises(ValueError, match=said):
            listen(worker, mount)
        code = example.replace("/run/kvevents", str(mount))
        with eval(code, {"listen": listen, "worker": worker}) as sidecar:
            assert str(sidecar.link) == path.replace("/run/kvevents", str(mount))
            assert (mount / "link").stat().st_mode & 0o777 == 0o700


def test_the_numbers_are_so() -> None:
    """Of the respawn policy and the ring."""
    text = section("What is started again, and what it takes")
    policy = Respawn()
    for said in (
        f"after {policy.first_s:g} s, then",
        f"at most {policy.most_s:g} s",
        f"lived for {policy.steady_s:g} s",
        f"After {policy.attempts} in a row",
        f"`sidecar.state` is `{SidecarState.GIVEN_UP}`",
        f"{DEFAULT_RING_BYTES >> 20} MiB",
    ):
        assert said in text.replace("\n", " "), said


@pytest.mark.integration
def test_the_subscriber_of_the_curve_example_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are made by the commands that are shown; a subscriber as shown gets what is published."""
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^kvevents (keygen .*?)(?: +#.*)?$", section("CURVE"), re.MULTILINE)
    for command in commands:
        assert main(shlex.split(command)) == 0
    (tmp_path / "clients").mkdir()
    (tmp_path / "router-a.key").rename(tmp_path / "clients" / "router-a.key")
    (tmp_path / "sidecar.key").write_bytes((tmp_path / "keys" / "sidecar.key").read_bytes())
    (code,) = re.findall(r"```python\n(.*?)```", section("CURVE"), re.DOTALL)
    config = SidecarConfig(
        sinks=(SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK),),
        state_dir=str(tmp_path / "state"),
        curve=CurveConfig(secret_key="keys/sidecar.key_secret", client_keys="clients"),
    )
    cache = make_cache()
    with spawn(WorkerInfo(block_size=cache.page_size), config) as sidecar:
        insert(cache, range(8))
        assert sidecar.pump(cache)
        (bound,) = sidecar.client.sinks
        capsys.readouterr()
        addresses = iter((bound.endpoint, str(bound.replay_endpoint)))
        exec(re.sub(r"tcp://worker-0:\d+", lambda _: next(addresses), code), {})
    assert capsys.readouterr().out.startswith("[Batch(seq=0")


def test_what_is_refused_is_refused_in_those_words() -> None:
    """The error that is quoted at the top is that error."""
    with pytest.raises(ConfigError) as error:
        read_config(SidecarConfig, {"sinks": [{}, {"hwm": 0}]})
    assert f"`{error.value}`" in DOC.read_text().replace("\n", " ")
