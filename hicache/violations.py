"""The cache's invariants as one function, which returns every violation by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hicache.flight import Flights
from hicache.node import Node
from hicache.prefetch import Prefetches
from hicache.storage_tier import StorageTier
from hicache.tier import Tier
from hicache.tiered import TieredTree
from hicache.tree import RadixTree

__all__ = ["violations"]


def violations(
    tiered: TieredTree,
    flights: Flights,
    prefetches: Prefetches | None = None,
    storage: StorageTier | None = None,
) -> list[str]:
    """T1–T3 of the tree, R1–R3 of residency, L1 of the storage tier, and of the whole:

    C1  Every page of a pool is in one place: free, lent, in one node's copy, or some flight's.
    C2  A node has a copy, and one that is evictable is queued for eviction.
    C3  What is on its way, and nothing else, is marked and held on its nodes.
    """
    tree = tiered.tree
    nodes = [*tree.roots(), *tree.nodes()]
    found = [problem for node in nodes for problem in _of_node(tree, node)]
    found += [problem for node in tree.nodes() for problem in _of_copies(tiered, node)]
    found += _of_ids(tree)
    found += _of_counts(tiered)
    found += _of_pages(tiered, flights, prefetches)
    found += _of_flights(tiered, flights, prefetches)
    if storage is not None:
        found += _of_storage(tree, storage)
    return found


def _of_node(tree: RadixTree, node: Node) -> Iterator[str]:
    for first_page, child in node.children.items():
        if child.parent is not node or child.key[: tree.page_bytes] != first_page:
            yield f"T1: {child} is not its parent's child under its first page"
        if child.namespace != node.namespace:
            yield f"T1: {child} is in another namespace than its parent"
        if child not in tree:
            yield f"T1: {child} hangs in the tree and is not counted"
    children = node.children.values()
    if node.lock_ref != node.pins + node.moves + sum(child.lock_ref for child in children):
        yield f"T3: {node} has {node.pins} pins, {node.moves} moves, and other locks below it"
    if node.host_ref != node.host_pins + sum(child.host_ref for child in children):
        yield f"T3: {node} has {node.host_pins} host pins, and other host_refs below it"
    for tier in Tier:
        held = sum(child.copies[tier] is not None for child in children)
        if held != node.num_held[tier]:
            yield f"R3: {node} counts {node.num_held[tier]} children on {tier.name}, has {held}"
    if node.parent is None and not node.is_root:
        yield f"T1: {node} is counted and has no parent"
    if node.parent is not None and (
        not node.key or len(node.key) != node.num_pages * tree.page_bytes
    ):
        yield f"T1: {node} has a key of {len(node.key)} bytes"


def _of_copies(tiered: TieredTree, node: Node) -> Iterator[str]:
    parent = node.parent
    for tier in Tier:
        pages = node.copies[tier]
        if pages is None:
            continue
        if len(pages) != node.num_pages:
            yield f"R1: {node} has {len(pages)} pages on {tier.name}"
        if parent is not None and not parent.is_root and parent.copies[tier] is None:
            yield f"R2: {node} is on {tier.name}, its parent is not"
    if not node.resident:
        yield f"C2: {node} holds nothing"
    for tier, queue in tiered.queues.items():
        if queue.evictable(node) and node not in queue:
            yield f"C2: {node} is evictable from {tier.name} and not queued"


def _of_ids(tree: RadixTree) -> Iterator[str]:
    end = -1
    for node in sorted(tree.nodes(), key=lambda node: node.first_id):
        if node.first_id < end:
            yield f"T2: {node} shares ids with another"
        end = node.first_id + node.num_pages


def _of_counts(tiered: TieredTree) -> Iterator[str]:
    for tier in Tier:
        held = [node for node in tiered.tree.nodes() if node.copies[tier] is not None]
        resident = sum(node.num_pages for node in held)
        protected = sum(node.num_pages for node in held if _locked(node, tier))
        counted = (tiered.residency.num_resident(tier), tiered.residency.num_protected(tier))
        if counted != (resident, protected):
            yield f"R3: {tier.name} counts {counted}, has {(resident, protected)}"


def _locked(node: Node, tier: Tier) -> bool:
    match tier:
        case Tier.DEVICE:
            return node.lock_ref > 0
        case Tier.HOST:
            return node.lock_ref + node.host_ref > 0
        case _:
            return False


def _of_pages(tiered: TieredTree, flights: Flights, prefetches: Prefetches | None) -> Iterator[str]:
    for tier, allocator in tiered.allocators.items():
        places: Counter[int] = Counter(allocator.free_pages())
        places.update(allocator.lent_pages())
        for node in tiered.tree.nodes():
            places.update(node.copies[tier] or ())
        for flight in flights:
            if flight.owned_tier is tier:
                places.update(flight.owned)
        if tier is Tier.HOST:
            for prefetch in prefetches or ():
                places.update(prefetch.pages)
        for page, count in places.items():
            if count > 1:
                yield f"C1: {tier.name} page {page} is in {count} places"
            if not 0 <= page < allocator.num_pages:
                yield f"C1: {tier.name} page {page} is not in the pool"
        if len(places) < allocator.num_pages:
            yield f"C1: {allocator.num_pages - len(places)} pages of {tier.name} are nowhere"


def _of_flights(
    tiered: TieredTree, flights: Flights, prefetches: Prefetches | None
) -> Iterator[str]:
    moving: Counter[Node] = Counter()
    moves: Counter[Node] = Counter()
    host_pins: Counter[Node] = Counter()
    for flight in flights:
        if flight.abandoned:
            continue
        for node in tiered.tree.stretch(flight.node, flight.num_pages):
            if moving[node] & 1 << flight.tier:
                yield f"C3: {node} goes to {flight.tier.name} twice"
            moving[node] |= 1 << flight.tier
        (moves if flight.tier in tiered.allocators else host_pins)[flight.node] += 1
    moves.update(one.base for one in prefetches or () if one.holds)
    for node in tiered.tree.nodes():
        marked = (node.moving, node.moves, node.host_pins)
        if marked != (moving[node], moves[node], host_pins[node]):
            yield f"C3: {node} is marked {marked} (moving, moves, host_pins)"


def _of_storage(tree: RadixTree, storage: StorageTier) -> Iterator[str]:
    known = 0
    for node in tree.nodes():
        if node.copies[storage.tier] is not None:
            known += node.num_pages
            if any(storage.directory.get(key) is not node for key in storage.keys(node)):
                yield f"L1: the directory does not lead to {node}"
    if known != len(storage.directory):
        yield f"L1: the directory has {len(storage.directory)} keys, the tree {known}"
