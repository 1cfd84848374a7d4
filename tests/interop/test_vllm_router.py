"""vllm-router with its kv_aware policy, behind sinks of its dialect: prompts go to who has them.

What it believes is read from its decisions: for how many tokens of a prompt it gave credit, and to whom.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal

import pytest
from interop_forwarder import Forwarder
from interop_process import venv_python
from interop_worker import BLOCK, ExampleWorker
from router_kept import Kept, forget_state, replays
from router_process import CREDIT, Decision, Documents, Source, VllmRouter, router_for
from smg_log import replayed

from kvevents import BlockStored, Namespace, StorageMedium, decode_batch
from kvevents.hashing import block_hashes, canonical_hash
from publisher import SinkConfig

pytestmark = pytest.mark.integration

Workers = Sequence[ExampleWorker]

LIVE, ROLLED, REBASED = 0, 1, 2
"""Each worker's sinks."""
STEPS = 20
"""How far the log of the second goes back."""
REBASE = 1000
"""After so many batches the third begins at seq 0 again."""
LOWER = {
    StorageMedium.CPU: CREDIT["CPU"],
    StorageMedium.DISK: CREDIT["DISK"],
    StorageMedium.EXTERNAL: CREDIT["DISK"],
}
"""The credit for what is not on the device, the best first."""


def conforms(situation: str) -> pytest.MarkDecorator:
    return pytest.mark.conformance(
        preset="vllm-router", consumer="vllm-router 0.1.17", situation=situation
    )


# ----------------------------------------------------------------------------------- the workers


def start(storage: Literal["DISK", "EXTERNAL"]) -> ExampleWorker:
    dialect, beat = "vllm-router", 0.1
    return ExampleWorker.start(
        SinkConfig(dialect=dialect, heartbeat_s=beat),
        SinkConfig(dialect=dialect, heartbeat_s=beat, buffer_steps=STEPS),
        SinkConfig(dialect=dialect, heartbeat_s=beat, rebase_after=REBASE),
        storage=storage,
        model="model",
    )


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    venv_python("vllm-router")
    found = Kept(partial(start, "DISK"), partial(start, "EXTERNAL"))
    yield found
    found.close()


@pytest.fixture
def workers(kept: Kept) -> Iterator[Workers]:
    """Two, with empty caches: worker 0 stores pages in files, worker 1 in an external store."""
    yield kept.take()
    kept.give_back()


