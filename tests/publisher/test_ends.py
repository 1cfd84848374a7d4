"""How a worker's end shows, when much is left to tell or something begins to be told anew."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from core_rig import BLOCK_SIZE, StoryWorker
from ports_rig import free_endpoints
from publisher_rig import (
    PATIENCE_S,
    eventually,
    few_descriptors,
    kill,
    receive_until,
    short_folder,
    start_kvevents,
    still_running,
)

from kvevents import AllBlocksCleared, BlockIndex, decode_batch
from kvevents.codec import encode_batch
from kvevents.events import KVEventBatch
from publisher import Batch, SidecarConfig, SinkConfig, Subscriber, WorkerInfo, spawn
from publisher.config.sidecar_config import RelayConfig
from publisher.link.messages import LOST
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


class WatchedWorker(GoneWorker):
    """One that leaves three messages, and sees when the loop lets go of each."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self.num_read = 0
        self.applied: list[int] = []
        """How many the core had taken, each time that what was read was let go of."""
        self.asked: list[str] = []

    def read(self, most: int) -> tuple[list[Input], bool]:
        if self.num_read == 3:
            return [], False
        self.num_read += 1
        return super().read(most)

    def release(self) -> None:
        self.applied.append(self._core.replica.expected)

    def ask_resync(self, reason: str) -> None:
        self.asked.append(reason)


@contextlib.contextmanager
def looping(source: GoneWorker, core: Core, one: SinkConfig = SINK) -> Iterator[Loop]:
    """A loop over a source that it does not know, begun."""
    config = SidecarConfig(sinks=(one,), linger_s=0.0)
    status = SidecarStatus(INFO, "0", os.getpid(), 0.0)
    loop = Loop.__new__(Loop)
    loop._update_status = lambda now: None  # type: ignore[method-assign]  # of known sources
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
        sink = Sink(context, one, core.outputs[0], INFO, {})
        stack.callback(sink.close, linger_s=0)
        signals = Signals()
        stack.callback(signals.close)
        Loop.__init__(loop, source, core, [sink], config, status, signals, None)
        loop.begin()
        yield loop


@pytest.mark.integration
def test_what_is_let_go_of_has_been_kept() -> None:
    """S2: killed in between, a sidecar is followed by one that finds it in the ring or in the journal."""
    core = Core(INFO, b"g" * 16, (SINK,), ("s",), None, clock=time.time)
    source = WatchedWorker(core)
    with looping(source, core) as loop:
        loop.run()
    assert source.applied[:3] == [1, 2, 3]
    assert source.asked == []


@pytest.mark.integration
def test_a_resync_that_was_never_asked_for_is_asked_for_by_the_next(tmp_path: Path) -> None:
    """R1: killed after it had noted a loss, and before it asked: nobody else would."""
    worker = StoryWorker(4)
    worker.retell()
    core = Core(INFO, b"g" * 16, (SINK,), ("s",), tmp_path, clock=time.time)
    core.start()
    core.apply([*worker.messages, Input(9, LOST, b"the ring was full")], 0.0)
    core.close()
    core = Core(INFO, b"g" * 16, (SINK,), ("s",), tmp_path, clock=time.time)
    assert core.warm and not core.replica.in_step
    source = WatchedWorker(core)
    with looping(source, core):
        assert len(source.asked) == 1
    core.close()


class SteeredWorker(WatchedWorker):
    """One that tells what it is given to."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.inputs: list[Input] = []

    def wake_at(self) -> float:
        return 0.0 if self.inputs else float("inf")

    def read(self, most: int) -> tuple[list[Input], bool]:
        inputs, self.inputs = self.inputs, []
        return inputs, False


@pytest.mark.integration
def test_who_joins_while_the_state_is_not_known_is_told_it_later() -> None:
    """After a loss a joiner has to wait until the worker has told its state anew, and has that then."""
    one = msgspec.structs.replace(SINK, tells_joiners=True)
    core = Core(INFO, b"g" * 16, (one,), ("s",), None, clock=time.time)
    source, worker = SteeredWorker(core), StoryWorker(4)
    worker.retell()
    for _ in range(20):
        worker.step()
    source.inputs = [*worker.messages, Input(worker.number, LOST, b"the ring was full")]
    worker.number += 1
    with (
        looping(source, core, one) as loop,
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.SUB) as joiner,
    ):
        (sink,), output = loop._sinks, core.outputs[0]

        def turn() -> None:
            loop._turn(now := time.monotonic(), now + 0.05)

        def in_step() -> bool:
            return core.replica.in_step

        turn()
        assert not in_step()
        joiner.setsockopt(zmq.LINGER, 0)
        joiner.subscribe(b"")
        joiner.connect(sink.bound.endpoint)
        deadline = time.monotonic() + PATIENCE_S
        while not sink.status.subscribers:
            assert time.monotonic() < deadline
            turn()
        for _ in range(3):
            turn()
        assert sink.tell_at() <= time.monotonic(), "it still waits"
        assert not output.snapshotting
        worker.retell()
        source.inputs = worker.messages[-1:]
        turn()
        assert in_step()
        assert sink.tell_at() == float("inf"), "it is being told, or was"
        index = BlockIndex()
        while index.resident != worker.truth:
            assert time.monotonic() < deadline
            turn()
            while joiner.poll(0):
                index.apply(decode_batch(joiner.recv_multipart()[-1]).batch.events)
        assert worker.blocks


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


@contextlib.contextmanager
def nobody_at_a_link() -> Iterator[tuple[socket.socket, Path]]:
    """A worker's socket that listens, and which nobody looks after."""
    with (
        short_folder() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.settimeout(PATIENCE_S)
        listener.bind(str(folder / "link-dp0"))
        listener.listen()
        yield listener, folder / "link-dp0"


def serving(link: Path, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`kvevents serve` at `link`."""
    options = ["--link", str(link), "--endpoint", ANY, "--replay-endpoint", "none"]
    options += ["--http-endpoint", "none", *more]
    return start_kvevents(f"serving-{os.getpid()}", "serve", *options)


@pytest.mark.integration
def test_a_socket_without_a_worker_keeps_nobody_from_ending() -> None:
    """SIGTERM ends `serve --forever` though a killed worker's socket stays at the link."""
    with nobody_at_a_link() as (listener, link):
        listener.close()
        with serving(link, "--forever") as process:
            assert process.stderr is not None
            while "; waiting" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.integration
@pytest.mark.parametrize("more", [(), ("--forever",)], ids=["once", "forever"])
def test_a_worker_that_is_stopped_keeps_nobody_from_ending(more: tuple[str, ...]) -> None:
    """SIGTERM ends a sidecar that waits for its Welcome, well before the ten seconds for that."""
    with nobody_at_a_link() as (listener, link), serving(link, *more) as process:
        worker, _ = listener.accept()
        with worker:
            worker.settimeout(PATIENCE_S)
            assert worker.recv(4096), "its Hello"
            process.send_signal(signal.SIGTERM)
            process.wait(7.0)


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
