"""Makes docs/images: what `tail`, `top` and `plot` show of real workers, which run the demo's trace.

Run it as `python docs/screenshots.py [FOLDER]`, with the `demo` and `tools` extras; it takes a minute.
Each command runs as a process, on a terminal of its own. Between the workers and the commands are
forwarders that lose a few messages, as a network may.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Event, Thread

import torch
import zmq
from rich.console import Console
from rich.text import Text

from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.demo.engine import Engine
from publisher.demo.options import ANY_PORT, BUNDLED_TRACE, DemoOptions
from publisher.demo.trace import Request, read_trace
from publisher.tools.source import Capture

IMAGES = Path(__file__).parent / "images"
ROWS = 40
PAGE_SIZE = 16
PATIENCE_S = 60.0
PACE_S = 0.02
"""Between the requests of workers that somebody watches."""
TAIL_EVENTS = 20

KVEVENTS = [sys.executable, "-m", "publisher.cli"]
_NOT_OURS = re.compile(r"\s*@font-face\s*\{.*?\}|<!--.*?-->", re.DOTALL)
"""Fonts of the web, which a picture does without."""
_HEARTBEAT_BYTES = 32
"""Whose batch has more says something."""


class Forwarder:
    """Passes a publisher's messages on, but for some that say something."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.XPUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self.endpoint = self._pub.bind(ANY_PORT).addr
        self._losing = range(0)
        self._seen = 0
        self.subscribed, self._ended = Event(), Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def lose(self, after: int, count: int) -> None:
        """Drop `count` messages, once `after` more were passed on."""
        self._losing = range(self._seen + after, self._seen + after + count)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._sub, self._pub):
            poller.register(socket, zmq.POLLIN)
        while not self._ended.is_set():
            for socket, _ in poller.poll(50):
                message = socket.recv_multipart()
                if socket is self._pub:
                    self.subscribed.set()
                    continue
                says = len(message[-1]) > _HEARTBEAT_BYTES
                if not says or self._seen not in self._losing:
                    self._pub.send_multipart(message)
                self._seen += says
        for socket in (self._sub, self._pub):
            socket.close(linger=0)


class Worker:
    """The demo's engine with a sidecar, and a forwarder before it."""

    def __init__(
        self,
        requests: Iterator[tuple[int, Request]],
        pages: tuple[int, int],
        folder: Path | None = None,
    ) -> None:
        self._requests = requests
        self._stack = contextlib.ExitStack()
        options = DemoOptions(
            trace=str(BUNDLED_TRACE),
            requests=1,
            device_pages=pages[0],
            host_pages=pages[1],
            storage="file" if folder else "none",
            storage_dir=str(folder or ""),
            mooncake_master="",
            write_policy="write_through",
            page_size=PAGE_SIZE,
            endpoint=ANY_PORT,
            replay_endpoint=ANY_PORT,
            movable=(),
            as_json=False,
        )
        self._engine = Engine(options)
        self._stack.callback(self._engine.close)
        sink = SinkConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, heartbeat_s=1.0)
        config = SidecarConfig(sinks=(sink,), persist="none")
        self._sidecar = self._stack.enter_context(spawn(WorkerInfo(block_size=PAGE_SIZE), config))
        bound = self._sidecar.client.sinks[0]
        assert bound.replay_endpoint is not None
        self.forwarder = Forwarder(bound.endpoint)
        self._stack.callback(self.forwarder.close)
        self.replay_port = bound.replay_endpoint.rpartition(":")[2]

    def serve(self) -> None:
        """One request from beginning to end, and a batch that tells of it."""
        one = islice(self._requests, 1)
        while self._engine.step(one):
            pass
        self._sidecar.pump(self._engine.cache)

    def step(self) -> bool:
        """Let the engine go on with several; whether any request is left."""
        left = self._engine.step(self._requests)
        self._sidecar.pump(self._engine.cache)
        return left

    def settle(self) -> None:
        """Until all is copied and told."""
        while not self._engine.cache.settle(0.05):
            self._sidecar.pump(self._engine.cache)
        assert self._sidecar.client.flush(self._engine.cache, PATIENCE_S)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --------------------------------------------------------------------------------------- commands


