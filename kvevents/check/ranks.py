"""What one rank of a stream holds, and where that was said: each event against those before it.

A rank's blocks are kept by lane: a hybrid model stores a hash once for each of its KV cache groups. Until
a clear, or the beginning of the stream, was seen, what is not known may well have been said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from kvevents.check.finding import Finding, Place, Severity
from kvevents.check.hashes import Verifier
from kvevents.check.rules import RULES
from kvevents.events import BlockRemoved, BlockStored, StorageMedium, medium_of
from kvevents.extra_keys import check_extra_keys, has_own_keys
from kvevents.hashing import BlockHash, canonical_hash, short_hash
from kvevents.tokens import TOKEN_BYTES, pack_tokens

__all__ = ["Lane", "Memory", "Rank", "finding_of"]

_MEDIA = tuple(StorageMedium)
_AT = {medium: position for position, medium in enumerate(_MEDIA)}
_EVERY = tuple(range(len(_MEDIA)))
_RECENT = 20_000
"""Blocks of a stream that are remembered at least after they are gone."""
_MAX_GROUPS = 64
_I63 = 2**63 - 1
_FULL_ATTENTION = (None, "full_attention", "mla_attention", "sink_full_attention")
_LOCAL = (None, "LOCAL")

V = TypeVar("V")


_BASE = (None, None, None)

_Content = tuple[BlockHash | None, int, int]
"""What a hash stands for: its parent, a number in place of the tokens, and one in place of its namespace
and its own extra keys, 0 for none.
"""


class _Recent(Generic[V]):
    """The latest entries, `_RECENT` at least and twice as many at most."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._new: dict[int, V] = {}
        self._old: dict[int, V] = {}

    def get(self, key: int) -> V | None:
        found = self._new.get(key)
        return self._old.get(key) if found is None else found

    def put(self, key: int, value: V) -> None:
        self._new[key] = value
        if len(self._new) >= _RECENT:
            self._old, self._new = self._new, {}


class Memory:
    """Of all lanes of a stream: blocks that are gone."""

    __slots__ = ("gone", "lanes", "was")

    def __init__(self) -> None:
        self.lanes = 0
        """How many there were; each has a number."""
        self.gone = _Recent[Place]()
        """By lane, hash and medium: where it was removed."""
        self.was = _Recent[tuple[_Content, Place]]()
        """By lane and hash: what blocks stood for that are on no medium, and where they were stored."""


