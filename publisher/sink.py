"""One public output: a PUB socket with its own seq and retained log, and its replay socket."""

from __future__ import annotations

import errno
import os
import socket as unix
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import zmq

from kvevents.codec import encode_batch
from kvevents.events import AllBlocksCleared, Event, KVEventBatch
from kvevents.frames import live_frames
from publisher.config import SinkConfig
from publisher.link import Bound
from publisher.log import RetainedLog
from publisher.replay import ReplayServer

__all__ = ["Sink", "SinkError"]

_MAX_INCOMING_BYTES = 4096
"""Of a subscription or a request. libzmq recurses through a subscription when it forgets it."""

_SUBSCRIPTIONS_PER_TURN = 256

Clock: TypeAlias = Callable[[], float]


_REPLAY_HWM = 64
"""Answers queued for one replay client. Few: a client that does not read is noticed by a full queue."""


class SinkError(Exception):
    """A socket that could not be bound. The message names the key and the endpoint."""


class Sink:
    """Binds on construction; raises SinkError when that fails, with nothing left open.

    `clock`: seconds since the epoch, for batches the sink makes itself. `now` in the methods is
    monotonic.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: SinkConfig,
        dp_rank: int,
        *,
        clock: Clock,
    ) -> None:
        self._config, self._dp_rank, self._clock = config, dp_rank, clock
        self._topic = config.topic.encode()
        self._log = RetainedLog(
            self._encode_now, max_batches=config.buffer_steps, max_bytes=config.buffer_bytes
        )
        self._quiet_since: float | None = None
        self.num_subscribers = 0
        self.pub = context.socket(zmq.XPUB)
        self.router: zmq.Socket[bytes] | None = None
        try:
            self.pub.setsockopt(zmq.SNDHWM, config.hwm)
            self.pub.setsockopt(zmq.XPUB_VERBOSER, 1)
            self.pub.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
            endpoint = _bind(self.pub, "endpoint", config.endpoint)
            replay_endpoint = None
            if config.replay_endpoint is not None:
                self.router = context.socket(zmq.ROUTER)
                self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.router.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
                self.router.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
                replay_endpoint = _bind(self.router, "replay_endpoint", config.replay_endpoint)
        except BaseException:
            self.close(linger_s=0)
            raise
        self.bound = Bound(endpoint, replay_endpoint)
        self._begin()

    def _begin(self) -> None:
        """The first batch of a run clears: who knew of an earlier run forgets it, live or by replay."""
        self.publish(self._clock(), [AllBlocksCleared()], 0.0)
        self._quiet_since = None

    def serve_replays(self, timeout_s: float) -> ReplayServer | None:
        """A server for the replay socket; None without one."""
        if self.router is None:
            return None
        return ReplayServer(self.router, self._topic, self._log.replay, timeout_s=timeout_s)

    @property
    def next_seq(self) -> int:
        """The seq of the next batch."""
        return self._log.next_seq

    def publish(self, ts: float, events: list[Event], now: float) -> None:
        """Send a batch and keep it. Never waits: a subscriber whose queue is full misses it."""
        payload = encode_batch(KVEventBatch(ts, events, self._dp_rank))
        seq = self._log.append(payload, events)
        self.pub.send_multipart(live_frames(self._topic, seq, payload), zmq.NOBLOCK)
        self._quiet_since = now

    def heartbeat(self, now: float) -> float:
        """Publish an empty batch when it is time; returns when to call again."""
        if self._quiet_since is None:
            self._quiet_since = now
        due = self._quiet_since + self._config.heartbeat_s
        if now < due:
            return due
        self.publish(self._clock(), [], now)
        return now + self._config.heartbeat_s

    def take_subscriptions(self) -> None:
        """Read who subscribed and who left, at most so many a turn."""
        for _ in range(_SUBSCRIPTIONS_PER_TURN):
            try:
                message = self.pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_subscribers += {b"\1": 1, b"\0": -1}.get(message[:1], 0)

    def close(self, *, linger_s: float) -> None:
        """Close the sockets; what is queued for a subscriber has `linger_s` to leave."""
        for socket in (self.pub, self.router):
            if socket is not None:
                socket.close(linger=int(linger_s * 1000))

    def _encode_now(self, events: list[Event]) -> bytes:
        return encode_batch(KVEventBatch(self._clock(), events, self._dp_rank))


def _bind(socket: zmq.Socket[bytes], key: str, endpoint: str) -> str:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        if endpoint.startswith("ipc://"):
            _check_free(endpoint.removeprefix("ipc://"))
        socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        raise SinkError(f"{key}: {endpoint} cannot be bound: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _check_free(path: str) -> None:
    """Raises OSError when a file or a live socket is at `path`: ZeroMQ would remove it and bind.

    A socket whose publisher is dead is not in the way.
    """
    try:
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with unix.socket(unix.AF_UNIX) as probe:
            probe.settimeout(0)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
