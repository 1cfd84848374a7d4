"""The blocks that one rank holds, for people who ask: which, from where on, and whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvevents.block import Block
from kvevents.events import StorageMedium
from kvevents.extra_keys import has_own_keys
from kvevents.hashing import BlockHash
from kvevents.index import BlockIndex, Overlap
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, pack_tokens

__all__ = ["Held", "HeldBlock", "Scored", "called", "media_of", "score"]

_MEDIA = tuple(StorageMedium)
_MOST_NAMESPACES = 1000
"""Of a prompt's first block; it is walked in each."""
_MOST_REASONS = 2


class HeldBlock(NamedTuple):
    """A block that is resident. `depth`: its place in its prompt, 0 at the start; None when a block
    before it is not held.
    """

    name: BlockHash
    block: Block
    depth: int | None


def media_of(block: Block) -> list[StorageMedium]:
    """Where a block is."""
    return [medium for at, medium in enumerate(_MEDIA) if block.media >> at & 1]


class Held(BlockIndex):
    """A rank's index, with its blocks in the open."""

    def has(self, name: BlockHash) -> bool:
        """Whether it is on any medium."""
        return name in self._blocks

    def path(self, tokens: Any, namespace: Namespace) -> list[HeldBlock]:
        """The blocks that `overlap` counts, from the beginning of the prompt on."""
        names, blocks = self._leading(pack_tokens(tokens), namespace)
        return [
            HeldBlock(name, block, depth)
            for depth, (name, block) in enumerate(zip(names, blocks, strict=True))
        ]

    def blocks(self) -> Iterator[HeldBlock]:
        """All of them."""
        depths: dict[BlockHash, int | None] = {}
        for name, block in self._blocks.items():
            yield HeldBlock(name, block, self._depth(name, depths))

    def _depth(self, name: BlockHash, depths: dict[BlockHash, int | None]) -> int | None:
        """Each block is walked once for all calls, whatever a stream says of parents."""
        walked: list[BlockHash] = []
        at: BlockHash | None = name
        while at is not None and at not in depths and at in self._blocks:
            depths[at] = None  # also where the walk comes back to where it was
            walked.append(at)
            at = self._blocks[at].parent
        depth = -1 if at is None else depths.get(at)
        for one in reversed(walked):
            depth = None if depth is None else depth + 1
            depths[one] = depth
        return depths[name]

    def look_around(self, packed: bytes, namespace: Namespace) -> Around:
        """What else there is of a prompt that is not found, in one pass."""
        step = (self.block_size or 0) * TOKEN_BYTES
        around, first = Around(), packed[:step]
        for block in self._blocks.values():
            around.untold += not block.tokens
            if block.parent is not None:
                around.beheaded += block.parent not in self._blocks
                continue
            if not block.tokens:
                continue
            around.roots += 1
            if block.namespace == namespace:
                around.roots_here += 1
                around.alike = _common(block.tokens, first, around.alike)
            else:
                around.others.add(block.namespace)
            if block.tokens == first:
                if block.namespace != namespace:
                    around.namespaces.add(block.namespace)
                elif block.extra_keys and has_own_keys(block.extra_keys, namespace.lora_name):
                    around.keyed += 1
            elif block.namespace == namespace:
                around.one_more |= block.tokens[TOKEN_BYTES:] == first[:-TOKEN_BYTES]
                around.one_less |= block.tokens == packed[TOKEN_BYTES : step + TOKEN_BYTES]
        return around


def _common(one: bytes, other: bytes, least: int) -> int:
    """How many tokens both begin with; `least` where it is no more."""
    count = least
    if one[: count * TOKEN_BYTES] != other[: count * TOKEN_BYTES]:
        return least
    longest = min(len(one), len(other))
    while (end := (count + 1) * TOKEN_BYTES) <= longest:
        if one[end - TOKEN_BYTES : end] != other[end - TOKEN_BYTES : end]:
            break
        count += 1
    return count


@dataclass(slots=True)
class Around:
    """Blocks. `untold`: of which no tokens were told. `beheaded`: whose parent is not held. `keyed`: that
    begin the prompt, with extra keys that tokens do not say. `namespaces`: others that begin it.
    `roots`: first ones of a prompt that were told with tokens, `roots_here`: those of its namespace;
    `others`: namespaces of the rest.
    `alike`: how many tokens one of `roots_here` and the prompt begin with.
    `one_more`, `one_less`: a beginning is held with one token before the prompt's, or without its first.
    """

    untold: int = 0
    beheaded: int = 0
    keyed: int = 0
    namespaces: set[Namespace] = field(default_factory=set)
    roots: int = 0
    roots_here: int = 0
    others: set[Namespace] = field(default_factory=set)
    alike: int = 0
    one_more: bool = False
    one_less: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """How much of a prompt one rank holds, in blocks from its beginning.

    `whole`: how many blocks the prompt has. `elsewhere`: the same tokens in other namespaces, where they
    are held, most first. `reasons`: why it is no more, as far as the stream says.
    """

    worker: str
    rank: int
    block_size: int | None
    whole: int
    overlap: Overlap
    elsewhere: list[tuple[Namespace, int]]
    reasons: list[str]

    @property
    def order(self) -> tuple[object, ...]:
        """Best first."""
        size, media = self.block_size or 0, self.overlap.blocks.values()
        held = (-size * self.overlap.any_medium, *(-size * count for count in media))
        return (*held, self.worker, self.rank)


