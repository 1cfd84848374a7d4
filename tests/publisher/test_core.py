"""publisher.stream.core: C1 and C2, with kills, torn files, lost messages, changed sinks in between."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from core_rig import BLOCK_SIZE, StoryWorker
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvevents import AllBlocksCleared, BlockIndex, BlockRemoved, KVEventBatch, StorageMedium
from kvevents.codec import decode_batch, encode_batch
from kvevents.index import Oddities
from kvevents.namespace import BASE
from kvevents.records import BlockId, Clear, Remove, StoreNew
from kvevents.tokens import pack_tokens
from publisher.config.sidecar_config import SinkConfig, WorkerInfo
from publisher.link.messages import BATCH, FRESH, LOST
from publisher.stream.core import Core, Numbered
from publisher.stream.input import Input
from publisher.stream.journal import Journal
from publisher.stream.output import Output

PLAIN = SinkConfig(name="plain", buffer_steps=8)
MERGED = SinkConfig(
    name="merged",
    dialect="vllm",
    buffer_steps=5,
    coalesce_s=0.01,
    endpoint="tcp://127.0.0.1:5559",
)
REBASED = SinkConfig(
    name="rebased", dialect="vllm-router", buffer_steps=6, endpoint="tcp://127.0.0.1:5561"
)
msgspec.structs.force_setattr(REBASED, "rebase_after", 25)  # below what the edge allows
STORE = SinkConfig(
    name="store",
    dialect="mooncake-store",
    namespaces=(),  # an adapter's objects are named by more than its blocks
    buffer_steps=7,
    endpoint="tcp://127.0.0.1:5565",
)
LATER = SinkConfig(name="later", dialect="aibrix", buffer_steps=3, endpoint="tcp://127.0.0.1:5563")


class Follower:
    """A router on one sink: its view, and every payload it has seen by numbering and seq."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self.expected = 0
        self._seen: dict[int, bytes] = {}
        self.clears = 0

    def live(self, seq: int, payload: bytes, output: Output) -> None:
        if seq == 0 and self.expected > 0:  # a rebase
            self.expected, self._seen = 0, {}
        assert seq >= self.expected, f"seq {seq} after {self.expected - 1}"
        if seq > self.expected:
            self.catch_up(output, upto=seq)
        self._take(seq, payload)

    def catch_up(self, output: Output, upto: int | None = None) -> None:
        """Ask for what is missing, as a router does that saw a gap."""
        for seq, payload in output.replay(self.expected):
            if upto is None or seq < upto:
                assert seq == self.expected, "a replay is contiguous from its start"
                self._take(seq, payload)

    def check_retained(self, output: Output) -> None:
        """What is replayed from the log is what was sent."""
        for seq, payload in output.replay(output.log.oldest_seq):
            assert self._seen.get(seq, payload) == payload, f"seq {seq} is another than it was"

    def _take(self, seq: int, payload: bytes) -> None:
        assert seq == self.expected
        self._seen[seq] = payload
        self.expected = seq + 1
        events = decode_batch(payload).batch.events
        self.clears += sum(isinstance(event, AllBlocksCleared) for event in events)
        self.index.apply(events)


