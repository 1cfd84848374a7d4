"""What a cache of all tiers must hold: an account in blocks, without tree, nodes, splits or pages.

Every transition is here once more, from the table of transitions rather than from the code. What the
account cannot know it is told: how each call ended, and which blocks left a tier. That those were the
right ones it checks: as many as were needed, none protected, leaves first, in the policy's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kv_blocks import Block
from stepped import WAITED, Call, Kind

from hicache import HiCacheConfig, PrefetchPolicy, WritePolicy
from hicache.tier import Tier

__all__ = ["Account", "Fetch", "Move", "Seen"]

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
TARGET = {Kind.TO_HOST: Tier.HOST, Kind.TO_DEVICE: Tier.DEVICE, Kind.PUT: Tier.DISK}

Change: TypeAlias = "tuple[str, Tier, Block]"


@dataclass
class Seen:
    """What one call of the cache's did, as the test saw it.

    `gone`: the blocks that left each tier; exact if `heard`, or else those that are not there afterwards.
    `log`: the copies and writes it submitted and waited for. `lost`: what the store said it had lost.
    """

    gone: dict[Tier, set[Block]]
    heard: bool
    log: list[Call | object]
    lost: list[Block]

    def submitted(self, kind: Kind) -> Call | None:
        """The next of the log, if it is of that kind."""
        call = self.log[0] if self.log else None
        if isinstance(call, Call) and call.kind is kind:
            del self.log[0]
            return call
        return None


@dataclass(eq=False)
class Move:
    """Blocks on their way to a tier. `over`: the cache is not interested any more."""

    tier: Tier
    blocks: tuple[Block, ...]
    call: Call
    deadline: float | None = None
    abandoned: bool = False
    over: bool = False


class Stage(Enum):
    LOOKING = 1
    READING = 2
    ENDING = 3
    ENDED = 4


@dataclass(eq=False)
class Fetch:
    """A prefetch: of `blocks`, which follow `base`."""

    base: Block | None
    blocks: list[Block]
    deadline: float
    stage: Stage = Stage.LOOKING
    look: Call | None = None
    read: Call | None = None
    stopped: bool = False
    skipped: bool = False
    """It was stopped before its turn to read came."""
    num_pages: int = 0
    """Host pages that it has."""
    num_taken: int = 0
    num_landed: int = 0

    @property
    def holds(self) -> bool:
        return self.stage in (Stage.LOOKING, Stage.READING)

    @property
    def ended(self) -> bool:
        """Whether its thread has nothing to do for it any more."""
        if self.num_taken:
            return self.skipped or (self.read is not None and self.read.arrived is not None)
        return self.look is not None and self.look.arrived is not None

    @property
    def num_filled(self) -> int:
        return self.read.arrived or 0 if self.read is not None else 0


class Account:
    """`num_pages`: of the pools. `clock`: the cache's."""

    def __init__(
        self, num_pages: dict[Tier, int], config: HiCacheConfig, clock: Callable[[], float]
    ) -> None:
        self.on: dict[Tier, dict[Block, None]] = {tier: {} for tier in TIERS}
        self.free = dict(num_pages)
        self.config, self._clock = config, clock
        self.most_fetched = config.prefetch_max_pages or max(1, num_pages[Tier.HOST] // 2)
        self.locks: Counter[Block | None] = Counter()
        self.moves: list[Move] = []
        self.fetches: list[Fetch] = []
        self.journal: list[Change | None] = []
        """What must have been recorded; None for a clear."""
        self.uses = 0
        self._born = 0
        self._used: dict[Block, int] = {}
        self._hits: dict[Block, int] = {}
        self._priority: dict[Block, int] = {}
        self._births: dict[Block, int] = {}
        self._looks: list[Fetch] = []
        self._reads: list[Fetch] = []
        self._lost_unknown: set[Block] = set()
        self._given_up: Block | None = None
        """The block before one whose copy to the host failed; of the same node, perhaps."""
        self.unwritten: set[Block] = set()
        """What storage need not have: what came from there unknown, and what was above a page that was
        evicted from the host before it was written, which takes along the wish to write its path.
        """
        self._writes_back = config.write_policy is WritePolicy.WRITE_BACK

    # -------------------------------------------------------------------------------- residency

    def leading(self, tier: Tier, blocks: Sequence[Block]) -> int:
        """How many leading blocks a tier has."""
        on = self.on[tier]
        return next((i for i, block in enumerate(blocks) if block not in on), len(blocks))

    def knows(self, block: Block) -> bool:
        """Whether any tier has it."""
        return any(block in on for on in self.on.values())

    def store(self, tier: Tier, block: Block) -> None:
        """The block is on the tier from now on; its page is not free already."""
        assert block not in self.on[tier]
        if not self.knows(block):
            self._born += 1
            self._births[block] = self._born
            self._used[block] = self.uses
            self._hits[block] = self._priority[block] = 0
        self.on[tier][block] = None
        self.journal.append(("S", tier, block))

    def drop(self, tier: Tier, block: Block) -> None:
        """Not any more, and its page is free."""
        del self.on[tier][block]
        if tier in self.free:
            self.free[tier] += 1
        if tier is Tier.HOST and block not in self.on[Tier.DISK]:
            self.unwritten.update(block.path())
        if not self.knows(block):
            self._forget(block)
        self.journal.append(("R", tier, block))

    def _forget(self, block: Block) -> None:
        for fact in (self._births, self._used, self._hits, self._priority):
            del fact[block]

    def use(self, blocks: Iterable[Block]) -> None:
        """The known ones among the blocks of a prompt were used just now."""
        self.uses += 1
        for block in blocks:
            if self.knows(block):
                self._used[block] = self.uses

    def count_insert(self, blocks: Iterable[Block], priority: int) -> None:
        for block in blocks:
            self._hits[block] += 1
            self._priority[block] = max(self._priority[block], priority)

    # --------------------------------------------------------------------------------- eviction

    def protected(self, tier: Tier) -> set[Block]:
        """What locks, and what is on its way, keep on DEVICE or HOST."""
        ends: list[Block | None] = [end for end, count in self.locks.items() if count]
        ends += [
            move.blocks[-1]
            for move in self.moves
            if not move.abandoned and (move.tier is not Tier.DISK or tier is Tier.HOST)
        ]
        ends += [fetch.base for fetch in self.fetches if fetch.holds]
        found: set[Block] = set()
        for at in ends:
            while at is not None and at not in found:
                found.add(at)
                at = at.parent  # noqa: PLW2901
        return found

    def num_evictable(self, tier: Tier) -> int:
        return len(self.on[tier].keys() - self.protected(tier))

    def take(self, tier: Tier, num_pages: int, seen: Seen) -> bool:
        """Take pages, evicting as many as are missing; False, and nothing done, when it cannot be."""
        short = num_pages - self.free[tier]
        if short > self.num_evictable(tier):
            return False
        self.evict(tier, short, seen)
        self.free[tier] -= num_pages
        return True

    def evict(self, tier: Tier, num_pages: int, seen: Seen) -> int:
        """Evict what left the tier, block by block, as far as it was right to go; how many."""
        last = self._given_up = None
        for count in range(num_pages):
            victim = self._victim(tier, seen, last)
            if victim is None:
                return count
            if tier is Tier.DEVICE and self._writes_back:
                self._write_back(victim, seen)
            self.drop(tier, victim)
            last = victim
        return max(num_pages, 0)

    def _victim(self, tier: Tier, seen: Seen, last: Block | None) -> Block | None:
        protected, on = self.protected(tier), self.on[tier]
        inner = {block.parent for block in on}
        leaves = [block for block in on if block not in inner and block not in protected]
        if not leaves:
            return None
        least = min(map(self._rank, leaves))
        first = [block for block in leaves if self._rank(block) == least]
        if self._writes_back and last is not None and last.parent in leaves:
            first.append(last.parent)  # of the same node, perhaps, which goes as a whole
        for block in first:
            if block in seen.gone[tier]:
                return block
        assert not seen.heard, f"{tier.name}: one of {first} goes first, not {seen.gone[tier]}"
        return first[0]

    def _rank(self, block: Block) -> tuple[int, ...]:
        used, hits = self._used[block], self._hits[block]
        match self.config.eviction_policy:
            case "lru":
                return (used,)
            case "mru":
                return (-used,)
            case "lfu":
                return (hits, used)
            case "slru":
                return (hits >= 2, used)
            case "priority":
                return (self._priority[block], used)
            case "fifo":
                return (self._births[block],)
            case "filo":
                return (-self._births[block],)
            case name:
                raise AssertionError(name)

    def _write_back(self, victim: Block, seen: Seen) -> None:
        """The victim's copy to the host, if there was one."""
        if victim in self.on[Tier.HOST]:
            return
        tried = seen.log[0] if seen.log else None
        if isinstance(tried, Call) and tried.kind is Kind.TO_HOST and tried.blocks[-1] is victim:
            assert self.backup(victim, seen)
            assert seen.log and seen.log.pop(0) is WAITED, "write_back waits for the copy"
            for move in list(self.moves):
                if move.tier is Tier.HOST and not move.abandoned:
                    self._settle(move, waited=True)
        elif victim is not self._given_up:
            room = self._room_for(victim)
            needed = len(self.lacking(victim, Tier.HOST))
            assert needed > room, f"{victim} is lost, though the host has room"
        self._given_up = victim.parent

    def _room_for(self, end: Block) -> int:
        """Host pages that there are or could be for the path to `end`."""
        self.locks[end] += 1
        room = self.free[Tier.HOST] + self.num_evictable(Tier.HOST)
        self.locks[end] -= 1
        return room

    # ----------------------------------------------------------------------------------- copies

    def lacking(self, end: Block | None, tier: Tier) -> tuple[Block, ...]:
        """The end of the path to `end` that is neither on the tier nor on its way there."""
        found = []
        while end is not None and end not in self.on[tier] and not self.is_moving(end, tier):
            found.append(end)
            end = end.parent
        return tuple(reversed(found))

    def is_moving(self, block: Block | None, tier: Tier) -> bool:
        return self.mover_of(block, tier) is not None

    def mover_of(self, block: Block | None, tier: Tier) -> Move | None:
        """What brings the block to the tier."""
        for move in self.moves:
            if move.tier is tier and not move.abandoned and block in move.blocks:
                return move
        return None

    def backup(self, end: Block | None, seen: Seen) -> bool:
        """The path to `end` is copied to the host as far as it has to be; False: there was no room."""
        blocks = self.lacking(end, Tier.HOST)
        return not blocks or self._copy(Kind.TO_HOST, blocks, seen) is not None

    def load_back(self, end: Block, seen: Seen) -> Move | None:
        """What brings `end` to the device; None: there was no room."""
        blocks = self.lacking(end, Tier.DEVICE)
        return (
            self._copy(Kind.TO_DEVICE, blocks, seen) if blocks else self.mover_of(end, Tier.DEVICE)
        )

    def _copy(self, kind: Kind, blocks: tuple[Block, ...], seen: Seen) -> Move | None:
        tier, end = TARGET[kind], blocks[-1]
        self.locks[end] += 1
        room = self.take(tier, len(blocks), seen)
        self.locks[end] -= 1
        if not room:
            return None
        call = seen.submitted(kind)
        assert call is not None, f"{kind.name} of {blocks} was due"
        assert call.blocks == blocks, f"{call}, not of {blocks}"
        move = Move(tier, blocks, call, self._clock() + self.config.transfer_timeout_s)
        self.moves.append(move)
        return move

    def written_through(self, blocks: Sequence[Block], seen: Seen) -> None:
        """A prompt was inserted: what the policy wants on the host is copied there, as far as it fits."""
        needed = 0
        if self.config.write_policy is WritePolicy.WRITE_BACK:
            return
        if self.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            needed = self.config.write_through_threshold
        for block in reversed(blocks):
            if block in self.on[Tier.HOST]:
                break
            if self._hits[block] >= needed:
                if not self.backup(block, seen) and (room := self._room_for(block)):
                    assert self.backup(self.lacking(block, Tier.HOST)[room - 1], seen)
                break

    def _settle(self, move: Move, *, waited: bool = False) -> None:
        arrived, tier = move.call.arrived, move.tier
        if move.abandoned:
            if arrived is not None:
                self.moves.remove(move)
                self.free[Tier.HOST if tier is Tier.DISK else tier] += len(move.blocks)
            return
        if arrived is None:
            if waited or (move.deadline is not None and self._clock() > move.deadline):
                self._abandon(move)
            return
        count = arrived if tier is Tier.DISK or arrived == len(move.blocks) else 0
        parent = move.blocks[0].parent
        if count and parent is not None and parent not in self.on[tier]:
            if self.is_moving(parent, tier):
                return
            count = 0
        lost = self._lost_unknown if tier is Tier.DISK else ()
        count = next((i for i in range(count) if move.blocks[i] in lost), count)
        self.moves.remove(move)
        move.over = True
        self._land(tier, move.blocks[:count])
        if tier in self.free:
            self.free[tier] += len(move.blocks) - count
        self._forget_lost()

    def _land(self, tier: Tier, blocks: Iterable[Block]) -> int:
        """The blocks are there now, each in a page of its own; how many of them are new there."""
        num_new = 0
        for block in blocks:
            if block not in self.on[tier]:
                self.store(tier, block)
                num_new += 1
            elif tier in self.free:
                self.free[tier] += 1
        return num_new

    def _abandon(self, move: Move) -> None:
        move.abandoned = move.over = True
        self._forget_lost()

    def _writing(self) -> bool:
        return any(move.tier is Tier.DISK and not move.abandoned for move in self.moves)

    def _forget_lost(self) -> None:
        if not self._writing():
            self._lost_unknown.clear()

    # --------------------------------------------------------------------------------- a tick

    def tick(self, seen: Seen) -> None:
        """What arrived lands, then what was lost goes, then writes are sent off."""
        if self._writing():
            self._lost_unknown.update(b for b in seen.lost if b not in self.on[Tier.DISK])
        for move in list(self.moves):
            self._settle(move)
        for fetch in list(self.fetches):
            self._go_on(fetch, seen)
        for block in seen.lost:
            self.retract(block)
        while call := seen.submitted(Kind.PUT):
            self._put(call)

    def retract(self, block: Block) -> None:
        """The store has lost it: nobody is to believe in what is behind it either."""
        on = self.on[Tier.DISK]
        if block in on:
            behind = [one for one in on if block in one.path()]
            for one in sorted(behind, key=lambda one: -one.depth):
                self.drop(Tier.DISK, one)

    def _put(self, call: Call) -> None:
        """Only what is on the host is written, below what is in the store or on its way there."""
        above = call.blocks[0].parent
        on, host = self.on[Tier.DISK], self.on[Tier.HOST]
        assert above is None or above in on or self.is_moving(above, Tier.DISK), f"{call}: a hole"
        for block, page in zip(call.blocks, call.pages, strict=True):
            assert block.parent is above, f"{call} is no chain"
            assert block in host, f"{call}: {block} is not on the host"
            assert block not in on and not self.is_moving(block, Tier.DISK), f"{call}: twice"
            told = (page.key, page.parent, page.namespace, page.tokens)
            parent = None if above is None else above.key
            assert told == (block.key, parent, block.namespace, block.packed)
            above = block
        self.moves.append(Move(Tier.DISK, call.blocks, call))

    # ------------------------------------------------------------------------------- prefetches

    def fetch(self, base: Block | None, blocks: list[Block]) -> Fetch:
        """A prefetch begins."""
        config = self.config
        size = len(blocks) * len(blocks[0].packed) // 4
        patience = config.prefetch_timeout_base_s + (
            config.prefetch_timeout_per_ki_token_s * size / 1024
        )
        fetch = Fetch(base, blocks[: self.most_fetched], self._clock() + patience)
        self.fetches.append(fetch)
        self._looks.append(fetch)
        return fetch

    def note_reads(self, calls: list[Call]) -> None:
        """The threads are at rest; `calls` are what they asked for since the last time."""
        while self._looks:
            fetch = self._looks[0]
            if fetch.look is None:
                fetch.look = self._next(calls, Kind.EXISTS, fetch.blocks)
            if fetch.look.arrived is None:
                break
            del self._looks[0]
        while self._reads:
            fetch = self._reads[0]
            if fetch.read is None and fetch.stopped:
                fetch.skipped = True
            else:
                if fetch.read is None:
                    wanted = fetch.blocks[: fetch.num_taken]
                    fetch.read = self._next(calls, Kind.GET, wanted)
                if fetch.read.arrived is None:
                    break
            del self._reads[0]
        assert not calls, f"nobody wanted {calls}"

    def _next(self, calls: list[Call], kind: Kind, blocks: list[Block]) -> Call:
        call = next((one for one in calls if one.kind is kind), None)
        assert call is not None, f"{kind.name} of {blocks} was due"
        assert call.blocks == tuple(blocks), f"{call}, not of {blocks}"
        calls.remove(call)
        return call

    def _go_on(self, fetch: Fetch, seen: Seen) -> None:
        if not fetch.ended:
            return
        host = self.on[Tier.HOST]
        match fetch.stage:
            case Stage.LOOKING:
                assert fetch.look is not None
                count = fetch.look.arrived or 0
                if count and self.backup(fetch.base, seen) and self.take(Tier.HOST, count, seen):
                    fetch.num_pages = fetch.num_taken = count
                    fetch.stage = Stage.READING
                    self._reads.append(fetch)
                    return
            case Stage.READING:
                coming = fetch.base not in host and self.is_moving(fetch.base, Tier.HOST)
                if fetch.num_filled and coming:
                    return
                self.land(fetch, fetch.num_filled)
            case _:
                pass
        fetch.stage = Stage.ENDED
        self.free[Tier.HOST] += fetch.num_pages
        fetch.num_pages = 0
        self.fetches.remove(fetch)

    def fetch_done(self, fetch: Fetch) -> bool:
        """A request asks whether it is to wait any longer."""
        if not fetch.holds:
            return True
        policy = self.config.prefetch_policy
        late = self._clock() > fetch.deadline
        if policy is PrefetchPolicy.WAIT_COMPLETE:
            return False
        if policy is PrefetchPolicy.TIMEOUT and not late:
            return False
        fetch.stopped = True
        self.land(fetch, fetch.num_filled)
        return True

    def cancel(self, fetch: Fetch) -> None:
        """A request is gone."""
        if fetch.holds:
            fetch.stopped = True
            self.land(fetch, 0)

    def land(self, fetch: Fetch, count: int) -> None:
        """The first `count` pages are on the host, if the prefix is."""
        if count and (fetch.base is None or fetch.base in self.on[Tier.HOST]):
            fetch.num_landed += self._land(Tier.HOST, fetch.blocks[:count])
            self.unwritten.update(fetch.blocks[:count])
            fetch.num_pages -= count
        fetch.stage = Stage.ENDING

    # ---------------------------------------------------------------------------------- clears

    def flush(self) -> None:
        """Nothing is held, and what is under way comes to nothing."""
        for fetch in self.fetches:
            self.cancel(fetch)
        reading = 0
        for move in self.moves:
            if not move.abandoned:
                self._abandon(move)
                reading += len(move.blocks) if move.tier is Tier.DISK else 0
        for tier in self.free:
            self.free[tier] += len(self.on[tier])
        self.free[Tier.HOST] -= reading
        self.clear()

    def clear(self) -> None:
        for on in self.on.values():
            on.clear()
        for fact in (self._births, self._used, self._hits, self._priority):
            fact.clear()
        self.journal.append(None)

    def reset_device(self) -> None:
        """Nothing is on the device, and copies to and from it come to nothing."""
        for fetch in self.fetches:
            self.cancel(fetch)
        for move in self.moves:
            if move.tier is not Tier.DISK and not move.abandoned:
                self._abandon(move)
        for block in sorted(self.on[Tier.DEVICE], key=lambda one: -one.depth):
            self.drop(Tier.DEVICE, block)
