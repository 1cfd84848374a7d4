"""One rank's sidecar, as an engine's publisher has it.

P1  Publishing never waits and never raises. Whoever comes while another thread hands a batch over leaves
    its own in the queue, and that thread hands it over too. What the link has no room for waits in the
    queue until it has, for a thread of its own to hand over.
P2  A configuration that cannot be is refused at construction. Nothing else stops the engine: a sidecar
    that does not come is said in the log and tried again, and what is told meanwhile waits; one that ends
    is started again, however often. What the queue has no room for is lost, the oldest first, and then
    all that was told before is cleared.
P3  The sidecar starts at once where the block size is known, else when the first stored block tells it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvevents.events import (
    FULL_ATTENTION,
    LOCAL,
    AllBlocksCleared,
    BlockStored,
    Event,
    KVEventBatch,
)
from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import WorkerInfo
from publisher.engines.disk import MEETING, Holdings, Meeting
from publisher.engines.events import EventReader
from publisher.engines.told import Told
from publisher.host_log import host_log
from publisher.link.messages import Bound
from publisher.once import Once
from publisher.worker.attendant import Respawn
from publisher.worker.client import DEFAULT_RING_BYTES, ClientStats, LinkError, SidecarClient
from publisher.worker.spawned import Sidecar, spawn

__all__ = ["EngineSidecar"]

_READY_S = 10.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 30.0
_FOR_EVER = Respawn(attempts=2**31)
"""An engine runs for weeks, and nobody starts it again for its publisher's sake."""
_DOES = {"bind": "publishes at", "connect": "connects, for a router to bind there, to"}
_FULL_PAUSE_S = 0.01
"""Between looks whether a link that was full has room again."""
_LAST_S = 1.0
"""For what waits at the end."""
_TOKEN_BYTES, _BLOCK_BYTES, _EVENT_BYTES = 9, 64, 1024
"""What each takes on the link at most: tokens packed and encoded, and names of the usual length."""

_log = host_log("kvevents.engines")