def insert(worker: ExampleWorker, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
    """A new prompt on the device."""
    prompt = worker.prompt(num_blocks, after)
    worker.insert(prompt)
    return prompt


def stored(worker: ExampleWorker, num_blocks: int) -> list[int]:
    """A new prompt that is in storage alone; nothing else must be on device and host."""
    prompt = insert(worker, num_blocks)
    worker.backup(prompt)
    worker.evict_device(num_blocks)
    worker.write_storage()
    worker.evict_host(num_blocks)
    return prompt


def credit(worker: ExampleWorker, prompt: Sequence[int]) -> int:
    """What the router should count of a prompt, by what the cache holds.

    Behind what is on the device it counts one tier alone, the one that has the most of the prompt: four
    blocks on the host are worth no more than in storage when storage has five.
    """
    held, names = worker.resident(), block_hashes(prompt, BLOCK)

    def prefix(on: StorageMedium) -> int:
        return sum(1 for _ in takewhile(held[on].__contains__, names))

    device = prefix(StorageMedium.GPU)
    most, tenths = max((prefix(on), tenths) for on, tenths in LOWER.items())
    return BLOCK * (device * CREDIT["GPU"] + max(0, most - device) * tenths) // 10


# ------------------------------------------------------------------------------------ the router


def source(worker: ExampleWorker, sink: int = LIVE) -> Source:
    return Source(worker.endpoint(sink), worker.replay_endpoint(sink))


def documents(worker: ExampleWorker) -> Documents:
    return Documents(worker._child.ask("facts")["http"])


@contextlib.contextmanager
def routing(*sources: Source | Documents) -> Iterator[VllmRouter]:
    """A router that could read all that it was sent."""
    with router_for(sources, BLOCK) as router:
        yield router
        assert router.unreadable() == []


def decided(router: VllmRouter, prompt: Sequence[int], worker: int, credit: int) -> None:
    """Until the router decides so. It credits no last token, so there is one more than is cached."""
    expected = Decision(worker, credit)
    assert router.until([*prompt, 0], lambda last: last == expected) == expected


def forgotten(router: VllmRouter, prompt: Sequence[int]) -> None:
    """Until the router believes that nobody has anything of it."""
    assert router.until([*prompt, 0], lambda last: last.credit == 0).credit == 0


def believes(router: VllmRouter, workers: Workers, number: int, *prompts: Sequence[int]) -> None:
    """Until the router believes of this worker's prompts what its cache holds."""
    for prompt in prompts:
        expected = credit(workers[number], prompt)
        assert expected > 0
        decided(router, prompt, number, expected)


@conforms("routing by prefix")
def test_requests_go_where_their_prefix_is(workers: Workers) -> None:
    """Two conversations of one system prompt, which both workers have, go to the worker that has the rest
    too; credit is for what is there, and for no more.
    """
    zero, one = workers
    with routing(*map(source, workers)) as router:
        system = insert(zero, 2)
        one.insert(system)
        mine = insert(zero, 3, after=system)
        theirs = insert(one, 2, after=system)
        alone = insert(one, 1)
        decided(router, mine, 0, 5 * BLOCK)
        decided(router, theirs, 1, 4 * BLOCK)
        decided(router, alone, 1, BLOCK)
        decided(router, zero.prompt(4, after=mine), 0, 5 * BLOCK)
        decided(router, zero.prompt(1, after=theirs[: 3 * BLOCK]), 1, 3 * BLOCK)
        forgotten(router, zero.prompt(3))
        assert router.decide([*system, 0]).credit == 2 * BLOCK


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=conforms("credit by tier (disk)"), id="disk"),
        pytest.param(1, marks=conforms("credit by tier (external)"), id="external"),
    ],
)
def test_credit_by_tier(number: int, workers: Workers) -> None:
    """Tokens count 1 on the device, 0.8 on the host and 0.3 in storage, also after each move between
    tiers and an eviction from each, and not at all once all is gone.
    """
    worker = workers[number]
    prompt = worker.prompt(5)
    steps: list[tuple[Callable[[], None], int]] = [
        (lambda: worker.insert(prompt), 20),
        (lambda: worker.backup(prompt), 20),
        (lambda: worker.evict_device(2), 18),  # 12 + 0.8 * 8
        (lambda: worker.evict_device(3), 16),
        (worker.write_storage, 16),
        (lambda: worker.evict_host(2), 6),  # storage has more of it than the host
        (lambda: worker.evict_host(3), 6),
        (lambda: worker.prefetch(prompt), 16),
        (lambda: worker.load_back(prompt), 20),
        (lambda: worker.evict_host(5), 20),
        (worker.reset_device, 6),
    ]
    with routing(*map(source, workers)) as router:
        for step, expected in steps:
            step()
            assert credit(worker, prompt) == expected
            decided(router, prompt, number, expected)
        worker.flush()
        forgotten(router, prompt)


@conforms("routing by tier")
def test_the_better_tier_wins(workers: Workers) -> None:
    """Of two workers that have a prompt, the one whose copies are worth more gets it: two blocks on the
    device before five in storage, five on the host before two on the device.
    """
    zero, one = workers
    with routing(*map(source, workers)) as router:
        prompt = stored(zero, 5)
        decided(router, prompt, 0, 6)
        one.insert(prompt[: 2 * BLOCK])
        decided(router, prompt, 1, 8)
        zero.prefetch(prompt)
        decided(router, prompt, 0, 16)
        one.insert(prompt)
        decided(router, prompt, 1, 20)
        one.evict_device(2)
        decided(router, prompt, 0, 16)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(False, marks=conforms("late join"), id="static"),
        pytest.param(True, marks=conforms("late join, found by /kv_event_sources"), id="found"),
    ],
)
def test_a_late_join(found: bool, workers: Workers) -> None:
    """A router that comes late knows what was published before, though nothing happens any more: it asks
    for it when the sink's next empty batch comes. What comes later it learns as it happens.
    """
    zero, one = workers
    lower, upper = stored(zero, 3), insert(zero, 2)
    other = insert(one, 4)
    one.evict_device(1)
    sources = [documents(w) if found else source(w) for w in workers]
    with routing(*sources) as router:
        believes(router, workers, 0, lower, upper)
        believes(router, workers, 1, other)
        believes(router, workers, 1, insert(one, 2))
        believes(router, workers, 0, insert(zero, 2))


