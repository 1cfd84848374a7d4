"""Between a publisher and its subscriber: passes live messages on, or loses them, as a test says."""

from __future__ import annotations

import threading
from typing import Self

import zmq
from interop_waiting import LOOPBACK, wait_until

__all__ = ["Forwarder"]

_POLL_MS = 20
_SEQ = 1
"""The frame with the seq."""


class Forwarder:
    """A context manager. `endpoint`: where to subscribe. Requests for replays do not come by here."""

    def __init__(self, upstream: str) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._upstream = upstream
        self._losing, self._stop = threading.Event(), threading.Event()
        self._last = -1
        self.num_lost = 0
        """Messages so far."""
        self._backend = self._context.socket(zmq.XPUB)
        self._backend.setsockopt(zmq.LINGER, 0)
        port = self._backend.bind_to_random_port(f"tcp://{LOOPBACK}")
        self.endpoint = f"tcp://{LOOPBACK}:{port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lose(self) -> None:
        """Lose all that comes, until `restore`."""
        self._losing.set()

    def restore(self, next_seq: int) -> None:
        """Pass on again, once all before `next_seq` have come by."""
        assert wait_until(lambda: self._last >= next_seq - 1), f"it came to {self._last}"
        self._losing.clear()

    def _run(self) -> None:
        with self._context.socket(zmq.SUB) as frontend, self._backend:
            frontend.setsockopt(zmq.LINGER, 0)
            frontend.setsockopt(zmq.RCVHWM, 0)
            frontend.setsockopt(zmq.RECONNECT_IVL, 10)
            frontend.setsockopt(zmq.SUBSCRIBE, b"")
            frontend.connect(self._upstream)
            while not self._stop.is_set():
                while self._backend.poll(0):
                    self._backend.recv()  # who subscribes, or leaves
                if frontend.poll(_POLL_MS):
                    self._pass_on(frontend.recv_multipart())

    def _pass_on(self, frames: list[bytes]) -> None:
        if self._losing.is_set():
            self.num_lost += 1
        else:
            self._backend.send_multipart(frames)
        self._last = int.from_bytes(frames[_SEQ], "big")

    def close(self) -> None:
        """Safe to call twice."""
        self._stop.set()
        self._thread.join()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
