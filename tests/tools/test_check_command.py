"""`kvevents check`: as a process, on captures, on publishers that lie, and on real sidecars."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import msgspec
import pytest
from ports_rig import free_endpoints
from publisher_rig import (
    PATIENCE_S,
    RawPublisher,
    insert,
    kill,
    kvevents,
    payload_of,
    start_kvevents,
)

from hicache import HiRadixCache, HostPool, KVShape, PagePool
from hicache.storage import FileStorage, PageFormat
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
    block_hashes,
)
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.frames import live_frames, replay_answer, replay_end, replay_request
from kvevents.message import Channel
from publisher import Respawn, Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.cli import main

GPU, CPU, _, _ = StorageMedium
CLEARED = AllBlocksCleared()
TOKENS = list(range(1, 13))
A, B, C = block_hashes(TOKENS, 4)
AB = BlockStored([A, B], None, TOKENS[:8], 4, medium=GPU)
GONE = BlockRemoved([B], GPU)


def capture(path: Path, *batches: list[Event], first: int = 0) -> str:
    """A capture of these live batches."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint=None))
    records = [
        pack_message(
            seq * 10**9, Channel.LIVE, live_frames(b"", seq, payload_of(*batch, ts=1.0 + seq))
        )
        for seq, batch in enumerate(batches, first)
    ]
    path.write_bytes(head + b"".join(records))
    return str(path)


@pytest.fixture
def publisher() -> Iterator[RawPublisher]:
    with RawPublisher() as publisher:
        yield publisher


# ------------------------------------------------------------------------------------- captures


