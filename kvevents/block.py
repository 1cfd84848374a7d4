"""What an index keeps of a block."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.extra_keys import has_own_keys
from kvevents.hashing import BlockHash
from kvevents.namespace import Namespace

__all__ = ["Block", "Chain"]


class Chain(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The tokens of blocks that were told at once, each but the first behind the one before; `step` bytes
    of `packed` are a block's. Its blocks hold it, whose memory so is the event's own: a slice for each
    would be a second copy.
    """

    hashes: list[BlockHash]
    packed: bytes
    step: int


class Block(msgspec.Struct, frozen=True, gc=False):
    """A resident block. `media` has bit i set for the i-th `StorageMedium`."""

    parent: BlockHash | None
    text: bytes | Chain
    """Its tokens, empty when they were left out; or what they are a part of."""
    extra_keys: list[Any] | None
    """Of this block; None for an empty list too."""
    namespace: Namespace
    lora_id: int | None
    media: int
    place: int = 0
    """In its chain."""

    @property
    def tokens(self) -> bytes:
        """Empty when they were left out."""
        text = self.text
        if isinstance(text, bytes):
            return text
        start = self.place * text.step
        return text.packed[start : start + text.step]

    def __eq__(self, other: object) -> bool:
        """Whether the same is said of it; not whether it lies in the same chain."""
        if not isinstance(other, Block):
            return NotImplemented
        return self._said() == other._said()

    def _said(self) -> tuple[object, ...]:
        tokens, media = self.tokens, self.media
        return self.parent, tokens, self.extra_keys, self.namespace, self.lora_id, media

    @property
    def is_findable(self) -> bool:
        """Whether a prompt's tokens and namespace are all that it is of. An adapter that has a number,
        from 1, and no name is in no namespace.
        """
        if self.lora_id and self.namespace.lora_name is None:
            return False
        if not self.extra_keys:
            return bool(self.text)
        return bool(self.text) and not has_own_keys(self.extra_keys, self.namespace.lora_name)
