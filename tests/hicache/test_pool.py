"""The contract of every page pool, on every device there is."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import pytest
import torch

from hicache import HostPool, KVShape, MLAShape, PagePool
from hicache.pool import Shape, as_pages

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request: pytest.FixtureRequest) -> PagePool:
    """Five pages of two tokens."""
    return PagePool(5, 2, SHAPE, device=request.param)


def random_kv(pool: PagePool, num_pages: int) -> torch.Tensor:
    """Values for that many pages of one layer."""
    generator = torch.Generator().manual_seed(num_pages)
    values = torch.randn(num_pages, 2, 3, 4, generator=generator)
    return values.to(pool.device, SHAPE.dtype)


def test_there_is_a_page_of_k_and_v_in_every_layer(pool: PagePool) -> None:
    """K and V of each layer are (num_pages, page_size, num_kv_heads, head_dim), zero at first."""
    assert len(pool.k) == len(pool.v) == 2
    for tensor in [*pool.k, *pool.v]:
        assert tuple(tensor.shape) == (5, 2, 3, 4)
        assert (tensor.dtype, tensor.device.type) == (torch.bfloat16, pool.device.type)
        assert not tensor.any()


def test_a_page_costs_what_its_tensors_take(pool: PagePool) -> None:
    """`bytes_per_page` times the pages is the memory of all the tensors."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in [*pool.k, *pool.v])
    assert pool.bytes_per_page * pool.num_pages == total


def test_what_is_written_is_read(pool: PagePool) -> None:
    """Pages written in any order are read back in any order; other pages and layers stay as is."""
    k, v = random_kv(pool, 3), -random_kv(pool, 3)
    pool.write(1, array("q", [4, 0, 2]), k, v)
    read_k, read_v = pool.read(1, array("q", [2, 4]))
    assert torch.equal(read_k, k[[2, 0]])
    assert torch.equal(read_v, v[[2, 0]])
    assert not pool.k[1][[1, 3]].any()
    assert not pool.k[0].any() and not pool.v[0].any()


def test_what_is_read_is_a_copy(pool: PagePool) -> None:
    """Changing what was read changes no page."""
    k, _ = pool.read(0, array("q", [0]))
    k.fill_(1)
    assert not pool.k[0].any()


def test_no_pages_can_be_written_and_read(pool: PagePool) -> None:
    """Empty indices are fine: nothing is written, and nothing read."""
    none = array("q")
    pool.write(0, none, random_kv(pool, 0), random_kv(pool, 0))
    k, v = pool.read(0, none)
    assert tuple(k.shape) == tuple(v.shape) == (0, 2, 3, 4)


def test_indices_are_int64_on_the_device(pool: PagePool) -> None:
    """An index tensor holds the same pages, as int64, where the pool is."""
    index = pool.index(array("q", [3, 1]))
    assert (index.dtype, index.device.type) == (torch.int64, pool.device.type)
    assert index.tolist() == [3, 1]


def test_indices_on_a_cpu_are_not_copied() -> None:
    """On a CPU the index tensor is a view of the array."""
    pages = array("q", [3, 1])
    index = PagePool(5, 2, SHAPE).index(pages)
    pages[0] = 2
    assert index.tolist() == [2, 1]


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(size: int) -> None:
    """A pool without pages or tokens in them is refused, by name and value."""
    with pytest.raises(ValueError, match=f"num_pages: {size} is below 1"):
        PagePool(size, 2, SHAPE)
    with pytest.raises(ValueError, match=f"page_size: {size} is below 1"):
        PagePool(5, size, SHAPE)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_a_shape_has_no_side_below_one(field: str) -> None:
    """A KV shape with an empty side is refused, by name and value."""
    sides: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field}: 0 is below 1"):
        KVShape(**sides)


@pytest.mark.parametrize("field", ["num_layers", "latent_dim"])
def test_a_latent_shape_has_no_side_below_one(field: str) -> None:
    """A shape of latents with an empty side is refused, by name and value."""
    sides: dict[str, Any] = {"num_layers": 1, "latent_dim": 1} | {field: -1}
    with pytest.raises(ValueError, match=f"{field}: -1 is below 1"):
        MLAShape(**sides)


# ------------------------------------------------------------------------------ layouts and dtypes

