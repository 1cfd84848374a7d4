"""The worker: the demo's engine, its sidecar, and what it tells the parent."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import msgspec
import torch

from hicache import HiRadixCache
from publisher import LinkError, Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.demo.child import ParentPipe, say
from publisher.demo.engine import Engine
from publisher.demo.folder import TEMPORARY, remove_after_us
from publisher.demo.options import ANY_PORT, DemoOptions
from publisher.demo.trace import Request, read_trace

__all__ = ["main"]

_REPORT_EVERY_S = 0.1
_FLUSH_S = 30.0
_MOST_COSTS = 1 << 20
_UNSETTLED = "copies between the tiers did not end in time"


def main() -> int:
    """Run the trace that the parent names, then wait for its leave to end."""
    parent = ParentPipe()
    options = msgspec.convert(parent.wait(), DemoOptions)
    if Path(options.storage_dir).name.startswith(TEMPORARY):
        parent.on_orphaned = lambda: remove_after_us(Path(options.storage_dir))
    requests = read_trace(Path(options.trace), options.requests)
    try:
        engine = Engine(options)
        sidecar = start_sidecar(options)
    except (LinkError, ValueError) as error:
        say(failed=_as_option(str(error)))
        return 2
    with sidecar:
        numbered = enumerate(requests)
        ended = run(engine, sidecar, cycle(numbered) if options.loop else numbered)
        engine.close()
        if not ended:
            return 1
        parent.wait()
    return 0


def run(engine: Engine, sidecar: Sidecar, requests: Iterator[tuple[int, Request]]) -> bool:
    """Run the requests and tell the parent about it. False when the sidecar did not follow."""
    bound = sidecar.client.sinks[0]
    say(endpoint=bound.endpoint, replay_endpoint=bound.replay_endpoint, sidecar=sidecar.pid)
    cache = engine.cache
    cost = Cost()
    start = reported = time.monotonic()
    full_rss = None
    left = True
    while left:
        left = engine.step(requests)
        cost.pump(sidecar, cache)
        if full_rss is None and cache.num_dropped:
            full_rss = resident_mb()
        if (now := time.monotonic()) - reported > _REPORT_EVERY_S:
            reported = now
            say_progress(engine, sidecar)
    seconds = time.monotonic() - start
    settled = engine.settle()
    say_progress(engine, sidecar)
    flushed = sidecar.client.flush(cache, _FLUSH_S)
    if flushed is None or not settled:
        say(failed="the sidecar is gone or did not publish in time" if settled else _UNSETTLED)
        return False
    counts, stats = cache.stats(), sidecar.client.stats
    say(
        summary={
            "requests": engine.num_served,
            "endpoint": bound.endpoint,
            "replay_endpoint": bound.replay_endpoint,
            "too_large": engine.too_large,
            "seconds": seconds,
            "hit_rate": sum(engine.hits.values()) / max(1, engine.prompt_pages),
            "tiers": {
                medium: {
                    "hits": engine.hits[medium] / max(1, engine.prompt_pages),
                    "stored": counts.stored[medium],
                    "removed": counts.dropped[medium],
                    "resident": counts.resident[medium],
                }
                for medium in engine.media
            },
            "restored_blocks": engine.num_restored,
            "checked_pages": engine.checked_pages,
            "wrong_pages": engine.wrong_pages,
            "failed_transfers": counts.failed_flights,
            "storage_error": counts.storage.last_error if counts.storage is not None else "",
            "stored_blocks": sum(counts.stored.values()),
            "removed_blocks": sum(counts.dropped.values()),
            "batches": stats.written,
            "refused": stats.refused,
            "retellings": stats.retellings,
            "events": flushed.num_events,
            **cost.summary(),
            "blocks_per_step": cost.num_blocks / max(1, len(cost.wall_ns)),
            "resident_blocks": sum(counts.resident.values()),
            "worker_mb_when_full": full_rss,
            "worker_mb": resident_mb(),
            "violations": cache.violations(),
        },
        next_seq=flushed.next_seqs[0],
        blocks={
            medium: [str(one) for one in sorted(held)]
            for medium, held in cache.resident_blocks().items()
        },
    )
    return True


def say_progress(engine: Engine, sidecar: Sidecar) -> None:
    """How far it is, and which process the sidecar is: another takes the place of one that died."""
    say(requests=engine.num_served, batches=sidecar.client.stats.written, sidecar=sidecar.pid)


class Cost:
    """What publishing takes of the worker's thread, in the steps that have something to tell."""

    def __init__(self) -> None:
        self.cpu_ns: deque[int] = deque(maxlen=_MOST_COSTS)
        """Of the thread: encoding, writing, waking the sidecar."""
        self.wall_ns: deque[int] = deque(maxlen=_MOST_COSTS)
        """With what it waits for a core or the interpreter meanwhile."""
        self.num_blocks = 0
        """That those steps stored or removed, on any tier."""
        self._changes = 0

    def pump(self, sidecar: Sidecar, cache: HiRadixCache) -> None:
        """Pump, and count it."""
        written, wall = sidecar.client.stats.written, time.perf_counter_ns()
        cpu = time.thread_time_ns()
        sidecar.pump(cache)
        cpu = time.thread_time_ns() - cpu
        wall = time.perf_counter_ns() - wall
        if sidecar.client.stats.written > written:
            self.cpu_ns.append(cpu)
            self.wall_ns.append(wall)
            counts = cache.stats()
            changes = sum(counts.stored.values()) + sum(counts.dropped.values())
            self.num_blocks += changes - self._changes
            self._changes = changes

    def summary(self) -> dict[str, float]:
        """Of both, in µs: what half of the steps, and all but one in a hundred, stay within."""
        return {
            f"publish_{name}us_p{part}": sorted(costs)[len(costs) * part // 100] / 1e3
            if costs
            else 0.0
            for name, costs in (("", self.wall_ns), ("cpu_", self.cpu_ns))
            for part in (50, 99)
        }


def start_sidecar(options: DemoOptions) -> Sidecar:
    """With its sockets where the options say; one that may move and cannot be bound gets a free port.

    Raises LinkError.
    """
    sink = SinkConfig(
        endpoint=options.endpoint,
        replay_endpoint=options.replay_endpoint,
        buffer_steps=options.buffer_steps,
        heartbeat_s=0.5,
    )
    try:
        config = SidecarConfig(sinks=(sink,), persist="none")  # nothing is left of a demo
        return spawn(WorkerInfo(block_size=options.page_size), config)
    except LinkError as error:
        key = str(error).partition(":")[0]
        if key not in options.movable:
            raise
        movable = tuple(other for other in options.movable if other != key)
        moved = {key: ANY_PORT, "movable": movable}
    return start_sidecar(msgspec.structs.replace(options, **moved))


def _as_option(reason: str) -> str:
    """A reason that begins with a sink's key, by the name of the option that sets it."""
    key, colon, rest = reason.partition(":")
    known = key in ("endpoint", "replay_endpoint")
    for ours, theirs in (
        ("storage_dir", "directory"),
        ("mooncake_master", "master_server_address"),
    ):
        if key == theirs:
            key, known = ours, True
    return f"--{key.replace('_', '-')}{colon}{rest}" if known else reason


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
