"""A worker that says sound things, as records or as an engine's batches, and knows what it holds."""

from __future__ import annotations

from random import Random

import msgspec

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
)
from kvevents.codec import encode_batch
from kvevents.dialect import Dialect
from kvevents.events import KVEventBatch
from kvevents.hashing import block_hashes
from kvevents.namespace import BASE
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew
from kvevents.tokens import pack_tokens
from publisher.link.messages import BATCH, FRESH
from publisher.link.packed import pack_plain
from publisher.stream.input import Input

BLOCK_SIZE = 2
MEDIA = tuple(StorageMedium)
NAMESPACES = (BASE, BASE, Namespace(lora_name="ad"), Namespace(cache_salt="salt"))

Truth = dict[StorageMedium, set[int]]


class Block:
    def __init__(self, parent: Block | None, tokens: list[int], namespace: Namespace) -> None:
        self.parent, self.tokens, self.namespace = parent, tokens, namespace
        self.path: list[int] = (parent.path if parent else []) + tokens
        self.hash = block_hashes(self.path, BLOCK_SIZE, namespace)[-1]
        self.media: set[StorageMedium] = set()
        self.block_id = -1

    @property
    def parent_hash(self) -> int | None:
        return self.parent.hash if self.parent else None


class StoryWorker:
    """Blocks by parent; on every medium a block is there only while its parent is.

    `foreign`: it tells batches of events, as an engine's publisher does. `packed`: most of them as they
    cross a link. `grouped`: most such engines name the KV cache group of all that they tell, and tell of
    another's blocks too.
    """

    def __init__(
        self, seed: int, *, foreign: bool = False, packed: bool = False, grouped: bool = False
    ) -> None:
        self._random, self._foreign, self._packed = Random(seed), foreign, packed
        self._group = Random(seed).choice((None, 0, 0, 1)) if grouped else None
        """The main one; if it is not 0, every store says that it is of full attention."""
        self.blocks: list[Block] = []
        self._next_id = 0
        self.number = 0
        """Of the next message."""
        self.messages: list[Input] = []
        """Offered and not released yet, as a ring has them."""
        self.wants_retell = False

    @property
    def truth(self) -> Truth:
        return {
            medium: {int(block.hash) for block in self.blocks if medium in block.media}
            for medium in StorageMedium
        }

    def told(self, dialect: Dialect) -> Truth:
        """What is to be told of the truth, by the first of the media that are told alike."""
        found: Truth = {medium: set() for medium in StorageMedium}
        first: dict[str, StorageMedium] = {}
        for medium, text in dialect.media:
            found[first.setdefault(text, medium)] |= {
                int(block.hash)
                for block in self.blocks
                if medium in block.media
                and all(
                    getattr(block.namespace, name) is None or name in dialect.namespaces
                    for name in ("lora_name", "cache_salt")
                )
            }
        return found

    def step(self, *, refused: bool = False) -> None:
        """Something changes, and is offered; a refused message burns its number."""
        changed = self._change()
        self._offer(*changed, refused=refused)
        if self._group is not None and self._random.random() < 0.3:
            self._offer([], self._of_another_group())

    def retell(self) -> None:
        """Begin anew, with all there is."""
        records: list[Record] = [Clear()]
        events: list[Event] = [AllBlocksCleared()]
        for block in self.blocks:
            block.block_id = self._take_id()
            first, *others = sorted(block.media)
            records.append(self._new(block, first))
            records += [StoreKnown(medium, BlockId(block.block_id), 1) for medium in others]
        self._offer(records, events, flags=FRESH)
        self.wants_retell = False

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _new(self, block: Block, medium: StorageMedium) -> StoreNew:
        parent = BlockId(block.parent.block_id) if block.parent else None
        namespace = None if block.parent else block.namespace
        tokens = pack_tokens(block.tokens)
        return StoreNew(medium, BlockId(block.block_id), 1, parent, namespace, tokens)

    def _offer(
        self, records: list[Record], events: list[Event], flags: int = 0, *, refused: bool = False
    ) -> None:
        number, self.number = self.number, self.number + 1
        if refused:
            return
        ts = float(number)
        if self._foreign:
            if self._group is not None:
                for event in events:
                    self._name_group(event, self._group)
            batch, body = KVEventBatch(ts, events, 0), bytearray()
            packed = self._packed and number % 3 and pack_plain(batch, body)
            self.messages.append(
                Input(number, packed, bytes(body))
                if packed
                else Input(number, BATCH, encode_batch(batch))
            )
        else:
            self.messages.append(Input(number, flags, msgspec.msgpack.encode((ts, records))))

    def _name_group(self, event: Event, group: int) -> None:
        if isinstance(event, AllBlocksCleared) or event.group_idx is not None:
            return
        event.group_idx = group
        if isinstance(event, BlockStored):
            event.extra_keys = self._random.choice((None, [None] * len(event.block_hashes)))
            event.kv_cache_spec_kind = "full_attention" if group else None

    def _of_another_group(self) -> list[Event]:
        """What is stored and removed of the same blocks, and of others; it touches nothing."""
        group, medium = self._random.choice((2, 3)), self._random.choice(MEDIA)
        events: list[Event] = []
        for block in [*self.blocks[:2], Block(None, [1] * BLOCK_SIZE, BASE)]:
            removed = BlockRemoved([block.hash], medium)
            events.append(self._random.choice((self._stored(block, medium), removed)))
        for event in events:
            self._name_group(event, group)
            if isinstance(event, BlockStored):
                event.kv_cache_spec_kind = None
        return events

    def _change(self) -> tuple[list[Record], list[Event]]:
        kind = self._random.random()
        if kind < 0.02:
            self.blocks = []
            return [Clear()], [AllBlocksCleared()]
        if kind < 0.25 and (removable := self._removable()):
            block, medium = self._random.choice(removable)
            block.media.discard(medium)
            if not block.media:
                self.blocks.remove(block)
            removed = Remove(medium, [(BlockId(block.block_id), 1)])
            return [removed], [BlockRemoved([block.hash], medium)]
        if kind < 0.4 and (copyable := self._copyable()):
            block, medium = self._random.choice(copyable)
            block.media.add(medium)
            return [StoreKnown(medium, BlockId(block.block_id), 1)], [self._stored(block, medium)]
        parent = self._random.choice([None, *self.blocks[-20:]])
        medium = self._random.choice(sorted(parent.media) if parent else MEDIA)
        namespace = parent.namespace if parent else self._random.choice(NAMESPACES)
        tokens = [self._random.randrange(2**32) for _ in range(BLOCK_SIZE)]
        block = Block(parent, tokens, namespace)
        block.media.add(medium)
        block.block_id = self._take_id()
        self.blocks.append(block)
        return [self._new(block, medium)], [self._stored(block, medium)]

    def _stored(self, block: Block, medium: StorageMedium) -> BlockStored:
        return BlockStored(
            [block.hash],
            block.parent_hash,
            block.tokens,
            BLOCK_SIZE,
            medium=medium,
            lora_name=block.namespace.lora_name,
            cache_salt=block.namespace.cache_salt,
        )

    def _removable(self) -> list[tuple[Block, StorageMedium]]:
        below = {(block.parent, medium) for block in self.blocks for medium in block.media}
        return [
            (block, medium)
            for block in self.blocks
            for medium in sorted(block.media)
            if (block, medium) not in below
        ]

    def _copyable(self) -> list[tuple[Block, StorageMedium]]:
        return [
            (block, medium)
            for block in self.blocks
            for medium in MEDIA
            if medium not in block.media and (block.parent is None or medium in block.parent.media)
        ]
