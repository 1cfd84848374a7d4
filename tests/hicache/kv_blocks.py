"""Blocks by what they are, and memory in which the bytes tell which block they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128
from typing import TypeAlias

import torch

from hicache import HostPool, PageIndices, PagePool
from hicache.tier import Tier
from kvevents import BlockHash, HashFormat, Namespace, block_hashes, pack_tokens
from kvevents.hashing import block_digests, chain_seed, namespace_seed, page_key

__all__ = ["Block", "Blocks", "Memory", "Tokens"]

Tokens: TypeAlias = "tuple[int, ...]"


class Block:
    """A namespace and every token up to the block's end. There is one object for each block.

    `name`: its hash on the wire. `key`: what storage calls it. `content`: the bytes of its page.
    """

    __slots__ = ("content", "depth", "key", "name", "namespace", "packed", "parent", "tokens")

    def __init__(
        self,
        parent: Block | None,
        namespace: Namespace,
        tokens: Tokens,
        name: BlockHash,
        key: bytes,
        content: bytes,
        packed: bytes,
    ) -> None:
        self.parent, self.namespace, self.tokens = parent, namespace, tokens
        self.name, self.key, self.content, self.packed = name, key, content, packed
        self.depth: int = 1 if parent is None else parent.depth + 1

    def __repr__(self) -> str:
        return f"<{self.name & 0xFFFF:04x} {self.tokens}>"

    def path(self) -> list[Block]:
        """From the start of the prompt."""
        found = []
        at: Block | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


class Blocks:
    """Every block that a test has named."""

    def __init__(self, page_size: int, hash_format: HashFormat, bytes_per_page: int) -> None:
        self.page_size, self._format, self._bytes = page_size, hash_format, bytes_per_page
        self._found: dict[tuple[Namespace, Tokens], Block] = {}
        self.by_name: dict[BlockHash, Block] = {}
        self.by_key: dict[bytes, Block] = {}
        self.by_content: dict[bytes, Block] = {}

    def of(self, tokens: Sequence[int], namespace: Namespace) -> list[Block]:
        """The whole blocks of a prompt, from its start."""
        size = self.page_size
        found: list[Block] = []
        for end in range(size, len(tokens) + 1, size):
            key = (namespace, tuple(tokens[:end]))
            block = self._found.get(key)
            if block is None:
                block = self._found[key] = self._new(found[-1] if found else None, *key)
            found.append(block)
        return found

    def _new(self, parent: Block | None, namespace: Namespace, tokens: Tokens) -> Block:
        packed = pack_tokens(tokens)
        name = block_hashes(tokens, self.page_size, namespace, self._format)[-1]
        *_, digest = block_digests(chain_seed(namespace), packed, self.page_size)
        key = page_key(digest, namespace_seed(namespace, HashFormat.SGLANG))
        content = shake_128(key).digest(self._bytes)
        own = bytes(pack_tokens(tokens[-self.page_size :]))
        block = Block(parent, namespace, tokens, name, key, content, own)
        self.by_name[name] = self.by_key[key] = self.by_content[content] = block
        return block


class Memory:
    """The two pools, as bytes."""

    def __init__(self, device: PagePool, host: HostPool, blocks: Blocks) -> None:
        self.device, self.host, self._blocks = device, host, blocks
        self._planes = [raw.numpy() for raw in device.raw]

    def write(self, pages: PageIndices, blocks: Sequence[Block]) -> None:
        """As if the device had computed `blocks`."""
        for page, block in zip(pages, blocks, strict=True):
            at = 0
            for raw in self.device.raw:
                size = raw.shape[1]
                part = bytearray(block.content[at : at + size])
                raw[page] = torch.frombuffer(part, dtype=torch.uint8)
                at += size

    def content(self, tier: Tier, page: int) -> bytes:
        """All planes of a page."""
        if tier is Tier.HOST:
            return bytes(self.host.page(page))
        return b"".join(plane[page].tobytes() for plane in self._planes)

    def blocks_in(self, tier: Tier, pages: PageIndices | Sequence[int]) -> list[Block]:
        """Whose bytes `pages` have. Raises AssertionError for those that are nobody's."""
        found = []
        for page in pages:
            block = self._blocks.by_content.get(self.content(tier, page))
            assert block is not None, f"{tier.name} page {page} has no block's bytes"
            found.append(block)
        return found

    def check(self, tier: Tier, page: int, block: Block) -> None:
        """Raises AssertionError unless the page has the block's bytes."""
        if self.content(tier, page) != block.content:
            found = self._blocks.by_content.get(self.content(tier, page))
            raise AssertionError(f"{tier.name} page {page} has the bytes of {found}, not {block}")