class CoreMachine(RuleBasedStateMachine):
    """Inputs, kills at any moment, restarts over the same folder; every router's view ends as the truth,
    and no seq is skipped, repeated or different.
    """

    foreign = False

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="core-"))
        self.worker = self.new_worker(seed)
        self.link_id = b"a" * 16
        self.sinks: tuple[SinkConfig, ...] = (PLAIN, MERGED, REBASED, STORE)
        self.followers: dict[str, Follower] = {}
        self.now = 1000.0
        self.damaged = False
        self.core: Core | None = None
        self.open()

    def new_worker(self, seed: int) -> StoryWorker:
        return StoryWorker(seed, foreign=self.foreign, packed=True, grouped=self.foreign)

    def open(self) -> None:
        names = tuple(sink.name for sink in self.sinks)
        clock = lambda: self.now  # noqa: E731
        info = WorkerInfo(block_size=BLOCK_SIZE, model="m", worker_id="w")
        self.core = Core(info, self.link_id, self.sinks, names, self.folder, clock=clock)
        if self.core.journal is not None:
            self.core.journal._limit = 2000
        self.send(self.core.start())
        for output in self.core.outputs:
            follower = self.followers.setdefault(output.name, Follower())
            if output.name not in {sink.name for sink in self.sinks}:
                del follower
        if not self.foreign:
            self.worker.wants_retell = not self.core.replica.in_step or (
                not self.core.warm and self.worker.number > 0
            )
        else:
            self.worker.wants_retell = False

    def send(self, published: list[Numbered]) -> None:
        assert self.core is not None
        for one in published:
            output = self.core.outputs[one.sink]
            follower = self.followers.setdefault(output.name, Follower())
            follower.live(one.frame.seq, one.frame.payload, output)

    def take(self, *, sent: bool = True) -> None:
        """What the worker offered is read; after a kill, what was not released is read again."""
        assert self.core is not None
        messages = [
            given for given in self.worker.messages if given.number >= self.core.replica.expected
        ]
        read = messages[-1].number + 1 if messages else self.core.replica.expected
        if self.worker.number > read:  # as the link's source says it
            messages.append(Input(self.worker.number, LOST, b"the ring was full"))
        published = self.core.apply(messages, self.now)
        if sent:
            self.worker.messages = []
            self.send(published)
        if self.core.replica.counts.resyncs and not self.core.replica.in_step:
            self.worker.wants_retell = True

    @rule(steps=st.integers(1, 6))
    def work_goes_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.worker.wants_retell and not self.foreign:
                self.worker.retell()
            self.worker.step()
            self.take()

    @rule()
    def the_ring_is_full_for_a_while(self) -> None:
        self.worker.step(refused=True)
        self.worker.step()
        self.take()

    @rule(parts=st.integers(1, 8))
    def the_loop_turns(self, parts: int) -> None:
        assert self.core is not None
        for _ in range(parts):
            self.now += 0.02
            self.send(self.core.work(self.now))

    @rule(sink=st.integers(0, 10))
    def a_heartbeat(self, sink: int) -> None:
        assert self.core is not None
        self.send(self.core.own(sink % len(self.core.outputs), []))

    @rule(unsent=st.booleans(), torn=st.integers(0, 40))
    def killed(self, unsent: bool, torn: int) -> None:
        """kill -9: perhaps between keeping an input and sending what it says; the last entry torn."""
        assert self.core is not None
        for output in self.core.outputs:
            self.followers[output.name].catch_up(output)
        clears = {name: follower.clears for name, follower in self.followers.items()}
        in_step = self.core.replica.in_step and not self.worker.wants_retell
        rebasing = any(output.snapshotting or output.rebase_due for output in self.core.outputs)
        had_journal = any(self.folder.glob("checkpoint-????????"))
        if unsent:
            self.worker.step()
            self.take(sent=False)
        self.core.close()
        if torn:
            newest = max(self.folder.glob("entries-*"))
            with newest.open("ab") as file:
                file.write(self.random.randbytes(torn))
        self.open()
        assert self.core.warm or not had_journal
        self.take()
        if in_step and not rebasing and not unsent:
            for output in self.core.outputs:
                self.followers[output.name].catch_up(output)
            assert clears == {name: f.clears for name, f in self.followers.items()}, "no clear"

    @rule(parts=st.integers(0, 4), share=st.floats(0, 1))
    def killed_while_telling(self, parts: int, share: float) -> None:
        """kill -9 in the middle of telling the state anew, or of a checkpoint."""
        assert self.core is not None
        self.core.outputs[int(share * (len(self.core.outputs) - 1))].begin_snapshot(
            self.core.replica.freeze()
        )
        self.worker.step()
        self.take()
        for _ in range(parts):
            self.send(self.core.work(self.now))
        self.killed(False, 0)

    @rule()
    def the_journal_is_damaged_and_it_is_killed(self) -> None:
        assert self.core is not None
        self.core.close()
        files = sorted(path for path in self.folder.glob("*-*") if path.name[:4] != "seq-")
        for path in self.random.sample(files, min(1, len(files))):
            data = bytearray(path.read_bytes())
            if data:
                data[self.random.randrange(len(data))] ^= 0xFF
            path.write_bytes(data)
        self.open()
        self.take()

    @rule()
    def the_worker_is_another(self) -> None:
        assert self.core is not None
        self.send(self.core.end())
        self.core.close()
        self.worker = self.new_worker(self.random.randrange(2**32))
        self.link_id = self.random.randbytes(16)
        self.open()

    @rule(order=st.permutations((PLAIN, MERGED, REBASED, LATER, STORE)), count=st.integers(1, 5))
    def the_sinks_are_others(self, order: list[SinkConfig], count: int) -> None:
        assert self.core is not None
        self.core.close()
        self.sinks = tuple(order[:count])
        self.open()

    @rule()
    def the_state_is_asked_for_anew(self) -> None:
        assert self.core is not None
        self.core.snapshot()

    @rule()
    def routers_are_right(self) -> None:
        """Once all is read and told, every view is the truth."""
        if self.worker.wants_retell and not self.foreign:
            self.worker.retell()
        self.take()
        core = self.core
        assert core is not None
        for _ in range(1000):
            if not core.held and not any(output.rebase_due for output in core.outputs):
                break
            self.now += 0.02
            self.send(core.work(self.now))
        assert not core.held
        for output, sink in zip(core.outputs, self.sinks, strict=True):
            follower = self.followers[output.name]
            follower.catch_up(output)
            follower.check_retained(output)
            truth = self.worker.told(sink.spelling)
            if sink is not STORE:  # which stores again on one medium what has left another
                assert follower.index.oddities == Oddities(), "S of what is there, R of what is not"
            if not self.foreign:
                assert follower.index.resident == truth
            else:  # what was lost cannot be had; nothing that is false may be left
                assert all(
                    follower.index.resident[medium] <= held for medium, held in truth.items()
                )
        late = BlockIndex()
        for _, payload in core.outputs[0].replay(0):
            late.apply(decode_batch(payload).batch.events)
        assert late.resident == self.followers[core.outputs[0].name].index.resident

    def teardown(self) -> None:
        if getattr(self, "core", None) is not None:
            assert self.core is not None
            self.routers_are_right()
            self.core.close()
            shutil.rmtree(self.folder)


