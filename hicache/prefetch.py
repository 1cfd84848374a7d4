"""Fetches the pages of a prompt from storage to the host before the request runs.

A prefetch looks which pages storage has, takes that many host pages and fills them. What is filled when
it ends lands on the host, below a prefix that is there already. It may be told to end early: then the
pages not filled yet are free once nobody writes to them any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from enum import Enum

from hicache.agreement import Agreement
from hicache.background import BackgroundThread
from hicache.flight import PENDING, Flights, count_of
from hicache.mover import Mover
from hicache.node import Node, PageIndices
from hicache.policy import HiCacheConfig, PrefetchPolicy
from hicache.storage.backend import StorageBackend
from hicache.storage_tier import StorageTier, page_keys
from hicache.tier import Tier
from hicache.tiered import TieredTree
from kvevents.hashing import DIGEST_BYTES, block_digests
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes

__all__ = ["Prefetch", "Prefetches"]

_LOOK_PAGES = 128
_READ_PAGES = 64


class _State(Enum):
    LOOKING = 1
    READING = 2
    ENDING = 3
    """Landed or given up; its last read may still be writing to the pages it has left."""
    ENDED = 4


class Prefetch:
    """Opaque to an engine: take it from `prefetch`, ask `prefetch_done` about it.

    `num_landed`: pages, not tokens, that it has brought to the host.
    """

    def __init__(
        self,
        base: Node,
        first_page: int,
        tokens: bytes,
        deadline: float,
        last_digest: bytes,
        page_size: int,
    ) -> None:
        self.base, self.first_page, self.tokens = base, first_page, tokens
        self.namespace: Namespace = base.namespace
        self.deadline = deadline
        self.num_landed = 0
        self.state = _State.LOOKING
        self.job: Future[int] = Future()
        self.pages: PageIndices = array("q")
        self.digests = b""
        self.num_read = 0
        self.stopped = False
        self._last_digest, self._page_size = last_digest, page_size

    @property
    def holds(self) -> bool:
        """Whether it keeps its prefix from being evicted."""
        return self.state in (_State.LOOKING, _State.READING)

    @property
    def num_pages(self) -> int:
        """Pages it asked for."""
        return len(self.tokens) // (self._page_size * TOKEN_BYTES) - self.first_page

    def look_up(self, backend: StorageBackend) -> int:
        """How many leading pages the store has. Runs in a thread of its own."""
        page = self._page_size * TOKEN_BYTES
        found, parent = 0, self._last_digest
        step = _LOOK_PAGES * page
        for start in range(self.first_page * page, len(self.tokens), step):
            part = TokenBytes(self.tokens[start : start + step])
            digests = b"".join(block_digests(parent, part, self._page_size))
            keys = page_keys(digests, self.namespace)
            here = _ended(backend.exists_prefix(keys), len(keys))
            self.digests += digests[: here * DIGEST_BYTES]
            found += here
            if here < len(keys) or self.stopped:
                break
            parent = digests[-DIGEST_BYTES:]
        return found

    def read(self, backend: StorageBackend) -> int:
        """Fill the pages; how many. Runs in a thread of its own."""
        pages = self.pages  # landing takes the front of them away meanwhile
        keys = page_keys(self.digests, self.namespace)[: len(pages)]
        for start in range(0, len(keys), _READ_PAGES):
            if self.stopped:
                break
            part = keys[start : start + _READ_PAGES]
            filled = _ended(backend.get(part, pages[start : start + len(part)]), len(part))
            self.num_read += filled
            if filled < len(part):
                break
        return self.num_read

    def progress(self) -> int:
        """PENDING, or 1 + the result of what it is doing."""
        if not self.job.done():
            return PENDING
        failed = self.job.cancelled() or self.job.exception() is not None
        return 1 + (0 if failed else self.job.result())


def _ended(job: Future[int], most: int) -> int:
    with suppress(Exception, CancelledError):
        job.result()
    return count_of(job, most)


class Prefetches:
    """All of them, in the order in which they began."""

    def __init__(
        self,
        tiered: TieredTree,
        flights: Flights,
        mover: Mover,
        storage: StorageTier,
        agreement: Agreement,
        config: HiCacheConfig,
        page_size: int,
    ) -> None:
        self._tiered, self._flights, self._mover = tiered, flights, mover
        self._storage, self._agreement, self._config = storage, agreement, config
        self._page_size = page_size
        host_pages = tiered.allocators[Tier.HOST].num_pages
        self._most_pages = config.prefetch_max_pages or max(1, host_pages // 2)
        self._looking, self._reading = (
            BackgroundThread(f"kv-prefetch-{what}") for what in ("look", "read")
        )
        self._running: list[Prefetch] = []

    def __iter__(self) -> Iterator[Prefetch]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_busy_pages(self) -> int:
        """Pages that the prefetches under way want or have."""
        return sum(len(one.pages) or one.num_pages for one in self._running)

    def start(self, base: Node, first_page: int, tokens: bytes) -> Prefetch | None:
        """Fetch what follows `base`, the first `first_page` pages of `tokens`, which are whole pages.

        None when too little follows, or too much is under way.
        """
        num_tokens = len(tokens) // TOKEN_BYTES - first_page * self._page_size
        num_pages = num_tokens // self._page_size
        if num_pages < 1 or num_tokens < self._config.prefetch_threshold:
            return None
        if self._running and self.num_busy_pages + num_pages > self._most_pages:
            return None
        most = (first_page + self._most_pages) * self._page_size * TOKEN_BYTES
        patience = (
            self._config.prefetch_timeout_base_s
            + self._config.prefetch_timeout_per_ki_token_s * num_tokens / 1024
        )
        prefetch = Prefetch(
            base,
            first_page,
            tokens[:most],
            self._flights.clock() + patience,
            self._storage.last_digest(base),
            self._page_size,
        )
        self._tiered.hold(base)
        self._running.append(prefetch)
        prefetch.job = self._looking.submit(prefetch.look_up, self._storage.backend)
        return prefetch

    def progress(self) -> list[int]:
        """Of each, as this rank sees it."""
        return [one.progress() for one in self._running]

    def settle(self, progress: list[int]) -> None:
        """Go on with those whose ranks agree that they can; `progress` as agreed, in order."""
        for one, result in zip(list(self._running), progress, strict=True):
            if result != PENDING:
                self._go_on(one, result - 1)

    def is_done(self, one: Prefetch) -> bool:
        """Whether a request need not wait for it any longer, by the policy; it ends then."""
        if not one.holds:
            return True
        policy = self._config.prefetch_policy
        if policy is PrefetchPolicy.WAIT_COMPLETE:
            return False
        late = policy is PrefetchPolicy.BEST_EFFORT or self._flights.clock() > one.deadline
        agreed_late, num_read = self._agreement.least([-int(late), one.num_read])
        if agreed_late == 0:
            return False
        one.stopped = True
        self._land(one, num_read if one.state is _State.READING else 0)
        return True

    def cancel(self, one: Prefetch) -> None:
        """Nobody wants it any more; nothing lands."""
        if one.holds:
            one.stopped = True
            self._land(one, 0)

    def cancel_all(self) -> None:
        for one in self._running:
            self.cancel(one)

    def close(self) -> None:
        """Stop, bounded in time."""
        self.cancel_all()
        self._looking.close()
        self._reading.close()

    def _go_on(self, one: Prefetch, result: int) -> None:
        match one.state:
            case _State.LOOKING if result and (pages := self._room_for(one, result)):
                one.pages, one.state = pages, _State.READING
                one.job = self._reading.submit(one.read, self._storage.backend)
            case _State.LOOKING:
                self._land(one, 0)
                self._end(one)
            case _State.READING if result and self._prefix_is_coming(one.base):
                pass
            case _State.READING:
                self._land(one, result)
                self._end(one)
            case _:
                self._end(one)

    def _room_for(self, one: Prefetch, num_pages: int) -> PageIndices | None:
        """Host pages, once the prefix is on the host or on its way there: it holds what comes below."""
        return self._tiered.take_host(num_pages) if self._mover.backup(one.base) else None

    def _end(self, one: Prefetch) -> None:
        """Nobody writes to its pages any more."""
        self._tiered.free(Tier.HOST, one.pages)
        one.pages = array("q")
        one.state = _State.ENDED
        self._running.remove(one)

    def _prefix_is_coming(self, base: Node) -> bool:
        return base.copies[Tier.HOST] is None and bool(base.moving & 1 << Tier.HOST)

    def _land(self, one: Prefetch, count: int) -> None:
        """The first `count` pages are filled: they are on the host now, if the prefix is."""
        base = one.base
        if count and (base.is_root or base.copies[Tier.HOST] is not None):
            self._place(one, count)
        self._tiered.release(base)
        one.state = _State.ENDING

    def _place(self, one: Prefetch, count: int) -> None:
        tree, page = self._tiered.tree, self._page_size * TOKEN_BYTES
        tokens = one.tokens[: (one.first_page + count) * page]
        path, num_pages, partial, shared = tree.walk(tokens, one.namespace)
        if partial is not None:
            path.append(tree.split(partial, shared))
        end, at = one.base, 0
        below = path if end.is_root else path[path.index(end) + 1 :]
        for node in below:
            pages = one.pages[at : at + node.num_pages]
            if node.copies[Tier.HOST] is None:
                self._tiered.store(node, Tier.HOST, pages)
                one.num_landed += len(pages)
            else:
                self._tiered.free(Tier.HOST, pages)
            at += node.num_pages
            end = node
        if at < count:
            parent = tree.root(one.namespace) if end.is_root else end
            node = tree.add(parent, tokens[num_pages * page :])
            node.digests = one.digests[at * DIGEST_BYTES : count * DIGEST_BYTES]
            self._tiered.store(node, Tier.HOST, one.pages[at:count])
            one.num_landed += count - at
        one.pages = one.pages[count:]
