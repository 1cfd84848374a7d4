"""`kvevents top`: as a process, to a pipe and on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from publisher_crew import crew
from publisher_rig import (
    ENVIRONMENT,
    PATIENCE_S,
    RawPublisher,
    kvevents,
    payload_of,
    start_kvevents,
)

from kvevents import BlockStored, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.frames import live_frames
from kvevents.message import Channel

pytestmark = pytest.mark.integration

NOWHERE = "tcp://127.0.0.1:1"
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def test_two_workers_once() -> None:
    """Blocks of each tier are the caches' own; what comes meanwhile shows in the rates and the
    prefixes; no gaps, nothing lost.
    """
    with crew("w1", "w2") as hands:
        for hand in hands:
            hand.serve(range(40))
            hand.flush()
        sources = [hand.source for hand in hands]
        with start_kvevents("once", "top", *sources, "--for", "1", "-o", "json") as process:
            first = 0
            while process.poll() is None:
                first += 100
                hands[0].serve([*range(8), first, 1, 2, 3])
                hands[0].flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
        document = json.loads(out)
        busy, idle = document["rows"]
        assert idle["blocks"] == hands[1].counts() and idle["held"] == len(hands[1].held())
        assert busy["worker"] == "w1" and busy["rank"] == 0 and busy["link"] == "up"
        assert busy["events_per_s"] > 0 and busy["stored_per_s"] > 0
        assert idle["stored_per_s"] == 0
        assert -1 < busy["lag_p50_s"] <= busy["lag_p99_s"] < PATIENCE_S
        for one in document["rows"]:
            assert [one[key] for key in ("gaps", "lost", "restarts", "findings")] == [0] * 4
            assert one["replays"] == 1 and one["notes"] == []
        hottest = document["hottest"][0]
        assert (hottest["workers"], hottest["blocks"], hottest["tokens"]) == (2, 2, 8)
        assert hottest["stores"] > 0

        quiet = kvevents("top", *sources, "--for", "1")
        lines = quiet.stdout.splitlines()
        assert quiet.returncode == 0 and "2 of 2 up" in lines[0]
        assert [line.split()[0] for line in lines[1:5]] == ["worker", "w1", "w2", "total"]
        assert lines[2].split()[6:8] == [str(n) for n in list(hands[0].counts().values())[:2]]


def test_gaps_and_restarts_are_counted() -> None:
    """Of a stream that leaves out batches and then begins anew."""
    with RawPublisher() as publisher:
        arguments = (f"w={publisher.endpoint}", "--for", "2", "-o", "json")
        with start_kvevents("gaps", "top", *arguments) as process:
            publisher.await_subscriber()
            block = BlockStored([1], None, [1], 1, medium=StorageMedium.GPU)
            for seq in (0, 4, 5, 0):
                publisher.live(seq, block)
            out, _ = process.communicate(timeout=PATIENCE_S)
    (row,) = json.loads(out)["rows"]
    assert [row[key] for key in ("gaps", "lost", "replays", "restarts")] == [1, 3, 0, 1]
    assert row["held"] == 1 and row["findings"] > 0
    assert row["lag_p50_s"] > 1e9  # the batches say that they are of 1970


def test_a_capture(tmp_path: Path) -> None:
    """Shown once, with its own time; what would move a terminal is not there."""
    payload = payload_of(
        BlockStored([1], None, [1], 1, medium=StorageMedium.GPU, lora_name="\x1b[2J")
    )
    told = [
        pack_message(seq * 10**10, Channel.LIVE, live_frames(b"", seq, payload)) for seq in range(2)
    ]
    file = tmp_path / "\x1b[2Jc"
    file.write_bytes(capture_start(CaptureHead(endpoint="tcp://h:1")) + b"".join(told))
    ran = kvevents("top", str(file))
    assert ran.returncode == 0 and "1 capture; rates of all that was seen" in ran.stdout
    assert "\x1b" not in ran.stdout


def test_nobody_is_there() -> None:
    """A row that says so, and 3."""
    ran = kvevents("top", NOWHERE, "--for", "0.3", "--topic", "kv@")
    assert ran.returncode == 3
    assert "down" in ran.stdout and "not connected" in ran.stdout
    why = f"kvevents top: no connection to {NOWHERE}; why: kvevents doctor {NOWHERE} --topic kv@\n"
    assert ran.stderr == why


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--interval", "0"), "--interval: 0.0 is not above 0"),
        (("--for", "-1"), "--for: -1.0 is not above 0"),
        (("--prefixes", "-1"), "--prefixes: -1 is below 0"),
        (("--sort", "ev"), "--sort"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], why: str) -> None:
    """One line that names the option, and 2."""
    ran = kvevents("top", NOWHERE, *arguments)
    assert (ran.returncode, ran.stdout) == (2, "") and why in ran.stderr


# ------------------------------------------------------------------------------------ a terminal


class Terminal:
    """`kvevents top` on a pseudo terminal of 24 lines. `piped`: its output goes to a pipe first."""

    def __init__(
        self, *arguments: str, columns: int = 80, piped: bool = False, **environment: str
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        without = {
            key: value for key, value in ENVIRONMENT.items() if key not in ("COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "publisher.cli", "top", *arguments],
            stdin=theirs,
            stdout=subprocess.PIPE if piped else theirs,
            stderr=theirs,
            env={**without, "TERM": "xterm-256color", **environment},
        )
        self.text = ""

    def read_until(self, part: str) -> None:
        """Until that is on the screen, at some time."""
        deadline = time.monotonic() + PATIENCE_S
        while part not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{part!r} is not in {self.text!r}"
            self._read(left)

    def end(self, *numbers: int) -> int:
        """Send the signals; the exit code, once all is read."""
        for number in numbers:
            self.process.send_signal(number)
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.process.returncode

    def hang_up(self) -> None:
        """It is gone."""
        os.close(self._ours)
        os.close(self._theirs)
        self._ours = self._theirs = -1

    def now(self) -> list[object]:
        """The settings of the terminal."""
        return termios.tcgetattr(self._theirs)

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], timeout_s)
        if ready:
            self.text += os.read(self._ours, 65536).decode(errors="replace")
        return bool(ready)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self._ours >= 0:
            self.hang_up()


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGINT], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGQUIT], 131),
    ],
)
def test_a_terminal_is_left_as_it_was(numbers: list[int], code: int) -> None:
    """Ctrl-C, also twice, and what else ends it does so without a traceback, on the screen that was there
    before, with its cursor; meanwhile the numbers are on a screen of 80 columns.
    """
    with (
        RawPublisher() as publisher,
        Terminal(f"w={publisher.endpoint}", "--interval", "0.1") as terminal,
    ):
        publisher.await_subscriber()
        block = BlockStored([7], None, [1] * 16, 16, medium=StorageMedium.GPU)
        publisher.live(31_337, block)
        terminal.read_until("31337")
        terminal.read_until("hottest prefixes")
        ended = terminal.end(*numbers)
        assert terminal.now() == terminal.before
        text = terminal.text
    either = {0, 130, 143, -signal.SIGTERM}  # whichever comes first, or after the screen was left
    assert ended in (either if len(numbers) > 1 else {code})
    assert "Traceback" not in text
    assert text.index(ALTERNATE) < text.index("31337") < text.rindex(NORMAL)
    assert text.index(ALTERNATE) < text.rindex(SHOW_CURSOR)
    assert HIDE_CURSOR not in text[text.rindex(SHOW_CURSOR) :]
    assert ALTERNATE not in text[text.rindex(NORMAL) :]
    frames = text.replace("\x1b[H", "\n")
    for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames).splitlines():
        assert len(line) <= 80


def test_a_terminal_that_is_gone() -> None:
    """Nobody is told by a signal, as where it is not the session's own: it ends all the same, also where
    nothing is to be shown for long.
    """
    with RawPublisher() as publisher:
        for interval in ("0.1", "3600"):
            with Terminal(publisher.endpoint, "--interval", interval) as terminal:
                publisher.await_subscriber()
                terminal.read_until("kvevents top")
                terminal.hang_up()
                assert terminal.process.wait(PATIENCE_S) == 129
                publisher.await_subscriber(b"\0")


def test_ctrl_z_leaves_the_screen_meanwhile() -> None:
    """The shell has its own screen, and afterwards the table is there again."""
    with (
        RawPublisher() as publisher,
        Terminal(publisher.endpoint, "--interval", "0.1") as terminal,
    ):
        publisher.await_subscriber()
        terminal.read_until("kvevents top")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.read_until(NORMAL + SHOW_CURSOR)
        os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
        terminal.text = ""
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until("kvevents top")
        assert terminal.text.startswith(ALTERNATE)
        assert terminal.end(signal.SIGINT) == 3  # nothing came


@pytest.mark.parametrize("columns", [100, 120])
def test_a_terminal_of_any_width(columns: int) -> None:
    """No line is wider, neither of the live table, nor of what goes to it once by a pipe."""
    name = "vllm-decode-7f9c6d5b8-x2x4q.inference.svc.cluster.local"
    tokens, names = list(range(1000)), list[int | bytes](range(1, 1001))
    block = BlockStored(names, None, tokens, 1, medium=StorageMedium.GPU)
    with RawPublisher() as publisher:
        source = f"{name}={publisher.endpoint}"
        for arguments in (("--interval", "0.1"), ("--once", "--for", "1")):
            piped = "--once" in arguments
            with Terminal(source, *arguments, columns=columns, piped=piped) as terminal:
                publisher.await_subscriber()
                publisher.live(1_234_567, block)
                if piped:
                    assert terminal.process.stdout is not None
                    text = terminal.process.stdout.read().decode()
                else:
                    terminal.read_until("hottest prefixes")
                    terminal.end(signal.SIGINT)
                    text = terminal.text.replace("\x1b[H", "\n")
                publisher.await_subscriber(b"\0")
            lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
            assert any("1234567" in line for line in lines)
            assert max(map(len, lines)) <= columns


def test_batches_that_wait_for_a_replay() -> None:
    """While nobody answers, the table says that batches came and wait, and for whom."""
    with RawPublisher() as publisher:
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        with start_kvevents("waits", "top", source, "--for", "2") as process:
            publisher.await_subscriber()
            publisher.request()
            publisher.live(0)
            publisher.live(1)
            out, err = process.communicate(timeout=PATIENCE_S)
    silent = f"the replay endpoint {publisher.replay_endpoint} does not answer"
    assert f"2 batches have come and wait: {silent}" in out
    assert f"{silent}; why: kvevents doctor {source}\n" in err
    assert process.returncode == 1


def test_a_look_begins_when_the_replay_is_over() -> None:
    """One that takes longer than --for does not hide what comes live: it is waited for."""
    with RawPublisher() as publisher:
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        arguments = (source, "--once", "--for", "1", "--json")
        with start_kvevents("joins", "top", *arguments) as process:
            publisher.await_subscriber()
            client, _ = publisher.request()
            seq, over_at = 0, time.monotonic() + 1.6
            joining, deadline = True, time.monotonic() + PATIENCE_S
            while process.poll() is None:
                now = time.monotonic()
                assert now < deadline, "it does not end"
                block = BlockStored([seq], None, [1], 1, medium=StorageMedium.GPU)
                if joining:
                    publisher.answer(client, seq, block)
                if joining and now > over_at:
                    publisher.end(client)
                    joining = False
                publisher.live(seq, block)
                seq += 1
                publisher.pub.poll(20)
            out, err = process.communicate()
    (row,) = json.loads(out)["rows"]
    assert (process.returncode, err, row["notes"]) == (0, "", [])
    assert row["events_per_s"] > 0 and row["stored_per_s"] > 0
    assert row["lag_p50_s"] is not None and not joining


def test_no_color_is_respected() -> None:
    """Bold may be; colours are not."""
    with (
        RawPublisher() as publisher,
        Terminal(publisher.endpoint, "--interval", "0.1", NO_COLOR="1") as terminal,
    ):
        publisher.await_subscriber()
        publisher.live(31_337)
        terminal.read_until("31337")
        terminal.end(signal.SIGINT)
        assert not re.search(r"\x1b\[(\d+;)*3[0-7]m", terminal.text)


def test_a_document_on_a_terminal_is_of_once() -> None:
    """-o json goes with --once there."""
    with Terminal(NOWHERE, "-o", "json") as terminal:
        terminal.read_until("kvevents top: -o json: on a terminal it goes with --once")
        assert terminal.end(0) == 2
