"""Those who trouble a sidecar in `benchmarks.sidecar`: one process each, until it is killed.

`python -m benchmarks.sidecar_clients KIND PUB REPLAY HTTP` says "ready" once the trouble has begun, and
"done" where it has an end.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable

import zmq

from kvevents.frames import END, JOIN, parse_replay_answer, replay_request

__all__ = ["KINDS"]

CLIENTS, IDENTITIES, HELD = 50, 10_000, 500
FLOOD = 100
"""Messages of a flood before its sockets are looked at again."""

Socket = zmq.Socket[bytes]


class Troublemaker:
    """`pub`, `replay`, `http`: the sidecar's endpoints."""

    def __init__(self, pub: str, replay: str, http: str) -> None:
        self._pub, self._replay, self._http = pub, replay, http
        self._context = zmq.Context[Socket]()

    def stops_reading(self) -> None:
        """Asks for all there is, and takes next to nothing of it."""
        client = self._small(zmq.DEALER)
        client.connect(self._replay)
        client.send_multipart(replay_request(0))
        _say("ready")
        time.sleep(3600)

    def subscriber_stops(self) -> None:
        """Subscribes, and takes next to nothing."""
        subscriber = self._small(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(self._pub)
        _say("ready")
        time.sleep(3600)

    def joins(self) -> None:
        """Clients that take the state now and what follows, again and again."""
        self._replays(JOIN)

    def from_zero(self) -> None:
        """Clients that ask for all there is, again and again."""
        self._replays(0)

    def garbage(self) -> None:
        """Wrong frames, frames of 4 KB and some of 16 MB, as fast as they go."""
        wrong = [[b"x"], [b"", b"", b""], [b"", bytes(4080)], [b"", os.urandom(8), b"more"]]
        client, giant = self._dealer(), self._dealer()
        _say("ready")
        while True:
            for number in range(FLOOD):
                client.send_multipart(wrong[number % len(wrong)])
            while client.poll(0):
                client.recv_multipart()
            if giant.poll(0, zmq.POLLOUT):  # it is cut off, and connects again
                giant.send_multipart([b"", bytes(16 << 20)])

    def identities(self) -> None:
        """Each asks once for the state now and leaves."""
        _say("ready")
        host, _, port = self._replay.removeprefix("tcp://").rpartition(":")
        held: deque[socket.socket] = deque()
        for number in range(IDENTITIES):
            client = socket.create_connection((host, int(port)))
            client.sendall(_dealer_that_asks(b"client%d" % number, JOIN))
            held.append(client)
            if len(held) > HELD:
                held.popleft().close()
        _say("done")
        time.sleep(3600)

    def scrapes(self) -> None:
        """Metrics and state, as fast as they are answered."""
        _say("ready")
        while True:
            for page in ("/metrics", "/state", "/healthz"):
                with urllib.request.urlopen(self._http + page) as answer:
                    answer.read()

    def _replays(self, start: int) -> None:
        clients = [self._dealer() for _ in range(CLIENTS)]
        poller = zmq.Poller()
        for client in clients:
            poller.register(client, zmq.POLLIN)
            client.send_multipart(replay_request(start))
        _say("ready")
        while True:
            for client, _ in poller.poll():
                frames = client.recv_multipart()
                if parse_replay_answer(frames) == END:
                    client.send_multipart(replay_request(start))

    def _dealer(self) -> Socket:
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.RECONNECT_IVL, 1)
        client.connect(self._replay)
        return client

    def _small(self, kind: int) -> Socket:
        client = self._context.socket(kind)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 4096)
        return client


KINDS: dict[str, Callable[[Troublemaker], None]] = {
    "stops-reading": Troublemaker.stops_reading,
    "joins": Troublemaker.joins,
    "from-zero": Troublemaker.from_zero,
    "garbage": Troublemaker.garbage,
    "identities": Troublemaker.identities,
    "subscriber-stops": Troublemaker.subscriber_stops,
    "scrapes": Troublemaker.scrapes,
}


def _dealer_that_asks(identity: bytes, start: int) -> bytes:
    """All that a DEALER says to ask for a replay (ZMTP 3.0, NULL), in one piece."""
    greeting = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\5READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        ready += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    delimiter, asked = replay_request(start)
    frames = b"\1" + bytes([len(delimiter)]) + delimiter + b"\0" + bytes([len(asked)]) + asked
    return greeting + b"\4" + bytes([len(ready)]) + ready + frames


def _say(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    KINDS[sys.argv[1]](Troublemaker(*sys.argv[2:5]))
