"""The cache an engine talks to: match, allocate, insert, lock, load back, prefetch, evict, flush, tick.

A request: `match_prefix`, `lock` the node, `allocate` pages for the rest, compute, `insert`, free the
pages that turned out to be there already, `unlock`. Each step of the scheduler calls `tick`, idle or
not, and ends with the link taking the records.

With a host tier, a match may go on where its device pages end: lock `host_node` instead, `load_back`,
and match again when that is done. With storage, `prefetch` what neither of the two has while the
request waits, and match when `prefetch_done` says so.

A request that goes on after an `insert` (the next chunk of a prefill, decoding) locks the insertion's
node and unlocks the one it had, or its pages may be evicted under it. Where the insert found pages
that were there already, `match_prefix` tells the cache's own.

One thread. Only whole pages are cached; the tail of a prompt that does not fill a page is not.
"""

from __future__ import annotations

import operator
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from hicache.agreement import Agreement, Alone
from hicache.arguments import check_kind
from hicache.flight import Flight, Flights
from hicache.mover import Mover
from hicache.node import Node, PageIndices
from hicache.policy import HiCacheConfig
from hicache.pool import HostPool, PagePool, as_pages
from hicache.prefetch import Prefetch, Prefetches
from hicache.recorder import NullRecorder, Recorder, ResidencyRecorder
from hicache.residency import Residency
from hicache.storage.backend import StorageBackend, StorageStats
from hicache.storage_tier import StorageTier
from hicache.tier import DEVICE, HOST, MEDIUM, Tier
from hicache.tiered import TieredTree
from hicache.transfer import Transfers, transfers_for
from hicache.tree import RadixTree, Walk
from kvevents.events import Event, StorageMedium
from kvevents.hashing import (
    BlockHash,
    HashFormat,
    block_digests,
    chain_seed,
    namespace_seed,
    wire_hash,
)
from kvevents.materializer import Materializer
from kvevents.namespace import BASE, Namespace
from kvevents.records import Record
from kvevents.tokens import TokenBytes, pack_tokens

__all__ = ["CacheStats", "HiRadixCache", "Insertion", "Match"]

_MOST_WALKED = 64
"""Prompts, of requests that were matched and not inserted; their memory stays that long."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt.

    `page_indices`: its device pages in order, a copy. `node`: where they end; lock it to keep them.
    `num_host_pages`: how many more pages the host has; `host_node`: where those end, or `node`.
    """

    page_indices: PageIndices
    node: Node
    page_size: int
    num_host_pages: int
    host_node: Node

    @property
    def num_pages(self) -> int:
        """Device pages of the prefix."""
        return len(self.page_indices)

    @property
    def prefix_len(self) -> int:
        """Tokens of the prefix that the device has."""
        return len(self.page_indices) * self.page_size


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of an insert.

    `num_existing`: how many leading pages of the prompt, counted from its start and not from
    `first_page`, the device held already. Of the pages the
    caller brought for those, the ones that are not the cache's own are duplicates: still the
    caller's, to free. `node`: the end of the prompt's whole pages.
    """

    num_existing: int
    node: Node


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, in pages by medium unless they say otherwise."""

    resident: dict[StorageMedium, int]
    stored: dict[StorageMedium, int]
    dropped: dict[StorageMedium, int]
    failed_flights: int
    """Copies and writes of which some pages did not arrive."""
    abandoned_flights: int
    """Those that ended when nobody waited for them any more."""
    without_room: int
    """Pages that were to be backed up, and found no room on the host, each time they were."""
    missed_writes: int
    """Pages that left the host before they were written to storage."""
    short_prompts: int
    """Inserted ones that filled no page, so that there was nothing to keep, and nothing to tell."""
    storage: StorageStats | None


