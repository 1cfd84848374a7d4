"""What a router believes after applying events.

X1  A block is resident on the media whose last event about it was a store; on no medium, it is not
    in the index.
X2  An event on one medium changes only that medium. A removal that names no medium removes from all;
    AllBlocksCleared removes everything of its rank.
X3  Applying an event a second time changes nothing, so replay and snapshot may overlap.
X4  `snapshot()` yields parents before children, on every medium.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import msgspec
from msgspec.structs import replace

from kvevents.columns import Columns
from kvevents.events import BlockRemoved, BlockStored, Event, StorageMedium, medium_of
from kvevents.extra_keys import check_extra_keys, has_own_keys
from kvevents.hashing import BlockHash, are_canonical, canonical_hash
from kvevents.namespace import BASE, Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds, pack_tokens

__all__ = ["Block", "BlockIndex", "FleetIndex", "Oddities", "Overlap"]

_MEDIA = tuple(StorageMedium)
_BIT = {medium: 1 << i for i, medium in enumerate(_MEDIA)}
_MEDIUM = {bit: medium for medium, bit in _BIT.items()}
_ALL = (1 << len(_MEDIA)) - 1


class Block(msgspec.Struct, frozen=True, gc=False):
    """A resident block. `media` has bit i set for the i-th `StorageMedium`."""

    parent: BlockHash | None
    tokens: bytes
    """Empty when they were left out."""
    extra_keys: list[Any] | None
    """Of this block; None for an empty list too."""
    namespace: Namespace
    lora_id: int | None
    media: int


@dataclass(slots=True)
class Oddities:
    """Events that say what a sound publisher would not, counted by block; they are harmless here."""

    stored_again: int = 0
    unknown_parent: int = 0
    removed_unknown: int = 0
    malformed: int = 0


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many leading blocks of a prompt are held: on each medium alone, and on any."""

    blocks: dict[StorageMedium, int] = field(default_factory=dict)
    any_medium: int = 0