SHAPES: dict[str, Shape] = {
    "kv bf16": KVShape(2, 3, 4),
    "kv fp8": KVShape(2, 3, 4, torch.float8_e4m3fn),
    "kv int64": KVShape(1, 1, 1, torch.int64),
    "mla bf16": MLAShape(3, 5),
    "mla fp8": MLAShape(3, 5, torch.float8_e5m2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes_of_any_layout_and_dtype_are_kept(shape: Shape) -> None:
    """What is written to a layer is read back bit by bit, NaNs included, and other layers stay."""
    pool = PagePool(5, 2, shape)
    parts = len(pool.planes) // shape.num_layers
    size = (3, 2, *shape.plane_shape)
    raw = [
        torch.randint(0, 256, (*size, shape.dtype.itemsize), dtype=torch.uint8)
        for _ in range(parts)
    ]
    written = [one.view(shape.dtype).squeeze(-1) for one in raw]
    pool.write(0, array("q", [4, 0, 2]), *written)
    for read, wanted in zip(pool.read(0, array("q", [4, 0, 2])), raw, strict=True):
        assert read.shape == size
        assert torch.equal(read.view(torch.uint8).flatten(), wanted.flatten())
    untouched = pool.planes[1] if shape.num_layers > 1 else pool.planes[0][[1, 3]]
    assert not untouched.view(torch.uint8).any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_host_page_is_the_devices_planes_one_after_the_other(shape: Shape) -> None:
    """A page costs the same on both, and on the host it is one contiguous run of bytes."""
    device, host = PagePool(5, 2, shape), HostPool(7, 2, shape)
    assert host.bytes_per_page == device.bytes_per_page
    assert tuple(host.raw.shape) == (7, shape.num_planes, device.raw[0].shape[1])
    assert host.raw.is_contiguous()
    for plane, raw in enumerate(device.raw):
        raw[3] = plane + 1
        host.raw[6, plane] = raw[3]
    wanted = b"".join(bytes([plane + 1]) * raw.shape[1] for plane, raw in enumerate(device.raw))
    assert bytes(host.page(6)) == wanted
    assert host.raw[6].data_ptr() == host.address + 6 * host.bytes_per_page


def test_latents_have_no_k_and_v() -> None:
    """A pool of latents has a plane a layer, and says that K and V are not what it has."""
    pool = PagePool(5, 2, MLAShape(3, 5))
    assert len(pool.planes) == 3
    for name in ("k", "v"):
        with pytest.raises(TypeError, match="k, v: the pool has latents"):
            getattr(pool, name)


def test_a_layer_takes_as_many_parts_as_it_has(pool: PagePool) -> None:
    """K without V is refused with both numbers, and nothing is written."""
    with pytest.raises(ValueError, match="parts: 1 for a layer of 2"):
        pool.write(0, array("q", [0]), random_kv(pool, 1))
    assert not pool.k[0].any()


def test_a_part_has_the_pools_dtype(pool: PagePool) -> None:
    """Another dtype is refused rather than converted or misread."""
    k = random_kv(pool, 1)
    with pytest.raises(TypeError, match=r"dtype: torch.float32, the pool has torch.bfloat16"):
        pool.write(0, array("q", [0]), k.float(), k.float())
    assert not pool.k[0].any()


# ---------------------------------------------------------------------------------- the host's size


def test_a_host_page_is_a_view() -> None:
    """Writing to `page` changes the pool and no other page."""
    host = HostPool(3, 2, SHAPE)
    host.page(1)[:] = b"\7" * host.bytes_per_page
    assert (host.raw[1] == 7).all()
    assert not host.raw[[0, 2]].any()


@pytest.mark.parametrize(
    ("size", "num_pages"),
    [({"ratio": 2.0}, 10), ({"ratio": 0.5}, 2), ({"num_bytes": 600}, 3), ({"num_bytes": 575}, 2)],
)
def test_a_host_pool_is_sized_by_ratio_or_bytes(size: dict[str, Any], num_pages: int) -> None:
    """It has that many times the device's pages, or as many as fit, of the device's shape."""
    device = PagePool(5, 2, SHAPE)
    assert device.bytes_per_page == 192
    host = HostPool.beside(device, **size)
    assert (host.num_pages, host.page_size, host.shape) == (num_pages, 2, SHAPE)
    assert host.num_bytes == num_pages * 192


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({}, "ratio, num_bytes: give one of the two"),
        ({"ratio": 1.0, "num_bytes": 999}, "ratio, num_bytes: give one of the two"),
        ({"ratio": 0.1}, "ratio: 0.1 of 5 device pages is not one page"),
        ({"ratio": -1.0}, "ratio: -1.0 of 5 device pages is not one page"),
        ({"num_bytes": 191}, "num_bytes: 191 at 192 bytes a page is not one page"),
        ({"num_bytes": -192}, "num_bytes: -192 at 192 bytes a page is not one page"),
    ],
)
def test_a_host_pool_without_a_page_is_refused(size: dict[str, Any], message: str) -> None:
    """A size that is none, or less than a page, is refused by name, value and bound."""
    with pytest.raises(ValueError, match=message):
        HostPool.beside(PagePool(5, 2, SHAPE), **size)


@pytest.mark.parametrize("size", [0, -1])
def test_host_sizes_below_one_are_refused(size: int) -> None:
    """A host pool without pages or tokens in them is refused, by name and value."""
    with pytest.raises(ValueError, match=f"num_pages: {size} is below 1"):
        HostPool(size, 2, SHAPE)
    with pytest.raises(ValueError, match=f"page_size: {size} is below 1"):
        HostPool(5, size, SHAPE)


@pytest.mark.parametrize(("pool_type", "what"), [(PagePool, "device"), (HostPool, "host")])
def test_more_memory_than_there_is_is_refused(pool_type: Any, what: str) -> None:
    """A pool that does not fit is refused with what it needs and what is free; nothing is taken."""
    huge = KVShape(1, 1, 2**40)
    needed = 2**22 * 2 * 2 * 2**40 * 2
    tracemalloc.start()
    with pytest.raises(
        ValueError, match=rf"num_pages: the {what} pool needs {needed} bytes, \d+ are"
    ):
        pool_type(2**22, 2, huge)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_an_array_of_indices_is_taken_as_it_is() -> None:
    """Indices that are an array of q already are not copied."""
    pages = array("q", [1, 2])
    assert as_pages(pages) is pages


@pytest.mark.parametrize(
    "form",
    [
        *([1, 2], (1, 2), range(1, 3), array("i", [1, 2]), torch.tensor([1, 2])),
        torch.tensor([1, 2], dtype=torch.uint8).numpy(),
    ],
)
def test_indices_come_in_any_form(form: object) -> None:
    """Lists, tuples, ranges, other arrays, numpy's too, and tensors become an array of q."""
    assert as_pages(form) == array("q", [1, 2])
