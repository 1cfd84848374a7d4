"""The radix tree: where prompts lead, and what a split keeps."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.node import Node
from hicache.tier import Tier
from hicache.tree import RadixTree
from kvevents import BASE, Namespace, pack_tokens

PAGE_SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), max_size=16)


def packed(tokens: list[int]) -> bytes:
    """The prompt as the tree takes it."""
    return bytes(pack_tokens(tokens))


def insert(tree: RadixTree, tokens: list[int]) -> Node:
    """Put a prompt's whole pages into the tree, as a cache does; its end."""
    text = packed(tokens)
    path, num_pages, partial, shared = tree.walk(text, BASE)
    if partial is not None:
        path.append(tree.split(partial, shared))
    end = path[-1] if path else tree.root(BASE)
    rest = text[num_pages * tree.page_bytes : len(text) - len(text) % tree.page_bytes]
    return tree.add(end, rest) if rest else end


def depth_of(node: Node) -> int:
    """Pages from the start of the prompt to the end of `node`."""
    return node.num_pages + (0 if node.parent is None else depth_of(node.parent))


@given(prompts=st.lists(PROMPTS, max_size=8), asked=PROMPTS)
def test_a_walk_finds_the_longest_common_prefix(prompts: list[list[int]], asked: list[int]) -> None:
    """A prompt leads exactly as far as it has whole pages in common with one of those inserted."""
    tree = RadixTree(PAGE_SIZE)
    for tokens in prompts:
        insert(tree, tokens)
    path, num_pages, partial, shared = tree.walk(packed(asked), BASE)
    assert num_pages == max((common(asked, tokens) for tokens in prompts), default=0)
    assert sum(node.num_pages for node in path) + shared == num_pages
    assert (partial is None) == (shared == 0)
    assert partial is None or 0 < shared < partial.num_pages


def common(left: list[int], right: list[int]) -> int:
    """Whole pages with which both begin."""
    most = min(len(left), len(right)) // PAGE_SIZE
    return next(n for n in range(most, -1, -1) if left[: n * PAGE_SIZE] == right[: n * PAGE_SIZE])


@given(prompts=st.lists(PROMPTS, max_size=8))
def test_every_page_is_in_the_tree_once(prompts: list[list[int]]) -> None:
    """The tree has as many pages as there are different page-aligned prefixes, each with its id."""
    tree = RadixTree(PAGE_SIZE)
    for tokens in prompts:
        insert(tree, tokens)
    prefixes = {
        tuple(tokens[:end])
        for tokens in prompts
        for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)
    }
    ids = [node.first_id + i for node in tree.nodes() for i in range(node.num_pages)]
    assert len(ids) == len(set(ids)) == len(prefixes)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("shared", range(1, 9))
def test_a_walk_stops_inside_a_node(length: int, shared: int) -> None:
    """Wherever a prompt leaves a node, the pages up to there are found."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, list(range(PAGE_SIZE * length)))
    asked = [*range(PAGE_SIZE * min(shared, length)), 99, 99, 99]
    path, num_pages, partial, part = tree.walk(packed(asked), BASE)
    assert num_pages == min(shared, length)
    if shared < length:
        assert (path, partial, part) == ([], node, shared)
    else:
        assert (path, partial, part) == ([node], None, 0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_split_keeps_ids_locks_and_copies(cut: int) -> None:
    """The halves have the node's ids, pages, tokens and use; the lower half is the node itself."""
    tree = RadixTree(PAGE_SIZE)
    insert(tree, [9, 9])
    node = insert(tree, list(range(8)))
    below = insert(tree, list(range(10)))
    node.copies[Tier.DEVICE] = array("q", [7, 5, 3, 1])
    node.num_held[Tier.DEVICE] = 1
    node.copies[Tier.DISK] = range(4)
    node.lock_ref, node.pins, node.last_access, node.told = 2, 1, 6, 4
    node.host_ref, node.host_pins, node.moving, node.hits, node.priority = 3, 1, 2, 5, 7
    upper = tree.split(node, cut)
    assert (upper.first_id, upper.num_pages) == (1, cut)
    assert (node.first_id, node.num_pages) == (1 + cut, 4 - cut)
    assert upper.key + node.key == packed(list(range(8)))
    for half, pages in ((upper, [7, 5, 3, 1][:cut]), (node, [7, 5, 3, 1][cut:])):
        disk = half.copies[Tier.DISK]
        assert half.copies == [array("q", pages), None, disk, None]
        assert isinstance(disk, range) and len(disk) == len(pages)
    assert (upper.num_held, node.num_held) == ([1, 0, 1, 0], [1, 0, 0, 0])
    assert (upper.lock_ref, upper.pins, node.lock_ref, node.pins) == (2, 0, 2, 1)
    assert (upper.last_access, upper.told) == (node.last_access, node.told) == (6, 4)
    assert (upper.host_ref, upper.host_pins, node.host_ref, node.host_pins) == (3, 0, 3, 1)
    for half in (upper, node):
        assert (half.moving, half.moves, half.hits, half.priority) == (2, 0, 5, 7)
    assert node.parent is upper and list(upper.children.values()) == [node]
    assert below.parent is node
    assert tree.walk(packed(list(range(10))), BASE).path == [upper, node, below]


