"""The sidecar's loop: one thread, from the source to the sinks.

Each turn does a bounded amount of everything: inputs, what the sinks tell anew, the checkpoint,
replay requests, replay answers. So no flood and no client keeps another waiting for long.
"""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable

import zmq

from kvevents.events import StorageMedium
from publisher.config.sidecar_config import ConfigError, SidecarConfig
from publisher.sidecar.curve import Guard
from publisher.sidecar.engine_watch import EngineWatch
from publisher.sidecar.logs import LineHandler, Throttle
from publisher.sidecar.relay import RelaySource
from publisher.sidecar.replay import RETRY_S
from publisher.sidecar.signals import Signals
from publisher.sidecar.silence import SilenceWatch
from publisher.sidecar.sink import Sink
from publisher.sidecar.source import LinkSource, Source
from publisher.stream.core import Core, Numbered
from publisher.stream.status import Books, SidecarStatus

__all__ = ["Loop"]

_INPUTS_PER_TAKE = 16
_TURN_S = 0.002  # for the source, before clients have their turn
_DRAIN_S = 2.0
_LOOK_S = 0.1  # for a successor, while lingering
_LONGEST_WAIT_S = 5.0  # health is that the loop turns
_SILENCE_S = 60.0
_STATUS_S = 0.005
"""Counts are brought up to date this often at most: it costs as much as a batch."""
_IN = int(zmq.POLLIN)
_LOG_INTERVAL_S = 1.0
_NEVER = 1 << 30
"""Collections of what is young before one of what is old, which are blocks and batches, in no cycle."""

_log = logging.getLogger("kvevents.sidecar")


