"""The host's pages: one run of bytes each, and as many as fit."""

from __future__ import annotations

import ctypes
from array import array

import pytest
import torch

from hicache import HostPool, KVShape, MLAShape, PagePool, Tier
from hicache.pool import Shape
from hicache.transfer import CpuTransfers

KV = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.bfloat16)
PAGE_SIZE = 2
BYTES_PER_PAGE = 2 * 2 * PAGE_SIZE * 3 * 4 * 2
"""K and V, layers, tokens, heads, head_dim, bytes of a bf16."""

SHAPES: list[Shape] = [
    shape
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    for shape in (KVShape(2, 3, 5, dtype), MLAShape(3, 7, dtype))
]


@pytest.fixture
def pool() -> HostPool:
    """Five pages of two tokens."""
    return HostPool(5, PAGE_SIZE, KV)


@pytest.fixture
def device_pool() -> PagePool:
    """Ten pages of the same form."""
    return PagePool(10, PAGE_SIZE, KV)


def test_a_page_costs_what_its_planes_take(pool: HostPool, device_pool: PagePool) -> None:
    """As many bytes as a page of the device has, and the pool is its pages."""
    assert pool.bytes_per_page == device_pool.bytes_per_page == BYTES_PER_PAGE
    assert pool.num_bytes == pool.raw.numel() == 5 * BYTES_PER_PAGE
    assert tuple(pool.raw.shape) == (5, 4, BYTES_PER_PAGE // 4)
    assert not pool.raw.any()


def test_pages_stand_one_after_the_other(pool: HostPool) -> None:
    """Page i begins `i * bytes_per_page` behind `address`, and is one run of bytes."""
    for page in range(5):
        pool.page(page)[:] = bytes([page + 1]) * BYTES_PER_PAGE
    memory = ctypes.string_at(pool.address, pool.num_bytes)
    assert memory == b"".join(bytes([page + 1]) * BYTES_PER_PAGE for page in range(5))


def test_a_page_is_the_memory_itself(pool: HostPool) -> None:
    """A view of bytes, contiguous and writable: what is written through it is in the pool, and back."""
    page = pool.page(3)
    assert (page.contiguous, page.readonly, page.format) == (True, False, "B")
    assert (page.ndim, page.nbytes) == (1, BYTES_PER_PAGE)
    page[:] = bytes(range(BYTES_PER_PAGE))
    assert bytes(array("B", pool.raw[3].flatten().tolist())) == bytes(range(BYTES_PER_PAGE))
    assert not pool.raw[[0, 1, 2, 4]].any()
    pool.raw[3, 0, 0] = 99
    assert page[0] == 99


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{type(shape).__name__}-{shape.dtype}")
def test_a_page_is_its_planes_one_after_the_other(shape: Shape) -> None:
    """K of every layer, then V of every layer, or the latents, each as the device has it."""
    device_pool = PagePool(4, PAGE_SIZE, shape)
    generator = torch.Generator().manual_seed(1)
    for raw in device_pool.raw:
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    pool = HostPool.beside(device_pool, ratio=2)
    transfers = CpuTransfers(device_pool, pool)
    job = transfers.submit(Tier.HOST, array("q", [2, 1]), array("q", [5, 0]))
    transfers.wait([job], 30)
    transfers.close()
    for device_page, host_page in ((2, 5), (1, 0)):
        planes = [plane[device_page].view(torch.uint8) for plane in device_pool.planes]
        expected = b"".join(bytes(array("B", plane.flatten().tolist())) for plane in planes)
        assert bytes(pool.page(host_page)) == expected


def test_a_page_outlives_its_pool() -> None:
    """Whoever still has the bytes of a page, a write to storage for one, still has them."""
    page = HostPool(5, PAGE_SIZE, KV).page(4)
    page[:] = bytes([7]) * BYTES_PER_PAGE
    assert bytes(page) == bytes([7]) * BYTES_PER_PAGE


def test_indices_are_a_view(pool: HostPool) -> None:
    """Indices are int64 and not copied; none are fine."""
    pages = array("q", [3, 1])
    index = pool.index(pages)
    assert (index.dtype, index.tolist()) == (torch.int64, [3, 1])
    pages[0] = 2
    assert index.tolist() == [2, 1]
    assert pool.index(array("q")).tolist() == []


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("ratio", "num_pages"), [(1, 10), (2.5, 25), (0.19, 1)])
def test_a_ratio_gives_so_many_times_the_pages(
    device_pool: PagePool, ratio: float, num_pages: int
) -> None:
    """Of the same page size and shape, rounded down."""
    pool = HostPool.beside(device_pool, ratio=ratio)
    assert pool.num_pages == pool.allocator.num_free == num_pages
    assert (pool.page_size, pool.shape) == (PAGE_SIZE, KV)


