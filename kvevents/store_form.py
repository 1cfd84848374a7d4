"""Blocks in a store, told as Mooncake's master tells of its objects (RFC 1527).

A payload is `[ms, [map…], dp_rank]`, a map for each object: `stored`, `removed` or `cleared`. What is
read where, by Dynamo 1.6 and by the conductors of August and September 2026:

- Dynamo's shared cache goes by `event_type` and `object_key` alone, and has one mark for a key, whatever
  its media. So an object that leaves one of two media is stored again on the other.
- A conductor goes by `connector_block_hash`, the page's name in hex, which must be the one in the key.
  For the hash of the block it takes the last 8 bytes of it or, the later one, the first, and refuses an
  event whose `seq_hashes` hold the other. So they are empty, as the later masters leave them; so are
  `block_hashes`, which must be equal. A `group_id` would have to be a number: it is nil.
- A clear is `cleared` and no more, whatever is held: a conductor forgets by it. Dynamo passes over it; it
  forgets where a seq is missing, so one is to be left out before a batch that has a clear. Nothing that
  came before a clear in its batch is told.

A block is named by its digest, which events do not carry. It is computed from the tokens and the
parent's, and counts only if the event's hash follows from it. So of the blocks on the media that are told
of, those are told whose parent is told: one that comes before its parent waits for it, and when a parent
leaves its last medium, those behind it are removed before it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.behind import Behind
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import (
    BlockHash,
    HashFormat,
    block_digests,
    canonical_hash,
    chain_seed,
    namespace_seed,
    page_key,
    wire_hash,
)
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, pack_tokens

__all__ = ["DEFAULT_OBJECT_KEY", "StoreSpeller", "check_object_key"]

DEFAULT_OBJECT_KEY: Final = "{digest}"

_FIELDS = ("digest", "block_hash", "model", "dp_rank", "worker_id")
_NAMES_A_BLOCK = {"digest", "block_hash"}
_TYPES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_MAX_TS = 2**52 / 1e6 - 1
"""In the year 2112 an event's id would take more than 64 bits."""

_encode = msgspec.msgpack.Encoder().encode


def _raw(told: dict[str, Any]) -> msgspec.Raw:
    """Encoded at once: as a map an object takes several times the memory."""
    return msgspec.Raw(_encode(told))


def check_object_key(template: str) -> None:
    """Raise ValueError, naming what is wrong, unless `template` gives the keys of a block's objects.

    It is one key, or several with a comma between, one for each object of a page. In each, `{digest}`
    (64 hex digits, the page's name) or `{block_hash}` (16) must appear; `{model}` ("/" as "-"),
    `{dp_rank}` and `{worker_id}` may. Dynamo's layout `{key_prefix: P, pools: [{suffixes: [S, T]}]}` is
    the template `P_{digest}S,P_{digest}T`.
    """
    keys = template.split(",")
    for key in keys:
        try:
            parts = list(string.Formatter().parse(key))
        except ValueError as error:
            raise ValueError(f"object_key: {key!r}: {error}") from None
        fields = set()
        for _, field, spec, conversion in parts:
            if field is None:
                continue
            if field not in _FIELDS:
                known = ", ".join(f"{{{name}}}" for name in _FIELDS)
                raise ValueError(f"object_key: {{{field}}} is not one of {known}")
            if spec or conversion:
                raise ValueError(f"object_key: {{{field}}} takes no format")
            fields.add(field)
        if not fields & _NAMES_A_BLOCK:
            raise ValueError(f"object_key: {key!r} has neither {{digest}} nor {{block_hash}}")
        if key != key.strip():
            raise ValueError(f"object_key: {key!r} begins or ends with a space")
    if len(set(keys)) < len(keys):
        raise ValueError(f"object_key: {template!r} names an object twice")


@dataclass(frozen=True, slots=True)
class _Space:
    """A namespace, and the seeds that come from it."""

    lora_name: str | None
    cache_salt: str | None
    hash_seed: bytes | None
    page_seed: bytes | None


