"""What the tests of the link's life share: a sidecar by hand, workers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import TracebackType

from publisher_rig import PATIENCE_S, eventually, kill, short_folder

from kvevents import BASE, BlockIndex, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarClient, WorkerInfo
from publisher.link.messages import (
    VERSION,
    ControlMessage,
    Failed,
    Hello,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.link.ring import Message, RingReader
from publisher.sidecar.source import LinkSource
from publisher.stream.replica import Replica, Told

__all__ = ["Follower", "Link", "Peer", "Refused", "store", "until", "worker_running"]

FAKE_SIDECAR = str(Path(__file__).with_name("publisher_fake_sidecar.py"))


class Refused(Exception):
    """The worker said why."""


class Peer:
    """A sidecar by hand, in this process, at a link that is attended."""

    def __init__(self, path: Path, *, pid: int = 0, ready: bool = True) -> None:
        """Raises Refused when the worker says so."""
        self.ring: RingReader | None = None
        self.fds: list[int] = []
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.connection.settimeout(PATIENCE_S)
            self.connection.connect(str(path))
            send(self.connection, Hello(VERSION, pid or os.getpid()))
            message, self.fds = receive(self.connection)
            if isinstance(message, Failed):
                raise Refused(message.reason)
            assert isinstance(message, Welcome), message
            self.welcome = message
            self.ring = RingReader(self.fds[0])
            if ready:
                send(self.connection, Ready((), "http://127.0.0.1:1"))
        except BaseException:
            self.close()
            raise

    def messages(self) -> list[Message]:
        """All there is in the ring, let go of."""
        assert self.ring is not None
        found = []
        while (message := self.ring.read()) is not None:
            found.append(message)
        self.ring.release()
        return found

    def numbers(self) -> list[int]:
        """Those of all there is in the ring."""
        return [message.number for message in self.messages()]

    def hear(self) -> ControlMessage | None:
        """What the worker says next; None once it is gone."""
        message, fds = receive(self.connection)
        assert not fds
        return message

    def close(self) -> None:
        """Leave."""
        self.connection.close()
        if self.ring is not None:
            self.ring.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Follower:
    """The sidecar's end of a link in this process: its source, and what that makes it believe."""

    def __init__(self, path: Path) -> None:
        self.link = LinkSource(path, timeout_s=PATIENCE_S)
        self.replica = Replica(self.link.worker)
        self.stats = self.replica.counts

    @property
    def in_step(self) -> bool:
        """Whether nothing is missing."""
        return self.replica.in_step

    def take(self, most: int) -> tuple[list[Told], bool]:
        """What at most `most` messages mean, and whether there may be more; asks for a resync."""
        before = self.stats.resyncs
        inputs, more = self.link.read(most)
        told = [one for given in inputs if (one := self.replica.apply(given)) is not None]
        self.link.release()
        if self.stats.resyncs != before:
            self.link.ask_resync(self.replica.last_loss)
        return told, more

    def answer_flushes(self, next_seqs: tuple[int, ...]) -> None:
        """Answer those whose messages have all been taken."""
        self.link.answer_flushes(
            self.replica.expected,
            next_seqs,
            in_step=self.in_step,
            num_events=self.stats.events,
        )

    def close(self) -> None:
        """Safe to call twice."""
        self.link.close()


class Link:
    """Both ends of a link in this process, past the handshake; one thread may use both by turns.

    Nobody attends the worker's end: when the sidecar has gone, no other is awaited.
    """

    def __init__(
        self, block_size: int = 4, ring_bytes: int = 1 << 16, retell_interval_s: float = 0
    ) -> None:
        with short_folder() as folder:
            worker = WorkerInfo(block_size=block_size, dp_rank=3, worker_id="w")
            self.client = SidecarClient(
                folder / "link", worker, ring_bytes=ring_bytes, retell_interval_s=retell_interval_s
            )
            sources: list[Follower] = []

            def connect() -> None:
                sources.append(Follower(folder / "link"))
                sources[0].link.ready(Ready(()))

            thread = Thread(target=connect)
            thread.start()
            self.pid = self.client.accept(time.monotonic() + PATIENCE_S)
            thread.join()
        self.source = sources[0]
        self.index = BlockIndex()

    def take(self, most: int = 1_000_000) -> int:
        """Let the source take messages and the router apply them; how many were told."""
        told, _ = self.source.take(most)
        for one in told:
            self.index.apply(one.events)
        return len(told)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self.source.close()


def until(look: Callable[[], object]) -> None:
    """Until another thread has done what `look` looks at."""
    eventually(lambda: 1 if look() else None)


def store(first: int, count: int = 1) -> StoreNew:
    """Blocks of four tokens each that start prompts."""
    tokens = b"".join((4 * first + i).to_bytes(4, "little") for i in range(4 * count))
    return StoreNew(StorageMedium.GPU, BlockId(first), count, None, BASE, tokens)


@contextlib.contextmanager
def worker_running(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script`, ended when the test is over."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    try:
        yield process
    finally:
        kill(process.pid)
        process.communicate()
