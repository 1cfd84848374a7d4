"""What the tests of publisher share: caches that tell, links, publishers by hand, and /proc."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event as Flag
from types import TracebackType

import zmq

from hicache import HiRadixCache, KVShape, PagePool
from kvevents import BASE, BlockIndex, Event, KVEventBatch, Namespace, encode_batch
from kvevents.frames import (
    live_frames,
    parse_replay_request,
    replay_answer,
    replay_end,
)
from publisher import Batch, Received, Subscriber

__all__ = [
    "ENVIRONMENT",
    "LOOPBACK",
    "PATIENCE_S",
    "RawPublisher",
    "children_of",
    "eventually",
    "few_descriptors",
    "insert",
    "kill",
    "kvevents",
    "make_cache",
    "open_fds",
    "payload_of",
    "receive_until",
    "router_view",
    "running",
    "short_folder",
    "start_kvevents",
    "still_running",
    "tagged",
]

PATIENCE_S = 20.0
"""How long to wait for what must come; a test that needs it all has failed."""

LOOPBACK = "tcp://127.0.0.1:0"

LOOK_UP_S = 0.02
"""How long a subscriber may wait for a batch before its state is looked at: END brings none."""

Socket = zmq.Socket[bytes]


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a unix socket's name, which pytest's may not."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------- caches


def make_cache(num_pages: int = 64, page_size: int = 4) -> HiRadixCache:
    """A cache over real pages, as small as they get."""
    return HiRadixCache(PagePool(num_pages, page_size, KVShape(1, 1, 1)))


def insert(cache: HiRadixCache, tokens: Sequence[int], namespace: Namespace = BASE) -> None:
    """One request: match, allocate (which may evict), insert."""
    match = cache.match_prefix(tokens, namespace)
    cache.lock(match.node)
    pages = cache.allocate(len(tokens) // cache.page_size - match.num_pages)
    if pages is not None:
        found = cache.insert(tokens, pages, namespace, first_page=match.num_pages)
        cache.free(pages[: found.num_existing - match.num_pages])
    cache.unlock(match.node)


# ----------------------------------------------------------------------------- a publisher by hand


def payload_of(*events: Event, ts: float = 1.0) -> bytes:
    """A payload that says `events`."""
    return encode_batch(KVEventBatch(ts, list(events), 0))


class RawPublisher:
    """An engine's publisher in the test's hands: it says what it is told to, and nothing else."""

    def __init__(self) -> None:
        self._context = zmq.Context[Socket]()
        self.pub = self._context.socket(zmq.XPUB)
        self.router = self._context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.pub.setsockopt(zmq.SNDHWM, 0)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint, self.replay_endpoint = (
            socket.bind(LOOPBACK).addr for socket in (self.pub, self.router)
        )

    def await_subscriber(self, verb: bytes = b"\1") -> None:
        """Until someone has subscribed (or, for 0, unsubscribed)."""
        assert self.pub.poll(int(PATIENCE_S * 1000)), "nobody subscribed"
        assert self.pub.recv()[:1] == verb

    def publish_at_the_replay_endpoint(self) -> None:
        """In the place of the socket that answers replays."""
        self.router.close(linger=0)
        self.publish_at(self.replay_endpoint)

    def publish_at(self, endpoint: str) -> None:
        """There too."""
        deadline = time.monotonic() + PATIENCE_S
        while True:  # another thread of libzmq's lets go of the port
            try:
                self.pub.bind(endpoint)
                return
            except zmq.ZMQError:
                assert time.monotonic() < deadline

    def live(self, seq: int, *events: Event, payload: bytes | None = None) -> None:
        """Publish a batch."""
        told = payload_of(*events) if payload is None else payload
        self.pub.send_multipart(live_frames(b"", seq, told))

    def request(self) -> tuple[bytes, int]:
        """The next replay request: who asks, and from which seq."""
        assert self.router.poll(int(PATIENCE_S * 1000)), "nobody asked for a replay"
        identity, *frames = self.router.recv_multipart()
        return identity, parse_replay_request(frames).start

    def answer(
        self, client: bytes, seq: int, *events: Event, delimited: bool = True, topic: bytes = b""
    ) -> None:
        """One batch of a replay."""
        frames = replay_answer(topic, seq, payload_of(*events), delimited=delimited)
        self.router.send_multipart([client, *frames])

    def end(self, client: bytes, *, delimited: bool = True) -> None:
        """The end of a replay."""
        self.router.send_multipart([client, *replay_end(delimited=delimited)])

    def __enter__(self) -> RawPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)
        self._context.term()


def receive_until(subscriber: Subscriber, done: Callable[[list[Received]], bool]) -> list[Received]:
    """All that is received until `done` says that it is enough."""
    deadline = time.monotonic() + PATIENCE_S
    received: list[Received] = []
    while not done(received):
        assert time.monotonic() < deadline, f"this is all that came: {received}"
        received += subscriber.receive(LOOK_UP_S)
    return received


def router_view(endpoint: str, replay_endpoint: str | None, until: int) -> BlockIndex:
    """What a router that joins now believes once it has seen every batch before `until`."""
    index = BlockIndex()
    with Subscriber(endpoint, replay_endpoint) as subscriber:
        deadline = time.monotonic() + PATIENCE_S
        while subscriber.recovering or (subscriber.next_seq or 0) < until:
            assert time.monotonic() < deadline, f"it came to {subscriber.next_seq}, not {until}"
            for one in subscriber.receive(LOOK_UP_S):
                assert isinstance(one, Batch), one
                index.apply(one.batch.events)
    return index


# -------------------------------------------------------------------------------------- processes


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""A user's: output to a pipe is buffered."""