@pytest.mark.parametrize("cut", [1, 2])
def test_a_split_divides_the_digests(cut: int) -> None:
    """Each half keeps the digests of its own pages, so that none is computed again."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, list(range(6)))
    node.digests = bytes(range(96))
    upper = tree.split(node, cut)
    assert upper.digests == bytes(range(32 * cut))
    assert node.digests == bytes(range(32 * cut, 96))


def test_a_split_is_announced_with_both_halves_in_place() -> None:
    """Whoever asked is called with the upper half, once it is the lower half's parent."""
    tree, seen = RadixTree(PAGE_SIZE), list[tuple[int, int]]()
    tree.on_split = lambda upper: seen.extend(
        (upper.num_pages, child.num_pages) for child in upper.children.values()
    )
    tree.split(insert(tree, list(range(8))), 3)
    assert seen == [(3, 1)]


def test_a_stretch_is_found_again_after_splits() -> None:
    """The pages that end with a node are the same stretch, in as many nodes as splits have made."""
    tree = RadixTree(PAGE_SIZE)
    above = insert(tree, [9, 9])
    node = insert(tree, [9, 9, *range(8)])
    assert tree.stretch(node, 4) == [node]
    middle = tree.split(node, 2)
    first = tree.split(middle, 1)
    assert tree.stretch(node, 4) == [first, middle, node]
    assert tree.stretch(node, 5) == [above, first, middle, node]
    assert tree.stretch(node, 0) == []


@pytest.mark.parametrize("num_pages", [1, 4])
def test_a_stretch_begins_with_a_node(num_pages: int) -> None:
    """One that begins inside a node, or above the tree, is our own fault."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, list(range(6)))
    with pytest.raises(AssertionError, match="T4"):
        tree.stretch(node, num_pages)


@pytest.mark.parametrize("cut", [0, 4, 5, -1])
def test_a_split_outside_a_node_is_our_own_fault(cut: int) -> None:
    """A split that would leave a half empty fails by the invariant's number, changing nothing."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, list(range(8)))
    with pytest.raises(AssertionError, match="T1"):
        tree.split(node, cut)
    assert (len(tree), node.num_pages) == (1, 4)


def test_only_a_leaf_is_removed() -> None:
    """Removing a node with children fails by the invariant's number."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, [1, 1])
    insert(tree, [1, 1, 2, 2])
    with pytest.raises(AssertionError, match="T1"):
        tree.remove(node)
    assert len(tree) == 2


def test_a_root_is_kept_as_long_as_it_has_children() -> None:
    """Asking for a root keeps nothing; a root goes with its last child."""
    tree = RadixTree(PAGE_SIZE)
    salted = Namespace(cache_salt="a")
    assert tree.root(salted).namespace == salted
    assert list(tree.roots()) == []
    node = tree.add(tree.root(salted), packed([1, 1]))
    assert [root.namespace for root in tree.roots()] == [salted]
    assert tree.root(salted) is node.parent
    tree.remove(node)
    assert list(tree.roots()) == []


def test_membership_is_being_in_the_tree_now() -> None:
    """A node is in the tree from `add` to `remove` or `clear`; roots always are."""
    tree = RadixTree(PAGE_SIZE)
    first, second = insert(tree, [1, 1]), insert(tree, [2, 2])
    assert first in tree and second in tree and tree.root(BASE) in tree
    tree.remove(first)
    assert first not in tree
    tree.clear()
    assert second not in tree
    assert (len(tree), list(tree.roots()), tree.nodes()) == (0, [], [])


def test_ids_are_never_used_again() -> None:
    """After a removal and a clear, new blocks get new ids."""
    tree = RadixTree(PAGE_SIZE)
    tree.remove(insert(tree, [1, 1]))
    assert insert(tree, [1, 1, 2, 2]).first_id == 1
    tree.clear()
    assert insert(tree, [1, 1]).first_id == 3


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_a_token(page_size: int) -> None:
    """A page size below one is refused, by name and value."""
    with pytest.raises(ValueError, match=f"page_size: {page_size} is below 1"):
        RadixTree(page_size)


def test_a_walk_changes_nothing() -> None:
    """Walking part of a node, beyond it and past it leaves one node with its depth."""
    tree = RadixTree(PAGE_SIZE)
    node = insert(tree, list(range(8)))
    for tokens in (list(range(4)), list(range(12)), [5, 5]):
        tree.walk(packed(tokens), BASE)
    assert (len(tree), depth_of(node)) == (1, 4)
