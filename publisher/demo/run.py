"""The demo's parent: starts worker, tail and router, and compares what they say at the end."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from publisher.demo.folder import temporary_folder
from publisher.demo.mooncake import MasterError, master
from publisher.demo.options import DemoOptions
from publisher.demo.report import bar, difference, json_summary, text_summary
from publisher.demo.trace import read_trace

__all__ = ["run_demo"]

_TAIL_LINES = 8
_END_S = 1.0
_SIDECAR_END_S = 5.0
"""It ends by itself when the worker has; a next demo may want its ports."""
_SILENCE_S = 120.0

Line = dict[str, Any]


class DemoError(Exception):
    """A child said why it cannot go on."""


def run_demo(options: DemoOptions) -> int:
    """Run it; the exit code: 0 when the router's view equals the cache, 1 when not, 2 for bad input.

    Raises TraceError.
    """
    options = msgspec.structs.replace(
        options, requests=len(read_trace(Path(options.trace), options.requests))
    )
    try:
        with _store_of(options) as settled:
            demo = _Demo(settled)
            try:
                worker, router = demo.run()
            finally:
                demo.end()
    except (DemoError, MasterError) as error:
        print(f"kvevents demo: {error}", file=sys.stderr)
        return 2
    summary = json_summary(worker, router)
    if options.as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        print()
        for line in text_summary(summary, options.buffer_steps):
            print(line)
    if summary["view_equal"] and not summary["wrong_pages"] and not summary["violations"]:
        return 0
    problems = [*summary["violations"]]
    if summary["wrong_pages"]:
        problems.append(f"{summary['wrong_pages']} pages did not hold what their prefix makes them")
    if router is not None:
        problems += difference(worker["blocks"], router["view"])
    for line in problems:
        print(line, file=sys.stderr)
    return 1


@contextlib.contextmanager
def _store_of(options: DemoOptions) -> Iterator[DemoOptions]:
    """The options with a store that is there; one that nobody asked for goes away afterwards."""
    if options.storage == "file" and not options.storage_dir:
        with temporary_folder() as folder:
            yield msgspec.structs.replace(options, storage_dir=str(folder))
    elif options.storage == "mooncake" and not options.mooncake_master:
        with master() as address:
            yield msgspec.structs.replace(options, mooncake_master=address)
    else:
        yield options


class _Child:
    """A child process that prints lines. In a session of its own: Ctrl-C reaches the parent alone,
    and the end of its stdin, however that comes, is the child's end.
    """

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

        self._partial = b""

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> list[bytes] | None:
        """The lines that have come, when the pipe is readable; None at its end."""
        data = os.read(self.stdout.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Safe to call twice."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stdout.close()


class _Demo:
    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._progress = _Progress(options)
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._worker = self._start("publisher.demo.worker")
        self._router: _Child | None = None
        self._tail: _Child | None = None
        self._unread: deque[tuple[_Child, Line | None]] = deque()
        self._router_ended = False
        self._sidecar = 0

    def run(self) -> tuple[Line, Line | None]:
        """What the worker and the router say at the end; None for a router that ended before."""
        self._worker.tell(self._options)
        endpoints = self._await_endpoints()
        self._progress.say(f"publishes on {endpoints[0]}, replays on {endpoints[1]}")
        self._start_tail(*endpoints)
        ended: Line | None = None
        view: Line | None = None
        while ended is None or (view is None and not self._router_ended):
            child, line = self._next()
            match line:
                case {"failed": reason}:
                    raise DemoError(reason)
                case {"requests": done, "batches": batches}:
                    self._progress.show(done)
                    halfway = (
                        batches > self._options.buffer_steps and done * 2 > self._options.requests
                    )
                    if self._router is None and (halfway or done == self._options.requests):
                        self._router = self._start("publisher.demo.router", *endpoints)
                case {"summary": _, "next_seq": next_seq}:
                    ended = line
                    assert self._router is not None
                    self._router.tell({"until": next_seq})
                case {"view": _}:
                    view = line
                case {"joined": seq}:
                    self._progress.say(f"router joined at seq {seq}")
                case None if child is self._worker:
                    raise DemoError(f"the worker ended with {child.process.wait()}")
                case _:
                    pass
        self._progress.finish()
        self._worker.tell("end")
        return ended, view

    def end(self) -> None:
        """End every child, and see the sidecar end. Safe to call twice."""
        self._progress.finish()
        for child in self._children:
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
        for child in self._children:
            child.end()
        if self._sidecar:
            _await_end(self._sidecar, _SIDECAR_END_S)
            self._sidecar = 0
        self._selector.close()

    def _start(self, *arguments: str) -> _Child:
        child = _Child(*arguments)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        return child

    def _start_tail(self, endpoint: str, replay_endpoint: str) -> None:
        if not self._options.as_json:
            self._tail = self._start(
                *("publisher.demo.tail", endpoint, "--replay-endpoint", replay_endpoint),
                *("--count", str(_TAIL_LINES)),
            )

    def _await_endpoints(self) -> tuple[str, str]:
        """Where the sidecar listens, once it does."""
        while True:
            child, line = self._next()
            match line:
                case {"endpoint": endpoint, "replay_endpoint": replay_endpoint}:
                    return endpoint, replay_endpoint
                case {"failed": reason}:
                    raise DemoError(reason)
                case None if child is self._worker:
                    raise DemoError(f"the worker ended with {child.process.wait()}")

    def _next(self) -> tuple[_Child, Line | None]:
        """The next line of a child; None for the end of one. Prints the tail's."""
        deadline = time.monotonic() + _SILENCE_S
        while not self._unread:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DemoError(f"no word from worker or router for {_SILENCE_S:.0f} s")
            for key, _ in ready:
                self._read(key.data)
        return self._unread.popleft()

    def _read(self, child: _Child) -> None:
        lines = child.read()
        if lines is None:
            self._selector.unregister(child.stdout)
            self._router_ended |= child is self._router
            self._unread.append((child, None))
            return
        for line in lines:
            if child is self._tail:
                self._progress.say(line.decode(errors="replace"))
            else:
                said: Line = msgspec.json.decode(line)
                self._sidecar = said.get("sidecar", self._sidecar)
                self._unread.append((child, said))


def _await_end(pid: int, timeout_s: float) -> None:
    """Wait, so long at most, for the end of a process that is no child of this one."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([process], [], [], timeout_s)
    finally:
        os.close(process)


class _Progress:
    """A bar on stderr when that is a terminal; lines above it on stdout."""

    def __init__(self, options: DemoOptions) -> None:
        self._total = None if options.loop else options.requests
        self._quiet = options.as_json
        self._drawn = False

    def show(self, done: int) -> None:
        if sys.stderr.isatty():
            shown = f"{done:,} requests" if self._total is None else bar(done, self._total)
            print(f"\r{shown}", end="", file=sys.stderr, flush=True)
            self._drawn = True

    def say(self, line: str) -> None:
        if not self._quiet:
            self._wipe()
            print(line, flush=True)

    def finish(self) -> None:
        if self._drawn:
            print(file=sys.stderr)
            self._drawn = False

    def _wipe(self) -> None:
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
