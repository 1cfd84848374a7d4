"""An inference engine of one's own: continuous batching over the cache, and a sidecar that tells of it.

    python -m examples.engine --port 8000 --host-pages 2048 --storage-dir /tmp/pages
    curl localhost:8000/v1/completions -d '{"prompt": [1, 2, 3], "max_tokens": 8}'

docs/embedding.md walks through it. The model is `examples.decoder`, tiny, with random weights; HTTP is
`examples.completions`. What is left is how an engine works with `hicache` and `publisher`. One thread
touches cache, model and sidecar: a turn of `step` is one step of all that run, and one pump.

A request runs once it has the pages for prompt and whole reply, so what runs comes to its end. Until then
it waits, the first come first, with nothing locked.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Lock

import torch

from examples.completions import Failed, Front, Held, Request
from examples.decoder import Decoder, DecoderConfig
from examples.options import read_options
from hicache import HiCacheConfig, HiRadixCache, HostPool, Node, PageIndices, PagePool
from hicache.policy import PrefetchPolicy
from hicache.storage import FileStorage, PageFormat
from publisher import LinkError, Sidecar, WorkerInfo, listen, load_config, spawn

__all__ = ["Engine", "main"]

_CHUNK = 256  # tokens of a prompt computed in one step, so that nobody's next token waits for long
_IDLE_S, _PAUSE_S, _DRAIN_S, _SETTLE_S = 0.01, 0.0003, 10.0, 5.0
_WAIT = PrefetchPolicy.WAIT_COMPLETE
_ANY_PAGE = HiCacheConfig(load_back_threshold=0, prefetch_threshold=0, prefetch_policy=_WAIT)
"""Whatever a lower tier has is fetched. A real model computes a few tokens faster than that."""


@dataclass(eq=False, slots=True)
class _Running:
    """A request that has its pages.

    `pages`: of prompt and reply, in order; the first `num_kept` are the cache's, the rest its own.
    `node`: where the cache's end, locked. `num_computed`: tokens whose KV is in `pages`.
    """

    request: Request
    pages: PageIndices
    node: Node
    num_kept: int
    num_computed: int

    @property
    def decoding(self) -> bool:
        return self.num_computed >= len(self.request.prompt)


class Engine:
    """A `Backend` for `Front`. Raises ValueError for pools and folders that cannot be had."""

    def __init__(self, options: argparse.Namespace, sidecar: Sidecar) -> None:
        # Rounding depends on how many rows a product has: on what is cached, and on who else is in the
        # batch. In float64 it does not decide which token is the most likely.
        sizes = DecoderConfig(options.vocab_size, num_layers=2, num_kv_heads=1, dtype=torch.float64)
        pool_size = options.page_size, sizes.shape
        pool = PagePool(options.device_pages, *pool_size)
        host = HostPool(options.host_pages, *pool_size) if options.host_pages else None
        form = PageFormat.of(pool, options.model)
        storage = FileStorage(options.storage_dir, form) if options.storage_dir else None
        self.cache = HiRadixCache(pool, host_pool=host, storage=storage, config=_ANY_PAGE)
        self.model, self.worker_id = options.model, options.worker_id
        self.vocab_size, self.most_tokens = options.vocab_size, pool.num_pages * pool.page_size
        self._decoder, self._sidecar = Decoder(sizes, pool), sidecar
        self._most_at_work, self._ending, self._door = options.max_running, False, Lock()
        self._queue: Queue[Request] = Queue(options.max_waiting)
        self._starting: deque[tuple[Request, Generator[None, None, None]]] = deque()
        self._running: list[_Running] = []
        self._crowded_out: Request | None = None  # while it waits for room, nobody else begins
        self._counts: Counter[str] = Counter()

    def submit(self, request: Request) -> bool:
        """Take it; False when as many wait as may, or the engine ends."""
        with self._door:
            if not (self._ending or self._queue.full()):
                self._queue.put_nowait(request)
                return True
            self._counts["refused"] += 1
            return False

    def is_well(self) -> bool:
        """Whether it takes requests."""
        return not self._ending

    def sidecar_http(self) -> str | None:
        """Where the sidecar has its metrics, and what routers ask for."""
        return self._sidecar.http_endpoint

    def metrics(self) -> dict[str, dict[str, float]]:
        """By name, and label if it has one. What is published is counted by the sidecar."""
        counts, resident = self._counts, self.cache.stats().resident
        waiting = len(self._starting) + self._queue.qsize()
        return {
            "requests_total": {f'outcome="{it}"': counts[it] for it in ("done", "gone", "refused")},
            "tokens_total": {f'kind="{it}"': counts[it] for it in ("prompt", "cached", "reply")},
            "requests": {'state="running"': len(self._running), 'state="waiting"': waiting},
            "pages": {f'medium="{medium}"': num for medium, num in resident.items()},
            "sidecar_info": {f'http_endpoint="{self.sidecar_http() or ""}"': 1},
            "sidecar_restarts_total": {"": self._sidecar.restarts},
            "batches_refused_total": {"": self._sidecar.client.stats.refused},
        }

    def run(self, stop: Event) -> None:
        """Serve until `stop` is set, then finish what is at work, if that takes no ten seconds."""
        while not stop.is_set():
            self._take()
            self.step()
        with self._door:
            self._ending = True
        deadline = time.monotonic() + _DRAIN_S
        while (self._starting or self._running) and time.monotonic() < deadline:
            self.step()
        left = [it for it, _ in self._starting] + [it.request for it in self._running]
        for request in (*left, *self._queue.queue):
            request.answers.put(Failed("the engine ends"))
        self.cache.settle(_SETTLE_S)  # what is not on disk by then will not be there

    def close(self) -> None:
        """Tell what is left to tell, and let go of the storage."""
        self._sidecar.pump(self.cache)
        self.cache.close()

    def _take(self) -> None:
        """As many requests as may be at work; an engine that has none waits a moment for one."""
        with contextlib.suppress(Empty):
            while (at_work := len(self._starting) + len(self._running)) < self._most_at_work:
                request = self._queue.get(block=not at_work, timeout=_IDLE_S)
                self._starting.append((request, self._start(request)))

    def step(self) -> None:
        """All that can be done now, once."""
        self.cache.tick()  # copies that have arrived are landed
        for _ in range(len(self._starting)):
            request, start = self._starting.popleft()
            if request.gone:
                start.close()
                self._counts["gone"] += 1
            elif next(start, "begun") != "begun":
                self._starting.append((request, start))
        for one in [one for one in self._running if one.request.gone]:
            self._finish(one, "gone")
        decoding = [one for one in self._running if one.decoding]
        for one in [one for one in self._running if not one.decoding][:1]:
            self._prefill(one)
        if decoding:
            self._decode(decoding)
        self._sidecar.pump(self.cache)  # idle or not; never waits
        if self._starting and not self._running:
            time.sleep(_PAUSE_S)  # for pages, which other threads bring

    def _start(self, request: Request) -> Generator[None, None, None]:
        """From prompt to pages. Yields while it waits; closed there, it leaves nothing behind."""
        known = request.prompt[:-1]  # the last token is computed in any case: its logits are wanted
        on_device = self.cache.match_prefix(known).num_pages
        landed = yield from self._fetch(known)
        try:
            while (one := (yield from self._begin(request, known))) is None:
                self._crowded_out = self._crowded_out or request
                yield
        finally:  # it has begun, or is gone
            if self._crowded_out is request:
                self._crowded_out = None
        request.held = Held.of_pages(one.num_kept, on_device, landed, self.cache.page_size)
        self._counts.update(prompt=len(request.prompt), cached=request.held.tokens)
        self._running.append(one)

    def _fetch(self, known: list[int]) -> Generator[None, None, int]:
        """From storage to the host; how many pages came."""
        if (prefetch := self.cache.prefetch(known)) is None:
            return 0
        try:
            while not self.cache.prefetch_done(prefetch):
                yield
        finally:
            self.cache.cancel_prefetch(prefetch)  # of no effect on one that is done
        return prefetch.num_landed

    def _begin(self, request: Request, known: list[int]) -> Generator[None, None, _Running | None]:
        """From the host to the device, and pages for the rest; None when it has to wait for room."""
        cache = self.cache
        if self._crowded_out not in (None, request):
            return None
        found = cache.match_prefix(known)
        cache.lock(found.host_node)
        try:
            loading = cache.load_back(found.host_node)
            while loading is not None and not loading.done:
                yield
            match = cache.match_prefix(known)
            cache.lock(match.node)
        finally:
            cache.unlock(found.host_node)
        num_tokens = len(request.prompt) + request.max_tokens - 1  # the last one needs no KV
        new = cache.allocate(-(-num_tokens // cache.page_size) - match.num_pages)
        if new is None:  # all the rest is locked by requests that run
            cache.unlock(match.node)
            return None
        pages = match.page_indices + new
        return _Running(request, pages, match.node, match.num_pages, match.prefix_len)

    def _prefill(self, one: _Running) -> None:
        """The next part of a prompt, behind what was cached of it."""
        prompt = one.request.prompt
        end = min(one.num_computed + _CHUNK, len(prompt))
        logits = self._decoder.prefill(prompt[:end], one.pages, one.num_computed)
        one.num_computed = end
        if one.decoding:
            self._keep(one)  # others may use it, and routers know of it, from here on
            self._say(one, int(logits[-1].argmax()))

    def _decode(self, batch: list[_Running]) -> None:
        """One more token for each."""
        rows = [(one.request.reply[-1], one.num_computed, one.pages) for one in batch]
        tokens = self._decoder.decode(*zip(*rows, strict=True)).argmax(-1).tolist()
        for one, token in zip(batch, tokens, strict=True):
            one.num_computed += 1
            self._say(one, token)

    def _say(self, one: _Running, token: int) -> None:
        one.request.reply.append(token)
        one.request.answers.put(token)
        self._counts["reply"] += 1
        if len(one.request.reply) == one.request.max_tokens:
            self._finish(one, "done")

    def _keep(self, one: _Running) -> None:
        """Give the cache the whole pages that are computed."""
        cache, kept = self.cache, one.num_kept
        whole = one.num_computed // cache.page_size
        tokens = (one.request.prompt + one.request.reply)[: whole * cache.page_size]
        found = cache.insert(tokens, one.pages[kept:whole], first_page=kept)
        cache.lock(found.node)
        cache.unlock(one.node)
        if found.num_existing > kept:  # another request has computed the same meanwhile
            cache.free(one.pages[kept : found.num_existing])
            one.pages[:whole] = cache.match_prefix(tokens).page_indices
        one.node, one.num_kept = found.node, whole

    def _finish(self, one: _Running, outcome: str) -> None:
        """Keep what it computed, give back the rest, and let go."""
        self._keep(one)
        self.cache.free(one.pages[one.num_kept :])
        self.cache.unlock(one.node)
        self._running.remove(one)
        self._counts[outcome] += 1
        one.request.answers.put(None)


def _sidecar(options: argparse.Namespace) -> Sidecar:
    """A child of ours, or one from another container. Raises LinkError, OSError and ValueError."""
    page_size, model, name = options.page_size, options.model, options.worker_id
    worker = WorkerInfo(block_size=page_size, model=model, worker_id=name)
    if options.link:
        return listen(worker, options.link)
    return spawn(worker, load_config(options.kv_events) if options.kv_events else None)


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code."""
    options = read_options()
    torch.set_num_threads(1)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        try:
            sidecar = _sidecar(options)
            stack.callback(sidecar.close)  # it publishes what is left, and that this worker is gone
            engine = Engine(options, sidecar)
            stack.callback(engine.close)
            front = Front(engine, options.host, options.port)
            stack.callback(front.close)
        except (LinkError, OSError, ValueError) as error:
            print(f"engine: {error}", file=sys.stderr)
            return 2
        print(f"serves {front.url}; sidecar: {sidecar.http_endpoint or 'awaited'}", flush=True)
        engine.run(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
