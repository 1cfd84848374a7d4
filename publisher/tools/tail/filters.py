"""Which events are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StorageMedium,
    medium_of,
)
from kvevents.hashing import canonical_hash, short_hash
from kvevents.reading import Reading
from publisher.config.checks import shown
from publisher.tools.fleet.prompt import parse_tokens

__all__ = ["Filter", "HashPattern", "parse_filter"]

_BITS = 2**64 - 1
_SHORT = 12
"""Digits of `short_hash`: so many are those of a hash as it was shown, and of no other."""
_KINDS: dict[str, type[Event]] = {
    "stored": BlockStored,
    "removed": BlockRemoved,
    "cleared": AllBlocksCleared,
    "blockstored": BlockStored,
    "blockremoved": BlockRemoved,
    "allblockscleared": AllBlocksCleared,
}
_OUR_WORDS = {"host": StorageMedium.CPU}
"""Of a medium, besides those that `StorageMedium` understands."""
_MEDIA = (
    "GPU (device), CPU_PINNED (cpu, host, cpu_tier1), DISK (storage, nvme, cpu_tier2),"
    " EXTERNAL (remote, network, shared)"
)
_MOST = 1 << 18
"""Blocks that are remembered, so that their removal is shown too; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class HashPattern:
    """Hashes that begin with hex digits, or are a number."""

    digits: str
    number: int | None

    def matches(self, value: int | bytes) -> bool:
        """Whether a hash, as it was on the wire, is one of them."""
        bits = canonical_hash(value) & _BITS
        if self.number is not None and bits == self.number & _BITS:
            return True
        if not self.digits:
            return False
        if short_hash(bits).startswith(self.digits):
            return True
        if len(self.digits) != _SHORT and f"{bits:016x}".startswith(self.digits):
            return True
        return isinstance(value, bytes) and value.hex().startswith(self.digits)


class _Blocks:
    """Blocks, and a number for each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def get(self, value: int | bytes) -> int | None:
        return self._numbers.get(canonical_hash(value))

    def put(self, value: int | bytes, number: int) -> None:
        numbers = self._numbers
        numbers[canonical_hash(value)] = number
        if len(numbers) > _MOST:
            del numbers[next(iter(numbers))]

    def has_any(self, values: Iterable[int | bytes]) -> bool:
        return any(canonical_hash(value) in self._numbers for value in values)


class _Prefix:
    """The blocks of a prompt, and of all that go on from it: those whose tokens, from the first of their
    chain on, are the prompt's as far as both go.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._ends = _Blocks()
        """How many tokens there are up to the end of each block."""

    def store(self, event: BlockStored) -> bool:
        parent, size = event.parent_block_hash, event.block_size
        start = 0 if parent is None else self._ends.get(parent)
        if start is None or size < 1 or len(event.token_ids) < size:
            return False
        found = False
        wanted = self._tokens
        for at, block in enumerate(event.block_hashes):
            if start < len(wanted):
                most = min(size, len(wanted) - start)
                mine = list(event.token_ids[at * size : at * size + most])
                if mine != wanted[start : start + most]:
                    break
            start += size
            self._ends.put(block, start)
            found = True
        return found

    def has_any(self, values: Iterable[int | bytes]) -> bool:
        return self._ends.has_any(values)


