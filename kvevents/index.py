"""What a router believes after applying events.

X1  A block is resident on the media whose last event about it was a store; on no medium, it is not
    in the index.
X2  An event on one medium changes only that medium. A removal that names no medium removes from all;
    AllBlocksCleared removes everything of its rank.
X3  Applying an event a second time changes nothing, so replay and snapshot may overlap.
X4  `snapshot()` yields parents before children, on every medium.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from sys import getrefcount
from typing import Any

from msgspec.structs import replace

from kvevents.block import Block, Chain
from kvevents.columns import Columns
from kvevents.events import BlockRemoved, BlockStored, Event, StorageMedium, medium_of
from kvevents.extra_keys import check_extra_keys
from kvevents.hashing import BlockHash, are_canonical, canonical_hash
from kvevents.namespace import BASE, Namespace
from kvevents.pieces import runs_of
from kvevents.prompts import Prompts
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds, pack_tokens

__all__ = ["BlockIndex", "FleetIndex", "Oddities", "Overlap"]

_MEDIA = tuple(StorageMedium)
_BIT = {medium: 1 << i for i, medium in enumerate(_MEDIA)}
_MEDIUM = {bit: medium for medium, bit in _BIT.items()}
_ALL = (1 << len(_MEDIA)) - 1
_MIN_NAMES = 1000
"""Namespaces that are kept without a look at whether a block is in them."""


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
        self._prompts: Prompts | None = None
        """From the first query on."""
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
        self._prompts = None
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
            or event.lora_id is not None
            or event.lora_name is not None
            or event.cache_salt is not None
            or event.extra_key is not None
            or event.extra_keys is not None
            or (parent is not None and parent not in blocks)
            or not are_canonical(hashes)
        ):
            return False
        try:
            packed = tokens.packed if type(tokens) is TokenIds else pack_tokens(tokens)
        except (TypeError, ValueError):
            return False
        count, bit, step = len(hashes), _BIT[medium], size * TOKEN_BYTES
        if len(packed) != count * step:
            return False
        new: Sequence[Block]
        if count == 1:
            name = hashes[0]
            if name in blocks:
                return False
            new = (Block(parent, packed, None, BASE, None, bit),)  # type: ignore[arg-type]
            blocks[name] = new[0]
        else:
            chain = self._chain_of(hashes, packed, step)
            if chain is None:
                return False
            parents = [parent, *hashes[:-1]]
            same = repeat(chain), repeat(None), repeat(BASE), repeat(None), repeat(bit)
            new = list(map(Block, parents, *same, range(count)))
            blocks.update(zip(hashes, new, strict=True))
        if self._prompts is not None:
            self._prompts.add_chain(hashes, new)
        self._counts[medium] += count
        return True

    def _chain_of(self, hashes: Sequence[BlockHash], packed: bytes, step: int) -> Chain | None:
        """Of an event's blocks; None unless they are several, and none is known."""
        names = list(hashes)
        if len(names) < 2 or len(set(names)) != len(names):
            return None
        return Chain(names, packed, step) if self._blocks.keys().isdisjoint(names) else None

    def _store_columns(self, columns: Columns) -> bool:
        """The same for a batch of which all blocks are new, each event's behind a known one or the last
        of the event before.
        """
        blocks, hashes, size = self._blocks, columns.hashes, columns.block_size
        if (
            not columns.only_stores
            or self.block_size not in (size, None)
            or self._prompts is not None
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
        names = [canonical_hash(raw) for raw in hashes]
        chain = self._chain_of(names, packed, step) if packed and keys is None else None
        for at, block_hash in enumerate(names):
            held = self._blocks.get(block_hash)
            if held is None:
                text = chain or packed[at * step : (at + 1) * step]
                own = None if keys is None else keys[at] or None
                block = Block(parent, text, own, namespace, event.lora_id, bit, at if chain else 0)
                self._put(block_hash, block)
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
        chain: Chain | None = None
        held: Block | None = None
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
                continue
            self._drop(block_hash, held)
            if held.text is not chain:
                if chain is not None:
                    self._thin_out(chain)
                chain = held.text if type(held.text) is Chain else None
        del held
        if chain is not None:
            self._thin_out(chain)

    def _thin_out(self, chain: Chain) -> None:
        """Copy what is left of a chain of which most is gone, so that the rest of it is not kept."""
        if (getrefcount(chain) - 3) * 2 >= len(chain.hashes):
            return  # it is held by its blocks and, in a removal, thrice: that counts them for nothing
        blocks, step = self._blocks, chain.step
        held = map(blocks.get, chain.hashes)
        for start, stop in runs_of([one is not None and one.text is chain for one in held]):
            names, text = chain.hashes[start:stop], chain.packed[start * step : stop * step]
            rest = text if len(names) == 1 else Chain(names, text, step)
            for place, name in enumerate(names):
                blocks[name] = replace(blocks[name], text=rest, place=place)

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
        if self._prompts is not None:
            self._prompts.add(block_hash, block)

    def _drop(self, block_hash: BlockHash, block: Block) -> None:
        del self._blocks[block_hash]
        if self._prompts is not None:
            self._prompts.discard(block_hash, block)

    def _namespace(self, event: BlockStored) -> Namespace | None:
        """The event's namespace; None when its names are too long."""
        if event.lora_name is None and event.cache_salt is None and event.extra_key is None:
            return BASE
        try:
            found = Namespace(event.lora_name, event.cache_salt, event.extra_key)
        except (TypeError, ValueError):
            return None
        if len(self._namespaces) > 2 * len(self._blocks) + _MIN_NAMES:  # others' blocks are gone
            held = {block.namespace for block in self._blocks.values()}
            self._namespaces = {name: name for name in held}
        return self._namespaces.setdefault(found, found)

    # --------------------------------------------------------------------------------- queries

    def overlap(self, tokens: Any, namespace: Namespace = BASE) -> Overlap:
        """How much of the prompt's prefix is held. Walks by tokens: any engine's hashes will do, and
        blocks that were told without their tokens are not found. Nor are blocks whose extra keys say
        more than the adapter's name, or that have its number alone, and what is behind them: a namespace
        does not hold what they say.

        Raises what `pack_tokens` raises.
        """
        blocks = dict.fromkeys(_MEDIA, 0)
        held = self._leading(pack_tokens(tokens), namespace)[1]
        walking = _ALL if held else 0
        for length, block in enumerate(held):
            if block.media & walking != walking:
                _set_length(blocks, walking & ~block.media, length)
                walking &= block.media
        _set_length(blocks, walking, len(held))
        return Overlap(blocks, len(held))

    def _leading(
        self, packed: TokenBytes, namespace: Namespace
    ) -> tuple[list[BlockHash], list[Block]]:
        """The blocks that `overlap` counts, from the beginning of the prompt on."""
        if self.block_size is None:
            return [], []
        if self._prompts is None:
            self._prompts = Prompts(self._blocks)
        return self._prompts.leading(packed, self.block_size * TOKEN_BYTES, namespace, self._blocks)

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

    def pieces(self, longest: int) -> Iterator[Columns | list[BlockStored]]:
        """The same for what is to be kept: in the order in which the blocks came, and in columns of at
        most `longest` blocks where they are plain, which takes a third of the time.
        """
        size = self.block_size or 0
        names: list[BlockHash] = []
        parents: list[BlockHash | None] = []
        texts: list[bytes] = []
        media = 0

        def taken() -> Columns:
            packed, counts = TokenBytes(b"".join(texts)), [1] * len(names)
            piece = Columns(names[:], parents[:], counts, packed, size, _MEDIUM[media])
            names.clear()
            parents.clear()
            texts.clear()
            return piece

        for name, block in self._blocks.items():
            plain = (
                block.media in _MEDIUM
                and block.namespace is BASE
                and block.lora_id is None
                and block.extra_keys is None
                and block.text
            )
            if names and (not plain or block.media != media or len(names) == longest):
                yield taken()
            if not plain:
                yield self._chain_events([name])
                continue
            media = block.media
            names.append(name)
            parents.append(block.parent)
            texts.append(block.tokens)
        if names:
            yield taken()

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
                    or bool(block.text) != bool(last.text)
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
    same = repeat(None), repeat(BASE), repeat(None), repeat(_BIT[columns.medium])
    return list(map(Block, parents, texts, *same))


def _fit(keys: object, blocks: int) -> bool:
    """Whether they are extra keys of that many blocks."""
    try:
        check_extra_keys(keys, blocks)
    except (TypeError, ValueError):
        return False
    return True


def _set_length(blocks: dict[StorageMedium, int], media: int, length: int) -> None:
    """Of the media whose bits are set."""
    for medium, bit in _BIT.items():
        if media & bit:
            blocks[medium] = length


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
