"""One batch's stores and removals in columns: what an index takes at once, without an object for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from kvevents.events import BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import BlockHash
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds

__all__ = ["Columns"]

_MAX_HASH = 2**63 - 1


class Columns(Sequence[Event]):
    """A sequence of BlockStored and BlockRemoved, all on one medium and in the base namespace, with
    nothing else said of them. They are made when one of them is asked for. Immutable.

    `counts`: of each event the blocks, negative for a removal. `hashes`: of all, one after the other.
    `parents`: of each event the block before its first, None for a removal. `packed`: the tokens of all
    stores, `block_size` a block. Raises ValueError for what does not fit together.
    """

    __slots__ = (
        *("_events", "block_size", "blocks", "counts", "hashes"),
        *("medium", "only_stores", "packed", "parents"),
    )

    def __init__(
        self,
        hashes: list[BlockHash],
        parents: list[BlockHash | None],
        counts: list[int],
        packed: TokenBytes,
        block_size: int,
        medium: StorageMedium,
    ) -> None:
        self.hashes, self.parents, self.counts, self.packed = hashes, parents, counts, packed
        self.block_size, self.medium = block_size, medium
        self.only_stores = min(counts) > 0
        self.blocks: list[Any] | None = None
        """What an index keeps of each stored block; indexes share it."""
        self._events: list[Event] | None = None
        num_stored = num_hashes = sum(counts)
        if not self.only_stores:
            num_stored = sum(count for count in counts if count > 0)
            num_hashes = 2 * num_stored - num_hashes
        if block_size < 1 or len(packed) != num_stored * block_size * TOKEN_BYTES:
            raise ValueError(f"columns: {len(packed)} bytes of tokens for {num_stored} blocks")
        if len(hashes) != num_hashes or len(parents) != len(counts) or 0 in counts:
            raise ValueError(f"columns: {len(hashes)} hashes, {len(parents)} parents: {counts}")
        if max(hashes) > _MAX_HASH:
            raise ValueError(f"columns: a hash is above {_MAX_HASH}")

    @property
    def events(self) -> list[Event]:
        """The events; not to be changed."""
        if self._events is None:
            self._events = list(self._made())
        return self._events

    def _made(self) -> Iterator[Event]:
        at = start = 0
        step = self.block_size * TOKEN_BYTES
        for count, parent in zip(self.counts, self.parents, strict=True):
            names = list[int | bytes](self.hashes[at : at + abs(count)])
            at += len(names)
            if count < 0:
                yield BlockRemoved(names, self.medium)
                continue
            tokens = TokenIds(TokenBytes(self.packed[start : start + count * step]))
            start += count * step
            yield BlockStored(names, parent, tokens, self.block_size, None, self.medium, None)

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self.events[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return self.events == list(other)
        return NotImplemented
