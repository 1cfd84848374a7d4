"""What publishing takes from a scheduler that never lets go of the interpreter, and what that does to
the latency: P1 and P2.

Each step is 1 ms of Python, as a scheduler's is, and makes a batch of events; windows of steps that
publish it and of steps that throw it away take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import Figure, absolute, at_most, compared, others, spread
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import OURS, PUBLISHERS, Lineup
from benchmarks.kit.wire import Arrivals, open_wire
from benchmarks.kit.workloads.numbers import percentile
from benchmarks.options import Options
from benchmarks.report import run_alone

__all__ = ["NAME", "main", "measure"]

NAME = "busy_loop"
EVENTS = (8, 20)
STEP_US, STEPS, WINDOWS, ROUNDS = 1000.0, 125, 6, 3
UNDER_WAY_S = 0.002
"""Batches published less than this before a window's end are under way, and no backlog."""


@dataclass(frozen=True, slots=True)
class Round:
    """µs of each step of the windows, off and on, and of each batch on its way; backlog by window."""

    off: list[float]
    on: list[float]
    latencies: list[float]
    backlog: list[int]

    @property
    def total(self) -> float:
        return sum(self.on) / sum(self.off)

    @property
    def p99(self) -> float:
        return percentile(self.on, 99) / percentile(self.off, 99)


def one_round(peer: PeerProcess, events: int, steps: int, windows: int) -> Round:
    """Windows off, on, on, off and so on, so that neither has the better places."""
    off: list[float] = []
    runs = []
    with open_wire(peer) as wire:
        for window in range(windows):
            publish = window % 4 in (1, 2)
            work = {"step_us": STEP_US, "free_share": 0.0, "steps": steps}
            run = peer.ask("busy", **work, events=events, blocks=1, publish=publish)
            if publish:
                runs.append(run)
            else:
                off += run["steps_us"]
        arrived = wire.all_arrivals(runs)[0]
    return Round(
        off,
        [step for run in runs for step in run["steps_us"]],
        [latency for one in arrived for latency in one.latencies_us],
        [_backlog(one, run["ended"]) for one, run in zip(arrived, runs, strict=True)],
    )


def _backlog(arrived: Arrivals, ended: float) -> int:
    """Batches that had not come when the window ended, though they were due."""
    return arrived.lost + sum(
        at > ended and at - latency / 1e6 < ended - UNDER_WAY_S
        for at, latency in zip(arrived.at, arrived.latencies_us, strict=True)
    )


def measure(options: Options) -> list[Figure]:
    """P1: the steps, on against off. P2: latency and backlog of the same loop."""
    lineup = Lineup(PUBLISHERS, peers=options.peers)
    steps, windows = options.size(STEPS, 50), options.size(WINDOWS, 4)
    found = lineup.rounds(
        options.rounds_or(ROUNDS),
        lambda peer: {events: one_round(peer, events, steps, windows) for events in EVENTS},
    )
    figures: list[Figure] = []
    for events in EVENTS:
        rounds = {name: [one[events] for one in all_of] for name, all_of in found.items()}
        figures += _steps(events, rounds, lineup)
    for events in EVENTS:
        rounds = {name: [one[events] for one in all_of] for name, all_of in found.items()}
        figures += _latencies(events, rounds, lineup)
    return figures


def _steps(events: int, rounds: Mapping[str, Sequence[Round]], lineup: Lineup) -> list[Figure]:
    ours = rounds[OURS]
    total = {name: [one.total for one in all_of] for name, all_of in rounds.items()}
    p99 = {name: [one.p99 for one in all_of] for name, all_of in rounds.items()}
    return [
        compared(
            f"P1.total.{events}",
            f"1 ms steps publishing {events} events, all of them",
            median(sum(one.on) / len(one.on) for one in ours),
            "µs/step",
            reach=at_most(1.03),
            peer="off",
            peer_figure=median(sum(one.off) / len(one.off) for one in ours),
            ratio=median(total[OURS]),
            note=others(total, ours=OURS, unit="×", absent=lineup.absent),
            versions=lineup.versions,
        ),
        compared(
            f"P1.p99.{events}",
            f"1 ms steps publishing {events} events, p99",
            median(percentile(one.on, 99) for one in ours),
            "µs/step",
            reach=at_most(1.05),
            peer="off",
            peer_figure=median(percentile(one.off, 99) for one in ours),
            ratio=median(p99[OURS]),
            note=others(p99, ours=OURS, unit="×", absent=lineup.absent),
            versions=lineup.versions,
        ),
    ]


def _latencies(events: int, rounds: Mapping[str, Sequence[Round]], lineup: Lineup) -> list[Figure]:
    p50, p99 = (
        {
            name: [percentile(one.latencies, percent) / 1e3 for one in all_of]
            for name, all_of in rounds.items()
        }
        for percent in (50, 99)
    )
    backlog: dict[str, list[float]] = {
        name: [float(window) for one in all_of for window in one.backlog]
        for name, all_of in rounds.items()
    }
    rows = (
        ("p50", "latency, p50", "ms", 0.5, p50),
        ("p99", "latency, p99", "ms", 2.0, p99),
        ("backlog", "due and not come at a window's end", "batches", 0.0, backlog),
    )
    return [
        absolute(
            f"P2.{key}.{events}",
            f"the same loop, {events} events: {what}",
            median(values[OURS]),
            unit,
            reach=at_most(most),
            peer="sglang" if "sglang" in values else "",
            peer_figure=median(values["sglang"]) if "sglang" in values else None,
            spread=spread(values[OURS]),
            note=others(values, ours=OURS, unit=f" {unit}", absent=lineup.absent),
            versions=lineup.versions,
        )
        for key, what, unit, most, values in rows
    ]


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
