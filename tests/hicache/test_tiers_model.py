"""The model test of all tiers: whatever engine and world do, cache, memory, files and router agree.

What is checked after every step is in `tiers_rig`, what must be so in `tiers_account`.
"""

from __future__ import annotations

from random import Random

from hicache_rig import NAMESPACES, prompt_of
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
from stepped import Outcome
from tiers_rig import SHAPES, Damage, Setup, TiersRig
from tiers_walk import random_setup, random_tiers_step

from hicache import HiCacheConfig, PrefetchPolicy, WritePolicy
from hicache.eviction import POLICIES
from hicache.tier import Tier
from kvevents import HashFormat, Namespace

FEW, FEWER = 2, 4
"""These machines are slower than others: one example for so many of theirs, in a stress run and else."""

SYMBOLS = st.lists(st.integers(0, 2), max_size=6)
TAIL = st.integers(0, 3)
NAMESPACE = st.sampled_from(NAMESPACES)
ANY = st.integers(0, 1000)
"""Picks one of as many as there are."""
ENDS = st.sampled_from([*[Outcome.OK] * 6, Outcome.HALF, Outcome.SILENT])
CONFIGS = st.builds(
    HiCacheConfig,
    write_policy=st.sampled_from(WritePolicy),
    write_through_threshold=st.integers(1, 3),
    eviction_policy=st.sampled_from(sorted(POLICIES)),
    prefetch_policy=st.sampled_from(PrefetchPolicy),
    load_back_threshold=st.sampled_from([0, 0, 4]),
    prefetch_threshold=st.sampled_from([0, 0, 4]),
    prefetch_max_pages=st.sampled_from([None, None, 2, 8]),
    storage_queue_pages=st.sampled_from([None, None, 2, 8]),
)


