"""JSON lines between a test and a process of another environment: `JsonChild` there, `serve` here.

Bytes travel as {"$hex": "…"}. Standard library only, on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from interop_process import HERE, Child, ChildExited

__all__ = ["Handler", "JsonChild", "RemoteError", "claim_stdout", "dumps", "loads", "serve"]

Handler = Callable[..., Any]


class RemoteError(RuntimeError):
    """A handler in the child raised; the message is "Type: text"."""


def dumps(value: Any) -> str:
    """`value` as one line."""
    return json.dumps(value, default=_encode_bytes)


def loads(text: str | bytes) -> Any:
    """What `dumps` made a line of."""
    return json.loads(text, object_hook=_decode_bytes)


def _encode_bytes(value: Any) -> dict[str, str]:
    if isinstance(value, bytes | bytearray):
        return {"$hex": value.hex()}
    raise TypeError(f"{type(value).__name__} does not go over JSON")


def _decode_bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["$hex"]) if value.keys() == {"$hex"} else value


# ------------------------------------------------------------------------------- the test's side


class JsonChild(Child):
    """A child that answers one JSON line per JSON line. `ready`: what it said when it was."""

    def __init__(
        self,
        python: Path,
        module: str,
        config: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        folders: Sequence[Path] = (HERE,),
        ready_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(python, module, [dumps(config)], env=env, folders=folders, piped=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._unread = b""
        self._asked = 0
        try:
            self.ready = self._answer("to get ready", time.monotonic() + ready_timeout_s)
        except BaseException:
            self.stop()
            raise

    def ask(self, op: str, *, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """Run handler `op` in the child. Raises RemoteError, ChildExited or TimeoutError."""
        if not self.running():
            raise self.failure(f"cannot be asked to {op}")
        what, deadline = f"to {op}", time.monotonic() + timeout_s
        self._asked += 1
        self._write_line(dumps({"op": op, "id": self._asked, **arguments}), what, deadline)
        return self._answer(what, deadline)

    def _answer(self, what: str, deadline: float) -> Any:
        while (reply := loads(self._read_line(what, deadline)))["id"] != self._asked:
            pass  # the late answer to a question that timed out
        if "error" in reply:
            raise RemoteError(reply["error"])
        return reply["ok"]

    def _write_line(self, line: str, what: str, deadline: float) -> None:
        unsent = line.encode() + b"\n"
        while unsent:
            if not _ready(self._requests, select.POLLOUT, deadline):
                raise TimeoutError(str(self.failure(f"took too long to be asked {what}")))
            try:
                unsent = unsent[os.write(self._requests, unsent) :]
            except BrokenPipeError as gone:
                raise self._ended(what) from gone

    def _read_line(self, what: str, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            if not _ready(self._answers, select.POLLIN, deadline):
                raise TimeoutError(str(self.failure(f"took too long {what}")))
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise self._ended(what)
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self, what: str) -> ChildExited:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        return self.failure(f"ended when asked {what}")


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    """Wait until a pipe can be read or written, or is closed at the other end."""
    watch = select.poll()
    watch.register(descriptor, event)
    return bool(watch.poll(max(0, int((deadline - time.monotonic()) * 1000))))


# ------------------------------------------------------------------------------ the child's side


def claim_stdout() -> TextIO:
    """Keep stdout for answers; whatever else writes to it goes to the log instead."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


async def serve(answers: TextIO, handlers: Mapping[str, Handler], ready: Any = None) -> None:
    """Answer until stdin ends. Handlers are functions or coroutines taking keyword arguments."""
    loop = asyncio.get_running_loop()
    answers.write(dumps({"id": 0, "ok": ready}) + "\n")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = loads(line)
        reply = {"id": request.pop("id")}
        try:
            result = handlers[request.pop("op")](**request)
            reply["ok"] = await result if inspect.isawaitable(result) else result
        except Exception as error:
            traceback.print_exc()
            reply["error"] = f"{type(error).__name__}: {error}"
        answers.write(dumps(reply) + "\n")
