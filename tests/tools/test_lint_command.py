"""`kvevents lint`: as a process, against real sockets, and on torn files."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import zmq
from publisher_rig import (
    ENVIRONMENT,
    LOOPBACK,
    PATIENCE_S,
    RawPublisher,
    insert,
    payload_of,
    start_kvevents,
)

from hicache import HiRadixCache, HostPool, KVShape, PagePool
from hicache.storage import FileStorage, PageFormat
from kvevents import AllBlocksCleared, BlockStored, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.dialect import PRESETS
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from kvevents.lint import CONSUMERS
from kvevents.message import Channel, Message
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main
from publisher.config.keys import read_secret_key, write_keys
from publisher.subscriber.listener import Listener, wait_for
from publisher.tools.lint import Linted, Report, read_consumers

WIDE = 0x0123_4567_89AB_CDEF
GOOD = payload_of(BlockStored([WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU))
SIGNED = payload_of(BlockStored([-WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU))
CLEARED = payload_of(AllBlocksCleared())
EMPTY = payload_of()


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
    """The command, to its end, in this process."""
    told = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(told)
        except SystemExit as exit_:
            code = exit_.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(told, code, out.getvalue(), err.getvalue())


# ------------------------------------------------------------------------------------- captures


def test_a_finding_is_a_line_and_each_consumer_is_told_of(tmp_path: Path) -> None:
    """Exit code 1; who loses how much, and below it the reason: the batch, the place, what is there."""
    done = run("lint", capture(tmp_path / "c", GOOD, SIGNED, GOOD), "--as", "vllm-router,dynamo")
    assert done.returncode == 1
    where = "events[0].block_hashes[0]"
    assert done.stdout.splitlines() == [
        "vllm-router 0.1.17: loses 1 of 3 batches",
        f"  drops the batch at seq 1: {where} is {-WIDE}: it reads unsigned hashes only",
        "dynamo 1.6.1: takes all 3 batches, 3 blocks",
    ]
    assert done.stderr == ""


def test_nothing_lost_is_0(tmp_path: Path) -> None:
    """No line but the summary."""
    done = run("lint", capture(tmp_path / "c", CLEARED, GOOD), "--as", "dynamo")
    told = "dynamo 1.6.1: takes all 2 batches, 1 block\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_every_consumer_unless_told(tmp_path: Path) -> None:
    """Without --as, a summary of each."""
    done = run("lint", capture(tmp_path / "c", GOOD))
    told = {line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert told == {consumer.name for consumer in read_consumers(None)}


def test_findings_of_one_kind_are_counted(tmp_path: Path) -> None:
    """How many batches, the first and the last; with -v each of them as well, before."""
    file = capture(tmp_path / "c", GOOD, *[SIGNED] * 5)
    where, why = "events[0].block_hashes[0]", "it reads unsigned hashes only"
    brief = run("lint", file, "--as", "vllm-router").stdout.splitlines()
    assert brief == [
        "vllm-router 0.1.17: loses 5 of 6 batches",
        f"  drops the batch 5 times, first at seq 1, last at seq 5: {where} is {-WIDE}: {why}",
    ]
    verbose = run("lint", file, "--as", "vllm-router", "-v").stdout.splitlines()
    assert [line.split()[1] for line in verbose[:-2]] == ["1", "2", "3", "4", "5"]
    assert verbose[0].startswith("seq 1        vllm-router    drops the batch: events[0]")
    assert verbose[-2:] == brief


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
        "blocks": 2,
        "joined_at": None,
        "lost": {"batch": 2},
    }


def test_several_captures_are_told_apart(tmp_path: Path) -> None:
    """Each line begins with its source."""
    one, two = capture(tmp_path / "one", SIGNED), capture(tmp_path / "two", GOOD)
    done = run("lint", one, two, "--as", "vllm-router")
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [str(one), "vllm-router"],
        [str(one), "drops"],
        [str(two), "vllm-router"],
    ]


def test_check_is_lint_for_consumers_that_are_named(tmp_path: Path) -> None:
    """The same lines and exit code; without --as it looks at something else."""
    file = capture(tmp_path / "c", SIGNED)
    checked = run("check", file, "--as", "vllm-router")
    linted = run("lint", file, "--as", "vllm-router")
    assert (checked.returncode, checked.stdout) == (linted.returncode, linted.stdout)
    assert run("check", file).stdout.startswith("seq 0            first-seq (17): note: ")


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
        assert out.startswith("vllm-router 0.1.17: ")


def test_those_that_saw_nothing_are_one_line(tmp_path: Path) -> None:
    """Every consumer of a capture without a batch, and of one without a block; some of them by name."""
    nothing = run("lint", capture(tmp_path / "c"))
    assert (nothing.returncode, nothing.stdout) == (3, "all 14 consumers: saw no batch\n")
    idle = run("lint", capture(tmp_path / "d", CLEARED, EMPTY), "--as", "dynamo,aibrix,sglang,smg")
    names = "dynamo, sglang, smg: saw no block in 2 batches"
    assert names in idle.stdout.splitlines()
    assert " at seq 0: events[0] is a map: it reads arrays only\n" in idle.stdout


def report_of(name: str, *told: Message) -> list[str]:
    """What is written of these messages, as one consumer takes them."""
    lines: list[str] = []
    report = Report(lines.append, "", as_json=False, verbose=False)
    linted = Linted(read_consumers(name), report, replay=False)
    for message in told:
        linted.take(message)
    linted.close()
    return lines


def at(seq: int, payload: bytes, topic: bytes = b"") -> Message:
    """One live message."""
    return Message(0, Channel.LIVE, live_frames(topic, seq, payload))


def test_how_often_and_where() -> None:
    """Whole batches are counted by times, what is lost of some by the batches; a seq that is none is
    not named.
    """
    salted = payload_of(
        BlockStored([WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU, cache_salt="s")
    )
    why = "it does not read that, and counts the blocks for prompts without"
    assert report_of("mooncake-vllm", at(0, salted), at(1, GOOD), at(2, salted)) == [
        "mooncake-vllm Aug 2026, type vLLM: misreads 2 events",
        f"  misreads in 2 batches, first at seq 0, last at seq 2: events[0].cache_salt is 's': {why}",
    ]
    torn = Message(0, Channel.LIVE, [b"", b"12", GOOD])
    assert report_of("dynamo", torn, torn) == [
        "dynamo 1.6.1: loses all 2 batches",
        "  drops the batch 2 times: seq has 2 bytes: it reads 8 only",
    ]


def test_a_gap_while_we_read_too_slowly_is_nobodys(tmp_path: Path) -> None:
    """It is said how many there were, and no consumer is judged by one; one that comes later is a gap."""
    file = tmp_path / "c"
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint=None))
    behind = [Message(0, Channel.BEHIND, []), at(5, GOOD), Message(0, Channel.ABREAST, [])]
    for later, code in (([at(6, GOOD)], 0), ([at(9, GOOD)], 1)):
        told = [at(0, GOOD), *behind, *later]
        records = [pack_message(one.at_ns, one.channel, one.frames) for one in told]
        file.write_bytes(head + b"".join(records))
        done = run("lint", file, "--as", "dynamo")
        assert done.returncode == code, done
        assert done.stderr == (
            "kvevents lint: 1 gap is held against nobody: we read too slowly, and may have lost the"
            " batches\n"
        )
        assert ("at seq 9" in done.stdout) == bool(code)
        assert "at seq 5" not in done.stdout


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (-1, "a record whose checksum is not its own"),
        (3, "a record whose length is not its own"),
    ],
)
def test_damage_is_said_and_is_1(tmp_path: Path, at: int, why: str) -> None:
    """A record with a wrong checksum, or a wrong length, ends the capture: how much of it was read."""
    file = capture(tmp_path / "c", GOOD)
    record = bytearray(pack_message(1, Channel.LIVE, live_frames(b"", 1, GOOD)))
    record[at] ^= 1
    file.write_bytes(file.read_bytes() + record + bytes(5000))
    size = len(record) + 5000
    share = round(100 * size / file.stat().st_size)
    done = run("lint", file, "--as", "vllm-router", "-o", "json")
    assert done.returncode == 1
    assert done.stderr == (
        f"kvevents lint: {file}: 1 batch was read, the other {size:,} bytes, {share} % of the file,"
        f" were left out: {why}\n"
    )
    damage, _ = map(json.loads, done.stdout.splitlines())
    told = {"source": str(file), "type": "capture", "left_out_bytes": size, "why": why}
    assert damage == told


def test_a_torn_tail_is_in_the_json(tmp_path: Path) -> None:
    """How many bytes a kill has cost; the exit code is that of what is whole."""
    file = capture(tmp_path / "c", GOOD, SIGNED)
    file.write_bytes(file.read_bytes()[:-3])
    done = run("lint", file, "--as", "vllm-router", "-o", "json")
    size = len(pack_message(1, Channel.LIVE, live_frames(b"", 1, SIGNED))) - 3
    torn = json.loads(done.stdout.splitlines()[0])
    assert (done.returncode, torn["type"]) == (0, "capture")
    assert (torn["left_out_bytes"], torn["why"]) == (size, "it was cut off")


def test_no_block_is_3(tmp_path: Path) -> None:
    """Where heartbeats and clears are all that came, nobody can be said to take all."""
    done = run("lint", capture(tmp_path / "c", CLEARED, EMPTY, EMPTY), "--as", "dynamo")
    assert done.returncode == 3
    assert done.stdout == "dynamo 1.6.1: saw no block in 3 batches\n"
    assert done.stderr == "kvevents lint: no block was stored in 3 batches\n"


def test_a_forged_request_is_none(tmp_path: Path) -> None:
    """A request of thousands of bytes in a capture asks for nothing."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2"))
    told = [
        (Channel.ASKED, [b"\xff" * 5000]),
        (Channel.ANSWER, replay_answer(b"", 0, GOOD, delimited=True)),
        (Channel.ANSWER, replay_end(delimited=True)),
    ]
    file = tmp_path / "c"
    file.write_bytes(head + b"".join(pack_message(0, *one) for one in told))
    done = run("lint", file, "--as", "dynamo")
    assert (done.returncode, done.stderr) == (0, "")


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
    parts = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    of = {part.split()[0]: part for part in parts if part}
    assert of["dynamo"].startswith("dynamo 1.6.1: cannot follow the stream 2 times\n")
    assert "  cannot follow the stream at seq 3: replay begins with 3, not 0: " in of["dynamo"]
    assert "  cannot follow the stream at seq 4: replay has no end: it waits for" in of["dynamo"]
    often = "  cannot follow the stream 2 times, first at seq 3, last at seq 4"
    assert f"{often}: replay answer has 3 frames: it reads 4 only" in of["vllm-router"]


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
    at_once, *report = out.splitlines()
    assert at_once.startswith("seq 1        vllm-router    drops the batch: ")
    assert report[0] == "vllm-router 0.1.17: loses 1 of 3 batches"
    assert report[1].startswith("  drops the batch at seq 1: ")
    assert report[2:] == ["sglang 0.5.23: takes all 3 batches, 3 blocks"]


