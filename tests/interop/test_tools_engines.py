"""Each command as a process in front of the publishers of real SGLang and vLLM releases."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import pytest
from interop_rig import RELEASES, Engine, engine_of
from interop_script import SIZE, Script
from interop_waiting import PATIENCE_S

from kvevents.check.finding import Severity

pytestmark = pytest.mark.integration

every_release = pytest.mark.parametrize("release", RELEASES)
VIOLATION: Severity = "violation"
BATCHES = 30


def kvevents(*arguments: object, code: int = 0) -> str:
    """What the command writes to stdout, once it has ended with this exit code."""
    done = run(*arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "publisher.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
        stdin=subprocess.DEVNULL,
    )


def source_of(engine: Engine) -> tuple[str, ...]:
    return engine.endpoint, "--replay-endpoint", engine.replay_endpoint


@contextmanager
def told(release: str) -> Iterator[tuple[Engine, Script]]:
    """An engine that has published, and what it holds."""
    with engine_of(release) as engine:
        script = Script(release)
        engine.publish(script.batches(0, BATCHES))
        yield engine, script


@contextmanager
def telling(release: str) -> Iterator[tuple[Engine, Script]]:
    """An engine that goes on publishing."""
    with told(release) as (engine, script):
        over = Flag()

        def publish() -> None:
            number = BATCHES
            while not over.wait(0.02):
                engine.publish([script.batch(number)])
                number += 1

        thread = Thread(target=publish)
        thread.start()
        try:
            yield engine, script
        finally:
            over.set()
            thread.join()


def prompt_of(script: Script) -> str:
    """The tokens of its chain."""
    return ",".join(f"0,{block},2,3" for block in range(len(script.chain)))


@every_release
def test_tail_shows_every_event(release: str) -> None:
    """As JSON, from the beginning to the end: what was published, with hashes that are exact."""
    with told(release) as (engine, script):
        lines = kvevents("tail", *source_of(engine), "--exit-at-end", "-o", "json").splitlines()
    events = [json.loads(line) for line in lines]
    kinds = [event["type"] for event in events]
    assert kinds.count("BlockStored") == BATCHES
    assert kinds.count("BlockRemoved") == BATCHES // 5
    held: list[int] = []
    for event in events:
        names = [int(one) for one in event["block_hashes"]]
        signed = [name - 2**64 if name >= 2**63 else name for name in names]
        if event["type"] == "BlockStored":
            held += signed
        else:
            held = [one for one in held if one not in signed]
    assert held == script.chain


@every_release
def test_state_is_what_the_engine_holds(release: str) -> None:
    """By count, and for a prompt: all of its blocks, on the device."""
    with told(release) as (engine, script):
        prompt = prompt_of(script)
        out = kvevents("state", *source_of(engine), "--tokens", prompt, "-o", "json")
    found = json.loads(out)
    (worker,) = found["workers"]
    assert worker["blocks"]["GPU"] == worker["any"] == len(script.chain)
    assert (worker["block_size"], worker["seq"]) == (SIZE, BATCHES - 1)
    (overlap,) = found["overlap"]["workers"]
    assert (overlap["any"], overlap["blocks"]["GPU"]) == (len(script.chain), len(script.chain))


@every_release
def test_check_finds_nothing_wrong_with_an_engine(release: str) -> None:
    """Late, and live with what follows."""
    with telling(release) as (engine, _):
        out = kvevents("check", *source_of(engine), "--for", "2", "-o", "json")
    assert not any(json.loads(line).get("severity") == VIOLATION for line in out.splitlines())


@every_release
def test_top_counts_what_comes(release: str) -> None:
    """Once, as JSON: blocks are stored, and are resident on the device."""
    with telling(release) as (engine, _):
        out = kvevents("top", *source_of(engine), "--once", "--for", "2", "-o", "json")
    (row,) = json.loads(out)["rows"]
    assert (row["link"], row["block_size"], row["findings"]) == ("up", SIZE, 0)
    assert row["blocks"]["GPU"] > 0
    assert row["stored_per_s"] > 0


@every_release
def test_a_capture_of_an_engine_is_played_again(release: str, tmp_path: Path) -> None:
    """It is recorded, published anew, and a state of the copy is that of the engine."""
    file = tmp_path / "capture"
    with told(release) as (engine, script):
        state = recorded(engine, file)
    held = json.loads(state)["workers"][0]["blocks"]["GPU"]
    assert held == len(script.chain)
    kvevents("check", file)
    code = 0 if release in RELEASES[:2] else 1  # the old ones' arrays are not for the new ones
    kvevents("lint", file, "--as", release.partition("-")[0], code=code)
    kvevents("plot", file, "-o", tmp_path / "plot.html")
    assert "<svg" in (tmp_path / "plot.html").read_text()
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("p", "r")]
    arguments = ["play", str(file), "--endpoint", endpoints[0], "--replay-endpoint", endpoints[1]]
    with subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", *arguments, "--no-wait"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as player:
        try:
            out = kvevents("state", endpoints[0], "--replay-endpoint", endpoints[1], "-o", "json")
        finally:
            player.kill()
    assert json.loads(out)["workers"][0]["blocks"]["GPU"] == held


def recorded(engine: Engine, file: Path) -> str:
    """The state of a capture of all that an engine retains, which it may be slow to tell."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        recorder = run("record", *source_of(engine), "-w", file, "--for", "1")
        state = run("state", file, "-o", "json")
        if recorder.returncode == state.returncode == 0:
            return state.stdout
        assert time.monotonic() < deadline, (recorder.stderr, state.stdout, state.stderr)
        file.unlink(missing_ok=True)


@every_release
def test_doctor_tells_an_idle_engine_from_one_that_never_spoke(release: str) -> None:
    """Both are connected, and nothing comes; the replay tells which it is."""
    with engine_of(release) as engine:
        script = Script(release)
        doctor_of(engine, "enable_kv_cache_events", code=1)
        engine.publish(script.batches(0, BATCHES))
        idle = doctor_of(engine, "30 blocks stored", code=0)
    assert "nothing happens" in idle


def doctor_of(engine: Engine, said: str, code: int) -> str:
    """What it says once it says this, with that exit code: an engine may be slow to answer."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = run("doctor", *source_of(engine), "--timeout", "1")
        assert "Traceback" not in done.stderr
        if said in done.stdout:
            assert done.returncode == code, done.stdout
            return done.stdout
        assert time.monotonic() < deadline, (done.stdout, done.stderr)


@every_release
def test_doctor_finds_nothing_wrong_while_events_come(release: str) -> None:
    """Exit code 0, and the conclusion says so."""
    with telling(release) as (engine, _):
        out = kvevents("doctor", *source_of(engine), "--timeout", "5", "--block-size", SIZE)
    assert "Events arrive" in out
