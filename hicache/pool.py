"""KV memory of the device tier, in pages."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from hicache.allocator import PageAllocator
from hicache.node import PageIndices

__all__ = ["KVShape", "PagePool"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like: multi-head attention, K and V for each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is below 1")


class PagePool:
    """`k[layer]` and `v[layer]` have shape (num_pages, page_size, num_kv_heads, head_dim).

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self, num_pages: int, page_size: int, shape: KVShape, device: str | torch.device = "cpu"
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size} is below 1")
        self.allocator = PageAllocator(num_pages)
        self.num_pages, self.page_size, self.shape = num_pages, page_size, shape
        self.device = torch.device(device)
        size = (num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = (
            [
                torch.zeros(size, dtype=shape.dtype, device=self.device)
                for _ in range(shape.num_layers)
            ]
            for _ in range(2)
        )

    @property
    def bytes_per_page(self) -> int:
        """K and V of all layers."""
        shape = self.shape
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        return self.page_size * per_token * shape.dtype.itemsize

    def index(self, pages: PageIndices) -> torch.Tensor:
        """The indices as int64 on the pool's device; on a CPU a view of `pages`."""
        if not pages:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.frombuffer(pages, dtype=torch.int64).to(self.device)

    def write(self, layer: int, pages: PageIndices, k: torch.Tensor, v: torch.Tensor) -> None:
        """Fill `pages` of one layer from tensors (len(pages), page_size, num_kv_heads, head_dim)."""
        index = self.index(pages)
        self.k[layer].index_copy_(0, index, k)
        self.v[layer].index_copy_(0, index, v)

    def read(self, layer: int, pages: PageIndices) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V of `pages` of one layer, shaped as `write` takes them."""
        index = self.index(pages)
        return self.k[layer].index_select(0, index), self.v[layer].index_select(0, index)


def as_pages(indices: object) -> PageIndices:
    """Page indices from an array, a tensor or a sequence of ints.

    Raises TypeError for others, and ValueError for an int that no index can be.
    """
    if isinstance(indices, array) and indices.typecode == "q":
        return indices
    if isinstance(indices, torch.Tensor):
        indices = indices.tolist()
    if not isinstance(indices, (list, tuple, array, range)):
        raise TypeError(f"page_indices: {type(indices).__name__} is not a sequence of ints")
    try:
        return array("q", indices)
    except OverflowError:
        wrong = next(index for index in indices if not -(2**63) <= index < 2**63)
        raise ValueError(f"page index: {wrong} is not in 0..{2**63 - 1}") from None