def test_joining_late_is_our_own_doing(publisher: RawPublisher) -> None:
    """Without a replay endpoint, on a healthy worker: exit code 0, and the summary says since when."""
    with start_kvevents("lint", "lint", publisher.endpoint, "-n", "2", "--as", "dynamo") as process:
        publisher.await_subscriber()
        for seq in (7, 8):
            publisher.live(seq, payload=GOOD)
        out, err = process.communicate(timeout=PATIENCE_S)
    joined = "joined at seq 7: what was stored before is unknown to it"
    assert out == f"dynamo 1.6.1: takes all 2 batches, 2 blocks; {joined}\n"
    assert (process.returncode, err) == (0, "")


def test_the_time_is_up_between_messages(publisher: RawPublisher) -> None:
    """However much has come at once, and however long each message takes, it ends soon after."""
    event = BlockStored([WIDE], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)
    large = payload_of(*[event] * 10_000)

    def tell() -> None:
        publisher.await_subscriber()
        for seq in range(40):
            publisher.live(seq, payload=large)

    thread = Thread(target=tell)
    thread.start()
    done = run("lint", publisher.endpoint, "--for", "2", "--as", "dynamo")
    thread.join()
    found = re.fullmatch(
        r"dynamo 1.6.1: takes (all (\d+) batches|the one batch), .*\n", done.stdout
    )
    assert found is not None, done
    assert found[2] is None or int(found[2]) < 40


