"""`kvevents lint`, `check` and `record`: as processes, against real sockets, and on torn files."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import zmq
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    RawPublisher,
    insert,
    kvevents,
    make_cache,
    payload_of,
    start_kvevents,
)

from kvevents import AllBlocksCleared, BlockStored, StorageMedium
from kvevents.capture import (
    CaptureHead,
    CaptureReader,
    Channel,
    Message,
    capture_start,
    pack_message,
)
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main
from publisher.curve import read_secret_key, write_keys
from publisher.lint_command import read_consumers
from publisher.tap import Tap, wait_for

WIDE = 0x0123_4567_89AB_CDEF
GOOD = payload_of(BlockStored([WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU))
SIGNED = payload_of(BlockStored([-WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU))
CLEARED = payload_of(AllBlocksCleared())


@pytest.fixture
def publisher() -> Iterator[RawPublisher]:
    with RawPublisher() as publisher:
        yield publisher


def capture(path: Path, *payloads: bytes, topic: bytes = b"", replay: bool = False) -> Path:
    """A capture of these live batches from seq 0."""
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2" if replay else None)
    records = [
        pack_message(seq, Channel.LIVE, live_frames(topic, seq, payload))
        for seq, payload in enumerate(payloads)
    ]
    path.write_bytes(capture_start(head) + b"".join(records))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return kvevents(*map(str, arguments))


# ------------------------------------------------------------------------------------- captures


def test_a_finding_is_a_line_and_each_consumer_is_told_of(tmp_path: Path) -> None:
    """Exit code 1; the batch, the consumer, the place and the reason; then who loses how much."""
    done = run("lint", capture(tmp_path / "c", GOOD, SIGNED, GOOD), "--as", "vllm-router,dynamo")
    assert done.returncode == 1
    where = "events[0].block_hashes[0]"
    assert done.stdout.splitlines() == [
        f"seq 1        vllm-router    drops the batch: {where} is {-WIDE}: it reads unsigned hashes only",
        "vllm-router 0.1.17: loses 1 of 3 batches",
        "dynamo 1.6.1: takes all",
    ]
    assert done.stderr == ""


def test_nothing_lost_is_0(tmp_path: Path) -> None:
    """No line but the summary."""
    done = run("lint", capture(tmp_path / "c", CLEARED, GOOD), "--as", "dynamo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "dynamo 1.6.1: takes all\n", "")


def test_every_consumer_unless_told(tmp_path: Path) -> None:
    """Without --as, a summary of each."""
    done = run("lint", capture(tmp_path / "c", GOOD))
    told = {line.split()[0] for line in done.stdout.splitlines() if not line.startswith("seq")}
    assert told == {consumer.name for consumer in read_consumers(None)}


def test_findings_of_one_kind_are_counted(tmp_path: Path) -> None:
    """The first in its place, the count at the end; with -v each of them, and no count."""
    file = capture(tmp_path / "c", *[SIGNED] * 5, GOOD)
    brief = run("lint", file, "--as", "vllm-router").stdout.splitlines()
    assert [line.split(":")[0] for line in brief] == [
        "seq 0        vllm-router    drops the batch",
        "5 times to 4",
        "vllm-router 0.1.17",
    ]
    verbose = run("lint", file, "--as", "vllm-router", "-v").stdout.splitlines()
    assert [line.split()[1] for line in verbose[:-1]] == ["0", "1", "2", "3", "4"]
    assert brief[-1] == verbose[-1] == "vllm-router 0.1.17: loses 5 of 6 batches"


def test_as_json(tmp_path: Path) -> None:
    """One object a line, of type finding, repeated or summary."""
    file = capture(tmp_path / "c", SIGNED, SIGNED)
    done = run("lint", file, "--as", "vllm-router", "-o", "json")
    finding, repeated, summary = map(json.loads, done.stdout.splitlines())
    assert finding == {
        "source": str(file),
        "type": "finding",
        "seq": 0,
        "consumer": "vllm-router",
        "lost": "batch",
        "rule": "negative-hash",
        "where": "events[0].block_hashes[0]",
        "why": f"is {-WIDE}: it reads unsigned hashes only",
    }
    assert repeated == finding | {"type": "repeated", "count": 2, "last_seq": 1}
    assert summary == {
        "source": str(file),
        "type": "summary",
        "consumer": "vllm-router",
        "version": "0.1.17",
        "observed": "run",
        "batches": 2,
        "lost": {"batch": 2},
    }


def test_several_captures_are_told_apart(tmp_path: Path) -> None:
    """Each line begins with its source."""
    one, two = capture(tmp_path / "one", SIGNED), capture(tmp_path / "two", GOOD)
    done = run("lint", one, two, "--as", "vllm-router")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*[str(one)] * 2, str(two)]


def test_check_is_lint_for_consumers_that_are_named(tmp_path: Path) -> None:
    """The same lines and exit code; without --as it is a usage error."""
    file = capture(tmp_path / "c", SIGNED)
    checked = run("check", file, "--as", "vllm-router")
    linted = run("lint", file, "--as", "vllm-router")
    assert (checked.returncode, checked.stdout) == (linted.returncode, linted.stdout)
    assert run("check", file).returncode == 2


def test_a_capture_torn_at_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is whole is linted, what is not is said, and nothing else happens: 0, 1 or 3."""
    file = capture(tmp_path / "c", GOOD, SIGNED)
    whole = file.read_bytes()
    ends = [
        len(capture(tmp_path / "part", *payloads).read_bytes())
        for payloads in ((), (GOOD,), (GOOD, SIGNED))
    ]
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        code = main(["lint", str(file), "--as", "vllm-router"])
        out, err = capsys.readouterr()
        batches = sum(end <= length for end in ends[1:])
        assert code == (3, 0, 1)[batches]
        assert ("bytes were left out: it was cut off" in err) == (
            length not in (0, *ends, len(b"kvevents capture 1\n"))
        )
        assert out.splitlines()[-1].startswith("vllm-router 0.1.17: ")


