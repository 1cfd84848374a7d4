"""How a worker's end shows, when much is left to tell or something begins to be told anew."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from core_rig import BLOCK_SIZE, StoryWorker
from ports_rig import free_endpoints
from publisher_rig import PATIENCE_S, eventually, kill, receive_until, still_running

from kvevents import AllBlocksCleared, BlockIndex, decode_batch
from kvevents.codec import encode_batch
from kvevents.events import KVEventBatch
from publisher import Batch, SidecarConfig, SinkConfig, Subscriber, WorkerInfo, spawn
from publisher.config.sidecar_config import RelayConfig
from publisher.sidecar.loop import Loop
from publisher.sidecar.relay import RelaySource
from publisher.sidecar.signals import Signals
from publisher.sidecar.sink import Sink
from publisher.stream.core import Core
from publisher.stream.input import Input
from publisher.stream.state_folder import StateFolder
from publisher.stream.status import SidecarStatus
from publisher.subscriber.subscriber import Received

ANY = "tcp://127.0.0.1:0"
SINK = SinkConfig(name="s", endpoint=ANY, replay_endpoint=ANY)
INFO = WorkerInfo(block_size=BLOCK_SIZE)

DYING_WORKER = """
import os, signal, sys
from hicache import HiRadixCache, KVShape, PagePool
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
cache = HiRadixCache(PagePool(20_000, 4, KVShape(1, 1, 1)))
sink = SinkConfig(endpoint=sys.argv[1], replay_endpoint=sys.argv[2])
config = SidecarConfig(sinks=(sink,), linger_s=float(sys.argv[4]), state_dir=sys.argv[3])
sidecar = spawn(WorkerInfo(block_size=4), config)
sidecar.pump(cache)
print(sidecar.pid, *[bound.endpoint for bound in sidecar.client.sinks], flush=True)
sys.stdin.readline()
os.kill(sidecar.pid, signal.SIGSTOP)
for step in range(4000):
    cache.insert([step * 10 + at for at in range(8)], cache.allocate(2))
    sidecar.pump(cache)
print("full", flush=True)
sys.stdin.readline()
sys.exit(0)
"""


def view_of(received: list[Received], index: BlockIndex) -> None:
    for one in received:
        if isinstance(one, Batch):
            index.apply(one.batch.events)


@pytest.mark.integration
@pytest.mark.parametrize("how", ["killed", "exit"])
def test_a_backlog_is_not_told_after_the_end(tmp_path: Path, how: str) -> None:
    """With thousands of messages left in the ring when the worker dies or ends, the last batch with
    events is AllBlocksCleared, and the view is empty.
    """
    endpoint, replay_endpoint = free_endpoints(2)
    worker = subprocess.Popen(
        [sys.executable, "-c", DYING_WORKER, endpoint, replay_endpoint, str(tmp_path), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.ExitStack() as stack:
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        pid = int(worker.stdout.readline().split()[0])
        subscriber = stack.enter_context(Subscriber(endpoint, replay_endpoint))
        index = BlockIndex()
        view_of(
            receive_until(subscriber, lambda got: any(isinstance(x, Batch) for x in got)), index
        )
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "full\n"
        if how == "killed":
            worker.kill()
            worker.wait(PATIENCE_S)
            kill(pid, signal.SIGCONT)
        else:
            kill(pid, signal.SIGCONT)
            worker.stdin.write("\n")
            worker.stdin.flush()
            worker.wait(PATIENCE_S)
        assert still_running([pid], PATIENCE_S) == set()
        while received := subscriber.receive(0.5):
            view_of(received, index)
        assert all(not held for held in index.resident.values())
        worker.stdin.close()
        worker.stdout.close()


class GoneWorker:
    """A source whose worker is gone, and which has more to read than anybody will."""

    worker, link_id, alive = INFO, b"g" * 16, False

    def __init__(self) -> None:
        self._story = StoryWorker(1)

    def pollables(self) -> list[int | zmq.Socket[bytes]]:
        return []

    def wake_at(self) -> float:
        return float("inf")

    def start(self, expected: int, last: bytes | None = None) -> None: ...

    def read(self, most: int) -> tuple[list[Input], bool]:
        self._story.step()
        return [self._story.messages.pop()], True

    def release(self) -> None: ...

    def ask_resync(self, reason: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.integration
def test_the_end_comes_though_there_is_more_to_read() -> None:
    """What cannot be told in the time for it is left; AllBlocksCleared is the last that is told."""
    signals = Signals()
    context = zmq.Context[zmq.Socket[bytes]]()
    core = Core(INFO, b"g" * 16, (SINK,), ("s",), None, clock=time.time)
    sink = Sink(context, SINK, core.outputs[0], INFO, {})
    config = SidecarConfig(sinks=(SINK,), linger_s=0.2)
    source = GoneWorker()
    try:
        loop = Loop.__new__(Loop)
        status = SidecarStatus(INFO, "0", os.getpid(), 0.0)
        try:
            Loop.__init__(loop, source, core, [sink], config, status, signals, None)
            loop._update_status = lambda now: None  # type: ignore[method-assign]  # of known sources
            loop.begin()
            loop.run()
        finally:
            signals.close()
        payloads = [
            payload for _, payload in core.outputs[0].replay(core.outputs[0].log.oldest_seq)
        ]
        told = [decode_batch(payload).batch.events for payload in payloads]
        assert [events for events in told if events][-1] == [AllBlocksCleared()]
    finally:
        sink.close(linger_s=0)
        context.term()


@pytest.mark.parametrize("foreign", [False, True])
def test_nothing_is_told_anew_after_the_end(foreign: bool) -> None:
    """Neither a rebase that is due nor a snapshot that is asked for brings back a dead worker's."""
    core = Core(INFO, b"g" * 16, (SINK,), ("s",), None, clock=time.time)
    core.start()
    worker = StoryWorker(3, foreign=foreign, packed=True)
    if not foreign:
        worker.retell()
    for _ in range(50):
        worker.step()
    core.apply(worker.messages, 0.0)
    core.end()
    core.outputs[0]._rebase_at = 1
    core.snapshot()
    index = BlockIndex()
    for _ in range(100):
        for one in core.work(0.0):
            index.apply(one.frame.events)
    assert all(not held for held in index.resident.values())
    late = BlockIndex()
    for _, payload in core.outputs[0].replay(0):
        late.apply(decode_batch(payload).batch.events)
    assert all(not held for held in late.resident.values())


