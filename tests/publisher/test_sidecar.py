"""publisher.sidecar.process, spawned: the whole way from a worker's records to real sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from publisher_link_rig import until
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    Socket,
    children_of,
    insert,
    kill,
    make_cache,
    open_fds,
    receive_until,
    router_view,
    short_folder,
    still_running,
)

from hicache import HiRadixCache
from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockStored,
    Event,
    KVEventBatch,
    decode_batch,
)
from kvevents.frames import parse_live, replay_request
from publisher import (
    Batch,
    LinkError,
    Received,
    Sidecar,
    SidecarConfig,
    SidecarState,
    SinkConfig,
    Subscriber,
    WorkerInfo,
    spawn,
)
from publisher.link.messages import Bound

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4, dp_rank=2)
WORKER_PROCESS = str(Path(__file__).with_name("publisher_worker.py"))


def sink(**settings: object) -> SinkConfig:
    defaults = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, "add_dp_rank": False}
    return SinkConfig(**defaults | settings)  # type: ignore[arg-type]


def config(*sinks: SinkConfig, linger_s: float = 0.0) -> SidecarConfig:
    return SidecarConfig(sinks=sinks or (sink(),), linger_s=linger_s)


def serving() -> set[int]:
    """The sidecars that are children of this process."""
    return {pid for pid, command in children_of(os.getpid()).items() if "serve --link" in command}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test may leave neither a sidecar, nor a descriptor, nor a folder for a link."""
    before = open_fds()
    with short_folder() as folder, short_folder() as state:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(state))  # a sidecar's: what it keeps is under it
        yield
        assert serving() == set()
        assert open_fds() == before
        assert list(folder.iterdir()) == []


@contextlib.contextmanager
def subscribed(endpoint: str) -> Iterator[Socket]:
    """A bare SUB whose subscription has arrived: its XPUB says so to nobody here, so a batch must."""
    with zmq.Context[Socket]() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.IPV6, 1)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)
        yield sub


def live(sub: Socket) -> tuple[int, KVEventBatch]:
    assert sub.poll(int(PATIENCE_S * 1000)), "nothing came"
    frames = sub.recv_multipart()
    assert len(frames) == 3
    frame = parse_live(frames)
    return frame.seq, decode_batch(frame.payload).batch


def flushed_seq(sidecar: Sidecar, cache: HiRadixCache) -> int:
    answer = sidecar.client.flush(cache, PATIENCE_S)
    assert answer is not None
    return answer.next_seqs[0]


def replay_of(bound: Bound) -> str:
    assert bound.replay_endpoint is not None
    return bound.replay_endpoint


def cleared(batch: KVEventBatch) -> bool:
    return batch.events == [AllBlocksCleared()]


def said_to_be_gone(received: list[Received]) -> bool:
    return any(isinstance(one, Batch) and cleared(one.batch) for one in received)


# -------------------------------------------------------------------------------- the way through


def test_events_reach_a_subscriber() -> None:
    """What a cache does arrives as batches of three frames, with seqs from 0 on without a hole, of the
    worker's rank; applied, they are the cache. Closing takes no time, twice, and returns 0.
    """
    cache = make_cache(num_pages=16)
    index = BlockIndex()
    with spawn(WORKER, config(sink(heartbeat_s=0.05))) as sidecar:
        (bound,) = sidecar.client.sinks
        with subscribed(bound.endpoint) as sub:
            first, batch = live(sub)  # a heartbeat: from here on the subscriber misses nothing
            assert batch.events in ([], [AllBlocksCleared()])
            seqs = [first]
            for step in range(30):
                insert(cache, range(step * 4, step * 4 + 12))
                sidecar.pump(cache)
            until = flushed_seq(sidecar, cache)
            while seqs[-1] + 1 < until:
                seq, batch = live(sub)
                assert batch.dp_rank == 2
                assert abs(batch.ts - time.time()) < 60
                seqs.append(seq)
                index.apply(batch.events)
            assert seqs == list(range(first, until))
            assert index.resident == cache.resident_blocks()
            assert cache.num_dropped > 0
        joined = router_view(bound.endpoint, replay_of(bound), until)
        assert joined.resident == cache.resident_blocks()
        start = time.monotonic()
        assert sidecar.close() == 0
        assert time.monotonic() - start < 5.0
        assert sidecar.close() == 0
    assert serving() == set()