@conforms("gap")
def test_a_gap(workers: Workers) -> None:
    """What was lost on the way comes by replay."""
    zero, one = workers
    with (
        Forwarder(zero.endpoint()) as forwarder,
        routing(Source(forwarder.endpoint, zero.replay_endpoint()), source(one)) as router,
    ):
        prompt = insert(zero, 5)
        zero.backup(prompt)
        believes(router, workers, 0, prompt)
        asked = replays(zero, LIVE)
        forwarder.lose()
        zero.evict_device(3)
        other = insert(zero, 2)
        forwarder.restore(zero.next_seqs[LIVE])
        believes(router, workers, 0, prompt, other)
        assert replays(zero, LIVE) > asked


@conforms("gap, the log does not reach back")
def test_a_gap_longer_than_the_log(workers: Workers) -> None:
    """What was missed is no more: the router gets a snapshot in its place."""
    zero, one = workers
    with (
        Forwarder(zero.endpoint(ROLLED)) as forwarder,
        routing(
            Source(forwarder.endpoint, zero.replay_endpoint(ROLLED)), source(one, ROLLED)
        ) as router,
    ):
        prompt, gone = insert(zero, 5), insert(zero, 1)
        zero.backup(prompt)
        believes(router, workers, 0, prompt, gone)
        asked = replays(zero, ROLLED)
        forwarder.lose()
        zero.evict_device(6)
        churn(zero, STEPS + 10)
        other = insert(zero, 2)
        forwarder.restore(zero.next_seqs[ROLLED])
        believes(router, workers, 0, prompt, other)
        forgotten(router, gone)
        assert replays(zero, ROLLED) > asked


