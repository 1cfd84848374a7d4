"""Which blocks come right after which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvevents.hashing import BlockHash

__all__ = ["Behind"]


class Behind:
    """The blocks right behind a block; mostly there is only one.

    What it says does not depend on how it came to be: blocks come out in the order of their hashes.
    """

    def __init__(self) -> None:
        self._of: dict[BlockHash, BlockHash | set[BlockHash]] = {}

    def of(self, parent: BlockHash) -> Sequence[BlockHash]:
        """Those right behind `parent`."""
        found = self._of.get(parent)
        if found is None:
            return ()
        return sorted(found) if isinstance(found, set) else (found,)

    def add(self, parent: BlockHash, block_hash: BlockHash) -> None:
        """Put a block behind `parent`, if it is not there."""
        found = self._of.setdefault(parent, block_hash)
        if isinstance(found, set):
            found.add(block_hash)
        elif found != block_hash:
            self._of[parent] = {found, block_hash}

    def add_chain(self, block_hashes: Sequence[BlockHash]) -> None:
        """Put each of these behind the one before; none is known, but for the first as one behind."""
        self._of.update(pairwise(block_hashes))

    def add_all(
        self, parents: Iterable[BlockHash | None], block_hashes: Iterable[BlockHash]
    ) -> None:
        """Put each block behind its parent; where that is None, nowhere."""
        behind = self._of
        for parent, block_hash in zip(parents, block_hashes, strict=True):
            if parent is not None and behind.setdefault(parent, block_hash) != block_hash:
                self.add(parent, block_hash)

    def discard(self, parent: BlockHash, block_hash: BlockHash) -> None:
        """The reverse; nothing where it is not there."""
        found = self._of.get(parent)
        if isinstance(found, set):
            found.discard(block_hash)
        if found == block_hash or found == set():
            del self._of[parent]

    def clear(self) -> None:
        """Forget everything."""
        self._of.clear()