class ForeignCoreMachine(CoreMachine):
    """The same for an engine's own batches, which cannot be told anew."""

    foreign = True


def test_what_is_not_as_it_was_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a journal is not taken up: the worker's keys that differ, or that it is another run's."""
    before = WorkerInfo(block_size=BLOCK_SIZE, model="m", worker_id="w")
    after = msgspec.structs.replace(before, model="n", dp_rank=1)
    for number, (info, run) in enumerate(((before, b"a"), (after, b"a"), (after, b"b"))):
        caplog.clear()
        core = Core(info, run * 16, (PLAIN,), (PLAIN.name,), tmp_path, clock=lambda: 1.0)
        core.start()
        core.apply([Input(0, BATCH, encode_batch(KVEventBatch(1.0, [], 0)))], 0.0)
        core.close()
        said = {one.getMessage().partition("taken up: ")[2] for one in caplog.records}
        assert (
            said
            == (
                set(),
                {"the worker is another: dp_rank was 0, is 1, model was m, is n"},
                {"it is of another run of the worker, or of an engine elsewhere"},
            )[number]
        )


WORKER = WorkerInfo(block_size=BLOCK_SIZE, model="m", worker_id="w")


def opened(folder: Path, *sinks: SinkConfig) -> Core:
    """A core over `folder`, as a process that begins has it."""
    names = tuple(sink.name for sink in sinks)
    return Core(WORKER, b"a" * 16, sinks, names, folder, clock=lambda: 1.0)


def test_what_may_be_sent_is_in_the_files_already(tmp_path: Path) -> None:
    """C1: a kill writes nothing more, so whatever came out of the core is found by the next process."""
    worker, folder = StoryWorker(1), tmp_path / "state"
    folder.mkdir()
    core = opened(folder, PLAIN, MERGED)

    def killed() -> None:
        left = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copytree(folder, left, dirs_exist_ok=True)
        after = opened(left, PLAIN, MERGED)
        assert after.warm
        for found, output in zip(after.outputs, core.outputs, strict=True):
            assert found.next_seq == output.next_seq
            kept = list(found.replay(found.log.oldest_seq))
            assert kept == list(output.replay(found.log.oldest_seq))
        after.close()

    core.start()
    killed()
    for now in range(4):
        worker.step()
        core.apply(worker.messages[-1:], float(now))
        core.work(now + 0.5)  # what is to be merged
        killed()
        core.own(1, [])
        killed()
    core.end()
    killed()
    core.close()


def test_a_generation_of_other_sinks_is_of_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: entries name sinks by their place, so a journal from before they were moved is not continued.
    The process that moved them is killed before its own checkpoint is whole.
    """
    worker, other = StoryWorker(2), msgspec.structs.replace(PLAIN, name="other")
    sent: dict[str, dict[int, bytes]] = {"plain": {}, "other": {}}

    def send(core: Core, published: list[Numbered]) -> None:
        for one in published:
            sent[core.outputs[one.sink].name][one.frame.seq] = one.frame.payload

    for sinks in ((PLAIN, other), (other, PLAIN)):
        core = opened(tmp_path, *sinks)
        send(core, core.start())
        send(core, core.own(0, []))
        worker.step()
        send(core, core.apply(worker.messages[-1:], 0.0))
        send(core, core.own(1, []))
        core.close()
        monkeypatch.setattr("publisher.stream.core._CHECKPOINT_BYTES", 1)
    core = opened(tmp_path, other, PLAIN)
    for output in core.outputs:
        assert output.next_seq == max(sent[output.name]) + 1
        for seq, payload in output.replay(output.log.oldest_seq):
            assert payload == sent[output.name][seq], "another batch than was sent"
    core.close()