def test_a_sound_capture(tmp_path: Path) -> None:
    """Exit code 0, and one line; its hashes are right, and by whose making is said."""
    file = capture(tmp_path / "c", [CLEARED], [AB], [GONE])
    done = kvevents("check", file, "--verify-hashes")
    told = (
        f"{file}: 3 batches, 3 events, 2 blocks: keeps its promises (verified 2 hashes as sglang)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_a_lie_is_a_line(tmp_path: Path) -> None:
    """Exit code 1; the place, the rule, its invariant, and the earlier event; the first of a kind, and
    how many at the end.
    """
    file = capture(tmp_path / "c", [CLEARED], [AB], [GONE], [GONE], [GONE])
    done = kvevents("check", file)
    name = f"{B & 2**64 - 1:016x}"[:12]
    assert done.stdout.splitlines() == [
        f"seq 3 event 0    removed-unknown (1): {name} was removed from GPU already; see seq 2 event 0",
        "removed-unknown: 2 times in all, last at seq 4 event 0",
        f"{file}: 5 batches, 5 events, 2 blocks: breaks its promises: removed-unknown 2",
    ]
    assert (done.returncode, done.stderr) == (1, "")
    verbose = kvevents("check", file, "-v").stdout.splitlines()
    assert [line.split()[1] for line in verbose[:-1]] == ["3", "4"]
    allowed = kvevents("check", file, "--allow", "removed-unknown,gap")
    assert (allowed.returncode, len(allowed.stdout.splitlines())) == (0, 1)


def test_as_json(tmp_path: Path) -> None:
    """An object a line: finding, repeated, summary; 64-bit numbers are strings."""
    file = capture(tmp_path / "c", [CLEARED], [AB], [GONE], [GONE], [GONE])
    done = kvevents("check", file, "-o", "json", "--verify-hashes", "sglang")
    finding, repeated, summary = map(json.loads, done.stdout.splitlines())
    place = {"seq": "3", "event": 0}
    assert finding.pop("what").endswith("was removed from GPU already")
    assert finding == {
        "source": file,
        "type": "finding",
        **place,
        "rule": "removed-unknown",
        "invariant": 1,
        "severity": "violation",
        "earlier": {"seq": "2", "event": 0},
        "medium": "GPU",
        "block_hash": str(B),
        "blocks": 1,
    }
    assert (repeated["type"], repeated["count"], repeated["last_seq"]) == ("repeated", 2, "4")
    assert summary == {
        "source": file,
        "type": "summary",
        "batches": 5,
        "events": 5,
        "blocks": 2,
        "violations": {"removed-unknown": 2},
        "notes": {},
        "hashes": {"scheme": "sglang", "verified": 2, "wrong": 0, "unverifiable": 0},
        "rejoined": None,
    }


def test_notes_count_when_strict(tmp_path: Path) -> None:
    """A run that does not begin with a clear, as engines' do not: 0, and with --strict 1."""
    file = capture(tmp_path / "c", [AB], [GONE])
    done = kvevents("check", file)
    assert (done.returncode, done.stdout.splitlines()[0].split()[2:5]) == (
        0,
        ["first-seq", "(17):", "note:"],
    )
    assert done.stdout.splitlines()[-1].endswith("keeps its promises; notes: first-seq 1")
    assert kvevents("check", file, "--strict").returncode == 1
    assert kvevents("check", file, "--strict", "--allow", "first-seq").returncode == 0


def test_hashes_of_another_make(tmp_path: Path) -> None:
    """Wrong ones are violations; those that nothing fits are a note."""
    wrong = BlockStored([C, B], None, TOKENS[:8], 4, medium=CPU)
    file = capture(tmp_path / "c", [CLEARED], [AB], [wrong])
    found = kvevents("check", file, "--verify-hashes", "sglang", "-o", "json").stdout
    hashes = [one for line in found.splitlines() if (one := json.loads(line)).get("rule") == "hash"]
    assert [(one["seq"], one["blocks"], one["block_hash"]) for one in hashes] == [("2", 1, str(C))]
    other = capture(
        tmp_path / "d", [CLEARED], [BlockStored([7], None, [1, 2, 3, 4], 4, medium=GPU)]
    )
    done = kvevents("check", other, "--verify-hashes")
    assert (done.returncode, "hash-scheme (9): note: " in done.stdout) == (0, True)
    assert kvevents("check", other, "--verify-hashes", "vllm-sha256-cbor").returncode == 1


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--for", "0"), 2, "--for: 0.0 is not above 0"),
        (("-n", "0"), 2, "--count: 0 is below 1"),
        (("--verify-hashes", "md5"), 2, "--verify-hashes: invalid choice: 'md5'"),
        (
            ("--verify-hashes", "tcp://h:1"),
            2,
            "'tcp://h:1' is no scheme: put the sources first, or",
        ),
        (("--hash-seed", "0"), 2, "--hash-seed: it goes with --verify-hashes vllm-sha256-cbor"),
        (("--allow", "gap,x\x1b"), 2, "--allow: 'x\\x1b' is not one of removed-unknown, "),
        (("--as", "dynamo", "--strict"), 2, "--strict: it does not go with --as"),
        (("--as", "nobody"), 2, "--as: 'nobody' is not one of"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, more: tuple[str, ...], code: int, said: str
) -> None:
    """Exit code 2; the option and why."""
    done = kvevents("check", capture(tmp_path / "c", [CLEARED], [AB]), *more)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_source_in_the_place_of_a_scheme(tmp_path: Path) -> None:
    """Exit code 2: it says how to write it; either way of them then does."""
    file = capture(tmp_path / "c", [CLEARED], [AB])
    done = kvevents("check", "--verify-hashes", file)
    hint = f"put the sources first, or write --verify-hashes=auto {file}"
    said = f"kvevents check: argument --verify-hashes: '{file}' is no scheme: {hint}\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert kvevents("check", "--verify-hashes=auto", file).returncode == 0
    assert kvevents("check", file, "--verify-hashes").returncode == 0


def test_a_strangers_words_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    """What turns, hides or breaks text is escaped, in a type and in what is no batch, in both outputs."""
    odd = {"type": "\x1b[31m\u202e\u200b\u2028\x85"}
    told = [
        msgspec.msgpack.encode([1.0, [odd], 0]),
        msgspec.msgpack.encode(["\x9b\u2066\x85", [], 0]),
        payload_of(AB),
    ]
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint=None))
    records = [
        pack_message(seq, Channel.LIVE, live_frames(b"", seq, one)) for seq, one in enumerate(told)
    ]
    file = tmp_path / "c\u202e\x85"
    file.write_bytes(head + b"".join(records))
    for output in ("text", "json"):
        out = run("check", str(file), "-v", "-o", output)
        assert out.count("\n") >= 3
        assert all(line.isprintable() for line in out.split("\n")), out


