"""`kvevents tail` as a process: a real sidecar, publishers by hand, captures with all that goes wrong."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_rig import (
    ENVIRONMENT,
    LOOPBACK,
    PATIENCE_S,
    RawPublisher,
    insert,
    kvevents,
    make_cache,
    payload_of,
    short_folder,
    start_kvevents,
)

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
)
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.codec import pack_batch
from kvevents.frames import live_frames, replay_answer, replay_end, replay_request
from kvevents.message import Channel
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main
from publisher.cli.commands import parser_of

pytestmark = pytest.mark.integration

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
TS = 1_700_000_000.0


class Scene:
    """A capture being made: messages one after the other, a millisecond apart."""

    def __init__(self, file: Path, replay_endpoint: str | None = None) -> None:
        self.file, self._at = file, int(TS * 1e9)
        head = CaptureHead(endpoint="tcp://h:1", replay_endpoint=replay_endpoint)
        file.write_bytes(capture_start(head))

    def add(self, channel: Channel, frames: list[bytes]) -> None:
        self._at += 1_000_000
        with self.file.open("ab") as capture:
            capture.write(pack_message(self._at, channel, frames))

    def live(self, seq: int, *events: Event, payload: bytes | None = None, rank: int = 0) -> None:
        told = pack_batch(KVEventBatch(TS, list(events), rank)) if payload is None else payload
        self.add(Channel.LIVE, live_frames(b"kv", seq, told))

    def asked(self, start: int) -> None:
        self.add(Channel.ASKED, replay_request(start))

    def answer(self, seq: int, *events: Event) -> None:
        told = pack_batch(KVEventBatch(TS, list(events), 0))
        self.add(Channel.ANSWER, replay_answer(b"kv", seq, told, delimited=True))

    def over(self) -> None:
        self.add(Channel.ANSWER, replay_end(delimited=True))


def store(first: int, count: int = 1, parent: int | None = None, **fields: Any) -> BlockStored:
    """Blocks of 4 tokens, named and filled after their number."""
    tokens = range(first * 4, (first + count) * 4)
    told: dict[str, Any] = {"token_ids": list(tokens), "block_size": 4, "medium": GPU} | fields
    hashes: list[int | bytes] = list(range(first, first + count))
    return BlockStored(hashes, parent, **told)


def gone(*blocks: int, medium: StorageMedium | None = GPU) -> BlockRemoved:
    return BlockRemoved(list(blocks), medium)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A capture in which nothing is wrong: 8 batches, 9 events."""
    scene = Scene(tmp_path / "plain.capture")
    scene.live(0, AllBlocksCleared())
    scene.live(1, store(1, 2))
    scene.live(2, store(1, 2, medium=CPU), store(3, parent=2))
    scene.live(3, store(9, lora_name="ad"))
    scene.live(4)
    scene.live(5, gone(3))
    scene.live(6, gone(9))
    scene.live(7, gone(2, 1), gone(2, 1, medium=CPU))
    return scene.file


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """A capture in which all goes wrong that one without replays can tell of."""
    scene = Scene(tmp_path / "troubled.capture")
    scene.live(0, AllBlocksCleared())
    scene.live(1, store(1, 2))
    scene.live(2, store(1, 2))
    scene.live(3, store(9, parent=77))
    scene.live(4, gone(55))
    scene.live(5, store(20, token_ids=[1, 2, 3]))
    scene.live(6, payload=b"\xc1\x1b[31m")
    scene.live(7, payload=msgspec.msgpack.encode([TS, [["Zap\x1b"], ["AllBlocksCleared"]], 0]))
    scene.add(Channel.LIVE, [b"kv", b"\x1b[2J"])
    scene.live(10, store(30))
    scene.live(0, AllBlocksCleared())
    return scene.file