@dataclass(slots=True)
class _Block:
    """A block on a medium that is told of. With neither digest nor tokens it is none that can be told.

    `tokens`: those from which the digest will be made, until the parent's is known. `media`: bits.
    """

    parent: BlockHash | None
    digest: bytes = b""
    space: _Space | None = None
    tokens: TokenBytes | None = None
    told: bool = False
    media: int = 0

    @property
    def lost(self) -> bool:
        return not self.digest and self.tokens is None


class _Change(NamedTuple):
    """What one block did, or all of them did: then there is no block."""

    event_type: str
    block_hash: BlockHash | None = None
    block: _Block | None = None
    medium: str | None = None


class StoreSpeller:
    """Events to the payloads that Mooncake's master writes, of one rank of a worker.

    Stateful: each batch once, in order. The events speak only of media that `media` spells; hashes are
    those of `kvevents.hashing`, folded as `hash_format` says. `model` and `worker_id` go out as
    `model_name` and `backend_id`. A page has the same name under either hash format.

    `left_out` counts the blocks that were not told because their digest could not be had: of another
    algorithm or block size, without tokens, of an adapter that has no name, or after one of these, or
    after one that is on none of the media; there also those that were told before. Nothing is told of
    their removal either.

    Raises ValueError for an empty model or worker, a block size below 1, a rank below 0, and what
    `check_object_key` raises.
    """

    verbatim = False
    clears_by_gap = True

    def __init__(
        self,
        dp_rank: int,
        *,
        block_size: int,
        hash_format: HashFormat,
        media: Mapping[StorageMedium, str],
        object_key: str = DEFAULT_OBJECT_KEY,
        model: str,
        worker_id: str,
    ) -> None:
        check_object_key(object_key)
        for name, number, least in (("dp_rank", dp_rank, 0), ("block_size", block_size, 1)):
            if number < least:
                raise ValueError(f"{name}: {number} is below {least}")
        for name, text in (("model", model), ("worker_id", worker_id)):
            if not text:
                raise ValueError(f"{name}: empty")
        self.left_out = 0
        self._dp_rank, self._block_size, self._hash_format = dp_rank, block_size, hash_format
        self._media, self._object_key = dict(media), object_key
        self._model, self._worker_id = model, worker_id
        self._names = object_key.split(",")
        self._bits = {text: 1 << at for at, text in enumerate(dict.fromkeys(self._media.values()))}
        self._held: dict[BlockHash, _Block] = {}
        self._behind = Behind()

    def spell(self, ts: float, events: Sequence[Event]) -> bytes:
        """The payload of these events. `ts`: seconds since the epoch.

        Event ids rise within the batch, and from one to the next unless it has more than 4,096 maps for
        each microsecond that they are apart. A time before the epoch or after the year 2111, an engine's
        error, is told as the nearest that can be. Raises ValueError for one that is not finite.
        """
        ts = min(max(ts, 0.0), _MAX_TS)
        ms, next_id = int(ts * 1e3), int(ts * 1e6) << 12
        told: list[msgspec.Raw] = []
        for change in self._apply(events):
            told += map(_raw, self._maps(change, ms, next_id + len(told)))
        return _encode((ms, told, self._dp_rank))

    def fresh(self) -> StoreSpeller:
        """One with the same settings that holds nothing."""
        return StoreSpeller(
            self._dp_rank,
            block_size=self._block_size,
            hash_format=self._hash_format,
            media=self._media,
            object_key=self._object_key,
            model=self._model,
            worker_id=self._worker_id,
        )

    def hold(self, events: Iterable[Event]) -> None:
        """Take events that were told before."""
        for _ in self._apply(events):
            pass

    # ----------------------------------------------------------------------------- what is held

    def _apply(self, events: Iterable[Event]) -> Iterator[_Change]:
        events = list(events)
        clears = [at for at, event in enumerate(events) if isinstance(event, AllBlocksCleared)]
        for event in events[clears[-1] :] if clears else events:
            if isinstance(event, BlockStored):
                yield from self._store(event)
            elif isinstance(event, BlockRemoved):
                yield from self._remove(event)
            else:
                self._held.clear()
                self._behind.clear()
                yield _Change("cleared")

    def _store(self, event: BlockStored) -> Iterator[_Change]:
        medium = None if event.medium is None else self._media.get(event.medium)
        if medium is None:
            return
        parent = event.parent_block_hash
        before = None if parent is None else canonical_hash(parent)
        for value, tokens in zip(event.block_hashes, self._tokens(event), strict=True):
            block_hash = canonical_hash(value)
            block = self._held.get(block_hash)
            if block is None or len(event.token_ids):
                made = self._made(event, block_hash, before, tokens)
                if block is None:
                    block = self._hold(block_hash, made)
                elif not block.lost and (made.lost or made.parent != block.parent):
                    block = made  # which is not held: it is told as what it is not
            before = block_hash
            block.media |= self._bits[medium]
            if block.told:
                yield _Change("stored", block_hash, block, medium)
            elif self._can_be_told(block):
                yield from self._tell(block_hash)
            else:
                self.left_out += 1

    def _remove(self, event: BlockRemoved) -> Iterator[_Change]:
        medium = None if event.medium is None else self._media.get(event.medium)
        if (medium is None and event.medium is not None) or event.group_idx:
            return
        for value in event.block_hashes:
            block_hash = canonical_hash(value)
            block = self._held.get(block_hash)
            if block is None:
                continue
            gone = [text for text in self._on(block) if medium in (None, text)]
            for text in gone:
                block.media &= ~self._bits[text]
            if not block.media:
                yield from self._hide_behind(block_hash)
                self._forget(block_hash, block)
            if block.told and gone:
                for text in gone:
                    yield _Change("removed", block_hash, block, text)
                for text in self._on(block):
                    yield _Change("stored", block_hash, block, text)

    def _hold(self, block_hash: BlockHash, block: _Block) -> _Block:
        self._held[block_hash] = block
        if block.parent is not None:
            self._behind.add(block.parent, block_hash)
        return block

    def _forget(self, block_hash: BlockHash, block: _Block) -> None:
        del self._held[block_hash]
        if block.parent is not None:
            self._behind.discard(block.parent, block_hash)

    def _on(self, block: _Block) -> list[str]:
        """The media that a block is on; their order is fixed."""
        return [text for text, bit in self._bits.items() if block.media & bit]

    def _can_be_told(self, block: _Block) -> bool:
        if not block.digest:
            return False
        parent = None if block.parent is None else self._held.get(block.parent)
        return block.parent is None or (parent is not None and parent.told)

    def _tell(self, first: BlockHash) -> Iterator[_Change]:
        """Tell a block, which can be told, and those behind it that waited for it."""
        left = [first]
        while left:
            block_hash = left.pop()
            block = self._held[block_hash]
            block.told = True
            for text in self._on(block):
                yield _Change("stored", block_hash, block, text)
            for name in reversed(self._behind.of(block_hash)):
                behind = self._held[name]
                if behind.tokens is not None:
                    self._complete(name, behind, block)
                if behind.digest:
                    left.append(name)

    def _hide_behind(self, first: BlockHash) -> Iterator[_Change]:
        """Remove what is told of the blocks behind one, those that are behind others first."""
        hidden: list[BlockHash] = []
        left = [first]
        while left:
            told = [name for name in self._behind.of(left.pop()) if self._held[name].told]
            hidden += told
            left += told
        self.left_out += len(hidden)
        for name in reversed(hidden):
            block = self._held[name]
            block.told = False
            for text in self._on(block):
                yield _Change("removed", name, block, text)

    # ---------------------------------------------------------------------------------- digests

    def _made(
        self,
        event: BlockStored,
        block_hash: BlockHash,
        parent: BlockHash | None,
        tokens: TokenBytes | None,
    ) -> _Block:
        """A block of an event. `tokens`: None if it is none of ours."""
        block = _Block(parent)
        if tokens is None:
            return block
        if parent is None:
            self._complete(block_hash, block, self._root(event), tokens)
            return block
        before = self._held.get(parent)
        if before is None or before.tokens is not None:
            block.tokens = tokens
        else:
            self._complete(block_hash, block, before, tokens)
        return block

    def _complete(
        self,
        block_hash: BlockHash,
        block: _Block,
        parent: _Block,
        tokens: TokenBytes | None = None,
    ) -> None:
        """Give a block its digest, if there is one."""
        tokens, block.tokens = tokens or block.tokens, None
        space = parent.space
        if space is None or tokens is None:
            return
        digest = next(block_digests(parent.digest, tokens, self._block_size))
        if wire_hash(digest, space.hash_seed) == block_hash:
            block.digest, block.space = digest, space

    def _root(self, event: BlockStored) -> _Block:
        """What stands before a prompt's first block."""
        try:
            namespace = Namespace(event.lora_name, event.cache_salt, event.extra_key)
        except (TypeError, ValueError):
            return _Block(None)
        space = _Space(
            namespace.lora_name,
            namespace.cache_salt,
            namespace_seed(namespace, self._hash_format),
            namespace_seed(namespace, HashFormat.SGLANG),
        )
        return _Block(None, chain_seed(namespace), space)

    def _tokens(self, event: BlockStored) -> list[TokenBytes | None]:
        """Those of each block; None for what our hashes do not cover, whatever the hash is."""
        blocks, step = len(event.block_hashes), self._block_size * TOKEN_BYTES
        none: list[TokenBytes | None] = [None] * blocks
        if event.block_size != self._block_size or event.group_idx:
            return none
        if event.lora_id is not None and not event.lora_name:
            return none
        try:
            packed = pack_tokens(event.token_ids)
        except (TypeError, ValueError):
            return none
        if len(packed) != blocks * step:
            return none
        keys = event.extra_keys or none
        return [
            None if key else TokenBytes(packed[at * step : (at + 1) * step])
            for at, key in enumerate(keys)
        ]

    # ------------------------------------------------------------------------------------- maps

    def _maps(self, change: _Change, ms: int, first_id: int) -> Iterator[dict[str, Any]]:
        """One for each object, keys in the master's order."""
        event_type, block_hash, block, medium = change
        space = None if block is None else block.space
        head = {
            "event_id": first_id,
            "timestamp": ms,
            "event_type": event_type,
            "type": _TYPES[event_type],
            "model_name": self._model,
            "block_size": self._block_size,
            "additional_salt": space and space.cache_salt,
            "lora_name": space and space.lora_name,
            "tenant_id": "default",
            "backend_id": self._worker_id,
        }
        if block is None or block_hash is None or space is None:
            yield {**head, "medium": None, "dp_rank": self._dp_rank}
            return
        digest = page_key(block.digest, space.page_seed).hex()
        tail: dict[str, Any] = {"base_block_idx": None}
        if event_type == "stored":
            tail |= {"parent_hash": None, "token_ids": None, "parent_block_hash": None}
        for position, name in enumerate(self._names):
            yield {
                **head,
                "event_id": first_id + position,
                "group_id": None,
                "medium": medium,
                "dp_rank": self._dp_rank,
                "object_key": self._object(name, digest, block_hash),
                "connector_block_hash": digest,
                "seq_hashes": (),
                "block_hashes": (),
                **tail,
            }

    def _object(self, name: str, digest: str, block_hash: BlockHash) -> str:
        return name.format(
            digest=digest,
            block_hash=f"{block_hash % 2**64:016x}",
            model=self._model.replace("/", "-"),
            dp_rank=self._dp_rank,
            worker_id=self._worker_id,
        )
