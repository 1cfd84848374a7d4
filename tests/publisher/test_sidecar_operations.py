"""Whole sidecars as who runs them sees them: pages, books, signals, workers that come and go."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from core_rig import BLOCK_SIZE, StoryWorker
from ports_rig import free_endpoints
from publisher_link_rig import until, worker_running
from publisher_rig import (
    PATIENCE_S,
    insert,
    kill,
    make_cache,
    receive_until,
    short_folder,
    start_kvevents,
    still_running,
)
from publisher_sidecar_rig import (
    WORKER,
    Engine,
    Recorder,
    config,
    flushed,
    get,
    sink,
    state_of,
    work,
)

from kvevents import AllBlocksCleared, KVEventBatch, decode_batch, encode_batch
from kvevents.frames import live_frames
from publisher import Sidecar, SidecarState, Subscriber, WorkerInfo, listen, spawn
from publisher.config.keys import read_public_key, read_secret_key, write_keys
from publisher.config.sidecar_config import CurveConfig
from publisher.link.messages import Bound

pytestmark = pytest.mark.integration

CLEARED = [AllBlocksCleared()]


# --------------------------------------------------------------------------------------- books


def books(sidecar: Sidecar) -> dict[str, int]:
    """What became of all messages, once the sidecar has none left to read."""
    found: dict[str, int] = {}

    def quiet() -> bool:
        found.update(state_of(sidecar)["source"]["messages"])
        return found["offered"] == sidecar.client.stats.offered and not found["pending"]

    until(quiet)
    return found


def metrics(sidecar: Sidecar) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    code, body = get(f"{sidecar.client.http_endpoint}/metrics")
    assert code == 200
    lines = [line.rpartition(" ") for line in body.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_the_books_balance_whatever_happened(tmp_path: Path) -> None:
    """Invariant 28: offered == published + refused + pending, in order, after a full ring, after
    garbage in it, and for what came since a kill -9; each is a metric, and offered is what the worker's
    end has counted.
    """
    cache = make_cache(num_pages=512)
    with spawn(WORKER, config(tmp_path), ring_bytes=8192) as sidecar:
        work(sidecar, cache, 30)
        flushed(sidecar, cache)
        first = books(sidecar)
        assert (first["offered"], first["published"], first["refused"]) == (30, 30, 0)

        kill(sidecar.pid, signal.SIGSTOP)
        while sidecar.client.stats.refused < 3:
            work(sidecar, cache, 1)
        kill(sidecar.pid, signal.SIGCONT)
        flushed(sidecar, cache)
        full = books(sidecar)
        assert full["missed"] == sidecar.client.stats.refused
        assert full["offered"] == full["published"] + full["refused"]

        assert sidecar.client._put(b"\xc1 garbage", 0)
        work(sidecar, cache, 3)
        flushed(sidecar, cache)
        last = books(sidecar)
        assert last["unreadable"] == 1
        assert last["offered"] == last["published"] + last["refused"]
        assert last["published"] + last["skipped"] + 1 == sidecar.client.stats.written

        kill(sidecar.pid)
        work(sidecar, cache, 3)
        flushed(sidecar, cache)
        fresh = state_of(sidecar)["source"]["messages"]  # of the one that took over
        assert fresh["offered"] == fresh["published"] == 3

        told = metrics(sidecar)
        for name in ("offered", "published", "missed", "skipped", "unreadable"):
            (found,) = [
                value for key, value in told.items() if re.search(rf"messages.*{name}", key)
            ]
            assert found == fresh[name], name


def test_a_live_sidecar_answers_who_asks(tmp_path: Path) -> None:
    """Alive and ready; /state says the worker, the blocks, the ring, the sinks; /metrics the same."""
    cache = make_cache(num_pages=64)
    with spawn(WORKER, config(tmp_path)) as sidecar:
        http = sidecar.client.http_endpoint
        assert [get(f"{http}/{page}")[0] for page in ("healthz", "readyz", "nope")] == [
            *(200, 200, 404)
        ]
        with Recorder(sidecar.client.sinks[0]) as recorder:
            work(sidecar, cache, 40)
            recorder.follow(flushed(sidecar, cache)[0])
            until(lambda: state_of(sidecar)["sinks"][0]["next_seq"] == recorder.next_seq)
            state = state_of(sidecar)
            assert state["worker"]["worker_id"] == "w"
            assert state["pid"] == sidecar.pid
            assert state["ready"] and state["source"]["worker_up"] and state["source"]["in_step"]
            live = sum(map(len, cache.resident_blocks().values()))
            assert sum(state["live_blocks"].values()) == live > 0
            assert state["source"]["link_capacity"] > state["source"]["link_bytes"] == 0
            assert state["sinks"][0]["subscribers"] == 1
            assert state["sinks"][0]["events"] == state["source"]["events"] | {
                "cleared": state["source"]["events"]["cleared"] + 1  # its own at the start
            }
            assert state["journal"]["state"] == "ok"


# ------------------------------------------------------------------------------------- signals


def test_sigusr1_tells_the_state_anew(tmp_path: Path) -> None:
    """In-band, on every sink: AllBlocksCleared and the whole state with the next seqs."""
    cache = make_cache(num_pages=64)
    with spawn(WORKER, config(tmp_path, sink(), sink())) as sidecar:
        first, second = sidecar.client.sinks
        with Recorder(first) as recorder, Recorder(second) as other:
            work(sidecar, cache, 20)
            flushed(sidecar, cache)
            told = sidecar.client.stats.retellings
            kill(sidecar.pid, signal.SIGUSR1)

            def retold() -> bool:
                sidecar.pump(cache)
                return sidecar.client.stats.retellings > told

            until(retold)
            work(sidecar, cache, 5)
            for one, seq in zip((recorder, other), flushed(sidecar, cache), strict=True):
                one.follow(seq)
                assert len(one.clears) == 3  # at the start, with the first pump, and now
                assert one.index.resident == cache.resident_blocks()


def test_sigusr1_tells_what_an_engine_told(tmp_path: Path) -> None:
    """A worker that publishes batches of its own cannot tell its state anew; the sidecar can."""
    story = StoryWorker(5, foreign=True)
    worker = WorkerInfo(block_size=BLOCK_SIZE, worker_id="w")
    with (
        spawn(worker, config(tmp_path)) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        for _ in range(20):
            story.step()
            body = story.messages.pop().body
            assert sidecar.client.publish_batch(decode_batch(body).batch)
        recorder.follow_until(lambda: recorder.index.resident == story.truth)
        end = recorder.next_seq
        kill(sidecar.pid, signal.SIGUSR1)
        recorder.follow(end + 1)
        assert recorder.clears[-1] == end
        recorder.follow_until(lambda: recorder.index.resident == story.truth)


def test_sigusr1_tells_what_a_relay_knows(tmp_path: Path) -> None:
    """An engine cannot tell its state anew; its relay can."""
    pub, replay = free_endpoints(2)
    story = StoryWorker(15, foreign=True)
    with (
        Engine() as engine,
        start_kvevents(
            f"usr1-{tmp_path.name}",
            *("serve", "--relay", engine.endpoint, "--block-size", str(BLOCK_SIZE)),
            *("--endpoint", pub, "--replay-endpoint", replay, "--state-dir", str(tmp_path)),
        ) as process,
        Recorder(Bound(pub, replay)) as recorder,
    ):
        engine.await_next_subscriber()
        for _ in range(20):
            story.step()
            engine.publish(story.messages.pop().body)
        assert any(story.truth.values())
        recorder.follow_until(lambda: recorder.index.resident == story.truth)
        clears, end = len(recorder.clears), recorder.next_seq
        kill(process.pid, signal.SIGUSR1)
        recorder.follow_until(lambda: len(recorder.clears) > clears)
        assert recorder.clears[-1] == end
        recorder.follow_until(lambda: recorder.index.resident == story.truth)


def test_a_relay_says_what_it_cannot_have(tmp_path: Path) -> None:
    """That its engine is not where it was told; then how much it came too late for."""
    endpoint, pub = free_endpoints(2)
    with (
        zmq.Context() as context,
        context.socket(zmq.XPUB) as engine,
        start_kvevents(
            f"away-{tmp_path.name}",
            *("serve", "--relay", endpoint, "--block-size", str(BLOCK_SIZE), "--endpoint", pub),
            *("--state-dir", str(tmp_path)),
        ) as process,
    ):
        assert process.stderr is not None
        log = iter(process.stderr.readline, "")
        away = next(line for line in log if "WARNING" in line)
        assert f"relay.endpoint: {endpoint}: no engine is there" in away
        engine.bind(endpoint)
        assert engine.poll(int(PATIENCE_S * 1000)), "the relay connects"
        engine.recv()
        engine.send_multipart(live_frames(b"", 3, encode_batch(KVEventBatch(1.0, [], 0))))
        late = next(line for line in log if "cannot be had" in line)
        assert "3 batches of the engine cannot be had" in late


def test_sighup_reads_the_client_keys_anew(tmp_path: Path) -> None:
    """Whose key is put into the folder is let in after SIGHUP, without a restart; who has none is not."""
    keys, clients = tmp_path / "keys", tmp_path / "clients"
    server_public, server_secret = write_keys(keys, "server")
    write_keys(clients, "known")
    late_public, late_secret = write_keys(keys, "late")
    curve = CurveConfig(secret_key=str(server_secret), client_keys=str(clients))
    cache = make_cache()

    def subscribe(secret: Path) -> Subscriber:
        return Subscriber(
            *(sidecar.client.sinks[0].endpoint, sidecar.client.sinks[0].replay_endpoint),
            server_key=read_public_key("server", server_public),
            client_keys=read_secret_key("client", secret),
        )

    with spawn(WORKER, config(tmp_path / "state", curve=curve)) as sidecar:
        work(sidecar, cache, 3)
        flushed(sidecar, cache)
        with subscribe(clients / "known.key_secret") as known, subscribe(late_secret) as late:
            receive_until(known, bool)
            until(lambda: late.receive(0.02) or late.stats.refused)
            assert (late.stats.refused, late.stats.batches) == (1, 0)
        (clients / "late.key").write_text(late_public.read_text())
        kill(sidecar.pid, signal.SIGHUP)
        until(lambda: state_of(sidecar)["curve"]["keys"] == 2)
        with subscribe(late_secret) as late:
            receive_until(late, bool)
        assert sidecar.restarts == 0


# ------------------------------------------------------------------------------------- workers


TWO_SINK_WORKER = """
import signal, sys
from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
sink = SinkConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
other = SinkConfig(endpoint=sink.endpoint, replay_endpoint=sink.endpoint, coalesce_s=10.0)
config = SidecarConfig(sinks=(sink, other), linger_s=30.0, state_dir=sys.argv[1])
sidecar = spawn(WorkerInfo(block_size=4), config)
client = sidecar.client
client.publish([StoreNew(StorageMedium.GPU, BlockId(0), 1, None, BASE, bytes(16))])
addresses = [one for bound in client.sinks for one in (bound.endpoint, bound.replay_endpoint)]
print(sidecar.pid, client.http_endpoint, *addresses, flush=True)
signal.pause()
"""


def test_a_dead_worker_is_known_everywhere_within_a_second(tmp_path: Path) -> None:
    """After kill -9 of the worker: AllBlocksCleared on every sink, behind what was still held, and not
    ready any more, while the sidecar lingers.
    """
    with worker_running(TWO_SINK_WORKER, str(tmp_path)) as worker:
        assert worker.stdout is not None
        pid, http, *rest = worker.stdout.readline().split()
        assert get(f"{http}/readyz")[0] == 200
        with Recorder(Bound(*rest[:2])) as plain, Recorder(Bound(*rest[2:])) as merged:
            plain.follow(2)
            merged.follow(1)
            assert len(plain.index) == 1
            worker.kill()
            killed_at = time.monotonic()
            for one in (plain, merged):
                one.follow(3)
                assert one.events(2) == CLEARED
                assert len(one.index) == 0
            assert time.monotonic() - killed_at < 3.0  # one, where nothing else runs
            assert merged.events(1) == plain.events(1)
            code, body = get(f"{http}/readyz")
            assert (code, get(f"{http}/healthz")[0]) == (503, 200), body
        kill(int(pid), signal.SIGTERM)
        assert still_running([int(pid)], PATIENCE_S) == set()


def _is_ready(sidecar: Sidecar) -> bool:
    return sidecar.state == SidecarState.READY


@pytest.fixture
def pod() -> Iterator[Path]:
    """A folder that two containers share."""
    with short_folder() as folder:
        yield folder / "pod"


def test_a_sidecar_that_is_there_for_ever_serves_one_worker_after_the_other(
    pod: Path, tmp_path: Path
) -> None:
    """It is there before the first, waits when that is gone, and goes on with the next one's state and
    the next seq.
    """
    pub, replay = free_endpoints(2)
    settings: dict[str, Any] = {"endpoint": pub, "replay_endpoint": replay}
    file = tmp_path / "config.toml"
    file.write_text(
        f'linger_s = 0.0\nstate_dir = "{tmp_path}"\n[[sinks]]\n'
        + "\n".join(f'{key} = "{value}"' for key, value in settings.items())
    )
    pod.mkdir(mode=0o700)
    with (
        start_kvevents(
            f"forever-{tmp_path.name}",
            *("serve", "--link", str(pod / "link-dp0"), "--forever", "--config", str(file)),
        ) as process,
        Recorder(Bound(pub, replay)) as recorder,
    ):
        for run in range(2):
            cache = make_cache()
            with listen(WorkerInfo(block_size=4, worker_id="w"), pod) as sidecar:
                until(partial(_is_ready, sidecar))
                assert sidecar.pid == process.pid
                first = recorder.next_seq
                insert(cache, range(1000 * run, 1000 * run + 4 * (run + 1)))
                recorder.follow(flushed(sidecar, cache)[0])
                assert recorder.events(first) == CLEARED
                assert recorder.index.resident == cache.resident_blocks()
            recorder.follow(recorder.next_seq + 1)
            assert recorder.events(recorder.next_seq - 1) == CLEARED
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