def tail(*arguments: str) -> tuple[int, str, str]:
    """The command in this process, for what needs many of them: code, stdout, stderr."""
    buffer, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(buffer, encoding="utf-8", newline="\n")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["tail", *arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        out.flush()
    return code, buffer.getvalue().decode(errors="replace"), err.getvalue()


def texts(file: Path, *options: str, code: int = 0) -> list[str]:
    """The lines, without their times."""
    found, out, err = tail(str(file), "-q", *options)
    assert (found, err) == (code, "")
    return [line[13:] for line in out.splitlines()]


def seqs(file: Path, *options: str) -> list[int]:
    code, out, err = tail(str(file), "-q", "-o", "jsonl", *options)
    assert (code, err) == (0, "")
    return [json.loads(line)["seq"] for line in out.splitlines()]


# --------------------------------------------------------------------------------------- captures


def test_a_capture_is_told_event_by_event(plain: Path) -> None:
    """One aligned line each, plain where nobody has a terminal, and a summary on stderr."""
    done = kvevents("tail", str(plain))
    assert done.returncode == 0
    assert [line[13:] for line in done.stdout.splitlines()] == [
        "     0 cleared",
        "     1 stored  GPU             2 000000000001 ← start             8",
        "     2 stored  CPU_PINNED      2 000000000001 ← start             8",
        "     2 stored  GPU             1 000000000003 ← 000000000002      4",
        "     3 stored  GPU             1 000000000009 ← start             4 lora_name='ad'",
        "     5 removed GPU             1 000000000003",
        "     6 removed GPU             1 000000000009",
        "     7 removed GPU             2 000000000002",
        "     7 removed CPU_PINNED      2 000000000002",
    ]
    for part in (
        "batches  8 in 0.007 s",
        "1 empty",
        "events   9 ",
        "4 stored, 4 removed, 1 cleared",
        "blocks   6 stored, 6 removed",
        "trouble  none",
        "events as maps",
        "media CPU_PINNED GPU, block size 4",
    ):
        assert part in done.stderr
    assert "\x1b" not in done.stdout


def test_what_is_wrong_is_where_it_is_wrong(troubled: Path) -> None:
    """Each thing once, right behind its event, with the earlier one; nothing that moves a cursor."""
    lines = texts(troubled)
    kinds = [line[7:].split(" ")[0] for line in lines]
    assert kinds == [
        *("cleared", "stored", "stored", "STORED-AGAIN", "stored", "ORPHAN"),
        *("removed", "REMOVED-UNKNOWN", "stored", "LENGTH", "UNDECODABLE", "cleared", "SKIPPED"),
        *("MALFORMED", "GAP", "stored", "RESTART", "cleared"),
    ]
    by_kind = dict(zip(kinds, lines, strict=True))
    assert "(earlier: seq 1 event 0)" in by_kind["STORED-AGAIN"]
    assert "(c11b5b33316d)" in by_kind["UNDECODABLE"]
    assert by_kind["GAP"] == "     8 GAP 8→10 (2 missing, and nobody to ask: lost)"
    assert by_kind["RESTART"] == "     0 RESTART seq 10→0 of the publisher"
    assert "event 0" in by_kind["SKIPPED"] and "Zap" in by_kind["SKIPPED"]
    assert all(line.isprintable() for line in lines)


def test_the_summary_counts_what_is_wrong(troubled: Path) -> None:
    """On stderr, in one line."""
    _, _, said = tail(str(troubled))
    (line,) = [line for line in said.splitlines() if line.startswith("trouble")]
    for part in (
        *("1 gap,", "2 batches lost", "1 restart,", "1 undecodable batch", "1 malformed message"),
        *("1 event skipped", "1 stored-again", "1 orphan", "1 removed-unknown", "1 length"),
    ):
        assert part in line


def test_what_is_wrong_is_in_the_json(troubled: Path) -> None:
    """The same as objects; a gap and its loss are two."""
    _, out, _ = tail(str(troubled), "-q", "-o", "json")
    told = [json.loads(line) for line in out.splitlines()]
    types = [one["type"] for one in told if not one["type"].startswith(("Block", "All"))]
    assert types == [
        *["Finding"] * 4,
        *("Undecodable", "Skipped", "Malformed", "Gap", "Lost", "Restarted"),
    ]
    orphan = next(one for one in told if one.get("rule") == "orphan")
    assert (orphan["seq"], orphan["event"], orphan["invariant"]) == (3, 0, 12)


def test_strict_and_no_check(plain: Path, troubled: Path, tmp_path: Path) -> None:
    """Exit code 1 when something is wrong, and only when asked for; without the check, contradictions are
    neither looked for nor counted.
    """
    assert texts(plain, "--strict")
    assert texts(troubled, "--strict", code=1)
    scene = Scene(tmp_path / "again.capture")
    scene.live(0, AllBlocksCleared(), store(1))
    scene.live(1, store(1))
    assert len(texts(scene.file, "--strict", code=1)) == 4
    assert len(texts(scene.file, "--strict", "--no-check")) == 3


def test_a_capture_that_begins_late_has_no_false_findings(tmp_path: Path) -> None:
    """What came before is not known: no orphan, no unknown block, no loss."""
    scene = Scene(tmp_path / "late.capture")
    scene.live(50, store(2, parent=1), gone(99))
    scene.live(51, store(3, parent=2))
    assert texts(scene.file, "--strict") == [
        "       before this: 50 batches (seq 0…49), not in the capture",
        "    50 stored  GPU             1 000000000002 ← 000000000001      4",
        "    50 removed GPU             1 000000000063",
        "    51 stored  GPU             1 000000000003 ← 000000000002      4",
    ]


def test_a_gap_that_a_replay_has_closed(tmp_path: Path) -> None:
    """It is said that it was asked for; the batches are there, in order, and replayed."""
    scene = Scene(tmp_path / "closed.capture", "tcp://h:2")
    scene.live(0, AllBlocksCleared())
    scene.live(3, store(3))
    scene.asked(1)
    scene.answer(1, store(1))
    scene.answer(2, store(2))
    scene.answer(3, store(3))
    scene.over()
    lines = texts(scene.file, "-v")
    assert [line.split()[0] for line in lines] == ["0", "1", "1", "2", "3"]
    assert lines[1] == "     1 GAP 1→3 (2 missing, asked for)"
    assert ["replayed" in line for line in lines[2:]] == [True, True, True]
    _, _, said = tail(str(scene.file))
    assert "3 replayed" in said and "replays of 4 frames" in said


def test_which_part_of_a_capture(plain: Path) -> None:
    """From a seq, from the last so many that say something, up to a seq, so many events."""
    assert seqs(plain) == [0, 1, 2, 2, 3, 5, 6, 7, 7]
    assert seqs(plain, "--from", "beginning", "--until", "2") == [0, 1, 2, 2]
    assert seqs(plain, "--from", "5") == [5, 6, 7, 7]
    assert seqs(plain, "--from", "-3") == seqs(plain, "--from=-3") == [5, 6, 7, 7]
    assert seqs(plain, "--from", "-4") == [3, 5, 6, 7, 7]
    assert seqs(plain, "--from", "-1000", "-n", "3") == [0, 1, 2]
    assert seqs(plain, "--from", "2", "--until", "3", "-n", "2") == [2, 2]


UNREADABLE = msgspec.msgpack.encode([TS, [["Zap"], ["Zop"]], 0])
"""Two events of no known kind."""


@pytest.mark.parametrize(
    ("options", "code", "printed"),
    [
        (["-n", "3"], 0, 3),
        (["-n", "4", "--event", "removed", "--hash", "77"], 0, 4),
        (["-n", "5", "--format", "%s"], 0, 0),
        (["-n", "3", "-o", "json"], 0, 3),
        (["-n", "2", "-o", "json", "--from", "-4"], 0, 2),
    ],
)
def test_what_cannot_be_read_counts(
    tmp_path: Path, options: list[str], code: int, printed: int
) -> None:
    """-n ends on events, batches and messages of which nothing can be read, whatever is asked for; and
    what was to be printed is.
    """
    scene = Scene(tmp_path / "strange.capture")
    for seq in range(0, 30, 3):
        scene.live(seq, payload=UNREADABLE)
        scene.live(seq + 1, payload=b"\xc1")
        scene.add(Channel.LIVE, [b"kv", b"what"])
        scene.live(seq + 2)
    found, out, err = tail(str(scene.file), "-q", *options)
    assert (found, out.count("\n")) == (code, printed)
    lines = (out + err).splitlines()
    assert len(lines) == int(options[1]), "those that --format has no place for are on stderr"


@pytest.mark.parametrize("form", ["raw", "hex"])
def test_so_many_batches(tmp_path: Path, form: str) -> None:
    """Where batches are written, -n counts them: one with two events that cannot be read is one."""
    scene = Scene(tmp_path / "strange.capture")
    for seq in range(9):
        scene.live(seq, payload=UNREADABLE if seq % 2 else b"\xc1")
    code, out, err = tail(str(scene.file), "-o", form, "-n", "3", "--event", "stored", "-q")
    assert code == 0
    said = err if form == "raw" else out
    kinds = [word for word in said.split() if word in ("UNDECODABLE", "SKIPPED")]
    assert kinds == ["UNDECODABLE", "SKIPPED", "SKIPPED", "UNDECODABLE"]


def test_n_events_are_n_lines(troubled: Path) -> None:
    """In the middle of a batch, too; what is wrong with the stream is not one of them."""
    lines = texts(troubled)
    uncounted = ("AGAIN", "ORPHAN", "REMOVED-UNKNOWN", "LENGTH", "GAP", "RESTART")
    for count in range(1, 13):
        told = texts(troubled, "-n", str(count))
        assert told == lines[: len(told)]
        assert sum(not any(word in line for word in uncounted) for line in told) == count


def test_filters_of_a_capture(plain: Path, troubled: Path) -> None:
    """Any combination; what is wrong with the stream is shown all the same, what is wrong with an event
    only with it.
    """
    assert seqs(plain, "--event", "removed", "--medium", "GPU") == [5, 6, 7]
    assert seqs(plain, "--hash", "000000000003") == [2, 5], "nothing of it is there to be cleared"
    assert seqs(plain, "--lora", "ad", "--event", "stored,removed") == [3, 6]
    assert seqs(plain, "--token-prefix", "4,5,6,7,8", "--event", "stored") == [1, 2, 2]
    assert seqs(plain, "--rank", "1") == []
    kinds = [line[7:].split(" ")[0] for line in texts(troubled, "--event", "cleared")]
    assert kinds == [
        *("cleared", "UNDECODABLE", "cleared", "SKIPPED", "MALFORMED", "GAP", "RESTART", "cleared")
    ]


@pytest.mark.parametrize(
    ("options", "line", "there"),
    [
        ([], None, None),
        (["--event", "cleared"], "1 shown", None),
        (["-n", "3"], "3 shown", None),
        (["-n", "9"], "9 shown", None),
        (["--from", "-2"], "3 shown", None),
        (["--from", "5"], "4 shown", None),
        (["-o", "hex", "-n", "2"], "2 shown", None),
        (["--rank", "3"], "0 shown", "rank 0"),
        (["--medium", "disk", "--event", "stored"], "0 shown", "medium CPU_PINNED, GPU"),
        (["--lora", "sql"], "0 shown", "adapter 'ad'"),
        (["--lora", "x", "--rank", "7"], "0 shown", "rank 0; adapter 'ad'"),
        (["--hash", "abc"], "0 shown", None),
    ],
)
def test_the_summary_says_how_much_was_shown(
    plain: Path, options: list[str], line: str | None, there: str | None
) -> None:
    """Unless it was all; and where nothing was, what there was of what was asked for."""
    _, out, err = tail(str(plain), *options)
    shown = [text for text in err.splitlines() if text.endswith(" shown")]
    assert [text.rpartition("; ")[2] for text in shown] == ([line] if line else [])
    assert all(text.startswith("batches" if "hex" in options else "events") for text in shown)
    filters = [text for text in err.splitlines() if text.startswith("filters")]
    assert filters == ([f"filters  nothing passed; there was {there}"] if there else [])
    assert out or line == "0 shown"


def test_many_names_of_a_stranger_are_a_few(tmp_path: Path) -> None:
    """What there was is listed, shortened, and harmless."""
    scene = Scene(tmp_path / "many.capture")
    for seq in range(40):
        scene.live(seq, store(seq, lora_name=f"\x1b{seq:02}\n" + "x" * 999), rank=seq)
    _, _, err = tail(str(scene.file), "--lora", "sql", "--rank", "77")
    (line,) = [text for text in err.splitlines() if text.startswith("filters")]
    assert "rank 0, 1, 2, 3," in line and line.count(" and others") == 2
    assert line.isprintable() and len(line) < 3000


def test_a_source_that_was_not_reached(plain: Path, tmp_path: Path) -> None:
    """That nothing came is said of what was read, and not of what -n has left unread."""
    later = Scene(tmp_path / "later.capture")
    later._at += 10**12
    later.live(0, AllBlocksCleared())
    empty = Scene(tmp_path / "empty.capture")
    assert tail(str(plain), str(later.file), "-n", "2", "-q")[2] == ""
    assert tail(str(plain), str(empty.file), "tcp://127.0.0.1:9", "-n", "2", "-q")[2] == ""
    _, _, err = tail(str(plain), str(empty.file), "-q")
    assert err == f"kvevents tail: nothing came from {empty.file}\n"


def test_ranks_have_a_column(tmp_path: Path) -> None:
    """Once there is a second one."""
    scene = Scene(tmp_path / "ranks.capture")
    scene.live(0, AllBlocksCleared(), rank=0)
    scene.live(1, AllBlocksCleared(), rank=1)
    scene.live(2, AllBlocksCleared(), rank=0)
    assert [line.split() for line in texts(scene.file)] == [
        ["0", "cleared"],
        ["1", "1", "cleared"],
        ["0", "2", "cleared"],
    ]


def test_several_captures_at_once(plain: Path, tmp_path: Path) -> None:
    """Merged by time, each line with its source and rank; each is a stream of its own."""
    other = Scene(tmp_path / "other.capture")
    other.live(0, AllBlocksCleared())
    other.live(1, store(1, 2))
    done = kvevents("tail", str(plain), str(other.file), "-n", "4")
    assert [line.split()[1:4] for line in done.stdout.splitlines()] == [
        ["plain.capture/0", "0", "cleared"],
        ["other.capture/0", "0", "cleared"],
        ["plain.capture/0", "1", "stored"],
        ["other.capture/0", "1", "stored"],
    ]
    assert "trouble  none" in done.stderr
    _, last, _ = tail(str(plain), str(other.file), "--from", "-1", "-q")
    assert [line.split()[1:3] for line in last.splitlines()] == [
        ["other.capture/0", "1"],
        ["plain.capture/0", "7"],
        ["plain.capture/0", "7"],
    ]


def test_raw_batches(troubled: Path) -> None:
    """MessagePack arrays of topic, seq and payload; what is wrong goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "publisher.cli", "tail", str(troubled), "-o", "raw"],
        capture_output=True,
        check=True,
        timeout=60.0,
        env=ENVIRONMENT,
    )
    unpacked = []
    rest = done.stdout
    while rest:  # arrays of three, one behind the other
        size = next(end for end in range(1, len(rest) + 1) if _is_whole(rest[:end]))
        unpacked.append(msgspec.msgpack.decode(rest[:size]))
        rest = rest[size:]
    assert [seq for _, seq, _ in unpacked] == [0, 1, 2, 3, 4, 5, 6, 7, 10, 0]
    assert unpacked[6] == [b"kv", 6, b"\xc1\x1b[31m"]
    for word in (b"ORPHAN", b"GAP", b"UNDECODABLE"):
        assert word in done.stderr


def _is_whole(data: bytes) -> bool:
    try:
        msgspec.msgpack.decode(data)
    except msgspec.MsgspecError:
        return False
    return True


def test_a_dump_of_frames(troubled: Path) -> None:
    """A title for each batch, its frames with offsets, and what is wrong in between; a message that is
    none is dumped too.
    """
    _, out, _ = tail(str(troubled), "-o", "hex", "-q")
    lines = out.splitlines()
    assert sum(" live, " in line for line in lines) == 10
    at = next(number for number, line in enumerate(lines) if " seq 6 live" in line)
    assert lines[at + 1 : at + 7] == [
        "  topic: 2 bytes",
        "    00000000  6b 76                                             kv",
        "  seq: 8 bytes",
        "    00000000  00 00 00 00 00 00 00 06                           ........",
        "  payload: 6 bytes",
        "    00000000  c1 1b 5b 33 31 6d                                 ..[31m",
    ]
    _, cleared, _ = tail(str(troubled), "-o", "hex", "-q", "--event", "cleared")
    assert "ORPHAN" not in cleared and "GAP" in cleared and " seq 3 " not in cleared
    assert any("MALFORMED" in line and "in 2 frames" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_loss_may_be_the_recorders_own(tmp_path: Path) -> None:
    """What went missing while the recorder was late is said to be maybe its own, in gap, loss and
    summary, even when the loss is known only later; what went missing before and after is not.
    """
    scene = Scene(tmp_path / "late.capture", "tcp://h:2")

    def gap(after: int, *, late: bool) -> None:
        if late:
            scene.add(Channel.BEHIND, [])
        scene.live(after + 3, AllBlocksCleared())
        scene.asked(after + 1)
        if late:
            scene.add(Channel.ABREAST, [])
        scene.over()

    scene.live(0, AllBlocksCleared())
    for after, late in ((0, False), (3, True), (6, False)):
        gap(after, late=late)
    own = ["own loss" in line or "its own" in line for line in texts(scene.file) if "GAP" in line]
    lost = ["its own loss" in line for line in texts(scene.file) if "LOST" in line]
    assert (own, lost) == ([False, True, False], [False, True, False])
    assert "the recorder read too slowly" in tail(str(scene.file))[2]
    _, out, _ = tail(str(scene.file), "-q", "-o", "json")
    told = [json.loads(line) for line in out.splitlines()]
    assert [one["own"] for one in told if one["type"] == "Lost"] == [False, True, False]


def test_a_replay_that_was_not_answered_is_said_in_words(tmp_path: Path) -> None:
    """Of which endpoint, and what it was asked for; the summary counts it."""
    scene = Scene(tmp_path / "over.capture", "tcp://h:2")
    scene.add(Channel.CONNECTED, [])
    scene.asked(2**64 - 2)
    scene.add(Channel.OVER, [])
    scene.asked(2**64 - 2)
    scene.answer(4, AllBlocksCleared())
    scene.add(Channel.OVER, [])
    scene.asked(5)
    scene.over()
    scene.live(8, AllBlocksCleared())
    scene.asked(5)
    scene.add(Channel.OVER, [])
    lines = texts(scene.file)
    said = [line[7:] for line in lines if "replay endpoint" in line]
    assert said == [
        "the replay endpoint tcp://h:2 did not answer: it was asked for the state",
        "the replay endpoint tcp://h:2 did not finish its answer: it was asked for the state",
        "the replay endpoint tcp://h:2 did not answer: it was asked for what there is from seq 5 on",
    ]
    assert "JOIN" not in "".join(lines) and "NO-END" not in "".join(lines)
    assert "3 replays without an end" in tail(str(scene.file))[2]


STRANGE = "a\u202eb\u2066c\u200fd\u061ce\x9bf\x1b[31mg"


@pytest.mark.parametrize(
    "options", [[], ["--format", "%l"], ["-o", "raw"], ["-o", "hex"], ["-o", "json"]]
)
@pytest.mark.parametrize("colour", ["always", "never"])
def test_nothing_turns_the_terminal_around(tmp_path: Path, options: list[str], colour: str) -> None:
    """Types of events, media, keys and a file's name with controls and signs that turn the writing: none
    of them is on stdout or stderr, wherever what is wrong is said; nor half of a colour.
    """
    scene = Scene(tmp_path / "a\u202eb.capture")
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": STRANGE}
    events = [{"type": STRANGE}, removed, {STRANGE: 1}, [STRANGE], STRANGE]
    scene.live(0, payload=msgspec.msgpack.encode([TS, events, 0]))
    scene.live(1, payload=msgspec.msgpack.encode([STRANGE, [], 0]))
    scene.live(4, store(1, lora_name=STRANGE))
    scene.add(Channel.LIVE, [STRANGE.encode(), STRANGE.encode()])
    _, out, err = tail(str(scene.file), "--color", colour, *options)
    shown = "" if "raw" in options else out
    if colour == "always" and "json" not in options:
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for text in (shown, err):
        bad = [one for one in text if unicodedata.category(one) in ("Cc", "Cf") and one != "\n"]
        assert not bad
    assert "gap" in f"{shown}{err}".lower()
    assert not re.search(r"\[[0-9;]*m", err.replace("[31mg", ""))


def test_a_help_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns; with examples, and what is asked most."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = tail("--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "the last N batches: --from -N --exit-at-end" in out
    assert "-n counts events that are printed" in out


def test_a_format(plain: Path) -> None:
    """A line an event, and nothing else on stdout."""
    done = kvevents("tail", str(plain), "--format", r"%s:%e\t%n", "-n", "3", "-q")
    assert (done.stdout, done.stderr) == ("0:cleared\t0\n1:stored\t2\n2:stored\t2\n", "")


def test_what_was_cut_off_is_said(plain: Path, tmp_path: Path) -> None:
    """The rest is told; one line on stderr says what is missing, unless it was not wanted."""
    torn = tmp_path / "torn.capture"
    torn.write_bytes(plain.read_bytes()[:-3])
    done = kvevents("tail", str(torn), "-q")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 7
    assert "cut off" in done.stderr and done.stderr.count("\n") == 1
    assert tail(str(torn), "-q", "-n", "1")[2] == ""


@pytest.mark.parametrize("options", [[], ["-q"], ["--from", "-2", "--until", "99"], ["-o", "json"]])
def test_a_damaged_capture_is_a_finding(plain: Path, tmp_path: Path, options: list[str]) -> None:
    """What is before the damage is told; exit code 1, and why, even where no summary was wanted. Not when
    the end came first.
    """
    data = bytearray(plain.read_bytes())
    data[-20] ^= 1
    damaged = tmp_path / "damaged.capture"
    damaged.write_bytes(data)
    code, out, err = tail(str(damaged), *options)
    assert code == 1
    assert '"seq":6' in out or "     6 removed" in out
    assert "were left out: a record whose checksum is not its own" in err
    code, _, err = tail(str(damaged), "-q", "-n", "1")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "state"], "--from: a capture has no state"),
        (["--from", "live"], "--from: a capture has no live"),
        (["--from", "soon"], "--from: 'soon' is not"),
        (["--until", "-1"], "--until: -1 is below 0"),
        (["--format", "%Q"], "--format: '%Q' is none of"),
        (["--format", "%s", "-o", "json"], "--format: it is of no use with -o json"),
        (["--event", "x"], "--event: 'x' is not stored"),
        (["--from", "-30s"], "--from: '-30s' is not state"),
        (["--token-prefix", "-1x"], "--token-prefix: token 0: '-1x' is not an int"),
        (["--from", "5", "--until", "4"], "--until: 4 is before --from 5"),
        (["--for", "0"], "--for: 0.0 is not above 0"),
    ],
)
def test_options_that_cannot_be(plain: Path, options: list[str], said: str) -> None:
    """Exit code 2 and one line that names the option."""
    done = kvevents("tail", str(plain), *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvevents tail: {said}")


@pytest.mark.parametrize(
    "options", [["--from", "state"], ["--from", "-5"], ["--from", "0"], ["--exit-at-end"]]
)
def test_what_needs_a_replay_endpoint(options: list[str]) -> None:
    """Exit code 2, and the option that is missing is named."""
    done = kvevents("tail", "tcp://127.0.0.1:1", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--replay-endpoint" in done.stderr


def test_no_capture(tmp_path: Path) -> None:
    """A file that is none, and one that is empty: exit codes 2 and 3."""
    other = tmp_path / "other"
    other.write_text("something else\n")
    done = kvevents("tail", str(other))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no capture" in done.stderr
    done = kvevents("tail", str(Scene(tmp_path / "empty").file))
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing came from" in done.stderr


def test_a_full_disk_is_one_line(plain: Path) -> None:
    """Standard output that cannot be written: exit code 2, no traceback."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "publisher.cli", "tail", str(plain)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
            timeout=60.0,
            env=ENVIRONMENT,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "standard output" in done.stderr


def test_a_terminal_gets_a_header_and_colours(plain: Path) -> None:
    """Once, above the first line; NO_COLOR leaves the header; raw bytes are refused."""

    def at_terminal(*options: str, **environment: str) -> tuple[int, str]:
        master, slave = pty.openpty()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "publisher.cli", "tail", str(plain), "-q", *options],
                stdin=subprocess.DEVNULL,
                stdout=slave,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "TERM": "xterm", **environment},
            )
            os.close(slave)
            text = b""
            with contextlib.suppress(OSError):  # the other side is closed
                while piece := os.read(master, 65536):
                    text += piece
            process.communicate(timeout=PATIENCE_S)
        finally:
            os.close(master)
        return process.returncode, text.decode()

    code, text = at_terminal()
    lines = text.splitlines()
    assert code == 0
    assert "time" in lines[0] and "parent" in lines[0]
    assert text.count("medium") == 1
    assert "\x1b[32mGPU" in text
    _, text = at_terminal(NO_COLOR="1")
    assert text.startswith("time ") and "\x1b" not in text
    assert at_terminal("-o", "raw") == (2, "")


