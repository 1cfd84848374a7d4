"""An unmodified engine as the source: its PUB subscribed to, its replay asked for what is missed.

Everything is non-blocking. Each connection has a SUB of its own: what a lost connection had queued never
mixes with what a later one brings. Each replay has a DEALER of its own, for the same reason.

Nothing tells of the last batch that was lost before a pause, so a quiet engine is asked now and then. An
engine answers between batches, an idle one within 0.1 s. One that floods its own answer (SGLang 0.5.23
queues 1000) drops the rest and the end marker without a word: silence for `stall_s` is taken for that.

Memory is bounded by the queues: `hwm` messages of each socket, the frames of one `read`, one held batch.
"""

from __future__ import annotations

import errno
import struct
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import zmq

from kvevents.errors import KVEventsError
from kvevents.frames import (
    End,
    Frame,
    answered_topic,
    parse_live,
    parse_replay_answer,
    replay_request,
)
from publisher.config.sidecar_config import ConfigError, RelayConfig
from publisher.multipart import receive_now
from publisher.sidecar.engine_stream import Ask, EngineStream, RelayStats, Step
from publisher.sidecar.pace import Pace
from publisher.sidecar.source import BYTES_PER_READ
from publisher.stream.input import Input

__all__ = ["RelaySource"]

_event_number = struct.Struct("=H").unpack_from
_INF = float("inf")
_MAX_MESSAGE_BYTES = 256 << 20
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 100, 1000
_REOPEN_S = 0.1
_LONGEST_PROBE_S = 30.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_DESCRIPTORS_S = 0.5
_ASK_EVERY_S, _ASKS_AT_ONCE = 0.05, 20
"""Replays may be asked for so often, and so many without a pause: two engines behind one address, whose
numbers go back with every batch, are not to keep us busy.
"""


