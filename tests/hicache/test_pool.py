"""The contract of every page pool, on every device there is."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from hicache import KVShape, PagePool
from hicache.pool import as_pages

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


def test_an_array_of_indices_is_taken_as_it_is() -> None:
    """Indices that are an array of q already are not copied."""
    pages = array("q", [1, 2])
    assert as_pages(pages) is pages


@pytest.mark.parametrize(
    "form", [[1, 2], (1, 2), range(1, 3), array("i", [1, 2]), torch.tensor([1, 2])]
)
def test_indices_come_in_any_form(form: object) -> None:
    """Lists, tuples, ranges, other arrays and tensors become an array of q."""
    assert as_pages(form) == array("q", [1, 2])
