"""Which pages of a pool are free."""

from __future__ import annotations

from array import array

from hicache.node import PageIndices

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page indices 0 to num_pages - 1, the last freed first."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is below 1")
        self.num_pages = num_pages
        self._free: PageIndices = array("q", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, num_pages: int) -> PageIndices | None:
        """`num_pages` pages, or None (and nothing taken) when fewer are free.

        Raises ValueError for a negative number.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages: {num_pages} is negative")
        left = len(self._free) - num_pages
        if left < 0:
            return None
        taken = self._free[left:]
        del self._free[left:]
        return taken

    def free(self, pages: PageIndices) -> None:
        """Take pages back. Raises ValueError (and takes none) for indices that are no pages of this
        pool, or for more pages than are out.
        """
        self.check(pages)
        if len(self._free) + len(pages) > self.num_pages:
            raise ValueError(f"pages: {len(pages)} freed, {self.num_pages - self.num_free} are out")
        self._free.extend(pages)

    def take_back(self, pages: PageIndices) -> None:
        """Take back pages that are known to be out; not checked."""
        self._free.extend(pages)

    def check(self, pages: PageIndices) -> None:
        """Raises ValueError unless every index is a page of this pool."""
        if pages and max(array("Q", pages.tobytes())) >= self.num_pages:  # a negative one is huge
            wrong = next(page for page in pages if not 0 <= page < self.num_pages)
            raise ValueError(f"page index: {wrong} is not in 0..{self.num_pages - 1}")

    def free_pages(self) -> PageIndices:
        """A copy of the free list, for checks."""
        return self._free[:]