anything = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
some_events: st.SearchStrategy[Event] = st.sampled_from(
    [AllBlocksCleared(), store(1, 2), store(3, parent=2), store(4, parent=9), gone(1), gone(2, 1)]
)
payloads = (
    st.binary(max_size=40)
    | anything.map(msgspec.msgpack.encode)
    | st.lists(anything, max_size=3).map(lambda events: msgspec.msgpack.encode([TS, events, 0]))
    | st.lists(some_events, max_size=3).map(lambda e: pack_batch(KVEventBatch(TS, e, 0)))
)
frames = st.lists(st.binary(max_size=9), max_size=5) | st.builds(
    lambda topic, seq, payload, head: [*head, topic, seq.to_bytes(8, "big"), payload],
    *(st.binary(max_size=4), st.integers(0, 6) | st.integers(0, 2**64 - 1), payloads),
    st.sampled_from([[], [b""]]),
)


@given(
    messages=st.lists(st.tuples(st.sampled_from(Channel), frames), max_size=12),
    options=st.sampled_from(
        [
            *([], ["-vv"], ["-o", "json"], ["-o", "hex"], ["--format", "%t%T%w%h%H%p%k%l"]),
            *(["--from", "-2"], ["--hash", "1"], ["--token-prefix", "4,5"], ["--from", "3"]),
        ]
    ),
    can_replay=st.booleans(),
)
@settings(max_examples=150)
def test_no_capture_is_too_strange(
    messages: list[tuple[Channel, list[bytes]]], options: list[str], *, can_replay: bool
) -> None:
    """Any messages on any channel: a code, and nothing but what can be printed, in every form."""
    with short_folder() as folder:
        scene = Scene(folder / "x", "tcp://h:2" if can_replay else None)
        for channel, each in messages:
            scene.add(channel, each)
        code, out, err = tail(str(scene.file), *options)
    assert code in (0, 3)
    assert "Traceback" not in err
    for line in out.split("\n"):
        assert not [one for one in line if unicodedata.category(one) == "Cc"]
        assert "json" in options or line.isprintable()