def test_ctrl_c_ends_it_as_the_time_does(publisher: RawPublisher) -> None:
    """The summary and the exit code are those of what came."""
    with start_kvevents("lint", "lint", publisher.endpoint, "--as", "vllm-router") as process:
        publisher.await_subscriber()
        publisher.live(0, payload=SIGNED)
        assert process.stdout is not None
        assert "vllm-router" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert out.startswith("vllm-router 0.1.17: loses the one batch\n  drops the batch at seq 0: ")


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A full disk behind stdout, for lint, check, and what else prints: exit code 2."""
    file = capture(tmp_path / "c", GOOD, SIGNED)
    for arguments in (
        ("lint", str(file)),
        ("check", str(file), "--as", "dynamo"),
        ("serve", "--check"),
        ("lint", "--help"),
    ):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "publisher.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=60.0,
                env=ENVIRONMENT,
            )
        said = "kvevents: standard output: No space left on device\n"
        assert (done.returncode, done.stderr) == (2, said)


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
    done = run("lint", publisher.endpoint, "--for", "0.5", "--as", "dynamo")
    why = f"why: kvevents doctor {publisher.endpoint}"
    assert (done.returncode, done.stderr) == (3, f"kvevents lint: nothing came; {why}\n")
    assert done.stdout == "dynamo 1.6.1: saw no batch\n"
    assert run("lint", capture(tmp_path / "c"), "--as", "dynamo").returncode == 3
    done = run("record", "-w", tmp_path / "r", publisher.endpoint, "--for", "0.5")
    assert (done.returncode, done.stderr) == (3, f"kvevents record: nothing came; {why}\n")
    assert not (tmp_path / "r").exists()


def test_a_publisher_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nothing came, because there was no connection."""
    nobody = "tcp://127.0.0.1:1"
    for command in (("lint",), ("record", "-w", tmp_path / "r")):
        done = run(*command, nobody, "--for", "0.1")
        why = f"why: kvevents doctor {nobody}"
        said = f"kvevents {command[0]}: no connection to {nobody}; {why}\n"
        assert (done.returncode, done.stderr) == (3, f"{said}kvevents {command[0]}: nothing came\n")


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
    lines = done.stdout.splitlines()
    assert "vllm-router 0.1.17: cannot follow the stream 2 times" in lines
    assert lines[-1] == "dynamo 1.6.1: takes all 2 batches, 2 blocks"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((), "the replay endpoint did not answer"),
        ((replay_answer(b"", 0, GOOD, delimited=True),), "the replay was not over"),
    ],
    ids=["none", "no end"],
)
def test_a_replay_that_does_not_end_in_time_is_1(
    publisher: RawPublisher, answers: tuple[list[bytes], ...], said: str
) -> None:
    """Live batches came, and all of them are taken; the replay is none, and it is said which."""

    def tell() -> None:
        publisher.await_subscriber()
        client, _ = publisher.request()
        for answer in answers:
            publisher.router.send_multipart([client, *answer])
        publisher.live(1, payload=GOOD)

    thread = Thread(target=tell)
    thread.start()
    done = run(
        *("lint", publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint),
        *("--as", "sglang", "--for", "1"),
    )
    thread.join()
    assert (done.returncode, done.stderr) == (1, f"kvevents lint: {said}\n")
    assert "sglang 0.5.23: takes " in done.stdout


