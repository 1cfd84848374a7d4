"""The whole path as one model: cache → ring → source → core → lossy wire → tracker → index.

Everything is the real thing but the two sockets, which are queues here that lose what they are told to.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from threading import Thread

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hicache import HiRadixCache, KVShape, Node, PagePool
from kvevents.codec import decode_batch
from kvevents.events import StorageMedium
from kvevents.gaps import Action, Ask, Deliver, GapTracker, Restarted
from kvevents.index import BlockIndex, Oddities
from kvevents.namespace import BASE, Namespace
from kvevents.records import BlockId, Remove
from publisher import SidecarClient, WorkerInfo
from publisher.config.sidecar_config import SinkConfig
from publisher.link.messages import Ready
from publisher.sidecar.source import LinkSource
from publisher.stream.core import Core, Numbered
from publisher.stream.output import Output

PAGE_SIZE, NUM_PAGES, RING_BYTES = 2, 24, 4096
NAMESPACES = [BASE, Namespace(lora_name="x"), Namespace(cache_salt="x"), Namespace(extra_key="x")]
prompts = st.builds(
    lambda length, bits: [1 + (bits >> place & 1) for place in range(length)],
    st.integers(0, 40),
    st.integers(0, 2**40 - 1),
)
"""Of two tokens only, so that prompts have much in common."""


class Router:
    """A subscriber with a wire that can lose live frames and break off replays."""

    def __init__(self, output: Callable[[], Output]) -> None:
        self._output = output
        self._live: deque[tuple[int, bytes]] = deque()
        self._replay: Iterator[tuple[int, bytes]] = iter(())
        self._tracker = GapTracker[bytes](can_replay=True, max_held=8, attempts=1_000_000)
        self.index = BlockIndex()
        self.to_lose = 0
        self._act(self._tracker.start())

    def on_wire(self, seq: int, payload: bytes) -> None:
        if self.to_lose:
            self.to_lose -= 1
        else:
            self._live.append((seq, payload))

    def take_live(self, most: int) -> None:
        for _ in range(min(most, len(self._live))):
            self._act(self._tracker.live(*self._live.popleft()))

    def take_replay(self, most: int) -> None:
        if not self._tracker.recovering:
            return
        answers = list(islice(self._replay, most))
        for seq, payload in answers:
            self._act(self._tracker.replayed(seq, payload))
        if len(answers) < most:
            self._act(self._tracker.end())

    def break_replay(self) -> None:
        """As when no answer came in time: the tracker asks again."""
        self._replay = iter(())
        if self._tracker.recovering:
            self._act(self._tracker.failed())

    def settle(self) -> None:
        """All that is on the wire arrives, and every replay ends."""
        self.to_lose = 0
        while self._live or self._tracker.recovering or self._tracker.diverged:
            if self._tracker.diverged:  # as the subscriber does after a while
                self._act(self._tracker.rejoin())
            self.take_live(1000)
            self.take_replay(1000)

    def _act(self, actions: list[Action[bytes]]) -> None:
        for action in actions:
            match action:
                case Deliver(payload=payload):
                    self.index.apply(decode_batch(payload).batch.events)
                case Ask(start=start):
                    self._replay = self._output().replay(start)
                case Restarted():
                    raise AssertionError("our publisher never starts over")
                case _:
                    pass


class Pipeline(RuleBasedStateMachine):
    """After any faults, when things are quiet again, every router's view equals the cache."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        worker = WorkerInfo(block_size=PAGE_SIZE)
        self.client = SidecarClient(
            self._folder / "link", worker, ring_bytes=RING_BYTES, retell_interval_s=0
        )
        self._stack.callback(self.client.close)
        self._stack.callback(self._close_sidecar)
        self.cache = HiRadixCache(PagePool(NUM_PAGES, PAGE_SIZE, KVShape(1, 1, 1)))
        self.locked: list[Node] = []
        self.routers: list[Router] = []
        self._now = 0.0

    @initialize(
        max_batches=st.integers(1, 6),
        max_bytes=st.sampled_from([300, 1 << 20]),
        coalesce_s=st.sampled_from([0.0, 0.0, 2.5]),
    )
    def start(self, max_batches: int, max_bytes: int, coalesce_s: float) -> None:
        self._sink = SinkConfig(
            name="sink", buffer_steps=max_batches, buffer_bytes=max_bytes, coalesce_s=coalesce_s
        )
        (self._folder / "state").mkdir()
        self._open_sidecar()
        self._join()

    def _open_sidecar(self) -> None:
        sources: list[LinkSource] = []

        def connect() -> None:
            sources.append(LinkSource(self._folder / "link", timeout_s=10))
            sources[0].ready(Ready(()))

        connecting = Thread(target=connect)
        connecting.start()
        self.client.accept(time.monotonic() + 10)
        connecting.join()
        (self.source,) = sources
        self.core = Core(
            *(self.source.worker, self.source.link_id, (self._sink,), ("sink",)),
            self._folder / "state",
            clock=lambda: 1.0,
        )
        assert self.core.journal is not None
        self.core.journal._limit = 3000  # generations follow each other quickly
        self._publish(self.core.start())
        self.source.start(self.core.replica.expected)
        self._asked = self.core.replica.counts.resyncs
        if not self.core.replica.in_step:
            self.source.ask_resync("")

    def _close_sidecar(self) -> None:
        if hasattr(self, "core"):
            self.source.close()
            self.core.close()

    # ------------------------------------------------------------------------------ the worker

    @rule(
        tokens=prompts,
        namespace=st.sampled_from(NAMESPACES),
        keep_lock=st.booleans(),
        pump=st.booleans(),
    )
    def request(self, tokens: list[int], namespace: Namespace, keep_lock: bool, pump: bool) -> None:
        match = self.cache.match_prefix(tokens, namespace)
        self.cache.lock(match.node)
        pages = self.cache.allocate(len(tokens) // PAGE_SIZE - match.num_pages)
        if pages is not None:
            self.cache.insert(tokens, pages, namespace, first_page=match.num_pages)
        if keep_lock and len(self.locked) < 3:
            self.locked.append(match.node)
        else:
            self.cache.unlock(match.node)
        if pump:
            self.client.pump(self.cache)

    @rule(seed=st.integers(0, 2**32), count=st.integers(10, 60))
    def burst(self, seed: int, count: int) -> None:
        """More than the ring can take while the sidecar is away."""
        random = Random(seed)
        for _ in range(count):
            tokens = random.choices((1, 2), k=random.randrange(40))
            self.request(tokens, random.choice(NAMESPACES), False, True)

    @rule()
    def batch_larger_than_the_ring(self) -> None:
        """It is refused, with whatever the records said."""
        records = self.cache.take_records()
        self.client.publish([*records, Remove(StorageMedium.GPU, [(BlockId(0), 1)] * RING_BYTES)])

    @rule(num_pages=st.integers(0, 10))
    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.cache.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @precondition(lambda self: not self.locked)
    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @rule(times=st.integers(1, 3))
    def pump(self, times: int) -> None:
        for _ in range(times):
            self.client.pump(self.cache)

    # ----------------------------------------------------------------------------- the sidecar

    @rule(most=st.integers(1, 5))
    def sidecar_turn(self, most: int) -> None:
        inputs, _ = self.source.read(most)
        published = self.core.apply(inputs, self._now)
        self.source.release()
        self._publish(published)
        if self.core.replica.counts.resyncs != self._asked:
            self._asked = self.core.replica.counts.resyncs
            self.source.ask_resync("")
        self._now += 1.0
        self._publish(self.core.work(self._now))

    @rule()
    def heartbeat(self) -> None:
        self._publish(self.core.own(0, []))

    @rule(read=st.integers(0, 5))
    def sidecar_killed(self, read: int) -> None:
        """kill -9 at the worst place: inputs are kept and neither let go of nor published. The next one
        goes on where it was.
        """
        self.core.apply(self.source.read(read)[0] if read else [], self._now)
        in_step, next_seq = self.core.replica.in_step, self.core.outputs[0].next_seq
        self._close_sidecar()
        self._open_sidecar()
        assert (self.core.warm, self.core.replica.in_step) == (True, in_step)
        assert self.core.outputs[0].next_seq == next_seq
        for router in self.routers:
            router.break_replay()

    @rule()
    def sidecar_killed_and_its_journal_lost(self) -> None:
        """Everything is told anew, after a clear, and the seqs go on."""
        next_seq = self.core.outputs[0].next_seq
        self._close_sidecar()
        for kept in ("entries-*", "checkpoint-*"):
            for path in (self._folder / "state").glob(kept):
                path.unlink()
        self._open_sidecar()
        assert (self.core.warm, self.core.outputs[0].next_seq) == (False, next_seq + 1)
        for router in self.routers:
            router.break_replay()

    @rule()
    def garbage_in_the_ring(self) -> None:
        """A message that the sidecar cannot read."""
        self.client._ring.write(b"\xc1 no message")

    # ----------------------------------------------------------------------------- the routers

    @precondition(lambda self: len(self.routers) < 4)
    @rule()
    def join(self) -> None:
        self._join()

    @rule(data=st.data(), count=st.integers(1, 12))
    def lose(self, data: st.DataObject, count: int) -> None:
        self._router(data).to_lose = count

    @rule(data=st.data(), live=st.integers(0, 5), replayed=st.integers(0, 5))
    def deliver(self, data: st.DataObject, live: int, replayed: int) -> None:
        router = self._router(data)
        router.take_live(live)
        router.take_replay(replayed)

    @rule(data=st.data())
    def break_replay(self, data: st.DataObject) -> None:
        self._router(data).break_replay()

    # ------------------------------------------------------------------------------- the claim

    @rule()
    def settle(self) -> None:
        for _ in range(1000):
            self.client.pump(self.cache)
            self.sidecar_turn(1000)
            asked = self.client._ring.resyncs != self.client._answered
            if self.core.replica.in_step and not (asked or self.cache.retelling or self.core.held):
                break
        else:
            raise AssertionError("the link never got in step again")
        for router in self.routers:
            router.to_lose = 0
        self.heartbeat()
        truth = self.cache.resident_blocks()
        for router in self.routers:
            router.settle()
            assert router.index.resident == truth
            odd = router.index.oddities
            assert odd == Oddities(stored_again=odd.stored_again), "only a snapshot tells twice"
        assert self.cache.violations() == []

    def teardown(self) -> None:
        try:
            if self.routers:
                self.settle()
        finally:
            self._stack.close()

    def _join(self) -> None:
        self.routers.append(Router(lambda: self.core.outputs[0]))

    def _publish(self, published: list[Numbered]) -> None:
        for one in published:
            for router in self.routers:
                router.on_wire(one.frame.seq, one.frame.payload)

    def _router(self, data: st.DataObject) -> Router:
        return self.routers[data.draw(st.integers(0, len(self.routers) - 1))]


TestPipelineModel = Pipeline.TestCase
