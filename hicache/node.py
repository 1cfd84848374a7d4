"""A stretch of the radix tree: consecutive pages of tokens, with the copies that hold their KV."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from hicache.tier import NUM_TIERS
from kvevents.namespace import Namespace

__all__ = ["Node", "PageIndices"]

PageIndices: TypeAlias = "array[int]"
"""Page indices into a pool, an array of typecode q; torch.frombuffer views it as int64 for free."""


class Node:
    """Opaque to an engine: take it from `match_prefix` or `insert`, give it to `lock` and `unlock`.

    `copies[tier]` are the node's pages on that tier, or None. Only `Residency` sets them.
    `num_held[tier]` counts the children that have a copy on that tier.
    """

    __slots__ = (
        "children",
        "copies",
        "first_id",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "num_held",
        "num_pages",
        "parent",
        "pins",
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
        self.copies: list[PageIndices | None] = [None] * NUM_TIERS
        self.num_held = [0] * NUM_TIERS
        self.pins = 0
        """Locks on this very node; lock_ref counts those on its descendants too."""
        self.lock_ref = 0
        self.last_access = 0
        self.told = 0
        """The telling in which its blocks were recorded."""

    @property
    def is_root(self) -> bool:
        """Whether it stands for an empty prompt of its namespace."""
        return not self.key

    @property
    def resident(self) -> bool:
        """Whether at least one tier has a copy."""
        return any(copy is not None for copy in self.copies)

    def __repr__(self) -> str:
        tiers = [i for i, copy in enumerate(self.copies) if copy is not None]
        return f"<Node ids {self.first_id}+{self.num_pages} tiers {tiers} lock_ref {self.lock_ref}>"