class RelaySource:
    """Fulfils `publisher.sidecar.source.Source`; an input's number is the engine's seq.

    `gone_s`: an engine that has been without a connection for so long is dead, and so is what it held.
    `replay_timeout_s`: how long an answer may take to begin; `stall_s`: how long it may pause.
    `probe_s`: after so long a silence a replay is asked for, and then ever more rarely.
    """

    alive = True
    """Always: an engine may come back."""

    def __init__(
        self,
        config: RelayConfig,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
        gone_s: float = 5.0,
        replay_timeout_s: float = 5.0,
        stall_s: float = 1.0,
        probe_s: float = 1.0,
        hwm: int = 10_000,
    ) -> None:
        self.worker = config.worker
        self.link_id = _link_id(config)
        self.connected = False
        """Whether the engine's publisher is connected to."""
        self.strange = False
        """Whether who was last found there hung up at once, as all do that are no publisher."""
        self.other_topic: str | None = None
        """What replays are of, where that is no topic that is subscribed to."""
        self._config, self._context, self._clock, self._hwm = config, context, clock, hwm
        self._gone_s, self._replay_timeout_s, self._stall_s = gone_s, replay_timeout_s, stall_s
        self._stream = EngineStream(can_replay=config.replay_endpoint is not None)
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._frames: deque[Frame] = deque()
        """Live ones that were read and not yet fed to the stream."""
        self._ready: deque[Input] = deque()
        self._open_at = self._gone_at = self._replay_at = self._probe_at = self._ask_at = _INF
        self._asked_for = 0
        """Where the replay begins that is to be asked for at `_ask_at`."""
        self._asks = Pace(_ASK_EVERY_S, _ASKS_AT_ONCE)
        self._first_probe_s = self._probe_s = probe_s

    @property
    def endpoint(self) -> str:
        """Where the engine publishes."""
        return self._config.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where replays are asked for."""
        return self._config.replay_endpoint

    @property
    def topic(self) -> str:
        """What topics must begin with."""
        return self._config.topic

    @property
    def batches_wait(self) -> bool:
        """Whether live ones do, for the end of a replay."""
        return self._stream.recovering

    @property
    def stats(self) -> RelayStats:
        """Counts since the start."""
        return self._stream.stats

    def start(self, expected: int, last: bytes | None = None) -> None:
        """Begin with number `expected`; `last`, the body of the one before it, tells whether the engine
        is in the same run still.
        """
        self._stream.start(expected, last)
        self._gone_at = self._clock() + self._gone_s
        self._open()

    def pollables(self) -> list[int | zmq.Socket[bytes]]:
        """Readable when there is something to do; others after each `read`."""
        sub = None if self._stream.recovering else self._sub
        return [socket for socket in (self._monitor, self._dealer, sub) if socket is not None]

    def wake_at(self) -> float:
        """When `read` must be called though nothing is readable."""
        if self._ready or (self._frames and not self._stream.recovering):
            return 0.0
        return min(self._open_at, self._gone_at, self._replay_at, self._probe_at, self._ask_at)

    def read(self, most: int) -> tuple[list[Input], bool]:
        """The next inputs, in order, at most `most` and none after so many bytes, and whether there may
        be more. Bounded work.
        """
        self._watch_connection()
        full = len(self._ready) >= most
        if full:  # the answer is not looked at: whether it goes on is not known
            self._replay_at = max(self._replay_at, self._clock() + self._stall_s)
        more = full or self._read_replay(most)
        self._keep_time(self._clock())
        more |= self._read_live(most) if len(self._ready) < most else True
        inputs: list[Input] = []
        size = 0
        while self._ready and len(inputs) < most and size < BYTES_PER_READ:
            inputs.append(self._ready.popleft())
            size += len(inputs[-1].body)
        return inputs, more or bool(self._ready)

    def release(self) -> None:
        """Nothing to do: the engine keeps what it keeps."""

    def ask_resync(self, reason: str) -> None:
        """Nothing to do: an engine cannot tell its state."""

    def close(self) -> None:
        """Safe to call twice."""
        self._close_dealer()
        self._close_live()
        self._open_at = self._gone_at = self._probe_at = _INF

    # ------------------------------------------------------------------------------ connection

    def _open(self) -> None:
        self._open_at = _INF
        try:
            self._open_live()
        except zmq.ZMQError as error:
            self._close_live()
            if error.errno not in _NO_DESCRIPTORS:
                raise ConfigError(
                    f"relay.endpoint: {self._config.endpoint}: {error.strerror}"
                ) from None
            self._open_at = self._clock() + _NO_DESCRIPTORS_S

    def _open_live(self) -> None:
        self._sub = sub = self._context.socket(zmq.SUB)
        self._monitor = sub.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        sub.setsockopt_string(zmq.SUBSCRIBE, self._config.topic)
        sub.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
        self._connect(sub, self._config.endpoint)

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self._hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),  # a host that is gone says nothing
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)

    def _watch_connection(self) -> None:
        while self._monitor is not None:
            try:
                event, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if _event_number(event)[0] == zmq.EVENT_DISCONNECTED:
                if self.connected:
                    self._lose_connection()
                else:
                    self._meet_a_stranger()
            elif not self.connected:
                self.connected, self.strange, self._gone_at = True, False, _INF
                self._act(self._stream.connected())
                self._probe_soon()

    def _lose_connection(self) -> None:
        """The socket goes, with what it has queued: the next connection may be made behind our back."""
        self._close_dealer()
        self._close_live()
        self._stream.disconnected()
        now = self._clock()
        self._open_at, self._gone_at = now + _REOPEN_S, now + self._gone_s
        self._probe_at = _INF

    def _meet_a_stranger(self) -> None:
        """After a socket of another kind libzmq would not try again, whoever comes in its place."""
        self.strange = True
        self._close_live()
        self._open_at = self._clock() + _LONGEST_RECONNECT_MS / 1000

    def _close_live(self) -> None:
        self.connected = False
        self._frames.clear()
        if self._sub is not None and self._monitor is not None:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
        if self._sub is not None:
            self._sub.close(linger=0)
        self._sub = self._monitor = None

    # ------------------------------------------------------------------------------------ time

    def _keep_time(self, now: float) -> None:
        if now >= self._open_at:
            self._open()
        if now >= self._gone_at:
            self._gone_at = _INF
            self._act(self._stream.gone())
        if now >= self._replay_at:
            self.stats.unanswered += 1
            self._act(self._stream.failed())
        if now >= self._probe_at:
            self._probe_s = min(_LONGEST_PROBE_S, self._probe_s * 2)
            self._probe_at = now + self._probe_s
            self._act(self._stream.probe())
        if now >= self._ask_at:
            self._ask_now(now)

    def _probe_soon(self) -> None:
        """Something came: what follows it may be lost."""
        if self._config.replay_endpoint is not None and not self._stream.diverged:
            self._probe_s = self._first_probe_s
            self._probe_at = self._clock() + self._probe_s

    # ---------------------------------------------------------------------------------- frames

    def _read_live(self, most: int) -> bool:
        """Whether there may be more."""
        full = False
        if self.connected and not self._stream.recovering and not self._frames:
            full = self._fetch(most)
            self._watch_connection()  # had it been lost in between, these might be of two runs
        if self._frames and not self._stream.recovering:
            self._probe_soon()
        while self._frames and not self._stream.recovering:
            frame = self._frames.popleft()
            self._act(self._stream.live(frame.seq, frame.payload))
        return full

    def _fetch(self, most: int) -> bool:
        assert self._sub is not None, "connected without a socket"
        for _ in range(most):
            try:
                self._frames.append(parse_live(receive_now(self._sub)))
            except zmq.Again:
                return False
            except KVEventsError:
                self.stats.malformed += 1
        return True

    def _read_replay(self, most: int) -> bool:
        """Whether there may be more."""
        dealer = self._dealer
        for _ in range(most):
            if dealer is None or dealer is not self._dealer:
                return False
            try:
                frames = receive_now(dealer)
                answer = parse_replay_answer(frames)
            except zmq.Again:
                return False
            except KVEventsError:
                self.stats.malformed += 1
                self._act(self._stream.failed())
                return False
            if isinstance(answer, End):
                self._act(self._stream.ended())
                return False
            self._replay_at = self._clock() + self._stall_s
            self._see_topic(answered_topic(frames))
            self._act(self._stream.answered(answer.seq, answer.payload))
        return True

    def _see_topic(self, topic: bytes | None) -> None:
        if topic is not None and not topic.startswith(self._config.topic.encode()):
            self.other_topic = topic.decode(errors="backslashreplace")

    def _act(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Ask):
                self._ask(step.start)
            else:
                self._ready.append(step)
        if not self._stream.asking:
            self._close_dealer()

    def _ask(self, start: int) -> None:
        self._close_dealer()
        now = self._clock()
        self._asked_for, self._ask_at = start, max(now, self._asks.next_at)
        if self._ask_at <= now:
            self._ask_now(now)

    def _ask_now(self, now: float) -> None:
        self._ask_at = _INF
        self._asks.allows(now)  # the moment was chosen so
        endpoint = self._config.replay_endpoint
        assert endpoint is not None, "E1: only a stream that can replay asks"
        try:
            self._dealer = dealer = self._context.socket(zmq.DEALER)
            self._connect(dealer, endpoint)
            dealer.send_multipart(replay_request(self._asked_for), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._close_dealer()
            if error.errno not in _NO_DESCRIPTORS:
                raise ConfigError(f"relay.replay_endpoint: {endpoint}: {error.strerror}") from None
            self._replay_at = now + _NO_DESCRIPTORS_S  # as if no answer came
            return
        self._replay_at = now + self._replay_timeout_s

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
        self._replay_at = self._ask_at = _INF


def _link_id(config: RelayConfig) -> bytes:
    """The same for the same engine, however often this process is started."""
    told = "\0".join((config.endpoint, config.replay_endpoint or "", config.topic))
    return blake2b(told.encode(), digest_size=16).digest()