class HiRadixCache:
    """A prefix cache over the pages of `device_pool`, which it shares with the caller.

    A page is free, the caller's (allocated, not inserted) or the cache's (inserted, not evicted). One
    thread makes all the calls; the cache's own threads only copy.

    `host_pool`: the second tier, of the same shape. `storage`: the third, which needs the second.
    `transfers`: copies between the pools; by default what fits the device. `agreement`: how the ranks
    of a tensor-parallel group keep in step; rank 0 records events unless `events` says otherwise.
    `hash_format`: see `kvevents.hashing`. `clock`: for deadlines, in seconds.

    A pool is one cache's, for good: to begin anew with its pages, `flush`. A store that is not empty is
    announced: a clear, then what it holds. Raises ValueError for another cache's pools, for pools of
    different shapes or page sizes, for storage or transfers without a host pool (a store that was opened
    for it stays open, and holds its directory, until its `close`), and for a hash format that is none;
    TypeError for what is not of its type.
    """

    def __init__(
        self,
        device_pool: PagePool,
        *,
        host_pool: HostPool | None = None,
        storage: StorageBackend | None = None,
        transfers: Transfers | None = None,
        config: HiCacheConfig | None = None,
        agreement: Agreement | None = None,
        events: bool | None = None,
        hash_format: HashFormat = HashFormat.SGLANG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_pools(device_pool, host_pool, storage, transfers)
        self.page_size = device_pool.page_size
        self.device_pool, self.host_pool = device_pool, host_pool
        config = HiCacheConfig() if config is None else config
        check_kind("config", config, HiCacheConfig)
        if agreement is not None and not hasattr(agreement, "least"):
            raise TypeError(f"agreement: a {type(agreement).__name__} is none")
        if hash_format not in tuple(HashFormat):
            raise ValueError(f"hash_format: {hash_format!r} is none of {', '.join(HashFormat)}")
        self._config = config
        self._agreement = agreement = agreement or Alone()
        self._hash_format = HashFormat(hash_format)
        self._clock = clock
        self._materializer: Materializer | None = None
        self._taken_as_records = False
        self._num_locks = self._num_short = 0
        self._walked: dict[int, tuple[bytes, Node]] = {}
        """Of prompts that came packed and are to be inserted yet, by identity: how far the tree had them.
        An insert goes on from there: comparing is most of its work for a long prompt that is known.
        """

        pools = [pool.allocator for pool in (device_pool, host_pool) if pool is not None]
        for name, allocator in zip(("device_pool", "host_pool"), pools, strict=False):
            if allocator.claimed:
                raise ValueError(
                    f"{name}: it is another cache's, also when that is closed: flush that one, or make"
                    " a pool anew"
                )
        self._tree = RadixTree(self.page_size)
        recorded = agreement.rank == 0 if events is None else events
        self._recorder: ResidencyRecorder = Recorder(self._tree) if recorded else NullRecorder()
        self._residency = Residency(self._recorder)
        allocators = {DEVICE: device_pool.allocator}
        if host_pool is not None:
            allocators[HOST] = host_pool.allocator
            transfers = transfers or transfers_for(device_pool, host_pool)
        self._transfers = transfers
        self._tiered = TieredTree(self._tree, self._residency, allocators, config.eviction_policy)
        self._flights = Flights(self._tiered, clock)
        self._mover = Mover(self._tiered, self._flights, transfers, agreement, config)
        self._storage: StorageTier | None = None
        self._prefetches: Prefetches | None = None
        if storage is not None and host_pool is not None:
            self._add_storage(storage, host_pool)
        for allocator in pools:
            allocator.claimed = True

    def _add_storage(self, backend: StorageBackend, host_pool: HostPool) -> None:
        backend.attach(host_pool)
        agreement, config = self._agreement, self._config
        self._storage = StorageTier(
            self._tiered, self._flights, backend, agreement, config, self.page_size
        )
        self._prefetches = Prefetches(
            self._tiered,
            self._flights,
            self._mover,
            self._storage,
            agreement,
            config,
            self.page_size,
        )
        self._mover.on_backup = self._storage.wanted
        self._storage.restore(backend.held())

    @property
    def hash_format(self) -> HashFormat:
        """How the blocks' hashes are made."""
        return self._hash_format

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- requests

    def match_prefix(self, tokens: Any, namespace: Namespace = BASE) -> Match:
        """The longest cached prefix of `tokens`, in whole pages; counts as a use of it.

        May split a node, which is silent. Raises TypeError for a namespace that is none, and what
        `pack_tokens` raises.
        """
        _check_namespace(namespace)
        packed = pack_tokens(tokens)
        path = self._path(packed, namespace)
        self._touch(path)
        if path and packed is tokens:
            self._walked[id(packed)] = packed, path[-1]
            if len(self._walked) > _MOST_WALKED:
                del self._walked[next(iter(self._walked))]
        return self._match(path, namespace)

    def _match(self, path: list[Node], namespace: Namespace) -> Match:
        pages = array("q")
        num_host_pages = 0
        device_end = host_end = self._tree.root(namespace)
        for node in path:
            copy = node.copies[DEVICE]
            if isinstance(copy, array):
                pages += copy
                device_end = host_end = node
            elif node.copies[HOST] is not None:
                num_host_pages += node.num_pages
                host_end = node
            else:
                break
        return Match(pages, device_end, self.page_size, num_host_pages, host_end)

    def allocate(self, num_pages: int) -> PageIndices | None:
        """Indices of `num_pages` device pages for the caller, an array("q"); their content is undefined.
        Evicts as needed, which under write_back waits.

        None, and nothing evicted, when not even evicting all that is unlocked would do. Raises
        ValueError for a negative number.
        """
        num_pages = operator.index(num_pages)
        if not self._mover.make_room(num_pages):
            return None
        return self.device_pool.allocator.allocate(num_pages)

    def insert(
        self,
        tokens: Any,
        page_indices: Any,
        namespace: Namespace = BASE,
        *,
        first_page: int = 0,
        priority: int = 0,
    ) -> Insertion:
        """Cache the whole pages of `tokens` on the device.

        `tokens` are the prompt's from its start, `page_indices` what `allocate` gave, or any array, list
        or tensor of ints: `page_indices[i]` holds page `first_page + i` of the prompt; the pages before
        `first_page` are on the device already (matched and locked). Pages that are new there become the
        cache's. Counts as a use of the whole prompt. `priority`, for that policy: the highest given wins.

        Raises ValueError, with nothing changed, when the number of indices is not that of the pages
        from `first_page` on, when an index is no page of the pool, when one for a new page is not the
        caller's or comes twice, or when the pages before `first_page` are not on the device. Raises
        TypeError for a namespace that is none, and what `pack_tokens` raises.
        """
        _check_namespace(namespace)
        priority = operator.index(priority)
        packed = pack_tokens(tokens)
        page_bytes = self._tree.page_bytes
        whole = len(packed) // page_bytes
        pages = self._check_insert(whole, as_pages(page_indices), first_page)
        path, found, partial, shared = self._walk(packed, namespace)
        self._walked.pop(id(packed), None)
        existing = _on_device(path, partial, shared)
        if existing < first_page:
            raise ValueError(f"first_page: {first_page}, but the device has only {existing} pages")
        own = existing - first_page
        new = pages[own:]
        if own:
            self.device_pool.allocator.check(pages[:own])
        self.device_pool.allocator.adopt(new)
        if partial is not None:
            path.append(self._tree.split(partial, shared))
        if existing < found:
            self._recreate(path, new)
        if found < whole:
            parent = path[-1] if path else self._tree.root(namespace)
            node = self._tree.add(parent, packed[found * page_bytes : whole * page_bytes])
            path.append(node)
            node.priority = priority
            rest = found - existing
            self._tiered.store(node, DEVICE, new[rest:] if rest else new)
        self._touch(path)
        for node in path:
            node.hits += 1
            if priority > node.priority:
                node.priority = priority
        self._write_down(path)
        if not whole:
            self._num_short += 1
        return Insertion(existing, path[-1] if path else self._tree.root(namespace))

    def _recreate(self, path: list[Node], pages: PageIndices) -> None:
        """Give the nodes of a path that are not on the device their copies there."""
        at = 0
        for node in path:
            if node.copies[DEVICE] is None:
                self._tiered.store(node, DEVICE, pages[at : at + node.num_pages])
                at += node.num_pages

    def _write_down(self, path: list[Node]) -> None:
        """Send the path to the tiers below, as the policy says."""
        self._mover.after_insert(path)
        if self._storage is not None:
            for node in reversed(path):
                if node.copies[HOST] is not None:
                    self._storage.wanted(node)
                    break

    def free(self, page_indices: Any) -> None:
        """Give back pages that are the caller's, in any order: duplicates, those of an aborted request.

        Raises ValueError, with none taken, unless all are the caller's and none comes twice.
        """
        self.device_pool.allocator.free(as_pages(page_indices))

    def lock(self, node: Node) -> None:
        """Keep the device and host copies of the prefix that ends at `node`, until `unlock`.

        Raises ValueError for a node that is on neither of the two any more.
        """
        self._check_held(node)
        self._tiered.pin(node)
        self._num_locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node. Raises ValueError when it has none."""
        _check_node(node)
        if not node.pins or node not in self._tree:
            raise ValueError(f"unlock: {node} is not locked")
        self._tiered.unpin(node)
        self._num_locks -= 1

    # ------------------------------------------------------------------------- the lower tiers

    def load_back(self, node: Node, *, max_pages: int | None = None) -> Flight | None:
        """Copy the host pages of the prefix that ends at `node` to the device; `node` is locked.

        `done` of what it returns says when to match again. The copy keeps its pages locked by itself: a
        request that is aborted meanwhile has only to `unlock`. None, with nothing done, when there is
        nothing to copy, fewer tokens than `load_back_threshold`, more than `max_pages`, or no room.
        """
        self._check_held(node)
        num_pages, at = 0, node
        while at.parent is not None and at.copies[DEVICE] is None:
            num_pages += at.num_pages
            at = at.parent
        too_few = num_pages * self.page_size < self._config.load_back_threshold
        if not num_pages or too_few or (max_pages is not None and num_pages > max_pages):
            return None
        return self._mover.load_back(node)

    def prefetch(self, tokens: Any, namespace: Namespace = BASE) -> Prefetch | None:
        """Begin to fetch from storage what neither device nor host has of a prompt.

        At most `prefetch_max_pages` of it. None when there is no storage, when the rest is shorter than a
        page or `prefetch_threshold`, or when too many pages are being fetched already: compute them.
        Raises as `match_prefix` does.
        """
        _check_namespace(namespace)
        packed = pack_tokens(tokens)
        if self._prefetches is None:
            return None
        whole = packed[: len(packed) - len(packed) % self._tree.page_bytes]
        match = self._match(self._path(whole, namespace), namespace)
        first_page = match.num_pages + match.num_host_pages
        return self._prefetches.start(match.host_node, first_page, whole)

    def prefetch_done(self, prefetch: Prefetch) -> bool:
        """Whether the request should go on with what there is, by the prefetch policy.

        Under best_effort, and after a timeout, asking ends the prefetch.
        """
        _check_prefetch(prefetch)
        return self._prefetches is None or self._prefetches.is_done(prefetch)

    def cancel_prefetch(self, prefetch: Prefetch) -> None:
        """The request is gone: nothing lands any more. Safe to call at any time."""
        _check_prefetch(prefetch)
        if self._prefetches is not None:
            self._prefetches.cancel(prefetch)

    def tick(self) -> None:
        """Start what was submitted and land what arrived. Call it every step, idle or not.

        Under tensor parallelism every rank calls it at the same step: it settles what arrived.
        """
        flights, prefetches, storage = self._flights, self._prefetches, self._storage
        if self._transfers is not None:
            self._transfers.start()
        flying = flights.progress()
        fetching = prefetches.progress() if prefetches is not None else []
        lost = storage.take_lost() if storage is not None else []
        agreed = self._agreement.least([*flying, *fetching, -len(lost)])
        if agreed[-1] and storage is not None:
            by_rank = self._agreement.gather(lost)
            lost = list(dict.fromkeys(key for keys in by_rank for key in keys))
            storage.note_lost(lost)
        flights.settle(agreed[: len(flying)])
        if prefetches is not None:
            prefetches.settle(agreed[len(flying) : -1])
        if storage is not None:
            storage.retract(lost)
            storage.submit()
            storage.audit(self._clock())

    @property
    def num_in_flight(self) -> int:
        """Copies, writes and prefetches under way; 0: the next ticks will find nothing to do."""
        waiting = self._storage.num_waiting if self._storage is not None else 0
        return len(self._flights) + waiting + len(self._prefetches or ())

    def settle(self, timeout_s: float) -> bool:
        """Tick until nothing is under way. False when that did not come about in time.

        For shutdown, tests and tools: it waits. It does not pump: what it lands is told by the next one.
        """
        deadline = time.monotonic() + timeout_s
        self.tick()
        while self.num_in_flight:
            late = time.monotonic() > deadline
            if any(self._agreement.least([-int(late)])):
                return False
            time.sleep(0.0005)
            self.tick()
        return True

    def close(self) -> None:
        """Stop the threads and close the storage. Bounded in time, safe to call twice.

        What was not written yet never will be: `settle` first.
        """
        if self._prefetches is not None:
            self._prefetches.cancel_all()
        if self._transfers is not None:
            self._transfers.close()
        if self._storage is not None:
            self._storage.backend.close()
        if self._prefetches is not None:
            self._prefetches.close()

    # -------------------------------------------------------------------------------- eviction

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` unlocked device pages, from the leaves inwards; returns how many it freed.

        A leaf larger than what is left to free loses only its last pages. Under write_back, pages that
        the host does not have are copied there first. Raises ValueError for a negative number.
        """
        num_pages = operator.index(num_pages)
        if num_pages < 0:
            raise ValueError(f"num_pages: {num_pages} is negative")
        return self._mover.evict(num_pages)

    def flush(self) -> None:
        """Drop everything, on every tier; a store on disk is empty from then on, unless it is closed.

        What is under way comes to nothing. An external store keeps its pages, which other workers may be
        using; after a change of weights its `PageFormat` needs another model name. Raises ValueError,
        with nothing changed, while a node is locked.
        """
        self._check_unlocked("flush")
        reading = self._stop_movement()
        for tier, allocator in self._tiered.allocators.items():
            for node in self._tree.nodes():
                copy = node.copies[tier]
                if isinstance(copy, array):
                    kept = reading if tier is HOST else ()
                    allocator.take_back(array("q", (page for page in copy if page not in kept)))
        self._tiered.clear()
        if self._storage is not None:
            self._storage.forget()

    def reset_device(self) -> None:
        """Drop all device copies; the other tiers keep theirs.

        Copies under way between device and host come to nothing, and so do prefetches. Raises
        ValueError, with nothing changed, while a node is locked.
        """
        self._check_unlocked("reset_device")
        if self._prefetches is not None:
            self._prefetches.cancel_all()
        for flight in list(self._flights):
            if flight.tier in (DEVICE, HOST) and not flight.abandoned:
                self._flights.abandon(flight)
        for node in self._from_the_leaves():
            if node.copies[DEVICE] is not None:
                self._tiered.drop(node, DEVICE)
        self._tiered.queues[DEVICE].clear()

    def _stop_movement(self) -> set[int]:
        """Let everything under way come to nothing. Host pages that storage is still reading stay
        with its writes until those end, or it would store what comes after under a wrong key.
        """
        if self._prefetches is not None:
            self._prefetches.cancel_all()
        reading: set[int] = set()
        for flight in self._flights:
            if flight.abandoned:
                continue
            self._flights.abandon(flight)
            if flight.tier not in (DEVICE, HOST):
                flight.owned_tier, flight.owned = HOST, flight.source
                reading.update(flight.source)
        return reading

    def _from_the_leaves(self) -> list[Node]:
        """All nodes, children before parents."""
        found: list[Node] = []
        stack = list(self._tree.roots())
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return [node for node in reversed(found) if not node.is_root]

    # ---------------------------------------------------------------------------------- events

    def take_records(self) -> list[Record]:
        """The residency records since the last call, for a sidecar to make events of.

        A cache's changes are taken either as records or as events: raises ValueError after `take_events`.
        """
        if self._materializer is not None:
            raise ValueError("take_records: this cache's changes are being taken as events")
        self._taken_as_records = True
        return self._recorder.take()

    def take_events(self) -> list[Event]:
        """The events since the last call, made in this process.

        Raises ValueError after `take_records`.
        """
        if self._taken_as_records:
            raise ValueError("take_events: this cache's changes are being taken as records")
        if self._materializer is None:
            self._materializer = Materializer(self.page_size, self._hash_format)
        return self._materializer.apply(self._recorder.take())

    @property
    def retelling(self) -> bool:
        """Whether a re-telling is under way."""
        return self._recorder.retelling

    def begin_retell(self) -> None:
        """Drop the records not taken yet and tell the resident state anew, beginning with a clear.

        Whoever listens from here on may do so by records or by events.
        """
        self._materializer, self._taken_as_records = None, False
        self._recorder.begin_retell()

    def retell(self, num_blocks: int) -> None:
        """Record at most `num_blocks` more of the re-telling, parents before children."""
        self._recorder.retell(num_blocks)

    # ---------------------------------------------------------------------------------- counts

    @property
    def num_resident(self) -> int:
        """Device pages in the cache."""
        return self._residency.num_resident(DEVICE)

    @property
    def num_protected(self) -> int:
        """Those under a lock, a request's or that of a copy under way."""
        return self._residency.num_protected(DEVICE)

    @property
    def num_evictable(self) -> int:
        """Those not under a lock."""
        return self._tiered.num_evictable(DEVICE)

    @property
    def num_stored(self) -> int:
        """Device pages ever cached."""
        return self._residency.num_stored(DEVICE)

    @property
    def num_dropped(self) -> int:
        """Device pages ever evicted; a flush counts as none."""
        return self._residency.num_dropped(DEVICE)

    def stats(self) -> CacheStats:
        """Counts since the start."""
        resident, stored, dropped = (
            {MEDIUM[tier]: count(tier) for tier in Tier}
            for count in (
                self._residency.num_resident,
                self._residency.num_stored,
                self._residency.num_dropped,
            )
        )
        tier = self._storage
        return CacheStats(
            resident,
            stored,
            dropped,
            self._flights.num_failed,
            self._flights.num_abandoned,
            self._mover.num_without_room,
            tier.num_missed if tier is not None else 0,
            self._num_short,
            tier.backend.stats if tier is not None else None,
        )

    def resident_blocks(self) -> dict[StorageMedium, set[BlockHash]]:
        """The hashes of what each medium holds, computed from the tokens. O(pages): for checks."""
        found: dict[StorageMedium, set[BlockHash]] = {medium: set() for medium in StorageMedium}
        for node, hashes in self._hashes():
            for tier in Tier:
                if node.copies[tier] is not None:
                    found[MEDIUM[tier]].update(hashes)
        return found

    def resident_pages(self, tier: Tier) -> dict[BlockHash, int]:
        """Where in its pool `tier`, DEVICE or HOST, has each block. O(pages): for checks."""
        found: dict[BlockHash, int] = {}
        for node, hashes in self._hashes():
            if (copy := node.copies[tier]) is not None:
                found.update(zip(hashes, copy, strict=True))
        return found

    def _hashes(self) -> Iterator[tuple[Node, list[BlockHash]]]:
        stack = [(root, chain_seed(root.namespace)) for root in self._tree.roots()]
        while stack:
            node, digest = stack.pop()
            seed = namespace_seed(node.namespace, self._hash_format)
            digests = list(block_digests(digest, TokenBytes(node.key), self.page_size))
            yield node, [wire_hash(one, seed) for one in digests]
            end = digests[-1] if digests else digest
            stack += [(child, end) for child in node.children.values()]

    def violations(self) -> list[str]:
        """Every broken invariant, by number; empty when all is well. O(pages): for checks."""
        from hicache.violations import violations

        return violations(self._tiered, self._flights, self._prefetches, self._storage)

    # ---------------------------------------------------------------------------------- inside

    def _path(self, tokens: bytes, namespace: Namespace) -> list[Node]:
        """The nodes that make up the known part of a prompt; splits the last if need be."""
        path, _, partial, shared = self._walk(tokens, namespace)
        if partial is not None:
            path.append(self._tree.split(partial, shared))
        return path

    def _walk(self, tokens: bytes, namespace: Namespace) -> Walk:
        """A prompt leads where it led before (T4), or the node is gone and it is looked for anew."""
        walked = self._walked.get(id(tokens))
        if walked is not None:
            same, node = walked
            if same is tokens and node.parent is not None and node.namespace == namespace:
                return self._tree.walk(tokens, namespace, node)
        return self._tree.walk(tokens, namespace)

    def _touch(self, path: list[Node]) -> None:
        self._tree.now += 1
        now = self._tree.now
        for node in path:
            node.last_access = now
        if self._tiered.ranks_fall:
            for queue in self._tiered.queues.values():
                for node in path:
                    queue.used(node)

    def _check_insert(self, whole: int, pages: PageIndices, first_page: int) -> PageIndices:
        if not 0 <= first_page <= whole:
            raise ValueError(f"first_page: {first_page} is not in 0..{whole}")
        if len(pages) != whole - first_page:
            raise ValueError(
                f"page_indices: {len(pages)} indices for the {whole - first_page} pages from page"
                f" {first_page} on"
            )
        return pages

    def _check_held(self, node: Node) -> None:
        _check_node(node)
        if node.is_root:
            return
        if node not in self._tree:
            raise ValueError(f"{node} is not in the cache any more")
        if node.copies[DEVICE] is None and node.copies[HOST] is None:
            raise ValueError(f"{node} is on neither device nor host any more")

    def _check_unlocked(self, what: str) -> None:
        if self._num_locks:
            raise ValueError(f"{what}: {self._num_locks} locks are held")


def _on_device(path: list[Node], partial: Node | None, shared: int) -> int:
    """How many leading pages of a path the device has."""
    count = 0
    for node in path:
        if node.copies[DEVICE] is None:
            return count
        count += node.num_pages
    if partial is not None and partial.copies[DEVICE] is not None:
        count += shared
    return count


def _check_pools(
    device_pool: PagePool,
    host_pool: HostPool | None,
    storage: StorageBackend | None,
    transfers: Transfers | None,
) -> None:
    for name, pool, kind in (
        ("device_pool", device_pool, PagePool),
        ("host_pool", host_pool, HostPool | None),
    ):
        if not isinstance(pool, kind):
            raise TypeError(f"{name}: a {type(pool).__name__} is none")
    if host_pool is None:
        for name, given in (("storage", storage), ("transfers", transfers)):
            if given is not None:
                raise ValueError(f"{name}: needs a host_pool to read from and write to")
        return
    for name, given, method in (("storage", storage, "attach"), ("transfers", transfers, "submit")):
        if given is not None and not hasattr(given, method):
            raise TypeError(f"{name}: a {type(given).__name__} is none")
    for field in ("page_size", "shape"):
        device, host = getattr(device_pool, field), getattr(host_pool, field)
        if device != host:
            raise ValueError(f"host_pool: {field} {host}, the device pool has {device}")


def _check_prefetch(prefetch: Prefetch) -> None:
    if not isinstance(prefetch, Prefetch):
        raise TypeError(f"prefetch: a {type(prefetch).__name__} is not a Prefetch")


def _check_node(node: Node) -> None:
    if not isinstance(node, Node):
        raise TypeError(f"node: a {type(node).__name__} is not a Node, as `match.node` is")


def _check_namespace(namespace: Namespace) -> None:
    if type(namespace) is not Namespace:
        raise TypeError(f"namespace: {namespace!r} is not a Namespace")
