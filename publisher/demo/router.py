"""The router: joins late, keeps an index, and shows it when the parent asks."""

from __future__ import annotations

import sys

from kvevents.gaps import Lost, Restarted
from kvevents.index import BlockIndex
from publisher import Batch, Subscriber
from publisher.demo.child import ParentPipe, say

__all__ = ["main"]

_LOOK_UP_S = 0.1


def main() -> int:
    """Follow the stream up to the seq that the parent names, then show the index."""
    endpoint, replay_endpoint = sys.argv[1:]
    parent = ParentPipe()
    index = BlockIndex()
    until: int | None = None
    joined_at: int | None = None
    unrepaired = False
    with Subscriber(endpoint, replay_endpoint) as subscriber:
        while until is None or subscriber.recovering or (subscriber.next_seq or 0) < until:
            for one in subscriber.receive(_LOOK_UP_S):
                match one:
                    case Batch():
                        if joined_at is None:
                            joined_at = one.seq
                            say(joined=one.seq)
                        index.apply(one.batch.events)
                    case Restarted():
                        index.clear()
                    case Lost():
                        unrepaired = True
                    case _:
                        pass
            if (line := parent.poll()) is not None:
                until = line["until"]
        stats = subscriber.stats
    say(
        view={
            medium: [str(one) for one in sorted(held)] for medium, held in index.resident.items()
        },
        joined_at=joined_at,
        received=stats.batches,
        gaps=stats.gaps,
        replayed=stats.replayed,
        lost=stats.lost,
        unrepaired=unrepaired,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