def churn(worker: ExampleWorker, num_batches: int) -> None:
    """So many batches, of blocks that come and go; nothing else must be on the device."""
    for _ in range(num_batches // 2):
        insert(worker, 1)
        worker.evict_device(1)


@conforms("late join, the log does not reach back")
def test_a_late_join_after_the_log_has_rolled(workers: Workers) -> None:
    """The state before the log comes as a snapshot, at the seq that was asked for."""
    zero, one = workers
    prompt = insert(zero, 5)
    zero.backup(prompt)
    zero.evict_device(5)
    churn(zero, STEPS + 10)
    other = insert(zero, 2)
    with routing(source(zero, ROLLED), source(one, ROLLED)) as router:
        believes(router, workers, 0, prompt, other)
        believes(router, workers, 1, insert(one, 3))


@conforms("sidecar killed")
def test_a_sidecar_that_is_killed(workers: Workers) -> None:
    """The next one goes on where it was; the router learns what changed meanwhile."""
    zero, one = workers
    with routing(*map(source, workers)) as router:
        prompt = insert(zero, 5)
        zero.backup(prompt)
        theirs = insert(one, 2)
        believes(router, workers, 0, prompt)
        believes(router, workers, 1, theirs)
        killed = zero.kill_sidecar()
        zero.evict_device(3)
        other = insert(zero, 2)
        zero.await_sidecar(killed)
        believes(router, workers, 0, prompt, other)
        believes(router, workers, 1, theirs)


@conforms("worker killed and started again")
def test_a_worker_that_is_killed(workers: Workers) -> None:
    """Nothing of it is believed when it is dead; when it is back the router knows what its files hold,
    and follows it as before.
    """
    zero, one = workers
    with routing(*map(source, workers)) as router:
        lower, upper = stored(zero, 5), insert(zero, 2)
        theirs = insert(one, 2)
        believes(router, workers, 0, lower, upper)
        believes(router, workers, 1, theirs)
        zero.kill()
        forgotten(router, lower)
        forgotten(router, upper)
        believes(router, workers, 1, theirs)
        zero.restart()
        decided(router, lower, 0, 6)
        forgotten(router, upper)
        believes(router, workers, 0, insert(zero, 3))


@conforms("restart with the state lost (seqs from 0)")
def test_seqs_that_begin_at_zero(workers: Workers) -> None:
    """A run whose seqs begin anew, for what was kept of the last is lost, has the place of that one."""
    zero, one = workers
    with routing(*map(source, workers)) as router:
        lower, upper = stored(zero, 5), insert(zero, 2)
        theirs = insert(one, 2)
        believes(router, workers, 0, lower, upper)
        zero.kill()
        forgotten(router, upper)
        forget_state(zero)
        zero.restart()
        decided(router, lower, 0, 6)
        forgotten(router, upper)
        believes(router, workers, 0, insert(zero, 3))
        believes(router, workers, 1, theirs)


@conforms("resync")
def test_a_resync(workers: Workers) -> None:
    """A clear and all that is held, in the stream: the router believes what it did."""
    zero = workers[0]
    with routing(*map(source, workers)) as router:
        lower, upper = stored(zero, 5), insert(zero, 2)
        believes(router, workers, 0, lower, upper)
        zero.resync()
        believes(router, workers, 0, lower, upper, insert(zero, 1))


@conforms("rebase")
def test_a_rebase(workers: Workers) -> None:
    """When seqs start over the router believes what it did; one that comes then has little to replay."""
    zero, one = workers
    sources = [source(worker, REBASED) for worker in workers]
    prompt = insert(zero, 5)
    zero.backup(prompt)
    zero.evict_device(5)
    with routing(*sources) as router:
        believes(router, workers, 0, prompt)
        for _ in range(REBASE):
            last = zero.next_seqs[REBASED]
            churn(zero, 2)
            if zero.next_seqs[REBASED] < last:
                break
        assert zero.next_seqs[REBASED] < last
        other = insert(zero, 2)
        believes(router, workers, 0, prompt, other)
    with routing(*sources) as late:
        believes(late, workers, 0, prompt, other)
        believes(late, workers, 1, insert(one, 2))


@conforms("adapters and salts")
def test_namespaces(workers: Workers) -> None:
    """An adapter's blocks count for no prompt of the base model, and blocks with a salt or an extra key,
    which the router cannot be told of, are not published to it; neither costs it anything else.
    """
    zero, one = workers
    spaces = [
        Namespace(lora_name="adapter"),
        Namespace(cache_salt="salt"),
        Namespace(extra_key="key"),
        Namespace(lora_name="adapter", cache_salt="salt"),
    ]
    with routing(*map(source, workers)) as router:
        prompts = [zero.prompt(3) for _ in spaces]
        for prompt, space in zip(prompts, spaces, strict=True):
            zero.insert(prompt, space)
        believes(router, workers, 0, insert(zero, 2))
        for prompt in prompts:
            assert router.decide([*prompt, 0]).credit == 0
            one.insert(prompt[:BLOCK])
            decided(router, prompt, 1, BLOCK)
        zero.resync()
        believes(router, workers, 0, insert(zero, 2))
    told = {
        (event.lora_name, tuple(map(canonical_hash, event.block_hashes)))
        for payload in replayed(zero.replay_endpoint())
        for event in decode_batch(payload).batch.events
        if isinstance(event, BlockStored)
    }
    assert ("adapter", tuple(block_hashes(prompts[0], BLOCK, spaces[0]))) in told
    salted = {
        block
        for prompt, space in zip(prompts[1:], spaces[1:], strict=True)
        for block in block_hashes(prompt, BLOCK, space)
    }
    assert salted.isdisjoint(block for _, blocks in told for block in blocks)
    assert {name for name, _ in told} == {None, "adapter"}
