"""A sidecar's status with something in every field, for those who show it."""

from __future__ import annotations

import time

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from publisher.config.sidecar_config import WorkerInfo
from publisher.stream.status import (
    Books,
    CurveStatus,
    JournalStatus,
    SidecarStatus,
    SinkStatus,
    SourceStatus,
)

__all__ = ["EVENTS", "full_status"]

EVENTS = (
    AllBlocksCleared(),
    BlockStored([1, 2], None, list(range(32)), 16, medium=StorageMedium.GPU),
    BlockStored([1], None, list(range(16)), 16, medium=StorageMedium.DISK),
    BlockRemoved([2, 1], StorageMedium.GPU),
    BlockRemoved([1]),
)


def full_status(num_sinks: int = 2, dp_rank: int = 1) -> SidecarStatus:
    """Two sinks that bind, unless told otherwise."""
    worker = WorkerInfo(
        block_size=16, dp_rank=dp_rank, dp_size=dp_rank + 1, model="org/model", worker_id="w7"
    )
    source = SourceStatus(
        worker_up=True,
        in_step=True,
        books=Books(offered=100, published=80, missed=5, skipped=4, unreadable=1, pending=10),
        resyncs=3,
        last_loss="the ring was full",
        link_bytes=640,
        link_capacity=1 << 20,
    )
    source.received.add(EVENTS)
    status = SidecarStatus(
        worker=worker,
        version="0.1.0",
        pid=4711,
        started_at=time.time() - 60,
        ready=True,
        turned_at=time.monotonic(),
        source=source,
        sinks=tuple(_sink(number, dp_rank) for number in range(num_sinks)),
        journal=JournalStatus("ok", 4096),
        curve=CurveStatus(keys=2, accepted=5, denied=1, failed=1),
    )
    status.live_blocks["GPU"] = 7
    return status


def _sink(number: int, dp_rank: int) -> SinkStatus:
    port = 5557 + 10 * number + dp_rank
    sink = SinkStatus(
        name=f"sink{number}",
        endpoints=(f"tcp://0.0.0.0:{port}",),
        replay_endpoint=f"tcp://0.0.0.0:{port + 100}",
        topic=f"topic-{number}",
        buffer_steps=10_000,
        hwm=100_000,
        next_seq=42,
        oldest_seq=12,
        retained_batches=30,
        retained_bytes=3000,
        batches=42,
        bytes=4200,
        subscribers=2,
    )
    sink.published.add(EVENTS)
    sink.dropped["filtered"] = 2
    sink.replay.served = 3
    sink.replay.batches = 90
    for seconds in (0.0002, 0.0002, 0.004, 60.0):
        sink.latency.observe(seconds)
        sink.age.observe(seconds * 2)
    return sink