class Loop:
    """Over what `publisher.sidecar.process` has opened, and closes."""

    def __init__(
        self,
        source: Source,
        core: Core,
        sinks: list[Sink],
        config: SidecarConfig,
        status: SidecarStatus,
        signals: Signals,
        guard: Guard | None,
        handler: LineHandler | None = None,
        successor_waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._core, self._sinks, self._config = source, core, sinks, config
        self._status, self._signals, self._guard = status, signals, guard
        self._handler, self._successor_waits = handler, successor_waits
        self._replays = [
            (sink, server)
            for sink in sinks
            if (server := sink.serve_replays(config.replay_timeout_s)) is not None
        ]
        self._more = False
        """Whether the source may have inputs that have not been taken."""
        self._resyncs_asked = 0
        self._journal_failure: str | None = None
        self._throttle = Throttle(_LOG_INTERVAL_S)
        relay, now = source if isinstance(source, RelaySource) else None, time.monotonic()
        self._silence = SilenceWatch(_SILENCE_S, now, who="worker" if relay is None else "engine")
        self._engine = EngineWatch(relay, core.replica, now)
        self._status_at, self._status_due = 0.0, math.inf
        """When the status may be brought up to date again, and when it has to be."""
        self._own_sockets: list[int | zmq.Socket[bytes]] = [signals.fd]
        for sink in sinks:
            self._own_sockets.append(sink.pub)
            if sink.router is not None:
                self._own_sockets.append(sink.router)
        if guard is not None:
            self._own_sockets += guard.pollables
            status.curve = guard.status
        status.sinks = tuple(sink.status for sink in sinks)
        status.source.kind = "link" if isinstance(source, LinkSource) else "relay"
        status.source.worker_up = isinstance(source, LinkSource)

    def begin(self) -> None:
        """Publish what comes first, and begin with the source."""
        now = time.monotonic()
        self._send(self._core.start(), now)
        self._source.start(self._core.replica.expected, self._core.replica.last_batch or None)
        self._resyncs_asked = self._core.replica.counts.resyncs
        if not self._core.replica.in_step:
            self._source.ask_resync("an earlier sidecar had asked")
        self._more = True  # what an earlier sidecar left in the ring woke nobody
        self._update_status(now)
        self._status.ready = True

    def run(self) -> None:
        """Until the worker is gone, then until the linger is over; or until SIGTERM."""
        gc.unfreeze()  # of a worker before
        gc.collect()
        gc.freeze()  # what start-up made is never garbage; it need not be looked at again
        gc.set_threshold(*gc.get_threshold()[:2], _NEVER)  # it takes 0.1 s where 200,000 blocks are
        while not self._signals.stopping:
            self._turn(time.monotonic())
            if not self._source.alive:
                break
            self._answer_flushes(time.monotonic())
        if self._signals.stopping and self._source.alive:
            self._drain()
        else:
            self._last_words()

    def _turn(self, now: float, until: float = float("inf")) -> None:
        """Wait for something to do, then do a bounded part of all there is."""
        wake_at = min(until, now + _LONGEST_WAIT_S, self._silence.wake_at, self._status_due)
        wake_at = min(
            wake_at, self._source.wake_at(), self._core.wake_at(now), self._engine.wake_at
        )
        for sink in self._sinks:
            wake_at = min(wake_at, sink.heartbeat_at(now), self._tell_at(sink))
        if self._more or any(server.busy for _, server in self._replays):
            wake_at = now
        elif any(server.stalled for _, server in self._replays):
            wake_at = min(wake_at, now + RETRY_S)
        theirs = self._source.pollables()
        sockets = [(one, _IN) for one in (*theirs, *self._own_sockets)]
        timeout_ms = math.ceil(max(0.0, wake_at - now) * 1000)
        ready: set[object] = {one for one, _ in zmq.zmq_poll(sockets, timeout_ms)}
        now = time.monotonic()
        if self._more or self._source.wake_at() <= now or not ready.isdisjoint(theirs):
            self._publish(now)
        if self._core.wake_at(now) <= now:
            self._send(self._core.work(now), now)
        for number, sink in enumerate(self._sinks):
            if sink.heartbeat_at(now) <= now:
                self._send(self._core.own(number, []), now)
            if sink.pub in ready:
                sink.take_subscriptions(now)
            if self._tell_at(sink) <= now:
                sink.note_told(now)
                self._core.snapshot(number)
        for _, server in self._replays:
            if server.router in ready:
                server.take_requests()
            server.serve(now)
        if self._guard is not None and not ready.isdisjoint(self._guard.pollables):
            self._guard.handle()
        if self._signals.fd in ready:
            self._heed_signals()
        self._status.turned_at = now
        if now >= self._status_at:
            self._update_status(now)
        else:
            self._status_due = self._status_at

    def _tell_at(self, sink: Sink) -> float:
        """When the state is to be told anew for joiners; not while there is one to be waited for."""
        return sink.tell_at() if self._core.replica.in_step else float("inf")

    # --------------------------------------------------------------------------------- inputs

    def _publish(self, now: float) -> None:
        """Take inputs for a while, at least once."""
        until = now + _TURN_S
        self._more = True
        while self._more:
            inputs, self._more = self._source.read(_INPUTS_PER_TAKE)
            published = self._core.apply(inputs, now)
            self._source.release()
            self._send(published, now)
            if time.monotonic() >= until:
                break
        counts = self._core.replica.counts
        if counts.resyncs != self._resyncs_asked:
            self._resyncs_asked = counts.resyncs
            reason = self._core.replica.last_loss
            self._source.ask_resync(reason)
            if (unsaid := self._throttle.take("resync", now)) is not None:
                more = f" ({unsaid} more since the last time)" if unsaid else ""
                _log.warning("asked the worker to tell its state anew: %s%s", reason, more)

    def _send(self, published: list[Numbered], taken_at: float) -> None:
        if not published:
            return
        for one in published:
            self._sinks[one.sink].send(one.frame, taken_at)
        now, clock = time.monotonic(), time.time()
        for one in published:
            if not one.frame.events:
                continue
            status = self._sinks[one.sink].status
            status.latency.observe(now - taken_at)
            status.age.observe(clock - one.frame.ts)

    def _answer_flushes(self, now: float) -> None:
        source, replica = self._source, self._core.replica
        if not isinstance(source, LinkSource) or not source.flush_asked(replica.expected):
            return
        self._send(self._core.cut(), now)
        if not self._core.held:
            self._update_status(now)  # who asked may look at it
            source.answer_flushes(
                replica.expected,
                tuple(output.next_seq for output in self._core.outputs),
                in_step=replica.in_step,
                num_events=replica.counts.events,
            )

    def _heed_signals(self) -> None:
        came = self._signals.take()
        if signal.SIGUSR1 in came:
            _log.info("SIGUSR1: telling the state anew")
            if isinstance(self._source, LinkSource) and not self._core.replica.tells_batches:
                self._source.ask_resync("SIGUSR1")
            else:  # who told batches cannot tell them anew
                self._core.snapshot()
        if signal.SIGHUP in came and self._guard is None:
            _log.info("SIGHUP: there are no client keys to read")
        elif signal.SIGHUP in came and self._guard is not None:
            try:
                self._guard.reload()
            except ConfigError as error:
                _log.error("SIGHUP: the keys stay as they were: %s", error)
            else:
                _log.info("SIGHUP: %d client keys", self._guard.status.keys)

    # ------------------------------------------------------------------------------------ end

    def _drain(self) -> None:
        """Publish what is left; the worker lives on, and so does what is kept."""
        _log.info("told to end: leaving")
        until = time.monotonic() + _DRAIN_S
        self._more = True
        while (self._more or self._core.held) and (now := time.monotonic()) < until:
            self._publish(now)
            self._send(self._core.cut(), now)
            self._send(self._core.work(now), now)

    def _last_words(self) -> None:
        """The worker is gone: publish what it left, say so, and stay a while for replays."""
        _log.info(
            "the worker%s is gone", f" {name}" if (name := self._status.worker.worker_id) else ""
        )
        self._status.source.worker_up = self._status.ready = False
        until = time.monotonic() + _DRAIN_S
        self._more = True
        while self._more and not self._signals.stopping and time.monotonic() < until:
            self._publish(time.monotonic())
        self._more = False  # what is left is of a worker that holds nothing any more
        now = time.monotonic()
        self._send(self._core.end(), now)
        until = now + self._config.linger_s
        while not self._signals.stopping and (now := time.monotonic()) < until:
            if self._successor_waits():
                break
            self._turn(now, min(until, now + _LOOK_S))
        self._core.forget()

    # --------------------------------------------------------------------------------- status

    def _update_status(self, now: float) -> None:
        status, replica, source = self._status, self._core.replica, self._source
        status.turned_at = now
        self._status_at, self._status_due = now + _STATUS_S, math.inf
        counts = replica.counts
        if isinstance(source, LinkSource):
            offered = source.offered
            pending = offered - (replica.expected - source.started)
            status.source.link_bytes, status.source.link_capacity = source.depth
        else:
            assert isinstance(source, RelaySource)
            status.source.worker_up = source.connected
            offered, pending = counts.applied + counts.missed + counts.unreadable, 0
        status.source.books = Books(
            offered=offered,
            published=counts.applied,
            missed=counts.missed,
            skipped=counts.skipped,
            unreadable=counts.unreadable,
            pending=pending,
        )
        status.source.in_step = replica.in_step
        status.source.resyncs, status.source.last_loss = counts.resyncs, replica.last_loss
        for medium in StorageMedium:
            status.live_blocks[medium.value] = replica.count(medium)
        status.left_out = replica.foreign.counts
        status.orphans_since_clear = replica.foreign.orphans_since_clear
        self._engine.check(now)
        status.source.received = replica.received
        for sink in self._sinks:
            sink.update_status()
        for sink, server in self._replays:
            told, stats = sink.status.replay, server.stats
            told.served, told.snapshot = stats.answered - stats.snapshots, stats.snapshots
            told.bad_request, told.dropped = stats.malformed, stats.dropped
            told.batches = stats.batches
        if self._handler is not None:
            status.log_lines_dropped = self._handler.dropped
        self._update_journal_status()
        said = self._silence.check(now, messages=counts.applied, events=replica.received.num_events)
        if said is not None:
            _log.warning("%s", said)

    def _update_journal_status(self) -> None:
        journal = self._core.journal
        if journal is None:
            return
        kept = self._status.journal
        kept.state = "ok" if journal.failure is None else "failing"
        kept.bytes = journal.num_bytes
        if journal.failure != self._journal_failure:
            self._journal_failure = journal.failure
            if journal.failure is None:
                _log.info("the journal is written again")
            else:
                kept.failures += 1
                _log.warning("no journal, a restart will clear first: %s", journal.failure)
