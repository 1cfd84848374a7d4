"""What a peer is. Subclass one of the two, then call `benchmarks.kit.peers.host.serve`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["CachePeer", "PublisherPeer", "StoredBlocks"]


class StoredBlocks(NamedTuple):
    """One stored event: chained blocks after the parent, None at the start of a prompt. Hashes are
    signed 64-bit integers.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int


class PublisherPeer(ABC):
    """Publishes event batches on a PUB socket as [topic, sequence, payload], and replays them."""

    first_sequence = 0  # sequence number of the first batch; each publish() adds one

    @abstractmethod
    def start(
        self, endpoint: str, replay_endpoint: str | None, buffer_batches: int, block_size: int
    ) -> None:
        """Bind both loopback endpoints. With a replay endpoint keep `buffer_batches`."""

    def start_sinks(self, sinks: Sequence[tuple[str, str]], block_size: int) -> None:
        """Bind several outputs instead, a dialect and an endpoint each. Most peers have one alone."""
        raise ValueError(f"one output alone, not {len(sinks)} of blocks of {block_size}")

    def prepare(self, batch: Sequence[StoredBlocks]) -> Any:
        """The batch as the engine would hold it before publishing. Not timed."""
        return batch

    @abstractmethod
    def publish(self, batch: Any) -> None:
        """Publish one prepared batch. Timed: this is what the engine's thread waits for."""

    def publish_all(self, batch: Any) -> None:
        """As `publish`, but wait where the publisher would refuse it. Timed, in a flood."""
        self.publish(batch)

    def counts(self) -> dict[str, int]:
        """What else the peer has counted since `start`, for the report of a workload."""
        return {}

    def backlog(self) -> int:
        """Batches accepted and not sent yet."""
        return 0

    @abstractmethod
    def stop(self) -> None:
        """Send what is left and close the sockets."""


class CachePeer(ABC):
    """A prefix cache on its own: prompts in, events out; no model runs."""

    @abstractmethod
    def build(self, page_size: int, device_tokens: int, host_ratio: float, *, events: bool) -> None:
        """A new, empty cache; forget the old one. Without a host tier the ratio is 0."""

    def option(self, name: str, value: str) -> None:
        """Set an option (`--option NAME=VALUE`) before `build`. Refuse unknown ones."""
        raise ValueError(f"unknown option {name}={value}")

    def prepare(self, tokens: array[int]) -> Any:
        """The prompt in the type in which the engine would hold it. Not timed."""
        return tokens

    @abstractmethod
    def run_request(self, tokens: Any) -> None:
        """Match, load back, pin, evict and allocate what is missing, insert, unpin."""

    @abstractmethod
    def take_events(self) -> Sequence[Any]:
        """The events since the last call. Timed together with the request."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Totals since `build`: prompt_tokens, hit_tokens, host_hit_tokens, new_tokens, and calls.

        `calls` maps a step's name to the nanoseconds spent in it. A peer that knows it also gives
        evicted_tokens.
        """

    def check(self) -> None:  # noqa: B027  optional
        """Raise AssertionError when the cache's own books do not balance."""