# ------------------------------------------------------------------------------------------- live


class Worker:
    """With a sidecar of its own, which has told a clear, the state, and eight stores."""

    def __init__(self, endpoint: str, replay_endpoint: str, tell: Callable[[int], None]) -> None:
        self.source = f"w={endpoint},{replay_endpoint}"
        self.endpoint, self.replay_endpoint, self.tell = endpoint, replay_endpoint, tell


@pytest.fixture
def worker() -> Iterator[Worker]:
    cache = make_cache(num_pages=1024)
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, heartbeat_s=0.05)
    with spawn(WorkerInfo(block_size=4), SidecarConfig(sinks=(sink,), linger_s=0.0)) as sidecar:

        def tell(count: int) -> None:
            for _ in range(count):
                first = 100 * cache.num_stored
                insert(cache, range(first, first + 8))
                sidecar.pump(cache)
            assert sidecar.client.flush(cache, PATIENCE_S) is not None

        tell(8)
        (bound,) = sidecar.client.sinks
        yield Worker(bound.endpoint, str(bound.replay_endpoint), tell)


def test_the_end_of_what_is_there(worker: Worker) -> None:
    """From the beginning, from a seq, and the last so many, heartbeats not counted: each ends by itself,
    and nothing is found wrong.
    """

    def seqs_from(start: str) -> list[int]:
        done = kvevents(
            *("tail", worker.source, "--from", start, "--exit-at-end", "--strict", "-q"),
            *("-o", "json"),
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line)["seq"] for line in done.stdout.splitlines()]

    told = seqs_from("beginning")
    assert len(told) >= 9 and told[0] == 0
    third = sorted(set(told))[3]
    last, since = seqs_from("-3"), seqs_from(str(third))
    assert len(set(last)) == 3 and since[0] == third
    assert told[-1] == seqs_from("state")[-1] == last[-1] == since[-1]


