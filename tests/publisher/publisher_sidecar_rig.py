"""What the tests of whole sidecars share: a recorder of one sink, an engine by hand, ports, HTTP."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
from publisher_rig import LOOPBACK, PATIENCE_S, RawPublisher, Socket, insert

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, BlockIndex, Event, HashFormat, decode_batch
from kvevents.frames import (
    END,
    Frame,
    parse_live,
    parse_replay_answer,
    replay_answer,
    replay_request,
)
from kvevents.records import Record
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo
from publisher.link.messages import Bound

__all__ = [
    "WORKER",
    "Engine",
    "Nothing",
    "Recorder",
    "config",
    "flushed",
    "get",
    "sink",
    "state_of",
    "work",
]

WORKER = WorkerInfo(block_size=4, worker_id="w")


def sink(**settings: Any) -> SinkConfig:
    """Any free ports, and no heartbeats to speak of."""
    defaults: dict[str, Any] = {
        "endpoint": LOOPBACK,
        "replay_endpoint": LOOPBACK,
        "heartbeat_s": 3600.0,
    }
    return SinkConfig(**defaults | settings)


def config(folder: Path, *sinks: SinkConfig, **settings: Any) -> SidecarConfig:
    """State is kept in `folder`."""
    defaults: dict[str, Any] = {
        "sinks": sinks or (sink(),),
        "linger_s": 0.0,
        "state_dir": str(folder),
    }
    return SidecarConfig(**defaults | settings)


def get(url: str) -> tuple[int, str]:
    """Status and body of a page."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def state_of(sidecar: Sidecar) -> dict[str, Any]:
    """What a live sidecar says of itself at /state."""
    code, body = get(f"{sidecar.client.http_endpoint}/state")
    assert code == 200
    found: dict[str, Any] = json.loads(body)
    return found


# -------------------------------------------------------------------------------------- a worker


class Nothing:
    """A source of records that has none: for a worker that publishes batches of its own."""

    hash_format, retelling = HashFormat.SGLANG, False

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def take_records(self) -> list[Record]:
        return []

    def begin_retell(self) -> None:
        pass

    def retell(self, most_blocks: int) -> None:
        pass


def work(sidecar: Sidecar, cache: HiRadixCache, steps: int) -> None:
    """So many requests, each told at once; the later ones evict."""
    for _ in range(steps):
        first = 100 * cache.num_stored
        insert(cache, range(first, first + 8))
        sidecar.pump(cache)


def flushed(sidecar: Sidecar, cache: HiRadixCache | Nothing) -> tuple[int, ...]:
    """The next seq of each sink, once all is published."""
    answer = sidecar.client.flush(cache, PATIENCE_S)
    assert answer is not None, "the sidecar did not answer"
    return answer.next_seqs


# ---------------------------------------------------------------------------------------- a sink


class Recorder:
    """A subscriber without any of our code but the codec: notes each payload by seq, and asks for what it
    misses. What it checks at every step: seqs follow each other, and a seq has one payload.
    """

    def __init__(self, bound: Bound, *, topic: str = "") -> None:
        self._context = zmq.Context[Socket]()
        self._replay_endpoint = bound.replay_endpoint
        self._sub = self._context.socket(zmq.SUB)
        self._open(self._sub, bound.endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.payloads: list[bytes] = []
        """By seq."""
        self.index = BlockIndex()
        self.clears: list[int] = []
        """Seqs of batches with AllBlocksCleared in them."""
        self.asked = 0
        """Replays asked for."""

    def _open(self, socket: Socket, endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)

    @property
    def next_seq(self) -> int:
        """The seq of the batch that comes next."""
        return len(self.payloads)

    def events(self, seq: int) -> list[Event]:
        """What a batch said."""
        return decode_batch(self.payloads[seq]).batch.events

    def take(self) -> None:
        """What has come, without waiting, with what was missed before it."""
        while self._sub.poll(0):
            frame = parse_live(self._sub.recv_multipart())
            if frame.seq > self.next_seq and not self.ask(self.next_seq):
                return  # it was killed: what it sent last is asked for again
            self._note(frame)

    def follow(self, until: int) -> None:
        """Until all before seq `until` are known."""
        self.follow_until(lambda: self.next_seq >= until)

    def follow_until(
        self, done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Until `done`; what does not come by itself is asked for."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"it came to seq {self.next_seq}"
            meanwhile()
            if self._sub.poll(50):
                self.take()
            elif self._replay_endpoint is not None:
                self.ask(self.next_seq, meanwhile)

    def ask(self, start: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Have everything from `start` told again; whether the answer came to its end."""
        assert self._replay_endpoint is not None
        self.asked += 1
        deadline, expected = time.monotonic() + 1.0, start
        with self._context.socket(zmq.DEALER) as dealer:
            self._open(dealer, self._replay_endpoint)
            dealer.send_multipart(replay_request(start))
            while time.monotonic() < deadline:  # or the sidecar was killed
                meanwhile()
                if not dealer.poll(20):
                    continue
                answer = parse_replay_answer(dealer.recv_multipart())
                if answer == END:
                    return True
                assert isinstance(answer, Frame)
                assert answer.seq == expected, "a replay is contiguous from the seq asked for"
                expected += 1
                self._note(answer)
        return False

    def check_told_again(self, start: int) -> None:
        """All from `start` on is told again, byte for byte."""
        until, deadline = self.next_seq, time.monotonic() + PATIENCE_S
        while not self.ask(start):
            assert time.monotonic() < deadline
        assert self.next_seq == until

    def _note(self, frame: Frame) -> None:
        assert frame.seq <= self.next_seq, f"seq {frame.seq} where {self.next_seq} is next"
        if frame.seq < self.next_seq:
            assert frame.payload == self.payloads[frame.seq], f"seq {frame.seq} is another now"
            return
        self.payloads.append(frame.payload)
        events = self.events(frame.seq)
        if AllBlocksCleared() in events:
            self.clears.append(frame.seq)
        self.index.apply(events)

    def close(self) -> None:
        """Safe to call twice."""
        self._sub.close(linger=0)
        self._context.term()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------- an engine


class Engine(RawPublisher):
    """An unmodified engine: publishes what it is told to, and answers replays from what it retains."""

    def __init__(self) -> None:
        super().__init__()
        self.retained: dict[int, bytes] = {}
        self.seq = 0
        """Of the next batch."""

    def __enter__(self) -> Engine:
        return self

    def await_next_subscriber(self) -> None:
        """Until someone has subscribed, after whoever left meanwhile."""
        while True:
            assert self.pub.poll(int(PATIENCE_S * 1000)), "nobody subscribed"
            if self.pub.recv()[:1] == b"\1":
                return

    def publish(self, payload: bytes) -> None:
        """A batch of events."""
        self.live(self.seq, payload=payload)
        self.retained[self.seq] = payload
        self.seq += 1

    def forget(self) -> None:
        """Retain nothing of what was published."""
        self.retained.clear()

    def serve(self) -> None:
        """Answer the requests that have come, if who asked is still there."""
        while self.router.poll(0):
            client, start = self.request()
            with contextlib.suppress(zmq.ZMQError):
                for seq, payload in self.retained.items():
                    if seq >= start:
                        answer = replay_answer(b"", seq, payload, delimited=True)
                        self.router.send_multipart([client, *answer])
                self.end(client)
