"""A cache under test, a router that hears of it, and what the test itself knows.

Three accounts of the same cache, none of which sees the others:

- `BlockLRU`, a prefix cache without tree, nodes or pages, says what must be resident;
- the KV memory says what is: whoever computes a page writes its block's hash and tokens into it;
- the router's `BlockIndex` says what was announced.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

import pytest
import torch

from hicache import HiRadixCache, Insertion, KVShape, Match, Node, PageIndices, PagePool
from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockHash,
    BlockIndex,
    BlockStored,
    Event,
    HashFormat,
    KVEventBatch,
    Materializer,
    Namespace,
    StorageMedium,
    block_hashes,
    decode_batch,
    encode_batch,
)
from kvevents.index import Oddities
from kvevents.records import decode_records, encode_records

__all__ = [
    "NAMESPACES",
    "SHAPE",
    "BlockLRU",
    "Feed",
    "Rig",
    "Witness",
    "feed_of_events",
    "feed_of_records",
    "new_cache",
    "over_the_wire",
    "prompt_of",
    "put",
    "random_prompt",
    "random_step",
]

NAMESPACES = (
    BASE,
    Namespace(lora_name="x"),
    Namespace(cache_salt="x"),
    Namespace(extra_key="x"),
)
SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int64)
"""KV wide enough to hold a block hash."""

Tokens: TypeAlias = tuple[int, ...]
Feed: TypeAlias = Callable[[HiRadixCache], list[Event]]


class Block(NamedTuple):
    """A block by what it is: a namespace, and every token up to its end."""

    namespace: Namespace
    tokens: Tokens


def new_cache(
    num_pages: int, page_size: int = 4, hash_format: HashFormat = HashFormat.SGLANG
) -> HiRadixCache:
    """An empty cache over a pool of its own."""
    return HiRadixCache(PagePool(num_pages, page_size, SHAPE), hash_format=hash_format)


def put(cache: HiRadixCache, tokens: Sequence[int], namespace: Namespace = BASE) -> Insertion:
    """Cache a prompt, and free the pages that it turned out not to need."""
    pages = cache.allocate(len(tokens) // cache.page_size)
    assert pages is not None
    insertion = cache.insert(tokens, pages, namespace)
    cache.free(pages[: insertion.num_existing])
    return insertion


# ------------------------------------------------------------------------------- what must be so


class BlockLRU:
    """What the cache must hold: blocks, each with the time of its last use."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._time = 0
        self.used: dict[Block, int] = {}
        self.locks: Counter[Block] = Counter()

    def blocks(self, tokens: Sequence[int], namespace: Namespace) -> list[Block]:
        """The blocks of a prompt, from its start."""
        size = self._page_size
        ends = range(size, len(tokens) + 1, size)
        return [Block(namespace, tuple(tokens[:end])) for end in ends]

    def matched(self, tokens: Sequence[int], namespace: Namespace) -> list[Block]:
        """The leading blocks of a prompt that are resident."""
        found: list[Block] = []
        for block in self.blocks(tokens, namespace):
            if block not in self.used:
                break
            found.append(block)
        return found

    def use(self, blocks: list[Block]) -> None:
        """`blocks` are resident and were used just now."""
        self._time += 1
        self.used.update(dict.fromkeys(blocks, self._time))

    @property
    def protected(self) -> set[Block]:
        """Blocks under a lock."""
        ends = [block for block, count in self.locks.items() if count]
        return {block for end in ends for block in self.blocks(end.tokens, end.namespace)}

    @property
    def num_evictable(self) -> int:
        return len(self.used) - len(self.protected)

    def evict(self, num_blocks: int) -> int:
        """Drop the least recently used block without a resident child, time and again."""
        protected, left = self.protected, num_blocks
        while left:
            inner = {Block(one.namespace, one.tokens[: -self._page_size]) for one in self.used}
            leaves = [one for one in self.used if one not in inner and one not in protected]
            if not leaves:
                break
            del self.used[min(leaves, key=self.used.__getitem__)]
            left -= 1
        return num_blocks - left


# --------------------------------------------------------------------------------- what is heard