def test_a_live_stream_is_told_as_it_comes(worker: Worker) -> None:
    """The state, then each event when it happens, up to the last; Ctrl-C ends it with a summary, exit
    code 0.
    """
    with start_kvevents(f"tail {os.getpid()}", "tail", worker.source) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "cleared" in process.stdout.readline()
        while " stored " not in process.stdout.readline():
            pass
        before = time.monotonic()
        for _ in range(3):
            worker.tell(1)
        found = 0
        while found < 10:
            found += " stored " in process.stdout.readline()
        assert time.monotonic() - before < PATIENCE_S
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        said = process.stderr.read()
        assert "trouble  none" in said and "11 stored" in said


def test_joining_late_finds_nothing_wrong(worker: Worker) -> None:
    """Live only, with and without a replay endpoint: what was there before is not known, and no fault."""
    for source in (worker.endpoint, worker.source):
        tag = f"late {os.getpid()}"
        with start_kvevents(
            *(tag, "tail", source, "--from", "live", "--strict", "-q", "-n", "2", "-o", "json")
        ) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            assert (first["type"], first["seq"]) == ("Earlier", 0)
            worker.tell(2)
            assert process.wait(PATIENCE_S) == 0
            assert [json.loads(line)["type"] for line in process.stdout] == ["BlockStored"] * 2


