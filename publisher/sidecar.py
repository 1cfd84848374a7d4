"""The sidecar's process: one thread, one loop, from the link to the sinks.

Each turn does a bounded amount of everything: ring messages, replay requests, replay answers. So no
flood and no client keeps another waiting for long.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import time
from pathlib import Path

import zmq

from kvevents.events import AllBlocksCleared
from publisher.config import SidecarConfig
from publisher.replay import RETRY_S
from publisher.sink import Sink, SinkError
from publisher.source import LinkSource

__all__ = ["serve"]

_MESSAGES_PER_TAKE = 4
_TURN_S = 0.002  # for the ring, before clients have their turn
_CONNECT_S = 10.0
_LOG_INTERVAL_S = 1.0
_CLOSE_LINGER_S = 0.2  # what was published last has had the linger to leave

_log = logging.getLogger("kvevents.sidecar")


def serve(link: Path, config: SidecarConfig) -> int:
    """Run until the worker is gone or SIGTERM comes; the process's exit code.

    Raises SourceError when there is no worker at `link`.
    """
    source = LinkSource(link, timeout_s=_CONNECT_S)
    context = zmq.Context[zmq.Socket[bytes]]()
    sinks: list[Sink] = []
    try:
        for number, one in enumerate(config.sinks):
            try:
                sinks.append(Sink(context, one, source.worker.dp_rank, clock=time.time))
            except SinkError as error:
                where = f"sinks[{number}]." if len(config.sinks) > 1 else ""
                source.failed(f"{where}{error}")
                return 2
        source.ready(tuple(sink.bound for sink in sinks))
        _Loop(source, sinks, config).run()
        return 0
    finally:
        source.close()
        for sink in sinks:
            sink.close(linger_s=_CLOSE_LINGER_S)
        context.term()


class _Loop:
    def __init__(self, source: LinkSource, sinks: list[Sink], config: SidecarConfig) -> None:
        self._source, self._sinks, self._config = source, sinks, config
        self._replays = [
            server
            for sink in sinks
            if (server := sink.serve_replays(config.replay_timeout_s)) is not None
        ]
        self._more = False
        """Whether the ring may hold messages that have not been taken."""
        self._stopping = False
        self._resyncs_logged = 0
        self._log_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(source.wake_fd, zmq.POLLIN)
        self._poller.register(source.connection, zmq.POLLIN)
        if source.worker_fd is not None:
            self._poller.register(source.worker_fd, zmq.POLLIN)
        self._worker_ended = False
        for sink in sinks:
            self._poller.register(sink.pub, zmq.POLLIN)
            if sink.router is not None:
                self._poller.register(sink.router, zmq.POLLIN)

    def run(self) -> None:
        """Until the worker is gone, then until the linger is over."""
        signals = self._watch_signals()
        gc.collect()
        gc.freeze()  # what start-up made is never garbage; it need not be looked at again
        while not self._stopping:
            self._turn(time.monotonic())
            if self._worker_ended or not self._source.take_control():
                break
            self._source.answer_flushes(tuple(sink.next_seq for sink in self._sinks))
        if not self._stopping:
            self._last_words()
        signal.set_wakeup_fd(-1)
        for fd in signals:
            os.close(fd)

    def _watch_signals(self) -> tuple[int, int]:
        """SIGTERM ends the loop; SIGINT is for the worker, whose end ends this process."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(writing)
        self._poller.register(reading, zmq.POLLIN)
        return reading, writing

    def _stop(self, _signal: int, _frame: object) -> None:
        self._stopping = True

    def _turn(self, now: float, until: float = float("inf")) -> None:
        """Wait for something to do, then do a bounded part of all there is."""
        wake_at = min(until, *(sink.heartbeat(now) for sink in self._sinks))
        if self._more or any(server.busy for server in self._replays):
            wake_at = now
        elif any(server.stalled for server in self._replays):
            wake_at = min(wake_at, now + RETRY_S)
        ready = dict(self._poller.poll(math.ceil(max(0.0, wake_at - now) * 1000)))
        self._worker_ended = self._source.worker_fd in ready
        now = time.monotonic()
        if self._source.wake_fd in ready or self._more:
            self._source.quiet_wake()
            self._publish(now)
        for sink in self._sinks:
            if sink.pub in ready:
                sink.take_subscriptions()
        for server in self._replays:
            if server.router in ready:
                server.take_requests()
            server.serve(now)

    def _publish(self, now: float) -> None:
        """Take from the ring for a while, at least once."""
        until = time.monotonic() + _TURN_S
        self._more = True
        while self._more:
            self._take(now)
            if time.monotonic() >= until:
                break

    def _take(self, now: float) -> None:
        told, self._more = self._source.take(_MESSAGES_PER_TAKE)
        if self._source.stats.resyncs != self._resyncs_logged and now >= self._log_at:
            self._resyncs_logged, self._log_at = self._source.stats.resyncs, now + _LOG_INTERVAL_S
            _log.warning("asked the worker to tell its state anew: %s", self._source.last_loss)
        for one in told:
            if one.events:
                for sink in self._sinks:
                    sink.publish(one.ts, one.events, now)

    def _last_words(self) -> None:
        """The worker is gone: publish what it left, say so, and stay a while for replays."""
        _log.info("worker %s is gone", self._source.worker.worker_id)
        self._more = True
        while self._more:
            self._publish(time.monotonic())
        now = time.monotonic()
        for sink in self._sinks:
            sink.publish(time.time(), [AllBlocksCleared()], now)
        self._poller.unregister(self._source.connection)
        if self._source.worker_fd is not None:
            self._poller.unregister(self._source.worker_fd)
        until = now + self._config.linger_s
        while not self._stopping and (now := time.monotonic()) < until:
            self._turn(now, until)
