"""The cache workloads: replay of a trace, memory per block, growth of single calls."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any

from .numbers import percentile, quiet_gc, resident_bytes
from .tokens import PER_BLOCK, Request, load_trace, sequence

if TYPE_CHECKING:
    from benchmarks.kit.peers.interface import CachePeer

__all__ = ["CacheWorkload"]


class CacheWorkload:
    """What a controller may ask of a cache peer."""

    def __init__(self, peer: CachePeer) -> None:
        self._peer = peer
        self._trace: list[Request] = []
        self._unused_block = 300_000  # beyond every id of the trace
        self.requests: dict[str, Callable[..., dict[str, Any]]] = {
            "trace": self.trace,
            "options": self.options,
            "replay": self.replay,
            "memory": self.memory,
            "growth": self.growth,
            "crowd": self.crowd,
        }

    def options(self, values: dict[str, str]) -> dict[str, Any]:
        for name, value in values.items():
            self._peer.option(name, value)
        return {}

    def trace(self, path: str, requests: int) -> dict[str, Any]:
        self._trace = load_trace(Path(path), requests)
        return {"requests": len(self._trace)}

    def replay(
        self,
        page_size: int,
        device_tokens: int,
        host_ratio: float,
        *,
        events: bool,
    ) -> dict[str, Any]:
        """Every request of the trace, one after the other, on a new cache.

        Timed, per request: run_request and take_events. A prompt longer than the device is skipped.
        """
        peer = self._peer
        peer.build(page_size, device_tokens, host_ratio, events=events)
        spent: list[int] = []
        seen: dict[str, list[int]] = {}
        with quiet_gc():
            for request in self._trace:
                length = request.length // page_size * page_size
                if not 0 < length <= device_tokens:
                    continue
                tokens = peer.prepare(sequence(request.block_ids, length))
                start = now()
                peer.run_request(tokens)
                taken = peer.take_events()
                spent.append(now() - start)
                _count(taken, seen)
                del taken  # or the next request would pay for freeing these events
        peer.check()
        return {**_timing(spent), **_rates(peer.stats(), sum(spent), page_size), "events": seen}

    def memory(
        self,
        page_size: int,
        device_tokens: int,
        host_ratio: float,
        *,
        events: bool,
    ) -> dict[str, Any]:
        """Resident bytes added per new block; needs a process of its own.

        Distinct prompts of 24 trace blocks, until the device is full; nothing is evicted. The first
        two are not counted. What `build` itself takes is given per block of capacity.
        """
        length = 24 * PER_BLOCK // page_size * page_size
        before = _held_bytes()
        self._peer.build(page_size, device_tokens + length, host_ratio, events=events)
        built = _held_bytes()
        prompts = device_tokens // length
        self._store(min(2, prompts), length)
        warm = _held_bytes()
        self._store(prompts - 2, length)
        blocks = max(1, (prompts - 2) * (length // page_size))
        return {
            "blocks": blocks,
            "bytes_per_block": round((_held_bytes() - warm) / blocks, 1),
            "build_bytes_per_block": round((built - before) / (device_tokens // page_size), 1),
        }

    def growth(
        self,
        page_size: int,
        *,
        events: bool,
        depths: Sequence[int],
        evictions: Sequence[int],
    ) -> dict[str, Any]:
        """One new page below a prompt; requests that evict pages from a full cache.

        Timed: run_request and take_events of that request; the median of several.
        """
        rows = [self._insert_below(depth, page_size, events=events) for depth in depths]
        rows += [self._evict(pages, page_size, events=events) for pages in evictions]
        return {"rows": rows}

    def crowd(
        self, page_size: int, *, events: bool, sizes: Sequence[int], tries: int = 65
    ) -> dict[str, Any]:
        """One new prompt of 64 pages in a cache that holds so many pages already, with room for it.

        Timed as in `growth`. What is there are prompts of 64 pages too.
        """
        per_prompt = 64
        most = (max(sizes) // per_prompt + (tries + 1) * len(sizes)) * per_prompt
        self._peer.build(page_size, most * page_size, 0, events=events)
        rows, held = [], 0
        for size in sizes:
            prompts = size // per_prompt - held
            self._store(prompts, per_prompt * page_size)
            with quiet_gc():
                costs = [self._run(self._new_prompt(per_prompt * page_size)) for _ in range(tries)]
            held += prompts + tries
            rows.append({"case": "insert 64 pages", "pages": size, **_middle(costs[1:])})
        return {"rows": rows}

    def _insert_below(
        self, depth: int, page_size: int, *, events: bool, tries: int = 33
    ) -> dict[str, Any]:
        self._peer.build(page_size, (depth + 2 * tries) * page_size, 0, events=events)
        prompt = self._new_prompt(depth * page_size)
        self._run(prompt)
        costs = [self._run(prompt + self._new_prompt(page_size)) for _ in range(tries)]
        return {"case": "insert 1 page", "pages": depth, **_middle(costs[1:])}

    def _evict(self, pages: int, page_size: int, *, events: bool) -> dict[str, Any]:
        """A device full of prompts of 16 pages, enough of them that none of the new is evicted."""
        per_prompt = 16
        tries = 160 if pages < per_prompt else 3  # a cache that drops whole prompts evicts in few
        prompts = -(-max((tries + 1) * pages, 4096) // per_prompt)
        self._peer.build(page_size, prompts * per_prompt * page_size, 0, events=events)
        self._store(prompts, per_prompt * page_size)
        evicting = []
        for _ in range(tries):
            prompt = self._new_prompt(pages * page_size)
            before = self._peer.stats().get("evicted_tokens")
            cost = self._run(prompt)
            if before is None or self._peer.stats()["evicted_tokens"] > before:
                evicting.append(cost)
        return {"case": "evict", "pages": pages, **_middle(evicting)}

    def _store(self, prompts: int, length: int) -> None:
        for _ in range(prompts):
            self._run(self._new_prompt(length))

    def _new_prompt(self, length: int) -> Any:
        blocks = -(-length // PER_BLOCK)
        first, self._unused_block = self._unused_block, self._unused_block + blocks
        return sequence(range(first, first + blocks), length)

    def _run(self, tokens: Any) -> dict[str, int]:
        """Nanoseconds of one request, in all and by call."""
        prompt = self._peer.prepare(tokens)
        before = self._peer.stats()["calls"]
        start = now()
        self._peer.run_request(prompt)
        taken = self._peer.take_events()
        total = now() - start
        del taken  # freeing the events is not timed
        calls = self._peer.stats()["calls"]
        return {"total": total, **{name: calls[name] - before[name] for name in calls}}


def _held_bytes() -> int:
    """Resident, without what is free and kept for later: that would be filled first, and not show."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def _count(events: Iterable[Any], into: dict[str, list[int]]) -> None:
    """Events and blocks, by event type and medium."""
    for event in events:
        medium = getattr(event, "medium", None)
        key = f"{type(event).__name__}:{getattr(medium, 'value', medium)}"
        totals = into.setdefault(key, [0, 0])
        totals[0] += 1
        totals[1] += len(getattr(event, "block_hashes", ()))


def _timing(spent: Sequence[int]) -> dict[str, Any]:
    return {
        "requests": len(spent),
        "us_per_request": sum(spent) / max(1, len(spent)) / 1e3,
        "p50_us": percentile(spent, 50) / 1e3,
        "p99_us": percentile(spent, 99) / 1e3,
        "max_us": max(spent, default=0) / 1e3,
    }


def _rates(stats: dict[str, Any], spent_ns: int, page_size: int) -> dict[str, Any]:
    prompt, calls = max(1, stats["prompt_tokens"]), stats["calls"]
    return {
        "hit_ratio": stats["hit_tokens"] / prompt,
        "host_hit_ratio": stats["host_hit_tokens"] / prompt,
        "new_pages": stats["new_tokens"] // page_size,
        "pages_per_s": prompt / page_size / max(1, spent_ns) * 1e9,
        "copied_tokens": stats.get("copied_tokens", 0),
        "calls_ns": calls,
    }


def _middle(costs: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Medians in microseconds."""
    if not costs:
        return {"tries": 0}
    middle = {name: round(median(cost[name] for cost in costs) / 1e3, 1) for name in costs[0]}
    return {"tries": len(costs), "us": middle.pop("total"), "calls_us": middle}
