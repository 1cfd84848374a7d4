"""A cache of all tiers under test, with its router and its accounts.

After each call of the cache's, five accounts of it are compared, none of which sees the others:

- `Account` says, block by block, what must be on each tier, what must be free, and what was recorded;
- the pools' bytes and the files say what is there;
- the router's `BlockIndex` says what was announced, and the `Witness` that it could be understood;
- the copies and writes under way say which pages must be left alone;
- the cache says what it holds, and that its invariants hold.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest
import torch
from hicache_rig import (
    Witness,
    feed_of_events,
    feed_of_records,
    over_the_wire,
)
from kv_blocks import Block, Blocks, Memory, Tokens
from stepped import Call, Calls, Kind, Outcome, SteppedStorage, SteppedTransfers
from tiers_account import TIERS, Account, Change, Fetch, Move, Seen

from hicache import (
    Flight,
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    KVShape,
    MLAShape,
    Node,
    PageIndices,
    PagePool,
    Prefetch,
)
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat, file_keys
from hicache.tier import MEDIUM, Tier
from hicache.transfer import CpuTransfers
from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockStored,
    Event,
    HashFormat,
    Namespace,
)
from kvevents.hashing import canonical_hash
from kvevents.index import Oddities

__all__ = ["SHAPES", "Damage", "Setup", "TiersRig"]

SHAPES = (
    KVShape(1, 1, 1, torch.int64),
    KVShape(2, 1, 2, torch.bfloat16),
    MLAShape(2, 4, torch.float8_e4m3fn),
)
"""Eight bytes a page and more, or two blocks would look alike."""
PAGE_FILE_BYTES = 250
"""About what a page's file has besides the page."""
MAGIC = b"kvpage\x00\x02"
"""A page's file ends with it."""
TICKS_OF_A_PAUSE = 101
"""So many ticks, and storage that failed is tried again."""

MakeCache: TypeAlias = Callable[..., HiRadixCache]


class Damage(Enum):
    """What somebody does to a page's file."""

    GONE = 1
    CUT = 2
    CHANGED = 3


@dataclass(frozen=True)
class Setup:
    """A cache to be built. `max_pages`: of the store, about; None: as many as there are."""

    page_size: int = 2
    device_pages: int = 6
    host_pages: int = 6
    storage: bool = True
    max_pages: int | None = None
    audit_interval_s: float | None = None
    parents_first: bool = False
    """Whether the store tells of a lost page before those behind it."""
    shape: KVShape | MLAShape = SHAPES[0]
    hash_format: HashFormat = HashFormat.SGLANG
    by_records: bool = True
    listen_every: int = 1
    config: HiCacheConfig = field(
        default_factory=lambda: HiCacheConfig(load_back_threshold=0, prefetch_threshold=0)
    )


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Held(NamedTuple):
    """A node, and the block that it ends with; None for a root."""

    node: Node
    end: Block | None


class Request(NamedTuple):
    """A request between its allocation and its insert."""

    tokens: Tokens
    namespace: Namespace
    prefix: Held
    first_page: int
    pages: PageIndices


class Load(NamedTuple):
    """A request that waits for its pages to be loaded back."""

    tokens: Tokens
    namespace: Namespace
    lock: Held
    flight: Flight
    move: Move


