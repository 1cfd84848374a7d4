"""Which pages of a pool are free, and which are lent to the engine."""

from __future__ import annotations

from array import array
from typing import NoReturn

from hicache.node import PageIndices

__all__ = ["PageAllocator"]

_FEW = 16
"""Pieces; what comes back in smaller ones would be copied too often."""


class PageAllocator:
    """Hands out page indices 0 to num_pages - 1, the last freed first.

    A page is free, lent (`allocate` gave it to the engine) or the cache's own. What was lent together
    mostly comes back together, from the front: that is told by comparing arrays, at the speed of memory.
    Pages that come back otherwise are looked up one by one.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is below 1")
        self.num_pages = num_pages
        self._free: PageIndices = array("q", range(num_pages - 1, -1, -1))
        self._grants: dict[int, PageIndices] = {}
        """Lent, as they were handed out, by their first page."""
        self._lent: set[int] = set()
        """Lent, one by one: of grants that came back in another order."""
        self.claimed = False
        """Whether a cache has these pages: they are never another's."""

    @property
    def num_free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    @property
    def num_lent(self) -> int:
        """Pages the engine has."""
        return len(self._lent) + sum(map(len, self._grants.values()))

    def allocate(self, num_pages: int) -> PageIndices | None:
        """Lend `num_pages` pages; None (and nothing taken) when fewer are free.

        Raises ValueError for a negative number.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages: {num_pages} is negative")
        taken = self.take(num_pages)
        if taken:
            self._grants[taken[0]] = taken[:]  # the caller may change its own
        return taken

    def free(self, pages: PageIndices) -> None:
        """Take lent pages back. Raises ValueError (and takes none) unless all are lent and distinct."""
        self.adopt(pages)
        self._free.extend(pages)

    def adopt(self, pages: PageIndices) -> None:
        """Lent pages become the cache's. Raises ValueError (and takes none) unless all are lent and
        distinct.
        """
        if not pages:
            return
        grant = self._grants.pop(pages[0], None)
        if grant == pages:
            return
        if grant is not None:
            num_pages = len(pages)
            if num_pages < len(grant) <= _FEW * num_pages and grant[:num_pages] == pages:
                self._grants[grant[num_pages]] = grant[num_pages:]
                return
            self._grants[pages[0]] = grant
        self._adopt_singly(pages)

    def _adopt_singly(self, pages: PageIndices) -> None:
        lent = self._lent
        for grant in self._grants.values():  # each page once
            lent.update(grant)
        self._grants.clear()
        left = len(lent) - len(pages)
        lent.symmetric_difference_update(pages)  # the same again undoes it
        if len(lent) != left:
            lent.symmetric_difference_update(pages)
            self._refuse(pages)

    def take(self, num_pages: int) -> PageIndices | None:
        """`num_pages` pages for the cache itself; None (and nothing taken) when fewer are free."""
        left = len(self._free) - num_pages
        if left < 0:
            return None
        taken = self._free[left:]
        del self._free[left:]
        return taken

    def take_back(self, pages: PageIndices) -> None:
        """The cache's pages are free again; not checked."""
        self._free.extend(pages)

    def check(self, pages: PageIndices) -> None:
        """Raises ValueError unless every index is a page of this pool."""
        if pages and max(array("Q", pages.tobytes())) >= self.num_pages:  # a negative one is huge
            wrong = next(page for page in pages if not 0 <= page < self.num_pages)
            raise ValueError(f"page index: {wrong} is not in 0..{self.num_pages - 1}")

    def _refuse(self, pages: PageIndices) -> NoReturn:
        self.check(pages)
        for place, page in enumerate(pages):
            if page not in self._lent:
                raise ValueError(
                    f"page index: {page} is not the caller's: not allocated, or given up"
                )
            if page in pages[:place]:
                raise ValueError(f"page index: {page} comes twice")
        raise AssertionError("pages that are lent and distinct are not refused")

    def free_pages(self) -> PageIndices:
        """A copy of the free list, for checks."""
        return self._free[:]

    def lent_pages(self) -> set[int]:
        """A copy of the lent pages, for checks."""
        return self._lent.union(*self._grants.values())