class EngineSidecar:
    """Of one rank. `engine`: what the engine says of itself (block_size, model, dp_size), None where it
    does not.

    Raises ConfigError that names the key; waits for the sidecar's sockets, at most `ready_s`, where it
    can start at once.
    """

    def __init__(
        self,
        told: Told,
        dp_rank: int,
        engine: Mapping[str, Any],
        *,
        ready_s: float = _READY_S,
        ring_bytes: int = DEFAULT_RING_BYTES,
        meeting: Meeting = MEETING,
    ) -> None:
        self.told, self.dp_rank, self._meeting = told, dp_rank, meeting
        self._engine, self._ready_s, self._ring_bytes = dict(engine), ready_s, ring_bytes
        block_size = told.worker.get("block_size", engine.get("block_size"))
        worker = self._worker(block_size if block_size is not None else 1)
        self.sidecar: Sidecar | None = None
        """Once it is ready."""
        self.dropped = 0
        """Batches that found no room in the queue."""
        self._reader = EventReader()
        self._queue: deque[KVEventBatch] = deque()
        self._turn = threading.Lock()
        """Of the one thread that hands batches over."""
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self._begun = False
        self._counted = ClientStats()
        """What the link had counted when it last refused a batch."""
        self._missed = False
        """Whether a storage's events may have been lost since it told all."""
        self._hole = False
        """Whether a batch was dropped that those which wait may hang on."""
        self._pushing = False
        """Whether a thread waits for the link to have room; whose turn it is says so."""
        self._pid = os.getpid()
        self._said = Once()
        self._known: Holdings | None = None
        self._meeting.join_publisher(self)
        if block_size is not None:
            self._begin(worker)
        else:  # a warning: of other lines than its own vLLM shows no lesser ones
            _log.warning(
                "the sidecar of rank %d waits for the first stored block, which tells the block size;"
                " give worker.block_size in the file of KVEVENTS_CONFIG to have it at once",
                dp_rank,
            )

    @property
    def bound(self) -> Bound | None:
        """Where the first sink listens; None while that is not known."""
        sidecar = self.sidecar
        return sidecar.client.sinks[0] if sidecar is not None and sidecar.client.sinks else None

    @property
    def topic(self) -> str:
        """What the first sink's messages begin with."""
        sink, bound = self.told.config.sinks[0], self.bound
        endpoint = sink.endpoints_of(self.dp_rank)[0] if bound is None else bound.endpoint
        port = Endpoint.parse("endpoint", endpoint.partition(",")[0]).port
        return self.told.first_topic(self._worker(1), port)

    def _worker(self, block_size: int) -> WorkerInfo:
        return self.told.worker_info(self.dp_rank, **{**self._engine, "block_size": block_size})

    # -------------------------------------------------------------------------------- publishing

    def publish(self, ts: float, events: Sequence[Any], dp_rank: int | None) -> None:
        """Hand over a batch of the engine's own event objects; it does not change them any more (P1)."""
        try:
            skipped = self._reader.skipped
            read = self._reader.read(events)
            if self._reader.skipped != skipped:
                self._say("an event was not understood: %s", self._reader.last_error)
            if not read and events:
                return
            if (known := self._known) is not None:
                known.note(read)
            self._offer(KVEventBatch(float(ts), read, self.dp_rank if dp_rank is None else dp_rank))
            if not self._begun:
                self._begin_by(read)
            if known is not None and AllBlocksCleared() in read:
                self._meeting.tell_all()
        except Exception as error:  # whatever an engine hands over, it gets no exception
            self._say("a batch was not published: %s", repr(error))

    def tell(self, events: list[Event]) -> None:
        """Hand over events that are ours, from any thread (P1)."""
        self._offer(KVEventBatch(time.time(), events, self.dp_rank))

    def remember(self, known: Holdings) -> None:
        """Have `known` note every event from now on."""
        self._known = known

    def _offer(self, batch: KVEventBatch) -> None:
        if self._stop.is_set() or os.getpid() != self._pid:  # a forked process publishes nothing
            return
        self._queue.append(batch)
        while 0 < self.told.max_queue_size < len(self._queue):
            self._drop_oldest()
        self._drain()

    def _drop_oldest(self) -> None:
        with contextlib.suppress(IndexError):  # other threads take from it too
            self._queue.popleft()
            self.dropped += 1
            self._hole = True  # not before: whoever sees it clears what came before

    def _drain(self) -> None:
        while self._queue and self.sidecar is not None and self._turn.acquire(blocking=False):
            client = self.sidecar.client
            try:
                if not self._put_all(client):
                    self._push_later(client)
                    return
            finally:
                self._turn.release()

    def _push_later(self, client: SidecarClient) -> None:
        if not self._pushing:
            pusher = threading.Thread(
                target=self._push, args=(client,), name="kvevents-push", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no more threads: the next batch tries again
                pusher.start()
                self._pushing = True

    def _push(self, client: SidecarClient) -> None:
        while not self._stop.wait(_FULL_PAUSE_S):
            with self._turn:
                if self._put_all(client):
                    self._pushing = False
                    break
        self._drain()  # what came during the last turn

    def _put_all(self, client: SidecarClient) -> bool:
        """Whether the queue is empty; the link is full if not. For whose turn it is."""
        with contextlib.suppress(IndexError):
            while client.has_room(_most_bytes(self._queue[0])):
                batch = self._queue.popleft()
                if self._hole:
                    self._hole, self._missed = False, True
                    cleared: list[Event] = [AllBlocksCleared()]
                    client.publish_batch(KVEventBatch(batch.ts, cleared, batch.dp_rank))
                if self._put(client, batch) and self._missed:
                    # After a hole the sidecar clears all that it was told.
                    self._missed = False
                    self._meeting.tell_all()
            return False
        return True

    def _put(self, client: SidecarClient, batch: KVEventBatch) -> bool:
        """Whether it was handed over as it is."""
        if client.publish_batch(batch):
            return True
        before, now = self._counted, client.stats
        if now.invalid != before.invalid and len(batch.events) > 1:
            for event in batch.events:  # one that is unsound is to cost itself alone
                client.publish_batch(KVEventBatch(batch.ts, [event], batch.dp_rank))
            now = client.stats
        self._counted = now
        self._missed = self._missed or now.refused != before.refused
        return False

    def _say(self, message: str, reason: str) -> None:
        """Each kind once."""
        kind = reason.partition(":")[0]
        if self._said.is_new(kind):
            _log.warning(message, reason)

    # ----------------------------------------------------------------------------------- its life

    def ensure(self, block_size: int) -> None:
        """Start with this block size, if it has not begun to; waits as the constructor does."""
        if not self._begun:
            self._begin(self._worker(block_size))

    def _begin_by(self, events: Sequence[Event]) -> None:
        """With the blocks of the group that comes out (publisher.stream.foreign, F5): another's may be of
        another size.
        """
        stores = [one for one in events if type(one) is BlockStored and one.locality in LOCAL]
        main = [one for one in stores if one.kv_cache_spec_kind in FULL_ATTENTION]
        for event in main or [one for one in stores if not one.group_idx]:
            self._try_later(self._worker(event.block_size), 0.0)
            self._begun = True
            return

    def _begin(self, worker: WorkerInfo) -> None:
        self._begun = True
        if not self._try(worker):
            try:
                self._try_later(worker, _FIRST_PAUSE_S)
            except RuntimeError:  # no more threads: the next stored block tries again
                self._begun = False

    def _try_later(self, worker: WorkerInfo, pause_s: float) -> None:
        trying = threading.Thread(
            target=self._keep_trying, args=(worker, pause_s), name="kvevents-start", daemon=True
        )
        trying.start()

    def _keep_trying(self, worker: WorkerInfo, pause_s: float) -> None:
        while not self._stop.wait(pause_s) and not self._try(worker):
            pause_s = min(_MOST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))

    def _try(self, worker: WorkerInfo) -> bool:
        """Whether there is nothing more to try."""
        with self._starting:
            if self._stop.is_set():
                return True
            try:
                self.sidecar = spawn(
                    worker,
                    self.told.config,
                    ring_bytes=self._ring_bytes,
                    ready_s=self._ready_s,
                    respawn=_FOR_EVER,
                )
            except (LinkError, OSError, RuntimeError) as error:  # RuntimeError: no more threads
                _log.error(
                    "the sidecar of rank %d did not start, and is tried again; the engine goes on: %s",
                    self.dp_rank,
                    error,
                )
                return False
        _log.info(
            "the sidecar of rank %d (pid %d) %s",
            self.dp_rank,
            self.sidecar.pid,
            ", ".join(
                f"{_DOES[sink.mode]} {bound.endpoint}"
                for sink, bound in zip(
                    self.told.config.sinks, self.sidecar.client.sinks, strict=True
                )
            ),
        )
        if self.dropped:
            _log.warning("%d batches were dropped before the sidecar was ready", self.dropped)
        self._drain()
        return True

    def close(self) -> None:
        """Have the sidecar publish what is left and end; waits at most a second for a link that is full,
        and for a start that is under way. Safe to call twice.
        """
        if os.getpid() != self._pid:
            return  # its parent's, whose locks are as they were at the fork
        self._stop.set()
        self._meeting.leave_publisher(self)
        with self._starting:
            if self.sidecar is not None:
                self._hand_over_the_last(self.sidecar.client)
                self.sidecar.close()

    def _hand_over_the_last(self, client: SidecarClient) -> None:
        deadline = time.monotonic() + _LAST_S
        while (left_s := deadline - time.monotonic()) > 0:
            # Another thread may have a batch in its hands; who had a turn as a signal ended it keeps it.
            if self._turn.acquire(timeout=left_s):
                try:
                    if self._put_all(client):
                        return
                finally:
                    self._turn.release()
            time.sleep(_FULL_PAUSE_S)
        _log.warning("%d batches are lost: the sidecar does not read", len(self._queue))
        self.dropped += len(self._queue)
        self._queue.clear()


def _most_bytes(batch: KVEventBatch) -> int:
    """What it takes on the link, about; rather more."""
    events = batch.events
    hashes = [event.block_hashes for event in events if not isinstance(event, AllBlocksCleared)]
    tokens = [event.token_ids for event in events if isinstance(event, BlockStored)]
    sizes = sum(map(len, tokens)), sum(map(len, hashes)), 1 + len(events)
    return _TOKEN_BYTES * sizes[0] + _BLOCK_BYTES * sizes[1] + _EVENT_BYTES * sizes[2]
