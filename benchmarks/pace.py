"""Latency from publish to subscriber at a fixed rate, the caller asleep in between: P3."""

from __future__ import annotations

import sys
from statistics import median

from benchmarks.figures import Figure, at_most, compared, others, spread
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import OURS, PUBLISHERS, Lineup
from benchmarks.kit.wire import Arrivals, open_wire
from benchmarks.options import Options
from benchmarks.report import run_alone

__all__ = ["NAME", "main", "measure"]

NAME = "pace"
RATES = {100: 200, 1000: 1200, 4000: 3200}
"""Batches per second, and how many of a round."""
EVENTS, ROUNDS, PEER = 8, 3, "sglang"


def one_round(peer: PeerProcess, counts: dict[int, int]) -> dict[int, Arrivals]:
    runs = []
    with open_wire(peer) as wire:
        for rate, batches in counts.items():
            peer.ask("prepare", batches=batches, events=EVENTS, blocks=1)
            runs.append(peer.ask("rate", per_second=rate))
        return dict(zip(counts, wire.all_arrivals(runs)[0], strict=True))


def measure(options: Options) -> list[Figure]:
    """Medians of the rounds, of each one's p99 too."""
    lineup = Lineup(PUBLISHERS, peers=options.peers)
    counts = {rate: options.size(batches, batches // 4) for rate, batches in RATES.items()}
    found = lineup.rounds(options.rounds_or(ROUNDS), lambda peer: one_round(peer, counts))
    figures: list[Figure] = []
    for rate in counts:
        for percent in (50, 99):
            values = {
                name: [one[rate].latency_us(percent) for one in rounds]
                for name, rounds in found.items()
            }
            figures.append(_figure(rate, percent, values, lineup))
    return figures


def _figure(
    rate: int,
    percent: int,
    values: dict[str, list[float]],
    lineup: Lineup,
) -> Figure:
    row_id = f"P3.p{percent}.{rate}"
    work = f"{rate:,} batches/s of {EVENTS} blocks: latency, p{percent}"
    reach = at_most(1.0)
    return compared(
        row_id,
        work,
        median(values[OURS]),
        "µs",
        reach=reach,
        peer=PEER,
        peer_figure=median(values[PEER]) if PEER in values else None,
        spread=spread(values[OURS]),
        note=others(
            {name: each for name, each in values.items() if name != PEER},
            ours=OURS,
            unit=" µs",
            absent=lineup.absent,
        ),
        versions=lineup.versions,
    )


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
