"""The model test: whatever an engine does, the router believes exactly what the cache holds."""

from __future__ import annotations

from hicache_rig import (
    NAMESPACES,
    SHAPE,
    Feed,
    Rig,
    feed_of_events,
    feed_of_records,
    prompt_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache import HiRadixCache, PagePool
from kvevents import HashFormat, Namespace

SYMBOLS = st.lists(st.integers(0, 2), max_size=6)
TAIL = st.integers(0, 3)
NAMESPACE = st.sampled_from(NAMESPACES)
ANY = st.integers(0, 1000)
"""Picks one of as many as there are."""


class CacheMachine(RuleBasedStateMachine):
    """An engine and a sidecar take turns with a small cache; `Rig` checks every answer."""

    rig: Rig

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(2, 10),
        listen_every=st.sampled_from([1, 1, 4]),
        hash_format=st.sampled_from(HashFormat),
    )
    def start(
        self, page_size: int, num_pages: int, listen_every: int, hash_format: HashFormat
    ) -> None:
        pool = PagePool(num_pages, page_size, SHAPE)
        cache = HiRadixCache(pool, hash_format=hash_format)
        feed = self.feed(page_size, hash_format)
        self.rig = Rig(cache, feed, hash_format=hash_format, listen_every=listen_every)

    def feed(self, page_size: int, hash_format: HashFormat) -> Feed:
        raise NotImplementedError

    def prompt(self, symbols: list[int], tail: int) -> tuple[int, ...]:
        return prompt_of(symbols, tail, self.rig.cache.page_size)

    def diverging(
        self, which: int, cut: int, symbols: list[int], tail: int
    ) -> tuple[tuple[int, ...], Namespace]:
        known, namespace = self.rig.prompts[which % len(self.rig.prompts)]
        size = self.rig.cache.page_size
        shared = cut % (len(known) // size + 1)
        return known[: shared * size] + self.prompt(symbols, tail), namespace

    # -------------------------------------------------------------------------------- requests

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def match(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.match(self.prompt(symbols, tail), namespace)

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def match_and_lock(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.match_and_lock(self.prompt(symbols, tail), namespace)

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def request(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.request(self.prompt(symbols, tail), namespace)

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, cut=ANY, symbols=SYMBOLS, tail=TAIL)
    def diverging_request(self, which: int, cut: int, symbols: list[int], tail: int) -> None:
        """Follow a known prompt for some pages, then leave it: a split wherever a node is longer."""
        self.rig.request(*self.diverging(which, cut, symbols, tail))

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def begin(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.begin(self.prompt(symbols, tail), namespace)

    @precondition(lambda self: self.rig.requests)
    @rule(which=ANY)
    def finish(self, which: int) -> None:
        self.rig.finish(which % len(self.rig.requests))

    @precondition(lambda self: self.rig.requests)
    @rule(which=ANY)
    def abort(self, which: int) -> None:
        self.rig.abort(which % len(self.rig.requests))

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def insert_all(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.insert_all(self.prompt(symbols, tail), namespace)

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def insert_with_own(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.insert_with_own(self.prompt(symbols, tail), namespace)

    # ------------------------------------------------------------------------ locks and eviction

    @precondition(lambda self: self.rig.held)
    @rule(which=ANY)
    def unlock(self, which: int) -> None:
        self.rig.unlock(which % len(self.rig.held))

    @precondition(lambda self: self.rig.nodes)
    @rule(which=ANY)
    def lock_again(self, which: int) -> None:
        self.rig.lock_again(which % len(self.rig.nodes))

    @rule()
    def end_all(self) -> None:
        self.rig.end_all()

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        self.rig.evict(num_pages)

    @rule()
    def flush(self) -> None:
        self.rig.flush()

    @rule()
    def reset_device(self) -> None:
        self.rig.reset_device()

    @rule()
    def tick(self) -> None:
        self.rig.cache.tick()

    @rule()
    def recall_all(self) -> None:
        self.rig.recall_all()

    # ------------------------------------------------------------------------------ re-telling

    @rule()
    def begin_retell(self) -> None:
        self.rig.begin_retell()

    @precondition(lambda self: self.rig.cache.retelling)
    @rule(num_blocks=st.integers(1, 3))
    def retell(self, num_blocks: int) -> None:
        self.rig.retell(num_blocks)

    @precondition(lambda self: self.rig.cache.retelling)
    @rule(num_blocks=st.integers(1, 3))
    def retell_all(self, num_blocks: int) -> None:
        self.rig.retell_all(num_blocks)

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, cut=ANY, symbols=SYMBOLS, tail=TAIL, budget=st.integers(0, 2))
    def request_amid_retelling(
        self, which: int, cut: int, symbols: list[int], tail: int, budget: int
    ) -> None:
        """What Hypothesis puts together too rarely: a split and a store among the untold."""
        self.rig.begin_retell()
        self.rig.retell(budget)
        self.rig.check()
        self.rig.request(*self.diverging(which, cut, symbols, tail))
        self.rig.check()
        self.rig.retell_all(1)

    # -------------------------------------------------------------------------------- invariant

    @invariant()
    def router_is_right(self) -> None:
        self.rig.check()


class EventsMachine(CacheMachine):
    """The router hears the cache's own events."""

    def feed(self, page_size: int, hash_format: HashFormat) -> Feed:
        return feed_of_events()


class RecordsMachine(CacheMachine):
    """The router hears what a sidecar makes of the cache's records."""

    def feed(self, page_size: int, hash_format: HashFormat) -> Feed:
        return feed_of_records(page_size, hash_format)


def run(machine: type[CacheMachine]) -> None:
    """Two machines take the same steps: but for a stress run, half the examples do for each."""
    most = settings().max_examples
    few = settings(max_examples=most if most > 100 else most // 2)
    run_state_machine_as_test(machine, settings=few)


def test_router_believes_what_events_say() -> None:
    """A router that applies `take_events()` believes what the cache holds, after every step."""
    run(EventsMachine)


def test_router_believes_what_records_say() -> None:
    """A router behind link and sidecar believes what the cache holds, after every step."""
    run(RecordsMachine)