class TiersRig:
    """Does to the cache what an engine does, to its tiers what the world does, and checks everything."""

    def __init__(self, setup: Setup, make_cache: MakeCache = HiRadixCache) -> None:
        self.setup, self._make_cache = setup, make_cache
        self.clock = Clock()
        self.directory = Path(tempfile.mkdtemp(prefix="tiers-", dir=_fast_directory()))
        self.form = PageFormat("org/model@1", setup.shape, setup.page_size)
        self.blocks = Blocks(setup.page_size, setup.hash_format, self.form.bytes_per_page)
        self._names = file_keys(self.form)
        self.index, self.witness = BlockIndex(), Witness()
        self.prompts: list[tuple[Tokens, Namespace]] = []
        self.damaged: set[Block] = set()
        """Pages in the store with wrong bytes or none, which nobody has found out yet."""
        self._files: dict[Block, tuple[int, ...]] = {}
        """The files that were found to be right, with what would show a change."""
        self._open()

    def _open(self) -> None:
        setup = self.setup
        device = PagePool(setup.device_pages, setup.page_size, setup.shape)
        host = HostPool(setup.host_pages, setup.page_size, setup.shape)
        self.memory = Memory(device, host, self.blocks)
        self.calls = Calls()
        self.store: SteppedStorage | None = None
        if setup.storage:
            most = setup.max_pages and setup.max_pages * (
                self.form.bytes_per_page + PAGE_FILE_BYTES
            )
            inner = FileStorage(self.directory, self.form, max_bytes=most, min_free_bytes=0)
            self.store = SteppedStorage(
                inner, self.calls, self.blocks, setup.audit_interval_s, setup.parents_first
            )
        self.cache = self._make_cache(
            device,
            host_pool=host,
            storage=self.store,
            transfers=SteppedTransfers(CpuTransfers(device, host), self.calls, self.memory),
            config=setup.config,
            hash_format=setup.hash_format,
            clock=self.clock,
        )
        num_pages = {Tier.DEVICE: setup.device_pages, Tier.HOST: setup.host_pages}
        self.account = Account(num_pages, setup.config, self.clock)
        self.feed = feed_of_events()
        if setup.by_records:
            self.feed = feed_of_records(setup.page_size, setup.hash_format)
        self.mine: set[int] = set()
        self.held: list[Held] = []
        self.requests: list[Request] = []
        self.loads: list[Load] = []
        self.fetches: list[tuple[Prefetch, Fetch]] = []
        self.nodes: list[Held] = []
        self.sound = setup.max_pages is None
        """Whether storage did all that was asked for, so far."""
        self._heard: list[Event] | None = None
        self._places: dict[Tier, set[int]] = {}
        self._unheard = 0
        self._telling = False

    def close(self) -> None:
        """End the threads and remove the files."""
        self.calls.cancel()
        self.cache.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --------------------------------------------------------------------------------- requests

    def match(self, tokens: Tokens, namespace: Namespace) -> tuple[Held, Held]:
        """Match, and check what was found and the bytes; the ends on the device and on the host."""
        blocks, account = self.blocks.of(tokens, namespace), self.account
        match = self.cache.match_prefix(tokens, namespace)
        num_pages = account.leading(Tier.DEVICE, blocks)
        num_known = max(num_pages, account.leading(Tier.HOST, blocks))
        assert match.num_pages == num_pages
        assert match.num_host_pages == num_known - num_pages
        assert self.memory.blocks_in(Tier.DEVICE, match.page_indices) == blocks[:num_pages]
        account.use(blocks)
        self._nothing_else()
        found = Held(match.node, _end(blocks[:num_pages]))
        host = Held(match.host_node, _end(blocks[:num_known]))
        assert num_known > num_pages or found == host
        self.nodes += [found, host]
        return found, host

    def match_and_lock(self, tokens: Tokens, namespace: Namespace, *, host: bool) -> None:
        """Match, and keep what was found, on the host or on the device alone."""
        found = self.match(tokens, namespace)[host]
        self._lock(found)
        self.held.append(found)

    def lock_again(self, which: int) -> None:
        """Lock a node from the past. One whose prompt is on neither tier any more is refused."""
        old = self.nodes[which]
        account = self.account
        there = old.end in account.on[Tier.DEVICE] or old.end in account.on[Tier.HOST]
        if old.end is not None and not there:
            with pytest.raises(ValueError, match="any more"):
                self.cache.lock(old.node)
            return
        try:
            self.cache.lock(old.node)
        except ValueError:  # evicted, and its prompt cached anew below another node
            return
        account.locks[old.end] += 1
        self.held.append(old)
        self._nothing_else()

    def unlock(self, which: int) -> None:
        """Give up a lock."""
        self._unlock(self.held.pop(which))

    def request(self, tokens: Tokens, namespace: Namespace, priority: int = 0) -> None:
        """A request from its match to its unlock; nothing when there is no room for it."""
        if self.begin(tokens, namespace):
            self.finish(-1, priority)

    def begin(self, tokens: Tokens, namespace: Namespace) -> bool:
        """Match, lock, allocate, compute. False, and nothing kept, when there is no room."""
        prefix, _ = self.match(tokens, namespace)
        self._lock(prefix)
        first_page = 0 if prefix.end is None else prefix.end.depth
        pages = self._compute(tokens, namespace, first_page)
        if pages is None:
            self._unlock(prefix)
            return False
        self.requests.append(Request(tokens, namespace, prefix, first_page, pages))
        return True

    def finish(self, which: int, priority: int = 0) -> None:
        """Insert what a request computed and give up its lock."""
        one = self.requests.pop(which)
        self._insert(one.tokens, one.namespace, one.pages, one.first_page, priority)
        self._unlock(one.prefix)

    def abort(self, which: int) -> None:
        """Free what a request computed and give up its lock."""
        one = self.requests.pop(which)
        self._free(one.pages)
        self._unlock(one.prefix)

    def insert_all(self, tokens: Tokens, namespace: Namespace) -> None:
        """Compute the whole prompt, whatever is cached, and insert it from page 0."""
        pages = self._compute(tokens, namespace, 0)
        if pages is not None:
            self._insert(tokens, namespace, pages, 0, 0)

    def insert_with_own(self, tokens: Tokens, namespace: Namespace) -> None:
        """Insert a prompt from page 0, bringing the cache's own pages for what it holds."""
        if not self.begin(tokens, namespace):
            return
        one = self.requests.pop()
        own = self.cache.match_prefix(tokens, namespace).page_indices[: one.first_page]
        self.account.use(self.blocks.of(tokens, namespace))
        self._insert(tokens, namespace, own + one.pages, 0, 0)
        self._unlock(one.prefix)

    # ---------------------------------------------------------------------------- lower tiers

    def load_back(self, tokens: Tokens, namespace: Namespace, max_pages: int | None = None) -> None:
        """Lock what the host has of a prompt, and have it copied to the device."""
        device, host = self.match(tokens, namespace)
        self._lock(host)
        flight = self.cache.load_back(host.node, max_pages=max_pages)
        seen, account = self._see(), self.account
        num_pages = (host.end.depth if host.end else 0) - (device.end.depth if device.end else 0)
        few = num_pages * self.setup.page_size < self.setup.config.load_back_threshold
        many = max_pages is not None and num_pages > max_pages
        move = None
        if num_pages and not few and not many:
            assert host.end is not None
            move = account.load_back(host.end, seen)
        self._account_for(seen)
        assert (flight is None) == (move is None)
        if flight is None or move is None:
            self._unlock(host)
            return
        for load in self.loads:
            assert (load.flight is flight) == (load.move is move)
        self.loads.append(Load(tokens, namespace, host, flight, move))

    def finish_load(self, which: int) -> None:
        """A request goes on when its load is done, with whatever came of it."""
        load = self.loads[which]
        assert load.flight.done == load.move.over
        if load.flight.done:
            del self.loads[which]
            self.request(load.tokens, load.namespace)
            self._unlock(load.lock)

    def abort_load(self, which: int) -> None:
        """A request does not wait any longer."""
        self._unlock(self.loads.pop(which).lock)

    def prefetch(self, tokens: Tokens, namespace: Namespace) -> None:
        """Begin to fetch what neither device nor host has."""
        blocks, account = self.blocks.of(tokens, namespace), self.account
        known = max(account.leading(tier, blocks) for tier in (Tier.DEVICE, Tier.HOST))
        wanted = blocks[known:]
        prefetch = self.cache.prefetch(tokens, namespace)
        size = len(wanted) * self.setup.page_size
        due = self.setup.storage and size and size >= self.setup.config.prefetch_threshold
        if prefetch is None:
            assert not due or account.fetches, "a prefetch was due"
        else:
            assert due
            self.fetches.append((prefetch, account.fetch(_end(blocks[:known]), wanted)))
        self._nothing_else()

    def prefetch_done(self, which: int) -> None:
        """A request asks whether to wait; it goes on if not."""
        prefetch, fetch = self.fetches[which]
        done = self.cache.prefetch_done(prefetch)
        seen = self._see()
        assert done == self.account.fetch_done(fetch)
        self._account_for(seen)
        if done:
            assert prefetch.num_landed == fetch.num_landed
            del self.fetches[which]

    def cancel_prefetch(self, which: int) -> None:
        """A request is gone; asking again later is safe."""
        prefetch, fetch = self.fetches[which]
        self.cache.cancel_prefetch(prefetch)
        seen = self._see()
        self.account.cancel(fetch)
        self._account_for(seen)
        assert prefetch.num_landed == fetch.num_landed

    def evict(self, num_pages: int) -> None:
        """Evict from the device."""
        freed = self.cache.evict(num_pages)
        seen = self._see()
        assert freed == self.account.evict(Tier.DEVICE, num_pages, seen)
        self._account_for(seen)

    def tick(self) -> None:
        """A step of the scheduler."""
        self.cache.tick()
        seen = self._see()
        self.account.tick(seen)
        self._account_for(seen)

    def idle(self) -> None:
        """Ticks in which nothing happens, until storage that failed is tried again."""
        self.tick()
        self.tick()
        if self.account.fetches:
            return
        for _ in range(TICKS_OF_A_PAUSE):
            self.cache.tick()
            if self.calls.log or (self.store is not None and self.store.taken):
                break
        seen = self._see()
        self.account.tick(seen)
        self._account_for(seen)

    # -------------------------------------------------------------------------------- the world

    def release(self, which: int, outcome: Outcome) -> None:
        """A call under way ends."""
        held = self.calls.held
        self._release(held[which % len(held)], outcome)

    def release_all(self) -> None:
        """All of them end well."""
        while held := self.calls.held:
            self._release(held[0], Outcome.OK)

    def _release(self, call: Call, outcome: Outcome) -> None:
        before = self.calls.under_way
        self.calls.release(call, outcome)
        for one in before:
            if one.arrived is not None:
                self._check_result(one)
        self._settle_threads()
        self._nothing_else()

    def plan(self, outcomes: list[Outcome]) -> None:
        """What becomes of the next copies that an eviction waits for."""
        self.calls.outcomes = list(outcomes)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now += seconds
        self._nothing_else()

    def damage(self, which: int, how: Damage) -> None:
        """Somebody damages a page's file. Nobody knows, until it is looked for or read."""
        files = [block for block in self.blocks.by_key.values() if self._path(block).exists()]
        if not files:
            return
        self._damage(files[which % len(files)], how)

    def _damage(self, block: Block, how: Damage) -> None:
        path = self._path(block)
        if not path.exists():
            return
        match how:
            case Damage.GONE:
                path.unlink()
            case Damage.CUT:
                os.truncate(path, path.stat().st_size - 1)
            case Damage.CHANGED:
                with path.open("r+b") as file:
                    first = file.read(1)
                    file.seek(0)
                    file.write(bytes([first[0] ^ 1]))
        self.damaged.add(block)
        self.sound = False

    def stored_by_another(self, tokens: Tokens, namespace: Namespace) -> None:
        """Another worker stores a prompt, of which this one does not hear."""
        if self.store is None:
            return
        allocator = self.memory.host.allocator
        borrowed = allocator.take(1)
        if borrowed is not None:
            for block in self.blocks.of(tokens, namespace):
                self.memory.host.page(borrowed[0])[:] = block.content
                self.store.put_now(block, borrowed)
            allocator.take_back(borrowed)
        self._nothing_else()

    def look_for_damage(self) -> None:
        """The store happens to look whether its files are there."""
        if self.store is not None:
            self.store.audit(list(self.blocks.by_key))
            self._nothing_else()

    def restart(self) -> None:
        """The worker ends in the midst of everything, and another begins over the same store."""
        if self.store is None:
            return
        self.calls.cancel()
        self.cache.close()
        found = self._restorable()
        self._open()
        self._settle_threads()
        account = self.account
        heard = self._listen()
        assert isinstance(heard[0], AllBlocksCleared) if found else not heard
        assert all(isinstance(event, BlockStored) for event in heard[1:])
        if not found:  # then the sidecar's first batch says so
            self.index.clear()
            self.witness = Witness()
        order = {
            canonical_hash(name): at
            for at, name in enumerate(
                name for event in heard[1:] if isinstance(event, BlockStored)
                for name in event.block_hashes
            )
        }  # fmt: skip
        assert order.keys() == {block.name for block in found}
        for block in sorted(found, key=lambda block: order[block.name]):
            account.store(Tier.DISK, block)
        account.journal.clear()

    def _restorable(self) -> set[Block]:
        """The pages whose files, and those of all before them, can be told by their ends."""
        found: set[Block] = set()
        for block in sorted(self.blocks.by_key.values(), key=lambda block: block.depth):
            path = self._path(block)
            if block.parent is not None and block.parent not in found:
                continue
            with suppress(FileNotFoundError):
                if path.read_bytes().endswith(MAGIC):
                    found.add(block)
        return found

    # ---------------------------------------------------------------------------------- clears

    def flush(self) -> None:
        """Flush, which a lock refuses."""
        if self._refuses("flush"):
            return
        self.cache.flush()
        seen = self._see()
        if self.store is not None:
            assert self.store.inner.held() == [], "what storage has is deleted, known of or not"
        self.account.flush()
        self._account_for(seen)

    def reset_device(self) -> None:
        """Drop the device's copies, which a lock refuses."""
        if self._refuses("reset_device"):
            return
        self.cache.reset_device()
        seen = self._see()
        self.account.reset_device()
        self._account_for(seen)

    def _refuses(self, what: str) -> bool:
        num_locks = len(self.held) + len(self.requests) + len(self.loads)
        if num_locks:
            with pytest.raises(ValueError, match=f"{what}: {num_locks} locks are held"):
                getattr(self.cache, what)()
            self._nothing_else()
        return num_locks > 0

    def end_all(self) -> None:
        """Every request is aborted, every lock given up."""
        while self.requests:
            self.abort(-1)
        while self.loads:
            self.abort_load(-1)
        while self.held:
            self.unlock(-1)

    def calm_down(self) -> None:
        """Everything under way ends well, and nothing stays behind."""
        self._settle_threads()
        for _ in range(100):
            if not self.cache.num_in_flight and not self.calls.under_way:
                break
            self.release_all()
            self.tick()
            self.calls.start()
        else:
            raise AssertionError(f"{self.cache.num_in_flight} are still under way")
        account = self.account
        assert not account.moves and not account.fetches
        for prefetch, fetch in self.fetches:
            assert self.cache.prefetch_done(prefetch)
            assert prefetch.num_landed == fetch.num_landed
        self.fetches.clear()
        if self.sound and self.setup.storage:
            missing = (
                account.on[Tier.HOST].keys() - account.on[Tier.DISK].keys() - account.unwritten
            )
            assert not missing, f"{missing} are on the host and were never written"

    # --------------------------------------------------- what chance puts together too rarely

    def below(self, *tiers: Tier) -> list[tuple[Tokens, Namespace]]:
        """The prompts of which the last of `tiers` has more than the others and the device."""
        found = []
        for tokens, namespace in self.prompts[-20:]:
            blocks = self.blocks.of(tokens, namespace)
            *above, last = (self._leading(tier, blocks) for tier in (Tier.DEVICE, *tiers))
            if last > max(above):
                found.append((tokens, namespace))
        return found

    def _leading(self, tier: Tier, blocks: list[Block]) -> int:
        """Whatever the cache knows of storage, its files count."""
        if tier is not Tier.DISK:
            return self.account.leading(tier, blocks)
        missing = (i for i, block in enumerate(blocks) if not self._path(block).exists())
        return next(missing, len(blocks))

    def split_in_flight(
        self, tokens: Tokens, namespace: Namespace, cuts: list[int], outcome: Outcome
    ) -> None:
        """A prompt is split, perhaps in several places, while a copy or write of it is under way."""
        size = self.setup.page_size
        for cut in cuts:
            fork = tokens[: cut % (len(tokens) // size + 1) * size]
            self.match(fork, namespace)
            self.request(fork + (3,) * size, namespace)
        if self.calls.held:
            self.release(-1, outcome)
        self.tick()

    def fetch_through(
        self, tokens: Tokens, namespace: Namespace, known: int, ends: list[tuple[int, Outcome]]
    ) -> None:
        """A prefetch from its beginning to its end, below `known` pages that the device has."""
        if known:
            self.request(tokens[: known * self.setup.page_size], namespace)
        num_fetches = len(self.fetches)
        self.prefetch(tokens, namespace)
        if len(self.fetches) > num_fetches:
            for which, outcome in ends:
                if self.calls.held:
                    self.release(which, outcome)
                self.tick()
            self.prefetch_done(-1)

    def overtake(self, tokens: Tokens, namespace: Namespace, outcome: Outcome) -> None:
        """A request computes what is being loaded back."""
        self.load_back(tokens, namespace)
        self.request(tokens, namespace)
        if self.calls.held:
            self.release(-1, outcome)
        self.tick()

    def lose_while_written(self, which: int, how: Damage) -> None:
        """A page is written, and lost again before the cache hears of either."""
        puts = [call for call in self.calls.held if call.kind is Kind.PUT]
        if puts and self.store is not None:
            call = puts[which % len(puts)]
            self._release(call, Outcome.OK)
            self._damage(call.blocks[which % len(call.blocks)], how)
            self.look_for_damage()
            self.tick()

    # ------------------------------------------------------------------------------- re-telling

    def begin_retell(self) -> None:
        """The sidecar asks for the state."""
        self.cache.begin_retell()
        self._telling = True
        self._nothing_else()

    def retell(self, num_blocks: int) -> None:
        """A step of the re-telling."""
        self._telling |= self.cache.retelling
        self.cache.retell(num_blocks)
        self._nothing_else()

    def retell_all(self, num_blocks: int) -> None:
        """The rest of the re-telling, which ends after one step for each block at the latest."""
        num_blocks_known = len(set().union(*self.account.on.values()))
        self._telling |= self.cache.retelling
        for _ in range(num_blocks_known + 1):
            self.cache.retell(num_blocks)
        assert not self.cache.retelling
        self._nothing_else()

    # --------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """After every step: everything that can be seen agrees."""
        self._nothing_else()
        self._check_cache()
        self._check_router()
        self._check_bytes()
        self._check_what_is_under_way()
        if self.store is not None:
            self._check_files(self.store)

    def _nothing_else(self) -> None:
        """Nothing happened but what was accounted for."""
        self._account_for(self._see())

    def _see(self) -> Seen:
        """What the cache's last call did."""
        self._settle_threads()
        self._unheard += 1
        events: list[Event] = []
        telling = self._telling or self.cache.retelling
        if self._unheard >= self.setup.listen_every or telling:
            events = self._listen()
        exact = self.setup.listen_every == 1 and not telling
        self._telling = self.cache.retelling
        self._heard = events if exact else None
        gone = self._gone(events) if exact else self._not_there()
        log, self.calls.log = self.calls.log, []
        lost = [] if self.store is None else [self.blocks.by_key[key] for key in self.store.taken]
        if self.store is not None:
            self.store.taken = []
        return Seen(gone, exact, log, lost)

    def _gone(self, events: list[Event]) -> dict[Tier, set[Block]]:
        found: dict[Tier, set[Block]] = {tier: set() for tier in TIERS}
        for kind, tier, block in self._changes(events):
            if kind == "R":
                found[tier].add(block)
        return found

    def _not_there(self) -> dict[Tier, set[Block]]:
        resident = self.cache.resident_blocks()
        known = self.blocks.by_name
        return {
            tier: {known[name] for name in known.keys() - resident[MEDIUM[tier]]} for tier in TIERS
        }

    def _changes(self, events: list[Event]) -> list[Change]:
        found: list[Change] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                continue
            kind = "S" if isinstance(event, BlockStored) else "R"
            tier = next(tier for tier in TIERS if MEDIUM[tier] is event.medium)
            names = map(canonical_hash, event.block_hashes)
            found += [(kind, tier, self.blocks.by_name[name]) for name in names]
        return found

    def _listen(self) -> list[Event]:
        events = over_the_wire(self.feed(self.cache))
        self.witness.see(events)
        self.index.apply(events)
        assert self.index.oddities == Oddities()
        self._unheard = 0
        return events

    def _account_for(self, seen: Seen) -> None:
        """The account has followed; what it wrote down must be what was recorded and submitted."""
        assert not seen.log, f"{seen.log} were not due"
        self.account.note_reads(self.calls.reads)
        journal, self.account.journal = self.account.journal, []
        if self._heard is not None:
            cleared = sum(isinstance(event, AllBlocksCleared) for event in self._heard)
            assert cleared == journal.count(None), "cleared"
            due = [change for change in journal if change is not None]
            changes = self._changes(self._heard)
            for tier in TIERS:
                stored, told = (
                    [block for kind, at, block in of if (kind, at) == ("S", tier)]
                    for of in (due, changes)
                )
                assert told == stored, f"{tier.name}: told of {told}, stored were {stored}"
            assert sorted(map(_sortable, changes)) == sorted(map(_sortable, due))
        free = {tier: pool.allocator.num_free for tier, pool in self._pools()}
        assert free == self.account.free

    def _check_cache(self) -> None:
        cache, account = self.cache, self.account
        assert cache.violations() == []
        resident = cache.resident_blocks()
        for tier in TIERS:
            names = {block.name for block in account.on[tier]}
            assert resident.pop(MEDIUM[tier]) == names, f"{tier.name} holds something else"
        assert not any(resident.values())
        device = account.on[Tier.DEVICE]
        assert cache.num_resident == len(device)
        assert cache.num_protected == len(device.keys() & account.protected(Tier.DEVICE))
        assert cache.num_evictable == account.num_evictable(Tier.DEVICE)
        assert self.memory.device.allocator.lent_pages() == self.mine
        assert cache.num_in_flight >= len(account.moves) + len(account.fetches)

    def _pools(self) -> list[tuple[Tier, PagePool | HostPool]]:
        return [(Tier.DEVICE, self.memory.device), (Tier.HOST, self.memory.host)]

    def _check_router(self) -> None:
        if self._unheard:
            return
        believed = self.index.resident
        for tier in TIERS:
            truth = {block.name for block in self.account.on[tier]}
            told = believed.pop(MEDIUM[tier])
            assert told <= truth if self.cache.retelling else told == truth, tier.name
        assert not any(believed.values())
        if not self.cache.retelling:
            for tokens, namespace in self.prompts[-3:]:
                blocks = self.blocks.of(tokens, namespace)
                overlap = self.index.overlap(tokens, namespace)
                for tier in TIERS:
                    assert overlap.blocks[MEDIUM[tier]] == self.account.leading(tier, blocks)

    def _check_bytes(self) -> None:
        by_name = self.blocks.by_name
        for tier, _ in self._pools():
            places = self.cache.resident_pages(tier)
            for name, page in places.items():
                self.memory.check(tier, page, by_name[name])
            assert len(set(places.values())) == len(places), "a page holds one block"
            self._places[tier] = set(places.values())

    def _check_what_is_under_way(self) -> None:
        """Pages being written are nobody else's, and pages being read are what they were."""
        untouchable: dict[Tier, set[int]] = {}
        for tier, pool in self._pools():
            allocator = pool.allocator
            untouchable[tier] = {
                *self._places[tier], *allocator.free_pages(), *allocator.lent_pages()
            }  # fmt: skip
        abandoned = {move.call for move in self.account.moves if move.abandoned}
        for call in self.calls.under_way:
            if call.target is not None:
                tier = Tier.DEVICE if call.kind is Kind.TO_DEVICE else Tier.HOST
                assert untouchable[tier].isdisjoint(call.target), f"{call} writes to others' pages"
            if call.source is not None and (call.kind is Kind.PUT or call not in abandoned):
                tier = Tier.DEVICE if call.kind is Kind.TO_HOST else Tier.HOST
                for page, block in zip(call.source, call.blocks, strict=True):
                    self.memory.check(tier, page, block)

    def _check_result(self, call: Call) -> None:
        """A call that ended says no more than is true."""
        if call.kind is Kind.GET and call.target is not None:
            for page, block in zip(call.target[: call.arrived], call.blocks, strict=False):
                self.memory.check(Tier.HOST, page, block)
        if call.kind is Kind.PUT:
            self.sound &= call.arrived == len(call.blocks)  # one before its parent's is refused
            for block in call.blocks:
                if block not in self.damaged and self._path(block).exists():
                    self._check_file(block)

    def _check_files(self, store: SteppedStorage) -> None:
        """What is believed to be in the store is in its file, but for what it is about to retract."""
        lost = {self.blocks.by_key[key] for key in store.lost}
        self.damaged = {block for block in self.damaged - lost if not self._whole(block)}
        for block in self.account.on[Tier.DISK]:
            if block not in self.damaged and block not in lost:
                self._check_file(block)

    def _whole(self, block: Block) -> bool:
        """Whether the block's file is whole again."""
        try:
            content = self._path(block).read_bytes()
        except FileNotFoundError:
            return False
        return content.startswith(block.content) and content.endswith(MAGIC)

    def _check_file(self, block: Block) -> None:
        path = self._path(block)
        stat = path.stat()
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._files.get(block) != state:
            assert path.read_bytes()[: len(block.content)] == block.content, f"{block} in its file"
            self._files[block] = state

    # ----------------------------------------------------------------------------------- inside

    def _path(self, block: Block) -> Path:
        return self.directory / self._names(block.key)[0]

    def _settle_threads(self) -> None:
        """Until the prefetching threads are at rest."""
        prefetches = self.cache._prefetches
        if prefetches is None or not (self.account.fetches or len(prefetches)):
            return
        self.calls.settle(prefetches._looking, Kind.EXISTS)
        self.calls.settle(prefetches._reading, Kind.GET)

    def _lock(self, held: Held) -> None:
        self.cache.lock(held.node)
        self.account.locks[held.end] += 1
        self._nothing_else()

    def _unlock(self, held: Held) -> None:
        self.cache.unlock(held.node)
        self.account.locks[held.end] -= 1
        self._nothing_else()

    def _compute(self, tokens: Tokens, namespace: Namespace, first_page: int) -> PageIndices | None:
        """Pages from `first_page` on, allocated and filled."""
        blocks = self.blocks.of(tokens, namespace)[first_page:]
        pages = self.cache.allocate(len(blocks))
        if pages is not None:
            assert len(set(pages)) == len(blocks) and self.mine.isdisjoint(pages)
            self.mine.update(pages)
        seen = self._see()
        assert (pages is not None) == self.account.take(Tier.DEVICE, len(blocks), seen)
        self._account_for(seen)
        if pages is not None:
            self.memory.write(
                pages, blocks
            )  # at once: a copy that still reads or writes them shows
        return pages

    def _insert(
        self, tokens: Tokens, namespace: Namespace, pages: PageIndices, first: int, priority: int
    ) -> None:
        """Insert, and free the duplicates among `pages`."""
        blocks, account = self.blocks.of(tokens, namespace), self.account
        existing = account.leading(Tier.DEVICE, blocks)
        insertion = self.cache.insert(tokens, pages, namespace, first_page=first, priority=priority)
        assert insertion.num_existing == existing
        self.mine.difference_update(pages[existing - first :])
        seen = self._see()
        for block in blocks[existing:]:
            account.store(Tier.DEVICE, block)
        account.use(blocks)
        account.count_insert(blocks, priority)
        account.written_through(blocks, seen)
        self._account_for(seen)
        self._free(array("q", self.mine.intersection(pages[: existing - first])))
        self.nodes.append(Held(insertion.node, _end(blocks)))
        self.prompts.append((tokens, namespace))

    def _free(self, pages: PageIndices) -> None:
        self.cache.free(pages)
        self.mine.difference_update(pages)
        self.account.free[Tier.DEVICE] += len(pages)
        self._nothing_else()


def _end(blocks: Sequence[Block]) -> Block | None:
    return blocks[-1] if blocks else None


def _sortable(change: Change) -> tuple[str, int, int]:
    kind, tier, block = change
    return kind, int(tier), block.name


def _fast_directory() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None