def kvevents(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "publisher.cli", *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )


@contextlib.contextmanager
def start_kvevents(
    tag: str, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start the command; whatever bears its tag is ended when the test is over."""
    process = subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment, "KVEVENTS_TEST": _mark(tag)},
    )
    try:
        yield process
    finally:
        process.kill()
        for pid in tagged(tag):
            kill(pid)
        process.communicate()


def tagged(tag: str) -> dict[int, str]:
    """The processes that were started, however far down, with this tag: pid and command line."""
    mark = f"KVEVENTS_TEST={_mark(tag)}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = _command(entry)
    return {pid: command for pid, command in found.items() if command}


def _mark(tag: str) -> str:
    """No other run of the tests on this machine has it."""
    return f"{tag} {os.getpid()}"


def children_of(pid: int) -> dict[int, str]:
    """The live children of a process: pid and command line."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    found[int(child)] = _command(Path(f"/proc/{child}"))
    return {child: command for child, command in found.items() if command}


def running(processes: dict[int, str], part: str) -> int | None:
    """The process whose command line has `part` in it."""
    return next((pid for pid, command in processes.items() if part in command), None)


def eventually(look: Callable[[], int | None]) -> int:
    """What `look` finds before long. For /proc, which tells nobody that it has changed."""
    deadline, pause = time.monotonic() + PATIENCE_S, Flag()
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it did not come"
        pause.wait(0.02)
    return found


def still_running(pids: Iterable[int], timeout_s: float) -> set[int]:
    """Wait for processes to end, at most `timeout_s` for all of them; those that did not."""
    left: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            left[os.pidfd_open(pid)] = pid
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    for fd in left:
        poller.register(fd, select.POLLIN)
    while left:
        ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            break
        for fd, _ in ended:
            poller.unregister(fd)
            os.close(fd)
            del left[fd]
    for fd in left:
        os.close(fd)
    return set(left.values())


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def open_fds() -> set[str]:
    """What this process has open, by number and kind."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return found


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process can open only `spare` more; it has fewer than 200."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for fd in taken[:spare]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken[spare:]:
            os.close(fd)


def _command(entry: Path) -> str:
    return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
