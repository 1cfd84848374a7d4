"""Where an engine's publisher and its storage of pages meet: in the one process that has both.

A storage knows keys and bytes; what events need besides, tokens and parents, is in the events that the
engine published of the same blocks before. Both ends are made by the engine, which hands neither to the
other: so this is of the process, as no other state of ours is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StorageMedium,
)
from kvevents.hashing import canonical_hash
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, pack_tokens

if TYPE_CHECKING:
    from publisher.engines.sidecar import EngineSidecar

__all__ = ["MEETING", "Holdings", "KnownBlock", "Meeting", "Tells"]

_BITS = {medium: 1 << place for place, medium in enumerate(StorageMedium)}


class KnownBlock(NamedTuple):
    """What events told of a block. `media`: those of `StorageMedium` that hold it, a bit each."""

    parent: int | None
    tokens: TokenBytes
    namespace: Namespace
    media: int


class Holdings:
    """The blocks that the engine holds, by wire hash. One thread notes, any may look."""

    def __init__(self) -> None:
        self._blocks: dict[int, KnownBlock] = {}

    def get(self, block_hash: int) -> KnownBlock | None:
        return self._blocks.get(block_hash)

    def note(self, events: Iterable[Event]) -> None:
        """Take up a batch as a whole: a block that only moves between media stays known throughout. A
        store that is unsound is passed over.
        """
        left: list[tuple[int, int]] = []
        for event in events:
            if type(event) is BlockStored:
                self._store(event)
            elif type(event) is BlockRemoved and event.medium is not None:
                bit = _BITS[event.medium]
                gone = [(canonical_hash(one), bit) for one in event.block_hashes]
                self._remove(gone)
                left += gone
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
        for block_hash, _ in left:
            found = self._blocks.get(block_hash)
            if found is not None and not found.media:
                del self._blocks[block_hash]

    def _store(self, event: BlockStored) -> None:
        if event.extra_keys is not None or event.medium is None:
            return  # what is of more than tokens and names is not told of a disk
        if type(event.block_size) is not int:
            return
        try:
            step, tokens = event.block_size * TOKEN_BYTES, pack_tokens(event.token_ids)
            space = Namespace(event.lora_name, event.cache_salt, event.extra_key)
        except (TypeError, ValueError, OverflowError):
            return
        if len(tokens) != step * len(event.block_hashes):
            return
        parent = (
            None if event.parent_block_hash is None else canonical_hash(event.parent_block_hash)
        )
        bit = _BITS[event.medium]
        for place, one in enumerate(event.block_hashes):
            block_hash = canonical_hash(one)
            found = self._blocks.get(block_hash)
            if found is not None:
                self._blocks[block_hash] = found._replace(media=found.media | bit)
            else:
                own = TokenBytes(tokens[place * step : (place + 1) * step])
                self._blocks[block_hash] = KnownBlock(parent, own, space, bit)
            parent = block_hash

    def _remove(self, gone: Iterable[tuple[int, int]]) -> None:
        for block_hash, bit in gone:
            if (found := self._blocks.get(block_hash)) is not None:
                self._blocks[block_hash] = found._replace(media=found.media & ~bit)


class Tells(Protocol):
    """A storage that tells of its pages."""

    def tell_all(self) -> None:
        """Have all that is held told, soon; from any thread, without waiting."""


class Meeting:
    """Of one process: one publisher, one storage, either first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Of coming and going; who publishes does not take it."""
        self._publisher: EngineSidecar | None = None
        self._storage: Tells | None = None
        self.known = Holdings()

    @property
    def has_publisher(self) -> bool:
        return self._publisher is not None

    def join_publisher(self, publisher: EngineSidecar) -> None:
        with self._lock:
            self._publisher = publisher
            self._meet()

    def leave_publisher(self, publisher: EngineSidecar) -> None:
        with self._lock:
            if self._publisher is publisher:
                self._publisher = None

    def join_storage(self, storage: Tells) -> None:
        with self._lock:
            self._storage = storage
            self._meet()

    def leave_storage(self, storage: Tells) -> bool:
        """Whether no other has come in its place."""
        with self._lock:
            if self._storage is not storage:
                return False
            self._storage = None
            return True

    def tell(self, events: list[Event]) -> None:
        """Publish a storage's events; without a publisher nothing is told."""
        if (publisher := self._publisher) is not None and events:
            publisher.tell(events)

    def tell_all(self) -> None:
        """What was told of the storage does not count any more."""
        if (storage := self._storage) is not None:
            storage.tell_all()

    def _meet(self) -> None:
        if self._publisher is not None and self._storage is not None:
            self._publisher.remember(self.known)
            self._storage.tell_all()


MEETING = Meeting()
