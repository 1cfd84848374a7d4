"""Two ranks' sidecars, Dynamo's relay of each, its router: each rank is believed to hold what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from dynamo_answers import Blocks, Tiers, held, score
from dynamo_life import ROOM, life
from dynamo_relay import DynamoRelay
from interop_process import venv_python
from interop_waiting import wait_until
from interop_worker import ExampleWorker, Store

from kvevents import Namespace
from publisher import SinkConfig

pytestmark = pytest.mark.integration

CONSUMER = "Dynamo relay and router 1.6.1"
STORAGE: tuple[Store, ...] = ("DISK", "EXTERNAL")
"""By rank."""


def conformance(situation: str) -> pytest.MarkDecorator:
    """A row of the table in docs/consumers.md."""
    return pytest.mark.conformance(preset="dynamo-relay", consumer=CONSUMER, situation=situation)


def is_subscribed(worker: ExampleWorker) -> bool:
    """Whether its relay is there."""
    return worker.subscribers() == 1


class Ranks:
    """The workers by rank, and the router that hears of both."""

    def __init__(self, workers: list[ExampleWorker], relay: DynamoRelay) -> None:
        self.workers, self.relay = workers, relay

    def subscribed(self) -> None:
        """Until the relays are there."""
        for worker in self.workers:
            assert wait_until(partial(is_subscribed, worker))

    def agree(self, step: str = "") -> None:
        """The router comes to hold for each rank, on each tier, what its cache does, and no more."""
        for rank, worker in enumerate(self.workers):
            resident = worker.resident()
            wanted = held(resident)
            if not wait_until(partial(self.believes, rank, wanted)):
                assert self.relay.blocks(rank) == wanted, (step, rank, self.relay.warnings())
            for blocks in resident.values():
                for prompt in blocks.values():
                    assert self.relay.score(prompt, rank) == score(prompt, resident), (step, rank)

    def believes(self, rank: int, wanted: Blocks) -> bool:
        """Whether the router holds just this for a rank."""
        return self.relay.blocks(rank) == wanted

    def again(self) -> None:
        """Begin with nothing, on both."""
        self.subscribed()
        for worker in self.workers:
            worker.flush()
        self.agree()


@pytest.fixture(scope="module")
def all_tests() -> Iterator[Ranks]:
    """One for all tests: the relay takes its time to start."""
    venv_python("dynamo")  # or there is nothing to do
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                ExampleWorker.start(
                    SinkConfig(dialect="dynamo-relay", heartbeat_s=0.1),
                    dp_rank=rank,
                    dp_size=len(STORAGE),
                    storage=storage,
                    storage_pages=ROOM,
                )
            )
            for rank, storage in enumerate(STORAGE)
        ]
        relay = DynamoRelay.start(*(worker.endpoint() for worker in workers))
        yield Ranks(workers, stack.enter_context(relay))


@pytest.fixture
def ranks(all_tests: Ranks) -> Ranks:
    """Nothing is held."""
    all_tests.again()
    return all_tests


@conformance("every transition, of two ranks at once")
def test_every_transition(ranks: Ranks) -> None:
    """After each step of a block's life, on each medium, the router's tiers are the rank's own."""
    prompts = [worker.prompt(4) for worker in ranks.workers]
    for worker, prompt in zip(ranks.workers, prompts, strict=True):
        worker.insert(prompt)
    first, second = map(life, ranks.workers, prompts, STORAGE)
    next(second)
    for step, other in zip(first, second, strict=False):  # the second is a step ahead
        ranks.agree(f"{step}; {other}")
    ranks.agree("both are through")


@conformance("the same prompt on two ranks")
def test_each_rank_is_credited_for_its_own(ranks: Ranks) -> None:
    """A prompt that both hold, one more of it than the other: each has its own score."""
    first, second = ranks.workers
    prompt = first.prompt(4)
    first.insert(prompt)
    second.insert(prompt[:8])
    ranks.agree()
    assert ranks.relay.score(prompt, 0) == Tiers(gpu=4)
    assert ranks.relay.score(prompt, 1) == Tiers(gpu=2)
    first.evict_device(4)
    ranks.agree()
    assert ranks.relay.score(prompt, 0) == Tiers()
    assert ranks.relay.score(prompt, 1) == Tiers(gpu=2)


@conformance("adapters and salts")
def test_namespaces(ranks: Ranks) -> None:
    """Blocks of an adapter, or under a salt, are found by the prompts that name it, and by no other."""
    worker = ranks.workers[0]
    spaces = (Namespace(lora_name="adapter"), Namespace(cache_salt="salt"))
    prompts = [worker.prompt(3) for _ in spaces]
    for prompt, space in zip(prompts, spaces, strict=True):
        worker.insert(prompt, space)
    resident = worker.resident()
    assert wait_until(lambda: ranks.relay.blocks() == held(resident))
    for prompt, space in zip(prompts, spaces, strict=True):
        for asked in (Namespace(), *spaces):
            found = ranks.relay.score(prompt, 0, asked)
            assert found == score(prompt, resident, asked)
            assert any(found) == (asked == space)


def resync(worker: ExampleWorker) -> None:
    worker.resync()


def restart(worker: ExampleWorker) -> None:
    worker.restart_sidecar()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(resync, marks=conformance("resync")),
        pytest.param(restart, marks=conformance("sidecar killed")),
    ],
)
def test_counts_stay_balanced(ranks: Ranks, fault: Callable[[ExampleWorker], None]) -> None:
    """The router counts how often a block was stored: however often the state is told anew, one removal
    takes it away, from the tier that it names and from no other.
    """
    worker = ranks.workers[0]
    prompt = worker.prompt(4)
    worker.insert(prompt)
    worker.backup(prompt)
    worker.write_storage()
    ranks.agree()
    for _ in range(2):
        fault(worker)
        worker.insert(worker.prompt(1))
        ranks.agree()
    worker.reset_device()
    ranks.agree()
    assert ranks.relay.score(prompt) == Tiers(cpu=4)
    worker.evict_host(4)
    ranks.agree()
    assert ranks.relay.score(prompt) == Tiers(lower=4)
    worker.flush()
    ranks.agree()
    assert ranks.relay.score(prompt) == Tiers()


@conformance("sidecar killed, changes meanwhile")
def test_what_the_relay_missed_is_told_to_it(ranks: Ranks) -> None:
    """The relay asks for no replay: what is told before it is back is told anew when it subscribes."""
    worker = ranks.workers[0]
    prompt = worker.prompt(4)
    worker.insert(prompt)
    ranks.agree()
    killed = worker.kill_sidecar()
    worker.evict_device(2)
    worker.insert(worker.prompt(3))
    worker.await_sidecar(killed)
    ranks.agree()
    worker.reset_device()
    ranks.agree()


@conformance("worker killed and started again")
def test_a_killed_worker(ranks: Ranks) -> None:
    """Once a rank is gone nothing is believed of it, and all of the other; the next one's blocks are."""
    worker, other = ranks.workers
    prompt = worker.prompt(4)
    for one in (worker, other):
        one.insert(prompt)
        one.backup(prompt)
        one.write_storage()
    ranks.agree()
    worker.kill()
    assert wait_until(lambda: ranks.relay.blocks(0) == {})
    assert ranks.relay.blocks(1) == held(other.resident())
    worker.restart()  # and what it has in files is told before the relay is back
    ranks.agree()
    worker.prefetch(prompt)
    worker.insert(prompt)
    ranks.agree()
