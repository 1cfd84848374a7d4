"""One public output's sockets: a PUB, and a ROUTER that answers replays."""

from __future__ import annotations

import errno
import os
import socket as unix
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq

from kvevents.frames import live_frames, reset_frames
from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.config.topic import render_topic
from publisher.link.messages import Bound
from publisher.multipart import send_now
from publisher.sidecar.curve import Guard
from publisher.sidecar.replay import ReplayServer
from publisher.stream.output import Frame, Output
from publisher.stream.status import SinkStatus

__all__ = ["Sink", "SinkError", "bind_one"]

_MAX_INCOMING_BYTES = 4096
"""Of a subscription or a request. libzmq recurses through a subscription when it forgets it."""

_SUBSCRIPTIONS_PER_TURN = 256

_RETELL_S = 10.0
"""The state is told for joiners this often at most: others have to hear it too."""

_REPLAY_HWM = 64
"""Answers queued for one replay client. Few: a client that does not read is noticed by a full queue."""


class SinkError(Exception):
    """A socket that could not be opened. The message names the key and the endpoint."""


class Sink:
    """Opens its sockets on construction; raises SinkError or ConfigError, with nothing left open.

    `facts`: what a topic may say. `before`: where an earlier run had its sockets, for endpoints that
    take any port. `subscriber_timeout_s`: who takes nothing over TCP for so long is disconnected, and
    what is queued for it is gone. `now` in the methods is monotonic.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: SinkConfig,
        output: Output,
        worker: WorkerInfo,
        facts: Mapping[str, str],
        *,
        guard: Guard | None = None,
        before: Bound | None = None,
        subscriber_timeout_s: float = 30.0,
    ) -> None:
        self._config, self.output = config, output
        self._quiet_since: float | None = None
        self._tell_at, self._told_at = float("inf"), float("-inf")
        """When the state is next to be told for joiners, and when that was last begun."""
        self.pub = context.socket(zmq.XPUB)
        self.router: zmq.Socket[bytes] | None = None
        try:
            self.pub.setsockopt(zmq.SNDHWM, config.hwm)
            self.pub.setsockopt(zmq.XPUB_VERBOSER, 1)
            self.pub.setsockopt(zmq.XPUB_NODROP, 1)  # to hear of it; see `send`
            self.pub.setsockopt(zmq.TCP_MAXRT, int(subscriber_timeout_s * 1000))
            self.pub.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
            if guard is not None:
                guard.protect(self.pub)
            endpoints = self._open_pub(config, worker, before)
            replay_endpoint = config.replay_endpoint_of(worker.dp_rank)
            if replay_endpoint is not None:
                self.router = context.socket(zmq.ROUTER)
                self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.router.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
                self.router.setsockopt(zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES)
                if guard is not None:
                    guard.protect(self.router)
                kept = before.replay_endpoint if before else None
                replay_endpoint = _bind(self.router, "replay_endpoint", replay_endpoint, kept)
            port = Endpoint.parse("endpoint", endpoints[0]).port
            known = {**facts, **worker.facts(), "port": str(port or "")}
            self._topic = render_topic("topic", config.topic, known)
        except BaseException:
            self.close(linger_s=0)
            raise
        self.bound = Bound(",".join(endpoints), replay_endpoint)
        self.status = SinkStatus(
            name=config.name,
            dialect=config.dialect,
            mode=config.mode,
            endpoints=endpoints,
            replay_endpoint=replay_endpoint,
            topic=self._topic.decode(errors="replace"),
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
        )

    def _open_pub(
        self, config: SinkConfig, worker: WorkerInfo, before: Bound | None
    ) -> tuple[str, ...]:
        endpoints = config.endpoints_of(worker.dp_rank)
        if config.mode == "bind":
            kept = before.endpoint if before else None
            return (_bind(self.pub, "endpoint", endpoints[0], kept),)
        self.pub.setsockopt(zmq.IMMEDIATE, 1)  # no queue outlives its connection
        self.pub.setsockopt(zmq.IPV6, any("[" in one for one in endpoints))
        for endpoint in endpoints:
            try:
                self.pub.connect(endpoint)
            except zmq.ZMQError as error:
                raise SinkError(
                    f"endpoint: {endpoint} cannot be connected to: {error.strerror}"
                ) from None
        return endpoints

    def serve_replays(self, timeout_s: float) -> ReplayServer | None:
        """A server for the replay socket; None without one."""
        if self.router is None:
            return None
        return ReplayServer(
            self.router,
            self._topic,
            self.output.replay,
            self.output.reaches,
            with_topic=self._config.replay_frames == 4,
            timeout_s=timeout_s,
        )

    def send(self, frame: Frame, now: float) -> None:
        """Send a batch. Never waits: a subscriber whose queue is full misses it, and sees the gap."""
        status = self.status
        self._quiet_since = now
        if self._config.reset_sentinel and frame.seq == 0:
            self._send(reset_frames(self._topic))
        self._send(live_frames(self._topic, frame.seq, frame.payload))
        status.batches += 1
        status.bytes += len(frame.payload)
        status.published.add(frame.events)

    def _send(self, frames: list[bytes]) -> None:
        try:
            send_now(self.pub, frames)
        except zmq.Again:  # a queue has just become full; until it has room libzmq passes it over
            self.status.overflows += 1
            self.pub.setsockopt(zmq.XPUB_NODROP, 0)
            send_now(self.pub, frames)
            self.pub.setsockopt(zmq.XPUB_NODROP, 1)

    def heartbeat_at(self, now: float) -> float:
        """When an empty batch is due, unless another is sent before."""
        if self._quiet_since is None:
            self._quiet_since = now
        return self._quiet_since + self._config.heartbeat_s

    def take_subscriptions(self, now: float) -> None:
        """Read who subscribed and who left, at most so many a turn."""
        for _ in range(_SUBSCRIPTIONS_PER_TURN):
            try:
                message = self.pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.status.subscribers += {b"\1": 1, b"\0": -1}.get(message[:1], 0)
            if message[:1] == b"\1" and self._config.tells_joiners:
                self._tell_at = min(self._tell_at, max(now, self._told_at + _RETELL_S))

    def tell_at(self) -> float:
        """When the state is to be told anew for those who have joined."""
        return float("inf") if self.output.snapshotting else self._tell_at

    def note_told(self, now: float) -> None:
        """It begins to be told: who joins from here on has missed some of it."""
        self._tell_at, self._told_at = float("inf"), now

    def update_status(self) -> None:
        """Bring the counts of what is retained up to date."""
        status, log = self.status, self.output.log
        status.next_seq, status.oldest_seq = log.next_seq, log.oldest_seq
        status.retained_batches, status.retained_bytes = log.num_batches, log.num_bytes
        status.held_events = self.output.num_held_events
        status.dropped["filtered"] = self.output.num_left_out

    def close(self, *, linger_s: float) -> None:
        """Close the sockets; what is queued for a subscriber has `linger_s` to leave."""
        for socket in (self.pub, self.router):
            if socket is not None:
                socket.close(linger=int(linger_s * 1000))


def _bind(socket: zmq.Socket[bytes], key: str, endpoint: str, kept: str | None) -> str:
    """Bind to `endpoint`, or, where that takes any port, to the one it had before if it is free."""
    if kept is not None and Endpoint.parse(key, endpoint).is_any:
        try:
            return bind_one(socket, key, kept)
        except SinkError:
            pass
    return bind_one(socket, key, endpoint)


def bind_one(socket: zmq.Socket[bytes], key: str, endpoint: str) -> str:
    """Bind; returns the endpoint it has come to. Raises SinkError."""
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        if endpoint.startswith("ipc://"):
            _check_free(endpoint.removeprefix("ipc://"))
        socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise SinkError(f"{key}: {endpoint} cannot be bound: {reason}") from None
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
