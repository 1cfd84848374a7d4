"""`kvevents record`: as a process, against real sockets and real files."""

from __future__ import annotations

import gzip
import os
import pty
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from publisher_rig import (
    ENVIRONMENT,
    PATIENCE_S,
    RawPublisher,
    kvevents,
    payload_of,
    start_kvevents,
)

from kvevents import AllBlocksCleared, BlockStored, StorageMedium
from kvevents.capture import CaptureReader
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end
from kvevents.message import Channel, Message

SLOW = (
    "kvevents record: it was too slow or stopped at times: what is missing of then may be missing"
    " in the capture only\n"
)
GOOD = payload_of(BlockStored([1], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU))


@pytest.fixture
def publisher() -> Iterator[RawPublisher]:
    with RawPublisher() as publisher:
        yield publisher


def read(file: Path) -> list[Message]:
    """What the file has so far."""
    return CaptureReader().feed(file.read_bytes()) if file.exists() else []


def await_live(file: Path, count: int) -> list[Message]:
    """Until so many live messages can be read in it."""
    deadline = time.monotonic() + PATIENCE_S
    while len(live_of(messages := read(file))) < count:
        assert time.monotonic() < deadline, messages
    return messages


def await_messages(file: Path, count: int) -> None:
    """Until so many messages can be read in it."""
    deadline = time.monotonic() + PATIENCE_S
    while len(read(file)) < count:
        assert time.monotonic() < deadline


def await_channel(file: Path, channel: Channel) -> None:
    """Until a message of it can be read."""
    deadline = time.monotonic() + PATIENCE_S
    while channel not in [one.channel for one in read(file)]:
        assert time.monotonic() < deadline


def but_pace(messages: list[Message]) -> list[Message]:
    """But for those of a machine that is slow."""
    return [one for one in messages if one.channel not in (Channel.BEHIND, Channel.ABREAST)]


def live_of(messages: list[Message]) -> list[list[bytes]]:
    """The frames of those that came live."""
    return [one.frames for one in messages if one.channel == Channel.LIVE]


def plain(said: str) -> str:
    """With one time and one size, whatever they are; and but for what is said of a slow machine."""
    return re.sub(r": \d+\.\d s, [\d.]+ (bytes|kB), ", ": TIME, SIZE, ", said).replace(SLOW, "")


def told(batches: int, file: object, missing: str = "no gap") -> str:
    """What is said in the end."""
    are = "1 batch is" if batches == 1 else f"{batches} batches are"
    return f"kvevents record: {are} in {file}: TIME, SIZE, {missing}\n"


def answer(publisher: RawPublisher, starts: list[int], *answers: list[bytes]) -> Thread:
    """Serve two requests as an engine does: END alone to JOIN, and all there is to anything else."""

    def run() -> None:
        for _ in range(2):
            client, start = publisher.request()
            starts.append(start)
            for message in answers if start != JOIN else ():
                publisher.router.send_multipart([client, *message])
            publisher.end(client)

    thread = Thread(target=run)
    thread.start()
    return thread


