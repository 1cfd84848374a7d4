"""`kvevents play`: what a capture has, published again.

P1  What is sent live is what came live, frame for frame, in its order.
P2  Where a capture shows that messages had been missing, what its replay then brought can be had of the
    replay socket before the first message behind the hole is sent: whoever listens is never told less
    than the recorder was.
P3  Nothing here waits for a client, but with `MAX_SPEED`, and there no longer than `_PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import math
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import zmq

from kvevents.follower import Follower, Malformed, Step, Told
from kvevents.frames import live_frames
from kvevents.message import Channel, Message
from publisher.sidecar.replay import RETRY_S, ReplayServer
from publisher.sidecar.sink import SinkError, bind_one
from publisher.tools.captures.history import History

__all__ = ["MAX_SPEED", "Form", "Player", "Sending", "in_order", "live_only", "stretches"]

MAX_SPEED = math.inf

_HWM = 10_000
_REPLAY_HWM = 64
_MAX_INCOMING_BYTES = 4096
_PATIENCE_S = 1.0
_LINGER_S = 5.0
_REPLAY_TIMEOUT_S = 10.0
_PER_TURN = 100
_LONGEST_WAIT_S = 1.0  # Ctrl-C just before a wait does not end it
_LOOK_AHEAD, _LOOK_AHEAD_BYTES = 100_000, 256 << 20

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Sending:
    """Frames to publish, and when they came once."""

    at_ns: int
    frames: list[bytes]


def stretches(steps: Iterable[Step], follower: Callable[[], Follower]) -> Iterator[list[Step]]:
    """Steps that belong together: from one that shows that something is missing to the one that ends the
    replay which brought it (P2); each other by itself. At most 100,000 messages, or 256 MiB.
    """
    stretch: list[Step] = []
    size = 0
    for step in steps:
        stretch.append(step)
        size += sum(map(len, step.message.frames))
        full = len(stretch) >= _LOOK_AHEAD or size >= _LOOK_AHEAD_BYTES
        if full or not follower().recovering:
            yield stretch
            stretch, size = [], 0
    if stretch:
        yield stretch


def live_only(stretch: Iterable[Step]) -> Iterator[Sending]:
    """What came live, as it came."""
    for message, _ in stretch:
        if message.channel == Channel.LIVE and message.frames:
            yield Sending(message.at_ns, message.frames)


def in_order(stretch: Iterable[Step], topic: bytes) -> Iterator[Sending]:
    """What was delivered, whether live or by a replay, and what is malformed: for those who cannot ask.
    `topic`: of what came without one.
    """
    for _, arrivals in stretch:
        for arrival in arrivals:
            match arrival:
                case Told(seq=seq, payload=payload, at_ns=at_ns):
                    of = arrival.topic or (topic if arrival.replayed else b"")
                    yield Sending(at_ns, live_frames(of, seq, payload))
                case Malformed(message=Message(channel=Channel.LIVE, frames=[_, *_] as frames)):
                    yield Sending(arrival.message.at_ns, frames)


@dataclass(frozen=True, slots=True)
class Form:
    """How a capture's publisher answered: under which topic, and whether it said one."""

    topic: bytes = b""
    with_topic: bool = True

    @classmethod
    def of(cls, stretch: Iterable[Step], head_topic: str) -> Form:
        """As far as its first messages tell."""
        live = [one.frames for one, _ in stretch if one.channel == Channel.LIVE]
        answers = [one.frames for one, _ in stretch if one.channel == Channel.ANSWER]
        topic = next((frames[0] for frames in live if len(frames) == 3), head_topic.encode())
        told = next((frames for frames in answers if len(frames) in (3, 4)), [b"", topic, b"", b""])
        return cls(topic, len(told) == 4)


