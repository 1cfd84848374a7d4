"""KV memory, in pages: of the device, layer by layer, and of the host, page by page.

A page of KV is `num_planes` pieces: K of every layer, then V of every layer, or one latent a layer. The
device has a tensor for each plane, as attention kernels want it. The host has a page's planes one after
the other, so that a page is one contiguous run of bytes: one copy, one file, one object.
"""

from __future__ import annotations

import mmap
import weakref
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from hicache.allocator import PageAllocator
from hicache.arguments import check_int
from hicache.node import PageIndices

__all__ = ["HostPool", "KVShape", "MLAShape", "PagePool", "Shape", "as_pages"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like under multi-head or grouped-query attention: K and V a layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _check_positive(self, "num_layers", "num_kv_heads", "head_dim")

    @property
    def num_planes(self) -> int:
        """Tensors a token is spread over."""
        return 2 * self.num_layers

    @property
    def plane_shape(self) -> tuple[int, ...]:
        """A token's part of one of them."""
        return (self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class MLAShape:
    """What one token's KV looks like under multi-head latent attention: one latent a layer.

    `latent_dim`: the compressed KV and the rotary part together.
    """

    num_layers: int
    latent_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _check_positive(self, "num_layers", "latent_dim")

    @property
    def num_planes(self) -> int:
        """Tensors a token is spread over."""
        return self.num_layers

    @property
    def plane_shape(self) -> tuple[int, ...]:
        """A token's part of one of them."""
        return (self.latent_dim,)


Shape: TypeAlias = KVShape | MLAShape


class PagePool:
    """The device's pages. `planes[i]` has shape (num_pages, page_size, *shape.plane_shape).

    Raises ValueError for sizes below 1, and for a pool that the device has no room for; TypeError.
    """

    def __init__(
        self, num_pages: int, page_size: int, shape: Shape, device: str | torch.device = "cpu"
    ) -> None:
        _check_pool(num_pages, page_size, shape)
        self.num_pages, self.page_size, self.shape = num_pages, page_size, shape
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: {device!r}: {error}") from None
        if self.device.type == "cpu":
            _check_room("device", num_pages * self.bytes_per_page)
        self.allocator = PageAllocator(num_pages)
        size = (shape.num_planes, num_pages, page_size, *shape.plane_shape)
        try:
            memory = torch.zeros(size, dtype=shape.dtype, device=self.device)
        except (RuntimeError, AssertionError) as error:
            needed = num_pages * self.bytes_per_page
            raise ValueError(f"num_pages: {num_pages} pages need {needed} bytes: {error}") from None
        self.planes = list(memory.unbind())
        self.raw = memory.view(torch.uint8).view(shape.num_planes, num_pages, -1)
        """The same memory as bytes, a row for each page of each plane: any dtype is copied as bytes."""

    @property
    def bytes_per_page(self) -> int:
        """All planes."""
        return self.page_size * _bytes_per_token(self.shape)

    @property
    def k(self) -> list[torch.Tensor]:
        """K of each layer. Raises TypeError for a pool of latents."""
        return self.planes[: self._kv_layers]

    @property
    def v(self) -> list[torch.Tensor]:
        """V of each layer. Raises TypeError for a pool of latents."""
        return self.planes[self._kv_layers :]

    def index(self, pages: PageIndices) -> torch.Tensor:
        """The indices as int64 on the pool's device; on a CPU a view of `pages`."""
        return _index(pages, self.device)

    def write(self, layer: int, pages: PageIndices, *parts: torch.Tensor) -> None:
        """Fill `pages` of one layer from K and V, or from the latent.

        Each part has shape (len(pages), page_size, *shape.plane_shape) and the pool's dtype.
        Raises ValueError for a layer that is none and for a wrong number or shape of parts, TypeError for
        another dtype; nothing is written then.
        """
        planes = self._planes_of(layer)
        if len(parts) != len(planes):
            raise ValueError(f"parts: {len(parts)} for a layer of {len(planes)}")
        pages = as_pages(pages)
        index, size = self.index(pages), self._size_of(pages)
        for part in parts:
            if part.dtype != self.shape.dtype:
                raise TypeError(f"dtype: {part.dtype}, the pool has {self.shape.dtype}")
            if part.shape != size:
                raise ValueError(f"shape: {tuple(part.shape)}, the pages have {size}")
        for plane, part in zip(planes, parts, strict=True):
            if pages:
                bytes_of = part.contiguous().view(torch.uint8).view(len(pages), -1)
                self.raw[plane].index_copy_(0, index, bytes_of)

    def read(self, layer: int, pages: PageIndices) -> tuple[torch.Tensor, ...]:
        """Copies of K and V, or of the latent, of `pages` of one layer, shaped as `write` takes them."""
        pages = as_pages(pages)
        index, size = self.index(pages), self._size_of(pages)
        return tuple(
            self.raw[plane].index_select(0, index).view(self.shape.dtype).view(size)
            for plane in self._planes_of(layer)
        )

    @property
    def _kv_layers(self) -> int:
        if not isinstance(self.shape, KVShape):
            raise TypeError("k, v: the pool has latents")
        return self.shape.num_layers

    def _size_of(self, pages: PageIndices) -> tuple[int, ...]:
        return (len(pages), self.page_size, *self.shape.plane_shape)

    def _planes_of(self, layer: int) -> range:
        if not 0 <= layer < self.shape.num_layers:
            raise ValueError(f"layer: {layer} is not in 0..{self.shape.num_layers - 1}")
        return range(layer, self.shape.num_planes, self.shape.num_layers)


class HostPool:
    """The host's pages. `raw` has shape (num_pages, num_planes, bytes of a plane's page), uint8.

    Pinned when there is a CUDA device. The memory is the pool's own mapping; a page of it is faulted in
    when it is first written. Raises ValueError for sizes below 1, and for more memory than is free;
    TypeError.
    """

    def __init__(self, num_pages: int, page_size: int, shape: Shape) -> None:
        _check_pool(num_pages, page_size, shape)
        self.num_pages, self.page_size, self.shape = num_pages, page_size, shape
        _check_room("host", self.num_bytes)
        self.allocator = PageAllocator(num_pages)
        self._map = mmap.mmap(-1, self.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.raw = flat.view(num_pages, shape.num_planes, -1)
        self.pinned = torch.cuda.is_available() and self._pin()

    @classmethod
    def beside(
        cls, pool: PagePool, *, ratio: float | None = None, num_bytes: int | None = None
    ) -> HostPool:
        """For the pages of `pool`: `ratio` times as many, or as many as fit into `num_bytes`.

        Raises ValueError when it would have no page, or when not exactly one of the two is given.
        """
        if (ratio is None) == (num_bytes is None):
            raise ValueError("ratio, num_bytes: give one of the two")
        for name, given, kind in (("ratio", ratio, int | float), ("num_bytes", num_bytes, int)):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{name}: {given!r} is not a number")
        if ratio is not None:
            if not abs(ratio) < 2**31:
                raise ValueError(f"ratio: {ratio} is not below 2**31")
            num_pages = int(pool.num_pages * ratio)
            what = f"ratio: {ratio} of {pool.num_pages} device pages"
        else:
            num_pages = (num_bytes or 0) // pool.bytes_per_page
            what = f"num_bytes: {num_bytes} at {pool.bytes_per_page} bytes a page"
        if num_pages < 1:
            raise ValueError(f"{what} is not one page")
        return cls(num_pages, pool.page_size, pool.shape)

    @property
    def bytes_per_page(self) -> int:
        """All planes, contiguous."""
        return self.page_size * _bytes_per_token(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_pages * self.bytes_per_page

    @property
    def address(self) -> int:
        """Where the pool begins; page i is `i * bytes_per_page` behind it."""
        return self.raw.data_ptr()

    def page(self, page: int) -> memoryview:
        """The bytes of one page, writable, not a copy."""
        start = page * self.bytes_per_page
        return self._view[start : start + self.bytes_per_page]

    def index(self, pages: PageIndices) -> torch.Tensor:
        """The indices as int64, a view of `pages`."""
        return _index(pages, torch.device("cpu"))

    def _pin(self) -> bool:
        """Lock the memory for the device's copy engines (cudaHostRegister)."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        pinned = int(runtime.cudaHostRegister(self.address, self.num_bytes, 0)) == 0
        if pinned:
            weakref.finalize(self, runtime.cudaHostUnregister, self.address)
        return pinned


def as_pages(indices: object) -> PageIndices:
    """Page indices from an array, numpy's too, a tensor or a sequence of ints.

    Raises TypeError for others, and ValueError for an int that no index can be.
    """
    if isinstance(indices, array) and indices.typecode == "q":
        return indices
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    if not isinstance(indices, (list, tuple, array, range)):
        raise TypeError(f"page_indices: {type(indices).__name__} is not a sequence of ints")
    try:
        return array("q", indices)
    except OverflowError:
        wrong = next(index for index in indices if not -(2**63) <= index < 2**63)
        raise ValueError(f"page index: {wrong} is not in 0..{2**63 - 1}") from None


def _index(pages: PageIndices, device: torch.device) -> torch.Tensor:
    if not pages:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(pages, dtype=torch.int64).to(device)


def _bytes_per_token(shape: Shape) -> int:
    size = shape.num_planes * shape.dtype.itemsize
    for length in shape.plane_shape:
        size *= length
    return size


def _check_positive(shape: Shape, *fields: str) -> None:
    if not isinstance(shape.dtype, torch.dtype):
        raise TypeError(f"dtype: {shape.dtype!r} is not a torch.dtype")
    for field in fields:
        check_int(field, getattr(shape, field), 1)


def _check_pool(num_pages: int, page_size: int, shape: Shape) -> None:
    check_int("num_pages", num_pages, 1)
    check_int("page_size", page_size, 1)
    if not isinstance(shape, Shape):
        raise TypeError(f"shape: a {type(shape).__name__} is neither a KVShape nor an MLAShape")


def _check_room(what: str, needed: int) -> None:
    free = _available_bytes()
    if free is not None and needed > free:
        raise ValueError(f"num_pages: the {what} pool needs {needed} bytes, {free} are free")


def _available_bytes() -> int | None:
    """What the kernel says can be had without swapping; None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