def test_what_is_recorded_is_what_came(publisher: RawPublisher, tmp_path: Path) -> None:
    """Frames, channels and times, of both sockets, and of the connection; the owner alone may read it."""
    old = replay_answer(b"", 0, GOOD, delimited=True)
    starts: list[int] = []
    thread = answer(publisher, starts, old)
    file = tmp_path / "capture"
    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    with start_kvevents("record", "record", "-w", str(file), source, "-n", "2") as process:
        publisher.await_subscriber()
        thread.join()
        await_answered = time.monotonic() + PATIENCE_S
        while not any(one.ends_replay for one in but_pace(read(file))[4:]):
            assert time.monotonic() < await_answered
        publisher.live(1, payload=GOOD)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, plain(err)) == (0, told(2, file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    reader = CaptureReader()
    messages = but_pace(reader.feed(file.read_bytes()))
    assert reader.head is not None and reader.torn == 0
    assert (reader.head.endpoint, reader.head.replay_endpoint) == (
        publisher.endpoint,
        publisher.replay_endpoint,
    )
    assert reader.head.started_ns < messages[0].at_ns
    assert [one.at_ns for one in messages] == sorted(one.at_ns for one in messages)
    assert starts == [JOIN, 0]
    assert [(one.channel, one.frames[-2:]) for one in messages] == [
        (Channel.CONNECTED, []),
        (Channel.ASKED, [b"", JOIN.to_bytes(8, "big")]),
        (Channel.ANSWER, replay_end(delimited=True)[-2:]),
        (Channel.ASKED, [b"", bytes(8)]),
        (Channel.ANSWER, old[-2:]),
        (Channel.ANSWER, replay_end(delimited=True)[-2:]),
        (Channel.LIVE, live_frames(b"", 1, GOOD)[-2:]),
    ]
    assert kvevents("lint", str(file), "--as", "vllm-router").stdout == (
        "vllm-router 0.1.17: takes all 2 batches, 2 blocks\n"
    )


def test_it_is_packed_as_gzip_does(publisher: RawPublisher, tmp_path: Path) -> None:
    """Whoever has gzip can unpack it."""
    file = tmp_path / "capture"
    with start_kvevents(
        "record", "record", "-w", str(file), publisher.endpoint, "-n", "1"
    ) as process:
        publisher.await_subscriber()
        publisher.live(0, payload=GOOD)
        process.communicate(timeout=PATIENCE_S)
    assert gzip.decompress(file.read_bytes()).startswith(b"kvevents capture 1\n")


def test_a_kill_costs_at_most_what_came_last(publisher: RawPublisher, tmp_path: Path) -> None:
    """kill -9 in the midst of a stream: what the file has is whole, in order, and no fault of it."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        seq = 0
        while not file.exists() or file.stat().st_size < 20_000:
            publisher.live(seq, payload=GOOD)
            seq += 1
        process.kill()
        process.wait(timeout=PATIENCE_S)
    messages = but_pace(read(file))
    assert messages[0].channel == Channel.CONNECTED
    live = live_of(messages)
    assert len(live) > 100 and len(live) == len(messages) - 1
    assert live == [live_frames(b"", n, GOOD) for n in range(len(live))]
    done = kvevents("lint", str(file), "--as", "dynamo")
    assert done.returncode == 0
    assert f"{len(live):,} batches" in done.stdout


def test_each_batch_can_be_read_before_the_next_comes(
    publisher: RawPublisher, tmp_path: Path
) -> None:
    """While it is written, and after a kill: nothing waits for more to come."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        for seq in range(5):
            publisher.live(seq, payload=GOOD)
            messages = await_live(file, seq + 1)
            assert live_of(messages) == [live_frames(b"", n, GOOD) for n in range(seq + 1)]
        process.kill()
        process.wait(timeout=PATIENCE_S)
    done = kvevents("lint", str(file), "--as", "dynamo")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_a_recording(publisher: RawPublisher, tmp_path: Path) -> None:
    """As the time does: the count is said, and the file is whole and closed."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        publisher.live(0, payload=GOOD)
        await_live(file, 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, plain(err)) == (0, told(1, file))
    assert gzip.decompress(file.read_bytes())


def test_ctrl_c_in_a_flood_spoils_nothing(publisher: RawPublisher, tmp_path: Path) -> None:
    """Wherever it strikes: the file is whole to its end, and has no hole."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        seq, interrupted = 0, False
        while process.poll() is None:
            publisher.live(seq, payload=GOOD)
            seq += 1
            if not interrupted and file.exists() and file.stat().st_size > 10_000:
                process.send_signal(signal.SIGINT)
                interrupted = True
        _, err = process.communicate(timeout=PATIENCE_S)
    assert gzip.decompress(file.read_bytes())
    live = live_of(read(file))
    assert live == [live_frames(b"", n, GOOD) for n in range(len(live))]
    assert plain(err) == told(len(live), file)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_a_manager_of_processes_ends_it_as_ctrl_c_does(
    publisher: RawPublisher, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM and SIGHUP: what came is in a file that is closed; without a batch there is no file."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        if number == signal.SIGTERM:
            publisher.live(0, payload=GOOD)
            await_live(file, 1)
        else:
            await_messages(file, 1)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    if number == signal.SIGTERM:
        assert (process.returncode, plain(err)) == (0, told(1, file))
        assert gzip.decompress(file.read_bytes())
    else:
        assert (process.returncode, plain(err)) == (
            3,
            f"kvevents record: nothing came; why: kvevents doctor {publisher.endpoint}\n",
        )
        assert not file.exists()


def test_what_a_stopped_recorder_misses_is_not_the_publishers_loss(
    publisher: RawPublisher, tmp_path: Path
) -> None:
    """The capture says from where to where it was away; `record` says so, and `check` blames nobody."""
    file = tmp_path / "capture"
    with start_kvevents("record", "record", "-w", str(file), publisher.endpoint) as process:
        publisher.await_subscriber()
        publisher.live(0, AllBlocksCleared())
        await_live(file, 1)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = time.monotonic()
        publisher.live(5, payload=GOOD)
        while time.monotonic() < stopped + 1.2:  # it has to be away for longer than a second
            time.sleep(max(0.0, stopped + 1.2 - time.monotonic()))
        process.send_signal(signal.SIGCONT)
        await_channel(file, Channel.ABREAST)
        publisher.live(6, payload=payload_of())
        await_live(file, 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    channels = [one.channel for one in read(file)]
    assert [one.channel for one in but_pace(read(file))] == [Channel.CONNECTED, *3 * [Channel.LIVE]]
    _, second, third = [at for at, one in enumerate(channels) if one == Channel.LIVE]
    assert channels[second - 1] == Channel.BEHIND and Channel.ABREAST in channels[second:third]
    assert process.returncode == 0
    assert err.startswith(SLOW)
    assert plain(err) == told(3, file, "1 gap, 4 batches lost")
    done = kvevents("check", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_standard_output(publisher: RawPublisher) -> None:
    """`-w -` writes the capture there, and its messages to stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", "record", "-w", "-", publisher.endpoint, "-n", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    publisher.await_subscriber()
    publisher.live(0, payload=GOOD)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, plain(err.decode())) == (0, told(1, "standard output"))
    assert live_of(CaptureReader().feed(out)) == [live_frames(b"", 0, GOOD)]


def test_a_reader_of_standard_output_that_leaves_is_no_error(publisher: RawPublisher) -> None:
    """SIGPIPE: quiet, and 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", "record", "-w", "-", publisher.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    publisher.await_subscriber()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    publisher.live(0, payload=GOOD)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 2, "kvevents record: -w: -: No space left on device\n"),
        (">&-", 2, "kvevents record: -w: -: standard output is closed\n"),
        ("| true", 0, ""),
    ],
)
def test_a_standard_output_that_takes_nothing(
    publisher: RawPublisher, redirection: str, code: int, said: str
) -> None:
    """A full disk and a closed descriptor are one line; a reader that has left is none at all."""
    command = f"set -o pipefail; {sys.executable} -m publisher.cli record -w - {publisher.endpoint}"
    with subprocess.Popen(
        ["bash", "-c", f"{command} {redirection}"],
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            publisher.live(0, payload=GOOD)  # that a reader has left is noticed by a write only
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr is not None
        assert (process.wait(), process.stderr.read().decode()) == (code, said)


@pytest.mark.parametrize("start", ["beginning", "3", "live"])
def test_from(publisher: RawPublisher, tmp_path: Path, start: str) -> None:
    """What is asked for first: all, what follows a seq, or nothing."""
    file = tmp_path / "capture"
    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    arguments = ("record", "-w", str(file), source, "--from", start, "-n", "1")
    with start_kvevents("record", *arguments) as process:
        publisher.await_subscriber()
        if start != "live":
            client, asked = publisher.request()
            assert asked == {"beginning": 0, "3": 3}[start]
            publisher.end(client)
        publisher.live(3, payload=GOOD)
        assert process.wait(timeout=PATIENCE_S) == 0
    asked_first = [one.frames for one in read(file) if one.channel == Channel.ASKED]
    assert (asked_first == []) == (start == "live")


def test_a_full_disk_is_one_line(publisher: RawPublisher, tmp_path: Path) -> None:
    """Exit code 2, and what was written until then can be read."""
    file = tmp_path / "capture"
    arguments = ("record", "-w", str(file), publisher.endpoint)
    pure = {"PYTHONDONTWRITEBYTECODE": "1"}  # or a module's compiled form were cut off as well
    with start_kvevents("record", *arguments, **pure) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        publisher.await_subscriber()
        seq, deadline = 0, time.monotonic() + PATIENCE_S
        while process.poll() is None:
            publisher.live(seq, payload=os.urandom(500))
            seq += 1
            assert time.monotonic() < deadline
        _, err = process.communicate()
    assert (process.returncode, err) == (2, f"kvevents record: -w: {file}: File too large\n")
    live = live_of(read(file))
    assert len(live) > 20
    assert [frames[1] for frames in live] == [n.to_bytes(8, "big") for n in range(len(live))]


def test_nothing_is_overwritten(publisher: RawPublisher, tmp_path: Path) -> None:
    """A file that is there already is left as it is."""
    file = tmp_path / "capture"
    file.write_text("mine")
    done = kvevents("record", "-w", str(file), publisher.endpoint, "--for", "1")
    assert (done.returncode, file.read_text()) == (2, "mine")
    assert done.stderr == f"kvevents record: -w: {file}: File exists\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tcp://h:1",), "-w"),
        (("-w", "/nonexistent/x", "tcp://127.0.0.1:1"), "-w: /nonexistent/x: No such file"),
        (("-w", "x", "tcp://h:1", "tcp://h:2"), "SOURCE: one endpoint is recorded at a time"),
        (("-w", "x", "y"), "SOURCE: 'y' is no endpoint, as tcp://10.0.0.5:5557 is; what is"),
        (("-w", "x", "y" * 300), "is no endpoint, as tcp://10.0.0.5:5557 is"),
        (("-w", "x", __file__), "is a file already; what is recorded is an endpoint"),
        (("tcp://h:1", "-o", "x"), "-o/--output: the file is given with -w: -w x"),
        (("-w", "x", "a=h:1,2"), "SOURCE: a=h:1,2: no such file; did you mean a=tcp://h:1,2?"),
        (("-w", "", "tcp://h:1"), "-w: '' is no file"),
        (("-w", "x" * 300, "tcp://127.0.0.1:1"), ": File name too long"),
        (("-w", "/nonexistent/x", "=tcp://127.0.0.1:1"), "-w: /nonexistent/x: No such file"),
        (("-w", "/nonexistent/x", "a=tcp://127.0.0.1:1,2"), "-w: /nonexistent/x: No such file"),
        (
            ("-w", "x", "tcp://h:1", "--from", "state"),
            "--from: state can be had of a replay endpoint",
        ),
        (
            ("-w", "x", "tcp://h:1,2", "--from", "-4"),
            "--from: -4 is not state, beginning, live",
        ),
        (
            ("-w", "x", "tcp://h:1,2", "--from", "9" * 19),
            f"--from: {'9' * 19} is above {2**63 - 1}",
        ),
        (("-w", "x", "tcp://h:1", "--for", "-1"), "--for: -1.0 is not above 0 and at most 86400"),
    ],
)
def test_usage(arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, and one line that names the option, its value and the bound."""
    done = kvevents("record", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def on_a_terminal(*arguments: str, until: bytes) -> str:
    """What a command says on stderr, a terminal, until it has said this; then Ctrl-C ends it."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "publisher.cli", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=its, env=ENVIRONMENT
    ) as process:
        os.close(its)
        said = b""
        try:
            while until not in said and (more := os.read(ours, 1000)):
                said += more
            process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE_S)
        finally:
            process.kill()
            os.close(ours)
    return said.decode()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["record", "-w", "{file}"], "recording {endpoint} to {file}; Ctrl-C ends it"),
        (["lint", "--for", "99"], "looking at {endpoint} for 99 s; Ctrl-C ends it sooner"),
        (["check", "-n", "9"], "checking {endpoint} until 9 batches came; Ctrl-C ends it sooner"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_a_person_sees_that_it_waits(
    publisher: RawPublisher, tmp_path: Path, command: list[str], said: str
) -> None:
    """Where stderr is a terminal, a line at the start: what is under way, and what ends it."""
    names = {"file": str(tmp_path / "c"), "endpoint": publisher.endpoint}
    arguments = (one.format(**names) for one in [*command, publisher.endpoint])
    seen = on_a_terminal(*arguments, until=b"\n")
    assert seen.splitlines()[0] == f"kvevents {command[0]}: {said.format(**names)}"


def test_a_publisher_that_leaves_is_said_to_have_left(tmp_path: Path) -> None:
    """It was there: what came is kept, and nobody looks for a wrong address."""
    file = tmp_path / "c"
    with ExitStack() as stack:
        publisher = stack.enter_context(RawPublisher())
        endpoint = publisher.endpoint
        with start_kvevents("record", "record", "-w", str(file), endpoint) as process:
            publisher.await_subscriber()
            publisher.live(0, payload=GOOD)
            await_live(file, 1)
            stack.close()
            await_channel(file, Channel.DISCONNECTED)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE_S)
    gone = f"kvevents record: no connection to {endpoint} any more"
    assert plain(err) == f"{gone}; why: kvevents doctor {endpoint}\n{told(1, file)}"


def test_what_came_before_it_joined_is_no_loss(publisher: RawPublisher, tmp_path: Path) -> None:
    """A gap behind the first batch is one."""
    file = tmp_path / "c"
    with start_kvevents(
        "record", "record", "-w", str(file), publisher.endpoint, "-n", "3"
    ) as process:
        publisher.await_subscriber()
        for seq in (40, 41, 44):
            publisher.live(seq, payload=GOOD)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert plain(err) == told(3, file, "1 gap, 2 batches lost")
