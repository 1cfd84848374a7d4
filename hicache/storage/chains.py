"""Which pages a store has, and which of them to give up first.

A1  The parent of a page is there too; a page without a parent starts a prompt.
A2  In order of use a page stands before its parent, so that the first one has no children.
A3  `num_bytes` is the sum over the pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hicache.storage.backend import StoredPage

__all__ = ["Chains", "Entry", "violations"]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One storing of a page: stored again after a loss, it is another entry."""

    page: StoredPage
    num_bytes: int


class Chains:
    """Pages by key. Knows no files and no locks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def prefix(self, keys: Sequence[bytes]) -> list[Entry]:
        """The leading keys that are there."""
        found: list[Entry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def pages(self) -> list[StoredPage]:
        """All, parents before children."""
        return [entry.page for entry in reversed(self._entries.values())]

    def oldest(self) -> Entry | None:
        """The least recently used one; it has no children."""
        return next(iter(self._entries.values()), None)

    def add(self, page: StoredPage, num_bytes: int) -> None:
        """Add a page whose parent is there and that is not; the least recently used until it is used."""
        assert page.key not in self._entries and self.has_parent(page), "A1"
        self._entries[page.key] = Entry(page, num_bytes)
        self._entries.move_to_end(page.key, last=False)
        if page.parent is not None:
            self._children.setdefault(page.parent, set()).add(page.key)
        self.num_bytes += num_bytes

    def restore(self, found: Sequence[tuple[StoredPage, int, float]]) -> list[StoredPage]:
        """Add pages, with sizes and times of use. Returns those that no prompt's start reaches."""
        pages = {page.key: (page, num_bytes) for page, num_bytes, _ in found}
        used_at = {page.key: used for page, _, used in found}
        children: dict[bytes | None, list[bytes]] = {}
        for page, _ in pages.values():
            children.setdefault(page.parent, []).append(page.key)
        reached = children.pop(None, [])
        for key in reached:
            reached.extend(children.pop(key, ()))
        for key in reversed(reached):  # a page is used whenever one behind it is
            parent = pages[key][0].parent
            if parent is not None:
                used_at[parent] = max(used_at[parent], used_at[key])
        for key in sorted(reached, key=used_at.__getitem__, reverse=True):
            self.add(*pages.pop(key))
        return [page for page, _ in pages.values()]

    def has_parent(self, page: StoredPage) -> bool:
        """Whether the page could be reached from its prompt's start."""
        return page.parent is None or page.parent in self._entries

    def use(self, keys: Sequence[bytes]) -> set[bytes]:
        """These are the most recently used now, with all before them. Returns all of them."""
        used: set[bytes] = set()
        for last in reversed(keys):
            if last in used:
                continue
            entry = self._entries.get(last)
            while entry is not None:
                used.add(entry.page.key)
                self._entries.move_to_end(entry.page.key)
                entry = self._entries.get(entry.page.parent) if entry.page.parent else None
        return used

    def size_of(self, keys: Iterable[bytes]) -> int:
        """Bytes of pages that are there."""
        return sum(self._entries[key].num_bytes for key in keys)

    def drop(self, key: bytes) -> list[Entry]:
        """Remove a page and all that follow it; what was removed, children before parents."""
        if key not in self._entries:
            return []
        found = [key]
        for one in found:
            found.extend(self._children.pop(one, ()))
        parent = self._entries[key].page.parent
        if parent is not None:
            siblings = self._children[parent]
            siblings.remove(key)
            if not siblings:
                del self._children[parent]
        gone = [self._entries.pop(one) for one in reversed(found)]
        self.num_bytes -= sum(entry.num_bytes for entry in gone)
        return gone

    def order(self) -> Iterable[Entry]:
        """The least recently used first."""
        return self._entries.values()


def violations(chains: Chains) -> list[str]:
    """Every invariant that does not hold, by number."""
    found: list[str] = []
    seen: set[bytes] = set()
    for entry in chains.order():
        page = entry.page
        if not chains.has_parent(page):
            found.append(f"A1: {page.key.hex()} has no parent")
        if page.parent in seen:
            found.append(f"A2: {page.key.hex()} stands behind its parent")
        seen.add(page.key)
    if chains.num_bytes != sum(entry.num_bytes for entry in chains.order()):
        found.append(f"A3: {chains.num_bytes} bytes")
    return found