def over_the_wire(events: list[Event]) -> list[Event]:
    """The events as a router reads them: encoded and decoded."""
    decoded = decode_batch(encode_batch(KVEventBatch(0.0, events, 0)))
    assert decoded.skipped == ()
    return decoded.batch.events


def feed_of_events() -> Feed:
    """The cache makes its events itself."""
    return lambda cache: cache.take_events()


def feed_of_records(block_size: int, hash_format: HashFormat) -> Feed:
    """The cache's records cross the link, and a sidecar makes the events."""
    materializer = Materializer(block_size, hash_format)
    return lambda cache: materializer.apply(decode_records(encode_records(cache.take_records())))


class Witness:
    """Checks each event against those before it on its medium; the numbers are those of the cases."""

    def __init__(self) -> None:
        self._media = {medium: _Medium() for medium in StorageMedium}

    def see(self, events: list[Event]) -> None:
        """Raises AssertionError for an event that a router could not make sense of."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._media = {medium: _Medium() for medium in StorageMedium}
                case BlockStored():
                    assert event.medium is not None, "every event names its medium"
                    self._media[event.medium].stored(event)
                case _:
                    assert event.medium is not None, "every event names its medium"
                    for block_hash in event.block_hashes:
                        self._media[event.medium].removed(block_hash)


class _Medium:
    """What was said of one medium since the last clear."""

    def __init__(self) -> None:
        self._parents: dict[int | bytes, int | bytes | None] = {}
        self._children: Counter[int | bytes | None] = Counter()

    def stored(self, event: BlockStored) -> None:
        needed = len(event.block_hashes) * event.block_size
        assert len(event.token_ids) == needed, "29: tokens and blocks agree"
        parent = event.parent_block_hash
        assert parent is None or parent in self._parents, "27: the parent is there"
        for block_hash in event.block_hashes:
            assert block_hash != parent, "23: no block is its own parent"
            assert block_hash not in self._parents, "54: no block is stored twice"
            self._parents[block_hash] = parent
            self._children[parent] += 1
            parent = block_hash

    def removed(self, block_hash: int | bytes) -> None:
        assert block_hash in self._parents, "5: only what is there is removed"
        assert not self._children[block_hash], "children are removed before their parents"
        self._children[self._parents.pop(block_hash)] -= 1


# --------------------------------------------------------------------------------------- the rig


class Held(NamedTuple):
    """A lock: its node, and the block the node ends with; None for a root."""

    node: Node
    end: Block | None


class Request(NamedTuple):
    """A request between its allocation and its insert."""

    tokens: Tokens
    namespace: Namespace
    prefix: Held
    first_page: int
    pages: PageIndices


class Rig:
    """Does to the cache what an engine does, checks every answer, and compares the accounts.

    `listen_every`: how many steps the router waits between taking what the cache recorded.
    """

    def __init__(
        self,
        cache: HiRadixCache,
        feed: Feed,
        *,
        hash_format: HashFormat = HashFormat.SGLANG,
        listen_every: int = 1,
    ) -> None:
        self.cache, self.pool = cache, cache.device_pool
        self.model = BlockLRU(cache.page_size)
        self.index, self.witness = BlockIndex(), Witness()
        self.mine: set[int] = set()
        """Pages allocated and neither inserted nor freed."""
        self.held: list[Held] = []
        self.requests: list[Request] = []
        self.prompts: list[tuple[Tokens, Namespace]] = []
        """Every prompt inserted so far."""
        self.nodes: list[Held] = []
        """Every node handed out so far, some of them evicted since."""
        self._feed, self._hash_format = feed, hash_format
        self._listen_every, self._steps = listen_every, 0
        self._names: dict[Block, BlockHash] = {}

    # ------------------------------------------------------------------------------ operations

    def match(self, tokens: Tokens, namespace: Namespace) -> Match:
        """Match, and check length, pages and the KV in them."""
        blocks = self.model.matched(tokens, namespace)
        match = self.cache.match_prefix(tokens, namespace)
        assert match.num_pages == len(blocks)
        assert match.prefix_len == len(blocks) * self.cache.page_size
        assert self._names_in(match.page_indices) == [self._name(block) for block in blocks]
        assert self._tokens_in(match.page_indices) == list(tokens[: match.prefix_len])
        self.model.use(blocks)
        self.nodes.append(Held(match.node, blocks[-1] if blocks else None))
        return match

    def match_and_lock(self, tokens: Tokens, namespace: Namespace) -> Match:
        """Match, and keep what was found."""
        match = self.match(tokens, namespace)
        self._lock(self.nodes[-1])
        self.held.append(self.nodes[-1])
        return match

    def lock_again(self, which: int) -> None:
        """Lock a node from the past. One whose prompt is not cached any more is refused."""
        old = self.nodes[which]
        if old.end is not None and old.end not in self.model.used:
            with pytest.raises(ValueError, match="not in the cache any more"):
                self.cache.lock(old.node)
            return
        try:
            self.cache.lock(old.node)
        except ValueError:  # evicted, and its prompt cached anew below another node
            return
        self._locked(old)
        self.held.append(old)

    def unlock(self, which: int) -> None:
        """Give up a lock."""
        held = self.held.pop(which)
        self._unlock(held)

    def request(self, tokens: Tokens, namespace: Namespace) -> None:
        """A request from its match to its unlock; nothing when there is no room for it."""
        if self.begin(tokens, namespace):
            self.finish(-1)

    def begin(self, tokens: Tokens, namespace: Namespace) -> bool:
        """Match, lock, allocate, compute. False, and nothing kept, when there is no room."""
        match = self.match(tokens, namespace)
        prefix = self.nodes[-1]
        self._lock(prefix)
        pages = self._compute(tokens, namespace, match.num_pages)
        if pages is None:
            self._unlock(prefix)
            return False
        self.requests.append(Request(tokens, namespace, prefix, match.num_pages, pages))
        return True

    def finish(self, which: int) -> None:
        """Insert what a request computed and give up its lock."""
        request = self.requests.pop(which)
        self._insert(request.tokens, request.pages, request.namespace, request.first_page)
        self._unlock(request.prefix)

    def abort(self, which: int) -> None:
        """Free what a request computed and give up its lock."""
        request = self.requests.pop(which)
        self._free(request.pages)
        self._unlock(request.prefix)

    def insert_all(self, tokens: Tokens, namespace: Namespace) -> None:
        """Compute the whole prompt, whatever is cached, and insert it from page 0."""
        pages = self._compute(tokens, namespace, 0)
        if pages is not None:
            self._insert(tokens, pages, namespace, 0)

    def insert_with_own(self, tokens: Tokens, namespace: Namespace) -> None:
        """Insert a prompt from page 0, bringing the cache's own pages for what it holds."""
        if not self.begin(tokens, namespace):
            return
        request = self.requests.pop()
        own = self.match(tokens, namespace).page_indices[: request.first_page]
        self._insert(request.tokens, own + request.pages, request.namespace, 0)
        self._unlock(request.prefix)

    def evict(self, num_pages: int) -> None:
        """Evict; the model says how many that frees."""
        free = self.pool.allocator.num_free
        freed = self.cache.evict(num_pages)
        assert freed == self.model.evict(num_pages)
        assert self.pool.allocator.num_free == free + freed

    def flush(self) -> None:
        """Flush, which a lock refuses."""
        self._drop_all("flush")

    def reset_device(self) -> None:
        """Drop what the device has, which is all there is; a lock refuses it."""
        self._drop_all("reset_device")

    def _drop_all(self, how: str) -> None:
        num_locks = len(self.held) + len(self.requests)
        if num_locks:
            with pytest.raises(ValueError, match=f"{how}: {num_locks} locks are held"):
                getattr(self.cache, how)()
        else:
            getattr(self.cache, how)()
            self.model.used.clear()

    def begin_retell(self) -> None:
        """The sidecar asks for the state."""
        self.cache.begin_retell()

    def retell(self, num_blocks: int) -> None:
        """A step of the re-telling."""
        self.cache.retell(num_blocks)

    def retell_all(self, num_blocks: int) -> None:
        """The rest of the re-telling, which ends after one step for each page at the latest."""
        for _ in range(self.pool.num_pages + 1):
            self.cache.retell(num_blocks)
        assert not self.cache.retelling

    def end_all(self) -> None:
        """Every request is aborted, every lock given up."""
        while self.requests:
            self.abort(-1)
        while self.held:
            self.unlock(-1)

    def recall_all(self) -> None:
        """Match every prompt so far, to see that each page holds what it should."""
        for tokens, namespace in self.prompts[-20:]:
            self.match(tokens, namespace)

    # -------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """After every step: the cache is sound and holds what it must, and the router knows."""
        self._steps += 1
        self._check_cache()
        self._check_pages()
        if not self._steps % self._listen_every:
            self.listen()

    def listen(self) -> None:
        """Take what was recorded; then the router knows neither too much nor too little."""
        events = over_the_wire(self._feed(self.cache))
        self.witness.see(events)
        self.index.apply(events)
        assert self.index.oddities == Oddities()
        truth = self.names()
        resident = self.index.resident
        believed = resident.pop(StorageMedium.GPU)
        assert not any(resident.values())
        if self.cache.retelling:
            assert believed <= truth
        else:
            assert believed == truth
            self._check_overlap()

    def names(self) -> set[BlockHash]:
        """The hashes of what must be resident."""
        return {self._name(block) for block in self.model.used}

    def _check_cache(self) -> None:
        assert self.cache.violations() == []
        resident = self.cache.resident_blocks()
        assert resident.pop(StorageMedium.GPU) == self.names()
        assert not any(resident.values())
        assert self.cache.num_resident == len(self.model.used)
        assert self.cache.num_protected == len(self.model.protected)
        assert self.cache.num_evictable == self.model.num_evictable

    def _check_pages(self) -> None:
        free = self.pool.allocator.free_pages()
        held_back = self.mine | set(free)
        assert len(held_back) == len(self.mine) + len(free), "a page is free and the caller's"
        cached = [page for page in range(self.pool.num_pages) if page not in held_back]
        assert len(cached) == self.cache.num_resident, "a page is nobody's"
        found = self._names_in(array("q", cached))
        assert len(set(found)) == len(found), "a block is in two pages"
        assert set(found) == self.names()

    def _check_overlap(self) -> None:
        for tokens, namespace in self.prompts[-3:]:
            held = len(self.model.matched(tokens, namespace))
            overlap = self.index.overlap(tokens, namespace)
            assert overlap.blocks[StorageMedium.GPU] == overlap.any_medium == held

    # ---------------------------------------------------------------------------------- inside

    def _lock(self, held: Held) -> None:
        self.cache.lock(held.node)
        self._locked(held)

    def _locked(self, held: Held) -> None:
        if held.end is not None:
            self.model.locks[held.end] += 1

    def _unlock(self, held: Held) -> None:
        self.cache.unlock(held.node)
        if held.end is not None:
            self.model.locks[held.end] -= 1

    def _compute(self, tokens: Tokens, namespace: Namespace, first_page: int) -> PageIndices | None:
        """Pages from `first_page` on, allocated and filled."""
        blocks = self.model.blocks(tokens, namespace)[first_page:]
        free = self.pool.allocator.num_free
        possible = len(blocks) <= free + self.model.num_evictable
        pages = self.cache.allocate(len(blocks))
        assert (pages is not None) == possible
        if pages is None:
            return None
        self.model.evict(max(0, len(blocks) - free))
        assert len(set(pages)) == len(blocks) and self.mine.isdisjoint(pages)
        self.mine.update(pages)
        self._fill(pages, blocks)
        return pages

    def _fill(self, pages: PageIndices, blocks: list[Block]) -> None:
        size = self.cache.page_size
        names = torch.tensor([self._name(block) for block in blocks], dtype=torch.int64)
        tokens = torch.tensor([block.tokens[-size:] for block in blocks], dtype=torch.int64)
        shape = (len(blocks), size, 1, 1)
        k = names.reshape(-1, 1, 1, 1).expand(shape)
        self.pool.write(0, pages, k, tokens.reshape(shape))

    def _insert(
        self, tokens: Tokens, pages: PageIndices, namespace: Namespace, first_page: int
    ) -> Insertion:
        """Insert, and free the duplicates among `pages`."""
        existing = len(self.model.matched(tokens, namespace))
        blocks = self.model.blocks(tokens, namespace)
        insertion = self.cache.insert(tokens, pages, namespace, first_page=first_page)
        assert insertion.num_existing == existing
        self.mine.difference_update(pages[existing - first_page :])
        self._free(array("q", self.mine.intersection(pages[: existing - first_page])))
        self.model.use(blocks)
        self.nodes.append(Held(insertion.node, blocks[-1] if blocks else None))
        self.prompts.append((tokens, namespace))
        return insertion

    def _free(self, pages: PageIndices) -> None:
        self.cache.free(pages)
        self.mine.difference_update(pages)

    def _name(self, block: Block) -> BlockHash:
        found = self._names.get(block)
        if found is None:
            size = self.cache.page_size
            hashes = block_hashes(block.tokens, size, block.namespace, self._hash_format)
            found = self._names[block] = hashes[-1]
        return found

    def _names_in(self, pages: PageIndices) -> list[int]:
        k, _ = self.pool.read(0, pages)
        per_token = k.reshape(len(pages), self.cache.page_size)
        assert torch.equal(per_token, per_token[:, :1].expand_as(per_token))
        names: list[int] = per_token[:, 0].tolist()
        return names

    def _tokens_in(self, pages: PageIndices) -> list[int]:
        _, v = self.pool.read(0, pages)
        tokens: list[int] = v.flatten().tolist()
        return tokens