def run(*arguments: str) -> str:
    """What the command writes, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(arguments)
    return out.getvalue()


def test_a_hole_is_our_own_only_while_we_read_too_slowly(tmp_path: Path) -> None:
    """One that came then is a note; the next one is the publisher's, and a violation."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint=None))
    told: list[tuple[Channel, list[bytes]]] = [
        (Channel.LIVE, live_frames(b"", 0, payload_of(CLEARED, AB))),
        (Channel.BEHIND, []),
        (Channel.LIVE, live_frames(b"", 3, payload_of())),
        (Channel.ABREAST, []),
        (Channel.LIVE, live_frames(b"", 4, payload_of())),
        (Channel.LIVE, live_frames(b"", 7, payload_of())),
    ]
    file = tmp_path / "c"
    file.write_bytes(head + b"".join(pack_message(0, *one) for one in told))
    lost = [json.loads(line) for line in run("check", str(file), "-o", "json", "-v").splitlines()]
    assert [(one["seq"], one["severity"]) for one in lost if one.get("rule") == "lost"] == [
        ("1", "note"),
        ("5", "violation"),
    ]


def test_a_capture_that_ends_in_a_replay(tmp_path: Path) -> None:
    """What was asked for and had not come by then is held against nobody, by any command; what a replay
    did not have is.
    """
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2"))
    told: list[tuple[Channel, list[bytes]]] = [
        (Channel.LIVE, live_frames(b"", 0, payload_of(CLEARED, AB))),
        (Channel.LIVE, live_frames(b"", 2, payload_of(GONE))),
        (Channel.ASKED, replay_request(1)),
    ]
    answers = [
        (Channel.ANSWER, replay_answer(b"", 2, payload_of(GONE), delimited=True)),
        (Channel.ANSWER, replay_end(delimited=True)),
    ]
    for over in (False, True):
        told += answers if over else []
        file = tmp_path / f"{over}"
        file.write_bytes(head + b"".join(pack_message(0, *one) for one in told))
        checked = kvevents("check", str(file))
        assert checked.returncode == int(over)
        assert ("note: 1 batch lost from 1 on, maybe not" in checked.stdout) is not over
        assert ("before that does" in kvevents("tail", str(file)).stdout) is not over
        state = kvevents("state", str(file))
        assert state.returncode == 1
        assert "stale: 1 batch lost" in state.stdout
        assert ("ends before a replay does" in state.stdout) is not over
        (row,) = json.loads(run("top", str(file), "--json"))["rows"]
        assert (row["lost"], bool(row["findings"])) == (1, over)


def test_nothing_to_hold_it_to(tmp_path: Path) -> None:
    """Exit code 3: an empty capture, and one without a block; 2: what is no capture."""
    empty = kvevents("check", capture(tmp_path / "c"))
    assert (empty.returncode, empty.stderr) == (3, "kvevents check: nothing came\n")
    idle = kvevents("check", capture(tmp_path / "d", [CLEARED], []))
    assert (idle.returncode, idle.stderr) == (
        3,
        "kvevents check: no block was stored in 2 batches\n",
    )
    assert "silent (32)" in idle.stdout
    (tmp_path / "e").write_bytes(b"no capture at all, but long enough to be one")
    assert kvevents("check", str(tmp_path / "e")).returncode == 2


def test_a_damaged_capture(tmp_path: Path) -> None:
    """Exit code 1, also where all that was read is sound; a torn tail costs nothing."""
    file = Path(capture(tmp_path / "c", [CLEARED], [AB], [GONE]))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    torn = kvevents("check", str(file))
    assert (torn.returncode, "it was cut off" in torn.stderr) == (0, True)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) + bytes(9000))
    damaged = kvevents("check", str(file))
    assert (damaged.returncode, "were left out" in damaged.stderr) == (1, True)
    enough = kvevents("check", str(file), "-n", "2")
    assert (enough.returncode, enough.stderr) == (0, "")