@pytest.mark.parametrize(("extra", "num_pages"), [(0, 3), (BYTES_PER_PAGE - 1, 3)])
def test_bytes_give_the_pages_that_fit(device_pool: PagePool, extra: int, num_pages: int) -> None:
    """Whole pages only."""
    pool = HostPool.beside(device_pool, num_bytes=3 * BYTES_PER_PAGE + extra)
    assert pool.num_pages == num_pages
    assert pool.num_bytes <= 3 * BYTES_PER_PAGE + extra


@pytest.mark.parametrize("ratio", [0, 0.09, -1])
def test_a_ratio_of_less_than_a_page_is_refused(device_pool: PagePool, ratio: float) -> None:
    """By its value and what it is a part of."""
    with pytest.raises(ValueError, match=rf"ratio: {ratio} of 10 device pages is not one page"):
        HostPool.beside(device_pool, ratio=ratio)


@pytest.mark.parametrize("num_bytes", [0, BYTES_PER_PAGE - 1, -BYTES_PER_PAGE])
def test_bytes_for_less_than_a_page_are_refused(device_pool: PagePool, num_bytes: int) -> None:
    """By the value and what a page takes."""
    with pytest.raises(
        ValueError, match=rf"num_bytes: {num_bytes} at {BYTES_PER_PAGE} bytes a page"
    ):
        HostPool.beside(device_pool, num_bytes=num_bytes)


def test_one_size_is_given(device_pool: PagePool) -> None:
    """A ratio or bytes, not both and not neither."""
    with pytest.raises(ValueError, match="give one of the two"):
        HostPool.beside(device_pool)
    with pytest.raises(ValueError, match="give one of the two"):
        HostPool.beside(device_pool, ratio=1, num_bytes=BYTES_PER_PAGE)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(size: int) -> None:
    """A pool without pages or tokens in them is refused, by name and value."""
    with pytest.raises(ValueError, match=f"num_pages: {size} is below 1"):
        HostPool(size, PAGE_SIZE, KV)
    with pytest.raises(ValueError, match=f"page_size: {size} is below 1"):
        HostPool(5, size, KV)


def test_more_than_there_is_is_refused() -> None:
    """A pool larger than the free memory is refused with both sizes."""
    page_size = 1 << 40
    needed = 5 * BYTES_PER_PAGE // PAGE_SIZE * page_size
    with pytest.raises(ValueError, match=rf"the host pool needs {needed} bytes, \d+ are free"):
        HostPool(5, page_size, KV)


# ----------------------------------------------------------------------------------------- on a GPU


def test_nothing_is_pinned_without_a_gpu(pool: HostPool) -> None:
    """The pool says whether its memory is pinned."""
    assert pool.pinned == torch.cuda.is_available()


@pytest.mark.gpu
def test_its_memory_is_pinned() -> None:
    """CUDA knows the memory as its own to copy from and to: every page of it."""
    pool = HostPool(64, 64, KV)
    assert pool.pinned
    assert pool.raw.is_pinned()
    assert all(pool.raw[page].is_pinned() for page in (0, 31, 63))


@pytest.mark.gpu
def test_memory_is_pinned_again_and_again() -> None:
    """A pool that is gone leaves nothing pinned that the next one, at the same address, trips over."""
    for _ in range(3):
        pool = HostPool(64, 64, KV)
        assert pool.pinned
        del pool
    assert torch.ones(1, device="cuda").item() == 1
