"""publisher.worker.spawned with real sidecars: killed at any moment; workers that end in every way."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from publisher_link_rig import Peer, Refused, until, worker_running
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    children_of,
    eventually,
    few_descriptors,
    insert,
    kill,
    make_cache,
    open_fds,
    router_view,
    short_folder,
    start_kvevents,
    still_running,
)

from hicache import HiRadixCache
from publisher import (
    LinkError,
    Respawn,
    Sidecar,
    SidecarConfig,
    SidecarState,
    SinkConfig,
    WorkerInfo,
    listen,
    spawn,
)
from publisher.link.rendezvous import private

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4)
QUICK = Respawn(first_s=0.01)
SINK = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, heartbeat_s=0.1)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files; neither processes nor descriptors nor links are left."""
    before = open_fds()
    with short_folder() as found:
        monkeypatch.setattr("tempfile.tempdir", str(found))
        yield found
        assert [one for one in children_of(os.getpid()).values() if "serve --link" in one] == []
        assert not [one for one in threading.enumerate() if "attendant" in one.name]
        assert open_fds() == before
        assert list(found.glob("kvevents-link-*")) == []


def start(**settings: object) -> Sidecar:
    config = {"sinks": (SINK,), "linger_s": 0.0, "http_endpoint": None}
    return spawn(WORKER, SidecarConfig(**config | settings), respawn=QUICK)  # type: ignore[arg-type]


def agree(sidecar: Sidecar, cache: HiRadixCache) -> None:
    """Once all is told, a router that joins now believes what the cache holds."""
    answer = sidecar.client.flush(cache, PATIENCE_S)
    assert answer is not None
    bound = sidecar.client.sinks[0]
    view = router_view(bound.endpoint, bound.replay_endpoint, answer.next_seqs[0])
    assert view.resident == cache.resident_blocks()


def back(sidecar: Sidecar, killed: int) -> None:
    """Until the sidecar that was killed has a successor that is ready."""
    until(lambda: sidecar.pid != killed and sidecar.state == SidecarState.READY)


@pytest.mark.parametrize("persist", ["all", "none"])
def test_a_killed_sidecar_is_followed_by_one_that_tells_the_same(persist: str) -> None:
    """Killed between, and amid, what the worker tells, which goes on: nothing is refused, the view is
    the cache, on the same ports. One that kept its journal needs no re-telling; any other asks.
    """
    cache = make_cache(num_pages=2000)
    with start(persist=persist) as sidecar:
        bound = sidecar.client.sinks
        agree(sidecar, cache)
        for round_ in range(3):
            for step in range(100):
                first = 4000 * round_ + 4 * step
                insert(cache, range(first, first + 8))
                assert sidecar.pump(cache)
                if step == 20 + 30 * round_:
                    kill(pid := sidecar.pid)
            back(sidecar, pid)
            agree(sidecar, cache)
            assert sidecar.client.sinks == bound
        stats = sidecar.client.stats
        assert stats.refused == 0
        assert sidecar.restarts == 3
        assert stats.retellings == 0 if persist == "all" else stats.retellings >= 3


@pytest.mark.parametrize("persist", ["all", "none"])
def test_a_sidecar_killed_amid_a_retelling_is_followed_by_a_whole_one(persist: str) -> None:
    """The beginning went to the one that was killed; the next asks, and is told from the beginning, or
    goes on where that one was. Again and again.
    """
    cache = make_cache(num_pages=3000)
    config = SidecarConfig(sinks=(SINK,), linger_s=0.0, http_endpoint=None, persist=persist)  # type: ignore[arg-type]
    with spawn(WORKER, config, respawn=QUICK, ring_bytes=1 << 15) as sidecar:
        for first in range(0, 11_000, 1000):
            insert(cache, range(first, first + 1000))
        for _ in range(2):
            sidecar.client._answered -= 1  # as if the sidecar had asked
            until(lambda: sidecar.pump(cache) and cache.retelling)
            kill(pid := sidecar.pid)
            assert cache.retelling
            sidecar.pump(cache)
            back(sidecar, pid)
        agree(sidecar, cache)
        assert len(cache.resident_blocks()) > 0