def test_flush_does_not_wait_for_anything_else() -> None:
    """On a quiet link, with neither batch nor heartbeat to wake the sidecar, it is answered at once."""
    cache = make_cache()
    with spawn(WORKER, config(sink(heartbeat_s=3600.0))) as sidecar:
        for _ in range(3):
            answer = sidecar.client.flush(cache, 5.0)
            assert answer is not None
            # the sink's first batch, and the first pump's
            assert (answer.next_seqs, answer.in_step) == ((2,), True)


def test_an_idle_sidecar_beats_with_the_next_seq() -> None:
    """Empty batches with consecutive seqs, and a batch of events takes its place among them."""
    cache = make_cache()
    with (
        spawn(WORKER, config(sink(heartbeat_s=0.03))) as sidecar,
        subscribed(sidecar.client.sinks[0].endpoint) as sub,
    ):
        seq, _ = live(sub)
        for _ in range(3):
            following, batch = live(sub)
            assert (following, batch.events) == (seq + 1, [])
            seq = following
        insert(cache, range(8))
        sidecar.pump(cache)
        told: list[Event] = []
        while not told:
            following, batch = live(sub)
            assert following == seq + 1
            seq, told = following, batch.events
        assert told[0] == AllBlocksCleared()  # the first pump tells all there is
        assert isinstance(told[1], BlockStored)


def test_each_sink_counts_for_itself() -> None:
    """Two sinks get the same events, each with its own seq, topic and replay."""
    cache = make_cache()
    sinks = sink(topic="a", heartbeat_s=0.02), sink(topic="b", heartbeat_s=3600.0)
    with spawn(WORKER, config(*sinks)) as sidecar:
        quick, slow = sidecar.client.sinks
        with subscribed(quick.endpoint) as sub:
            live(sub)
        insert(cache, range(8))
        sidecar.pump(cache)
        answer = sidecar.client.flush(cache, PATIENCE_S)
        assert answer is not None
        assert answer.next_seqs[1] == 2 < answer.next_seqs[0]
        for bound, until in zip((quick, slow), answer.next_seqs, strict=True):
            view = router_view(bound.endpoint, replay_of(bound), until)
            assert view.resident == cache.resident_blocks()


def test_a_tiny_ring_costs_nothing_but_time() -> None:
    """K2 end to end: a cache far larger than the ring arrives whole."""
    cache = make_cache(num_pages=2000)
    with spawn(WORKER, config(), ring_bytes=4096) as sidecar:
        for step in range(20):
            insert(cache, range(step * 1000, step * 1000 + 400))
            sidecar.pump(cache)
        until = flushed_seq(sidecar, cache)
        assert sidecar.client.stats.refused > 0
        (bound,) = sidecar.client.sinks
        view = router_view(bound.endpoint, replay_of(bound), until)
        assert view.resident == cache.resident_blocks()


def test_a_stuck_replay_client_delays_no_live_batch() -> None:
    """Case 59: a client asks for more than all buffers hold, 3,000 batches of 3 kB, and never reads;
    live batches all arrive, and soon.
    """
    cache = make_cache(num_pages=25_000, page_size=64)
    with spawn(WorkerInfo(block_size=64), config(sink(heartbeat_s=0.05))) as sidecar:
        (bound,) = sidecar.client.sinks
        for step in range(3000):
            insert(cache, range(step * 512 + 70_000, step * 512 + 70_512))
            sidecar.pump(cache)
        flushed_seq(sidecar, cache)
        with (
            zmq.Context[Socket]() as context,
            context.socket(zmq.DEALER) as stuck,
            Subscriber(bound.endpoint, replay_of(bound)) as subscriber,
        ):
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                stuck.setsockopt(option, value)
            stuck.connect(replay_of(bound))
            stuck.send_multipart(replay_request(0))
            stuck.poll(int(PATIENCE_S * 1000))  # and read nothing
            receive_until(
                subscriber, lambda got: any(isinstance(x, Batch) and not x.replayed for x in got)
            )
            delays: list[float] = []
            while len(delays) < 100:
                insert(cache, range(len(delays), len(delays) + 64))
                sidecar.pump(cache)
                told = receive_until(
                    subscriber,
                    lambda got: any(isinstance(x, Batch) and x.batch.events for x in got),
                )
                delays += [time.time() - x.batch.ts for x in told if isinstance(x, Batch)]
            assert (subscriber.stats.gaps, subscriber.stats.lost) == (0, 0)
            assert sorted(delays)[len(delays) // 2] < 0.1


# ------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_taken_port_is_a_link_error(key: str) -> None:
    """LinkError names the key and the endpoint, and no process is left."""
    with sockets.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LinkError, match=rf"^{key}: {taken} cannot be bound: .*in use"):
            spawn(WORKER, config(sink(**{key: taken})))
    assert serving() == set()