def test_endings(worker: Worker) -> None:
    """After some seconds, after silence, and at a seq; heartbeats are no silence."""
    tag, options = f"ends {os.getpid()}", ("tail", worker.source, "--for", "1", "-q")
    with (
        start_kvevents(tag, *options) as one,
        start_kvevents(tag, *options, "--timeout", "5") as other,
    ):
        assert [each.communicate(timeout=PATIENCE_S)[1] for each in (one, other)] == ["", ""]
        assert (one.returncode, other.returncode) == (0, 0)
    json_of = ("tail", worker.source, "-o", "json", "-q")
    done = kvevents(*json_of, "--from", "beginning", "--exit-at-end")
    first, last = sorted({json.loads(line)["seq"] for line in done.stdout.splitlines()})[1:3]
    done = kvevents(*json_of, "--from", str(first), "--until", str(last))
    assert {json.loads(line)["seq"] for line in done.stdout.splitlines()} == {first, last}


@pytest.mark.parametrize("options", [["--medium", "EXTERNAL"], ["--from", "999999"]])
def test_what_is_not_shown_is_silence(options: list[str]) -> None:
    """--timeout ends a tail of a busy stream that shows nothing."""
    over = threading.Event()
    with RawPublisher() as publisher:
        source = publisher.endpoint
        if "--from" in options:
            source += f",{publisher.replay_endpoint}"

        def publish() -> None:
            deadline = time.monotonic() + PATIENCE_S
            for seq in itertools.count():
                if over.wait(0.02) or time.monotonic() > deadline:
                    return
                publisher.live(seq, *([store(seq)] if seq % 2 else []))
                if publisher.router.poll(0):
                    publisher.end(publisher.request()[0])

        thread = publishing(publisher, publish)
        code, out, err = tail(source, *options, "--timeout", "1")
        was_busy = thread.is_alive()
        over.set()
        thread.join()
    assert (code, was_busy) == (0, True)
    assert " stored " not in out
    assert "0 shown" in err


def test_every_beginning_and_every_end(worker: Worker) -> None:
    """Each --from with each of -n, --until and --exit-at-end on a stream that goes on: it ends by itself,
    where it should; and prints no event twice or out of order.
    """

    def places(*options: str) -> list[tuple[int, int]]:
        code, out, err = tail(worker.source, "-q", "-o", "json", *options)
        assert (code, err) == (0, ""), options
        told = [json.loads(line) for line in out.splitlines()]
        return [(one["seq"], one["event"]) for one in told if one["type"] != "Earlier"]

    everything = places("--from", "beginning", "--exit-at-end")
    newest = everything[-1][0]
    last = [one for one in everything if one[0] in sorted({seq for seq, _ in everything})[-3:]]
    starts = {
        "beginning": everything,
        "3": [one for one in everything if one[0] >= 3],
        "-3": last,
        "-1000": everything,
    }
    for start, expected in starts.items():
        assert places("--from", start, "--exit-at-end") == expected
        assert places("--from", start, "-n", "2") == expected[:2]
        assert places("--from", start, "-n", "1", "--exit-at-end") == expected[:1]
        assert places("--from", start, "-n", "99", "--exit-at-end") == expected
        assert places("--from", start, "--until", str(newest)) == expected
        until = ["--until", str(newest), "-n", "1"]
        assert places("--from", start, *until) == expected[:1]
        assert places("--from", start, *until, "--exit-at-end") == expected[:1]
    first = [one for one in everything if one[0] <= newest - 1]
    assert places("--from", "-1000", "--until", str(newest - 1)) == first
    state = places("--exit-at-end")
    assert state and places("-n", str(len(state))) != []
    assert places("--until", str(newest + 20)) != [], "heartbeats come to it"
    assert len(places("-n", "1", "--exit-at-end")) == 1


def test_live_only_has_an_end_as_well(worker: Worker) -> None:
    """After so many events, and at a seq; one that was there before is no end to wait for."""
    options = ("tail", worker.source, "--from", "live", "-q", "-o", "json")
    with start_kvevents(f"live {os.getpid()}", *options, "-n", "2") as process:
        assert process.stdout is not None
        seq = json.loads(process.stdout.readline())["count"]
        worker.tell(3)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout.read().count("\n") == 2
    for until, said in ((seq + 10_000, ""), (1, "and --until is 1")):
        ends = ("--until", str(until)) if until == 1 else ("--until", str(until), "--for", "2")
        code, _, err = tail(*options[1:], *ends)
        assert code == 0 and said in err


def test_a_seq_that_is_still_to_come(worker: Worker) -> None:
    """It is waited for, and nothing before it is shown or said to be missing; at the end of what is
    there, that is said.
    """
    code, out, err = tail(worker.source, "-q", "--from", "100000", "--for", "2")
    assert (code, out) == (0, "")
    assert "it has come to seq" in err and "--from is 100000" in err
    with RawPublisher() as publisher:  # of which no heartbeat comes meanwhile
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        options = ("tail", source, "-q", "--from", "100000", "--exit-at-end")
        with start_kvevents(f"to come {os.getpid()}", *options) as process:
            client, start = publisher.request()
            publisher.end(client)
            out, err = process.communicate(timeout=PATIENCE_S)
    assert (start, process.returncode, out) == (100_000, 3, "")
    assert "has nothing from seq 100000 on" in err