@pytest.mark.parametrize("answered", [False, True])
def test_a_replay_that_was_given_up_is_a_fault(answered: bool) -> None:
    """Whoever minds it, and however much time there still is; what was held comes in its turn."""
    report = Report(lambda line: None, "", as_json=False, verbose=False)
    linted = Linted(read_consumers("aibrix"), report, replay=True)
    linted.take(Message(0, Channel.LIVE, live_frames(b"", 0, EMPTY)))
    linted.take(Message(0, Channel.ASKED, replay_request(JOIN)))
    if answered:
        linted.take(Message(0, Channel.ANSWER, replay_answer(b"", 0, GOOD, delimited=True)))
    assert linted.lint.tallies[0].batches == answered
    linted.take(Message(0, Channel.OVER, []))
    assert linted.lint.tallies[0].batches == 1
    said = "the replay was not over" if answered else "the replay endpoint did not answer"
    assert linted.missing_end(time_is_up=False) == said


def test_what_is_held_for_a_replay_is_bounded_in_bytes() -> None:
    """64 MiB of live messages are not kept any longer, whatever the replay does."""
    report = Report(lambda line: None, "", as_json=False, verbose=False)
    linted = Linted(read_consumers("sglang"), report, replay=True)
    for seq in range(5):
        assert linted.lint.tallies[0].batches == 0
        linted.take(Message(0, Channel.LIVE, live_frames(b"", seq, bytes(15 << 20))))
    assert linted.lint.tallies[0].batches == 5


