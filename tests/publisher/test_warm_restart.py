"""Whole sidecars that are killed, robbed, filled up and doubled: what subscribers see of it."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from core_rig import BLOCK_SIZE, StoryWorker, Truth
from ports_rig import free_endpoints
from publisher_link_rig import until, worker_running
from publisher_rig import (
    PATIENCE_S,
    kill,
    make_cache,
    start_kvevents,
    still_running,
)
from publisher_sidecar_rig import (
    WORKER,
    Engine,
    Nothing,
    Recorder,
    config,
    flushed,
    sink,
    state_of,
    work,
)

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, KVEventBatch, decode_batch
from publisher import LinkError, Respawn, Sidecar, SinkConfig, WorkerInfo, spawn
from publisher.link.messages import Bound
from publisher.stream.core import Core
from publisher.stream.state_folder import StateError

pytestmark = pytest.mark.integration

QUICK = Respawn(first_s=0.01)
CLEARED = [AllBlocksCleared()]


# ------------------------------------------------------------------------------ nothing is missed


class CacheTeller:
    """A worker with a cache of ours."""

    worker = WorkerInfo(block_size=4, worker_id="w")

    def __init__(self) -> None:
        self.cache = make_cache(num_pages=64)
        self.source: HiRadixCache | Nothing = self.cache

    def tell(self, sidecar: Sidecar) -> int:
        """One batch; the clears in it."""
        work(sidecar, self.cache, 1)
        return 0

    @property
    def truth(self) -> object:
        return self.cache.resident_blocks()


class EngineTeller:
    """A worker with an engine of its own, which tells ready batches and never anything twice."""

    worker = WorkerInfo(block_size=BLOCK_SIZE, worker_id="w")

    def __init__(self) -> None:
        self._story = StoryWorker(1, foreign=True)
        self.source: HiRadixCache | Nothing = Nothing(BLOCK_SIZE)

    def tell(self, sidecar: Sidecar) -> int:
        """One batch; the clears in it."""
        self._story.step()
        batch = decode_batch(self._story.messages.pop().body).batch
        assert sidecar.client.publish_batch(batch)
        return batch.events.count(AllBlocksCleared())

    @property
    def truth(self) -> object:
        return self._story.truth


@pytest.mark.parametrize("kind", [CacheTeller, EngineTeller], ids=["records", "batches"])
def test_a_sidecar_that_ends_under_load_is_taken_up_where_it_was(
    kind: type[CacheTeller | EngineTeller], tmp_path: Path
) -> None:
    """kill -9, SIGTERM and kill -9 again: the stream of each sink is contiguous, a seq has one payload
    whoever tells it, and nothing is cleared but what the worker clears, for nothing was missed.
    """
    teller = kind()
    sinks = sink(), sink(coalesce_s=0.02)
    with spawn(teller.worker, config(tmp_path, *sinks), respawn=QUICK) as sidecar:
        plain, merged = sidecar.client.sinks
        with Recorder(plain) as recorder, Recorder(merged) as other:
            both = recorder, other
            teller.tell(sidecar)
            for one, seq in zip(both, flushed(sidecar, teller.source), strict=True):
                one.follow(seq)
            clears = [len(one.clears) for one in both]
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
                pid = sidecar.pid
                for step in range(200):
                    if step == 100:
                        kill(pid, number)
                    told = teller.tell(sidecar)
                    clears = [count + told for count in clears]
                    for one in both:
                        one.take()
                assert still_running([pid], PATIENCE_S) == set()
                for one, seq in zip(both, flushed(sidecar, teller.source), strict=True):
                    one.follow(seq)
                    assert one.index.resident == teller.truth
            for one, kept in zip(both, state_of(sidecar)["sinks"], strict=True):
                assert kept["oldest_seq"] <= 1  # as far back as before the first kill
                one.check_told_again(kept["oldest_seq"])
            assert len(recorder.clears) == clears[0]
            assert len(other.clears) <= clears[1]
            assert recorder.next_seq > 600
            assert recorder.next_seq > 2 * other.next_seq
            assert (sidecar.restarts, sidecar.client.stats.refused) == (3, 0)
            assert sidecar.client.sinks == (plain, merged)


# --------------------------------------------------------------------------- something is missed


def remove(folder: Path) -> None:
    for path in (*folder.glob("checkpoint-*"), *folder.glob("entries-*")):
        path.unlink()


def damage(folder: Path) -> None:
    for path in (*folder.glob("checkpoint-*"), *folder.glob("entries-*")):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)


def replace_by_anothers(folder: Path) -> None:
    remove(folder)
    other = folder / "other"
    other.mkdir()
    core = Core(WORKER, bytes(16), (sink(name="sink0"),), ("sink0",), other, clock=time.time)
    core.start()
    core.close()
    for path in other.iterdir():
        if not path.name.startswith("seq-"):
            path.rename(folder / path.name)


def leave(folder: Path) -> None:
    assert not list(folder.glob("entries-*"))


@pytest.mark.parametrize(
    ("persist", "spoil"),
    [("all", remove), ("all", damage), ("all", replace_by_anothers), ("seq", leave)],
    ids=["gone", "damaged", "another's", "not kept"],
)
def test_without_its_journal_a_sidecar_clears_and_tells_anew(
    persist: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    """C2: a journal that is not there, not sound or not of this worker is not trusted: the next seq says
    AllBlocksCleared, and then the exact state follows.
    """
    cache = make_cache(num_pages=64)
    with (
        spawn(WORKER, config(tmp_path, persist=persist), respawn=QUICK) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        work(sidecar, cache, 50)
        (end,) = flushed(sidecar, cache)
        recorder.follow(end)
        kill(sidecar.pid, signal.SIGSTOP)
        spoil(tmp_path / "w-dp0")
        kill(sidecar.pid)
        work(sidecar, cache, 5)
        recorder.follow(flushed(sidecar, cache)[0])
        assert recorder.events(end) == CLEARED
        assert recorder.index.resident == cache.resident_blocks()
        assert len(recorder.index) > 0


def test_what_the_ring_could_not_hold_meanwhile_is_told_anew(tmp_path: Path) -> None:
    """With a ring too small for what came while there was no sidecar: what it held is told, then
    AllBlocksCleared and the exact state; the numbers go on without a hole.
    """
    cache = make_cache(num_pages=512)
    with (
        spawn(WORKER, config(tmp_path), respawn=QUICK, ring_bytes=8192) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        work(sidecar, cache, 20)
        (end,) = flushed(sidecar, cache)
        recorder.follow(end)
        clears = len(recorder.clears)
        kill(sidecar.pid, signal.SIGSTOP)
        while not sidecar.client.stats.refused:
            work(sidecar, cache, 1)
        kill(sidecar.pid)
        work(sidecar, cache, 5)
        recorder.follow(flushed(sidecar, cache)[0])
        assert recorder.events(end) != CLEARED
        assert len(recorder.clears) == clears + 1
        assert recorder.index.resident == cache.resident_blocks()
        recorder.check_told_again(end)


def test_what_an_engine_said_to_nobody_is_not_believed(tmp_path: Path) -> None:
    """The same for an engine, which cannot tell anything anew: AllBlocksCleared, and what came since; a
    view that lacks what was before, and nothing that is false.
    """
    story = StoryWorker(2, foreign=True)
    worker = WorkerInfo(block_size=BLOCK_SIZE, worker_id="w")

    def tell(sidecar: Sidecar) -> bool:
        story.step()
        return sidecar.client.publish_batch(decode_batch(story.messages.pop().body).batch)

    with (
        spawn(worker, config(tmp_path), respawn=QUICK, ring_bytes=8192) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        assert all(tell(sidecar) for _ in range(20))
        recorder.follow_until(lambda: recorder.index.resident == story.truth)
        kill(sidecar.pid, signal.SIGSTOP)
        while tell(sidecar):
            pass
        kill(sidecar.pid)
        source = Nothing(BLOCK_SIZE)
        recorder.follow(flushed(sidecar, source)[0])
        clears = len(recorder.clears)
        assert recorder.events(recorder.next_seq - 1) == CLEARED
        assert all(tell(sidecar) for _ in range(20))
        recorder.follow(flushed(sidecar, source)[0])
        for medium, held in recorder.index.resident.items():
            assert held <= story.truth[medium]
        assert len(recorder.clears) >= clears
        story.blocks = []
        assert sidecar.client.publish_batch(KVEventBatch(0.0, [AllBlocksCleared()], 0))
        assert all(tell(sidecar) for _ in range(20))
        recorder.follow(flushed(sidecar, source)[0])
        assert recorder.index.resident == story.truth


# ----------------------------------------------------------------------------- another worker


ONE_BLOCK_WORKER = """
import signal, sys
from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
sink = SinkConfig(endpoint=sys.argv[1], replay_endpoint=sys.argv[2])
config = SidecarConfig(sinks=(sink,), linger_s=0.5, state_dir=sys.argv[3])
sidecar = spawn(WorkerInfo(block_size=4, worker_id="w"), config)
sidecar.client.publish([StoreNew(StorageMedium.GPU, BlockId(0), 1, None, BASE, bytes(16))])
print(sidecar.pid, flush=True)
signal.pause()
"""


def test_the_next_worker_goes_on_where_the_killed_one_was(tmp_path: Path) -> None:
    """After kill -9 of the worker its sidecar says AllBlocksCleared and lingers; the next worker's, with
    the same ports and state, waits for that and goes on with the seq after it, clearing first.
    """
    pub, replay = free_endpoints(2)
    with Recorder(Bound(pub, replay)) as recorder:
        with worker_running(ONE_BLOCK_WORKER, pub, replay, str(tmp_path)) as worker:
            assert worker.stdout is not None
            first = int(worker.stdout.readline())
            recorder.follow(2)
            assert len(recorder.index) == 1
            worker.kill()
            cache = make_cache()
            with spawn(
                WORKER, config(tmp_path, sink(endpoint=pub, replay_endpoint=replay))
            ) as sidecar:
                assert still_running([first], PATIENCE_S) == set()
                work(sidecar, cache, 5)
                recorder.follow(flushed(sidecar, cache)[0])
        assert [recorder.events(seq) for seq in (0, 2, 3)] == [CLEARED] * 3
        assert recorder.index.resident == cache.resident_blocks()
        assert recorder.clears[:3] == [0, 2, 3]


def test_a_second_sidecar_with_the_same_state_is_refused(tmp_path: Path) -> None:
    """It waits a while for the first to end, and then says who that is; the first goes on."""
    cache = make_cache()
    with spawn(WORKER, config(tmp_path)) as sidecar:
        with pytest.raises(
            LinkError, match=rf"^state_dir: .*/w-dp0: in use by .* pid {sidecar.pid}"
        ):
            spawn(WORKER, config(tmp_path))
        work(sidecar, cache, 1)
        assert flushed(sidecar, cache) == (2,)


# ----------------------------------------------------------------------------- state that is lost


@pytest.mark.parametrize("manner", ["damaged", "gone"])
def test_a_lost_seq_is_a_choice(
    manner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`on_lost_state`: refuse does not start, and says the file and the reason, every time; reset says
    so in the log, and starts over at 0 with a clear.
    """
    cache = make_cache()
    with spawn(WORKER, config(tmp_path), respawn=None) as sidecar:
        work(sidecar, cache, 3)
        flushed(sidecar, cache)
        kill(sidecar.pid)
    kept = tmp_path / "w-dp0" / "seq-sink0"
    if manner == "gone":
        kept.unlink()
        reason = "it is not there"
    else:
        data = bytearray(kept.read_bytes())
        data[9] ^= 1
        kept.write_bytes(data)
        reason = "its checksum is wrong"
    for _ in range(2):
        with pytest.raises(LinkError, match=f"^on_lost_state: {kept}: {reason}"):
            spawn(WORKER, config(tmp_path, on_lost_state="refuse"))
    caplog.clear()
    with (
        spawn(WORKER, config(tmp_path)) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        recorder.follow(1)
        assert recorder.events(0) == CLEARED
        until(lambda: f"{kept}: {reason}; its sink starts over at seq 0" in caplog.text)


@pytest.mark.parametrize("with_journal", [True, False])
def test_a_seq_that_is_gone_is_missed_after_a_good_end(with_journal: bool, tmp_path: Path) -> None:
    """Also where there is no journal, any more or ever, to tell of it; a new sink's is not missed."""

    def open_core(*names: str) -> Core:
        return Core(
            *(WORKER, bytes(16), tuple(sink(name=name) for name in names), names, tmp_path),
            clock=lambda: 1.0,
            with_journal=with_journal,
            may_reset=False,
        )

    for names in (("a",), ("a", "b")):
        core = open_core(*names)
        core.start()
        core.forget()
        core.close()
    (tmp_path / "seq-a").unlink()
    for _ in range(2):
        with pytest.raises(StateError, match=r"^on_lost_state: .*/seq-a: it is not there"):
            open_core("a", "b", "c")
    open_core("b", "c").close()


def test_a_full_disk_stops_the_journal_and_nothing_else(tmp_path: Path) -> None:
    """J3: with no byte left to write, the stream goes on and the status says that a restart will clear;
    and so it does, and has a journal again.
    """
    cache = make_cache(num_pages=64)
    full = (100, resource.RLIM_INFINITY)
    with (
        spawn(WORKER, config(tmp_path), respawn=QUICK) as sidecar,
        Recorder(sidecar.client.sinks[0]) as recorder,
    ):
        work(sidecar, cache, 5)
        flushed(sidecar, cache)
        assert state_of(sidecar)["journal"]["state"] == "ok"
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, full)
        work(sidecar, cache, 50)
        (end,) = flushed(sidecar, cache)
        recorder.follow(end)
        assert recorder.index.resident == cache.resident_blocks()
        until(lambda: state_of(sidecar)["journal"]["state"] == "failing")
        assert state_of(sidecar)["journal"]["failures"] == 1
        assert not list((tmp_path / "w-dp0").glob("checkpoint-*"))
        pid = sidecar.pid
        kill(pid)
        assert still_running([pid], PATIENCE_S) == set()
        work(sidecar, cache, 5)
        recorder.follow(flushed(sidecar, cache)[0])
        assert recorder.events(end) == CLEARED
        assert recorder.index.resident == cache.resident_blocks()
        assert state_of(sidecar)["journal"] == {"state": "ok", "failures": 0} | {
            "bytes": state_of(sidecar)["journal"]["bytes"]
        }


