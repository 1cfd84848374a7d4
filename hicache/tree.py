"""The radix tree: tokens, nodes, splits and locks. It knows nothing of tiers, pools or events.

T1  A node's key is one or more whole pages of tokens, and it is its parent's child under its first page.
T2  Every page of the tree has a number of its own, its block id; a node's ids are consecutive.
T3  A node's lock_ref is its own pins and moves and its children's lock_refs together; host_ref is its
    own host_pins and its children's host_refs.
T4  A split changes neither a page's id, lock, copies nor what is on its way. The prompt that ends with a
    node is the same as long as the node is in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hicache.node import Node
from kvevents.hashing import DIGEST_BYTES
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES

__all__ = ["RadixTree", "Walk"]


class Walk(NamedTuple):
    """Where a prompt leads: the nodes it matches whole, then a child it matches in part, if any."""

    path: list[Node]
    num_pages: int
    """Matched pages, those of the partial child included."""
    partial: Node | None
    partial_pages: int


class RadixTree:
    """One tree for each namespace, over pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size} is below 1")
        self.page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._nodes: dict[Node, None] = {}
        self._next_id = 0
        self.now = 0
        """Counts uses; a new node was used now."""
        self.on_split: Callable[[Node], None] | None = None
        """Called with the upper part of each node that is split, if anybody has to know."""

    def __len__(self) -> int:
        """Nodes, without the roots."""
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node.is_root or node in self._nodes

    def nodes(self) -> list[Node]:
        """All nodes but the roots, in the order in which they came to be; a new list."""
        return list(self._nodes)

    def roots(self) -> Iterator[Node]:
        """The roots that have children."""
        return iter(self._roots.values())

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace. One without children is made on demand and not kept."""
        return self._roots.get(namespace) or Node(None, b"", 0, -1, namespace)

    def walk(self, tokens: bytes, namespace: Namespace, known: Node | None = None) -> Walk:
        """Follow a prompt's whole pages as far as the tree goes. Changes nothing.

        `known`: a node of the tree at which the prompt was seen to pass; so far it is not compared again.
        """
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return Walk(path, 0, None, 0)
        page, at = self.page_bytes, 0
        if known is not None:
            path = self.path(known)
            at = sum(one.num_pages for one in path) * page
            node = known
        end = len(tokens) - len(tokens) % page
        while at < end:
            child = node.children.get(tokens[at : at + page])
            if child is None:
                break
            if not tokens.startswith(child.key, at):
                shared = self._shared_pages(child.key, tokens, at, end)
                return Walk(path, at // page + shared, child, shared)
            path.append(child)
            at += len(child.key)
            node = child
        return Walk(path, at // page, None, 0)

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root to `node`."""
        found = []
        at: Node | None = node
        while at is not None and at.key:
            found.append(at)
            at = at.parent
        found.reverse()
        return found

    def add(self, parent: Node, key: bytes) -> Node:
        """A new child below `parent`, with new ids. `key` is whole pages, the first not taken."""
        num_pages = len(key) // self.page_bytes
        node = Node(parent, key, num_pages, self._next_id, parent.namespace)
        node.last_access = self.now
        self._next_id += num_pages
        if parent.is_root:
            self._roots[parent.namespace] = parent
        parent.children[key[: self.page_bytes]] = node
        self._nodes[node] = None
        return node

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut off the first `num_pages` of `node` into a new parent, and return that.

        `node` stays the lower part, so whoever holds it still holds the end of the path.
        """
        parent, cut = node.parent, num_pages * self.page_bytes
        assert parent is not None and 0 < num_pages < node.num_pages, "T1: a split inside a node"
        upper = Node(parent, node.key[:cut], num_pages, node.first_id, node.namespace)
        upper.lock_ref, upper.host_ref, upper.moving = node.lock_ref, node.host_ref, node.moving
        upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
        upper.told = node.told
        if node.digests is not None:
            at = num_pages * DIGEST_BYTES
            upper.digests, node.digests = node.digests[:at], node.digests[at:]
        upper.copies = [copy if copy is None else copy[:num_pages] for copy in node.copies]
        upper.num_held = [int(copy is not None) for copy in node.copies]
        parent.children[node.key[: self.page_bytes]] = upper
        node.copies = [copy if copy is None else copy[num_pages:] for copy in node.copies]
        node.key = node.key[cut:]
        node.num_pages -= num_pages
        node.first_id += num_pages
        node.parent = upper
        upper.children[node.key[: self.page_bytes]] = node
        self._nodes[upper] = None
        if self.on_split is not None:
            self.on_split(upper)
        return upper

    def stretch(self, node: Node, num_pages: int) -> list[Node]:
        """The nodes that make up the `num_pages` pages ending with `node`, from the top.

        Whatever was split since: a split leaves the end where it was. There must be a node boundary.
        """
        found = []
        at: Node | None = node
        while num_pages > 0:
            assert at is not None, "T4: splits keep the end of a stretch"
            found.append(at)
            num_pages -= at.num_pages
            at = at.parent
        assert num_pages == 0, "T4: a stretch begins with a node"
        found.reverse()
        return found

    def remove(self, node: Node) -> None:
        """Take a childless node out; a root left without children goes too."""
        parent = node.parent
        assert parent is not None and not node.children, "T1: only a leaf is removed"
        del parent.children[node.key[: self.page_bytes]]
        del self._nodes[node]
        node.parent = None
        if parent.is_root and not parent.children:
            del self._roots[parent.namespace]

    def clear(self) -> None:
        """Forget every node. Ids go on counting."""
        for node in self._nodes:
            node.parent = None
        self._nodes.clear()
        self._roots.clear()

    def _shared_pages(self, key: bytes, tokens: bytes, at: int, end: int) -> int:
        """How many leading pages of `key` stand at `at`; the first one does."""
        page = self.page_bytes
        low, high = 1, min(len(key), end - at) // page
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(key[low * page : middle * page], at + low * page):
                low = middle
            else:
                high = middle - 1
        return low
