"""A listener's end of the wire: the sockets, and the requests that the stream's follower wants made.

One thread: sockets are made, used and closed by the thread that calls.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable

import zmq

from kvevents.follower import Arrival, Follower, Step
from kvevents.frames import JOIN, replay_request
from kvevents.message import Channel, Message
from publisher.closing import Closing
from publisher.config.endpoint import check_target
from publisher.multipart import receive_now
from publisher.subscriber.dial import check_client_keys, dial

__all__ = ["Listener", "wait_for"]

_PER_TURN, _BYTES_PER_TURN = 1000, 64 << 20
_LONGEST_REJOIN_S = 60.0
_LONGEST_WAIT_S = 0.5
_AWAY_S = 1.0
"""A pause between two turns in which more may have come than could wait."""
_REPLAY_HWM = 100_000
"""Engines answer with all they retain, 10,000 batches by default, and drop what does not fit."""
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
_FIRST_REDIAL_S, _LONGEST_REDIAL_S = 1.0, 30.0

Socket = zmq.Socket[bytes]


class Listener(Closing):
    """Connects a SUB socket, and asks the `replay_endpoint`, if any, for what is missing.

    `start`: what is asked for first, once the SUB socket is connected (None: nothing). A replay of which
    nothing comes for `replay_timeout_s` is asked for again, `attempts` times in all, then given up, and
    the state asked for anew, ever later. `topic` is a prefix. `hwm`: messages that may wait for us;
    what does not fit is lost to us alone; 0: any number. Whoever sends a frame of more than `max_frame`
    bytes is disconnected for good; who is no publisher, or lets us not in, is tried again, ever later.
    `server_key`, `client_keys`: see `Subscriber`. `keys`: what an error
    calls the two endpoints. Raises ConfigError for an endpoint that cannot be connected to, and for keys
    that are none. Of a replay 100,000 messages may wait, at least.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        start: int | None = JOIN,
        replay_timeout_s: float = 5.0,
        attempts: int = 3,
        hwm: int = 0,
        max_frame: int = -1,
        server_key: str | None = None,
        client_keys: tuple[str, str] | None = None,
        keys: tuple[str, str] = ("endpoint", "replay_endpoint"),
    ) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.follower = Follower(
            can_replay=replay_endpoint is not None,
            start=start,
            topic=topic.encode(),
            attempts=attempts,
        )
        self.connected = False
        """Whether the publisher is there, as of the last `turn`."""
        self._keys = keys
        self._curve = check_client_keys(server_key, client_keys)
        for key, address in zip(keys, (endpoint, replay_endpoint), strict=True):
            if address is not None:
                check_target(key, address)
        self._hwm, self._max_frame = hwm, max_frame
        self._replay_timeout_s = self._rejoin_after_s = replay_timeout_s
        self._replay_deadline = self._rejoin_at = float("inf")
        self._redial_at, self._redial_after_s = float("inf"), _FIRST_REDIAL_S
        """When to connect anew where libzmq does not by itself."""
        self._heard_at, self._turned_at = 0.0, float("inf")
        self._excused = False
        """Whether the replay under way was given its time anew, since we were away."""
        self._unbroken = 0
        """Messages taken since none was waiting."""
        self._drained = True
        self._abreast_at = 0.0
        self._context = zmq.Context[Socket]()
        self._dealer: Socket | None = None
        self._sub = self._context.socket(zmq.SUB)
        self._monitor = self._sub.get_monitor_socket(
            _CONNECTED | _DISCONNECTED | _REFUSED | _RETRIED
        )
        try:
            if replay_endpoint is not None:  # refuse a bad one now, not when it is first asked
                self._dial(zmq.DEALER, replay_endpoint).close(linger=0)
            self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
            self._set(self._sub, self._hwm)
            dial(self._sub, keys[0], endpoint, self._curve)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[Socket]:
        """Those to wait for."""
        return [one for one in (self._monitor, self._dealer, self._sub) if one is not None]

    @property
    def wake_at(self) -> float:
        """When, by the monotonic clock, `turn` has something to do even if nothing comes."""
        due = self._rejoin_at if self._dealer is None else self._replay_deadline
        return min(due, self._redial_at)

    @property
    def unanswered_s(self) -> float:
        """For how long nothing has come of the replay under way; 0.0 if none is."""
        return 0.0 if self._dealer is None else time.monotonic() - self._heard_at

    def turn(self) -> list[Step]:
        """What has come, at most some thousands of messages or 64 MiB of each socket; never waits.

        After more than a second without a turn, or with `hwm` messages at once, `follower.behind` is set
        for a while: a gap may be of our own making.
        """
        steps: list[Step] = []
        now = time.monotonic()
        away = now - self._turned_at > _AWAY_S
        self._notice_connection(steps)
        if (dealer := self._dealer) is not None:
            self._read_replay(dealer, steps)
        self._look_at_clock(now, steps, away=away)
        if now >= self._redial_at:
            self._redial()
        messages = self._read(self._sub)
        self._notice_connection(steps)  # of the connection that they came on
        self._notice_pace(now, steps, away=away)
        for frames in messages:
            self._take(Channel.LIVE, frames, steps)
        self._turned_at = now
        return steps

    def close(self) -> None:
        """Safe to call twice."""
        self._close_dealer()
        if not self._sub.closed:
            self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(
            linger=0
        )  # a socket that an interrupt has left open would be waited for

    # ---------------------------------------------------------------------------------- inside

    def _look_at_clock(self, now: float, steps: list[Step], *, away: bool) -> None:
        """After what has come was read: an answer that waited for us is one. While the whole process
        stood still, none could even come, so there is time for it once more.
        """
        if self._dealer is not None and now >= self._replay_deadline:
            if away and not self._excused:
                self._replay_deadline, self._excused = now + self._replay_timeout_s, True
                return
            self._take(Channel.OVER, [], steps)
        elif self._dealer is None and now >= self._rejoin_at:
            self._rejoin_at = float("inf")
            self._ask_next(self.follower.rejoin(), steps)

    def _notice_connection(self, steps: list[Step]) -> None:
        """A later connection may be to another run of the publisher."""
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            if event == _RETRIED:
                self._redial_at = float("inf")
                continue
            if event & _REFUSED:
                self._take(Channel.REFUSED, [], steps)
                continue
            if event == _DISCONNECTED and not (self.connected and self._max_frame >= 0):
                self._redial_at = time.monotonic() + self._redial_after_s
            elif event == _CONNECTED:
                self._redial_at, self._redial_after_s = float("inf"), _FIRST_REDIAL_S
            self.connected = event == _CONNECTED
            channel = Channel.CONNECTED if self.connected else Channel.DISCONNECTED
            self._take(channel, [], steps)

    def _redial(self) -> None:
        """Connect anew: after a socket of another kind, or a refusal, libzmq gives up."""
        self._redial_at = float("inf")
        self._redial_after_s = min(_LONGEST_REDIAL_S, 2 * self._redial_after_s)
        with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the address
            self._sub.disconnect(self.endpoint)
        dial(self._sub, self._keys[0], self.endpoint, self._curve)

    def _notice_pace(self, now: float, steps: list[Step], *, away: bool) -> None:
        full = 0 < self._hwm <= self._unbroken
        if away or full or (self.follower.behind and not self._drained):
            self._abreast_at = now + _AWAY_S
        if self.follower.behind:
            if now >= self._abreast_at:
                self._take(Channel.ABREAST, [], steps)
        elif away or full:
            self._take(Channel.BEHIND, [], steps)

    def _read_replay(self, dealer: Socket, steps: list[Step]) -> None:
        for frames in self._read(dealer):
            self._expect_answer()
            self._take(Channel.ANSWER, frames, steps)
            if self._dealer is not dealer:  # something else is asked for
                return

    def _take(self, channel: Channel, frames: list[bytes], steps: list[Step]) -> None:
        message = Message(time.time_ns(), channel, frames)
        arrivals = self.follower.take(message)
        steps.append(Step(message, arrivals))
        self._ask_next([], steps)

    def _ask_next(self, arrivals: list[Arrival], steps: list[Step]) -> None:
        """Make the request that is due, if there is one, and see to what comes of it."""
        follower = self.follower
        start = follower.asking
        if start is not None and follower.connections:
            self._ask(start)
            message = Message(time.time_ns(), Channel.ASKED, replay_request(start))
            steps.append(Step(message, arrivals + follower.take(message)))
        if not follower.recovering:
            self._close_dealer()
            self._plan_rejoin()

    def _plan_rejoin(self) -> None:
        if not self.follower.diverged:
            self._rejoin_at, self._rejoin_after_s = float("inf"), self._replay_timeout_s
        elif self._rejoin_at == float("inf"):
            self._rejoin_at = time.monotonic() + self._rejoin_after_s
            self._rejoin_after_s = min(_LONGEST_REJOIN_S, self._rejoin_after_s * 2)

    def _ask(self, start: int) -> None:
        """On a new socket: answers to an earlier request cannot get in between."""
        self._close_dealer()
        assert self.replay_endpoint is not None, "G2: only a tracker that can replay asks"
        self._dealer = dealer = self._dial(zmq.DEALER, self.replay_endpoint)
        dealer.send_multipart(replay_request(start))
        self._expect_answer()

    def _expect_answer(self) -> None:
        self._heard_at, self._excused = time.monotonic(), False
        self._replay_deadline = self._heard_at + self._replay_timeout_s

    def _dial(self, kind: int, endpoint: str) -> Socket:
        socket = self._context.socket(kind)
        self._set(socket, self._hwm and max(self._hwm, _REPLAY_HWM))
        dial(socket, self._keys[1], endpoint, self._curve)
        return socket

    def _set(self, socket: Socket, hwm: int) -> None:
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
        socket.setsockopt(zmq.LINGER, 0)

    def _close_dealer(self) -> None:
        dealer, self._dealer = self._dealer, None  # first of all: Ctrl-C may come between any two
        if dealer is not None:
            dealer.close(linger=0)

    def _read(self, socket: Socket) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        size = 0
        drained = False
        try:
            while len(messages) < _PER_TURN and size < _BYTES_PER_TURN:
                messages.append(receive_now(socket))
                size += sum(map(len, messages[-1]))
        except zmq.Again:
            drained = True
        if socket is self._sub:
            self._unbroken = len(messages) + (0 if drained else self._unbroken)
            self._drained = drained
        return messages


def wait_for(listeners: Iterable[Listener], until: float) -> None:
    """Until something came for one of them, or has to be done, or the monotonic clock is at `until`; for
    half a second at the most: a signal that comes just before the poll does not end it.
    """
    poller = zmq.Poller()
    for listener in listeners:
        until = min(until, listener.wake_at)
        for socket in listener.sockets:
            poller.register(socket, zmq.POLLIN)
    left = min(max(0.0, until - time.monotonic()), _LONGEST_WAIT_S)
    poller.poll(math.ceil(left * 1000))