def score(
    ranks: Iterable[tuple[str, int, Held]], tokens: Any, namespace: Namespace
) -> list[Scored]:
    """Each rank's, the best first."""
    packed = pack_tokens(tokens)
    scored = [_score(worker, rank, index, packed, namespace) for worker, rank, index in ranks]
    return sorted(scored, key=lambda one: one.order)


def _score(worker: str, rank: int, index: Held, packed: bytes, namespace: Namespace) -> Scored:
    size, total = index.block_size, len(packed) // TOKEN_BYTES
    overlap = index.overlap(packed, namespace)
    whole = total // size if size else 0
    if overlap.any_medium == whole and whole:
        return Scored(worker, rank, size, whole, overlap, [], [])
    elsewhere: list[tuple[Namespace, int]] = []
    if size is None:
        reasons = ["holds no block"]
    elif not whole:
        has = "1 token" if total == 1 else f"{total} tokens"
        reasons = [f"the prompt has {has}, less than a block of {size}: nothing can be found"]
    else:
        around = index.look_around(packed, namespace)
        chosen = sorted(around.namespaces, key=repr)[:_MOST_NAMESPACES]
        found = [(other, index.overlap(packed, other).any_medium) for other in chosen]
        elsewhere = sorted((one for one in found if one[1]), key=lambda one: -one[1])
        if overlap.any_medium:
            reasons = list(_why_no_more(index, overlap, whole, around, elsewhere, namespace))
        else:
            reasons = list(_why_nothing(index, whole, around, elsewhere, namespace))[:_MOST_REASONS]
    return Scored(worker, rank, size, whole, overlap, elsewhere, reasons)


def _why_no_more(
    index: Held,
    overlap: Overlap,
    whole: int,
    around: Around,
    elsewhere: list[tuple[Namespace, int]],
    namespace: Namespace,
) -> Iterator[str]:
    """Its first block is held, and not all."""
    held = overlap.any_medium
    assert index.block_size is not None, "a block is held"
    yield f"the chain breaks at block {held}, token {held * index.block_size}"
    yield from _untold(index, around)
    yield from _held_elsewhere(whole, elsewhere, namespace)


def _why_nothing(
    index: Held,
    whole: int,
    around: Around,
    elsewhere: list[tuple[Namespace, int]],
    namespace: Namespace,
) -> Iterator[str]:
    """Its first block is not held; the likeliest cause first."""
    yield from _held_elsewhere(whole, elsewhere, namespace)
    if around.keyed:
        yield "its first block is held with extra keys (of an image, say), which tokens do not tell"
    yield from _untold(index, around)
    if around.one_more:
        yield "a prompt is held that begins alike, with one token more before it (BOS?)"
    if around.one_less:
        yield "a prompt is held that begins alike, without the first token (BOS?)"
    begins = around.one_more or around.one_less or around.keyed or elsewhere
    if around.roots and not begins:
        yield _unlike(index, around, namespace)
    if around.beheaded:
        what = "blocks are held" if around.roots or around.untold else "only blocks are held"
        yield f"{what} whose beginning is not: chains of that kind: {around.beheaded}"


def _untold(index: Held, around: Around) -> Iterator[str]:
    if around.untold:
        all_of = "all" if around.untold == len(index) else f"{around.untold} of {len(index)}"
        yield f"token ids are left out of {all_of} blocks: these cannot be found by tokens"


def _held_elsewhere(
    whole: int, elsewhere: list[tuple[Namespace, int]], namespace: Namespace
) -> Iterator[str]:
    for other, blocks in elsewhere[:3]:
        yield f"{blocks} of {whole} blocks are held under {called(other)}, not under {_here(namespace)}"


def _unlike(index: Held, around: Around, namespace: Namespace) -> str:
    """Prompts are held, but none that begins so."""
    roots, here = around.roots, around.roots_here
    if not here:
        which = (
            "the 1 first block that is held is" if roots == 1 else f"all {roots} first blocks are"
        )
        names = sorted(map(called, around.others))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{which} under {', '.join(names[:3])}{more}, none under {_here(namespace)}"
    of = "1 first block" if here == 1 else f"{here} first blocks"
    size = index.block_size
    begin = "has other tokens" if here == 1 else "have other tokens"
    return f"the {of} held under {_here(namespace)} {begin}: at best {around.alike} of {size} are alike"


def _here(namespace: Namespace) -> str:
    return "the base" if namespace == Namespace() else called(namespace)


def called(namespace: Namespace) -> str:
    """A namespace in words."""
    names = [("lora", namespace.lora_name), ("cache salt", namespace.cache_salt)]
    names.append(("extra key", namespace.extra_key))
    return ", ".join(f"{what} {name!r}" for what, name in names if name) or "the base"