# ------------------------------------------------------------------------------------ a long walk


def prompt_of(symbols: Sequence[int], tail: int, page_size: int) -> Tokens:
    """A prompt of one page for each symbol 0, 1 or 2, and a tail that does not fill a page.

    Pages 0 and 1 differ in their last token only.
    """
    pages = [[2 * (one == 2)] * (page_size - 1) + [one] for one in symbols]
    return tuple(token for page in pages for token in page) + (0,) * min(tail, page_size - 1)


def random_prompt(random: Random, rig: Rig, longest: int) -> tuple[Tokens, Namespace]:
    """A prompt that is new, or leaves a known one somewhere inside it."""
    size = rig.cache.page_size
    symbols = [random.randrange(3) for _ in range(random.randint(0, longest))]
    fresh = prompt_of(symbols, random.randrange(4), size)
    if not rig.prompts or random.random() < 0.5:
        return fresh, random.choice(NAMESPACES)
    tokens, namespace = random.choice(rig.prompts[-20:])
    cut = random.randint(0, len(tokens) // size) * size
    return (tokens[:cut] + fresh)[: longest * size], namespace


def random_step(random: Random, rig: Rig) -> None:
    """One operation of an engine or a sidecar."""
    longest = max(2, rig.pool.num_pages - 2)
    tokens, namespace = random_prompt(random, rig, longest)
    match random.choice(_STEPS):
        case "match":
            rig.match(tokens, namespace)
        case "lock" if len(rig.held) < 2:
            rig.match_and_lock(tokens, namespace)
        case "unlock" if rig.held:
            rig.unlock(random.randrange(len(rig.held)))
        case "begin" if len(rig.requests) < 2:
            rig.begin(tokens, namespace)
        case "finish" if rig.requests:
            rig.finish(random.randrange(len(rig.requests)))
        case "abort" if rig.requests:
            rig.abort(random.randrange(len(rig.requests)))
        case "insert_all":
            rig.insert_all(tokens, namespace)
        case "insert_with_own":
            rig.insert_with_own(tokens, namespace)
        case "evict":
            rig.evict(random.randint(0, 4))
        case "flush":
            rig.end_all()
            rig.flush()
        case "begin_retell":
            rig.begin_retell()
        case "retell":
            rig.retell(random.randint(1, 3))
        case "retell_all":
            rig.retell_all(random.randint(1, 3))
        case _:
            rig.request(tokens, namespace)


_STEPS = (
    *["request"] * 12,
    *["match", "lock", "unlock", "begin", "finish", "abort"] * 2,
    *["insert_all", "insert_with_own", "evict"] * 3,
    *["begin_retell"] * 3,
    *["retell"] * 4,
    *["retell_all", "flush"],
)