JOURNAL_BYTES = 4000


class LoopOfCore:
    """A core on which only what its `wake_at` asks for is done."""

    def __init__(self, folder: Path, *sinks: SinkConfig) -> None:
        self.story = StoryWorker(7)
        self.now = 1000.0
        self.core = Core(
            *(WorkerInfo(block_size=BLOCK_SIZE), bytes(16), sinks),
            *(tuple(one.name for one in sinks), folder),
            clock=lambda: self.now,
        )
        assert self.core.journal is not None
        self.journal = self.core.journal
        self.journal._limit = JOURNAL_BYTES
        self.core.start()

    def turn(self) -> None:
        """One message, and 10 ms."""
        self.story.step()
        self.core.apply(self.story.messages, self.now)
        self.story.messages = []
        self.now += 0.01
        for _ in range(5):
            if self.core.wake_at(self.now) <= self.now:
                self.core.work(self.now)


@pytest.mark.parametrize("windows", [(0.0,), (0.07, 0.11, 0.13)], ids=["plain", "merged"])
def test_the_journal_stays_bounded(windows: tuple[float, ...], tmp_path: Path) -> None:
    """One generation follows the other, also where some sink always holds something to be merged."""
    loop = LoopOfCore(
        tmp_path, *(sink(name=f"{number}", coalesce_s=s) for number, s in enumerate(windows))
    )
    most = largest = 0
    for _ in range(2000):
        loop.turn()
        most = max(most, loop.journal.num_bytes)
        assert len(list(tmp_path.glob("entries-*"))) <= 3
        largest = max(largest, *(path.stat().st_size for path in tmp_path.glob("checkpoint-*")))
    assert most < 2 * max(JOURNAL_BYTES, 2 * largest)
    loop.core.close()