def test_resyncs_that_follow_each_other_are_all_met() -> None:
    """K2: asked for again while one is told, it is told from the beginning; the last one is whole."""
    cache = make_cache(num_pages=4000)
    with start() as sidecar:
        for first in range(0, 12_000, 1000):
            insert(cache, range(first, first + 1000))
        for step in range(60):
            if step % 3 == 0:
                kill(sidecar.pid, signal.SIGUSR1)
            insert(cache, range(50_000 + 4 * step, 50_000 + 4 * step + 8))
            sidecar.pump(cache)
        agree(sidecar, cache)


def test_another_cache_takes_the_place_of_the_one_before() -> None:
    """As when an engine makes its cache anew: the router's view is the new one's, empty or not, there and
    back, and where the change comes amid a re-telling of either, or while the sidecar is away. Their
    records' ids are the same.
    """
    full, other, empty = (make_cache(num_pages=2000) for _ in range(3))
    for first in range(0, 4000, 400):
        insert(full, range(first, first + 400))
    insert(other, range(50_000, 50_040))
    with start() as sidecar:
        for cache in (full, other, full, empty, other):
            agree(sidecar, cache)
        for amid in (full, other):
            agree(sidecar, empty)
            until(lambda: sidecar.pump(full) and full.retelling)
            insert(amid, range(60_000, 60_020))
            sidecar.pump(other)
            kill(sidecar.pid, signal.SIGUSR1)
            sidecar.pump(full)
            agree(sidecar, amid)
        kill(pid := sidecar.pid)
        sidecar.pump(empty)
        back(sidecar, pid)
        agree(sidecar, empty)
        assert sidecar.client.stats.refused == 0


@pytest.mark.parametrize("persist", ["all", "none"])
def test_a_sidecar_from_elsewhere_comes_and_goes(folder: Path, persist: str) -> None:
    """One that the worker did not start, at its link: stopped in order, killed, and started again, it
    tells what the cache holds each time.
    """
    cache = make_cache(num_pages=600)
    config = SidecarConfig(
        sinks=(SINK,),
        linger_s=0.0,
        http_endpoint=None,
        persist=persist,  # type: ignore[arg-type]
        state_dir=str(folder / "state"),
    )
    settings = folder / "config.json"
    settings.write_bytes(msgspec.json.encode(config))
    with listen(WORKER, folder / "pod") as sidecar, contextlib.ExitStack() as stack:
        for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL, None)):
            command = ("serve", "--link", str(sidecar.link), "--config", str(settings))
            process = stack.enter_context(start_kvevents(f"elsewhere-{os.getpid()}", *command))
            until(lambda: sidecar.state == SidecarState.READY)
            assert sidecar.pid == process.pid
            for step in range(30):
                first = 1000 * number + 4 * step
                insert(cache, range(first, first + 8))
                assert sidecar.pump(cache)
            agree(sidecar, cache)
            if ending is not None:
                kill(process.pid, ending)
                until(lambda: sidecar.state == SidecarState.AWAITED)
                insert(cache, range(90_000 + 100 * number, 90_008 + 100 * number))
                assert sidecar.pump(cache)
        sidecar.close()
        assert still_running([process.pid], PATIENCE_S) == set()


def test_the_engine_is_never_held_up(caplog: pytest.LogCaptureFixture) -> None:
    """K1 while its sidecar is killed and started, and the log handlers are slow: each call returns, and
    none of what they do is done on this thread.
    """
    cache = make_cache(num_pages=4000)
    here = os.getpid(), threading.get_ident()
    with start() as sidecar:
        kill(pid := sidecar.pid)
        step = 0
        while sidecar.pid == pid or sidecar.state != SidecarState.READY:
            insert(cache, range(4 * step % 12_000, 4 * step % 12_000 + 8))
            sidecar.pump(cache)
            step += 1
        assert step > 10
        agree(sidecar, cache)
    assert caplog.records
    assert all((one.process, one.thread) != here for one in caplog.records)


def test_a_stranger_is_not_let_in() -> None:
    """A child's link is for the child."""
    with (
        start() as sidecar,
        pytest.raises(Refused, match=f"^this link is for pid {sidecar.pid} alone$"),
    ):
        Peer(sidecar.link)