class BlockIndex:
    """The blocks of one worker's rank."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, Block] = {}
        self._counts = dict.fromkeys(_MEDIA, 0)
        self._namespaces: dict[Namespace, Namespace] = {}
        self._children: dict[tuple[BlockHash | None, Namespace | None, bytes], BlockHash] | None
        self._children = None
        self.block_size: int | None = None
        """Tokens per block, from the first BlockStored; None before it and after a clear."""
        self.oddities = Oddities()

    def __len__(self) -> int:
        """Blocks on at least one medium."""
        return len(self._blocks)

    def count(self, medium: StorageMedium) -> int:
        """Blocks on `medium`."""
        return self._counts[medium]

    @property
    def resident(self) -> dict[StorageMedium, set[BlockHash]]:
        """The hashes on each medium; a new dict with all media as keys."""
        found: dict[StorageMedium, set[BlockHash]] = {medium: set() for medium in _MEDIA}
        for block_hash, block in self._blocks.items():
            for medium, bit in _BIT.items():
                if block.media & bit:
                    found[medium].add(block_hash)
        return found

    # ---------------------------------------------------------------------------------- events

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in order (X1, X2, X3). Never raises for what an event says."""
        if type(events) is Columns and self._store_columns(events):
            return
        for event in events:
            if isinstance(event, BlockStored):
                if not self._store_new(event):
                    self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """Forget everything but the oddities."""
        self._blocks.clear()
        self._counts = dict.fromkeys(_MEDIA, 0)
        self._namespaces.clear()
        self._children = None
        self.block_size = None

    def _store_new(self, event: BlockStored) -> bool:
        """Store blocks of which none is known, behind one that is or at a prompt's start, in the base
        namespace: what `_store` does, without a look at each. False, and nothing done, for any other.
        """
        hashes, parent, medium = event.block_hashes, event.parent_block_hash, event.medium
        blocks, size, tokens = self._blocks, event.block_size, event.token_ids
        if (
            medium is None
            or size != self.block_size
            or event.lora_name is not None
            or event.cache_salt is not None
            or event.extra_key is not None
            or event.extra_keys is not None
            or (parent is not None and parent not in blocks)
            or not are_canonical(hashes)
            or self._children is not None
        ):
            return False
        packed = tokens.packed if type(tokens) is TokenIds else self._tokens_of(event)
        count, bit, step = len(hashes), _BIT[medium], size * TOKEN_BYTES
        if packed is None or len(packed) != count * step:
            return False
        if count == 1:
            if hashes[0] in blocks:
                return False
            blocks[hashes[0]] = Block(parent, packed, None, BASE, event.lora_id, bit)  # type: ignore[arg-type]
        else:
            new = dict.fromkeys(hashes)
            if len(new) != count or not blocks.keys().isdisjoint(new):
                return False
            texts = [packed[at : at + step] for at in range(0, count * step, step)]
            parents = [parent, *hashes[:-1]]
            new_blocks = _blocks_of(parents, texts, event.lora_id, bit)  # type: ignore[arg-type]
            blocks.update(zip(hashes, new_blocks, strict=True))
        self._counts[medium] += count
        return True

    def _store_columns(self, columns: Columns) -> bool:
        """The same for a batch of which all blocks are new, each event's behind a known one or the last
        of the event before.
        """
        blocks, hashes, size = self._blocks, columns.hashes, columns.block_size
        if (
            not columns.only_stores
            or self.block_size not in (size, None)
            or self._children is not None
            or len(set(hashes)) != len(hashes)
            or not blocks.keys().isdisjoint(hashes)
        ):
            return False
        at, last = 0, None
        for parent, count in zip(columns.parents, columns.counts, strict=True):
            if parent is not None and parent != last and parent not in blocks:
                return False
            at += count
            last = hashes[at - 1]
        if columns.blocks is None:
            columns.blocks = _blocks_in(columns)
        self.block_size = size
        blocks.update(zip(hashes, columns.blocks, strict=True))
        self._counts[columns.medium] += len(hashes)
        return True

    def _store(self, event: BlockStored) -> None:
        hashes, raw_parent = event.block_hashes, event.parent_block_hash
        parent = None if raw_parent is None else canonical_hash(raw_parent)
        packed, namespace = self._tokens_of(event), self._namespace(event)
        keys = event.extra_keys or None
        if packed is None or namespace is None or not hashes or parent == canonical_hash(hashes[0]):
            self.oddities.malformed += len(hashes)
            return
        self.block_size = event.block_size
        medium = medium_of(event)
        bit, step = _BIT[medium], event.block_size * TOKEN_BYTES
        if parent is not None and parent not in self._blocks:
            self.oddities.unknown_parent += 1
        for at, raw in enumerate(hashes):
            block_hash = canonical_hash(raw)
            held = self._blocks.get(block_hash)
            if held is None:
                text = packed[at * step : (at + 1) * step]
                own = None if keys is None else keys[at] or None
                self._put(block_hash, Block(parent, text, own, namespace, event.lora_id, bit))
                self._counts[medium] += 1
            elif held.media & bit:
                self.oddities.stored_again += 1
            else:
                self._blocks[block_hash] = replace(held, media=held.media | bit)
                self._counts[medium] += 1
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        blocks, hashes = self._blocks, event.block_hashes
        mask = _ALL if event.medium is None else _BIT[event.medium]
        names = hashes if are_canonical(hashes) else [canonical_hash(raw) for raw in hashes]
        for block_hash in names:
            held = blocks.get(block_hash)
            gone = held.media & mask if held else 0
            if held is None or not gone:
                self.oddities.removed_unknown += 1
                continue
            self._uncount(gone)
            left = held.media & ~gone
            if left:
                blocks[block_hash] = replace(held, media=left)
            else:
                self._drop(block_hash, held)

    def _uncount(self, media: int) -> None:
        """A block has left these media."""
        one = _MEDIUM.get(media)
        for medium in _MEDIA if one is None else (one,):
            if media & _BIT[medium]:
                self._counts[medium] -= 1

    def _tokens_of(self, event: BlockStored) -> TokenBytes | None:
        """The tokens of an event; None unless they are whole blocks, one a hash, of this index's size,
        or left out, and the extra keys, if any, are one a hash too.
        """
        size, tokens, keys = event.block_size, event.token_ids, event.extra_keys
        sound = size == self.block_size if self.block_size else size > 0
        if not sound or len(tokens) not in (0, size * len(event.block_hashes)):
            return None
        if keys and not _fit(keys, len(event.block_hashes)):
            return None
        try:
            return pack_tokens(tokens)
        except (TypeError, ValueError):
            return None

    def _put(self, block_hash: BlockHash, block: Block) -> None:
        self._blocks[block_hash] = block
        if self._children is not None and _findable(block):
            self._children[_key(block)] = block_hash

    def _drop(self, block_hash: BlockHash, block: Block) -> None:
        del self._blocks[block_hash]
        if self._children is not None and self._children.get(_key(block)) == block_hash:
            del self._children[_key(block)]

    def _namespace(self, event: BlockStored) -> Namespace | None:
        """The event's namespace; None when its names are too long."""
        if event.lora_name is None and event.cache_salt is None and event.extra_key is None:
            return BASE
        try:
            found = Namespace(event.lora_name, event.cache_salt, event.extra_key)
        except (TypeError, ValueError):
            return None
        return self._namespaces.setdefault(found, found)

    # --------------------------------------------------------------------------------- queries

    def overlap(self, tokens: Any, namespace: Namespace = BASE) -> Overlap:
        """How much of the prompt's prefix is held. Walks by tokens: any engine's hashes will do, and
        blocks that were told without their tokens are not found. Nor are blocks whose extra keys say
        more than the adapter's name, and what is behind them: a namespace does not hold what they say.

        Raises what `pack_tokens` raises.
        """
        packed = pack_tokens(tokens)
        blocks = dict.fromkeys(_MEDIA, 0)
        if self.block_size is None:
            return Overlap(blocks)
        if self._children is None:
            findable = ((n, b) for n, b in self._blocks.items() if _findable(b))
            self._children = {_key(block): name for name, block in findable}
        step, parent, walking, length = self.block_size * TOKEN_BYTES, None, _ALL, 0
        for end in range(step, len(packed) + 1, step):
            text = bytes(packed[end - step : end])
            found = self._children.get((parent, None if length else namespace, text))
            if found is None:
                break
            parent, length = found, length + 1
            walking &= self._blocks[found].media
            for medium, bit in _BIT.items():
                if walking & bit:
                    blocks[medium] = length
        return Overlap(blocks, length)

    def fork(self) -> BlockIndex:
        """An independent copy, in one shallow copy of the table: blocks are immutable."""
        copy = BlockIndex()
        copy._blocks = self._blocks.copy()
        copy._counts = self._counts.copy()
        copy._namespaces = self._namespaces.copy()
        copy.block_size = self.block_size
        return copy

    def snapshot(self, blocks_per_event: int) -> Iterator[list[BlockStored]]:
        """Events that rebuild this index (X4), a list for each chain of at most `blocks_per_event`.

        The index must not change meanwhile; `fork()` first where it might.
        """
        for chain in self._chains(blocks_per_event):
            yield self._chain_events(chain)

    def _chains(self, longest: int) -> Iterator[list[BlockHash]]:
        """Every block once, parents first; a chain's blocks are alike but for their tokens."""
        blocks, told, chain = self._blocks, set[BlockHash](), list[BlockHash]()
        last: Block | None = None
        for start, block in blocks.items():
            if start in told:
                continue
            told.add(start)
            path, at = [start], block.parent
            while at is not None and at not in told and at in blocks:
                told.add(at)
                path.append(at)
                at = blocks[at].parent
            for name in reversed(path):
                block = blocks[name]  # noqa: PLW2901
                if last is not None and (
                    len(chain) == longest
                    or block.parent != chain[-1]
                    or block.media != last.media
                    or block.namespace != last.namespace
                    or block.lora_id != last.lora_id
                    or bool(block.tokens) != bool(last.tokens)
                ):
                    yield chain
                    chain = []
                chain.append(name)
                last = block
        if chain:
            yield chain

    def _chain_events(self, chain: list[BlockHash]) -> list[BlockStored]:
        assert self.block_size is not None
        blocks = [self._blocks[name] for name in chain]
        first = blocks[0]
        tokens = TokenIds(TokenBytes(b"".join([block.tokens for block in blocks])))
        keys = [block.extra_keys for block in blocks]
        return [
            BlockStored(
                block_hashes=list[int | bytes](chain),
                parent_block_hash=first.parent,
                token_ids=tokens,
                block_size=self.block_size,
                lora_id=first.lora_id,
                medium=medium,
                lora_name=first.namespace.lora_name,
                cache_salt=first.namespace.cache_salt,
                extra_key=first.namespace.extra_key,
                extra_keys=keys if any(keys) else None,
            )
            for medium, bit in _BIT.items()
            if first.media & bit
        ]