def test_a_replay_that_is_not_answered_is_over_after_a_while(publisher: RawPublisher) -> None:
    """The tap says so once, and live messages go on."""
    messages: list[Message] = []
    deadline = time.monotonic() + PATIENCE_S
    with Listener(
        publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=0.2, attempts=1
    ) as tap:
        while not any(one.channel == Channel.OVER for one in messages):
            assert time.monotonic() < deadline, messages
            wait_for([tap], deadline)
            messages += [
                step.message for step in tap.turn() if step.message.channel < Channel.BEHIND
            ]
        told = [Channel.CONNECTED, Channel.ASKED, Channel.OVER]
        assert [one.channel for one in messages] == told
        assert publisher.request()[1] == JOIN
        publisher.live(0, payload=GOOD)
        messages.clear()
        while not any(one.channel == Channel.LIVE for one in messages):
            assert time.monotonic() < deadline, messages
            wait_for([tap], deadline)
            messages += [step.message for step in tap.turn()]
    live = [one.frames for one in messages if one.channel == Channel.LIVE]  # it may have asked anew
    assert live == [live_frames(b"", 0, GOOD)]


def test_a_giant_message_is_not_taken_in(publisher: RawPublisher) -> None:
    """Above 64 MiB the connection is closed, for good, before the message is in memory; it is said."""

    def tell() -> None:
        publisher.await_subscriber()
        publisher.live(0, payload=GOOD)
        publisher.live(1, payload=bytes((64 << 20) + 1))

    thread = Thread(target=tell)
    thread.start()
    done = run("lint", publisher.endpoint, "--as", "sglang", "--for", "1")
    thread.join()
    assert done.stdout == "sglang 0.5.23: takes the one batch, 1 block\n"
    gone = f"kvevents lint: no connection to {publisher.endpoint} any more"
    assert done.stderr == f"{gone}; why: kvevents doctor {publisher.endpoint}\n"


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
    assert "\nvllm-router 0.1.17: loses the one batch\n" in out


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
        (("lint", "tcp://h:1", "--topic", "\udcff"), ["--topic: ", "cannot be encoded"]),
        (("record", "-w", "x", "tcp://h:1", "--topic", "\udcff"), ["--topic: "]),
        (("lint", "/nonexistent\x1b[31m\n"), ["SOURCE: /nonexistent [31m "]),
        (("record", "-w", "/nonexistent\n\x1b/x", "tcp://h:1"), ["-w: /nonexistent /x: "]),
        (("lint", "tcp://h:1", "\x9b", "--\x1b\n"), ["unrecognized arguments: -- "]),
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


