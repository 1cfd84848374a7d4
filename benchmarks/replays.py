"""Replays of 10,000 retained batches beside 1,000 live batches a second: P5.

Clients ask at the same moment, each in a process of its own. The silence is the longest time for which
the subscriber got no live batch while an answer was under way. The slow client decodes each batch, rests
now and then and takes few at a time. All clients have the lowest priority: in a fleet they run elsewhere,
and here they would take the processors that what is measured needs. The peers answer with the thread that
publishes; they are asked by one and by two clients. The idle publisher is asked for its last batch, by
this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import zmq

from benchmarks.figures import Figure, absolute, at_least, at_most, others, shown, spread
from benchmarks.kit.common.child import JsonChild, PeerProcess, kit_module
from benchmarks.kit.lineup import OURS, PUBLISHERS, Lineup
from benchmarks.kit.wire import Arrivals, Wire, open_wire
from benchmarks.kit.workloads.numbers import percentile
from benchmarks.options import Options
from benchmarks.report import run_alone
from kvevents.frames import END, parse_replay_answer, replay_request

__all__ = ["NAME", "main", "measure"]

NAME = "replays"
RETAINED, EVENTS, LIVE_PER_S, ROUNDS = 10_000, 8, 1000, 2
BEFORE_S, SLOW_HIGH_WATER = 0.3, 100
ASKS, PEER_ASKS, REST_S, PATIENCE_MS = 30, 8, 0.06, 5000


@dataclass(frozen=True, slots=True)
class Case:
    """Clients that ask at once, some of them slow; `live_s`: seconds of live batches."""

    fast: int
    slow: int = 0
    live_s: float = 1.0


CASES = {
    "1": Case(1, live_s=1.0),
    "2": Case(2, live_s=1.4),
    "4": Case(4, live_s=1.8),
    "slow": Case(3, 1, live_s=1.8),
}
OF_PEERS = {"sglang": ("1", "2"), "vllm": ("1",)}
ELSEWHERE = ("nice", "-n", "19")


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a case. `whole`: of how many clients all they asked for came, in order, to the end.

    Times in ms: of the fast clients' answers the longest; the live stream's longest silence and latency,
    while an answer was under way and before that; and for how long the caller published nothing.
    """

    whole: int
    clients: int
    fast_ms: float
    silence_ms: float
    latency_ms: float
    quiet_ms: float
    caller_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    cases: dict[str, Answered]
    idle_ms: list[float]


def one_round(peer: PeerProcess, retained: int) -> Round:
    cases = {name: CASES[name] for name in OF_PEERS.get(peer.name, CASES)}
    live = sum(int(LIVE_PER_S * case.live_s) for case in cases.values())
    with open_wire(peer, replay_batches=retained + live) as wire:
        peer.ask("prepare", batches=retained, events=EVENTS, blocks=1)
        last = peer.ask("flood")["last"]
        peer.ask("drain")
        runs: list[dict[str, Any]] = []
        reports: list[list[dict[str, Any]]] = []
        for case in cases.values():
            peer.ask("prepare", batches=int(LIVE_PER_S * case.live_s), events=EVENTS, blocks=1)
            told, run = _ask_while_live(wire, case, last + 1, retained)
            last = run["last"]
            runs.append(run)
            reports.append(told)
        time.sleep(0.2)
        assert wire.replay_endpoint is not None
        idle = _idle(wire.replay_endpoint, last, ASKS if peer.name == OURS else PEER_ASKS)
        arrivals = wire.all_arrivals(runs)[0]
    answered = {
        name: _answered(case, told, live, retained)
        for (name, case), told, live in zip(cases.items(), reports, arrivals, strict=True)
    }
    return Round(answered, idle)


