"""Messages of a publisher as they come: nothing is put in order, made up for, or understood."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable
from types import TracebackType

import zmq

from kvevents.frames import JOIN, replay_request
from kvevents.message import Channel, Message
from publisher.dial import check_client_keys, dial
from publisher.endpoint import check_target

__all__ = ["Tap", "wait_for"]

_HWM = 10_000
"""Messages that may wait for us. What a slow reader misses is missing for it alone."""

_MAX_FRAME = 64 << 20
"""Bytes; whoever sends a larger one is disconnected for good."""

_PER_DRAIN, _BYTES_PER_DRAIN = 1000, 64 << 20
_REPLAY_TIMEOUT_S = 5.0
_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

Socket = zmq.Socket[bytes]


class Tap:
    """Connects a SUB socket and, with a `replay_endpoint`, asks once for what is retained.

    It is asked from JOIN, our sinks' word for the state now, once the SUB socket is connected; a
    publisher that has nothing so late is asked from 0. An answer of which nothing comes for
    `replay_timeout_s` is `Channel.OVER`. `server_key`, `client_keys`: see `Subscriber`. Raises
    ConfigError for an endpoint that cannot be connected to, and for keys that are none.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        server_key: str | None = None,
        client_keys: tuple[str, str] | None = None,
        replay_timeout_s: float = _REPLAY_TIMEOUT_S,
    ) -> None:
        self.endpoint = endpoint
        self.connected = False
        """Whether the publisher is there, as of the last `drain`."""
        for key, address in (("ENDPOINT", endpoint), ("--replay-endpoint", replay_endpoint)):
            if address is not None:
                check_target(key, address)
        self._keys = check_client_keys(server_key, client_keys)
        self._replay_timeout_s = replay_timeout_s
        self._start: int | None = None
        """From where a replay is under way."""
        self._answered = False
        self._joined = False
        """Whether it was asked for already."""
        self.deadline = float("inf")
        """When `drain` has something to say even if nothing comes."""
        self._context = zmq.Context[Socket]()
        self._sub = self._context.socket(zmq.SUB)
        self._dealer: Socket | None = None
        self._monitor: Socket | None = None
        try:
            self._monitor = self._sub.get_monitor_socket(_EVENTS)
            if replay_endpoint is not None:
                self._dealer = self._context.socket(zmq.DEALER)
                self._connect(self._dealer, "--replay-endpoint", replay_endpoint)
            self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
            self._connect(self._sub, "ENDPOINT", endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[Socket]:
        """Those to wait for."""
        return [one for one in (self._sub, self._dealer, self._monitor) if one is not None]

    def drain(self) -> list[Message]:
        """What has come, at most some thousands or 64 MiB of each socket; never waits."""
        messages: list[Message] = []
        while self._monitor is not None and self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected and self._dealer is not None and not self._joined:
                self._joined = True
                messages.append(self._ask(self._dealer, JOIN))
        if self._dealer is not None:
            for frames in _read(self._dealer):
                messages += self._answer(self._dealer, frames)
        if time.monotonic() >= self.deadline:
            self._start, self.deadline = None, float("inf")
            messages.append(Message(time.time_ns(), Channel.OVER, []))
        now = time.time_ns()
        messages += [Message(now, Channel.LIVE, frames) for frames in _read(self._sub)]
        return messages

    def close(self) -> None:
        """Safe to call twice."""
        self._stop_monitor()
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._sub.close(linger=0)
        self._context.term()

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------- inside

    def _ask(self, dealer: Socket, start: int) -> Message:
        frames = replay_request(start)
        dealer.send_multipart(frames)
        self._start, self._answered = start, False
        self.deadline = time.monotonic() + self._replay_timeout_s
        return Message(time.time_ns(), Channel.ASKED, frames)

    def _answer(self, dealer: Socket, frames: list[bytes]) -> list[Message]:
        message = Message(time.time_ns(), Channel.ANSWER, frames)
        messages = [message]
        if self._start is None:
            return messages
        self.deadline = time.monotonic() + self._replay_timeout_s
        if message.is_batch:
            self._answered = True
        elif self._start == JOIN and not self._answered:
            messages.append(self._ask(dealer, 0))
        else:
            self._start, self.deadline = None, float("inf")
        return messages

    def _stop_monitor(self) -> None:
        if self._monitor is not None and not self._sub.closed:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None

    def _connect(self, socket: Socket, key: str, endpoint: str) -> None:
        socket.setsockopt(zmq.RCVHWM, _HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 0)
        dial(socket, key, endpoint, self._keys)


def wait_for(taps: Iterable[Tap], until: float) -> None:
    """Until something came for one of them, or the monotonic clock is at `until`."""
    poller = zmq.Poller()
    for tap in taps:
        until = min(until, tap.deadline)
        for socket in tap.sockets:
            poller.register(socket, zmq.POLLIN)
    if until == float("inf"):
        poller.poll()
    else:
        poller.poll(math.ceil(max(0.0, until - time.monotonic()) * 1000))


def _read(socket: Socket) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    size = 0
    with contextlib.suppress(zmq.Again):
        while len(messages) < _PER_DRAIN and size < _BYTES_PER_DRAIN:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
            size += sum(map(len, messages[-1]))
    return messages
