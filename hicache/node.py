"""A stretch of the radix tree: consecutive pages of tokens, with the copies that hold their KV."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from hicache.tier import NUM_TIERS
from kvevents.namespace import Namespace

__all__ = ["Copy", "Node", "PageIndices"]

PageIndices: TypeAlias = "array[int]"
"""Page indices into a pool, an array of typecode q; torch.frombuffer views it as int64 for free."""

Copy: TypeAlias = "PageIndices | range"
"""A node's pages on a tier, one for each of its own. On a storage tier, whose pages have keys and no
indices, a range of the right length."""


class Node:
    """Opaque to an engine: take it from `match_prefix` or `insert`, give it to `lock` and `unlock`.

    `copies[tier]` are the node's pages on that tier, or None. Only `Residency` sets them.
    `num_held[tier]` counts the children that have a copy on that tier.
    """

    __slots__ = (
        "children",
        "copies",
        "digests",
        "first_id",
        "hits",
        "host_pins",
        "host_ref",
        "key",
        "last_access",
        "lock_ref",
        "moves",
        "moving",
        "namespace",
        "num_held",
        "num_pages",
        "parent",
        "pins",
        "priority",
        "told",
    )

    def __init__(
        self, parent: Node | None, key: bytes, num_pages: int, first_id: int, namespace: Namespace
    ) -> None:
        self.parent = parent
        self.key = key
        self.num_pages = num_pages
        self.first_id = first_id
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.copies: list[Copy | None] = [None] * NUM_TIERS
        self.num_held = [0] * NUM_TIERS
        self.moving = 0
        """A bit for each tier to which its pages are on their way."""
        self.pins = 0
        self.moves = 0
        """Locks on this very node, by requests and by what is on its way."""
        self.lock_ref = 0
        """Those and its descendants'. Protects the device and the host copy."""
        self.host_pins = 0
        self.host_ref = 0
        """The same, protecting the host copy alone."""
        self.last_access = 0
        self.hits = 0
        """Inserts that went through it."""
        self.priority = 0
        self.digests: bytes | None = None
        """Its pages' 32-byte digests, once storage needed them."""
        self.told = 0
        """The telling in which its blocks were recorded."""

    @property
    def is_root(self) -> bool:
        """Whether it stands for an empty prompt of its namespace."""
        return not self.key

    @property
    def resident(self) -> bool:
        """Whether at least one tier has a copy."""
        return self.copies.count(None) < NUM_TIERS

    def __repr__(self) -> str:
        tiers = [i for i, copy in enumerate(self.copies) if copy is not None]
        return f"<Node ids {self.first_id}+{self.num_pages} tiers {tiers} lock_ref {self.lock_ref}>"
