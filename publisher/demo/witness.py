"""Who holds how much of a prompt, as a subscriber of our own sees it: not as the router does."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Lock, Thread
from typing import Self

from kvevents.gaps import Restarted
from kvevents.index import BlockIndex
from publisher.subscriber.subscriber import Batch, Subscriber

__all__ = ["Witness"]

_LOOK_UP_S = 0.1


class Witness:
    """Follows one worker, also over its restarts, in a thread."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._index, self._lock, self._ending = BlockIndex(), Lock(), Event()
        self.last_seq = -1
        """Of the last batch that it has seen."""
        self._thread = Thread(target=self._follow, args=(endpoint, replay_endpoint), daemon=True)
        self._thread.start()

    def num_blocks(self, tokens: Sequence[int]) -> int:
        """Leading blocks of a prompt that the worker holds, on whatever tiers."""
        with self._lock:
            return self._index.overlap(tokens).any_medium

    @property
    def num_held(self) -> int:
        """Blocks that the worker holds."""
        with self._lock:
            return len(self._index)

    def close(self) -> None:
        """Safe to call twice."""
        self._ending.set()
        self._thread.join()

    def _follow(self, endpoint: str, replay_endpoint: str) -> None:
        with Subscriber(endpoint, replay_endpoint) as subscriber:
            while not self._ending.is_set():
                for one in subscriber.receive(_LOOK_UP_S):
                    with self._lock:
                        if isinstance(one, Batch):
                            self._index.apply(one.batch.events)
                            self.last_seq = one.seq
                        elif isinstance(one, Restarted):
                            self._index.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
