"""Which pages are free."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.allocator import PageAllocator


@given(num_pages=st.integers(1, 8), data=st.data())
def test_every_page_is_out_or_free(num_pages: int, data: st.DataObject) -> None:
    """Whatever is allocated and freed, each page of the pool is in exactly one of the two places."""
    allocator, out = PageAllocator(num_pages), list[int]()
    for wanted in data.draw(st.lists(st.integers(-8, 8), max_size=20)):
        if wanted < 0:
            back, out = out[wanted:], out[:wanted]
            allocator.free(array("q", back))
        elif (pages := allocator.allocate(wanted)) is not None:
            assert len(pages) == wanted
            out += pages
        else:
            assert wanted > allocator.num_free
        assert sorted([*out, *allocator.free_pages()]) == list(range(num_pages))
        assert allocator.num_free == num_pages - len(out)


def test_too_much_is_none_and_takes_none() -> None:
    """An allocation that cannot be met leaves every page free."""
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_the_last_freed_is_handed_out_first() -> None:
    """A page given back is the next one out."""
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    assert pages is not None
    allocator.free(pages[1:2])
    assert allocator.allocate(1) == pages[1:2]


def test_the_free_list_is_a_copy() -> None:
    """Changing what `free_pages` returned changes nothing."""
    allocator = PageAllocator(2)
    del allocator.free_pages()[:]
    assert allocator.num_free == 2


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_has_a_page(num_pages: int) -> None:
    """Fewer than one page are refused, by name and value."""
    with pytest.raises(ValueError, match=f"num_pages: {num_pages} is below 1"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("page", [-1, 3])
def test_foreign_pages_are_refused(page: int) -> None:
    """Freeing an index of no page is refused, with the index and the bound; none is taken."""
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=f"page index: {page} is not in 0..2"):
        allocator.free(array("q", [1, page]))
    assert allocator.num_free == 1


@pytest.mark.parametrize("kind", ["never allocated", "freed", "the cache's"])
def test_pages_that_are_not_lent_are_refused(kind: str) -> None:
    """A page that was never allocated, is freed or given up to the cache is not the caller's to free."""
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    assert pages == array("q", [1, 0])
    wrong = 2
    if kind == "freed":
        wrong = 1
        allocator.free(array("q", [1]))
    elif kind == "the cache's":
        wrong = 1
        allocator.adopt(array("q", [1]))
    before = (allocator.free_pages(), allocator.lent_pages())
    message = f"page index: {wrong} is not the caller's: not allocated, or given up"
    with pytest.raises(ValueError, match=message):
        allocator.free(array("q", [0, wrong]))
    assert (allocator.free_pages(), allocator.lent_pages()) == before


def test_a_page_that_comes_twice_is_refused() -> None:
    """The same page freed twice in one call is refused by its index; none is taken."""
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="page index: 1 comes twice"):
        allocator.free(array("q", [1, 0, 1]))
    assert (allocator.num_free, allocator.num_lent) == (1, 2)


def test_a_page_is_free_lent_or_the_caches() -> None:
    """What the cache adopts or takes is neither free nor lent, and free once it is taken back."""
    allocator = PageAllocator(4)
    lent = allocator.allocate(2)
    assert lent is not None
    allocator.adopt(lent[:1])
    own = allocator.take(1)
    assert own is not None
    assert allocator.lent_pages() == {lent[1]}
    assert allocator.num_free == 1
    assert allocator.take(2) is None
    allocator.take_back(lent[:1] + own)
    assert (allocator.num_free, allocator.num_lent) == (3, 1)


def test_the_lent_pages_are_a_copy() -> None:
    """Changing what `lent_pages` returned changes nothing."""
    allocator = PageAllocator(2)
    allocator.allocate(1)
    allocator.lent_pages().clear()
    assert allocator.num_lent == 1


def test_a_negative_number_is_refused() -> None:
    """Fewer than no pages cannot be allocated."""
    with pytest.raises(ValueError, match="num_pages: -1 is negative"):
        PageAllocator(3).allocate(-1)


@given(data=st.data())
def test_pages_come_back_in_any_pieces(data: st.DataObject) -> None:
    """Whatever part of what was lent comes back, in whatever order, is taken; what is not lent, or comes
    twice, is refused and changes nothing. A caller that writes into its array changes nothing either.
    """
    allocator = PageAllocator(80)
    counts = data.draw(st.lists(st.integers(1, 40), max_size=4))
    lent = [pages for count in counts if (pages := allocator.allocate(count)) is not None]
    out = {page for pages in lent for page in pages}
    while lent:
        pages = lent[data.draw(st.integers(0, len(lent) - 1))]
        first = data.draw(st.sampled_from([0, len(pages) // 2]))
        piece = pages[first : first + data.draw(st.integers(1, 40))]
        if data.draw(st.booleans()):
            piece.reverse()
        if data.draw(st.integers(0, 3)) == 0:
            before = (allocator.num_free, allocator.lent_pages())
            with pytest.raises(ValueError, match="page index"):
                allocator.free(piece + piece[-1:])
            assert (allocator.num_free, allocator.lent_pages()) == before
        allocator.free(piece)
        out -= set(piece)
        lent = [rest for one in lent if (rest := array("q", [i for i in one if i in out]))]
        assert (allocator.lent_pages(), allocator.num_lent) == (out, len(out))
        assert allocator.num_free == 80 - len(out)


def test_the_callers_array_is_its_own() -> None:
    """What a caller writes into the array that it was given does not change what it was lent."""
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    lent = set(pages)
    pages[1] = pages[0]
    assert allocator.lent_pages() == lent
    with pytest.raises(ValueError, match="comes twice"):
        allocator.adopt(pages)