def _blocks_of(
    parents: list[BlockHash | None], texts: list[bytes], lora_id: int | None, bit: int
) -> Iterator[Block]:
    """One for each text, in the base namespace."""
    return map(Block, parents, texts, repeat(None), repeat(BASE), repeat(lora_id), repeat(bit))


def _blocks_in(columns: Columns) -> list[Block]:
    """Of stores alone."""
    packed, step = columns.packed, columns.block_size * TOKEN_BYTES
    parents, hashes = columns.parents, columns.hashes
    if len(parents) != len(hashes):
        parents, at = [], 0
        for parent, count in zip(columns.parents, columns.counts, strict=True):
            parents += (parent, *hashes[at : at + count - 1])
            at += count
    texts = [packed[at : at + step] for at in range(0, len(packed), step)]
    return list(_blocks_of(parents, texts, None, _BIT[columns.medium]))


def _fit(keys: object, blocks: int) -> bool:
    """Whether they are extra keys of that many blocks."""
    try:
        check_extra_keys(keys, blocks)
    except (TypeError, ValueError):
        return False
    return True


def _findable(block: Block) -> bool:
    """Whether a prompt's tokens and namespace are all that the block is of."""
    if not block.extra_keys:
        return bool(block.tokens)
    return bool(block.tokens) and not has_own_keys(block.extra_keys, block.namespace.lora_name)


def _key(block: Block) -> tuple[BlockHash | None, Namespace | None, bytes]:
    """A block by its content: parent and tokens, and at the start of a prompt its namespace."""
    return block.parent, block.namespace if block.parent is None else None, block.tokens


class FleetIndex:
    """The blocks of many ranks, keyed by (worker, rank)."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int], BlockIndex] = {}

    def rank(self, worker: str, dp_rank: int) -> BlockIndex:
        """The index of one rank; empty and new when nothing is known of it."""
        return self._ranks.setdefault((worker, dp_rank), BlockIndex())

    def forget(self, worker: str) -> None:
        """Drop every rank of a worker."""
        for key in [key for key in self._ranks if key[0] == worker]:
            del self._ranks[key]

    def overlap(self, tokens: Any, namespace: Namespace = BASE) -> dict[tuple[str, int], Overlap]:
        """The prompt's overlap with every rank."""
        packed = pack_tokens(tokens)
        return {key: index.overlap(packed, namespace) for key, index in self._ranks.items()}