def test_several_captures_are_told_apart(tmp_path: Path) -> None:
    """Each line begins with its source; the exit code is that of the worst."""
    one = capture(tmp_path / "one", [CLEARED], [AB], [GONE], [GONE])
    two = capture(tmp_path / "two", [CLEARED], [AB])
    done = kvevents("check", two, one)
    assert [line.split()[0].rstrip(":") for line in done.stdout.splitlines()] == [one, two, one]
    assert done.returncode == 1


# ------------------------------------------------------------------------------------ live ones


def test_a_publisher_that_lies(publisher: RawPublisher) -> None:
    """Live, without a replay endpoint: 1; and Ctrl-C concludes."""
    with start_kvevents("check", "check", publisher.endpoint) as process:
        publisher.await_subscriber()
        lies: list[Event] = [CLEARED, AB, AB]
        for seq, event in enumerate(lies):
            publisher.live(seq, event)
        assert process.stdout is not None
        assert "stored-again (2)" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, "")
    assert "3 batches, 3 events, 4 blocks: breaks its promises: stored-again 1" in out


def test_nobody_there() -> None:
    """Exit code 3, and whom it could not reach."""
    (endpoint,) = free_endpoints(1)
    done = kvevents("check", endpoint, "--for", "0.3")
    assert done.returncode == 3
    assert f"no connection to {endpoint}; why: kvevents doctor {endpoint}\n" in done.stderr
    assert "nothing came" in done.stderr


def serve_replays(publisher: RawPublisher, answers: list[list[list[Event]]], stop: Flag) -> None:
    """One answer after the other, the last for ever; each from seq 0."""
    turn = 0
    while not stop.is_set():
        if publisher.router.poll(50):
            client, _ = publisher.request()
            for seq, events in enumerate(answers[min(turn, len(answers) - 1)]):
                publisher.answer(client, seq, *events)
            publisher.end(client)
            turn += 1


def test_who_joins_anew_is_told_something_else(publisher: RawPublisher) -> None:
    """A snapshot that is not what was told: rule `state`, per medium; without joining anew, nothing."""
    true: list[list[Event]] = [[CLEARED], [AB]]
    false: list[list[Event]] = [[CLEARED], [BlockStored([A], None, TOKENS[:4], 4, medium=CPU)]]
    for more, code in ((("--no-rejoin",), 0), ((), 1)):
        stop = Flag()
        server = Thread(target=serve_replays, args=(publisher, [true, false], stop))
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        server.start()
        try:
            done = kvevents("check", f"w={source}", "-n", "2", "-v", "-o", "json", *more)
        finally:
            stop.set()
            server.join()
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == code, done
        found = [
            (one["rule"], one["medium"], one["blocks"]) for one in told if one["type"] == "finding"
        ]
        assert found == ([("state", "CPU_PINNED", 1), ("state", "GPU", 2)] if code else [])
        assert (told[-1]["rejoined"] is None) == (not code)


def test_a_replay_without_an_end(publisher: RawPublisher) -> None:
    """Exit code 1, when the time is up while it is under way."""
    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    name = publisher.endpoint.removeprefix("tcp://")
    with start_kvevents("check", "check", source, "--for", "1.5", "--no-rejoin") as process:
        client, _ = publisher.request()
        publisher.answer(client, 0, CLEARED, AB)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, f"kvevents check: {name}: the replay was not over\n"), (
        out
    )


def test_an_engine_whose_replay_does_not_reach_back(publisher: RawPublisher) -> None:
    """It cannot be compared, says why, and is not blamed."""
    stop = Flag()

    def serve() -> None:
        while not stop.is_set():
            if publisher.router.poll(50):
                client, start = publisher.request()
                if start < 2**63:
                    publisher.answer(client, 50, AB)
                publisher.end(client)

    server = Thread(target=serve)
    server.start()
    try:
        source = f"{publisher.endpoint},{publisher.replay_endpoint}"
        done = kvevents("check", source, "-n", "1")
    finally:
        stop.set()
        server.join()
    assert done.returncode == 0, done
    assert "replay-start (19): note: a replay from 0 begins with 50" in done.stdout
    assert (
        "not compared with what a new subscriber is told: not all that is held was seen"
        in done.stdout
    )


