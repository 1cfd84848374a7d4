"""A router's end of the wire: live batches and replays, in order and without holes.

Joins late (asks for the state first), closes gaps by replay, and says what could not be had. One
thread: sockets are made, used and closed by the thread that calls.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import zmq

from kvevents.codec import Skipped, decode_batch
from kvevents.errors import KVEventsError
from kvevents.events import KVEventBatch
from kvevents.frames import End, parse_live, parse_replay_answer, replay_request
from kvevents.gaps import Action, Ask, Deliver, Gap, GapTracker, Lost, Restarted
from publisher.dial import check_client_keys, dial

__all__ = ["Batch", "Received", "Subscriber", "SubscriberStats", "Undecodable"]

_MESSAGES_PER_POLL = 1000
_LONGEST_REJOIN_S = 60.0
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_HANDSHAKES = int(zmq.EVENT_HANDSHAKE_SUCCEEDED) | _REFUSED


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


class Subscriber:
    """Subscribes to a sink of ours or to an engine's publisher.

    Without a `replay_endpoint` it starts with the next live batch, and a gap is a loss. `topic` is a
    prefix. A replay of which nothing comes for `replay_timeout_s` is asked for again, then given up:
    what was missing is `Lost`, and the view stale, until it has joined anew, which it goes on trying.
    When the connection was made again, it asks for the last batch and what follows: if that batch is the
    one it was, the stream goes on; else there is another run behind, and it joins anew.
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
        self._curve = check_client_keys(server_key, client_keys)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._replay_endpoint, self._replay_timeout_s = replay_endpoint, replay_timeout_s
        self._tracker = GapTracker(can_replay=replay_endpoint is not None)
        self._dealer: zmq.Socket[bytes] | None = None
        self._replay_deadline = float("inf")
        self._rejoin_at = float("inf")
        self._rejoin_after_s = replay_timeout_s
        self._connections = 0
        self._postponed: int | None = None
        """The start to ask from once the live socket is connected."""
        self._ready: deque[Received] = deque()
        self.stats = SubscriberStats()
        self._sub = self._context.socket(zmq.SUB)
        self._monitor = self._sub.get_monitor_socket(_HANDSHAKES)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._sub.setsockopt(zmq.RCVHWM, 0)
            self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
            dial(self._sub, "endpoint", endpoint, self._curve)
            self._poller.register(self._sub, zmq.POLLIN)
            if replay_endpoint is not None:  # refuse a bad one now, not when it is first asked
                with self._context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, 0)
                    dial(dealer, "replay_endpoint", replay_endpoint, self._curve)
            self._act(self._tracker.start())
        except BaseException:
            self.close()
            raise

    @property
    def next_seq(self) -> int | None:
        """The seq of the batch that would come next; None while nothing is known of the stream."""
        return self._tracker.expected

    @property
    def recovering(self) -> bool:
        """Whether a replay is under way: what was received is not the newest there is."""
        return self._tracker.recovering

    def receive(self, timeout_s: float | None = None) -> list[Received]:
        """What came, in order; waits for something at most `timeout_s` (None: for ever).

        An empty list means that the time is up.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            now = time.monotonic()
            if self._dealer is not None and now >= self._replay_deadline:
                self._act(self._tracker.failed())
                continue
            if self._dealer is None and now >= self._rejoin_at:
                self._rejoin_at = float("inf")
                self._act(self._tracker.rejoin())
                continue
            until = min(deadline, self._replay_deadline if self._dealer else self._rejoin_at)
            wait = None if until == float("inf") else math.ceil(max(0.0, until - now) * 1000)
            ready = dict(self._poller.poll(wait))
            if self._monitor in ready:
                self._notice_connection()
            if self._dealer is not None and self._dealer in ready:
                self._read_replay(self._dealer)
            if self._sub in ready:
                self._read_live()
            if time.monotonic() >= deadline:
                break
        received, self._ready = list(self._ready), deque()
        return received

    def close(self) -> None:
        """Safe to call twice."""
        self._close_dealer()
        if not self._sub.closed:
            self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(
            linger=0
        )  # a socket that an interrupt has left open would be waited for

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- inside

    def _notice_connection(self) -> None:
        """With the first connection, ask what was postponed. A later one may be to another run of the
        publisher: find out.
        """
        event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
        if event & _REFUSED:
            self.stats.refused += 1
            return
        self._connections += 1
        if self._connections > 1:
            self._act(self._tracker.reconnected())
        elif self._postponed is not None:
            self._ask(self._postponed)

    def _read_live(self) -> None:
        """No message is acted on before the connection that it came on was noticed."""
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < _MESSAGES_PER_POLL:
                messages.append(self._sub.recv_multipart(zmq.NOBLOCK))
        while self._monitor.poll(0):
            self._notice_connection()
        for frames in messages:
            try:
                frame = parse_live(frames)
            except KVEventsError:
                self.stats.malformed += 1
                continue
            self._act(self._tracker.live(frame.seq, frame.payload))

    def _read_replay(self, dealer: zmq.Socket[bytes]) -> None:
        self._replay_deadline = time.monotonic() + self._replay_timeout_s
        for _ in range(_MESSAGES_PER_POLL):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = parse_replay_answer(frames)
            except KVEventsError:
                self.stats.malformed += 1
                self._act(self._tracker.failed())
                return
            if isinstance(answer, End):
                self._close_dealer()
                self._act(self._tracker.end())
                return
            self._act(self._tracker.replayed(answer.seq, answer.payload))
            if self._dealer is not dealer:  # something else is asked for
                return

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case Ask(start=start):
                    self._ask(start)
                case Gap():
                    self.stats.gaps += 1
                    self._ready.append(action)
                case Lost(count=count):
                    self.stats.lost += count
                    self._ready.append(action)
                case Restarted():
                    self.stats.restarts += 1
                    self._ready.append(action)
        if not self._tracker.recovering:
            self._close_dealer()
        if self._tracker.recovering:
            return
        if not self._tracker.diverged:
            self._rejoin_at, self._rejoin_after_s = float("inf"), self._replay_timeout_s
        elif self._rejoin_at == float("inf"):
            self._rejoin_at = time.monotonic() + self._rejoin_after_s
            self._rejoin_after_s = min(_LONGEST_REJOIN_S, self._rejoin_after_s * 2)

    def _deliver(self, deliver: Deliver) -> None:
        self.stats.replayed += deliver.replayed
        try:
            decoded = decode_batch(deliver.payload)
        except KVEventsError as error:
            self.stats.malformed += 1
            self._ready.append(Undecodable(deliver.seq, deliver.payload, str(error)))
            return
        self.stats.batches += 1
        self._ready.append(Batch(deliver.seq, decoded.batch, decoded.skipped, deliver.replayed))

    def _ask(self, start: int) -> None:
        """On a new socket: answers to an earlier request cannot get in between. Not before the live
        socket is connected: else the answer might be of a run that is gone when the live batches come.
        """
        self._close_dealer()
        if not self._connections:
            self._postponed = start
            return
        assert self._replay_endpoint is not None, "G2: only a tracker that can replay asks"
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        self._poller.register(dealer, zmq.POLLIN)
        dealer.setsockopt(zmq.LINGER, 0)
        dial(dealer, "replay_endpoint", self._replay_endpoint, self._curve)
        dealer.send_multipart(replay_request(start))
        self._replay_deadline = time.monotonic() + self._replay_timeout_s

    def _close_dealer(self) -> None:
        dealer, self._dealer = self._dealer, None  # first of all: Ctrl-C may come between any two
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)
