"""A doctor's ears: one subscription and one replay, for a while and in bounds; what came, as it came."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvevents.errors import KVEventsError
from kvevents.frames import END, JOIN, parse_replay_answer, replay_request
from publisher.subscriber.dial import ClientKeys, dial
from publisher.tools.doctor.content import Content
from publisher.tools.doctor.peers import Role, Shake

__all__ = ["Heard", "has_room", "hear", "shake"]

_MOST_MESSAGES, _MOST_BYTES = 3000, 64 << 20
_MOST_EMPTY = 20_000
"""Of a replay without a stored block, empty batches count only against this: they cost little."""

_HWM: dict[int, int] = {zmq.SUB: _MOST_MESSAGES, zmq.DEALER: _MOST_EMPTY}
"""As many may wait for us as we read in all: none is missing because we are slow."""

_MAX_FRAME = 64 << 20
_POLL_S = 0.05
_SHAKE_S = 5.0
_REPLAY_S = 2.0
"""Without a word of it, a replay is given up."""

_HANDSHAKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_HUNG_UP = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_TYPES: dict[Role, int] = {"publisher": zmq.SUB, "replay": zmq.DEALER}

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Heard:
    """All that came: live, and of a replay. `lasted_s`: how long we listened. `asked`: whether there was
    a replay to ask for; `answered`: whether anything came of it; `ended`: whether it came to its END;
    `cut`: we had enough of it before.
    """

    live: Content
    told: Content
    lasted_s: float
    asked: bool = False
    answered: bool = False
    ended: bool = False
    cut: bool = False

    @property
    def whole(self) -> bool:
        """Whether `told` is all of the replay: what is not in it was not told."""
        return self.ended and not self.cut


def shake(role: Role, endpoint: str, keys: ClientKeys, timeout_s: float) -> Shake:
    """Make a handshake with keys, as a router would, and hang up."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context[Socket]())
        one = stack.enter_context(context.socket(_TYPES[role]))
        one.setsockopt(zmq.LINGER, 0)
        monitor = stack.enter_context(one.get_monitor_socket(_HANDSHAKEN | _DENIED | _HUNG_UP))
        stack.callback(one.disable_monitor)
        dial(one, "", endpoint, keys)
        if not monitor.poll(int(min(timeout_s, _SHAKE_S) * 1000)):
            return "no answer"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
        if event == _HANDSHAKEN:
            return "done"
        return "unknown key" if event == _DENIED else "hung up"


def hear(
    endpoint: str,
    replay_endpoint: str | None,
    keys: ClientKeys | None,
    timeout_s: float,
    enough: Callable[[Content, Content], float | None],
    meanwhile: Callable[[], None] = lambda: None,
) -> Heard:
    """Subscribe to everything until `enough`, a look at what came live and what was replayed, says for
    how long since the first live message (None: not yet), or the time is up. `meanwhile` is called once,
    at the end, while we are still subscribed.
    """
    with _Ears(endpoint, replay_endpoint, keys) as ears:
        heard = ears.hear(timeout_s, enough)
        meanwhile()
        return heard


def has_room(content: Content) -> bool:
    """Whether more of it is to be read."""
    most = _MOST_MESSAGES
    if content.start is not None and not content.stored:
        most = min(most + content.empty, _MOST_EMPTY)
    return content.messages < most and content.bytes < _MOST_BYTES


class _Ears:
    def __init__(self, endpoint: str, replay_endpoint: str | None, keys: ClientKeys | None) -> None:
        self._replay_endpoint, self._keys = replay_endpoint, keys
        self._context = zmq.Context[Socket]()
        self._dealer: Socket | None = None
        self._starts = [JOIN, 0] if replay_endpoint is not None else []
        self._replay_until = 0.0
        self._live, self._told = Content(), Content()
        self._answered = self._ended = self._cut = False
        try:
            self._sub = self._open(zmq.SUB, endpoint)
            self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        except BaseException:
            self.close()
            raise

    def _open(self, kind: int, endpoint: str) -> Socket:
        one = self._context.socket(kind)
        one.setsockopt(zmq.RCVHWM, _HWM[kind])
        one.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        one.setsockopt(zmq.LINGER, 0)
        dial(one, "", endpoint, self._keys)
        return one

    def hear(self, timeout_s: float, enough: Callable[[Content, Content], float | None]) -> Heard:
        begun = time.monotonic()
        until, first_at = begun + timeout_s, 0.0
        self._ask()
        while (now := time.monotonic()) < until and has_room(self._live):
            self._wait(min(until - now, _POLL_S))
            self._read_live()
            self._read_replay()
            if self._live.messages:
                first_at = first_at or time.monotonic()
                rest_s = enough(self._live, self._told)
                if self._dealer is None and rest_s is not None:
                    until = min(until, first_at + rest_s)
        if self._dealer is not None and not (self._starts and has_room(self._live)):
            self._cut = (
                True  # by us: it is not stuck, for it has ended one, or what came live is enough
            )
        self._stop_asking()
        return Heard(
            self._live,
            self._told,
            time.monotonic() - begun,
            self._replay_endpoint is not None,
            self._answered,
            self._ended,
            self._cut,
        )

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        for one in (self._sub, self._dealer):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        poller.poll(max(1, int(seconds * 1000)))

    def _read_live(self) -> None:
        with contextlib.suppress(zmq.Again):
            while has_room(self._live):
                self._live.take(self._sub.recv_multipart(zmq.NOBLOCK))

    # ------------------------------------------------------------------------------------ replay

    def _ask(self) -> None:
        """Make the next request, on a socket of its own; none where there is none left."""
        self._stop_asking()
        if self._starts:
            assert self._replay_endpoint is not None
            self._dealer = self._open(zmq.DEALER, self._replay_endpoint)
            start = self._starts.pop(0)
            self._ended = False
            self._told = Content(
                start=start
            )  # what an earlier request brought is in it, or was nothing
            self._dealer.send_multipart(replay_request(start))
            self._replay_until = time.monotonic() + _REPLAY_S

    def _stop_asking(self) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close(linger=0)

    def _read_replay(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._dealer is not None and has_room(self._told):
                self._take_answer(self._dealer.recv_multipart(zmq.NOBLOCK))
        if self._dealer is None:
            return
        if not has_room(self._told):
            self._cut = True
            self._stop_asking()
        elif time.monotonic() >= self._replay_until:
            self._stop_asking()

    def _take_answer(self, frames: list[bytes]) -> None:
        self._replay_until = time.monotonic() + _REPLAY_S
        self._answered = True
        self._told.take(frames)
        try:
            ends = parse_replay_answer(frames) == END
        except KVEventsError:
            return
        if ends:
            self._ended = True
            if self._told.stored:  # else it has nothing so late, or nothing now
                self._starts.clear()
            self._ask()

    def close(self) -> None:
        self._stop_asking()
        self._context.destroy(linger=0)

    def __enter__(self) -> _Ears:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
