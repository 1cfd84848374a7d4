"""Answers replays without ever waiting for a client.

A few replays run at a time, the others wait their turn as bare requests; those that run are served a
few messages each, for a bounded time and number of bytes a turn. A client whose queue is full makes
room for the next, is tried again soon, and is dropped when it has taken nothing for `timeout_s`, or when
too many are like it. Every replay that is taken to its end ends with END, and so does the answer to a
request that cannot be read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from kvevents.errors import KVEventsError
from kvevents.frames import (
    ReplayRequest,
    parse_replay_request,
    replay_answer,
    replay_end,
)
from publisher.multipart import send_now

__all__ = ["RETRY_S", "ReplayServer", "ReplayStats"]

RETRY_S = 0.001
"""How soon a client with a full queue is tried again."""

_TURN_S = 0.0005
"""The last message of a turn is begun before that."""
_FRAMES_PER_TURN = 256
"""Of requests; one has three, and a peer may send one of a million."""
_FRAMES_KEPT = 4
"""More than a request has."""
_BEGUN_PER_TURN = 16
_RUNNING = 4
_STALLED = 32
_BYTES_PER_TURN = 128 << 10
_MESSAGES_PER_CLIENT = 16
_MESSAGE_BYTES = (
    512  # what a message costs apart from its payload, in bytes of one that is sent as fast
)


@dataclass(slots=True)
class ReplayStats:
    """Counts since the start. `answered`: to the end; of these, `snapshots`: with the state in front.
    `dropped`: clients that stopped reading or went away.
    """

    requests: int = 0
    malformed: int = 0
    answered: int = 0
    snapshots: int = 0
    batches: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class _Malformed:
    """A request that could not be read; it gets END alone."""

    delimited: bool


@dataclass(slots=True)
class _Cursor:
    """One client's replay: what is left of it, and when it last took something."""

    identity: bytes
    answers: Iterator[list[bytes]]
    progress_at: float
    waiting: list[bytes] | None = field(default=None)
    """The message that its queue had no room for."""


class ReplayServer:
    """Serves a ROUTER socket that has ROUTER_MANDATORY set; not its owner.

    `replay` gives the answers from a start seq; `reaches`, whether they are without a snapshot.
    `with_topic`: False answers without the topic frame, as older engines do. `clock`: of a turn's
    seconds.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        topic: bytes,
        replay: Callable[[int], Iterator[tuple[int, bytes]]],
        reaches: Callable[[int], bool],
        *,
        timeout_s: float,
        with_topic: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.router, self._topic = router, topic if with_topic else None
        self._replay, self._reaches = replay, reaches
        self._timeout_s, self._clock = timeout_s, clock
        self._retry_at = 0.0
        self._frames: list[bytes] = []
        """The first ones of the request that is being read."""
        self._waiting: dict[bytes, ReplayRequest | _Malformed] = {}
        """Requests by identity, first come first."""
        self._cursors: deque[_Cursor] = deque()
        self._stalled: dict[bytes, _Cursor] = {}
        self.stats = ReplayStats()

    @property
    def busy(self) -> bool:
        """Whether there is something to send now."""
        return bool(self._cursors or self._waiting)

    @property
    def stalled(self) -> bool:
        """Whether a client with a full queue is to be tried again before long."""
        return bool(self._stalled)

    def take_requests(self) -> None:
        """Read the requests that have come, at most so many frames a turn."""
        for _ in range(_FRAMES_PER_TURN):
            try:
                frame = self.router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(self._frames) < _FRAMES_KEPT:
                self._frames.append(frame.bytes)
            if not frame.more:
                (identity, *frames), self._frames = self._frames, []
                self._take(identity, frames)

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        self.stats.requests += 1
        request: ReplayRequest | _Malformed
        try:
            request = parse_replay_request(frames)
        except KVEventsError:
            self.stats.malformed += 1
            request = _Malformed(delimited=frames[:1] == [b""])
        self._forget(identity)  # a client that asks again wants the new answer only
        self._waiting[identity] = request

    def serve(self, now: float) -> None:
        """Send a turn's worth of answers, shared by the clients."""
        if self._stalled and now >= self._retry_at:
            self._retry_stalled(now)
        budget, begun, until = _BYTES_PER_TURN, 0, self._clock() + _TURN_S
        while budget > 0:
            if self._waiting and len(self._cursors) < _RUNNING and begun < _BEGUN_PER_TURN:
                self._begin(now)
                begun += 1
            elif self._cursors:
                budget -= self._serve_one(self._cursors.popleft(), now, budget, until)
            else:
                return
            if self._clock() >= until:
                return

    def _begin(self, now: float) -> None:
        """Begin the replay whose turn has come."""
        identity = next(iter(self._waiting))
        request = self._waiting.pop(identity)
        self._cursors.append(_Cursor(identity, self._answers(request), now))

    def _retry_stalled(self, now: float) -> None:
        """Put the clients with full queues back in line; drop those that have been full too long."""
        self._retry_at = now + RETRY_S
        stalled, self._stalled = self._stalled, {}
        for cursor in stalled.values():
            if now - cursor.progress_at > self._timeout_s:
                self.stats.dropped += 1
            else:
                self._cursors.append(cursor)

    def _stall(self, cursor: _Cursor) -> None:
        self._stalled[cursor.identity] = cursor
        if len(self._stalled) > _STALLED:
            longest = min(self._stalled.values(), key=lambda one: one.progress_at)
            del self._stalled[longest.identity]
            self.stats.dropped += 1

    def _answers(self, request: ReplayRequest | _Malformed) -> Iterator[list[bytes]]:
        """Starts at once, so that the answer is of the moment of the request."""
        replay: Iterator[tuple[int, bytes]] = iter(())
        is_whole = True
        if isinstance(request, ReplayRequest):
            is_whole = self._reaches(request.start)
            replay = self._replay(request.start)

        def answers() -> Iterator[list[bytes]]:
            for seq, payload in replay:
                yield replay_answer(self._topic, seq, payload, delimited=request.delimited)
                self.stats.batches += 1
            yield replay_end(delimited=request.delimited, with_topic=self._topic is not None)
            self.stats.answered += 1
            self.stats.snapshots += not is_whole

        return answers()

    def _serve_one(self, cursor: _Cursor, now: float, budget: int, until: float) -> int:
        """Send some messages; returns how many bytes. Queues the cursor again as fits."""
        sent = 0
        for _ in range(_MESSAGES_PER_CLIENT):
            message = cursor.waiting or next(cursor.answers, None)
            if message is None:
                return sent + 1
            try:
                send_now(self.router, [cursor.identity, *message])
            except zmq.Again:
                cursor.waiting = message
                self._stall(cursor)
                return sent + 1
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.stats.dropped += 1  # the client is gone
                return sent + 1
            cursor.waiting = None
            cursor.progress_at = now
            sent += len(message[-1]) + _MESSAGE_BYTES
            if sent >= budget or self._clock() >= until:
                break
        self._cursors.append(cursor)
        return sent

    def _forget(self, identity: bytes) -> None:
        if not (self._waiting.pop(identity, None) or self._stalled.pop(identity, None)):
            self._cursors = deque(one for one in self._cursors if one.identity != identity)