# ------------------------------------------------------------------------------------- a sidecar


def subscribers(sidecar: Sidecar) -> int:
    """How many sinks have one; none while it is away."""
    url = f"{sidecar.client.http_endpoint}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
            text = page.read().decode()
    except OSError:
        return 0
    found = re.findall(r"^kv_events_subscribers{[^}]*} (\d+)", text, re.MULTILINE)
    return sum(int(one) > 0 for one in found)


SPACES = (
    Namespace(),
    Namespace(lora_name="a"),
    Namespace(cache_salt="s"),
    Namespace(extra_key="k"),
)


@pytest.mark.integration
@pytest.mark.parametrize("persist", ["all", "none"])
def test_a_sidecar_under_load_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persist: str
) -> None:
    """A worker with every tier, a sink in each of several dialects; kill -9 of the sidecar, and it comes
    back, knowing all or nothing: nothing is broken, each hash is right, and who joins in the end is told
    what was followed.
    """
    monkeypatch.setenv("POD_IP", "10.0.0.1")
    names = ("sglang", "vllm", "llm-d", "aibrix", "mooncake-store", "sgl-router")
    bound = {name: free_endpoints(2) for name in names}
    sinks = tuple(
        SinkConfig(
            name=name,
            dialect=name,
            endpoint=endpoint,
            replay_endpoint=replay,
            heartbeat_s=0.2,
            buffer_steps=50,
        )
        for name, (endpoint, replay) in bound.items()
    )
    config = SidecarConfig(
        sinks=sinks,
        linger_s=0.0,
        persist=persist,  # type: ignore[arg-type]  # it is one of them
        state_dir=str(tmp_path / "state"),
    )
    pool = PagePool(32, 4, KVShape(1, 1, 1))
    files = FileStorage(tmp_path / "files", PageFormat.of(pool, "m"), min_free_bytes=0)
    sources = [f"{name}={one},{two}" for name, (one, two) in bound.items()]
    dice = random.Random(1)
    with (
        HiRadixCache(pool, host_pool=HostPool.beside(pool, ratio=2), storage=files) as cache,
        spawn(
            WorkerInfo(block_size=4, model="m", worker_id="w"),
            config,
            respawn=Respawn(first_s=0.05),
        ) as sidecar,
        start_kvevents("check", "check", *sources, "--verify-hashes", "-o", "json") as process,
    ):

        def work(until: Callable[[], bool]) -> None:
            deadline, pause = time.monotonic() + PATIENCE_S, Flag()
            while not until():
                assert time.monotonic() < deadline
                pause.wait(0.005)  # others need the processor, too
                tokens = [dice.randrange(3) for _ in range(24)]
                insert(cache, tokens, dice.choice(SPACES))
                assert cache.settle(PATIENCE_S)
                sidecar.pump(cache)

        work(lambda: subscribers(sidecar) == len(names))
        steps = itertools.count()
        work(lambda: next(steps) > 50)
        assert sidecar.client.flush(cache, PATIENCE_S) is not None
        old = sidecar.pid
        kill(old)
        work(lambda: sidecar.pid not in (old, None))
        work(lambda: subscribers(sidecar) == len(names))
        steps = itertools.count()
        work(lambda: next(steps) > 50)
        process.send_signal(signal.SIGINT)
        work(lambda: process.poll() is not None)
        out, err = process.communicate(timeout=60.0)
    files.close()
    told = [json.loads(line) for line in out.splitlines()]
    violations = [one for one in told if one.get("severity") == "violation"]
    assert (process.returncode, violations, err) == (0, [], ""), out
    for one in (each for each in told if each["type"] == "summary"):
        assert one["rejoined"]["same"], one
        assert one["source"] == "mooncake-store" or one["hashes"]["verified"] == one["blocks"] > 0