class Filter:
    """Events that are all of what is given; None: any. A clear is of every medium. Where blocks are asked
    for, by hash, prompt or adapter, it passes if one of them was stored since the clear before.

    Stateful: it is shown every batch, in order, for a removal does not say whose block it was.
    """

    def __init__(
        self,
        *,
        kinds: frozenset[type[Event]] | None = None,
        media: frozenset[StorageMedium] | None = None,
        hashes: Sequence[HashPattern] | None = None,
        token_prefix: Sequence[int] | None = None,
        loras: frozenset[str] | None = None,
        ranks: frozenset[int] | None = None,
    ) -> None:
        self._kinds, self._media, self._hashes = kinds, media, hashes
        self._prefix = None if token_prefix is None else _Prefix(token_prefix)
        self._loras, self._ranks = loras, ranks
        self._adapted = _Blocks()
        self._holders: set[tuple[str, int]] = set()
        """Sources and ranks that have stored something of what is asked for since their last clear."""

    @property
    def given(self) -> tuple[str, ...]:
        """What is asked for, by the names of the options."""
        parts = {
            "event": self._kinds,
            "medium": self._media,
            "hash": self._hashes,
            "token-prefix": self._prefix,
            "lora": self._loras,
            "rank": self._ranks,
        }
        return tuple(name for name, part in parts.items() if part is not None)

    @property
    def open(self) -> bool:
        """Whether everything passes."""
        return not self.given

    def choose(self, reading: Reading, source: str = "") -> list[int]:
        """The positions of those that pass."""
        events = reading.events
        if self._ranks is not None and reading.rank not in self._ranks:
            return []
        holder = source, reading.rank
        return [at for at, event in enumerate(events) if self._passes(event, holder)]

    def _passes(self, event: Event, holder: tuple[str, int]) -> bool:
        passes = self._clears(holder) if isinstance(event, AllBlocksCleared) else self._has(event)
        if passes and isinstance(event, BlockStored):
            self._holders.add(holder)
        return passes and (self._kinds is None or type(event) in self._kinds)

    def _clears(self, holder: tuple[str, int]) -> bool:
        """Whether a clear takes what is asked for."""
        held = holder in self._holders
        self._holders.discard(holder)
        return held or (self._hashes is None and self._prefix is None and self._loras is None)

    def _has(self, event: BlockStored | BlockRemoved) -> bool:
        """Whether it is about blocks that are asked for, where they are."""
        ours = self._is_ours(event)  # first of all: it remembers
        if self._media is not None and not (
            medium_of(event) in self._media
            or (isinstance(event, BlockRemoved) and event.medium is None)
        ):
            return False
        return ours and (self._hashes is None or self._has_hash(event, self._hashes))

    def _is_ours(self, event: BlockStored | BlockRemoved) -> bool:
        """Whether its blocks are of the prompt, and of the adapter."""
        prefix, loras = self._prefix, self._loras
        if prefix is None and loras is None:
            return True
        if isinstance(event, BlockStored):
            begins = prefix is None or prefix.store(event)
            if loras is None:
                return begins
            if event.lora_name not in loras:
                return False
            for block in event.block_hashes:
                self._adapted.put(block, 0)
            return begins
        hashes = event.block_hashes
        return (prefix is None or prefix.has_any(hashes)) and (
            loras is None or self._adapted.has_any(hashes)
        )

    @staticmethod
    def _has_hash(event: BlockStored | BlockRemoved, patterns: Sequence[HashPattern]) -> bool:
        for pattern in patterns:
            if any(map(pattern.matches, event.block_hashes)):
                return True
            parent = getattr(event, "parent_block_hash", None)
            if parent is not None and pattern.matches(parent):
                return True
        return False


# ---------------------------------------------------------------------------------------- options


def parse_filter(
    *,
    event: str | None = None,
    medium: str | None = None,
    hash_: str | None = None,
    token_prefix: str | None = None,
    lora: str | None = None,
    rank: str | None = None,
) -> Filter:
    """That of the options of these names, each a list with commas; tokens as `parse_tokens` has them.
    Raises ValueError.
    """
    return Filter(
        kinds=None if event is None else frozenset(map(_kind, event.split(","))),
        media=None if medium is None else frozenset(map(_medium, medium.split(","))),
        hashes=None if hash_ is None else [_pattern(one) for one in hash_.split(",")],
        token_prefix=None if token_prefix is None else parse_tokens("--token-prefix", token_prefix),
        loras=None if lora is None else frozenset(lora.split(",")),
        ranks=None
        if rank is None
        else frozenset(_int("--rank", one, 2**31 - 1) for one in rank.split(",")),
    )


def _kind(text: str) -> type[Event]:
    if text.lower() not in _KINDS:
        raise ValueError(f"--event: {shown(text)} is not stored, removed or cleared")
    return _KINDS[text.lower()]


def _medium(text: str) -> StorageMedium:
    try:
        return _OUR_WORDS.get(text.lower()) or StorageMedium(text or "?")
    except ValueError:
        raise ValueError(f"--medium: {shown(text)} is none of {_MEDIA}") from None


def _pattern(text: str) -> HashPattern:
    """Hex digits as printed, or a number as in JSON; where it may be both, it is."""
    lower = text.lower().removeprefix("0x")
    decimal = text.removeprefix("-")
    number = int(text) if decimal.isascii() and decimal.isdecimal() and len(decimal) < 21 else None
    if number is not None and not -(2**63) <= number < 2**64:
        number = None
    is_hex = bool(lower) and all(one in "0123456789abcdef" for one in lower)
    if number is None and not is_hex:
        raise ValueError(f"--hash: {shown(text)} is neither hex digits nor a number of 64 bits")
    return HashPattern(lower if is_hex else "", number)


def _int(key: str, text: str, high: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= high):
        raise ValueError(f"{key}: {shown(text)} is not in 0..{high}")
    return int(text)