@pytest.mark.integration
def test_a_successor_cuts_the_linger_short(tmp_path: Path) -> None:
    """A worker that comes back at once on the same ports need not wait for a long linger."""
    endpoint, replay_endpoint = free_endpoints(2)
    arguments = endpoint, replay_endpoint, str(tmp_path), "60"
    first = subprocess.Popen(
        [sys.executable, "-c", DYING_WORKER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with first:
        assert first.stdout is not None
        pid = int(first.stdout.readline().split()[0])
        first.kill()
    sink = SinkConfig(endpoint=endpoint, replay_endpoint=replay_endpoint)
    config = SidecarConfig(sinks=(sink,), linger_s=0.0, state_dir=str(tmp_path))
    with spawn(WorkerInfo(block_size=4), config) as second:
        assert second.client.sinks[0].endpoint == endpoint
        assert still_running([pid], PATIENCE_S) == set()


def test_who_waits_is_seen(tmp_path: Path) -> None:
    """A folder's holder sees that another waits; one that has got it sees nobody."""
    from threading import Thread

    first = StateFolder(tmp_path / "root", "name", wait_s=0)
    assert not first.successor_waits()
    second: list[StateFolder] = []
    thread = Thread(target=lambda: second.append(StateFolder(tmp_path / "root", "name", wait_s=20)))
    thread.start()
    eventually(lambda: 1 if first.successor_waits() else None)
    first.close()
    thread.join(PATIENCE_S)
    assert not second[0].successor_waits()
    second[0].close()


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_without_a_time_is_told(ts: float) -> None:
    """An engine's batch whose ts is no number of seconds costs nothing: it has the time of the last."""
    import msgspec

    core = Core(INFO, b"g" * 16, (SINK,), ("s",), None, clock=time.time)
    core.start()
    worker = StoryWorker(1, foreign=True)
    worker.step()
    good = worker.messages[0]
    raw = msgspec.msgpack.decode(good.body)
    bad = Input(good.number, good.flags, msgspec.msgpack.encode([ts, *raw[1:]]))
    (told,) = core.apply([bad], 0.0)
    assert told.frame.events and told.frame.ts == 0.0
    with pytest.raises(ValueError, match=r"^ts: "):
        encode_batch(KVEventBatch(ts, [], 0))


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process can open only `spare` more; it has fewer than 200."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for fd in taken[:spare]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken[spare:]:
            os.close(fd)


@pytest.mark.integration
def test_a_relay_without_descriptors_tries_again() -> None:
    """When no socket can be made the relay says so by nothing, and makes it later."""
    config = RelayConfig(
        endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:2", worker=INFO
    )
    context = zmq.Context[zmq.Socket[bytes]]()
    context.socket(zmq.PAIR).close()  # the context's own threads have theirs
    source = RelaySource(config, context=context)
    try:
        with few_descriptors(0):
            source.start(0)
            assert source.read(10) == ([], False)
            assert source.wake_at() <= time.monotonic() + 1
        time.sleep(max(0.0, source.wake_at() - time.monotonic()))
        source.read(10)
        assert len(source.pollables()) == 2
    finally:
        source.close()
        context.term()
