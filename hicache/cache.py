"""The cache an engine talks to: match, allocate, insert, lock, evict, flush.

A request: `match_prefix`, `lock` the node, `allocate` pages for the rest, compute, `insert`, free the
pages that turned out to be there already, `unlock`. Each step of the scheduler ends with the link
taking the records.

A request that goes on after an `insert` (the next chunk of a prefill, decoding) locks the insertion's
node and unlocks the one it had, or its pages may be evicted under it. Where the insert found pages
that were there already, `match_prefix` tells the cache's own.

One thread. Only whole pages are cached; the tail of a prompt that does not fill a page is not.
"""

from __future__ import annotations

import operator
from array import array
from dataclasses import dataclass
from typing import Any

from hicache.eviction import LRU, EvictionPolicy, EvictionQueue
from hicache.node import Node, PageIndices
from hicache.pool import PagePool, as_pages
from hicache.recorder import NullRecorder, Recorder, ResidencyRecorder
from hicache.residency import Residency
from hicache.tier import MEDIUM, Tier
from hicache.tree import RadixTree
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

__all__ = ["HiRadixCache", "Insertion", "Match"]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt.

    `page_indices`: its device pages in order, a copy. `node`: its end; lock it to keep the prefix.
    """

    page_indices: PageIndices
    node: Node
    page_size: int

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""
        return len(self.page_indices)

    @property
    def prefix_len(self) -> int:
        """Tokens of the prefix."""
        return len(self.page_indices) * self.page_size


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of an insert.

    `num_existing`: how many leading pages of the prompt the cache held already. Of the pages the
    caller brought for those, the ones that are not the cache's own are duplicates: still the
    caller's, to free. `node`: the end of the prompt's whole pages.
    """

    num_existing: int
    node: Node