class TiersMachine(RuleBasedStateMachine):
    """Engine, sidecar and world take turns with a small cache; `TiersRig` checks everything."""

    rig: TiersRig

    def begin_with(self, setup: Setup) -> None:
        self.rig = TiersRig(setup)

    def prompt(self, symbols: list[int], tail: int) -> tuple[int, ...]:
        return prompt_of(symbols, tail, self.rig.setup.page_size)

    def known(self, which: int) -> tuple[tuple[int, ...], Namespace]:
        return self.rig.prompts[which % len(self.rig.prompts)]

    def below(self, which: int, *tiers: Tier) -> tuple[tuple[int, ...], Namespace]:
        """A prompt of which the last of `tiers` has more than the others and the device."""
        found = self.rig.below(*tiers) or self.rig.prompts
        return found[which % len(found)]

    # -------------------------------------------------------------------------------- requests

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def match(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.match(self.prompt(symbols, tail), namespace)

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE, host=st.booleans())
    def match_and_lock(
        self, symbols: list[int], tail: int, namespace: Namespace, host: bool
    ) -> None:
        self.rig.match_and_lock(self.prompt(symbols, tail), namespace, host=host)

    @precondition(lambda self: self.rig.nodes)
    @rule(which=ANY)
    def lock_again(self, which: int) -> None:
        self.rig.lock_again(which % len(self.rig.nodes))

    @precondition(lambda self: self.rig.held)
    @rule(which=ANY)
    def unlock(self, which: int) -> None:
        self.rig.unlock(which % len(self.rig.held))

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE, priority=st.integers(0, 2))
    def request(self, symbols: list[int], tail: int, namespace: Namespace, priority: int) -> None:
        self.rig.request(self.prompt(symbols, tail), namespace, priority)

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, cut=ANY, symbols=SYMBOLS, tail=TAIL)
    def diverging_request(self, which: int, cut: int, symbols: list[int], tail: int) -> None:
        """Follow a known prompt for some pages, then leave it: a split wherever a node is longer."""
        known, namespace = self.known(which)
        size = self.rig.setup.page_size
        shared = cut % (len(known) // size + 1) * size
        self.rig.request(known[:shared] + self.prompt(symbols, tail), namespace)

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

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY)
    def insert_with_own(self, which: int) -> None:
        self.rig.insert_with_own(*self.known(which))

    @rule(num_pages=st.integers(0, 10))
    def evict(self, num_pages: int) -> None:
        self.rig.evict(num_pages)

    @rule()
    def end_all(self) -> None:
        self.rig.end_all()

    @rule(idle=st.booleans())
    def flush(self, idle: bool) -> None:
        if idle:
            self.rig.end_all()
        self.rig.flush()

    @rule(idle=st.booleans())
    def reset_device(self, idle: bool) -> None:
        if idle:
            self.rig.end_all()
        self.rig.reset_device()

    # ------------------------------------------------------------------------------ lower tiers

    @rule()
    def tick(self) -> None:
        self.rig.tick()

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, max_pages=st.sampled_from([None, None, 2]))
    def load_back(self, which: int, max_pages: int | None) -> None:
        self.rig.load_back(*self.below(which, Tier.HOST), max_pages)

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, outcome=ENDS)
    def overtake(self, which: int, outcome: Outcome) -> None:
        self.rig.overtake(*self.below(which, Tier.HOST), outcome)

    @precondition(lambda self: self.rig.loads)
    @rule(which=ANY)
    def finish_load(self, which: int) -> None:
        self.rig.finish_load(which % len(self.rig.loads))

    @precondition(lambda self: self.rig.loads)
    @rule(which=ANY)
    def abort_load(self, which: int) -> None:
        self.rig.abort_load(which % len(self.rig.loads))

    # -------------------------------------------------------------------------------- the world

    @precondition(lambda self: self.rig.calls.held)
    @rule(which=ANY, outcome=ENDS)
    def release(self, which: int, outcome: Outcome) -> None:
        """Whatever is under way ends, in any order."""
        self.rig.release(which, outcome)

    @rule(times=st.integers(1, 3))
    def release_all(self, times: int) -> None:
        """Everything ends well; what follows from it, too."""
        for _ in range(times):
            self.rig.release_all()
            self.rig.tick()

    @rule(outcomes=st.lists(st.sampled_from(Outcome), min_size=1, max_size=4))
    def plan(self, outcomes: list[Outcome]) -> None:
        self.rig.plan(outcomes)

    @rule(seconds=st.sampled_from([1, 2, 31]))
    def wait(self, seconds: int) -> None:
        self.rig.wait(seconds)

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY, cuts=st.lists(ANY, min_size=1, max_size=2), outcome=ENDS)
    def split_in_flight(self, which: int, cuts: list[int], outcome: Outcome) -> None:
        """What Hypothesis puts together too rarely: splits of what is being copied or written."""
        known, namespace = self.known(which)
        self.rig.request(known, namespace)
        self.rig.check()
        self.rig.split_in_flight(known, namespace, cuts, outcome)

    @rule()
    def calm_down(self) -> None:
        """All that is under way ends well; then nothing is held, marked or missing."""
        self.rig.calm_down()

    # ------------------------------------------------------------------------------- re-telling

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

    # -------------------------------------------------------------------------------- invariant

    @invariant()
    def all_accounts_agree(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()


def setups(*, storage: bool, by_records: bool) -> st.SearchStrategy[Setup]:
    """Caches of any size, format and policy."""
    return st.builds(
        Setup,
        page_size=st.sampled_from([1, 2, 4]),
        device_pages=st.integers(2, 10),
        host_pages=st.integers(1, 10),
        storage=st.just(storage),
        max_pages=st.sampled_from([None, None, 3, 6]),
        audit_interval_s=st.sampled_from([None, 1.0]),
        parents_first=st.booleans(),
        shape=st.sampled_from(SHAPES),
        hash_format=st.sampled_from(HashFormat),
        by_records=st.just(by_records),
        listen_every=st.sampled_from([1, 1, 1, 4]),
        config=CONFIGS,
    )


class HostMachine(TiersMachine):
    """Device and host."""

    @initialize(setup=setups(storage=False, by_records=True))
    def start(self, setup: Setup) -> None:
        self.begin_with(setup)


class StorageMachine(TiersMachine):
    """Device, host and files, which outlive the cache and may be damaged."""

    # ------------------------------------------------------------------------------- prefetches

    @precondition(lambda self: self.rig.prompts)
    @rule(which=ANY)
    def prefetch(self, which: int) -> None:
        self.rig.prefetch(*self.below(which, Tier.HOST, Tier.DISK))

    @rule(symbols=SYMBOLS, tail=TAIL, namespace=NAMESPACE)
    def prefetch_anything(self, symbols: list[int], tail: int, namespace: Namespace) -> None:
        self.rig.prefetch(self.prompt(symbols, tail), namespace)

    @precondition(lambda self: self.rig.prompts)
    @rule(
        which=ANY,
        known=st.sampled_from([0, 0, 1, 2]),
        ends=st.lists(st.tuples(st.sampled_from([-1, -1, 0]), ENDS), min_size=2, max_size=4),
    )
    def fetch_through(self, which: int, known: int, ends: list[tuple[int, Outcome]]) -> None:
        """What Hypothesis puts together too rarely: a prefetch from its beginning to its end."""
        self.rig.fetch_through(*self.below(which, Tier.HOST, Tier.DISK), known, ends)

    @precondition(lambda self: self.rig.fetches)
    @rule(which=ANY)
    def prefetch_done(self, which: int) -> None:
        self.rig.prefetch_done(which % len(self.rig.fetches))

    @precondition(lambda self: self.rig.fetches)
    @rule(which=ANY)
    def cancel_prefetch(self, which: int) -> None:
        self.rig.cancel_prefetch(which % len(self.rig.fetches))

    # -------------------------------------------------------------------------------- the world

    @rule(which=ANY, how=st.sampled_from(Damage))
    def damage(self, which: int, how: Damage) -> None:
        self.rig.damage(which, how)

    @rule()
    def look_for_damage(self) -> None:
        self.rig.look_for_damage()

    @rule(which=ANY, how=st.sampled_from([Damage.GONE, Damage.CUT]))
    def lose_while_written(self, which: int, how: Damage) -> None:
        self.rig.lose_while_written(which, how)

    @rule(symbols=SYMBOLS, namespace=NAMESPACE)
    def stored_by_another(self, symbols: list[int], namespace: Namespace) -> None:
        """What is in the store need not be this cache's doing."""
        self.rig.stored_by_another(self.prompt(symbols, 0), namespace)
        self.rig.prefetch(self.prompt(symbols, 0), namespace)

    @rule()
    def idle(self) -> None:
        self.rig.idle()

    @rule()
    def restart(self) -> None:
        self.rig.restart()


class RecordsMachine(StorageMachine):
    """The router hears what a sidecar makes of the cache's records."""

    @initialize(setup=setups(storage=True, by_records=True))
    def start(self, setup: Setup) -> None:
        self.begin_with(setup)


class EventsMachine(StorageMachine):
    """The router hears the cache's own events."""

    @initialize(setup=setups(storage=True, by_records=False))
    def start(self, setup: Setup) -> None:
        self.begin_with(setup)


def run(machine: type[TiersMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=num_examples()))


def num_examples() -> int:
    most = settings().max_examples
    return max(1, most // (FEW if most > 100 else FEWER))


def test_device_and_host() -> None:
    """Over two tiers, events, bytes and books agree with the account after every step."""
    run(HostMachine)


def test_all_tiers_by_records() -> None:
    """Over all tiers, what a sidecar makes of the records agrees with bytes, files and account."""
    run(RecordsMachine)


def test_all_tiers_by_events() -> None:
    """Over all tiers, the cache's own events agree with bytes, files and account."""
    run(EventsMachine)


def test_long_walks() -> None:
    """The same over steps that are likelier to follow each other: the walks that catch the mutants."""
    for seed in range(2 * num_examples()):
        random = Random(f"walk {seed}")
        rig = TiersRig(random_setup(random))
        try:
            for _ in range(settings().stateful_step_count):
                random_tiers_step(random, rig)
                rig.check()
            rig.calm_down()
        except BaseException as error:
            error.add_note(f"in walk {seed}")
            raise
        finally:
            rig.close()
