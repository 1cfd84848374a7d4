"""P8: a request with a host tier of four times the device, and for ours a file store below it.

The same trace and loop as P7. Copies between device and host are part of the request's time on both
sides, each side's own copies; then the same with none, on both sides. The peers have no storage here;
ours has it in the first rows, which asks it for every prompt and writes what was inserted, in threads.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import Figure, Reach, at_most
from benchmarks.kit.common.child import PeerProcess
from benchmarks.kit.lineup import CACHES, OURS, Lineup
from benchmarks.options import Options
from benchmarks.report import run_alone
from benchmarks.requests import ratios
from publisher.demo.options import BUNDLED_TRACE

__all__ = ["NAME", "main", "measure"]

NAME = "tiers"
PAGE, DEVICE_TOKENS, HOST_RATIO = 64, 400_000, 4
REQUESTS, ROUNDS = 200, 3
PEERS = ("sglang-python", "sglang-rust")
WITH_COPIES, WITHOUT = at_most(0.4), at_most(0.25)
WAYS: dict[str, tuple[str, dict[str, str], Reach, str]] = {
    "storage": ("host tier and file storage", {"storage": "file"}, WITH_COPIES, "yes"),
    "host": ("host tier", {"storage": "none"}, WITH_COPIES, "yes"),
    "no-copies": ("host tier without copies", {"storage": "none"}, WITHOUT, "no"),
}
"""What it is called, our options, what is to be reached, and whether both sides copy."""


def one_round(peer: PeerProcess) -> dict[str, dict[str, Any]]:
    """By way; of a peer by whether it copies."""
    found: dict[str, dict[str, Any]] = {}
    for name, (_, options, _, copy) in WAYS.items():
        ours = peer.name == OURS
        if ours or copy not in found:
            peer.ask("options", values={**options, "copy": copy} if ours else {"copy": copy})
            found[name if ours else copy] = peer.ask(
                "replay",
                page_size=PAGE,
                device_tokens=DEVICE_TOKENS,
                host_ratio=HOST_RATIO,
                events=True,
            )
    return found


def measure(options: Options) -> list[Figure]:
    lineup = Lineup(CACHES, peers=options.peers, only=(OURS, *PEERS))
    requests = options.size(REQUESTS, REQUESTS // 4)

    def replay(peer: PeerProcess) -> dict[str, dict[str, Any]]:
        peer.ask("trace", path=str(BUNDLED_TRACE), requests=requests)
        return one_round(peer)

    found = lineup.rounds(options.rounds_or(ROUNDS), replay)
    return [
        ratios(
            f"P8.{name}.{peer}",
            f"a request, page {PAGE}, events on, {words}",
            [one[name] for one in found[OURS]],
            [one[copy] for one in found.get(peer, ())],
            reach=reach,
            peer=peer,
            lineup=lineup,
            note="; the peer has no storage" if name == "storage" else "",
        )
        for name, (words, _, reach, copy) in WAYS.items()
        for peer in PEERS
    ]


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
