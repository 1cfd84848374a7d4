"""The cache's side of storage: what it wrote there, what it knows to be there, and what got lost.

L1  A node has a copy on the storage tier exactly if the directory leads from its pages' keys to it.
L2  Only what a write acknowledged, or what the store had at the start, is ever known to be there.
L3  A page that is lost takes with it what is known of the pages below it: behind a hole storage has no
    prefix to offer. What the store still has of them is found again when they are written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice

from hicache.agreement import Agreement
from hicache.flight import Flight, Flights, count_of
from hicache.node import Node
from hicache.policy import HiCacheConfig
from hicache.storage.backend import StorageBackend, StoredPage
from hicache.tier import Tier
from hicache.tiered import TieredTree
from kvevents.hashing import (
    DIGEST_BYTES,
    HashFormat,
    block_digests,
    chain_seed,
    namespace_seed,
    page_key,
)
from kvevents.namespace import Namespace
from kvevents.tokens import TokenBytes

__all__ = ["StorageTier"]

_PAGES_A_TICK = 256
_PAUSE_TICKS = 100
_AUDIT_PAGES = 256
_AUDIT_ROUND = 6
"""Intervals in which all pages are looked for."""
_MOST_WAITING = 4096


class StorageTier:
    """One store of pages below the host tier."""

    def __init__(
        self,
        tiered: TieredTree,
        flights: Flights,
        backend: StorageBackend,
        agreement: Agreement,
        config: HiCacheConfig,
        page_size: int,
    ) -> None:
        self._tiered, self._flights, self.backend = tiered, flights, backend
        self._agreement, self._page_size = agreement, page_size
        self.tier = backend.tier
        self._directory: dict[bytes, Node] = {}
        self._waiting: dict[Node, None] = {}
        """Nodes that are to be written, the first to wait first."""
        self.num_missed = 0
        """Pages that left the host before storage got round to them."""
        self._num_flying = 0
        host_pages = tiered.allocators[Tier.HOST].num_pages
        self._most_flying = config.storage_queue_pages or max(1, host_pages // 4)
        self._in_air: dict[int, list[bytes]] = {}
        """The keys of each write under way, by a number of its own."""
        self._num_writes = 0
        self._lost_unknown: set[bytes] = set()
        """Keys in the air that were lost before their write was acknowledged."""
        self._ticks = self._resume_at = 0
        self._audited: Iterator[bytes] = iter(())
        self._audit_at = 0.0
        self._audit: Future[int] | None = None
        self._num_audited = 0
        tiered.tree.on_split = self._split

    # ------------------------------------------------------------------------------- the start

    def restore(self, held: list[StoredPage]) -> None:
        """Announce what the stores of all ranks have from an earlier run: a clear, and nodes for it.

        Nothing else is in the tree yet. A page whose key is not that of its tokens is deleted, and so is
        what is below it.
        """
        sound = self._sound(held)
        by_rank = self._agreement.gather(list(sound))
        if not any(by_rank):
            return
        self._tiered.residency.clear()
        below: dict[bytes | None, list[StoredPage]] = {}
        for key in sorted(set(sound).intersection(*by_rank)):  # the same order on every rank
            page = sound[key][0]
            below.setdefault(page.parent, []).append(page)
        tree = self._tiered.tree
        waiting = [(tree.root(page.namespace), page) for page in reversed(below.get(None, ()))]
        while waiting:
            parent, page = waiting.pop()
            chain = [page]
            while len(after := below.get(chain[-1].key, [])) == 1:
                chain += after
            parent = tree.root(page.namespace) if parent.is_root else parent
            node = tree.add(parent, b"".join(one.tokens for one in chain))
            node.digests = b"".join(sound[one.key][1] for one in chain)
            self._tiered.store(node, self.tier, range(node.num_pages))
            self._register(node)
            waiting += [(node, one) for one in reversed(after)]

    def _sound(self, held: list[StoredPage]) -> dict[bytes, tuple[StoredPage, bytes]]:
        """The pages that are what their keys say, with their digests; the others are deleted."""
        below: dict[bytes | None, list[StoredPage]] = {}
        for page in held:
            below.setdefault(page.parent, []).append(page)
        sound: dict[bytes, tuple[StoredPage, bytes]] = {}
        waiting = [(page, chain_seed(page.namespace)) for page in below.get(None, ())]
        while waiting:
            page, parent = waiting.pop()
            digest = b"".join(block_digests(parent, TokenBytes(page.tokens), self._page_size))
            if page_keys(digest, page.namespace) == [page.key]:
                sound[page.key] = page, digest
                waiting += [
                    (one, digest)
                    for one in below.get(page.key, ())
                    if one.namespace == page.namespace
                ]
        if bad := [page.key for page in held if page.key not in sound]:
            self.backend.delete(bad)
        return sound

    # --------------------------------------------------------------------------------- writing

    def wanted(self, node: Node) -> None:
        """The path to `node` is on the host and is to be written."""
        if node.copies[self.tier] is None:
            self._waiting[node] = None
            if len(self._waiting) > _MOST_WAITING:  # a store that hangs: the next use asks again
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                self.num_missed += oldest.num_pages

    def submit(self) -> None:
        """Send off what waits, a bounded number of pages at a time."""
        self._ticks += 1
        if self._ticks < self._resume_at:
            return
        budget = _PAGES_A_TICK
        while self._waiting and budget > 0 and self._num_flying < self._most_flying:
            node = next(iter(self._waiting))
            num_written = self._write(node, budget)
            budget -= num_written
            if not num_written or self._is_known(node):
                del self._waiting[node]
                self.num_missed += 0 if self._is_known(node) else node.num_pages

    def _is_known(self, node: Node) -> bool:
        """Whether it is stored, or on its way there."""
        return node.copies[self.tier] is not None or bool(node.moving & 1 << self.tier)

    def _write(self, node: Node, most: int) -> int:
        """Write the path to `node`, as far as the host has it and it is neither stored nor under way: its
        first `most` pages. How many.
        """
        while node.parent is not None and node.copies[Tier.HOST] is None:
            node = node.parent  # evicted since; its prefix may be there
        stretch: list[Node] = []
        at = node
        while not at.is_root and not self._is_known(at):
            if at.parent is None:
                return 0
            stretch.append(at)
            at = at.parent
        if not stretch:
            return 0
        stretch.reverse()
        stretch = self._leading(stretch, most)
        node = stretch[-1]
        source = array("q")
        for one in stretch:
            copy = one.copies[Tier.HOST]
            assert isinstance(copy, array), "R2: the host has the path"
            source += copy
        pages: list[StoredPage] = []
        for one in stretch:
            pages += self._stored_pages(one)
        self._tiered.hold_host(node)
        try:
            job = self.backend.put(pages, source)
        except Exception:  # a host page is held: whatever it is, nothing was stored
            job = Future()
            job.set_result(0)
        number = self._num_writes = self._num_writes + 1
        self._in_air[number] = [page.key for page in pages]
        land = partial(self._land, number)
        self._flights.leave(Flight(self.tier, node, source, range(len(source)), job, land))
        self._num_flying += len(source)
        return len(source)

    def _leading(self, nodes: list[Node], most: int) -> list[Node]:
        """The nodes of the first `most` pages; splits the last if need be."""
        found = []
        for node in nodes:
            if node.num_pages > most:
                if most:
                    found.append(self._tiered.tree.split(node, most))
                break
            found.append(node)
            most -= node.num_pages
        return found

    def _land(self, number: int, flight: Flight, nodes: list[Node], count: int) -> None:
        """The store has the first `count` pages, but for those it lost again meanwhile."""
        self._num_flying -= flight.num_pages
        keys, lost = self._in_air.pop(number), self._lost_unknown
        if not flight.abandoned:
            known = next((i for i in range(count) if keys[i] in lost), count) if lost else count
            for node in self._flights.place(flight, nodes, known):
                self._register(node)
            if count < flight.num_pages:
                self._resume_at = self._ticks + _PAUSE_TICKS
        if lost:
            lost.intersection_update(self._keys_in_air())
        self._tiered.release_host(flight.node)

    # --------------------------------------------------------------------------------- losing

    def take_lost(self) -> list[bytes]:
        """What this rank's store lost, to be settled with the others."""
        return self.backend.take_lost()

    def note_lost(self, keys: Iterable[bytes]) -> None:
        """Pages that some rank lost, before the flights of the same moment land."""
        if keys := set(keys):
            self._lost_unknown |= keys.intersection(self._keys_in_air())

    def _keys_in_air(self) -> Iterator[bytes]:
        for keys in self._in_air.values():
            yield from keys

    def retract(self, keys: Iterable[bytes]) -> None:
        """The same pages, afterwards: nobody is to believe in them any more (L3)."""
        lost: dict[Node, set[bytes]] = {}
        for key in keys:
            if (node := self._directory.get(key)) is not None:
                lost.setdefault(node, set()).add(key)
        for node, gone in lost.items():
            if node.copies[self.tier] is None:
                continue  # it was below another
            place = next(i for i, key in enumerate(self.keys(node)) if key in gone)
            if place:
                self._tiered.tree.split(node, place)
            self._retract_below(node)

    def _retract_below(self, node: Node) -> None:
        found, stack = [], [node]
        while stack:
            at = stack.pop()
            if at.copies[self.tier] is not None:
                found.append(at)
                stack += at.children.values()
        for at in reversed(found):  # children first
            for key in self.keys(at):
                del self._directory[key]
            self._tiered.drop(at, self.tier)

    def audit(self, now: float) -> None:
        """Have the store look at some of the pages it is believed to have, if it wants that."""
        interval = self.backend.audit_interval_s
        if interval is None or (self._audit is not None and not self._audit.done()):
            return
        if self._audit is not None:
            if 2 * count_of(self._audit, self._num_audited) > self._num_audited:
                self._audit_at = now  # the store is evicting, the oldest first: look on at once
                self._audited = iter(list(self._directory))
            self._audit = None
        if now < self._audit_at:
            return
        self._audit_at = now + interval
        at_once = max(_AUDIT_PAGES, len(self._directory) // _AUDIT_ROUND)
        keys = [key for key in islice(self._audited, at_once) if key in self._directory]
        if len(keys) < at_once:
            self._audited = iter(list(self._directory))
        self._num_audited = len(keys)
        self._audit = self.backend.audit(keys) if keys else None

    def forget(self) -> None:
        """The tree was cleared: a store on disk is emptied, of what is not known to be there too.

        An external store is not this worker's alone: what is there stays, for the others.
        """
        self._directory.clear()
        self._waiting.clear()
        if self.tier is Tier.DISK:
            self.backend.clear()

    # ------------------------------------------------------------------------------------ keys

    def digests(self, node: Node) -> bytes:
        """The digests of a node's pages, computed once."""
        path = []
        at = node
        while at.digests is None and not at.is_root:
            path.append(at)
            assert at.parent is not None
            at = at.parent
        parent = at.digests[-DIGEST_BYTES:] if at.digests else chain_seed(node.namespace)
        for one in reversed(path):
            one.digests = b"".join(block_digests(parent, TokenBytes(one.key), self._page_size))
            parent = one.digests[-DIGEST_BYTES:]
        return node.digests or b""

    def keys(self, node: Node) -> list[bytes]:
        """The keys of a node's pages."""
        return page_keys(self.digests(node), node.namespace)

    def last_digest(self, node: Node) -> bytes:
        """What the digest of a page after `node` follows."""
        if node.is_root:
            return chain_seed(node.namespace)
        return self.digests(node)[-DIGEST_BYTES:]

    def _stored_pages(self, node: Node) -> list[StoredPage]:
        keys, above, namespace, tokens = (
            self.keys(node),
            self._key_above(node),
            node.namespace,
            node.key,
        )
        size = len(tokens) // node.num_pages
        return [
            StoredPage(key, parent, namespace, tokens[at : at + size])
            for key, parent, at in zip(
                keys, [above, *keys[:-1]], range(0, len(tokens), size), strict=True
            )
        ]

    def _key_above(self, node: Node) -> bytes | None:
        parent = node.parent
        assert parent is not None, "T1: what is written is in the tree"
        if parent.is_root:
            return None
        return page_keys(self.digests(parent)[-DIGEST_BYTES:], node.namespace)[0]

    def _register(self, node: Node) -> None:
        self._directory.update(dict.fromkeys(self.keys(node), node))

    def _split(self, upper: Node) -> None:
        if upper.copies[self.tier] is not None:
            self._register(upper)

    @property
    def num_waiting(self) -> int:
        """Nodes that are still to be written, unless the store is being given a rest."""
        return len(self._waiting) if self._ticks >= self._resume_at else 0

    @property
    def directory(self) -> dict[bytes, Node]:
        """Key to node, for checks."""
        return self._directory


def page_keys(digests: bytes, namespace: Namespace) -> list[bytes]:
    """The keys of pages, from their digests one after the other."""
    found = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    seed = namespace_seed(namespace, HashFormat.SGLANG)
    return found if seed is None else [page_key(digest, seed) for digest in found]