class Lane:
    """The blocks of one group: where each was stored last, by medium, and what it stands for."""

    __slots__ = (
        "again",
        "base",
        "behind",
        "content",
        "digests",
        "left",
        "named",
        "parents",
        "present",
        "size",
        "size_place",
    )

    def __init__(self, number: int) -> None:
        self.base = number << 67
        """Where its keys in `Memory` begin."""
        self.present: tuple[dict[BlockHash, Place], ...] = tuple({} for _ in _MEDIA)
        self.content: dict[BlockHash, _Content | None] = {}
        """Of every block on some medium; None where it was told without tokens."""
        self.named: dict[_Content, BlockHash] = {}
        self.behind: tuple[dict[BlockHash, int], ...] = tuple({} for _ in _MEDIA)
        """By medium: how many blocks are there right behind a block."""
        self.parents: tuple[dict[BlockHash, BlockHash], ...] = tuple({} for _ in _MEDIA)
        """By medium: behind which block one is counted. Another event may have said another, or none."""
        self.again: dict[tuple[int, BlockHash], int] = {}
        """How many times more than once it was stored."""
        self.left = False
        """Whether any block has left its last medium."""
        self.digests: dict[str, dict[BlockHash, bytes]] = {}
        """The verifier's."""
        self.size: int | None = None
        self.size_place: Place | None = None

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether it is on some medium."""
        one, two, three, four = self.present
        return block_hash in one or block_hash in two or block_hash in three or block_hash in four


class _Report:
    """What is found in one event: of each rule the first block, and how many."""

    __slots__ = ("found", "medium", "place")

    def __init__(self, place: Place, medium: StorageMedium | None) -> None:
        self.place, self.medium = place, medium
        self.found: dict[str, list[object]] = {}

    def add(
        self,
        rule: str,
        what: str,
        block_hash: BlockHash | None = None,
        earlier: Place | None = None,
        severity: Severity | None = None,
    ) -> None:
        kind = self.found.get(rule)
        if kind is None:
            self.found[rule] = [what, block_hash, earlier, severity, int(block_hash is not None)]
        else:
            kind[4] += 1  # type: ignore[operator]  # it is an int

    def close(self) -> list[Finding]:
        if not self.found:
            return []
        return [
            finding_of(
                rule,
                self.place,
                what,  # type: ignore[arg-type]  # as `add` has put them
                earlier=earlier,  # type: ignore[arg-type]
                severity=severity,  # type: ignore[arg-type]
                medium=self.medium,
                block_hash=block_hash,  # type: ignore[arg-type]
                blocks=blocks,  # type: ignore[arg-type]
            )
            for rule, (what, block_hash, earlier, severity, blocks) in self.found.items()
        ]


def finding_of(
    rule: str,
    place: Place,
    what: str,
    *,
    earlier: Place | None = None,
    severity: Severity | None = None,
    medium: StorageMedium | None = None,
    block_hash: BlockHash | None = None,
    blocks: int = 0,
) -> Finding:
    """A finding of a rule of `RULES`, as severe as that one unless told otherwise."""
    invariant, usual = RULES[rule]
    return Finding(
        invariant, rule, severity or usual, place, what, earlier, medium, block_hash, blocks
    )


class Rank:
    """One rank. `known`: whether all that it holds was seen to be stored."""

    def __init__(self, memory: Memory, *, known: bool, verifier: Verifier | None) -> None:
        self._memory = memory
        self.known = known
        self.cleared: Place | None = None
        """The last AllBlocksCleared."""
        self.lanes: dict[int | None, Lane] = {}
        self._verifier = verifier
        self._wide = False
        """Whether hashes are spelled as vLLM spells them: as unsigned numbers, or digests."""

    def clear(self, place: Place) -> None:
        """It holds nothing: AllBlocksCleared."""
        self.lanes.clear()
        self.known, self.cleared = True, place

    def forget(self) -> None:
        """What it holds is not known any more."""
        self.lanes.clear()
        self.known, self.cleared = False, None

    def _lane(self, group: int | None) -> Lane:
        lane = self.lanes.get(group)
        if lane is None:
            if len(self.lanes) >= _MAX_GROUPS:  # of a stream that makes them up
                self.forget()
            self._memory.lanes += 1
            lane = self.lanes[group] = Lane(self._memory.lanes)
        return lane

    # ---------------------------------------------------------------------------------- stores

    def stored(self, event: BlockStored, place: Place, *, of_a_store: bool) -> list[Finding]:
        """`of_a_store`: objects are told of, of which a block may have several."""
        if event.locality not in _LOCAL:
            return []
        lane = self._lane(event.group_idx)
        medium = medium_of(event)
        report = _Report(place, medium)
        hashes = self._canonical(event.block_hashes)
        parent = event.parent_block_hash
        parent = None if parent is None else canonical_hash(parent)
        packed = _tokens_of(event, lane, report)
        if not hashes:
            report.add("no-blocks", "a store of no block")
            return report.close()
        if event.lora_id is not None and event.lora_name is None:
            what = f"lora_id {event.lora_id} without lora_name: a number means nothing elsewhere"
            report.add("no-identity", what, hashes[0])
        if packed is None and self._verifier is not None:
            self._verifier.unverifiable += len(hashes)
        if packed is None and parent is None:  # by their hashes alone, and in any order
            self._hold(lane, event, place, hashes, report, of_a_store=of_a_store)
        else:
            self._hold_chain(lane, event, place, hashes, parent, packed, report)
        return report.close()

    def _canonical(self, values: list[int | bytes]) -> list[BlockHash]:
        try:
            if max(values) <= _I63:  # type: ignore[operator]  # or it is a TypeError
                return values  # type: ignore[return-value]  # then they are canonical
        except (TypeError, ValueError):  # bytes among them, or none at all
            pass
        found: list[BlockHash] = []
        for value in values:
            if type(value) is int and value <= _I63:
                found.append(BlockHash(value))
            else:
                self._wide = self._wide or type(value) is int or len(value) > 8  # type: ignore[arg-type]
                found.append(canonical_hash(value))
        return found

    def _hold(
        self,
        lane: Lane,
        event: BlockStored,
        place: Place,
        hashes: list[BlockHash],
        report: _Report,
        *,
        of_a_store: bool,
    ) -> None:
        at = _AT[medium_of(event)]
        present = lane.present[at]
        for block_hash in hashes:
            if block_hash in present:
                if not of_a_store:
                    self._stored_again(lane, event, at, block_hash, report)
            else:
                held = lane.content.setdefault(block_hash, None)
                if held is not None and held[0] is not None:
                    behind = lane.behind[at]
                    behind[held[0]] = behind.get(held[0], 0) + 1
                    lane.parents[at][block_hash] = held[0]
            present[block_hash] = place

    def _hold_chain(
        self,
        lane: Lane,
        event: BlockStored,
        place: Place,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        packed: bytes | None,
        report: _Report,
    ) -> None:
        at = _AT[medium_of(event)]
        present, contents, named = lane.present[at], lane.content, lane.named
        if parent is not None and parent != hashes[0]:
            self._check_parent(lane, event, parent, at, report)
        step = event.block_size * TOKEN_BYTES
        names = (event.lora_name or None, event.cache_salt or None, event.extra_key or None)
        space = 0 if names == _BASE else hash(names)
        keys = _keys_of(event, len(hashes), report)
        start = 0
        if self._verifier is not None and packed is not None:
            for block_hash, why in self._verifier.stored(lane.digests, event, hashes, packed):
                report.add("hash", why, block_hash)
        was, behind, parents = self._memory.was, lane.behind[at], lane.parents[at]
        for number, block_hash in enumerate(hashes):
            if block_hash in present:
                if block_hash != parent:
                    self._stored_again(lane, event, at, block_hash, report)
            elif parent is not None and parent != block_hash:
                behind[parent] = behind.get(parent, 0) + 1
                parents[block_hash] = parent
            present[block_hash] = place
            if block_hash == parent:
                report.add("own-parent", "a block that is its own parent", block_hash)
                contents.setdefault(block_hash, None)
                start += step
                continue
            held = contents.get(block_hash)
            if packed is None:
                if held is None:
                    contents[block_hash] = None
                elif held[0] != parent:
                    self._differs(lane, block_hash, held, (parent, *held[1:]), report)
            else:
                tokens = hash(packed[start : start + step])
                start += step
                content = parent, tokens, space
                if keys is not None and (own := keys[number]) is not None:
                    content = parent, tokens, hash((space, own))
                if held is None:
                    if lane.left and (before := was.get(lane.base + block_hash)) is not None:
                        self._compare(block_hash, before, content, report)
                    contents[block_hash] = content
                    twin = named.setdefault(content, block_hash)
                    if twin != block_hash:
                        what = f"{short_hash(block_hash)} is the block that {short_hash(twin)} is"
                        report.add("two-names", what, block_hash, _stored_at(lane, twin))
                elif held != content:
                    self._differs(lane, block_hash, held, content, report)
            parent = block_hash

    def _check_parent(
        self, lane: Lane, event: BlockStored, parent: BlockHash, at: int, report: _Report
    ) -> None:
        if parent in lane.present[at] or not self.known:
            return
        first = canonical_hash(event.block_hashes[0])
        if parent in lane.content:
            where = ", ".join(
                medium
                for medium, there in zip(_MEDIA, lane.present, strict=True)
                if parent in there
            )
            what = f"its parent {short_hash(parent)} is on {where} alone"
            report.add("parent-elsewhere", what, first, _stored_at(lane, parent))
            return
        if any(parent in other.content for other in self.lanes.values()):
            return
        gone = next(
            (
                found
                for other in _EVERY
                if (found := self._memory.gone.get(_key(lane, parent, other)))
            ),
            None,
        )
        since = "is gone" if gone is not None else "was never stored"
        sliding = event.kv_cache_spec_kind not in _FULL_ATTENTION
        report.add(
            "orphan",
            f"its parent {short_hash(parent)} {since}",
            first,
            gone or self.cleared,
            "note" if sliding or (event.group_idx or 0) > 0 else None,
        )

    def _stored_again(
        self, lane: Lane, event: BlockStored, at: int, block_hash: BlockHash, report: _Report
    ) -> None:
        """An engine like vLLM may hold a block twice, and removes it twice then."""
        twice = self._wide or event.group_idx is not None
        if twice:
            lane.again[at, block_hash] = lane.again.get((at, block_hash), 0) + 1
        what = f"{short_hash(block_hash)} is on {_MEDIA[at]} already"
        earlier = lane.present[at][block_hash]
        report.add("stored-again", what, block_hash, earlier, "note" if twice else None)

    def _compare(
        self,
        block_hash: BlockHash,
        before: tuple[_Content, Place],
        content: _Content,
        report: _Report,
    ) -> None:
        """What a block that is gone stood for, with what it stands for now."""
        if before[0] != content:
            what = f"{short_hash(block_hash)} stood for {_other(before[0], content)}"
            report.add("content", what, block_hash, before[1])

    def _differs(
        self, lane: Lane, block_hash: BlockHash, held: _Content, told: _Content, report: _Report
    ) -> None:
        what = f"{short_hash(block_hash)} stood for {_other(held, told)}"
        report.add("content", what, block_hash, _stored_at(lane, block_hash))

    # -------------------------------------------------------------------------------- removals

    def removed(self, event: BlockRemoved, place: Place, *, of_a_store: bool) -> list[Finding]:
        """`of_a_store`: as for `stored`."""
        if event.locality not in _LOCAL:
            return []
        own = self._lane(event.group_idx)
        report = _Report(place, event.medium)
        media = _EVERY if event.medium is None else (_AT[event.medium],)
        hashes = self._canonical(event.block_hashes)
        if not hashes:
            report.add("no-blocks", "a removal of no block")
        any_lane = event.group_idx is None and len(self.lanes) > 1
        for block_hash in hashes:
            lane = own
            if any_lane and block_hash not in own.content:
                lane = next((one for one in self.lanes.values() if block_hash in one.content), own)
            if not self._leave(lane, media, block_hash, place, report) and not of_a_store:
                self._unknown(lane, event.medium, media, block_hash, report)
                for at in media:
                    self._memory.gone.put(_key(lane, block_hash, at), place)
        return report.close()

    def _leave(
        self,
        lane: Lane,
        media: Sequence[int],
        block_hash: BlockHash,
        place: Place,
        report: _Report,
    ) -> bool:
        """Whether it was on one of them."""
        left = False
        stored = None
        memory = self._memory
        for at in media:
            present = lane.present[at]
            if block_hash not in present:
                continue
            left = True
            if lane.again and (more := lane.again.pop((at, block_hash), 0)):
                if more > 1:
                    lane.again[at, block_hash] = more - 1
                continue
            stored = present.pop(block_hash)
            memory.gone.put(lane.base + block_hash * len(_MEDIA) + at, place)
            behind = lane.behind[at]
            if block_hash in behind:
                what = f"{short_hash(block_hash)} leaves {_MEDIA[at]} before those behind it"
                report.add("child-left", what, block_hash, stored)
            parent = lane.parents[at].pop(block_hash, None)
            if parent is not None:
                if (more := behind[parent]) > 1:
                    behind[parent] = more - 1
                else:
                    del behind[parent]
        if stored is not None and block_hash not in lane:
            held = lane.content.pop(block_hash)
            for digests in lane.digests.values():
                digests.pop(block_hash, None)
            if held is not None:
                lane.left = True
                memory.was.put(lane.base + block_hash, (held, stored))
                if lane.named.get(held) == block_hash:
                    del lane.named[held]
        return left

    def _unknown(
        self,
        lane: Lane,
        medium: StorageMedium | None,
        media: Sequence[int],
        block_hash: BlockHash,
        report: _Report,
    ) -> None:
        gone = next(
            (found for at in media if (found := self._memory.gone.get(_key(lane, block_hash, at)))),
            None,
        )
        if gone is None and not self.known:
            return
        where = "any medium" if medium is None else str(medium)
        if gone is not None:
            what = f"{short_hash(block_hash)} was removed from {where} already"
        else:
            what = f"{short_hash(block_hash)} was never on {where}"
            gone = _stored_at(lane, block_hash) or self.cleared
        report.add("removed-unknown", what, block_hash, gone)


def _tokens_of(event: BlockStored, lane: Lane, report: _Report) -> bytes | None:
    """The tokens, packed; None where there are none, or they are not those of its blocks.

    vLLM's offloading tells blocks by their hashes alone, with a `block_size` of 0.
    """
    tokens, size, blocks = event.token_ids, event.block_size, len(event.block_hashes)
    if size < 1:
        offloaded = not size and not len(tokens) and event.parent_block_hash is None
        what = f"block_size is {size}"
        report.add("block-size", what, severity="note" if offloaded else None)
        return None
    if not len(tokens):
        return None
    if lane.size is None:
        lane.size, lane.size_place = size, report.place
    elif size != lane.size:
        report.add(
            "block-size", f"block_size is {size}, and was {lane.size}", None, lane.size_place
        )
    if len(tokens) != size * blocks:
        what = f"{len(tokens)} tokens for {blocks} blocks of {size}"
        report.add("length", what)
        return None
    try:
        return pack_tokens(tokens)
    except (TypeError, ValueError):
        report.add("token-ids", "a token that is not in 0..4294967295")
        return None


def _keys_of(event: BlockStored, blocks: int, report: _Report) -> list[bytes | None] | None:
    """The extra keys of each block that say more than the adapter's name; None for none."""
    if not event.extra_keys:
        return None
    try:
        check_extra_keys(event.extra_keys, blocks)
    except (TypeError, ValueError) as error:
        report.add("extra-keys", f"extra_keys: {error}")
        return None
    return [
        msgspec.msgpack.encode(entry) if has_own_keys(entry, event.lora_name) else None
        for entry in event.extra_keys
    ]


def _other(one: _Content, other: _Content) -> str:
    """In what they differ."""
    differs = [
        words
        for words, same in (
            ("other tokens", one[1] == other[1]),
            ("another parent", one[0] == other[0]),
            ("another namespace", one[2] == other[2]),
        )
        if not same
    ]
    return " and ".join(differs)


def _stored_at(lane: Lane, block_hash: BlockHash) -> Place | None:
    return next((there[block_hash] for there in lane.present if block_hash in there), None)


def _key(lane: Lane, block_hash: BlockHash, at: int) -> int:
    return lane.base + block_hash * len(_MEDIA) + at