def test_a_state_that_is_half_told_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: the journal wants another generation at every turn while the state is told anew, in many
    batches. Whatever generations are left, a later process and its late routers have the whole state.
    """
    monkeypatch.setattr("publisher.stream.output.SNAPSHOT_BLOCKS", 2)
    monkeypatch.setattr(Journal, "_due_bytes", 1)
    worker, sink = StoryWorker(3), msgspec.structs.replace(PLAIN, buffer_steps=1000)
    core = opened(tmp_path, sink)
    core.start()
    for _ in range(60):
        worker.step()
    core.apply(worker.messages, 0.0)
    core.snapshot()
    turns = 0
    while core.held:
        core.work(0.0)
        turns += 1
    assert turns > 5, "many batches"
    core.close()
    core = opened(tmp_path, sink)
    assert core.warm
    late = BlockIndex()
    for _, payload in core.outputs[0].replay(0):
        late.apply(decode_batch(payload).batch.events)
    assert late.resident == worker.truth
    core.close()


def test_what_a_store_was_told_of_is_removed_by_a_later_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: the spelling of a store's objects needs what is held, also when only a checkpoint says it."""
    block = StoreNew(StorageMedium.DISK, BlockId(0), 1, None, BASE, pack_tokens([1] * BLOCK_SIZE))
    gone = Remove(StorageMedium.DISK, [(BlockId(0), 1)])
    core = opened(tmp_path, STORE)
    core.start()
    core.apply([Input(0, FRESH, msgspec.msgpack.encode((1.0, [Clear(), block])))], 0.0)
    monkeypatch.setattr(Journal, "_due_bytes", 1)
    for _ in range(4):
        core.own(0, [])
        core.work(0.0)
    core.close()
    core = opened(tmp_path, STORE)
    assert core.warm
    told = core.apply([Input(1, 0, msgspec.msgpack.encode((2.0, [gone])))], 0.0)
    core.close()
    events = [event for one in told for event in decode_batch(one.frame.payload).batch.events]
    assert [type(event) for event in events] == [BlockRemoved]


def test_a_kill_before_the_first_seq_was_stored_is_no_lost_state(tmp_path: Path) -> None:
    """A process killed at its very first start leaves zeros; the next begins as it would have."""
    (tmp_path / "seq-plain").write_bytes(bytes(16))
    core = Core(
        *(WORKER, b"a" * 16, (PLAIN,), ("plain",), tmp_path),
        clock=lambda: 1.0,
        may_reset=False,
    )
    assert [one.frame.seq for one in core.start()] == [0]
    core.close()


@pytest.mark.parametrize(("padding", "first"), [(None, 0), (0, 95), (3, 95), (94, 95), (95, 0)])
def test_a_sink_may_bound_the_empty_batches_of_a_replay(padding: int | None, first: int) -> None:
    """`replay_padding`: of 100 seqs 4 are kept and one is needed for the snapshot; a replay from 0 that
    would need more empty ones in between begins as late as it can.
    """
    sink = SinkConfig(name="s", buffer_steps=4, replay_padding=padding)
    core = Core(WORKER, b"a" * 16, (sink,), ("s",), None, clock=lambda: 1.0)
    for _ in range(100):
        core.own(0, [])
    assert [seq for seq, _ in core.outputs[0].replay(0)] == [*range(first, 100)]
    core.close()


def as_many(examples: int) -> int:
    """So many under the default profile, in proportion under another."""
    return examples * settings().max_examples // 100


TestCoreModel = CoreMachine.TestCase
TestCoreModel.settings = settings(max_examples=as_many(60), stateful_step_count=40)
TestForeignCoreModel = ForeignCoreMachine.TestCase
TestForeignCoreModel.settings = settings(max_examples=as_many(40), stateful_step_count=40)
