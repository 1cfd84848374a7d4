"""Which block comes next in a prompt, by its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvevents.block import Block, Chain
from kvevents.hashing import BlockHash
from kvevents.namespace import Namespace

__all__ = ["Prompts"]

_AT_ONCE = 32
"""Blocks of a chain that are compared at once: of a long one mostly less is shared."""


class Prompts:
    """The blocks of an index that tokens can find: at the start of a prompt by namespace and tokens,
    behind another by that block, whose one child needs no key with its tokens.
    """

    def __init__(self, blocks: Mapping[BlockHash, Block]) -> None:
        self._starts: dict[tuple[Namespace, bytes], BlockHash] = {}
        self._behind: dict[BlockHash, BlockHash] = {}
        """One of each parent's children."""
        self._others: dict[tuple[BlockHash, bytes], BlockHash] = {}
        """The rest, by parent and tokens."""
        for name, block in blocks.items():
            self.add(name, block)

    def add(self, name: BlockHash, block: Block) -> None:
        """A block that is not there; nothing where it cannot be found by tokens."""
        if not block.is_findable:
            return
        parent = block.parent
        if parent is None:
            self._starts[block.namespace, block.tokens] = name
        elif self._behind.setdefault(parent, name) != name:
            self._others[parent, block.tokens] = name

    def add_chain(self, names: Sequence[BlockHash], blocks: Sequence[Block]) -> None:
        """Blocks that are not there and that can be found, each but the first behind the one before."""
        self.add(names[0], blocks[0])
        if self._behind.keys().isdisjoint(names):
            self._behind.update(pairwise(names))
        else:
            for name, block in zip(names[1:], blocks[1:], strict=True):
                self.add(name, block)

    def discard(self, name: BlockHash, block: Block) -> None:
        """The reverse; nothing where it is not there."""
        parent = block.parent
        if parent is None:
            if self._starts.get((block.namespace, block.tokens)) == name:
                del self._starts[block.namespace, block.tokens]
        elif self._behind.get(parent) == name:
            del self._behind[parent]
        elif self._others and self._others.get((parent, block.tokens)) == name:
            del self._others[parent, block.tokens]

    def leading(
        self,
        packed: bytes,
        step: int,
        namespace: Namespace,
        blocks: Mapping[BlockHash, Block],
    ) -> tuple[list[BlockHash], list[Block]]:
        """The blocks that these tokens begin with, of `step` bytes each. `blocks`: all there are."""
        end = len(packed) - len(packed) % step
        names, found = list[BlockHash](), list[Block]()
        behind, others, at = self._behind.get, self._others, 0
        name = self._starts.get((namespace, packed[:step]))
        block = None if name is None else blocks[name]
        while name is not None and block is not None:
            names.append(name)
            found.append(block)
            at += step
            text = block.text
            if type(text) is Chain:
                along = _along(text, block.place + 1, packed, at, end, blocks)
                if along:
                    names += text.hashes[block.place + 1 : block.place + 1 + len(along)]
                    found += along
                    name = names[-1]
                    at += len(along) * step
            if at >= end:
                break
            parent, name = name, behind(name)
            if name is not None:
                block = blocks[name]
                text = block.text
                if packed.startswith(text if type(text) is bytes else block.tokens, at):
                    continue
            name = others.get((parent, packed[at : at + step])) if others else None
            block = None if name is None else blocks[name]
        return names, found


def _along(
    chain: Chain, start: int, packed: bytes, at: int, end: int, blocks: Mapping[BlockHash, Block]
) -> list[Block]:
    """The blocks of the chain, from its place `start` on, that come at `at`."""
    found: list[Block] = []
    length = len(chain.hashes)
    while start < length and at < end:
        alike = _alike(chain, start, packed, at, end)
        for name in chain.hashes[start : start + alike]:
            held = blocks.get(name)
            if held is None or held.text is not chain:
                return found
            found.append(held)
        if not alike:
            break
        start += alike
        at += alike * chain.step
    return found


def _alike(chain: Chain, start: int, packed: bytes, at: int, end: int) -> int:
    """How many blocks of the chain, from its place `start` on, come at `at`, as far as is looked."""
    step, text = chain.step, chain.packed
    low, high = 0, min(_AT_ONCE, len(chain.hashes) - start, (end - at) // step)
    start *= step
    if packed.startswith(text[start : start + high * step], at):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if packed.startswith(text[start : start + middle * step], at):
            low = middle
        else:
            high = middle
    return low
