"""P10: whether a call costs more in a larger cache.

One page below a prompt of 64 and of 4,096 pages; requests that evict 1 page and 10,000 pages; a prompt
of 64 pages beside 10,000 and 1,000,000 resident ones. Of each the cost per new page in the larger case
to that in the smaller, the peer's beside it. A prompt's match reads all its tokens once, whatever is
new: so the first is also given without the match.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import Figure, absolute, at_most, shown, spread
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import CACHES, OURS, Lineup
from benchmarks.options import Options
from benchmarks.report import run_alone

__all__ = ["NAME", "main", "measure"]

NAME = "growth"
PAGE, CROWD_PAGE, ROUNDS, PEER = 64, 16, 2, "sglang-rust"
DEPTHS, EVICTIONS, CROWD = (64, 4096), (1, 10_000), (10_000, 1_000_000)
REACH = at_most(1.5)

Rows = dict[str, dict[int, dict[str, Any]]]


def one_round(peer: PeerProcess, crowd: Sequence[int]) -> Rows:
    growth = peer.ask(
        "growth", page_size=PAGE, events=True, depths=list(DEPTHS), evictions=list(EVICTIONS)
    )
    beside = peer.ask("crowd", page_size=CROWD_PAGE, events=True, sizes=list(crowd))
    found: Rows = {}
    for row in (*growth["rows"], *beside["rows"]):
        found.setdefault(row["case"], {})[row["pages"]] = row
    return found


def measure(options: Options) -> list[Figure]:
    lineup = Lineup(CACHES, peers=options.peers, only=(OURS, PEER))
    crowd = (CROWD[0], options.size(CROWD[1], CROWD[1] // 10))
    found = lineup.rounds(options.rounds_or(ROUNDS), lambda peer: one_round(peer, crowd))
    below = "one page below {:,} pages, beside below {:,}: the request"
    return [
        _figure("P10.below", below, "insert 1 page", DEPTHS, _whole, found, lineup),
        _figure(
            "P10.below.insert",
            f"{below} without its match",
            "insert 1 page",
            DEPTHS,
            _without_match,
            found,
            lineup,
        ),
        _figure(
            "P10.evict",
            "{:,} new pages that evict as many, beside {:,}: per page",
            "evict",
            EVICTIONS,
            _per_page,
            found,
            lineup,
        ),
        _figure(
            "P10.resident",
            "64 new pages beside {:,} resident ones, and beside {:,}",
            "insert 64 pages",
            crowd,
            _whole,
            found,
            lineup,
        ),
    ]


def _whole(row: dict[str, Any]) -> float:
    return float(row["us"])


def _without_match(row: dict[str, Any]) -> float:
    return float(row["us"] - row["calls_us"]["match"])


def _per_page(row: dict[str, Any]) -> float:
    return float(row["us"] / row["pages"])


def _figure(
    row_id: str,
    work: str,
    case: str,
    sizes: Sequence[int],
    cost: Callable[[dict[str, Any]], float],
    found: dict[str, list[Rows]],
    lineup: Lineup,
) -> Figure:
    small, large = sizes
    costs = {
        name: [[cost(one[case][size]) for one in rounds] for size in sizes]
        for name, rounds in found.items()
    }
    growth = {
        name: [b / a for a, b in zip(*each, strict=True)] for name, each in costs.items() if each[0]
    }
    words = ", ".join(
        f"{name} {shown(median(each[0]))} and {shown(median(each[1]))} µs"
        for name, each in costs.items()
        if each[0]
    )
    return absolute(
        row_id,
        work.format(large, small),
        median(growth[OURS]),
        "×",
        reach=REACH,
        peer=PEER if PEER in growth else "",
        peer_figure=median(growth[PEER]) if PEER in growth else None,
        spread=spread(growth[OURS]),
        note="; ".join([words, *(f"no {name}: {why}" for name, why in lineup.absent.items())]),
        versions=lineup.versions,
    )


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
