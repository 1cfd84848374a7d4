"""Blocks a second from the first publish to the last arrival, as fast as it takes: P4.

The peers' queue towards their publishing thread is unbounded, and takes the whole flood at once; ours is
a ring of fixed size, for whose room the flood waits. Both are timed until the last batch has come to the
last subscriber. Subscribers are processes on the same cores, and with eight of them most of the work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import (
    Figure,
    absolute,
    at_least,
    at_most,
    compared,
    others,
    shown,
    spread,
)
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import OURS, PUBLISHERS, Lineup
from benchmarks.kit.wire import open_wire
from benchmarks.options import Options
from benchmarks.report import run_alone

__all__ = ["NAME", "main", "measure"]

NAME = "flood"
EVENTS, ROUNDS, PEER = 8, 3, "sglang"
CROWD = 8
DIALECTS = ("sglang", "vllm", "legacy")


@dataclass(frozen=True, slots=True)
class Case:
    """One flood. `blocks`: an event's."""

    batches: int
    blocks: int = 1
    subscribers: int = 1
    dialects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Flood:
    """`blocks_s`: to one subscriber, or of several sinks together. `lost`: messages, of all. `waits`:
    for room in the ring.
    """

    blocks_s: float
    lost: int
    waits: int


def flood(peer: PeerProcess, case: Case) -> Flood:
    with open_wire(peer, subscribers=case.subscribers, dialects=case.dialects) as wire:
        peer.ask("prepare", batches=case.batches, events=EVENTS, blocks=case.blocks)
        run = peer.ask("flood")
        arrived = [one[0] for one in wire.all_arrivals([run])]
    elapsed = max(one.elapsed_s for one in arrived)
    blocks = case.batches * EVENTS * case.blocks * max(1, len(case.dialects))
    return Flood(blocks / elapsed, sum(one.lost for one in arrived), run.get("waits", 0))


def measure(options: Options) -> list[Figure]:
    """Medians of the rounds; the cases of a round follow each other, peer by peer."""
    lineup = Lineup(PUBLISHERS, peers=options.peers)
    most, few, long = options.size(5000, 1000), options.size(2000, 500), options.size(300, 100)
    cases = {
        "1": Case(most),
        "32": Case(long, blocks=32),
        "crowd": Case(few, subscribers=CROWD),
        "dialects": Case(few, dialects=DIALECTS),
    }

    def one_round(peer: PeerProcess) -> dict[str, Flood]:
        mine = {
            name: case
            for name, case in cases.items()
            if peer.name == OURS or (not case.dialects and (name != "crowd" or peer.name == PEER))
        }
        return {name: flood(peer, case) for name, case in mine.items()}

    found = lineup.rounds(options.rounds_or(ROUNDS), one_round)
    return [
        _against(found, lineup, "1", "one block an event", 1.5),
        _against(found, lineup, "32", "32 blocks an event", 1.0),
        _crowd(found, lineup),
        _dialects(found, lineup),
    ]


Found = Mapping[str, Sequence[Mapping[str, Flood]]]


def _rates(found: Found, case: str) -> dict[str, list[float]]:
    return {
        name: [one[case].blocks_s for one in rounds]
        for name, rounds in found.items()
        if rounds and case in rounds[0]
    }


def _account(found: Found, case: str) -> str:
    """What is to be said of a flood besides its speed."""
    lost = {
        name: sum(one[case].lost for one in each if case in one) for name, each in found.items()
    }
    said = [f"{name} lost {count:,} messages" for name, count in lost.items() if count]
    waits = median(one[case].waits for one in found[OURS])
    return "".join(f"; {each}" for each in [*said, f"{shown(waits)} waits for room in the ring"])


def _against(found: Found, lineup: Lineup, case: str, what: str, least: float) -> Figure:
    rates = _rates(found, case)
    row_id, work, reach = f"P4.{case}", f"flood, {EVENTS} events a batch, {what}", at_least(least)
    more = {name: each for name, each in rates.items() if name != PEER}
    return compared(
        row_id,
        work,
        median(rates[OURS]),
        "blocks/s",
        reach=reach,
        peer=PEER,
        peer_figure=median(rates[PEER]) if PEER in rates else None,
        spread=spread(rates[OURS]),
        note=others(more, ours=OURS, unit=" blocks/s", absent=lineup.absent)
        + _account(found, case),
        versions=lineup.versions,
    )


def _crowd(found: Found, lineup: Lineup) -> Figure:
    one, all_of_them = _rates(found, "1"), _rates(found, "crowd")
    kept = {
        name: [many / single for many, single in zip(each, one[name], strict=True)]
        for name, each in all_of_them.items()
    }
    lost = {name: [100 * (1 - each) / (CROWD - 1) for each in kept[name]] for name in kept}
    compound = 100 * (1 - median(kept[OURS]) ** (1 / (CROWD - 1)))
    rates = ", ".join(f"{name} {shown(median(all_of_them[name]))} blocks/s" for name in kept)
    return absolute(
        "P4.crowd",
        f"the same to {CROWD} subscribers: lost with each further one, of the rate to one",
        median(lost[OURS]),
        "%",
        reach=at_most(10.0),
        peer=PEER if PEER in lost else "",
        peer_figure=median(lost[PEER]) if PEER in lost else None,
        spread=spread(lost[OURS]),
        note=f"to each of {CROWD}: {rates}; compounded {compound:.1f} %" + _account(found, "crowd"),
        versions=lineup.versions,
    )


def _dialects(found: Found, lineup: Lineup) -> Figure:
    rates = _rates(found, "dialects")[OURS]
    return absolute(
        "P4.dialects",
        f"flood to 3 sinks, {', '.join(DIALECTS)}, each with a subscriber: together",
        median(rates),
        "blocks/s",
        reach=at_least(100_000),
        spread=spread(rates),
        note="no peer has several outputs" + _account(found, "dialects"),
        versions=lineup.versions,
    )


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