def test_damage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record with a wrong checksum ends the capture."""
    file = capture(tmp_path / "c", GOOD, SIGNED)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["lint", str(file), "--as", "vllm-router"]) == 0
    assert "bytes were left out: a record whose checksum is not its own" in capsys.readouterr().err


def test_an_answer_of_an_engine_in_a_capture(tmp_path: Path) -> None:
    """A replay without topics, that does not reach back, and whose end was lost: who minds."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2"))
    told = [
        (Channel.ASKED, [b"", bytes(8)]),
        (Channel.LIVE, live_frames(b"", 4, GOOD)),
        (Channel.ANSWER, replay_answer(None, 3, GOOD, delimited=True)),
        (Channel.ANSWER, replay_answer(None, 4, GOOD, delimited=True)),
        (Channel.OVER, []),
    ]
    file = tmp_path / "c"
    file.write_bytes(head + b"".join(pack_message(0, *one) for one in told))
    done = run("lint", file, "--as", "dynamo,vllm-router,smg")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "cannot follow:" in line]
    for part in (
        r"seq 3 +dynamo .*replay begins with 3, not 0",
        r"seq 3 +vllm-router .*has 3 frames: it reads 4 only",
        r"seq 4 +dynamo .*no end: it waits for ever",
    ):
        assert any(re.match(part, line) for line in lines), part
    assert "dynamo 1.6.1: cannot follow 2 times" in done.stdout


# ------------------------------------------------------------------------------------ live ones


def test_a_live_stream(publisher: RawPublisher) -> None:
    """As many batches as asked for, of a real PUB socket, and an engine's bytes."""
    with start_kvevents(
        "lint", "lint", publisher.endpoint, "--as", "vllm-router,sglang", "-n", "3"
    ) as process:
        publisher.await_subscriber()
        for seq, payload in enumerate((GOOD, SIGNED, GOOD)):
            publisher.live(seq, payload=payload)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, "")
    assert out.splitlines()[1:] == [
        "vllm-router 0.1.17: loses 1 of 3 batches",
        "sglang 0.5.23: takes all",
    ]


def test_ctrl_c_ends_it_as_the_time_does(publisher: RawPublisher) -> None:
    """The summary and the exit code are those of what came."""
    with start_kvevents("lint", "lint", publisher.endpoint, "--as", "vllm-router") as process:
        publisher.await_subscriber()
        publisher.live(0, payload=SIGNED)
        assert process.stdout is not None
        assert "vllm-router" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "vllm-router 0.1.17: loses 1 of 1 batch\n")


def test_a_reader_that_leaves_is_no_error(publisher: RawPublisher) -> None:
    """SIGPIPE, as of `kvevents lint … | head -1`: quiet, and 0."""
    arguments = ("lint", publisher.endpoint, "--as", "vllm-router", "-v", "-n", "50")
    with start_kvevents("lint", *arguments) as process:
        publisher.await_subscriber()
        publisher.live(0, payload=SIGNED)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        for seq in range(1, 50):
            publisher.live(seq, payload=SIGNED)
        assert process.wait(timeout=PATIENCE_S) == 0
        assert process.stderr.read() == ""


def test_silence_is_3(publisher: RawPublisher, tmp_path: Path) -> None:
    """Nothing came: so said, of a stream, of an empty capture, and of a recording."""
    done = run("lint", publisher.endpoint, "--for", "0.2", "--as", "dynamo")
    assert (done.returncode, done.stderr) == (3, "kvevents lint: nothing came\n")
    assert done.stdout == "dynamo 1.6.1: saw no batch\n"
    assert run("lint", capture(tmp_path / "c"), "--as", "dynamo").returncode == 3
    assert run("record", "-w", tmp_path / "r", publisher.endpoint, "--for", "0.2").returncode == 3