class Player:
    """Binds on construction; raises ValueError for an endpoint that cannot be. `topic`: in place of each
    message's own. `history`: what the replay socket answers with.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, topic: bytes | None, history: History
    ) -> None:
        self.subscribers = 0
        """How many have subscribed, and not left."""
        self.sent = 0
        self.dropped = 0
        """Messages that a subscriber was too slow for, as far as is known."""
        self._topic, self._history = topic, history
        self._clock: tuple[int, float] | None = None
        """When the first was due: once, and now."""
        self._patient = True
        self._replay: ReplayServer | None = None
        self._made: dict[Path, int] = {}
        """Files of sockets, by their inodes: libzmq leaves them."""
        self._context = zmq.Context[Socket]()
        self._pub = self._context.socket(zmq.XPUB)
        self._router: Socket | None = None
        try:
            for option, value in (
                (zmq.SNDHWM, _HWM),
                (zmq.XPUB_VERBOSER, 1),
                (zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES),
            ):
                self._pub.setsockopt(option, value)
            self.endpoint = self._bind(self._pub, "--endpoint", endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._router = router = self._context.socket(zmq.ROUTER)
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                router.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
                router.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
                self.replay_endpoint = self._bind(router, "--replay-endpoint", replay_endpoint)
        except SinkError as error:
            self.close(linger_s=0.0)
            raise ValueError(str(error)) from None
        except BaseException:
            self.close(linger_s=0.0)
            raise

    @property
    def replays(self) -> int:
        """How many were answered to their end."""
        return 0 if self._replay is None else self._replay.stats.answered

    def serve_replays(self, form: Form) -> None:
        """From now on."""
        if self._router is not None:
            self._replay = ReplayServer(
                self._router,
                form.topic if self._topic is None else self._topic,
                self._history.replay,
                lambda _: True,
                timeout_s=_REPLAY_TIMEOUT_S,
                with_topic=form.with_topic,
            )

    def wait_for_subscribers(self, count: int) -> None:
        """Until there are so many; replays are served meanwhile."""
        while self.subscribers < count:
            self._turn(math.inf)

    def play(self, sendings: Iterable[Sending], speed: float) -> None:
        """Send these, as long after the first of all as they came then, through `speed`."""
        for sending in sendings:
            self.wait_for_turn([sending], speed)
            if self.sent % _PER_TURN == 0:
                self._turn(0.0)
            self._send(sending.frames, wait=speed == MAX_SPEED)

    def wait_for_turn(self, sendings: Iterable[Sending], speed: float) -> None:
        """Until these are due."""
        for sending in sendings if speed != MAX_SPEED else ():
            self.serve_until(self._due(sending.at_ns, speed))

    def serve_until(self, until: float) -> None:
        """Answer replays until the monotonic clock is there."""
        while time.monotonic() < until:
            self._turn(until)

    def finish_replays(self) -> None:
        """Let what was asked for have its answer, for at most 5 s."""
        until = time.monotonic() + _LINGER_S
        self._turn(0.0)
        while self._replay is not None and (self._replay.busy or self._replay.stalled):
            if time.monotonic() >= until:
                return
            self._turn(until)

    def close(self, *, linger_s: float = _LINGER_S) -> None:
        """What is queued for a client has `linger_s` to leave. Safe to call twice."""
        while self._made:
            path, inode = self._made.popitem()
            if _socket_at(path) == inode:
                path.unlink(missing_ok=True)
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(linger_s=_LINGER_S if kind is None else 0.0)

    # ---------------------------------------------------------------------------------- inside

    def _bind(self, socket: Socket, key: str, endpoint: str) -> str:
        bound = bind_one(socket, key, endpoint)
        path = Path(bound.removeprefix("ipc://"))
        if bound.startswith("ipc://") and (inode := _socket_at(path)) is not None:
            self._made[path] = inode
        return bound

    def _due(self, at_ns: int, speed: float) -> float:
        if self._clock is None:
            self._clock = at_ns, time.monotonic()
        first_ns, began = self._clock
        return began + (at_ns - first_ns) / 1e9 / speed

    def _turn(self, until: float) -> None:
        """One round of what has come; waits until the monotonic clock is there at most."""
        self._wait(until)
        for _ in range(_PER_TURN):
            try:
                message = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.subscribers += {b"\1": 1, b"\0": -1}.get(message[:1], 0)
        if self._replay is not None:
            self._replay.take_requests()
            self._replay.serve(time.monotonic())

    def _wait(self, until: float) -> None:
        replay = self._replay
        if replay is not None and replay.busy:
            return
        if replay is not None and replay.stalled:
            until = min(until, time.monotonic() + RETRY_S)
        poller = zmq.Poller()
        poller.register(self._pub, zmq.POLLIN)
        if replay is not None:
            poller.register(replay.router, zmq.POLLIN)
        left_s = min(max(0.0, until - time.monotonic()), _LONGEST_WAIT_S)
        poller.poll(math.ceil(left_s * 1000) if left_s > RETRY_S else 0)

    def _send(self, frames: list[bytes], *, wait: bool) -> None:
        if self._topic is not None and len(frames) > 1:
            frames = [self._topic, *frames[1:]]
        self.sent += 1  # before: Ctrl-C may come as soon as it is gone
        if not (wait and self._sent_to_all(frames)):
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            with contextlib.suppress(zmq.Again):  # as good as a subscriber's full queue
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            self.dropped += wait

    def _sent_to_all(self, frames: list[bytes]) -> bool:
        """Whether every subscriber had room for it; a second without any is not waited again until there
        was.
        """
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self._patient = self._patient and time.monotonic() < until
                if not self._patient:
                    return False
                self._turn(time.monotonic() + 2 * RETRY_S)
            else:
                self._patient = True
                return True


def _socket_at(path: Path) -> int | None:
    """The inode of a socket's file; None where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None
