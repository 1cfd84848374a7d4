"""Every preset at once, from one worker: each sink's consumers know what its dialect tells, exactly."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from core_rig import BLOCK_SIZE, StoryWorker
from publisher_link_rig import until
from publisher_rig import LOOPBACK, PATIENCE_S, Socket, kill, router_view, still_running
from publisher_sidecar_rig import Nothing, Recorder, config, flushed, sink, state_of

from kvevents import AllBlocksCleared, BlockIndex, StorageMedium, decode_batch
from kvevents.dialect import DIALECTS, PRESETS, Dialect
from kvevents.index import Oddities
from publisher import Respawn, Sidecar, SinkConfig, WorkerInfo, spawn
from publisher.link.messages import Bound

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=BLOCK_SIZE, worker_id="w", model="org/m", dp_rank=2)
Held = dict[StorageMedium, set[int]]


class Teller:
    """A worker whose blocks are on all media and in all namespaces."""

    def __init__(self, seed: int) -> None:
        self.story = StoryWorker(seed, foreign=True)
        self.source = Nothing(BLOCK_SIZE)

    def tell(self, sidecar: Sidecar, steps: int) -> None:
        for _ in range(steps):
            self.story.step()
            batch = decode_batch(self.story.messages.pop().body).batch
            assert sidecar.client.publish_batch(batch)


@pytest.fixture(autouse=True)
def _pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")


def objects(recorder: Recorder) -> Held:
    """What a reader of a store's objects knows, by their block hashes."""
    held: Held = {medium: set() for medium in StorageMedium}
    media = {text: medium for medium, text in PRESETS["mooncake-store"].dialect.media}
    for payload in recorder.payloads:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == WORKER.dp_rank
        for event in events:
            if event["event_type"] == "cleared":
                held = {medium: set() for medium in StorageMedium}
                continue
            name = int.from_bytes(bytes.fromhex(event["object_key"]), "big", signed=True)
            if event["event_type"] == "stored":
                held[media[event["medium"]]].add(name)
            else:
                held[media[event["medium"]]].remove(name)
    return held


def sinks_of(names: tuple[str, ...], **settings: Any) -> tuple[SinkConfig, ...]:
    """One of each."""
    return tuple(sink(dialect=name, name=name, **settings) for name in names)


READABLE = tuple(name for name in DIALECTS if name != "mooncake-store")


@pytest.mark.parametrize("seed", range(3))
def test_all_presets_at_once_through_kills(seed: int, tmp_path: Path) -> None:
    """After load, kill -9 under load and SIGTERM, each view is what its dialect tells of the worker, and
    no block was told twice or removed unheard of.
    """
    teller = Teller(seed)
    sinks = sinks_of(READABLE)
    settings = config(tmp_path, *sinks)
    with (
        spawn(WORKER, settings, respawn=Respawn(first_s=0.01)) as sidecar,
        contextlib.ExitStack() as stack,
    ):
        bounds = sidecar.client.sinks
        recorders = [stack.enter_context(Recorder(bound)) for bound in bounds]
        for number in (0, signal.SIGKILL, signal.SIGTERM):
            pid = sidecar.pid
            teller.tell(sidecar, 60)
            if number:
                kill(pid, number)
            teller.tell(sidecar, 60)
            if number:
                assert still_running([pid], PATIENCE_S) == set()
            seqs = flushed(sidecar, teller.source)
            for recorder, seq, one in zip(recorders, seqs, sinks, strict=True):
                recorder.follow(seq)
                assert recorder.index.resident == teller.story.told(one.spelling), one.dialect
                assert recorder.index.oddities == Oddities(), one.dialect
        teller.tell(sidecar, 60)
        flushed(sidecar, teller.source)
        state = {one["name"]: one for one in state_of(sidecar)["sinks"]}
        assert state["sglang"]["dropped"]["filtered"] == 0
        assert state["aibrix"]["dropped"]["filtered"] > 0
        assert {one["dialect"] for one in state.values()} == set(READABLE)