def test_the_sidecars_log_is_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    """What it says arrives on the logger `kvevents.sidecar`, with the level it has there."""
    with caplog.at_level(logging.INFO), start():
        pass
    said = [one for one in caplog.records if "publishes on" in one.getMessage()]
    assert [(one.name, one.levelno) for one in said] == [("kvevents.sidecar", logging.INFO)]


def test_close_has_a_deadline_with_data_pending() -> None:
    """A sidecar that is stopped while the ring is full of news is ended in time."""
    cache = make_cache()
    with start() as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        for step in range(100):
            insert(cache, range(4 * step, 4 * step + 8))
            sidecar.pump(cache)
        began = time.monotonic()
        assert sidecar.close(timeout_s=0.1) == -signal.SIGKILL
        assert time.monotonic() - began < 3.0


def test_without_descriptors_nothing_is_left_open() -> None:
    """However few there are, until there are enough: an engine tries for ever."""
    before = open_fds()
    for spare in range(100):
        with few_descriptors(spare):
            try:
                sidecar = start()
            except (OSError, LinkError):
                sidecar = None
        if sidecar is not None:
            sidecar.close()
            break
        assert open_fds() == before, f"with {spare} descriptors"
    else:
        pytest.fail("there were never enough")
    assert spare > 3


def test_without_threads_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a link, or its ring, stay."""
    before = open_fds()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            start()
    assert open_fds() == before


# ------------------------------------------------------------------------------- workers that end

ENDING_WORKER = """
import os, signal, sys
from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
how, linger_s = sys.argv[1], float(sys.argv[2])
sink = SinkConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
config = SidecarConfig(sinks=(sink,), linger_s=linger_s, http_endpoint=None)
sidecar = spawn(WorkerInfo(block_size=1), config)
if how == "stalled":
    os.kill(sidecar.pid, signal.SIGSTOP)
for number in range(2000):
    record = StoreNew(StorageMedium.GPU, BlockId(number), 1, None, BASE, number.to_bytes(4, "little"))
    assert sidecar.client.publish([record])
print(sidecar.pid, sidecar.link, flush=True)
sys.stdin.readline()
if how == "killed":
    os.kill(sidecar.pid, signal.SIGKILL)
if how == "exception":
    raise RuntimeError("of the engine")
if how == "exit":
    sys.exit(3)
if how == "wait":
    signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "linger_s", "code"),
    [
        ("end", 0.2, 0),
        ("exception", 0.2, 1),
        ("exit", 30.0, 3),
        ("stalled", 0.2, 0),
        ("killed", 0.2, 0),
        ("SIGTERM", 0.2, -signal.SIGTERM),
        ("SIGKILL", 0.2, -signal.SIGKILL),
    ],
)
def test_a_worker_ends_within_two_seconds(
    folder: Path, how: str, linger_s: float, code: int
) -> None:
    """Case 79: whatever way it ends, with data pending, a sidecar that lingers, is stalled or was killed
    just before; the sidecar ends too, and what is left of its link goes at the latest with the next one
    made.
    """
    way = "wait" if how.startswith("SIG") else how
    with worker_running(ENDING_WORKER, way, str(linger_s)) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        sidecar, link = worker.stdout.readline().split()
        assert Path(link).parent.parent == folder
        began = time.monotonic()
        if how.startswith("SIG"):
            kill(worker.pid, getattr(signal, how))
        else:
            worker.stdin.write("\n")
            worker.stdin.flush()
        assert worker.wait(PATIENCE_S) == code
        assert time.monotonic() - began < 4.0  # two, where nothing else runs
        assert still_running([int(sidecar)], PATIENCE_S) == set()
    if not how.startswith("SIG"):
        assert not Path(link).parent.exists()
    private().close()
    assert not Path(link).parent.exists()


def test_a_worker_killed_while_its_sidecar_starts_takes_it_along(folder: Path) -> None:
    """The child that connects to nobody ends by itself."""
    with worker_running(ENDING_WORKER, "wait", "0") as worker:
        child = eventually(lambda: next(iter(children_of(worker.pid)), None))
        kill(worker.pid)
        assert still_running([child], PATIENCE_S) == set()
    private().close()
