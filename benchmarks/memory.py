"""P9: resident memory of the tree per cached block, each measured in a process of its own.

Growth from the third prompt to a full device; the pools' memory is there before. Ours keeps the tokens
of a block, its place in each pool, and no hashes: those are made in the sidecar, whose memory is P6's.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import Figure, at_most, compared, skipped
from benchmarks.kit.common.child import ChildFailed
from benchmarks.kit.lineup import CACHES, OURS, Lineup
from benchmarks.options import Options
from benchmarks.report import run_alone

__all__ = ["NAME", "main", "measure"]

NAME = "memory"
PEER = "sglang-rust"
DEVICE_TOKENS = {64: 1_400_000, 1: 300_000}
"""By page size."""
HOST_RATIO = 2
REACH = at_most(0.4)


def measure(options: Options) -> list[Figure]:
    lineup = Lineup(CACHES, peers=options.peers, only=(OURS, PEER))
    figures = []
    for page, device_tokens in DEVICE_TOKENS.items():
        for ratio in (0, HOST_RATIO):
            tokens = options.size(device_tokens, device_tokens // 4)
            found: dict[str, dict[str, Any]] = {}
            for name in (OURS, PEER):
                if name in lineup.commands:
                    try:
                        found[name] = _alone(lineup, name, page, tokens, ratio)
                    except ChildFailed as failure:
                        if name == OURS:
                            raise
                        lineup.absent[name] = f"failed: {str(failure).splitlines()[-1]}"
            figures.append(_figure(page, ratio, found, lineup))
    return figures


def _alone(lineup: Lineup, name: str, page: int, tokens: int, ratio: int) -> dict[str, Any]:
    with lineup.started_alone(name) as peer:
        return peer.ask(
            "memory", page_size=page, device_tokens=tokens, host_ratio=ratio, events=True
        )


def _figure(page: int, ratio: int, found: dict[str, dict[str, Any]], lineup: Lineup) -> Figure:
    host = f", host tier of {ratio}×" if ratio else ""
    row_id = f"P9.{page}{'.host' if ratio else ''}"
    work = f"memory of a cached block, page {page}{host}, events on"
    if PEER not in found:
        reason = lineup.absent.get(PEER, "it did not take part")
        return skipped(row_id, work, reach=REACH, reason=reason, peer=PEER)
    return compared(
        row_id,
        work,
        found[OURS]["bytes_per_block"],
        "B",
        reach=REACH,
        peer=PEER,
        peer_figure=found[PEER]["bytes_per_block"],
        note=f"{found[OURS]['blocks']:,} blocks",
        versions=lineup.versions,
    )


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
