"""publisher.cli: exit codes, one line for what is wrong, and leaving quietly."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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

from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main

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
        (("tail",), ["endpoint"]),
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
        (("tail", "tcp://h:1", "--timeout", "0"), ["--timeout: 0", "0..86400"]),
        (("tail", "tcp://h:1", "--timeout", "nan"), ["--timeout: nan", "0..86400"]),
        (("tail", "tcp://h:1", "--timeout", "86401"), ["--timeout: 86401", "0..86400"]),
        (("tail", "tcp://h:1", "-o", "xml"), ["--output", "'xml'"]),
        (("serve",), ["--link"]),
        (("serve", "--link", "x", "--config", "/nonexistent"), ["--config", "/nonexistent"]),
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
        (b'{"sinks": [{"port": 1}]}', "`port`"),
        (b'{"sinks": []}', "at least one"),
    ],
)
def test_a_bad_config_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes, said: str
) -> None:
    """Not JSON, not UTF-8, out of bounds, of unknown keys: refused before the link is looked at."""
    file = tmp_path / "config.json"
    file.write_bytes(text)
    assert said in refused(capsys, "serve", "--link", "/nonexistent", "--config", str(file))


def test_serve_without_a_worker_has_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3: nobody is at the link."""
    assert main(["serve", "--link", "/nonexistent/link"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"kvevents serve: link /nonexistent/link: .*No such file.*\n", err)
    assert main(["serve", "--link", "/" + "x" * 200]) == 3
    assert "too long" in capsys.readouterr().err


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
        '{"input_length": 513, "output_length": 1, "hash_ids": [1]}',
        "hash_ids: 1 ids, but input_length 513 needs 2",
    ),
    ('{"input_length": 1, "output_length": 1, "hash_ids": [9223372036854775808]}', "hash_ids"),
]


@pytest.mark.parametrize(("line", "said"), BROKEN_LINES, ids=range(len(BROKEN_LINES)))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_broken_trace_line_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, said: str, suffix: str
) -> None:
    """FILE:LINE and the field, whether the file is compressed or not."""
    file = tmp_path / f"trace.jsonl{suffix}"
    data = (GOOD + "\n" + line + "\n" + GOOD).encode()
    file.write_bytes(gzip.compress(data) if suffix else data)
    err = refused(capsys, "demo", "--trace", str(file))
    assert f"--trace: {file}:3: " in err
    assert said in err


def test_a_trace_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Empty, not gzip although it says so, cut short, or damaged."""
    good = gzip.compress(GOOD.encode() * 1000, mtime=0)
    damaged = bytearray(good)
    damaged[20] ^= 0xFF
    for name, data, said in (
        ("empty.jsonl", b"\n\n", "no requests"),
        ("no.gz", GOOD.encode(), "gzip"),
        ("cut.gz", good[:-20], "end-of-stream"),
        ("damaged.gz", bytes(damaged), ""),
    ):
        file = tmp_path / name
        file.write_bytes(data)
        err = refused(capsys, "demo", "--trace", str(file))
        assert f"--trace: {file}: " in err or f"--trace: {file}:" in err
        assert said in err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself."""
    for command in ([], ["tail"], ["demo"], ["serve"]):
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
    """One that has told eight events."""
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, heartbeat_s=0.05)
    with spawn(WorkerInfo(block_size=4), SidecarConfig(sinks=(sink,), linger_s=0.0)) as sidecar:
        stream = Stream(sidecar)
        stream.tell(8)
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
    """Exit code 3 when nothing came in time; silently."""
    done = kvevents("tail", "tcp://127.0.0.1:1", "--timeout", "0.1")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.integration
def test_tail_ends_at_its_count(stream: Stream) -> None:
    """Exit code 0 after N lines."""
    done = kvevents(*stream.tail, "-n", "3", "-o", "json")
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
            assert b"stored" in process.stdout.read(40)
        stream.tell(1)
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
        assert process.stderr.read() == b""


@pytest.mark.integration
def test_ctrl_c_ends_tail_quietly(stream: Stream) -> None:
    """Exit code 130 and no traceback, while it waits."""
    with start_kvevents(f"ctrl-c {os.getpid()}", *stream.tail) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "stored" in process.stdout.readline()
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert time.monotonic() - start < 5.0
        assert process.stderr.read() == ""


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
