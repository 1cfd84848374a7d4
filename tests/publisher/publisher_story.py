"""A publisher that says sound things at random, and knows what a router must believe."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
)

__all__ = ["BLOCK_SIZE", "Facts", "Steps", "Story", "facts_of", "steps", "tokens_of"]

BLOCK_SIZE = 2
MEDIA = tuple(StorageMedium)
SPACES = (Namespace(), Namespace(lora_name="x"), Namespace(cache_salt="y", extra_key="z"))

Facts: TypeAlias = dict[tuple[StorageMedium, int | bytes], tuple[object, ...]]
"""Each block on each medium: its parent, tokens and namespace."""

Steps: TypeAlias = list[list[tuple[int, int, int]]]
"""Batches of steps of a story."""

steps = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 500), st.integers(1, 7)), max_size=3),
    max_size=14,
)


class Story:
    """A sound publisher: blocks by number, each with a parent, stored before its children on every
    medium and removed after them.
    """

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._spaces: dict[int, Namespace] = {}
        self._on: dict[StorageMedium, set[int]] = {medium: set() for medium in MEDIA}

    def tell(self, kind: int, pick: int, count: int) -> list[Event]:
        """The events of one step; every choice is taken modulo what there is."""
        medium = MEDIA[pick % len(MEDIA)]
        match kind:
            case 0 | 1 | 2:
                return [self._store_new(medium, pick, count)]
            case 3:
                return self._store_known(medium, pick)
            case 4 | 5:
                return self._remove(medium, pick)
            case _:
                for blocks in self._on.values():
                    blocks.clear()
                return [AllBlocksCleared()]

    @property
    def facts(self) -> Facts:
        """What a router must believe."""
        return {
            (medium, block): (
                self._parents[block],
                tokens_of(block),
                self._spaces[block].lora_name,
                self._spaces[block].cache_salt,
                self._spaces[block].extra_key,
            )
            for medium, blocks in self._on.items()
            for block in blocks
        }

    def _store_new(self, medium: StorageMedium, pick: int, count: int) -> Event:
        parents = sorted(self._on[medium])
        parent = parents[pick // 5 % len(parents)] if parents and pick % 3 else None
        space = SPACES[pick % len(SPACES)] if parent is None else self._spaces[parent]
        first = 1 + max(self._parents, default=0)
        blocks = list(range(first, first + count))
        for block in blocks:
            self._parents[block] = parent if block == first else block - 1
            self._spaces[block] = space
        return self._stored(medium, blocks)

    def _store_known(self, medium: StorageMedium, pick: int) -> list[Event]:
        """A block that is on another medium already, and its ancestors as far as they are missing."""
        known = sorted(set().union(*self._on.values()) - self._on[medium])
        path: list[int] = []
        at: int | None = known[pick // 5 % len(known)] if known else None
        while at is not None and at not in self._on[medium]:
            path.append(at)
            at = self._parents[at]
        return [self._stored(medium, [block]) for block in reversed(path)]

    def _remove(self, medium: StorageMedium, pick: int) -> list[Event]:
        held = sorted(self._on[medium])
        if not held:
            return []
        gone = [held[pick // 5 % len(held)]]
        for block in held:
            if self._parents[block] in gone:
                gone.append(block)
        self._on[medium] -= set(gone)
        return [BlockRemoved(list[int | bytes](reversed(gone)), medium)]

    def _stored(self, medium: StorageMedium, blocks: list[int]) -> Event:
        self._on[medium] |= set(blocks)
        space = self._spaces[blocks[0]]
        return BlockStored(
            block_hashes=list[int | bytes](blocks),
            parent_block_hash=self._parents[blocks[0]],
            token_ids=[token for block in blocks for token in tokens_of(block)],
            block_size=BLOCK_SIZE,
            medium=medium,
            lora_name=space.lora_name,
            cache_salt=space.cache_salt,
            extra_key=space.extra_key,
        )


def tokens_of(block: int) -> tuple[int, ...]:
    return (block * 7, block)


def facts_of(index: BlockIndex) -> Facts:
    """What an index believes, block by block."""
    return {
        (event.medium, event.block_hashes[0]): (
            event.parent_block_hash,
            tuple(event.token_ids),
            event.lora_name,
            event.cache_salt,
            event.extra_key,
        )
        for chain in index.snapshot(1)
        for event in chain
        if event.medium is not None
    }
