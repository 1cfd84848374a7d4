"""The worker: an engine but for the model. It fills real KV pages and checks them on every hit."""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path

import msgspec
import torch

from hicache import HiRadixCache, KVShape, PageIndices, PagePool
from publisher import LinkError, Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.demo.child import ParentPipe, say
from publisher.demo.options import ANY_PORT, DemoOptions
from publisher.demo.trace import pages_of, prompt, read_trace, reply

__all__ = ["main"]

_SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
_REPORT_EVERY_S = 0.1
_FLUSH_S = 30.0


class Worker:
    """Runs requests through the cache, one at a time."""

    def __init__(self, options: DemoOptions) -> None:
        self._page_size = options.page_size
        self._pool = PagePool(options.device_pages, options.page_size, _SHAPE)
        self.cache = HiRadixCache(self._pool)
        self.hit_pages = self.prompt_pages = self.too_large = 0
        self.wrong_pages = 0

    def run(self, prompt_tokens: bytes, reply_tokens: bytes) -> None:
        """Match, compute what is missing, cache prompt and reply."""
        cache, page_bytes = self.cache, self._page_size * 4
        tokens = prompt_tokens + reply_tokens
        match = cache.match_prefix(prompt_tokens)
        cache.lock(match.node)
        pages = cache.allocate(len(tokens) // page_bytes - match.num_pages)
        if pages is None:
            self.too_large += 1
        else:
            self._compute(tokens, match.page_indices, pages)
            found = cache.insert(tokens, pages, first_page=match.num_pages)
            cache.free(pages[: found.num_existing - match.num_pages])
            self.hit_pages += match.num_pages
            self.prompt_pages += len(prompt_tokens) // page_bytes
        cache.unlock(match.node)

    def _compute(self, tokens: bytes, hit: PageIndices, new: PageIndices) -> None:
        """Fill the new pages with what their prefix makes them, and check those that were hit."""
        sums, crc = [], 0
        for page in pages_of(tokens, self._page_size):
            crc = zlib.crc32(page, crc)
            sums.append(crc & 0xFFFFFF)  # exact in a float32
        values = torch.tensor(sums, dtype=torch.float32)
        for layer in range(_SHAPE.num_layers):
            fresh = (values[len(hit) :] + layer)[:, None, None, None]
            fresh = fresh.expand(-1, self._page_size, _SHAPE.num_kv_heads, _SHAPE.head_dim)
            self._pool.write(layer, new, fresh, -fresh)
        held = self._pool.k[0][self._pool.index(hit), -1, 0, 0]
        self.wrong_pages += int((held != values[: len(hit)]).sum())


def main() -> int:
    """Run the trace that the parent names, then wait for its leave to end."""
    parent = ParentPipe()
    options = msgspec.convert(parent.wait(), DemoOptions)
    requests = read_trace(Path(options.trace), options.requests)
    try:
        sidecar = start_sidecar(options)
    except LinkError as error:
        say(failed=_as_option(str(error)))
        return 2
    with sidecar:
        bound = sidecar.client.sinks[0]
        say(endpoint=bound.endpoint, replay_endpoint=bound.replay_endpoint, sidecar=sidecar.pid)
        worker = Worker(options)
        costs: list[int] = []
        start = reported = time.monotonic()
        full_rss = None
        for number, request in enumerate(requests):
            worker.run(
                prompt(request, options.page_size),
                reply(number, request, options.page_size),
            )
            before = time.perf_counter_ns()
            sidecar.pump(worker.cache)
            costs.append(time.perf_counter_ns() - before)
            if full_rss is None and worker.cache.num_dropped:
                full_rss = resident_mb()
            if (now := time.monotonic()) - reported > _REPORT_EVERY_S:
                reported = now
                say(requests=number + 1, batches=sidecar.client.stats.written)
        seconds = time.monotonic() - start
        say(requests=len(requests), batches=sidecar.client.stats.written)
        flushed = sidecar.client.flush(worker.cache, _FLUSH_S)
        if flushed is None:
            say(failed="the sidecar is gone or did not publish in time")
            return 1
        costs.sort()
        cache, stats = worker.cache, sidecar.client.stats
        say(
            summary={
                "requests": len(requests),
                "endpoint": bound.endpoint,
                "replay_endpoint": bound.replay_endpoint,
                "too_large": worker.too_large,
                "seconds": seconds,
                "hit_rate": worker.hit_pages / max(1, worker.prompt_pages),
                "wrong_pages": worker.wrong_pages,
                "stored_blocks": cache.num_stored,
                "removed_blocks": cache.num_dropped,
                "batches": stats.written,
                "refused": stats.refused,
                "retellings": stats.retellings,
                "events": flushed.num_events,
                "publish_us_p50": costs[len(costs) // 2] / 1e3,
                "publish_us_p99": costs[len(costs) * 99 // 100] / 1e3,
                "resident_blocks": cache.num_resident,
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
        parent.wait()
    return 0


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
        return spawn(WorkerInfo(block_size=options.page_size), SidecarConfig(sinks=(sink,)))
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
    return f"--{key.replace('_', '-')}{colon}{rest}" if known else reason


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