class HiRadixCache:
    """A prefix cache over the pages of `device_pool`, which it shares with the caller.

    A page is free, the caller's (allocated, not inserted) or the cache's (inserted, not evicted).
    `events`: whether changes of residency are recorded. `hash_format`: see `kvevents.hashing`.
    """

    def __init__(
        self,
        device_pool: PagePool,
        *,
        events: bool = True,
        eviction: EvictionPolicy | None = None,
        hash_format: HashFormat = HashFormat.SGLANG,
    ) -> None:
        self.page_size = device_pool.page_size
        self.device_pool = device_pool
        self._hash_format = hash_format
        self._tree = RadixTree(self.page_size)
        self._recorder: ResidencyRecorder = Recorder(self._tree) if events else NullRecorder()
        self._residency = Residency(self._recorder)
        self._evictable = EvictionQueue(Tier.DEVICE, eviction or LRU())
        self._materializer: Materializer | None = None
        self._time = 0

    @property
    def hash_format(self) -> HashFormat:
        """How the blocks' hashes are made."""
        return self._hash_format

    # -------------------------------------------------------------------------------- requests

    def match_prefix(self, tokens: Any, namespace: Namespace = BASE) -> Match:
        """The longest cached prefix of `tokens`, in whole pages; counts as a use of it.

        May split a node, which is silent. Raises TypeError for a namespace that is none, and what
        `pack_tokens` raises.
        """
        _check_namespace(namespace)
        path, num_pages, partial, shared = self._tree.walk(pack_tokens(tokens), namespace)
        if partial is not None:
            path.append(self._tree.split(partial, shared))
        self._touch(path)
        pages = array("q")
        for node in path:
            copy = node.copies[Tier.DEVICE]
            assert copy is not None, "R2: the device tier is prefix-closed"
            pages += copy
        assert len(pages) == num_pages, "R1"
        return Match(pages, path[-1] if path else self._tree.root(namespace), self.page_size)

    def allocate(self, num_pages: int) -> PageIndices | None:
        """`num_pages` device pages for the caller, evicting as needed.

        None, and nothing evicted, when not even evicting all that is unlocked would do. Raises
        ValueError for a negative number.
        """
        num_pages = operator.index(num_pages)
        allocator = self.device_pool.allocator
        short = num_pages - allocator.num_free
        if short > self.num_evictable:
            return None
        if short > 0:
            self.evict(short)
        return allocator.allocate(num_pages)

    def insert(
        self,
        tokens: Any,
        page_indices: Any,
        namespace: Namespace = BASE,
        *,
        first_page: int = 0,
    ) -> Insertion:
        """Cache the whole pages of `tokens`.

        `page_indices[i]` holds page `first_page + i` of the prompt; the pages before `first_page` are
        in the cache already (matched and locked). Pages that are new become the cache's. Counts as a
        use of the whole prompt.

        Raises ValueError, with nothing changed, when the number of indices is not that of the pages
        from `first_page` on, when an index is no page of the pool, or when the pages before
        `first_page` are not in the cache. Raises TypeError for a namespace that is none, and what
        `pack_tokens` raises.
        """
        _check_namespace(namespace)
        packed = pack_tokens(tokens)
        page_bytes = self._tree.page_bytes
        whole = len(packed) // page_bytes
        pages = self._check_insert(whole, as_pages(page_indices), first_page)
        path, existing, partial, shared = self._tree.walk(packed, namespace)
        if existing < first_page:
            raise ValueError(f"first_page: {first_page}, but only {existing} pages are cached")
        if partial is not None:
            path.append(self._tree.split(partial, shared))
        end = path[-1] if path else self._tree.root(namespace)
        if existing < whole:
            end = self._tree.add(end, packed[existing * page_bytes : whole * page_bytes])
            path.append(end)
            self._residency.store(end, Tier.DEVICE, pages[existing - first_page :])
        self._touch(path)
        self._evictable.offer(end)
        return Insertion(existing, end)

    def free(self, page_indices: Any) -> None:
        """Give back pages that are the caller's: duplicates, or those of an aborted request.

        Raises ValueError, with none taken, for indices that are no pages of the pool, and for more
        pages than are out. That a page is the caller's is not checked.
        """
        self.device_pool.allocator.free(as_pages(page_indices))

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends at `node` from being evicted, until `unlock`.

        Raises ValueError for a node that is not in the cache any more.
        """
        self._check_held(node)
        node.pins += 1
        at: Node | None = node
        while at is not None:
            at.lock_ref += 1
            if at.lock_ref == 1:
                self._residency.locked(at)
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node. Raises ValueError when it has none."""
        self._check_held(node)
        if not node.pins:
            raise ValueError(f"unlock: {node} is not locked")
        node.pins -= 1
        at: Node | None = node
        while at is not None:
            at.lock_ref -= 1
            if not at.lock_ref:
                self._residency.unlocked(at)
                self._evictable.offer(at)
            at = at.parent

    # -------------------------------------------------------------------------------- eviction

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` unlocked device pages, from the leaves inwards; returns how many it freed.

        A leaf larger than what is left to free loses only its last pages. Raises ValueError for a
        negative number.
        """
        left = num_pages = operator.index(num_pages)
        if num_pages < 0:
            raise ValueError(f"num_pages: {num_pages} is negative")
        while left:
            node = self._evictable.pop()
            if node is None:
                break
            if node.num_pages > left:
                self._tree.split(node, node.num_pages - left)
            left -= node.num_pages
            self._drop_device(node)
        return num_pages - left

    def flush(self) -> None:
        """Drop everything. Raises ValueError, with nothing changed, while a node is locked."""
        if locked := self.num_protected:
            raise ValueError(f"flush: {locked} pages are locked")
        for node in self._tree.nodes():
            if (pages := node.copies[Tier.DEVICE]) is not None:
                self.device_pool.allocator.take_back(pages)
        self._evictable.clear()
        self._tree.clear()
        self._residency.clear()

    def _drop_device(self, node: Node) -> None:
        parent = node.parent
        self.device_pool.allocator.take_back(self._residency.drop(node, Tier.DEVICE))
        if not node.resident and not node.children:
            self._tree.remove(node)
        if parent is not None:
            self._evictable.offer(parent)

    # ---------------------------------------------------------------------------------- events

    def take_records(self) -> list[Record]:
        """The residency records since the last call, for a sidecar to make events of.

        A cache's changes are taken either as records or as events, not by turns.
        """
        return self._recorder.take()

    def take_events(self) -> list[Event]:
        """The events since the last call, made in this process."""
        if self._materializer is None:
            self._materializer = Materializer(self.page_size, self._hash_format)
        return self._materializer.apply(self._recorder.take())

    @property
    def retelling(self) -> bool:
        """Whether a re-telling is under way."""
        return self._recorder.retelling

    def begin_retell(self) -> None:
        """Drop the records not taken yet and tell the resident state anew, beginning with a clear."""
        self._recorder.begin_retell()

    def retell(self, num_blocks: int) -> None:
        """Record at most `num_blocks` more of the re-telling, parents before children."""
        self._recorder.retell(num_blocks)

    # ---------------------------------------------------------------------------------- counts

    @property
    def num_resident(self) -> int:
        """Device pages in the cache."""
        return self._residency.num_resident(Tier.DEVICE)

    @property
    def num_protected(self) -> int:
        """Those under a lock."""
        return self._residency.num_protected(Tier.DEVICE)

    @property
    def num_evictable(self) -> int:
        """Those not under a lock."""
        return self.num_resident - self.num_protected

    @property
    def num_stored(self) -> int:
        """Device pages ever cached."""
        return self._residency.num_stored(Tier.DEVICE)

    @property
    def num_dropped(self) -> int:
        """Device pages ever evicted; a flush counts as none."""
        return self._residency.num_dropped(Tier.DEVICE)

    def resident_blocks(self) -> dict[StorageMedium, set[BlockHash]]:
        """The hashes of what each medium holds, computed from the tokens. O(pages): for checks."""
        found: dict[StorageMedium, set[BlockHash]] = {medium: set() for medium in StorageMedium}
        stack = [(root, chain_seed(root.namespace)) for root in self._tree.roots()]
        while stack:
            node, digest = stack.pop()
            seed = namespace_seed(node.namespace, self._hash_format)
            digests = list(block_digests(digest, TokenBytes(node.key), self.page_size))
            for tier in Tier:
                if node.copies[tier] is not None:
                    found[MEDIUM[tier]].update(wire_hash(one, seed) for one in digests)
            end = digests[-1] if digests else digest
            stack += [(child, end) for child in node.children.values()]
        return found

    def violations(self) -> list[str]:
        """Every broken invariant, by number; empty when all is well. O(pages): for checks."""
        from hicache.violations import violations

        return violations(self._tree, self._residency, self._evictable, self.device_pool.allocator)

    # ---------------------------------------------------------------------------------- inside

    def _touch(self, path: list[Node]) -> None:
        self._time += 1
        for node in path:
            node.last_access = self._time

    def _check_insert(self, whole: int, pages: PageIndices, first_page: int) -> PageIndices:
        if not 0 <= first_page <= whole:
            raise ValueError(f"first_page: {first_page} is not in 0..{whole}")
        if len(pages) != whole - first_page:
            raise ValueError(
                f"page_indices: {len(pages)} indices for the {whole - first_page} pages from page"
                f" {first_page} on"
            )
        self.device_pool.allocator.check(pages)
        return pages

    def _check_held(self, node: Node) -> None:
        if node not in self._tree:
            raise ValueError(f"{node} is not in the cache any more")


def _check_namespace(namespace: Namespace) -> None:
    if type(namespace) is not Namespace:
        raise TypeError(f"namespace: {namespace!r} is not a Namespace")