def test_help_names_the_consumers() -> None:
    """All that --as takes."""
    done = run("lint", "--help")
    assert done.returncode == 0
    assert f"names for --as: {', '.join(CONSUMERS)}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", ["check", "lint"])
def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Every line of it, with examples."""
    monkeypatch.setenv("COLUMNS", "80")
    told = run(command, "--help").stdout
    assert "examples:\n" in told
    assert [line for line in told.splitlines() if len(line) > 80] == []


def test_a_captures_name_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    """Its control characters, and bytes that are no text, are left out of every line."""
    name = "a\x1b[31m\n\x9b\udcff"
    file, other = capture(tmp_path / name, GOOD, SIGNED), capture(tmp_path / "b", GOOD)
    file.write_bytes(file.read_bytes()[:-3])
    for output in ("text", "json"):
        done = run("lint", file, other, "--as", "sglang", "-o", output)
        assert done.returncode == 0
        assert all(line.isprintable() for line in done.stdout.split("\n"))
        assert done.stderr.count("\n") == 1 and done.stderr.rstrip("\n").isprintable()


def test_names_cannot_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of keys, values and topics are escaped, in both outputs."""
    event: dict[str, Any] = {"type": "\x1b[31m\u202e", "\n\x9b": 1, "medium": "\u2028\u0085"}
    payload = msgspec.msgpack.encode((1.0, [event], 0))
    file = capture(tmp_path / "c", payload, topic=b"\x1b[2J\xff")
    for output in ("text", "json"):
        assert main(["lint", str(file), "-o", output]) == 1
        lines = capsys.readouterr().out.split("\n")
        assert len(lines) > 10 and all(line.isprintable() for line in lines)


def judged(name: str, endpoint: str, replay_endpoint: str | None, *, blocks: int) -> str:
    """What this consumer makes of a stream, once so many blocks of it have come."""
    lines: list[str] = []
    report = Report(lines.append, "", as_json=False, verbose=False)
    linted = Linted(read_consumers(name), report, replay=True)
    deadline = time.monotonic() + PATIENCE_S
    with Listener(endpoint, replay_endpoint) as tap:
        while linted.blocks < blocks:
            assert time.monotonic() < deadline, (name, linted.blocks, lines)
            wait_for([tap], deadline)
            for message, _ in tap.turn():
                linted.take(message)
    linted.close()
    return "\n".join(lines)


@pytest.mark.integration
def test_a_sidecar_is_taken_whole_in_each_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink's replay and live batches, in a consumer's own dialect, lose that consumer nothing: of a
    worker with every tier, so that the store's consumer has blocks as well.
    """
    names = sorted(CONSUMERS.keys() & PRESETS.keys())
    sinks = tuple(
        SinkConfig(name=name, dialect=name, endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
        for name in names
    )
    monkeypatch.setenv("POD_IP", "10.0.0.1")
    pool = PagePool(64, 4, KVShape(1, 1, 1))
    files = FileStorage(tmp_path / "files", PageFormat.of(pool, "m"), min_free_bytes=0)
    worker = WorkerInfo(block_size=4, model="m", worker_id="w")
    config = SidecarConfig(sinks=sinks, linger_s=0.0, state_dir=str(tmp_path / "state"))
    with (
        HiRadixCache(pool, host_pool=HostPool.beside(pool, ratio=1), storage=files) as cache,
        spawn(worker, config) as sidecar,
    ):
        for step in range(3):
            insert(cache, range(step * 100, step * 100 + 8))
            assert cache.settle(PATIENCE_S)
            sidecar.pump(cache)
        assert sidecar.client.flush(cache, PATIENCE_S) is not None
        for name, bound in zip(names, sidecar.client.sinks, strict=True):
            told = judged(name, bound.endpoint, bound.replay_endpoint, blocks=6)
            assert re.search(r": takes all \d+ batches, \d+ blocks$", told), told
    files.close()
