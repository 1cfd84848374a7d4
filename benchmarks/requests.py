"""What events cost the worker's thread, per request of the trace.

Three workers take the same requests in turn, round by round: events off, events recorded and thrown
away, and events handed to a sidecar that publishes them to a subscriber.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep

from hicache import HiRadixCache, KVShape, PagePool
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.demo.options import BUNDLED_TRACE
from publisher.demo.trace import prompt, read_trace

PAGE_SIZE, DEVICE_PAGES, REQUESTS, ROUNDS = 64, 6250, 1000, 3
PAUSE_S = 0.004
"""Between requests, not timed: some 50,000 new blocks a second, more than a worker computes."""

_LOOPBACK = "tcp://127.0.0.1:0"
_SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""


def replay(prompts: list[bytes], cache: HiRadixCache, step_end: Callable[[], object]) -> list[int]:
    """Nanoseconds of each request: match, lock, allocate, insert, unlock, and the end of the step."""
    spent = []
    for tokens in prompts:
        start = perf_counter_ns()
        match = cache.match_prefix(tokens)
        cache.lock(match.node)
        pages = cache.allocate(len(tokens) // (4 * PAGE_SIZE) - match.num_pages)
        assert pages is not None, "the prompts were cut to fit"
        cache.insert(tokens, pages, first_page=match.num_pages)
        cache.unlock(match.node)
        step_end()
        spent.append(perf_counter_ns() - start)
        sleep(PAUSE_S)
    return spent


def new_cache(*, events: bool) -> HiRadixCache:
    return HiRadixCache(PagePool(DEVICE_PAGES, PAGE_SIZE, KVShape(1, 1, 1)), events=events)


def through_sidecar(prompts: list[bytes]) -> list[int]:
    sink = SinkConfig(endpoint=_LOOPBACK, replay_endpoint=_LOOPBACK)
    with spawn(WorkerInfo(block_size=PAGE_SIZE), SidecarConfig(sinks=(sink,))) as sidecar:
        command = [sys.executable, "-c", _SUBSCRIBER, sidecar.client.sinks[0].endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as subscriber:
            cache = new_cache(events=True)
            spent = replay(prompts, cache, lambda: sidecar.pump(cache))
            assert sidecar.client.flush(cache, 30), "everything is published"
            assert sidecar.client.stats.refused == 0, "the ring had room"
            subscriber.kill()
    return spent


def main() -> int:
    # A block of 512 tokens in the trace is 8 pages of 64 here, so the sizes are the workload's own.
    longest = DEVICE_PAGES // 2 * PAGE_SIZE * 4
    requests = read_trace(Path(BUNDLED_TRACE), REQUESTS)
    prompts = [prompt(one, 512)[:longest] for one in requests]
    ways: dict[str, Callable[[], list[int]]] = {
        "events off": lambda: replay(prompts, new_cache(events=False), lambda: None),
        "events recorded": lambda: _recorded(prompts),
        "events through a sidecar": lambda: through_sidecar(prompts),
    }
    rounds: dict[str, list[list[int]]] = {name: [] for name in ways}
    print(
        f"{REQUESTS} requests, page {PAGE_SIZE}, {DEVICE_PAGES} pages, {ROUNDS} rounds,"
        f" {len(os.sched_getaffinity(0))} cores; no model runs",
        flush=True,
    )
    for number in range(1, ROUNDS + 1):
        for name, run in ways.items():
            gc.collect()
            rounds[name].append(sorted(run()))
        means = (
            f"{name} {sum(found[-1]) / REQUESTS / 1e3:.1f} µs" for name, found in rounds.items()
        )
        print(f"round {number} of {ROUNDS}: {', '.join(means)}", flush=True)
    base = median(sum(one) for one in rounds["events off"])
    for name, found in rounds.items():
        mean = median(sum(one) for one in found) / REQUESTS / 1e3
        p50, p99 = (median(one[int(len(one) * q)] for one in found) / 1e3 for q in (0.5, 0.99))
        ratio = median(sum(one) for one in found) / base
        print(
            f"{name:<26} mean {mean:7.1f} µs  p50 {p50:7.1f} µs  p99 {p99:8.1f} µs"
            f"  {ratio:5.2f} × events off"
        )
    return 0


def _recorded(prompts: list[bytes]) -> list[int]:
    cache = new_cache(events=True)
    return replay(prompts, cache, cache.take_records)


if __name__ == "__main__":
    sys.exit(main())