def publishing(publisher: RawPublisher, publish: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        publisher.await_subscriber()
        publish()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_joining_without_a_replay_endpoint_is_no_loss() -> None:
    """What came before the first batch was not asked for; a hole after it is a loss; neither of them is
    one of the two events asked for.
    """
    with RawPublisher() as publisher:

        def publish() -> None:
            for seq in (5, 8):
                publisher.live(seq, AllBlocksCleared())

        thread = publishing(publisher, publish)
        done = kvevents("tail", publisher.endpoint, "-n", "2", "-q", "--timeout", "20")
        thread.join()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line[13:] for line in done.stdout.splitlines()] == [
        "       before this: 5 batches (seq 0…4); --replay-endpoint asks for their state",
        "     5 cleared",
        "     6 GAP 6→8 (2 missing, and nobody to ask: lost)",
        "     8 cleared",
    ]


def test_an_engine_that_retains_no_more_than_the_last() -> None:
    """Asked from 0, it answers from where it can: how many are gone is said, and is no loss."""
    with RawPublisher() as publisher:

        def publish() -> None:
            client, start = publisher.request()
            assert start == 0
            for seq in (40, 41, 42):
                publisher.answer(client, seq, store(seq))
            publisher.end(client)

        thread = publishing(publisher, publish)
        source = f"{publisher.endpoint},{publisher.replay_endpoint.rpartition(':')[2]}"
        done = kvevents(
            "tail",
            source,
            "--from",
            "beginning",
            "--exit-at-end",
            "--strict",
            "-q",
            "--timeout",
            "20",
        )
        thread.join()
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line[13:] for line in done.stdout.splitlines()]
    assert lines[0] == "       before this: 40 batches (seq 0…39), not retained any more"
    assert [line.split()[0] for line in lines[1:]] == ["40", "41", "42"]


def test_the_last_of_a_replay_and_then_live() -> None:
    """-N: the last N of the answer, in order, and after them what comes."""
    with RawPublisher() as publisher:

        def publish() -> None:
            client, start = publisher.request()
            assert start == 0
            for seq in range(10):
                publisher.answer(client, seq, store(seq))
            publisher.end(client)

        thread = publishing(publisher, publish)
        with start_kvevents(
            *(f"last {os.getpid()}", "tail", publisher.endpoint),
            *("--replay-endpoint", publisher.replay_endpoint, "--from", "-2", "-n", "4", "-q"),
        ) as process:
            assert process.stdout is not None
            found = [process.stdout.readline()[13:].split()[0] for _ in range(2)]
            thread.join()
            for seq in (10, 11):
                publisher.live(seq, store(seq))
            assert process.wait(PATIENCE_S) == 0
            found += [line[13:].split()[0] for line in process.stdout]
    assert found == ["8", "9", "10", "11"]


def test_so_many_of_the_last_of_an_idle_publisher() -> None:
    """-N with -n: it ends without anything else coming."""
    with RawPublisher() as publisher:

        def publish() -> None:
            client, _ = publisher.request()
            for seq in range(10):
                publisher.answer(client, seq, store(seq))
            publisher.end(client)

        thread = publishing(publisher, publish)
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        done = kvevents("tail", source, "--from", "-5", "-n", "2", "-q", "--format", "%s")
        thread.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n6\n", "")


def test_two_workers_side_by_side(worker: Worker) -> None:
    """Each line with its name; one of them may be silent, which is said."""
    with RawPublisher() as publisher:
        done = kvevents(
            *("tail", worker.source, f"idle={publisher.endpoint}", "--for", "1", "-q"),
        )
    assert done.returncode == 0
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"w/0"}
    assert f"nothing came from {publisher.endpoint} in 1 s: it is there, but idle" in done.stderr


def test_a_stopped_reader_harms_nobody() -> None:
    """While it is stopped, more is published than may wait for it: nothing blocks, and another subscriber
    has all of it. It goes on, and says that what it misses may be its own loss, in the summary, too.
    """
    with (
        RawPublisher() as publisher,
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.SUB) as other,
    ):
        publisher.pub.setsockopt(zmq.SNDHWM, 1000)
        publisher.pub.setsockopt(zmq.LINGER, 0)
        endpoint = publisher.pub.bind(LOOPBACK).addr
        other.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        other.subscribe(b"")
        other.connect(endpoint)
        publisher.await_subscriber()
        source = f"{endpoint},{publisher.replay_endpoint}"
        options = ("--no-check", "--event", "cleared", "-n", "2")
        with start_kvevents(f"stop {os.getpid()}", "tail", source, *options) as process:
            publisher.await_subscriber()
            for _ in range(2):  # the state, and what there is from 0 on
                publisher.end(publisher.request()[0])
            publisher.live(0, AllBlocksCleared())
            assert other.recv_multipart() and process.stdout is not None
            assert "cleared" in process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            seq = _publish_to_all(publisher, other, 30_000, until=time.monotonic() + 1.6)
            process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + PATIENCE_S
            while process.poll() is None:  # as soon as there is room for one
                assert time.monotonic() < deadline, "it did not end"
                publisher.live(seq, AllBlocksCleared())
                seq += 1
                if publisher.router.poll(1):
                    publisher.end(publisher.request()[0])
            told, said = process.communicate()
    missing = [line for line in told.splitlines() if "GAP" in line or "LOST" in line]
    assert any("LOST" in line for line in missing)
    assert all("it may be our own loss" in line for line in missing)
    assert "we read too slowly, or were stopped" in said


def _publish_to_all(
    publisher: RawPublisher, other: zmq.Socket[bytes], count: int, until: float
) -> int:
    """So many batches, and more until the monotonic clock is there; `other` reads them in time not to
    fall behind. Returns the seq after the last.
    """
    bulky = payload_of(store(1, token_ids=[1] * 1000, block_size=1000))
    seq = 1
    while seq < count or time.monotonic() < until:
        step = 500 if seq < count else 1
        for at in range(seq, seq + step):
            publisher.pub.send_multipart(live_frames(b"", at, bulky), zmq.NOBLOCK)
        for at in range(seq, seq + step):
            assert other.recv_multipart()[1] == at.to_bytes(8, "big")
        seq += step
        if seq > count:
            other.poll(10)
    return seq