def test_a_journal_that_failed_is_begun_anew(tmp_path: Path) -> None:
    """J3: half a minute after the disk was full, or so, when it is not full any more."""
    loop = LoopOfCore(tmp_path, sink(name="a"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(100):
            loop.turn()
        assert "File too large" in str(loop.journal.failure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loop.now += 31.0
    loop.turn()
    assert loop.journal.failure is None
    loop.turn()
    loop.core.close()
    again = Core(
        *(WorkerInfo(block_size=BLOCK_SIZE), bytes(16), (sink(name="a"),), ("a",), tmp_path),
        clock=lambda: 0.0,
    )
    assert again.warm
    again.close()


# ----------------------------------------------------------------------------------------- relay


@contextlib.contextmanager
def relaying(tag: str, folder: Path, engine: Engine, bound: Bound) -> Iterator[Popen[str]]:
    """A sidecar of its own for an engine."""
    with start_kvevents(
        tag,
        *("serve", "--relay", engine.endpoint, "--relay-replay-endpoint", engine.replay_endpoint),
        *("--block-size", str(BLOCK_SIZE), "--state-dir", str(folder)),
        *("--endpoint", bound.endpoint, "--replay-endpoint", str(bound.replay_endpoint)),
    ) as process:
        engine.await_next_subscriber()
        yield process


def test_a_relay_is_taken_up_where_it_was(tmp_path: Path) -> None:
    """After kill -9 the next one has what the engine said meanwhile from its replay, and nothing is
    cleared. When the engine does not retain that any more, AllBlocksCleared comes first.
    """
    pub, replay = free_endpoints(2)
    bound, story = Bound(pub, replay), StoryWorker(3, foreign=True)

    with Engine() as engine, Recorder(bound) as recorder:

        def say(count: int) -> None:
            """As many changes, and on until what is held was never held before: `follow` must not be
            done with one that came earlier.
            """
            before: list[Truth] = []
            while len(before) < count or story.truth in before:
                before.append(story.truth)
                story.step()
                engine.publish(story.messages.pop().body)

        def follow() -> None:
            recorder.follow_until(lambda: recorder.index.resident == story.truth, engine.serve)

        with relaying(f"relay-{tmp_path.name}", tmp_path, engine, bound) as process:
            say(30)
            follow()
            clears = list(recorder.clears)
            process.kill()
            process.wait()
        say(10)
        with relaying(f"relay-{tmp_path.name}", tmp_path, engine, bound) as process:
            follow()
            assert recorder.clears == clears
            end = recorder.next_seq
            process.kill()
            process.wait()
        say(10)
        engine.forget()
        with relaying(f"relay-{tmp_path.name}", tmp_path, engine, bound) as process:
            story.blocks = []
            say(1)
            follow()
            assert AllBlocksCleared() in recorder.events(end)