class Engine(Thread):
    """Answers replay requests as an engine does: END alone to JOIN, all it has to 0."""

    def __init__(self, publisher: RawPublisher, *answers: list[bytes]) -> None:
        super().__init__()
        self.publisher, self.answers, self.starts = publisher, answers, list[int]()

    def run(self) -> None:
        for _ in range(2):
            client, start = self.publisher.request()
            self.starts.append(start)
            for message in self.answers if start == 0 else ():
                self.publisher.router.send_multipart([client, *message])
            self.publisher.end(client)


def test_an_engines_replay_is_asked_from_0(publisher: RawPublisher) -> None:
    """JOIN, to which it has nothing, then 0; without topics vllm-router indexes nothing."""
    engine = Engine(
        publisher,
        replay_answer(None, 0, GOOD, delimited=True),
        replay_answer(None, 1, GOOD, delimited=True),
    )
    engine.start()
    done = run(
        *("lint", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint),
        *("--as", "vllm-router,dynamo", "-n", "2", "--for", PATIENCE_S),
    )
    engine.join()
    assert engine.starts == [JOIN, 0]
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "vllm-router 0.1.17: cannot follow 2 times",
        "dynamo 1.6.1: takes all",
    ]


def test_a_replay_that_is_not_answered_is_over_after_a_while(publisher: RawPublisher) -> None:
    """The tap says so once, and live messages go on."""
    messages: list[Message] = []
    deadline = time.monotonic() + PATIENCE_S
    with Tap(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=0.2) as tap:
        while not any(one.channel == Channel.OVER for one in messages):
            assert time.monotonic() < deadline, messages
            wait_for([tap], deadline)
            messages += tap.drain()
        assert [one.channel for one in messages] == [Channel.ASKED, Channel.OVER]
        assert publisher.request()[1] == JOIN
        publisher.live(0, payload=GOOD)
        while len(messages) < 3:
            assert time.monotonic() < deadline, messages
            wait_for([tap], deadline)
            messages += tap.drain()
    assert messages[2].frames == live_frames(b"", 0, GOOD)


def test_with_curve(tmp_path: Path) -> None:
    """Keys are those of tail: with the publisher's own, its stream is read."""
    public, secret = write_keys(tmp_path, "publisher")
    _, client = write_keys(tmp_path, "client")
    context = zmq.Context[zmq.Socket[bytes]]()
    with context.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        pub.curve_server = True
        pub.curve_secretkey = read_secret_key("", secret)[1].encode()
        endpoint = pub.bind(LOOPBACK).addr
        keys = ("--server-key", str(public), "--client-key", str(client))
        arguments = ("lint", endpoint, *keys, "--as", "vllm-router", "-n", "1")
        with start_kvevents("lint", *arguments) as process:
            assert pub.poll(int(PATIENCE_S * 1000))
            pub.send_multipart(live_frames(b"", 0, SIGNED))
            out, err = process.communicate(timeout=PATIENCE_S)
    context.term()
    assert (process.returncode, err) == (1, "")
    assert out.endswith("loses 1 of 1 batch\n")


# ------------------------------------------------------------------------------------- recording


def test_what_is_recorded_is_what_came(publisher: RawPublisher, tmp_path: Path) -> None:
    """Frames, channels and times, of both sockets; the owner alone may read it; lint reads it."""
    engine = Engine(publisher, replay_answer(b"", 0, GOOD, delimited=True))
    engine.start()
    file = tmp_path / "capture"
    arguments = ("record", "-w", str(file), publisher.endpoint, "-n", "2")
    with start_kvevents(
        "record", *arguments, "--replay-endpoint", publisher.replay_endpoint
    ) as process:
        publisher.await_subscriber()
        publisher.live(1, payload=SIGNED)
        _, err = process.communicate(timeout=PATIENCE_S)
    engine.join()
    assert (process.returncode, err) == (0, f"kvevents record: 2 batches are in {file}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    reader = CaptureReader()
    messages = reader.feed(file.read_bytes())
    assert reader.head is not None
    assert reader.head.endpoint == publisher.endpoint
    assert reader.head.started_ns < messages[0].at_ns
    assert [one.at_ns for one in messages] == sorted(one.at_ns for one in messages)
    by_channel = {
        channel: [m.frames for m in messages if m.channel == channel] for channel in Channel
    }
    assert by_channel[Channel.LIVE] == [live_frames(b"", 1, SIGNED)]
    assert by_channel[Channel.ANSWER][:2] == [
        replay_end(delimited=True),
        replay_answer(b"", 0, GOOD, delimited=True),
    ]
    done = run("lint", file, "--as", "vllm-router")
    assert done.stdout.splitlines()[-1] == "vllm-router 0.1.17: loses 1 of 2 batches"


def test_a_kill_costs_at_most_the_last_record(publisher: RawPublisher, tmp_path: Path) -> None:
    """kill -9 in the midst of a stream: what the file has is whole, and in order."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        seq = 0
        while not file.exists() or file.stat().st_size < 100_000:
            publisher.live(seq, payload=GOOD)
            seq += 1
        process.kill()
        process.wait(timeout=PATIENCE_S)
    messages = CaptureReader().feed(file.read_bytes())
    assert len(messages) > 100
    assert [m.frames for m in messages] == [live_frames(b"", n, GOOD) for n in range(len(messages))]


def test_ctrl_c_ends_a_recording(publisher: RawPublisher, tmp_path: Path) -> None:
    """As the time does: the count is said, and the file is whole."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        publisher.live(0, payload=GOOD)
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists() or not CaptureReader().feed(file.read_bytes()):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, f"kvevents record: 1 batch is in {file}\n")


