"""publisher.cli: exit codes, one line for what is wrong, and leaving quietly."""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from publisher_rig import (
    ENVIRONMENT,
    LOOPBACK,
    PATIENCE_S,
    insert,
    kvevents,
    make_cache,
    short_folder,
    start_kvevents,
)

import publisher
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main
from publisher.config.sidecar_config import RelayConfig, read_config
from publisher.demo.trace import read_trace

GOOD = '{"input_length": 600, "output_length": 10, "hash_ids": [1, 2]}\n'


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """What a command that cannot be says: one line on stderr, nothing on stdout."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvevents")
    assert err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["COMMAND"]),
        (("tale",), ["'tale'"]),
        (("tail",), ["SOURCE"]),
        (("tail", "tcp://h:1", "--bogus"), ["--bogus"]),
        (("tail", "tcp://h:1", "--time", "3"), ["--time"]),
        (("tail", "nonsense"), ["ENDPOINT", "'nonsense'", "tcp://HOST:PORT"]),
        (("tail", "tcp://h:70000"), ["ENDPOINT", "70000", "0..65535"]),
        (("tail", "tcp://*:5557"), ["ENDPOINT", "'tcp://*:5557'"]),
        (
            ("tail", "tcp://h:1", "--replay-endpoint", "udp://h:1"),
            ["--replay-endpoint", "udp://h:1"],
        ),
        (("tail", "tcp://h:1", "--count", "0"), ["--count: 0", "below 1"]),
        (("tail", "tcp://h:1", "-n", "few"), ["--count", "'few'"]),
        (
            ("tail", "tcp://h:1", "--timeout", "0"),
            ["--timeout: 0.0 is not above 0 and at most 86400"],
        ),
        (("tail", "tcp://h:1", "--timeout", "nan"), ["--timeout: nan is not above 0"]),
        (("tail", "tcp://h:1", "--topic", "\udcff"), ["--topic: ", "cannot be encoded"]),
        (("tail", "tcp://h:1\x1b"), ["ENDPOINT"]),
        (("tail", "tcp://h:1", "--timeout", "86401"), ["--timeout: 86401.0", "at most 86400"]),
        (("tail", "tcp://h:1", "-o", "xml"), ["--output", "'xml'"]),
        (
            ("tail", "tcp://h:1", "--server-key", "a.key_secret", "--client-key", "b.key_secret"),
            ["--server-key: a.key_secret is the publisher's secret; give its .key"],
        ),
        (("tail", "tcp://h:1", "--server-key", "a.key"), ["--client-key", "without the other"]),
        (("serve",), ["--link"]),
        (("serve", "--link", ""), ["--link: '' is not a path"]),
        (("serve", "--check", "--link", ""), ["--link: '' is not a path"]),
        (("serve", "--link", "x", "--config", "/nonexistent"), ["--config", "/nonexistent"]),
        (("serve", "--link", "x", "--relay", "tcp://h:1"), ["--relay", "--link"]),
        (("serve", "--relay", "tcp://h:1"), ["--block-size"]),
        (("serve", "--relay", "tcp://h:1", "--block-size", "x"), ["--block-size", "'x'"]),
        (("serve", "--link", "x", "--mode", "both"), ["--mode", "'both'", "connect"]),
        (("serve", "--link", "x", "--endpoint", "5557"), ["--endpoint", "'5557'"]),
        (("serve", "--link", "x", "--kv-events-config", "{"), ["--kv-events-config", "truncated"]),
        (("serve", "--check", "--dp-size", "2"), ["sinks[0].replay_endpoint", "ranks 0..1"]),
        (("demo", "--requests", "0"), ["--requests: 0", "1..10000000"]),
        (("demo", "--requests", "10000001"), ["--requests: 10000001", "1..10000000"]),
        (("demo", "--requests", "many"), ["--requests", "'many'"]),
        (("demo", "--page-size", "0"), ["--page-size: 0", "1..8192"]),
        (("demo", "--page-size", "8193"), ["--page-size: 8193", "1..8192"]),
        (("demo", "--device-pages", "-1"), ["--device-pages: -1", "1..1073741824"]),
        (("demo", "--device-pages", "10000000"), ["--device-pages: 10000000", "8589934592"]),
        (("demo", "--endpoint", "5557"), ["--endpoint", "'5557'"]),
        (("demo", "--replay-endpoint", "tcp://h"), ["--replay-endpoint", "'tcp://h'"]),
        (
            ("demo", "--endpoint", "tcp://h:1", "--replay-endpoint", "tcp://h:1"),
            ["--replay-endpoint", "tcp://h:1", "as well"],
        ),
        (
            ("demo", "--trace", "/nonexistent/trace"),
            ["--trace: /nonexistent/trace", "No such file"],
        ),
        (("demo", "--trace", "/"), ["--trace: /", "directory"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: list[str]
) -> None:
    """Exit code 2, one line that names the option, its value and the bound, and no traceback."""
    err = refused(capsys, *arguments)
    for part in said:
        assert part in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "truncated"),
        (b"\xff", "--config"),
        (b'{"linger_s": 99}', "linger_s: 99.0 is not in 0..60"),
        (b'{"sinks": [{"port": 1}]}', "sinks[0].port: no such key"),
        (b'{"sinks": []}', "at least one"),
        (b'{"sinks": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_config_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes, said: str
) -> None:
    """Not JSON, not UTF-8, out of bounds, of unknown keys, nested without end: refused before the link
    is looked at.
    """
    file = tmp_path / "config.json"
    file.write_bytes(text)
    assert said in refused(capsys, "serve", "--link", "/nonexistent", "--config", str(file))


def test_a_configuration_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """`serve --check` prints what it would run with, as JSON that it takes, and opens nothing. Told of a
    worker it adds the sockets of its ranks.
    """
    assert main(["serve", "--check", "--endpoint", "tcp://*:7000"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    config = SidecarConfig(sinks=(SinkConfig(endpoint="tcp://*:7000"),))
    assert read_config(SidecarConfig, json.loads(out)) == config
    assert main(["serve", "--check", "--relay", "tcp://h:1", "--block-size", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    (rank,) = told.pop("resolved")
    relay = RelayConfig(endpoint="tcp://h:1", worker=WorkerInfo(block_size=4))
    assert read_config(SidecarConfig, told) == SidecarConfig(relay=relay)
    assert rank["sinks"][0]["endpoints"] == ["tcp://127.0.0.1:5557"]
    apart = ("--endpoint", "tcp://*:7000", "--replay-endpoint", "tcp://*:8000")
    assert main(["serve", "--check", *apart, "--dp-size", "4"]) == 0
    ranks = json.loads(capsys.readouterr().out)["resolved"]
    assert [one["sinks"][0]["replay_endpoint"] for one in ranks] == [
        f"tcp://*:{port}" for port in range(8000, 8004)
    ]


def test_a_variable_without_effect_is_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr, and the command goes on."""
    monkeypatch.setenv("KVEVENTS_STATE_DIR", "/x")
    assert main(["serve", "--check"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state_dir"] is None
    assert re.fullmatch(r"kvevents serve: KVEVENTS_STATE_DIR is not read; .*\n", err)


def test_keys_are_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`keygen` prints the paths of a public and a secret key; none is overwritten."""
    assert main(["keygen", str(tmp_path / "keys"), "--name", "router"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [Path(line).name for line in out.splitlines()] == ["router.key", "router.key_secret"]
    assert all(Path(line).is_file() for line in out.splitlines())
    said = refused(capsys, "keygen", str(tmp_path / "keys"), "--name", "router")
    assert "File exists" in said
    assert "name: 'a/b'" in refused(capsys, "keygen", str(tmp_path), "--name", "a/b")


def test_serve_without_a_worker_has_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3: nobody is at the link."""
    assert main(["serve", "--link", "/nonexistent/link"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"kvevents serve: link /nonexistent/link: .*No such file.*\n", err)
    assert "longer than 107 bytes" in refused(capsys, "serve", "--link", "/" + "x" * 200)


BROKEN_LINES = [
    ("{", "truncated"),
    ("[]", "Expected `object`"),
    ('{"input_length": 1, "output_length": 1}', "`hash_ids`"),
    ('{"input_length": "1", "output_length": 1, "hash_ids": [1]}', "$.input_length"),
    ('{"input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "$.hash_ids[0]"),
    ('{"input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash_ids: -1 is not in 0.."),
    ('{"input_length": -5, "output_length": 1, "hash_ids": []}', "input_length: -5 is not in 0.."),
    (
        '{"input_length": 1, "output_length": -2, "hash_ids": [1]}',
        "output_length: -2 is not in 0..",
    ),
    (
        '{"input_length": 0, "output_length": 9223372036854775807, "hash_ids": []}',
        "output_length: 9223372036854775807 is not in 0..",
    ),
    (
        '{"input_length": 1, "output_length": 1, "hash_ids": [1], "x": ' + "[" * 100_000,
        "nested too deeply",
    ),
    (
        '{"input_length": 513, "output_length": 1, "hash_ids": [1]}',
        "hash_ids: 1 ids, but input_length 513 needs 2",
    ),
    ('{"input_length": 1, "output_length": 1, "hash_ids": [9223372036854775808]}', "hash_ids"),
]


@pytest.mark.parametrize(("line", "said"), BROKEN_LINES, ids=range(len(BROKEN_LINES)))
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_broken_trace_line_is_named(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    line: str,
    said: str,
    suffix: str,
    compress: Callable[[bytes], bytes],
) -> None:
    """FILE:LINE and the field, whether the file is compressed or not, whatever its name says of that."""
    file = tmp_path / f"trace.jsonl{suffix}"
    file.write_bytes(compress((GOOD + "\n" + line + "\n" + GOOD).encode()))
    err = refused(capsys, "demo", "--trace", str(file))
    assert f"--trace: {file}:3: " in err
    assert said in err


def test_a_trace_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Empty, or of a gzip that is cut short or damaged."""
    good = gzip.compress(GOOD.encode() * 1000, mtime=0)
    damaged = bytearray(good)
    damaged[20] ^= 0xFF
    for name, data, said in (
        ("empty.jsonl", b"\n\n", "no requests"),
        ("cut.gz", good[:-20], "end-of-stream"),
        ("damaged.gz", bytes(damaged), ""),
    ):
        file = tmp_path / name
        file.write_bytes(data)
        err = refused(capsys, "demo", "--trace", str(file))
        assert f"--trace: {file}: " in err or f"--trace: {file}:" in err
        assert said in err


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_trace_line_has_at_most_16_mib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """A line of just so much is read; one byte more is refused by number, compressed or not."""
    most = 16 << 20
    long = GOOD.rstrip("\n").ljust(most - 1) + "\n"
    file = tmp_path / "trace"
    file.write_bytes(compress((GOOD + long).encode()))
    assert len(read_trace(file, 10)) == 2
    file.write_bytes(compress((GOOD + long[:-1] + " \n").encode()))
    assert f"--trace: {file}:2: longer than {most} bytes" in refused(
        capsys, "demo", "--trace", str(file)
    )


def test_a_trace_without_end_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace /dev/zero`: one line."""
    err = refused(capsys, "demo", "--trace", "/dev/zero")
    assert err == "kvevents demo: --trace: /dev/zero:1: longer than 16777216 bytes\n"


def test_help_describes_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys, how many tokens a hash id stands for, and what a page size makes of that."""
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        *("input_length", "output_length", "hash_ids one integer for each 512 tokens"),
        *("scales the prompts", "16 MiB"),
    ):
        assert part in said


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvevents --version`: one line, exit code 0."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert not exit_.value.code
    assert capsys.readouterr().out == f"kvevents {importlib.metadata.version('kvevents')}\n"


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself."""
    for command in ([], ["tail"], ["demo"], ["serve"], ["keygen"]):
        with pytest.raises(SystemExit) as exit_:
            main([*command, "--help"])
        assert exit_.value.code == 0
        assert "usage: kvevents" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- processes


class Stream:
    """A worker's, with a sidecar of its own."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar, self._cache = sidecar, make_cache(num_pages=1024)
        (bound,) = sidecar.client.sinks
        self.tail = ("tail", bound.endpoint, "--replay-endpoint", str(bound.replay_endpoint))

    def tell(self, num_events: int) -> None:
        """So many events more, all of them published."""
        for _ in range(num_events):
            first = 100 * self._cache.num_stored
            insert(self._cache, range(first, first + 8))
            self._sidecar.pump(self._cache)
        assert self._sidecar.client.flush(self._cache, PATIENCE_S) is not None


@pytest.fixture
def stream() -> Iterator[Stream]:
    """One that has told eight events, the first of them a clear."""
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, heartbeat_s=0.05)
    with spawn(WorkerInfo(block_size=4), SidecarConfig(sinks=(sink,), linger_s=0.0)) as sidecar:
        stream = Stream(sidecar)
        stream.tell(7)
        yield stream


@pytest.mark.integration
def test_the_module_exits_like_main() -> None:
    """Usage errors, as a process: code 2, one line, no traceback."""
    done = kvevents("tail", "nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


@pytest.mark.integration
def test_tail_without_a_publisher_has_a_code_of_its_own() -> None:
    """Exit code 3 when nothing came in time, and one line that says where and how long."""
    done = kvevents("tail", "tcp://127.0.0.1:1", "--timeout", "0.1")
    said = "kvevents tail: nothing came from tcp://127.0.0.1:1 in 0.1 s: "
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith(said)
    assert "`kvevents doctor tcp://127.0.0.1:1`" in done.stderr
    replay = ("--replay-endpoint", "tcp://127.0.0.1:2")
    done = kvevents("tail", "tcp://127.0.0.1:1", *replay, "--timeout", "0.1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith(said)
    assert "--replay-endpoint tcp://127.0.0.1:2`" in done.stderr


def site_with(folder: Path, *modules: str) -> str:
    """A folder with nothing in it but our packages, msgspec, and some more."""
    for module in ("kvevents", "hicache", "publisher", "msgspec", *modules):
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        (folder / module).symlink_to(Path(found.origin).parent)
    return str(folder)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("installed", "arguments", "said"),
    [
        ((), ("tail", "tcp://127.0.0.1:1"), "tail needs pip install 'kvevents[publisher]'"),
        ((), ("serve", "--link", "x"), "serve needs pip install 'kvevents[publisher]'"),
        ((), ("demo",), "demo needs pip install 'kvevents[demo]'"),
        (("zmq",), ("demo",), "demo needs pip install 'kvevents[demo]'"),
        ((), ("tail",), "the following arguments are required: SOURCE"),
        ((), ("--version",), "not installed, so its version is unknown"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    tmp_path: Path, installed: tuple[str, ...], arguments: tuple[str, ...], said: str
) -> None:
    """With no site-packages but msgspec: exit code 2 and one line, before anything is started."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "publisher.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
        env={**ENVIRONMENT, "PYTHONPATH": site_with(tmp_path, *installed)},
        cwd=tmp_path,
    )
    prefix = "kvevents tail: " if arguments == ("tail",) else "kvevents: "
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{prefix}{said}\n")


@pytest.mark.integration
def test_a_worker_needs_no_pyzmq_of_its_own(tmp_path: Path) -> None:
    """Without it, `publisher` gives all its names but the subscriber's; those say what is missing."""
    code = """
import publisher
missing = []
for name in publisher.__all__:
    try:
        getattr(publisher, name)
    except ModuleNotFoundError as error:
        assert error.name == "zmq"
        missing.append(name)
print(*missing)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
        env={**ENVIRONMENT, "PYTHONPATH": site_with(tmp_path)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [
        *("Batch", "Received", "Subscriber", "SubscriberStats", "Undecodable"),
    ]


def test_what_the_publisher_exports_is_what_it_says() -> None:
    """Every public name is there, in either way of asking, and no other."""
    names = publisher.__all__
    assert [name for name in names if not hasattr(publisher, name)] == []
    assert publisher.spawn is spawn
    for name in ("ConfigError", "CurveConfig", "RelayConfig", "load_config", "read_config"):
        assert name in names
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = publisher.Nothing  # type: ignore[attr-defined]


@pytest.mark.integration
def test_tail_ends_at_its_count(stream: Stream) -> None:
    """Exit code 0 after N lines."""
    done = kvevents(*stream.tail, "-q", "-n", "3", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.integration
def test_tail_leaves_quietly_when_its_reader_does(stream: Stream) -> None:
    """`kvevents tail | head -1`: exit code 0 and nothing on stderr."""
    with subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", *stream.tail],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        with process.stdout:
            assert b"cleared" in process.stdout.read(40)
        stream.tell(1)
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
        assert process.stderr.read() == b""


@pytest.mark.integration
def test_ctrl_c_ends_tail_quietly(stream: Stream) -> None:
    """Exit code 0, for what has come was told; no traceback, while it waits."""
    with start_kvevents(f"ctrl-c {os.getpid()}", *stream.tail, "-q") as process:
        assert process.stdout is not None and process.stderr is not None
        assert "cleared" in process.stdout.readline()
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
        assert (code, process.stderr.read()) == (0, "")
        assert time.monotonic() - start < 5.0


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_output_that_nobody_reads_is_no_error(arguments: tuple[str, ...]) -> None:
    """Writing to a closed pipe at the very end is as quiet as in the middle."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "publisher.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60.0,
            env=ENVIRONMENT,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.integration
def test_serve_reads_its_settings_from_standard_input() -> None:
    """`--config -`, as `spawn` gives it; what is wrong with them is one line."""
    with short_folder() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "publisher.cli", "serve"),
                *("--link", str(folder / "link"), "--config", "-"),
            ],
            input='{"linger_s": -1}',
            capture_output=True,
            text=True,
            check=False,
            timeout=60.0,
        )
    assert done.returncode == 2
    assert done.stderr == "kvevents serve: linger_s: -1.0 is not in 0..60\n"