def picture(arguments: Sequence[str], columns: int, go_on: Callable[[], object]) -> str:
    """An SVG of a terminal in which a command runs. `go_on` is called again and again until it ends.

    It refers to nothing outside; whoever has no such font has another.
    """
    written = on_terminal(arguments, columns, go_on)
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ kvevents {' '.join(arguments)}", style="bold"))
    console.print(Text.from_ansi(written.rstrip("\n")))
    name = arguments[0]
    return _NOT_OURS.sub("", console.export_svg(title=f"kvevents {name}", unique_id=name))


def on_terminal(arguments: Sequence[str], columns: int, go_on: Callable[[], object]) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the last who had it open is gone
            while data := os.read(ours, 65536):
                written.extend(data)

    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*KVEVENTS, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        reader = Thread(target=read)
        reader.start()
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"{arguments[0]} did not end: {written.decode()}")
            go_on()
        reader.join()
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


# ----------------------------------------------------------------------------------------- images


def tail_and_top(requests: Sequence[Request]) -> Iterator[tuple[str, str]]:
    """Two workers of a fleet. One has a replay endpoint; what the other loses is lost."""
    with (
        Worker(enumerate(requests[0::2]), (512, 1024)) as one,
        Worker(enumerate(requests[1::2]), (640, 1280)) as two,
    ):
        workers = (one, two)
        sources = [f"w1={one.forwarder.endpoint},{one.replay_port}", f"w2={two.forwarder.endpoint}"]

        def serve() -> None:
            for worker in workers:
                worker.serve()
                time.sleep(PACE_S)

        def serve_if_watched() -> None:
            if all(worker.forwarder.subscribed.is_set() for worker in workers):
                serve()
            else:
                time.sleep(PACE_S)

        for _ in range(100):  # until blocks are removed, too
            serve()
        for worker in workers:
            worker.forwarder.lose(after=1, count=1)
        arguments = ["tail", *sources, "--from", "live", "-n", str(TAIL_EVENTS)]
        yield "tail.svg", picture(arguments, 100, serve_if_watched)
        for worker in workers:
            worker.forwarder.lose(after=20, count=2)
        arguments = ["top", *sources, "--once", "--for", "6"]
        yield "top.svg", picture(arguments, 132, serve)


def recorded(folder: Path, requests: Sequence[Request]) -> Path:
    """A capture of a worker whose tiers are too small for the trace."""
    file = folder / "worker.capture"
    with Worker(enumerate(requests), (2048, 6144), folder / "store") as worker:
        source = f"{worker.forwarder.endpoint},{worker.replay_port}"
        recorder = subprocess.Popen([*KVEVENTS, "record", source, "-w", str(file)])
        try:
            await_replay(file)
            worker.forwarder.lose(after=150, count=3)
            while worker.step():
                pass
            worker.settle()
            time.sleep(1.0)  # a heartbeat, after which all has come
        finally:
            recorder.send_signal(signal.SIGINT)
            recorder.wait(PATIENCE_S)
    return file


def await_replay(file: Path) -> None:
    """Until the recorder has the state, and so is there for what follows."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if file.exists() and any(one.ends_replay for one in Capture(file).messages()):
            return
        time.sleep(0.05)
    raise TimeoutError("the recorder did not come to the end of a replay")


def main() -> None:
    """Write them all, each once it is there."""
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    images.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    requests = read_trace(BUNDLED_TRACE, 6000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for image, drawn in tail_and_top(requests):
            (images / image).write_text(drawn)
        file = recorded(folder, requests[:1500])
        subprocess.run(
            [*KVEVENTS, "plot", file.name, "-o", str((images / "plot.png").absolute())],
            check=True,
            cwd=folder,
        )


if __name__ == "__main__":
    main()