def test_who_joins_late_believes_the_same(tmp_path: Path) -> None:
    """From a log that has rolled: the snapshot is spelled as the frames are, in every dialect."""
    teller = Teller(4)
    sinks = sinks_of(READABLE, buffer_steps=20)
    with spawn(WORKER, config(tmp_path, *sinks)) as sidecar:
        teller.tell(sidecar, 150)
        seqs = flushed(sidecar, teller.source)
        for bound, seq, one in zip(sidecar.client.sinks, seqs, sinks, strict=True):
            late = router_view(bound.endpoint, bound.replay_endpoint, seq)
            assert late.resident == teller.story.told(one.spelling), one.dialect
            assert late.oddities == Oddities(), one.dialect


def test_objects_of_a_store(tmp_path: Path) -> None:
    """mooncake-store: the objects on disk and in the store, and no others, by the name that the key
    template gives them; after a restart that knows nothing, a seq is missing before all is cleared, for
    that is what makes some readers forget.
    """
    teller = Teller(5)
    told = sink(dialect="mooncake-store", object_key="{block_hash}", name="store")
    dialect = Dialect(
        media=PRESETS["mooncake-store"].dialect.media, namespaces=told.spelling.namespaces
    )
    settings = config(tmp_path, told, persist="seq")
    with spawn(WORKER, settings, respawn=Respawn(first_s=0.01)) as sidecar:
        with Recorder(sidecar.client.sinks[0]) as recorder:
            teller.tell(sidecar, 150)
            (seq,) = flushed(sidecar, teller.source)
            recorder.follow(seq)
            assert objects(recorder) == teller.story.told(dialect)
        with Recorder(sidecar.client.sinks[0]) as recorder:
            recorder.payloads = [b""] * (seq + 1)
            pid = sidecar.pid
            kill(pid, signal.SIGKILL)
            assert still_running([pid], PATIENCE_S) == set()
            teller.tell(sidecar, 1)
            recorder.follow(seq + 2)
            _, events, _ = msgspec.msgpack.decode(recorder.payloads[seq + 1])
            assert [event["event_type"] for event in events] == ["cleared"]


def test_a_sentinel_goes_before_seq_0(tmp_path: Path) -> None:
    """sgl-router: when the numbering starts over, a message with seq 2^64 - 1 and no payload says so; of
    other presets there is none.
    """
    names = ("sgl-router", "sglang")
    with spawn(WORKER, config(tmp_path, *sinks_of(names, rebase_after=1000))) as sidecar:
        teller = Teller(6)
        messages = [rebased(sidecar, teller, bound) for bound in sidecar.client.sinks]
    first, second = (
        [int.from_bytes(seq, "big") for _, seq, _ in one if seq[:1] == b"\xff" or not any(seq)]
        for one in messages
    )
    assert first[:2] == [2**64 - 1, 0]
    assert second[:1] == [0]
    assert all(payload for _, _, payload in messages[1])


def rebased(sidecar: Sidecar, teller: Teller, bound: Bound) -> list[list[bytes]]:
    """All messages of a sink up to the next seq 0."""
    with zmq.Context[Socket]() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVHWM, 0)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(bound.endpoint)
        found: list[list[bytes]] = []
        for _ in range(3000):
            teller.tell(sidecar, 1)
            while sub.poll(0 if found else 5):
                found.append(sub.recv_multipart())
                if not any(found[-1][1]):
                    return found
        while sub.poll(int(PATIENCE_S * 1000)):
            found.append(sub.recv_multipart())
            if not any(found[-1][1]):
                return found
    raise AssertionError("the numbering did not start over")


def test_three_frames(tmp_path: Path) -> None:
    """legacy: replay answers without the topic, as older engines gave them; END too."""
    with spawn(WORKER, config(tmp_path, *sinks_of(("legacy",)))) as sidecar:
        teller = Teller(7)
        teller.tell(sidecar, 10)
        (seq,) = flushed(sidecar, teller.source)
        (bound,) = sidecar.client.sinks
        with zmq.Context[Socket]() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(str(bound.replay_endpoint))
            dealer.send_multipart([b"", bytes(8)])
            answers: list[list[bytes]] = []
            while not answers or answers[-1][-1]:
                assert dealer.poll(int(PATIENCE_S * 1000))
                answers.append(dealer.recv_multipart())
    assert [len(one) for one in answers] == [3] * (seq + 1)
    assert [one[1] for one in answers[:-1]] == [at.to_bytes(8, "big") for at in range(seq)]
    assert answers[-1] == [b"", b"\xff" * 8, b""]