def _ask_while_live(
    wire: Wire, case: Case, next_seq: int, retained: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each client reports, the fast ones first, and the live batches' run."""
    replay = "common.replay_client"
    fast = kit_module(replay, wire.replay_endpoint, 0, 0)
    slow = kit_module(replay, wire.replay_endpoint, SLOW_HIGH_WATER, 1)
    commands = [[*ELSEWHERE, *one] for one in [fast] * case.fast + [slow] * case.slow]
    with ExitStack() as stack:
        clients = [stack.enter_context(JsonChild(command)) for command in commands]
        for client in clients:
            client.receive(30)
        wire.peer.send({"do": "rate", "per_second": LIVE_PER_S})
        time.sleep(BEFORE_S)
        wanted = {"start": next_seq - retained}
        for client in clients:
            client.send(wanted)
        reports = [{**client.receive(120), **wanted} for client in clients]
        return reports, wire.peer.answer()


def _answered(
    case: Case, reports: Sequence[dict[str, Any]], live: Arrivals, retained: int
) -> Answered:
    asked, ended = (
        min(one["asked"] for one in reports),
        max(one["ended"] for one in reports),
    )
    under_way = [at for at in live.at if asked <= at <= ended]
    before = [at for at in live.at if at < asked]
    latencies = [
        latency
        for at, latency in zip(live.at, live.latencies_us, strict=True)
        if asked <= at <= ended
    ]
    published = [at - latency / 1e6 for at, latency in zip(under_way, latencies, strict=True)]
    return Answered(
        whole=sum(_is_whole(one, retained) for one in reports),
        clients=len(reports),
        fast_ms=max(one["total_ms"] for one in reports[: case.fast]),
        silence_ms=_longest([asked, *under_way, min(ended, live.at[-1])]) * 1e3,
        latency_ms=max(latencies, default=0.0) / 1e3,
        quiet_ms=_longest(before) * 1e3,
        caller_ms=_longest(published) * 1e3,
    )


def _is_whole(report: dict[str, Any], retained: int) -> bool:
    """All there was before the live batches, and what there is of those, in order."""
    in_order = report["from"] == report["start"] and not report["holes"] and report["end_marker"]
    return bool(in_order and report["got"] >= retained)


def _longest(moments: Sequence[float]) -> float:
    return max((b - a for a, b in pairwise(moments)), default=0.0)


def _idle(endpoint: str, last: int, asks: int) -> list[float]:
    """Milliseconds from a request for the last batch until the answer's end, at random moments."""
    spent = []
    random = Random(0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        for number in range(asks + 1):
            time.sleep(random.random() * REST_S)
            asked = time.perf_counter()
            socket.send_multipart(replay_request(last))
            got = 0
            while True:
                assert socket.poll(PATIENCE_MS), "an idle publisher answers"
                if parse_replay_answer(socket.recv_multipart()) == END:
                    break
                got += 1
            assert got == 1, f"{got} batches instead of the last"
            if number:  # the first request also connects
                spent.append((time.perf_counter() - asked) * 1e3)
    return spent


# --------------------------------------------------------------------------------------- figures


def measure(options: Options) -> list[Figure]:
    """Medians of the rounds; p99 over all requests of all rounds."""
    lineup = Lineup(PUBLISHERS, peers=options.peers)
    retained = options.size(RETAINED, RETAINED // 10)
    found = lineup.rounds(options.rounds_or(ROUNDS), lambda peer: one_round(peer, retained))
    table = _Table(found, lineup, retained)
    figures = [table.whole()]
    for name, case in CASES.items():
        figures += [table.silence(name, case), table.answers(name, case)]
    return [*figures, table.not_slowed(), *(table.idle(percent) for percent in (50, 99))]


class _Table:
    def __init__(self, found: dict[str, list[Round]], lineup: Lineup, retained: int) -> None:
        self._found, self._lineup, self._retained = found, lineup, retained

    def _of(self, case: str, what: str) -> dict[str, list[float]]:
        """By peer, of each round."""
        return {
            name: [getattr(one.cases[case], what) for one in rounds]
            for name, rounds in self._found.items()
            if all(case in one.cases for one in rounds)
        }

    def whole(self) -> Figure:
        cases = {
            name: [case for one in rounds for case in one.cases.values()]
            for name, rounds in self._found.items()
        }
        shares = {
            name: sum(one.whole for one in each) / sum(one.clients for one in each)
            for name, each in cases.items()
        }
        rest = [f"{name} {shown(share)}" for name, share in shares.items() if name != OURS]
        return absolute(
            "P5.whole",
            f"replays of {self._retained:,} batches that are complete and in order",
            shares[OURS],
            "of all",
            reach=at_least(1.0),
            note=", ".join(rest),
            versions=self._lineup.versions,
        )

    def silence(self, name: str, case: Case) -> Figure:
        silences, ours = self._of(name, "silence_ms"), self._found[OURS]
        quiet = median(one.cases[name].quiet_ms for one in ours)
        latency = median(one.cases[name].latency_ms for one in ours)
        caller = median(one.cases[name].caller_ms for one in ours)
        note = (
            f"highest latency {shown(latency)} ms; the caller itself silent for {shown(caller)} ms, "
            f"and the stream for {shown(quiet)} ms before they ask"
        )
        if len(silences) > 1:
            note = f"{others(silences, ours=OURS, unit=' ms', absent={})}; {note}"
        return self._row(
            f"P5.silence.{name}",
            f"longest silence of {LIVE_PER_S:,} live batches/s, {_clients(case)} at once",
            silences,
            reach=5.0,
            note=note,
        )

    def answers(self, name: str, case: Case) -> Figure:
        times = self._of(name, "fast_ms")
        which = "until the last fast one has all" if case.slow else "until the last has all"
        return self._row(
            f"P5.answer.{name}",
            f"{_clients(case)} at once: from the request {which}",
            times,
            reach=None,
            note=others(times, ours=OURS, unit=" ms", absent={}) if len(times) > 1 else "",
        )

    def not_slowed(self) -> Figure:
        alone, beside = (
            [one.cases[name].fast_ms for one in self._found[OURS]] for name in ("4", "slow")
        )
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        return absolute(
            "P5.slowed",
            "fast clients' answers, where the fourth is slow against four fast ones",
            median(ratios),
            "×",
            reach=at_most(1.1),
            spread=spread(ratios),
        )

    def idle(self, percent: int) -> Figure:
        rounds = {name: [one.idle_ms for one in each] for name, each in self._found.items()}
        pooled = {
            name: percentile([one for each in every for one in each], percent)
            for name, every in rounds.items()
        }
        values = {
            name: [pooled[name]] if percent == 99 else [percentile(each, percent) for each in every]
            for name, every in rounds.items()
        }
        return self._row(
            f"P5.idle.p{percent}",
            f"an idle publisher asked for the last batch: until the answer's end, p{percent}",
            values,
            reach=1.0 if percent == 50 else None,
            note=others(values, ours=OURS, unit=" ms", absent=self._lineup.absent),
        )

    def _row(
        self,
        row_id: str,
        work: str,
        values: dict[str, list[float]],
        *,
        reach: float | None,
        note: str,
    ) -> Figure:
        peer = next((name for name in values if name != OURS), "")
        return absolute(
            row_id,
            work,
            median(values[OURS]),
            "ms",
            reach=None if reach is None else at_most(reach),
            peer=peer,
            peer_figure=median(values[peer]) if peer else None,
            spread=spread(values[OURS]),
            note=note,
            versions=self._lineup.versions,
        )


def _clients(case: Case) -> str:
    if case.slow:
        return f"{case.fast} clients and {case.slow} slow one"
    return f"{case.fast} client{'s' * (case.fast > 1)}"


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
