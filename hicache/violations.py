"""The cache's invariants as one function, which returns every violation by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hicache.allocator import PageAllocator
from hicache.eviction import EvictionQueue
from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import Tier
from hicache.tree import RadixTree

__all__ = ["violations"]


def violations(
    tree: RadixTree, residency: Residency, queue: EvictionQueue, allocator: PageAllocator
) -> list[str]:
    """T1–T3 of the tree, R1–R3 of residency, and of the whole:

    C1  No page is in two places: in two copies, twice in one, or in a copy and free.
    C2  A node without a copy has children, and every evictable node is queued for eviction.
    """
    nodes = [*tree.roots(), *tree.nodes()]
    found = [problem for node in nodes for problem in _of_node(tree, queue, node)]
    found += _of_ids(tree)
    found += _of_counts(tree, residency)
    found += _of_pages(tree, allocator)
    return found


def _of_node(tree: RadixTree, queue: EvictionQueue, node: Node) -> Iterator[str]:
    for first_page, child in node.children.items():
        if child.parent is not node or child.key[: tree.page_bytes] != first_page:
            yield f"T1: {child} is not its parent's child under its first page"
        if child.namespace != node.namespace:
            yield f"T1: {child} is in another namespace than its parent"
        if child not in tree:
            yield f"T1: {child} hangs in the tree and is not counted"
    below = sum(child.lock_ref for child in node.children.values())
    if node.lock_ref != node.pins + below:
        yield f"T3: {node} has {node.pins} pins and {below} locks below it"
    for tier in Tier:
        held = sum(child.copies[tier] is not None for child in node.children.values())
        if held != node.num_held[tier]:
            yield f"R3: {node} counts {node.num_held[tier]} children on {tier.name}, has {held}"
    parent = node.parent
    if parent is None:
        if not node.is_root:
            yield f"T1: {node} is counted and has no parent"
        return
    if not node.key or len(node.key) != node.num_pages * tree.page_bytes:
        yield f"T1: {node} has a key of {len(node.key)} bytes"
    for tier in Tier:
        pages = node.copies[tier]
        if pages is not None and len(pages) != node.num_pages:
            yield f"R1: {node} has {len(pages)} pages on {tier.name}"
    if (
        node.copies[Tier.DEVICE] is not None
        and not parent.is_root
        and parent.copies[Tier.DEVICE] is None
    ):
        yield f"R2: {node} is on the device, its parent is not"
    if not node.resident and not node.children:
        yield f"C2: {node} holds nothing and leads nowhere"
    if queue.evictable(node) and node not in queue:
        yield f"C2: {node} is evictable and not queued"


def _of_ids(tree: RadixTree) -> Iterator[str]:
    end = -1
    for node in sorted(tree.nodes(), key=lambda node: node.first_id):
        if node.first_id < end:
            yield f"T2: {node} shares ids with another"
        end = node.first_id + node.num_pages


def _of_counts(tree: RadixTree, residency: Residency) -> Iterator[str]:
    for tier in Tier:
        held = [node for node in tree.nodes() if node.copies[tier] is not None]
        resident = sum(node.num_pages for node in held)
        protected = sum(node.num_pages for node in held if node.lock_ref)
        counted = (residency.num_resident(tier), residency.num_protected(tier))
        if counted != (resident, protected):
            yield f"R3: {tier.name} counts {counted}, has {(resident, protected)}"


def _of_pages(tree: RadixTree, allocator: PageAllocator) -> Iterator[str]:
    places = Counter(allocator.free_pages())
    for node in tree.nodes():
        places.update(node.copies[Tier.DEVICE] or ())
    for page, count in places.items():
        if count > 1:
            yield f"C1: page {page} is in {count} places"
        if not 0 <= page < allocator.num_pages:
            yield f"C1: page {page} is not in the pool"
