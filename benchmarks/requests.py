"""P7: what a request costs the scheduler's thread, on a real trace, with events off and on.

Match, lock, evict, allocate, insert, unlock, and handing the events over: ours to the sidecar's link,
the peers' as the list that their publisher would be given. Prompts are held in the type in which each
engine would hold them; ours also as an array of 64-bit integers, which it then packs in the time of the
request. The next request follows at once, so ours runs beside a busy sidecar.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.figures import (
    Figure,
    Reach,
    absolute,
    at_most,
    compared,
    others,
    shown,
    skipped,
    spread,
)
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import CACHES, OURS, Lineup
from benchmarks.options import Options
from benchmarks.report import run_alone
from publisher.demo.options import BUNDLED_TRACE

__all__ = ["NAME", "main", "measure", "ratios"]

NAME = "requests"
DEVICE_TOKENS, ROUNDS = 400_000, 3
PAGES = {64: 240, 16: 40, 1: 20}
"""Page size, and how many requests of the trace: few where a peer takes 64,000 µs for one."""
REACHES = {"sglang-python": 0.1, "sglang-rust": 0.25, "vllm": 0.06}
SLOW = "vllm"
"""Takes 260,000 µs for a request of pages of one token, and is left out there."""
EVENTS_REACH, PAGE_1_REACH = at_most(60.0), at_most(2.0)

Replay = dict[str, Any]


def one_round(peer: PeerProcess, sizes: dict[int, int]) -> dict[str, Replay]:
    found: dict[str, Replay] = {}
    for page, requests in sizes.items():
        if page == 1 and peer.name == SLOW:
            continue
        peer.ask("trace", path=str(BUNDLED_TRACE), requests=requests)
        for state in ("off", "on") if page == 64 or peer.name == OURS else ("on",):
            found[f"{page} {state}"] = _replay(peer, page, state)
    if peer.name == OURS:
        found["64 short off"], found["64 short on"] = (
            _replay(peer, 64, state) for state in ("off", "on")
        )
        peer.ask("trace", path=str(BUNDLED_TRACE), requests=sizes[64])
        peer.ask("options", values={"tokens": "int64"})
        found["64 int64 on"] = _replay(peer, 64, "on")
        peer.ask("options", values={"tokens": "packed"})
    return found


def _replay(peer: PeerProcess, page: int, state: str) -> Replay:
    return peer.ask(
        "replay", page_size=page, device_tokens=DEVICE_TOKENS, host_ratio=0, events=state == "on"
    )


def measure(options: Options) -> list[Figure]:
    lineup = Lineup(CACHES, peers=options.peers, only=(OURS, *REACHES))
    sizes = {page: options.size(count, count // 4) for page, count in PAGES.items()}
    found = lineup.rounds(options.rounds_or(ROUNDS), lambda peer: one_round(peer, sizes))
    figures: list[Figure] = []
    for page in PAGES:
        figures += [_beside(page, "", peer, found, lineup) for peer in REACHES]
        figures.append(_cost_of_events(page, found, lineup))
    figures += [_beside(64, " int64", peer, found, lineup) for peer in REACHES]
    return [*figures, _page_1(found, lineup)]


def _beside(
    page: int, form: str, peer: str, found: dict[str, list[dict[str, Replay]]], lineup: Lineup
) -> Figure:
    row_id = ".".join(("P7", str(page), *form.split(), peer))
    packed = ", packed first" if form else ""
    work = f"a request{packed}, page {page}, events on: the scheduler's thread"
    reach = at_most(REACHES[peer]) if page == 64 else None
    if page == 1 and peer == SLOW:
        return skipped(row_id, work, reach=reach, reason="260,000 µs a request", peer=peer)
    return ratios(
        row_id,
        work,
        [one[f"{page}{form} on"] for one in found[OURS]],
        [one[f"{page} on"] for one in found.get(peer, ())],
        reach=reach,
        peer=peer,
        lineup=lineup,
    )


def ratios(
    row_id: str,
    work: str,
    ours: Sequence[Replay],
    theirs: Sequence[Replay],
    *,
    reach: Reach | None,
    peer: str,
    lineup: Lineup,
    note: str = "",
) -> Figure:
    """Replays of the same rounds: medians, and the median of the rounds' ratios."""
    if not theirs:
        reason = lineup.absent.get(peer, "it did not take part")
        return skipped(row_id, work, reach=reach, reason=reason, peer=peer)
    pages = {one["new_pages"] for one in (*ours, *theirs)}
    same = "" if len(pages) == 1 else f"; new pages {min(pages):,} to {max(pages):,}"
    ours_us, theirs_us = ([one["us_per_request"] for one in each] for each in (ours, theirs))
    p50, p99 = (
        " and ".join(
            shown(median(one[f"p{percent}_us"] for one in each)) for each in (ours, theirs)
        )
        for percent in (50, 99)
    )
    return compared(
        row_id,
        work,
        median(ours_us),
        "µs",
        reach=reach,
        peer=peer,
        peer_figure=median(theirs_us),
        ratio=median(a / b for a, b in zip(ours_us, theirs_us, strict=True)),
        spread=spread(ours_us),
        note=f"p50 {p50}, p99 {p99} µs{same}{note}",
        versions=lineup.versions,
    )


def _costs(rounds: Sequence[dict[str, Replay]], page: int) -> list[float]:
    return [
        one[f"{page} on"]["us_per_request"] - one[f"{page} off"]["us_per_request"]
        for one in rounds
        if f"{page} off" in one
    ]


def _cost_of_events(page: int, found: dict[str, list[dict[str, Replay]]], lineup: Lineup) -> Figure:
    costs = {name: each for name, rounds in found.items() if (each := _costs(rounds, page))}
    off = median(one[f"{page} off"]["us_per_request"] for one in found[OURS])
    theirs = others(costs, ours=OURS, unit=" µs", absent={})
    return absolute(
        f"P7.events.{page}",
        f"what events add to a request, page {page}",
        median(costs[OURS]),
        "µs",
        reach=EVENTS_REACH,
        spread=spread(costs[OURS]),
        note="; ".join(part for part in (f"off: {shown(off)} µs", theirs) if part),
        versions=lineup.versions,
    )


def _page_1(found: dict[str, list[dict[str, Replay]]], lineup: Lineup) -> Figure:
    """On the same few requests."""
    of_1, of_64 = (
        [one[key]["us_per_request"] for one in found[OURS]] for key in ("1 on", "64 short on")
    )
    return compared(
        "P7.page-1",
        "a request, page 1, events on, beside page 64",
        median(of_1),
        "µs",
        reach=PAGE_1_REACH,
        peer="page 64",
        peer_figure=median(of_64),
        ratio=median(a / b for a, b in zip(of_1, of_64, strict=True)),
        spread=spread(of_1),
        versions=lineup.versions,
    )


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