def test_the_topic_of_a_preset(tmp_path: Path) -> None:
    """llm-d's names the pod and the model; kthena's is the one it compares with."""
    with spawn(
        WORKER, config(tmp_path, *sinks_of(("llm-d", "kthena"), heartbeat_s=0.05))
    ) as sidecar:
        topics = []
        for bound in sidecar.client.sinks:
            with zmq.Context[Socket]() as context, context.socket(zmq.SUB) as sub:
                sub.setsockopt(zmq.LINGER, 0)
                sub.setsockopt(zmq.SUBSCRIBE, b"")
                sub.connect(bound.endpoint)
                assert sub.poll(int(PATIENCE_S * 1000))
                topics.append(sub.recv_multipart()[0])
    assert topics == [b"kv@10.0.0.7:8000@org/m", b"kv-events"]


def test_a_store_needs_to_know_its_worker(tmp_path: Path) -> None:
    """Its events name the model and the worker: without them the sidecar does not start, and says why."""
    with pytest.raises(
        Exception, match=r"sinks\[0\]\.event_form: 'mooncake' names the worker's model"
    ):
        spawn(
            WorkerInfo(block_size=4, worker_id="w"),
            config(tmp_path, sink(dialect="mooncake-store", endpoint=LOOPBACK)),
        )


class Deaf:
    """A consumer that looks at no seq and asks for no replay."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str) -> None:
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.RECONNECT_IVL, 10)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(endpoint)
        self.index = BlockIndex()
        self.clears = 0

    def take(self) -> None:
        while self.sub.poll(50):
            payload = self.sub.recv_multipart()[2]
            if payload:
                events = decode_batch(payload).batch.events
                self.clears += events.count(AllBlocksCleared())
                self.index.apply(events)


def test_who_asks_for_no_replay_is_told(tmp_path: Path) -> None:
    """tells_joiners: one who subscribes late, or again after the sidecar was killed and much was told
    while nobody heard it, knows what is held; nobody is told for a second one who comes right after.
    """
    names = ("dynamo-relay", "aibrix", "sgl-router", "kthena")
    teller, sinks = Teller(8), sinks_of(names)
    with (
        spawn(WORKER, config(tmp_path, *sinks), respawn=Respawn(first_s=0.01)) as sidecar,
        zmq.Context[Socket]() as context,
        contextlib.ExitStack() as stack,
    ):
        teller.tell(sidecar, 100)
        flushed(sidecar, teller.source)
        consumers = [Deaf(context, bound.endpoint) for bound in sidecar.client.sinks]
        for consumer in consumers:
            stack.callback(consumer.sub.close)

        def know() -> bool:
            for consumer in consumers:
                consumer.take()
            return all(
                consumer.index.resident == teller.story.told(one.spelling)
                for consumer, one in zip(consumers, sinks, strict=True)
            )

        until(know)
        assert [consumer.clears for consumer in consumers] == [1] * len(consumers)
        pid = sidecar.pid
        kill(pid, signal.SIGKILL)
        teller.tell(sidecar, 100)
        assert still_running([pid], PATIENCE_S) == set()
        flushed(sidecar, teller.source)
        until(know)
        teller.tell(sidecar, 10)
        flushed(sidecar, teller.source)
        until(know)
        before = [consumer.clears for consumer in consumers]
        late = [Deaf(context, bound.endpoint) for bound in sidecar.client.sinks]
        for consumer in late:
            stack.callback(consumer.sub.close)
        until(
            lambda: [one["subscribers"] for one in state_of(sidecar)["sinks"]] == [2] * len(sinks)
        )
        teller.tell(sidecar, 5)
        flushed(sidecar, teller.source)
        until(know)
        assert [consumer.clears for consumer in consumers] == before