def test_an_endpoint_that_cannot_be_bound_names_its_sink() -> None:
    """With several sinks the message says which; an address that is not ours is such a case."""
    with pytest.raises(
        LinkError, match=r"^sinks\[1\]\.endpoint: tcp://192\.0\.2\.1:5557 cannot be bound"
    ):
        spawn(WORKER, config(sink(), sink(endpoint="tcp://192.0.2.1:5557")))
    assert serving() == set()


def test_ports_are_read_back() -> None:
    """Port 0, a wildcard host and a wildcard port become what a subscriber can connect to."""
    sinks = sink(), sink(endpoint="tcp://*:*", replay_endpoint=None)
    with spawn(WORKER, config(*sinks)) as sidecar:
        first, second = sidecar.client.sinks
        assert second.replay_endpoint is None
        ports = [
            re.fullmatch(r"tcp://(127\.0\.0\.1|0\.0\.0\.0):(\d+)", str(one))
            for one in (first.endpoint, first.replay_endpoint, second.endpoint)
        ]
        assert len({int(one[2]) for one in ports if one} - {0}) == 3


@pytest.mark.parametrize("kind", ["ipc", "ipv6"])
def test_other_transports_carry_the_stream(kind: str) -> None:
    """Unix sockets and IPv6 do for both sockets what IPv4 does (case 96)."""
    cache = make_cache()
    insert(cache, range(20))
    with short_folder() as folder:
        if kind == "ipc":
            one = sink(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay")
        else:
            one = sink(endpoint="tcp://[::1]:0", replay_endpoint="tcp://[::1]:0")
            with contextlib.closing(sockets.socket(sockets.AF_INET6)) as probe:
                try:
                    probe.bind(("::1", 0))
                except OSError:
                    pytest.skip("there is no IPv6 here")
        with spawn(WORKER, config(one)) as sidecar:
            sidecar.pump(cache)
            (bound,) = sidecar.client.sinks
            view = router_view(bound.endpoint, replay_of(bound), flushed_seq(sidecar, cache))
            assert view.resident == cache.resident_blocks()


# ---------------------------------------------------------------------------------- start and end


def test_readiness_has_a_deadline() -> None:
    """No interpreter starts in a millisecond: LinkError, at once, and no process is left."""
    start = time.monotonic()
    with pytest.raises(LinkError, match="did not connect in time"):
        spawn(WORKER, config(), ready_s=0.001)
    assert time.monotonic() - start < 5.0
    assert serving() == set()


def test_a_child_that_cannot_run_is_a_link_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An interpreter that dies before it has read its settings: LinkError, no process is left, and what
    it said is logged.
    """
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(LinkError, match=r"ended with 1 before it was ready"):
        spawn(WORKER, config(*[sink(topic="x" * 4000) for _ in range(50)]))
    assert serving() == set()
    assert "encodings" in caplog.text  # which it looks for first


def test_a_child_that_dies_early_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the child has ended there is nothing to wait for: LinkError long before the deadline."""
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    start = time.monotonic()
    with pytest.raises(LinkError, match=r"ended with 1 before it was ready"):
        spawn(WORKER, config(), ready_s=PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S / 2
    assert "encodings" in caplog.text  # which it looks for first


def test_bad_arguments_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring too small is a ValueError, a folder that cannot hold a socket an OSError."""
    with pytest.raises(ValueError, match="ring_bytes: 100 is below"):
        spawn(WORKER, config(), ring_bytes=100)
    with short_folder() as folder:
        long = folder / ("x" * 120)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with pytest.raises(OSError, match="too long"):
            spawn(WORKER, config())
        assert list(long.iterdir()) == []
    assert serving() == set()


def test_sigint_is_the_workers_business() -> None:
    """A Ctrl-C that reaches the sidecar changes nothing; SIGTERM ends it."""
    cache = make_cache()
    with spawn(WORKER, config(), respawn=None) as sidecar:
        insert(cache, range(8))
        flushed_seq(sidecar, cache)
        for _ in range(3):
            kill(sidecar.pid, signal.SIGINT)
        insert(cache, range(100, 108))
        assert flushed_seq(sidecar, cache) == 3
        kill(sidecar.pid, signal.SIGTERM)
        assert still_running([sidecar.pid], PATIENCE_S) == set()
        assert sidecar.client.flush(cache, PATIENCE_S) is None
        assert sidecar.close() == 0


def test_a_stopped_sidecar_does_not_stop_the_worker() -> None:
    """Close is bounded also when the sidecar does not run at all: it is ended."""
    cache = make_cache()
    with spawn(WORKER, config()) as sidecar:
        kill(sidecar.pid, signal.SIGSTOP)
        insert(cache, range(8))
        assert sidecar.pump(cache)
        assert sidecar.client.flush(cache, 0.05) is None
        start = time.monotonic()
        assert sidecar.close(timeout_s=0.1) == -signal.SIGKILL
        assert time.monotonic() - start < 4.0


def test_a_killed_sidecar_costs_the_worker_nothing() -> None:
    """K1: after kill -9 of one that is not started again pumping goes on, refused and counted at once;
    close works.
    """
    cache = make_cache(num_pages=512)
    with spawn(WORKER, config(), ring_bytes=4096, respawn=None) as sidecar:
        kill(sidecar.pid)
        assert still_running([sidecar.pid], PATIENCE_S) == set()
        until(lambda: sidecar.state == SidecarState.GIVEN_UP)
        results = []
        for step in range(100):
            insert(cache, range(step * 10, step * 10 + 20))
            results.append(sidecar.pump(cache))
        assert not any(results)
        assert sidecar.client.stats.refused == 100
        assert sidecar.client.flush(cache, PATIENCE_S) is None
        assert not sidecar.client.connected
        assert sidecar.close() == -signal.SIGKILL


def test_a_worker_that_leaves_is_announced() -> None:
    """After a stop, subscribers still get all that was in the ring, and then AllBlocksCleared."""
    cache = make_cache(num_pages=1000)
    with spawn(WORKER, config(sink(heartbeat_s=3600.0), linger_s=0.3)) as sidecar:
        (bound,) = sidecar.client.sinks
        with Subscriber(bound.endpoint, replay_of(bound)) as subscriber:
            insert(cache, range(4))
            flushed_seq(sidecar, cache)
            receive_until(subscriber, lambda _: subscriber.next_seq == 2)
            kill(sidecar.pid, signal.SIGSTOP)
            for step in range(1, 400):
                insert(cache, range(step * 10, step * 10 + 4))
                sidecar.pump(cache)
            sidecar.client.close()  # the door stays the attendant's to close
            kill(sidecar.pid, signal.SIGCONT)
            received = receive_until(subscriber, lambda _: subscriber.next_seq == 402)
            events = [one.batch.events for one in received if isinstance(one, Batch)]
            assert [type(one) for (one,) in events[:-1]] == [BlockStored] * 399
            assert events[-1] == [AllBlocksCleared()]
        assert sidecar.close() == 0


def test_a_killed_worker_is_announced_and_its_sidecar_ends() -> None:
    """Case 69: after kill -9 of the worker AllBlocksCleared comes within a second, with the next seq, and
    the sidecar ends after its linger.
    """
    process = subprocess.Popen(
        [sys.executable, WORKER_PROCESS, "0.3"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pid, endpoint, replay_endpoint = process.stdout.readline().split()
        with Subscriber(endpoint, replay_endpoint) as subscriber:
            received: list[Received] = receive_until(subscriber, bool)
            assert isinstance(received[0], Batch)
            assert received[0].batch.events[0] == AllBlocksCleared()
            receive_until(subscriber, lambda _: not subscriber.recovering)
            expected = subscriber.next_seq
            killed_at = time.monotonic()
            process.kill()
            (last,) = receive_until(subscriber, bool)
            assert time.monotonic() - killed_at < 3.0  # one, where nothing else runs
            assert isinstance(last, Batch)
            assert (last.seq, cleared(last.batch)) == (expected, True)
            assert still_running([int(pid)], PATIENCE_S) == set()
    finally:
        process.kill()
        process.communicate()


def test_a_sidecar_lingers_for_late_subscribers() -> None:
    """For `linger_s` after its worker is gone a subscriber that joins learns that nothing is held."""
    process = subprocess.Popen(
        [sys.executable, WORKER_PROCESS, str(PATIENCE_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pid, endpoint, replay_endpoint = process.stdout.readline().split()
        with Subscriber(endpoint, replay_endpoint) as early:
            receive_until(early, bool)
            process.kill()
            receive_until(early, said_to_be_gone)  # batches of before may come first
            view = router_view(endpoint, replay_endpoint, early.next_seq or 0)
            assert len(view) == 0
        kill(int(pid), signal.SIGTERM)
        assert still_running([int(pid)], PATIENCE_S) == set()
    finally:
        process.kill()
        process.communicate()
