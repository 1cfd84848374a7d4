"""Processes that die, fork or come too early: once it is quiet, the router's view is the cache's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from ports_rig import free_endpoints
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    insert,
    kill,
    make_cache,
    receive_until,
    still_running,
)

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, BlockIndex
from kvevents.gaps import Restarted
from publisher import Batch, Sidecar, SidecarConfig, SinkConfig, Subscriber, WorkerInfo, spawn

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4)


def start(endpoint: str, replay_endpoint: str, **settings: object) -> Sidecar:
    sink = SinkConfig(
        endpoint=endpoint,
        replay_endpoint=replay_endpoint,
        heartbeat_s=0.1,
        **settings,  # type: ignore[arg-type]
    )
    return spawn(WORKER, SidecarConfig(sinks=(sink,), linger_s=0, persist="none"))


def work(sidecar: Sidecar, cache: HiRadixCache, first: int, batches: int) -> None:
    """So many batches, all published when it returns."""
    for number in range(batches):
        insert(cache, range(first + 4 * number, first + 4 * number + 8))
        sidecar.pump(cache)
    assert sidecar.client.flush(cache, PATIENCE_S)


def follow(subscriber: Subscriber, index: BlockIndex, done: Callable[[], bool]) -> bool:
    """Apply what comes until `done`; whether that happened in time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for one in subscriber.receive(0.1):
            match one:
                case Batch():
                    index.apply(one.batch.events)
                case Restarted():
                    index.clear()
                case _:
                    pass
        if done() and not subscriber.recovering:
            return True
    return False


@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("batches", [1, 5, 60])
def test_a_new_run_is_not_taken_for_a_gap(batches: int, rolled: bool) -> None:
    """Worker and sidecar are killed and start anew on the same ports; whether the new run's seq is
    behind the old one's, equal or far ahead when the subscriber hears of it, nothing of the old stays.
    It does not go on from where the old one was: nothing is persisted.
    """
    endpoints = free_endpoints(2)
    settings: dict[str, object] = {"buffer_steps": 3} if rolled else {}
    index = BlockIndex()
    with Subscriber(*endpoints) as subscriber:
        old = make_cache()
        with start(*endpoints) as sidecar:
            work(sidecar, old, 0, 5)
            assert follow(subscriber, index, lambda: index.resident == old.resident_blocks())
            kill(sidecar.pid)
        new = make_cache(num_pages=512)
        with start(endpoints[0], endpoints[1], **settings) as sidecar:
            work(sidecar, new, 100_000, batches)
            assert follow(subscriber, index, lambda: index.resident == new.resident_blocks())


def test_a_router_that_was_there_before_its_worker() -> None:
    """Its first questions find nobody and are given up; it goes on asking, and is exact in the end."""
    endpoints = free_endpoints(2)
    index = BlockIndex()
    with Subscriber(*endpoints, replay_timeout_s=0.05) as subscriber:
        assert not follow_for(subscriber, 0.5)
        cache = make_cache(num_pages=512)
        with start(*endpoints, buffer_steps=2) as sidecar:
            work(sidecar, cache, 0, 20)
            assert follow(subscriber, index, lambda: index.resident == cache.resident_blocks())


def follow_for(subscriber: Subscriber, seconds: float) -> list[object]:
    """What comes within a time; for a stream on which nothing should."""
    deadline, found = time.monotonic() + seconds, list[object]()
    while (left := deadline - time.monotonic()) > 0:
        found += subscriber.receive(left)
    return found


def receive_until_still(subscriber: Subscriber) -> None:
    """Until no replay is under way, so that what comes next is live."""
    while subscriber.recovering:
        subscriber.receive(0.1)


def test_a_run_begins_with_a_clear() -> None:
    """The batch of seq 0 is AllBlocksCleared, before the worker has said anything."""
    with start(LOOPBACK, LOOPBACK) as sidecar:
        (bound,) = sidecar.client.sinks
        with Subscriber(bound.endpoint, bound.replay_endpoint) as subscriber:
            (first, *_) = receive_until(subscriber, bool)
            assert isinstance(first, Batch)
            assert first.seq == 0
            assert first.batch.events == [AllBlocksCleared()]


FORKING_WORKER = """
import os, signal
from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
ANY = "tcp://127.0.0.1:0"
sink = SinkConfig(endpoint=ANY, replay_endpoint=ANY, heartbeat_s=3600.0)
sidecar = spawn(WorkerInfo(block_size=1), SidecarConfig(sinks=(sink,), linger_s=0.3))
sidecar.client.publish([StoreNew(StorageMedium.GPU, BlockId(0), 1, None, BASE, bytes(4))])
child = os.fork()
if child:
    (bound,) = sidecar.client.sinks
    print(sidecar.pid, child, bound.endpoint, bound.replay_endpoint, flush=True)
signal.pause()
"""


def test_a_killed_worker_is_noticed_though_a_child_of_it_lives() -> None:
    """A forked child keeps the link's descriptors open; the worker's death is announced all the same."""
    command = [sys.executable, "-c", FORKING_WORKER]
    child = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            pid, child_pid, *endpoints = worker.stdout.readline().split()
            child = int(child_pid)
            with Subscriber(*endpoints) as subscriber:
                receive_until(subscriber, lambda _: subscriber.next_seq == 2)
                receive_until_still(subscriber)
                worker.kill()
                killed_at = time.monotonic()
                (last,) = receive_until(subscriber, bool)
                assert time.monotonic() - killed_at < 10.0  # one, where nothing else runs
                assert isinstance(last, Batch)
                assert last.batch.events == [AllBlocksCleared()]
            assert still_running([int(pid)], PATIENCE_S) == set()
        finally:
            worker.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_leaves_ends_nothing() -> None:
    """It lets go of its copies, publishes nothing, and the sidecar goes on with its worker."""
    cache = make_cache()
    with start(LOOPBACK, LOOPBACK) as sidecar:
        work(sidecar, cache, 0, 3)
        child = os.fork()
        if not child:
            insert(cache, range(900, 908))
            refused = not sidecar.pump(cache)
            sidecar.close()
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        work(sidecar, cache, 100, 3)
        assert sidecar.client.stats.refused == 0
        (bound,) = sidecar.client.sinks
        index = BlockIndex()
        with Subscriber(bound.endpoint, bound.replay_endpoint) as subscriber:
            assert follow(subscriber, index, lambda: index.resident == cache.resident_blocks())
        assert sidecar.close() == 0