def test_any_dialect_is_read_and_named(tmp_path: Path) -> None:
    """The same story in each, without a word of complaint; the summary says what it looked like."""
    forms = {
        "vllm": ("events as maps, hashes unsigned", "replays of 4 frames", 3),
        "llm-d": ("events as maps, hashes bytes8", "replays of 4 frames", 3),
        "aibrix": ("events as arrays, hashes signed", "replays of 4 frames", 6),
        "legacy": ("events as arrays, hashes signed", "replays of 3 frames", 3),
        "mooncake-store": ("events as objects", "int milliseconds", 0),
    }
    sinks = tuple(
        SinkConfig(
            name=name,
            dialect=name,
            topic="kv",
            endpoint=LOOPBACK,
            replay_endpoint=LOOPBACK,
            heartbeat_s=3600.0,
            tells_joiners=False,  # mooncake-store leaves a seq out before: a gap, should it come late
        )
        for name in forms
    )
    cache, who = make_cache(), WorkerInfo(block_size=4, model="m", worker_id="w")
    config = SidecarConfig(sinks=sinks, linger_s=0.0, state_dir=str(tmp_path))
    with spawn(who, config) as sidecar:
        for first in (0, 100, 200):
            insert(cache, range(first, first + 8))
            sidecar.pump(cache)
        assert sidecar.client.flush(cache, PATIENCE_S) is not None
        for bound, (form, more, stores) in zip(sidecar.client.sinks, forms.values(), strict=True):
            code, out, said = tail(
                f"{bound.endpoint},{bound.replay_endpoint}", "--exit-at-end", "--strict"
            )
            assert code == 0, (form, out, said)
            assert form in said and more in said
            assert out.count(" stored ") >= stores
            assert " cleared" in out


def doctors(text: str) -> list[list[str]]:
    """The commands to paste that stderr has, as a shell reads them; doctor takes each."""
    found = [shlex.split(one) for one in re.findall(r"`(kvevents doctor [^`]*)`", text)]
    for words in found:
        parser_of("doctor").parse_args(words[1:])
    return [words[2:] for words in found]


def test_why_nothing_is_shown_is_said_at_once() -> None:
    """Nobody there, endpoints swapped, another topic, a replay endpoint that does not answer, one of
    another publisher: each within seconds, in words, with a command that can be pasted, side by side.
    """
    with (
        RawPublisher() as swapped,
        RawPublisher() as topical,
        RawPublisher() as waiting,
        RawPublisher() as ahead,
    ):
        sources = {
            "dead": ("tcp://127.0.0.1:9", "tcp://127.0.0.1:10"),
            "swap": (swapped.replay_endpoint, swapped.endpoint),
            "topic": (topical.endpoint, None),
            "wait": (waiting.endpoint, waiting.replay_endpoint),
            "ahead": (ahead.endpoint, ahead.replay_endpoint),
        }
        words = [
            f"{name}={endpoint}{f',{replay}' if replay else ''}"
            for name, (endpoint, replay) in sources.items()
        ]
        with start_kvevents(
            f"why {os.getpid()}", "tail", *words, "--topic", "kv 1", "-q"
        ) as process:
            done = threading.Event()
            thread = threading.Thread(target=_publish_until, args=(done, topical, waiting, ahead))
            thread.start()
            try:
                assert process.stderr is not None
                said = "".join(process.stderr.readline() for _ in sources)
                process.send_signal(signal.SIGINT)
                last = process.communicate(timeout=PATIENCE_S)[1]
            finally:
                done.set()
                thread.join()
    lines = dict(_by_endpoint(said, sources))
    assert "not connected to" in lines["dead"] and "not connected to" in lines["swap"]
    assert "it has sent nothing whose topic begins with 'kv 1'" in lines["topic"]
    assert "batches have come" in lines["wait"] and "has not answered for" in lines["wait"]
    assert "the two are of different publishers, or what comes is far behind" in lines["ahead"]
    for line in lines.values():
        ((source, *more),) = doctors(line)
        assert more == ["--topic", "kv 1"] and source in words
    for name in ("dead", "swap", "topic", "wait"):
        assert f"nothing came from {sources[name][0]}: " in last
    assert doctors(last) and "that had to wait for the answer of the replay" in last


def _by_endpoint(
    said: str, sources: dict[str, tuple[str, str | None]]
) -> Iterator[tuple[str, str]]:
    for line in said.splitlines():
        (found,) = [
            name
            for name, (endpoint, _) in sources.items()
            if any(f"{endpoint}{end}" in f"{line} " for end in " :,")
        ]
        yield found, line


def _publish_until(done: threading.Event, topical: RawPublisher, *others: RawPublisher) -> None:
    """Ten batches a second; `topical` of another topic; the last one's replays are far ahead."""
    for seq in itertools.count():
        if done.wait(0.1):
            return
        topical.live(seq, AllBlocksCleared())
        for one in others:
            one.pub.send_multipart(live_frames(b"kv 1", seq, payload_of(AllBlocksCleared())))
        if others[-1].router.poll(0):
            client, _ = others[-1].request()
            others[-1].answer(client, 100_000, AllBlocksCleared(), topic=b"kv 1")
            others[-1].end(client)


def test_what_is_needed_of_several_can_be_typed() -> None:
    """With two sources, --replay-endpoint is of no use, and is not what is asked for."""
    two = ("tcp://127.0.0.1:1", "b=tcp://127.0.0.1:2")
    for options in (("--exit-at-end",), ("--from", "-2")):
        code, _, err = tail(*two, *options)
        assert code == 2 and "SOURCE,REPLAY" in err and "--replay-endpoint" not in err


def test_an_endpoint_without_its_scheme() -> None:
    """It is no file; what was likely meant is said."""
    code, _, err = tail("127.0.0.1:7101")
    assert code == 2 and "did you mean tcp://127.0.0.1:7101?" in err


def test_ctrl_c_before_anything_came() -> None:
    """Exit code 3, and one line that says so."""
    with (
        RawPublisher() as publisher,
        start_kvevents(f"idle {os.getpid()}", "tail", publisher.endpoint) as process,
    ):
        publisher.await_subscriber()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() == ""
        said = process.stderr.read()
        assert said.count("\n") == 1 and "nothing came from" in said


EARLY = """
import signal, sys
from publisher.cli import main
from publisher.tools.tail.tail import Tail
def run(self, run=Tail.run):
    signal.raise_signal(signal.SIGINT)
    run(self)
Tail.run = run
sys.exit(main())
"""


def test_ctrl_c_just_before_it_reads() -> None:
    """Is one like any other."""
    with RawPublisher() as publisher:
        done = subprocess.run(
            [sys.executable, "-c", EARLY, "tail", publisher.endpoint],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1 and "nothing came from" in done.stderr


def test_a_publisher_that_wants_keys() -> None:
    """It is not waited for: exit code 3, and a line that says what it is about; before it another, where
    libzmq is hung up on a few times before it can tell.
    """
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        publisher.curve_publickey, publisher.curve_secretkey = zmq.curve_keypair()
        publisher.curve_server = True
        endpoint = publisher.bind(LOOPBACK).addr
        done = kvevents("tail", endpoint)
    assert (done.returncode, done.stdout) == (3, "")
    *before, last = done.stderr.splitlines()
    assert "has refused us; --server-key" in last
    assert len(before) <= 1 and all("or it wants other keys" in line for line in before)
