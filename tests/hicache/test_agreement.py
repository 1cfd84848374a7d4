"""Ranks that do the same at the same step: alone, as a group of one, and as processes of a group."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from agreement_rank import Counts, Plan

from hicache import Agreement, GroupAgreement
from hicache.agreement import Alone

SCRIPT = Path(__file__).with_name("agreement_rank.py")
ROOT = SCRIPT.parent.parent.parent
NUM_RANKS = 2
TIMEOUT_S = 90.0
PLANS = {
    "faults": Plan(seed=1, rounds=6, steps=200, events=True, restarts=False),
    "restarts": Plan(seed=3, rounds=8, steps=30, events=True, restarts=True),
    "records": Plan(seed=5, rounds=1, steps=60, events=None, restarts=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what happened in each plan is written down, in a folder of its name. The same processes run
    them all: each takes seconds to import torch.
    """
    folder = tmp_path_factory.mktemp("ranks")
    for name in PLANS:
        (folder / name).mkdir()
    run_ranks(folder)
    return folder


def run_ranks(folder: Path) -> None:
    """Run a process for each rank to its end. None outlives this."""
    plans = msgspec.json.encode(PLANS).decode()
    command = [sys.executable, str(SCRIPT)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    deadline = time.monotonic() + TIMEOUT_S
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(NUM_RANKS):
            arguments = [str(rank), str(NUM_RANKS), str(folder), plans]
            with (folder / f"rank{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command + arguments, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        for process in ranks:
            process.wait(deadline - time.monotonic())
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for rank in range(NUM_RANKS):  # pytest shows it when the test fails
            print(f"rank {rank}:", (folder / f"rank{rank}.log").read_text()[-4000:])
    assert [process.returncode for process in ranks] == [0] * NUM_RANKS


def counts_of(folder: Path) -> list[Counts]:
    """What happened in each rank."""
    return [
        msgspec.json.decode((folder / f"rank{rank}.counts").read_bytes(), type=Counts)
        for rank in range(NUM_RANKS)
    ]


def lines_of(folder: Path, what: str) -> list[list[str]]:
    """What each rank wrote down of its trees, or its events, a line for each step."""
    return [(folder / f"rank{rank}.{what}").read_text().splitlines() for rank in range(NUM_RANKS)]


def assert_same(folder: Path, what: str, num_steps: int) -> None:
    """All ranks wrote down the same; otherwise the first step that differs is the failure."""
    first, second = lines_of(folder, what)
    for one, other in zip(first, second, strict=True):
        assert one == other
    assert len(first) == num_steps


def assert_equal(folder: Path, plan: Plan) -> list[Counts]:
    """All ranks did and told the same; what happened in each."""
    assert_same(folder, "trees", plan.rounds * plan.steps)
    assert_same(folder, "events", plan.rounds * plan.steps)
    return counts_of(folder)


@pytest.mark.integration
def test_ranks_stay_equal_whatever_happens_to_one(folder: Path) -> None:
    """After every step trees and events are equal, though copies, storage and clocks of each rank are
    late, fail, hang and lose pages on their own; and each cache is sound and holds its own bytes."""
    ours, theirs = assert_equal(folder / "faults", PLANS["faults"])
    assert ours.stored == theirs.stored
    assert all(ours.stored[medium] > 20 for medium in ("GPU", "CPU_PINNED", "DISK"))
    assert ours.failed_flights and ours.abandoned_flights and ours.num_landed
    assert ours.lost + theirs.lost, "it was about something"


@pytest.mark.integration
def test_ranks_start_with_what_all_of_them_have_left(folder: Path) -> None:
    """Started again after some have lost files, or all, they are equal from the first step on."""
    ours, theirs = assert_equal(folder / "restarts", PLANS["restarts"])
    assert ours.restored == theirs.restored > 0


@pytest.mark.integration
def test_rank_0_alone_records(folder: Path) -> None:
    """Unless it is told otherwise, rank 0 tells of all it holds, and the others of nothing."""
    assert_same(folder / "records", "trees", PLANS["records"].steps)
    recorded, silent = lines_of(folder / "records", "events")
    assert any("BlockStored" in line for line in recorded)
    assert all(line.endswith(" []") for line in silent)


# ------------------------------------------------------------------------------------ in one process


@pytest.fixture(params=["alone", "group", "subgroup"])
def agreement(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agreement]:
    """The one rank of a group of one."""
    if request.param == "alone":
        yield Alone()
        return
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        group = torch.distributed.new_group([0]) if request.param == "subgroup" else None
        yield GroupAgreement(group)
    finally:
        torch.distributed.destroy_process_group()


def test_one_rank_agrees_with_itself(agreement: Agreement) -> None:
    """Rank 0: its values are the least, its keys are all there are."""
    assert agreement.rank == 0
    values = [3, -1, 0, 2**62]
    assert agreement.least(values) == values
    assert agreement.gather([b"a", b"b"]) == [[b"a", b"b"]]


def test_nothing_can_be_agreed_on(agreement: Agreement) -> None:
    """No values and no keys are fine."""
    assert agreement.least([]) == []
    assert agreement.gather([]) == [[]]