def test_nothing_is_overwritten(publisher: RawPublisher, tmp_path: Path) -> None:
    """A file that is there already is left as it is."""
    file = tmp_path / "capture"
    file.write_text("mine")
    done = run("record", "-w", file, publisher.endpoint, "--for", "1")
    assert (done.returncode, file.read_text()) == (2, "mine")
    assert "-w" in done.stderr and "File exists" in done.stderr


# ----------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lint",), ["SOURCE"]),
        (("lint", "/nonexistent"), ["SOURCE: /nonexistent: No such file"]),
        (("lint", "/"), ["SOURCE: /: Is a directory"]),
        (("lint", "tcp://*:1"), ["ENDPOINT", "'tcp://*:1'", "cannot be connected to"]),
        (("lint", "udp://h:1"), ["ENDPOINT", "'udp://h:1'"]),
        (("lint", "tcp://h:1", "--as", "nobody"), ["--as: 'nobody' is not one of", "vllm-router"]),
        (("lint", "tcp://h:1", "-n", "0"), ["--count: 0 is below 1"]),
        (("lint", "tcp://h:1", "--for", "0"), ["--for: 0.0 is not above 0 and at most 86400"]),
        (("lint", "f", "--replay-endpoint", "tcp://h:1"), ["--replay-endpoint", "one endpoint"]),
        (
            ("lint", "tcp://h:1", "tcp://h:2", "--replay-endpoint", "tcp://h:1"),
            ["--replay-endpoint", "one endpoint"],
        ),
        (("lint", "tcp://h:1", "--server-key", "a.key"), ["--client-key", "without the other"]),
        (("check", "tcp://h:1"), ["--as"]),
        (("record", "tcp://h:1"), ["-w"]),
        (("record", "-w", "/nonexistent/x", "tcp://h:1"), ["-w: /nonexistent/x: No such file"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_usage(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: list[str]
) -> None:
    """Exit code 2, and one line that names the option, its value and the bound."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    for part in said:
        assert part in err


def test_a_file_that_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said so, with its name."""
    file = tmp_path / "f"
    file.write_text("{}\n")
    with pytest.raises(SystemExit):
        main(["lint", str(file)])
    assert f"SOURCE: {file}: no capture" in capsys.readouterr().err


def test_names_cannot_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of keys, values and topics are escaped, in both outputs."""
    event: dict[str, Any] = {"type": "\x1b[31m", "\n\x9b": 1, "medium": "\u2028"}
    payload = msgspec.msgpack.encode((1.0, [event], 0))
    file = capture(tmp_path / "c", payload, topic=b"\x1b[2J\xff")
    for output in ("text", "json"):
        assert main(["lint", str(file), "-o", output]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 10 and all(line.isprintable() for line in lines)


@pytest.mark.integration
def test_a_sidecar_is_taken_whole_in_each_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink's replay and live batches, in a consumer's own dialect, lose that consumer nothing."""
    names = ("dynamo", "llm-d", "mooncake", "vllm-router", "sgl-router", "smg")
    sinks = tuple(
        SinkConfig(name=name, dialect=name, endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
        for name in names
    )
    monkeypatch.setenv("POD_IP", "10.0.0.1")
    cache, worker = make_cache(), WorkerInfo(block_size=4, model="m")
    with spawn(worker, SidecarConfig(sinks=sinks, linger_s=0.0)) as sidecar:
        for step in range(3):
            insert(cache, range(step * 100, step * 100 + 8))
            sidecar.pump(cache)
        assert sidecar.client.flush(cache, PATIENCE_S) is not None
        for name, bound in zip(names, sidecar.client.sinks, strict=True):
            done = run(
                *("check", bound.endpoint, "--replay-endpoint", bound.replay_endpoint),
                *("--as", name, "-n", "2", "--for", PATIENCE_S),
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.endswith("takes all\n")
