"""Consumer C: a router by someone else. pyzmq, msgspec, docs/wire.md and docs/consumers.md are all it
knows of us.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq
from stress_child import Parent
from stress_evidence import Evidence, Way
from stress_site import SINKS, Site, url

__all__ = ["run_consumer"]

_END = b"\xff" * 8
_MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")
_NAMES = {"CPU": "CPU_PINNED", "STORAGE": "DISK"}
"""What dialects call them otherwise."""

_SLOTS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_WAIT_MS = 10
_ANSWER_S = 1.0
_PER_TURN = 500
_decode = msgspec.msgpack.Decoder().decode


def run_consumer(parent: Parent, site: Site, name: str, hwm: int) -> None:
    """Follow both sinks until told to leave."""
    context = zmq.Context[zmq.Socket[bytes]]()
    streams = [
        _Stream(context, *site.direct[sink], Evidence(site.evidence(name, sink)), hwm)
        for sink in SINKS
    ]
    poller = zmq.Poller()
    poller.register(parent.fileno(), zmq.POLLIN)
    for stream in streams:
        poller.register(stream.sub, zmq.POLLIN)
    until: tuple[int, ...] | None = None
    awaits_end = False
    while True:
        poller.poll(_WAIT_MS)
        for stream in streams:
            stream.turn()
        match parent.poll():
            case ("pause", seconds):
                time.sleep(seconds)
            case ("show", next_seqs):
                until = next_seqs
            case ("await end",):
                awaits_end = True
            case ("leave",):
                break
            case _:
                pass
        steady = not any(stream.asking for stream in streams)
        if until is not None and steady and _reached(streams, until):
            views = {sink: stream.view() for sink, stream in zip(SINKS, streams, strict=True)}
            parent.say("view", views, [one for stream in streams for one in stream.problems])
            until = None
        if awaits_end and steady and not any(stream.blocks for stream in streams):
            parent.say("end")
            awaits_end = False
    context.destroy(linger=0)


def _reached(streams: list[_Stream], until: tuple[int, ...]) -> bool:
    return all(stream.expected >= seq for stream, seq in zip(streams, until, strict=True))


class _Stream:
    """One sink: SUB and DEALER, a seq, and the media of each block."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pub: int,
        replay: int,
        evidence: Evidence,
        hwm: int,
    ) -> None:
        self._context, self._replay, self._evidence = context, url(replay), evidence
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, hwm)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(url(pub))
        self._dealer: zmq.Socket[bytes] | None = None
        self._answered_at = 0.0
        self._in_answer = False
        self._held: list[tuple[int, bytes]] = []
        self.expected = 0
        self.blocks: dict[int, set[str]] = {}
        self.problems: list[str] = []
        self._ask()

    @property
    def asking(self) -> bool:
        return self._dealer is not None

    def turn(self) -> None:
        for _ in range(_PER_TURN):
            try:
                frames = self.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 3 or len(frames[1]) != 8:
                self.problems.append(f"a live message of {[len(frame) for frame in frames]} bytes")
                continue
            self._live(int.from_bytes(frames[1], "big"), frames[2])
        if self._dealer is not None:
            self._read_answers(self._dealer)
            if time.monotonic() - self._answered_at > _ANSWER_S:
                self._ask()

    def view(self) -> dict[str, set[int]]:
        return {
            medium: {one for one, media in self.blocks.items() if medium in media}
            for medium in _MEDIA
        }

    def _live(self, seq: int, payload: bytes) -> None:
        if self._dealer is not None:
            self._held.append((seq, payload))
        elif seq == self.expected:
            self._apply(Way.CLEAR if _clears(payload) else Way.LIVE, seq, payload)
        elif seq > self.expected:
            self._held.append((seq, payload))
            self._ask()
        else:  # a replay has brought it; the bytes are evidence all the same
            self._evidence.add(Way.AGAIN, seq, payload)

    def _ask(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self._replay)
        dealer.send_multipart([b"", self.expected.to_bytes(8, "big")])
        self._answered_at, self._in_answer = time.monotonic(), False

    def _read_answers(self, dealer: zmq.Socket[bytes]) -> None:
        for _ in range(_PER_TURN):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answered_at = time.monotonic()
            if len(frames) != 4 or frames[0] or len(frames[2]) != 8:
                self.problems.append(f"an answer of {[len(frame) for frame in frames]} bytes")
            elif frames[2] == _END:
                self._end(dealer)
                return
            else:
                self._answer(int.from_bytes(frames[2], "big"), frames[3])

    def _answer(self, seq: int, payload: bytes) -> None:
        if seq != self.expected:
            self.problems.append(f"an answer has seq {seq}, not {self.expected}")
        if self._in_answer:
            self._apply(Way.REPLAY, seq, payload)
            return
        self._in_answer = True
        self._apply(Way.SNAPSHOT if _clears(payload) else Way.FRAMES, seq, payload)

    def _end(self, dealer: zmq.Socket[bytes]) -> None:
        dealer.close(linger=0)
        self._dealer = None
        held, self._held = self._held, []
        for seq, payload in held:
            self._live(seq, payload)

    def _apply(self, way: Way, seq: int, payload: bytes) -> None:
        self._evidence.add(way, seq, payload)
        self.expected = seq + 1
        batch: Any = _decode(payload)
        if not isinstance(batch, list) or len(batch) != 3 or not isinstance(batch[0], float):
            self.problems.append(f"seq {seq} is no batch")
            return
        for event in map(_plain, batch[1]):
            match event["type"]:
                case "BlockStored":
                    self._store(seq, event)
                case "BlockRemoved":
                    self._remove(seq, event)
                case "AllBlocksCleared":
                    self.blocks.clear()
                case other:
                    self.problems.append(f"seq {seq}: {other}")

    def _store(self, seq: int, event: dict[str, Any]) -> None:
        parent = event["parent_block_hash"]
        if parent is not None and event["medium"] not in self.blocks.get(parent, ()):
            self.problems.append(f"seq {seq}: {event['medium']} has no parent {parent}")
        for one in event["block_hashes"]:
            self.blocks.setdefault(one, set()).add(event["medium"])

    def _remove(self, seq: int, event: dict[str, Any]) -> None:
        for one in event["block_hashes"]:
            media = self.blocks.get(one, set())
            if event["medium"] not in media:
                self.problems.append(f"seq {seq}: {one} was not on {event['medium']}")
            media.discard(event["medium"])
            if not media:
                self.blocks.pop(one, None)


def _plain(event: Any) -> dict[str, Any]:
    """Whatever its dialect: a map, with signed hashes and our names of media."""
    if isinstance(event, list):
        event = {"type": event[0], **dict(zip(_SLOTS[event[0]], event[1:], strict=True))}
    told: dict[str, Any] = dict(event)
    if "medium" in told:
        told["medium"] = _NAMES.get(told["medium"], told["medium"])
        told["block_hashes"] = [_signed(one) for one in told["block_hashes"]]
    if told.get("parent_block_hash") is not None:
        told["parent_block_hash"] = _signed(told["parent_block_hash"])
    return told


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _clears(payload: bytes) -> bool:
    events = _decode(payload)[1]
    return bool(events) and _plain(events[0])["type"] == "AllBlocksCleared"
