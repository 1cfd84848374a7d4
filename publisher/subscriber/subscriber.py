"""A router's end of the wire: live batches and replays, in order and without holes.

Joins late (asks for the state first), closes gaps by replay, and says what could not be had. One
thread: sockets are made, used and closed by the thread that calls.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from kvevents.codec import Skipped, decode_batch
from kvevents.errors import KVEventsError
from kvevents.events import KVEventBatch
from kvevents.follower import Arrival, Malformed, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel
from publisher.closing import Closing
from publisher.subscriber.listener import Listener, wait_for

__all__ = ["Batch", "Received", "Subscriber", "SubscriberStats", "Undecodable"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, in its turn. `skipped`: events of it that could not be read."""

    seq: int
    batch: KVEventBatch
    skipped: tuple[Skipped, ...]
    replayed: bool


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A batch of which nothing could be read."""

    seq: int
    payload: bytes
    reason: str


Received: TypeAlias = Batch | Undecodable | Gap | Lost | Restarted
"""What `Subscriber.receive` gives, in the order in which it holds."""


@dataclass(slots=True)
class SubscriberStats:
    """Counts since the start. `lost`: batches that could not be had; `malformed`: messages; `refused`:
    connections, where one side has no CURVE or not the right key. ZeroMQ does not try those again.
    """

    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    lost: int = 0
    restarts: int = 0
    malformed: int = 0
    refused: int = 0


class Subscriber(Closing):
    """Subscribes to a sink of ours or to an engine's publisher.

    Without a `replay_endpoint` it starts with the next live batch, and a gap is a loss. `topic` is a
    prefix. A replay of which nothing comes for `replay_timeout_s` is asked for again, then given up:
    what was missing is `Lost`, and the view stale, until it has joined anew, which it goes on trying.
    When the connection was made again, it asks for the last batch and what follows: if that batch is the
    one it was, the stream goes on; else there is another run behind, and it joins anew. A host that is
    gone without a word is noticed after 14 s.
    With a `server_key`, nothing but CURVE is spoken, and with that publisher only; `client_keys` are
    the public and the secret key that it knows this subscriber by (None: keys of the moment).
    Raises ConfigError for an endpoint that cannot be connected to, and for keys that are none.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_timeout_s: float = 5.0,
        server_key: str | None = None,
        client_keys: tuple[str, str] | None = None,
    ) -> None:
        self._listener = Listener(
            endpoint,
            replay_endpoint,
            topic=topic,
            replay_timeout_s=replay_timeout_s,
            server_key=server_key,
            client_keys=client_keys,
        )
        self._ready: deque[Received] = deque()
        self.stats = SubscriberStats()

    @property
    def next_seq(self) -> int | None:
        """The seq of the batch that would come next; None while nothing is known of the stream."""
        return self._listener.follower.next_seq

    @property
    def recovering(self) -> bool:
        """Whether a replay is under way: what was received is not the newest there is."""
        return self._listener.follower.recovering

    @property
    def connected(self) -> bool:
        """Whether the publisher is there, as far as was noticed while receiving."""
        return self._listener.connected

    def receive(self, timeout_s: float | None = None) -> list[Received]:
        """What came, in order; waits for something at most `timeout_s` (None: for ever).

        An empty list means that the time is up.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            wait_for([self._listener], deadline)
            for message, arrivals in self._listener.turn():
                self.stats.refused += message.channel == Channel.REFUSED
                for arrival in arrivals:
                    self._receive(arrival)
            if time.monotonic() >= deadline:
                break
        received, self._ready = list(self._ready), deque()
        return received

    def close(self) -> None:
        """Safe to call twice."""
        self._listener.close()

    # --------------------------------------------------------------------------------- inside

    def _receive(self, arrival: Arrival) -> None:
        match arrival:
            case Told():
                self.stats.replayed += arrival.replayed
                self._ready.append(self._decoded(arrival))
            case Malformed():
                self.stats.malformed += 1
            case Gap():
                self.stats.gaps += 1
                self._ready.append(arrival)
            case Lost(count=count):
                self.stats.lost += count
                self._ready.append(arrival)
            case Restarted():
                self.stats.restarts += 1
                self._ready.append(arrival)

    def _decoded(self, told: Told) -> Batch | Undecodable:
        try:
            decoded = decode_batch(told.payload)
        except KVEventsError as error:
            self.stats.malformed += 1
            return Undecodable(told.seq, told.payload, str(error))
        self.stats.batches += 1
        return Batch(told.seq, decoded.batch, decoded.skipped, told.replayed)
