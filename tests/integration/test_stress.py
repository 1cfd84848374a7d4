"""The fault harness: a handful of its runs, and that its checks see what they are there for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stress_evidence import (
    Evidence,
    Seen,
    Way,
    check_clears,
    check_evidence,
    read_evidence,
)
from stress_plan import Kind, draw_plan

HARNESS = Path(__file__).parent / "stress.py"
SEEDS = range(370, 373)


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_when_it_is_quiet_again_everything_is_right() -> None:
    """After each of a handful of runs, no claim of `stress_run` is broken."""
    command = [
        *(sys.executable, str(HARNESS)),
        *("--seed", str(SEEDS.start), "--runs", str(len(SEEDS))),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SEEDS)} runs" in done.stdout


def test_a_plan_is_a_function_of_its_seed() -> None:
    """The same seed gives the same plan, another seed another one."""
    assert draw_plan(7) == draw_plan(7)
    assert draw_plan(7) != draw_plan(8)


def test_the_handful_has_every_kind_of_fault() -> None:
    """So that `make test` has seen each."""
    assert {fault.kind for seed in SEEDS for fault in draw_plan(seed).faults} == set(Kind)


def test_as_many_seeds_as_kinds_use_every_kind() -> None:
    """Whatever the first of them is."""
    used = {fault.kind for seed in range(40, 40 + len(Kind)) for fault in draw_plan(seed).faults}
    assert used == set(Kind)


def test_only_the_kinds_that_are_asked_for_are_used() -> None:
    """For looking at one kind of fault."""
    plan = draw_plan(3, [Kind.CUT])
    assert {fault.kind for fault in plan.faults} == {Kind.CUT}


@pytest.mark.integration
def test_evidence_outlives_its_writer(tmp_path: Path) -> None:
    """What was added is read back, but for a record that was torn by the writer's end."""
    path = tmp_path / "evidence"
    evidence = Evidence(path)
    evidence.add(Way.LIVE, 5, b"payload")
    evidence.add(Way.LOST, 9)
    evidence.close()
    with path.open("ab") as file:
        file.write(b"\0torn")
    first, second = read_evidence(path)
    assert (first.way, first.seq, second.way, second.seq) == (Way.LIVE, 5, Way.LOST, 9)
    assert read_evidence(tmp_path / "none") == []


def live(*digests: bytes, first: int = 0) -> list[Seen]:
    return [Seen(Way.LIVE, seq, digest) for seq, digest in enumerate(digests, first)]


def answer(way: Way, first: int, *digests: bytes) -> list[Seen]:
    return [
        Seen(Way.REPLAY if at else way, seq, digest)
        for at, (seq, digest) in enumerate(enumerate(digests, first))
    ]


def test_sound_evidence_has_no_problems() -> None:
    """Live batches, a late subscriber with a snapshot, one with a loss that it was told of."""
    witnesses = {
        "early": live(b"a", b"b", b"c", b"d"),
        "late": answer(Way.SNAPSHOT, 0, b"S", b"-", b"c") + live(b"d", first=3),
        "lossy": [*live(b"a"), Seen(Way.LOST, 2), *live(b"c", b"d", first=2)],
        "again": [*live(b"a", b"b"), Seen(Way.AGAIN, 0, b"a"), *answer(Way.FRAMES, 2, b"c")],
    }
    assert check_evidence(witnesses, 4) == []


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (live(b"a", b"X", b"c"), "V1"),
        (answer(Way.FRAMES, 1, b"X", b"c"), "V1"),
        ([*live(b"a", b"b", b"c"), Seen(Way.AGAIN, 1, b"X")], "V1"),
        (live(b"e", b"f", first=4) + live(b"e", first=6), "V1"),
        (answer(Way.SNAPSHOT, 0, b"S", b"b", b"X"), "V2"),
        ([*live(b"a"), *live(b"c", first=2)], "V3"),
        (live(b"a", b"b") + live(b"b", b"c", first=1), "V3"),
        (live(b"a", b"b", b"c") + answer(Way.FRAMES, 4, b"e"), "V3"),
    ],
)
def test_what_is_wrong_with_a_stream_is_seen(second: list[Seen], problem: str) -> None:
    """Other bytes for a seq, frames that are not replayed as they were, holes, repetitions."""
    found = check_evidence({"first": live(b"a", b"b", b"c", b"d", b"e"), "second": second}, 5)
    assert {one[:2] for one in found} == {problem}


def test_a_seq_that_nobody_saw_is_missed() -> None:
    """V4, also at the end."""
    assert [one[:2] for one in check_evidence({"only": live(b"b", b"c", first=1)}, 3)] == ["V4"]
    assert [one[:2] for one in check_evidence({"only": live(b"a")}, 2)] == ["V4"]


def test_a_clear_without_a_cause_is_seen() -> None:
    """V5: after the first telling and before the last word."""
    seen = [Seen(Way.CLEAR, seq, b"") for seq in (0, 3, 50, 99)]
    assert [one.split()[:3] for one in check_clears({"only": seen}, 99)] == [["V5:", "seq", "50"]]
