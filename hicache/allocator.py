"""Which pages of a pool are free, and which are lent to the engine."""

from __future__ import annotations

from array import array
from typing import NoReturn

from hicache.node import PageIndices

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page indices 0 to num_pages - 1, the last freed first.

    A page is free, lent (`allocate` gave it to the engine) or the cache's own.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is below 1")
        self.num_pages = num_pages
        self._free: PageIndices = array("q", range(num_pages - 1, -1, -1))
        self._lent: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    @property
    def num_lent(self) -> int:
        """Pages the engine has."""
        return len(self._lent)

    def allocate(self, num_pages: int) -> PageIndices | None:
        """Lend `num_pages` pages; None (and nothing taken) when fewer are free.

        Raises ValueError for a negative number.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages: {num_pages} is negative")
        taken = self.take(num_pages)
        if taken is not None:
            self._lent.update(taken)
        return taken

    def free(self, pages: PageIndices) -> None:
        """Take lent pages back. Raises ValueError (and takes none) unless all are lent and distinct."""
        self.adopt(pages)
        self._free.extend(pages)

    def adopt(self, pages: PageIndices) -> None:
        """Lent pages become the cache's. Raises ValueError (and takes none) unless all are lent and
        distinct.
        """
        lent = self._lent
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
        return set(self._lent)
