"""A sidecar's status as Prometheus metrics. docs/metrics.md lists them.

They are made anew for each scrape from plain counts: nothing is registered anywhere but in the registry
that is made here, and the loop pays for none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from publisher.stream.status import Buckets, EventCounts, SidecarStatus, SinkStatus

__all__ = ["CONTENT_TYPE", "StatusCollector", "scrape"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "kv_events_"
_PAUSE_S = 50e-6

Values: TypeAlias = list[tuple[tuple[str, ...], float]]
"""Label values and a number, for each line of a metric."""


def _yield_to_the_loop() -> None:
    """Let the interpreter go between two metrics, so that the loop waits for one of them at most.

    Under scrapes without end, a wait of 1 ms in another thread then ends 0.1 ms late at the median and
    1.7 ms at p99; without this, 5 and 15 ms.
    """
    time.sleep(_PAUSE_S)


class StatusCollector(Collector):
    """Metrics of the status that `read` gives. `pause` is called after each of them."""

    def __init__(
        self,
        read: Callable[[], SidecarStatus],
        *,
        pause: Callable[[], None] = _yield_to_the_loop,
    ) -> None:
        self._read, self._pause = read, pause

    def collect(self) -> Iterator[Metric]:
        """Every metric, in the order of docs/metrics.md."""
        status = self._read()
        for families in (_sidecar, _source, _sinks, _replays, _security):
            for family in families(status):
                yield family
                self._pause()


def scrape(read: Callable[[], SidecarStatus]) -> bytes:
    """What a scrape shows now, in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(read))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _counter(name: str, told: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, told, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, told: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, told, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _sidecar(status: SidecarStatus) -> Iterator[Metric]:
    worker, journal = status.worker, status.journal
    about = {
        "version": status.version,
        "dp_rank": str(worker.dp_rank),
        "model": worker.model,
        "worker_id": worker.worker_id,
        "source": status.source.kind,
    }
    yield InfoMetricFamily(_PREFIX + "build", "What runs here, for which worker.", value=about)
    yield _gauge(
        "start_time_seconds",
        "When the sidecar started, since the epoch.",
        (),
        [((), status.started_at)],
    )
    yield _gauge(
        "ready",
        "1 when every socket is bound and the source has begun.",
        (),
        [((), int(status.ready))],
    )
    live = list(status.live_blocks.items())
    yield _gauge(
        "live_blocks",
        "Blocks the worker holds, as far as it has told.",
        ("medium",),
        [((medium,), count) for medium, count in live],
    )
    yield _counter(
        "orphan_parents",
        "Blocks stored below a parent that was never announced.",
        (),
        [((), status.left_out.orphans)],
    )
    yield _counter(
        "left_out_blocks",
        "Blocks of an engine's own events that were not passed on.",
        ("reason",),
        [((reason,), count) for reason, count in asdict(status.left_out).items()],
    )
    yield _gauge(
        "journal_bytes",
        "Size of the file a restarted sidecar goes on from.",
        (),
        [((), journal.bytes)],
    )
    yield _gauge(
        "journal_ok",
        "0 when that file cannot be written, 1 when it can or is off.",
        (),
        [((), int(journal.state != "failing"))],
    )
    yield _counter(
        *("journal_failures", "Writes of that file that failed.", ()), [((), journal.failures)]
    )
    yield _counter(
        "log_lines_dropped",
        "Log lines nobody had room for.",
        (),
        [((), status.log_lines_dropped)],
    )


def _source(status: SidecarStatus) -> Iterator[Metric]:
    source, books = status.source, status.source.books
    results = ("published", "missed", "skipped", "unreadable")
    yield _gauge("worker_up", "1 while the worker is there.", (), [((), int(source.worker_up))])
    yield _gauge(
        "in_step",
        "0 while something is missing and a resync is awaited.",
        (),
        [((), int(source.in_step))],
    )
    yield _counter(
        "messages_offered",
        "Messages the worker numbered, also those refused.",
        (),
        [((), books.offered)],
    )
    yield _counter(
        "messages",
        "Messages by what became of them.",
        ("result",),
        [((result,), getattr(books, result)) for result in results],
    )
    yield _gauge(*("queue_depth", "Messages written and not yet read.", ()), [((), books.pending)])
    yield _gauge("queue_bytes", "Bytes of those.", (), [((), source.link_bytes)])
    yield _gauge("queue_capacity_bytes", "Bytes they may be.", (), [((), source.link_capacity)])
    yield _counter(
        "resyncs",
        "How often the worker was asked to tell its state anew.",
        (),
        [((), source.resyncs)],
    )
    yield _counter(
        "received",
        "Events from the worker.",
        ("event", "medium"),
        _by_key((), source.received.events),
    )
    yield _counter(
        "blocks_received",
        "Blocks of those.",
        ("event", "medium"),
        _by_key((), source.received.blocks),
    )


def _sinks(status: SidecarStatus) -> Iterator[Metric]:
    sinks = status.sinks

    def each(value: Callable[[SinkStatus], float]) -> Values:
        return [((sink.name,), value(sink)) for sink in sinks]

    def by_key(counts: Callable[[EventCounts], dict[tuple[str, str], int]]) -> Values:
        return [one for sink in sinks for one in _by_key((sink.name,), counts(sink.published))]

    labels, by = ("sink",), ("sink", "event", "medium")
    yield _counter("published", "Events published.", by, by_key(lambda counts: counts.events))
    yield _counter("blocks_published", "Blocks of those.", by, by_key(lambda counts: counts.blocks))
    yield _counter(
        "batches",
        "Batches published, empty ones included.",
        labels,
        each(lambda sink: sink.batches),
    )
    yield _counter("bytes", "Bytes of their payloads.", labels, each(lambda sink: sink.bytes))
    yield _counter(
        "dropped",
        "Events left out.",
        ("sink", "reason"),
        [((sink.name, why), count) for sink in sinks for why, count in list(sink.dropped.items())],
    )
    yield _gauge(
        "held_events",
        "Events that wait to be merged with the next batch.",
        labels,
        each(lambda sink: sink.held_events),
    )
    yield _gauge("sequence", "Seq of the next batch.", labels, each(lambda sink: sink.next_seq))
    yield _gauge("subscribers", "Subscriptions now.", labels, each(lambda sink: sink.subscribers))
    yield _counter(
        "subscriber_overflows",
        "How often a subscriber's queue was full: it misses batches until it has room.",
        labels,
        each(lambda sink: sink.overflows),
    )
    yield _histogram(
        "publish_latency_seconds",
        "From reading a message to the socket having its batch.",
        [(sink.name, sink.latency) for sink in sinks],
    )
    yield _histogram(
        "event_age_seconds",
        "From the change in the cache to the socket having its batch.",
        [(sink.name, sink.age) for sink in sinks],
    )


def _replays(status: SidecarStatus) -> Iterator[Metric]:
    sinks, labels = status.sinks, ("sink",)
    results = ("served", "snapshot", "bad_request", "dropped")
    yield _counter(
        "replay_requests",
        "Replay requests by what became of them.",
        ("sink", "result"),
        [((sink.name, one), getattr(sink.replay, one)) for sink in sinks for one in results],
    )
    yield _counter(
        "replay_batches",
        "Batches sent in replays.",
        labels,
        [((sink.name,), sink.replay.batches) for sink in sinks],
    )
    yield _gauge(
        "replay_buffer_batches",
        "Batches kept for replays.",
        labels,
        [((sink.name,), sink.retained_batches) for sink in sinks],
    )
    yield _gauge(
        "replay_buffer_bytes",
        "Memory that they take.",
        labels,
        [((sink.name,), sink.retained_bytes) for sink in sinks],
    )
    yield _gauge(
        "replay_buffer_oldest_sequence",
        "Seq of the oldest of them.",
        labels,
        [((sink.name,), sink.oldest_seq) for sink in sinks],
    )


def _security(status: SidecarStatus) -> Iterator[Metric]:
    curve = status.curve
    results = ("accepted", "denied", "failed")
    yield _counter(
        "curve_handshakes",
        "CURVE handshakes by how they ended.",
        ("result",),
        [((result,), getattr(curve, result) if curve else 0) for result in results],
    )
    yield _gauge(
        "curve_allowed_keys",
        "Client keys that are let in; 0 without CURVE.",
        (),
        [((), curve.keys if curve else 0)],
    )


def _by_key(first: tuple[str, ...], counts: dict[tuple[str, str], int]) -> Values:
    return [((*first, *key), count) for key, count in list(counts.items())]


def _histogram(name: str, told: str, all_buckets: list[tuple[str, Buckets]]) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, told, labels=("sink",))
    bounds = [*(str(bound) for bound in Buckets.BOUNDS), "+Inf"]
    for sink, buckets in all_buckets:
        counts = list(accumulate(list(buckets.counts)))
        family.add_metric(
            (sink,), list(zip(bounds, counts, strict=True)), sum_value=buckets.seconds
        )
    return family
