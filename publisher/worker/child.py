"""A sidecar's process, as its worker sees it: its end, and what it logs.

It is in a session of its own: a Ctrl-C at the terminal ends it through its worker. It ends when it
sees its worker's end, so nothing here has to outlive this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from publisher.config.sidecar_config import SidecarConfig

__all__ = ["MAX_LINE_BYTES", "Child", "LogLine", "LogLines", "serve"]

MAX_LINE_BYTES = 8192
_READ_BYTES = 65536
_READS = 16  # in one turn

_decode_line = msgspec.json.Decoder(dict[str, object]).decode


def serve(link: Path, config: SidecarConfig) -> Child:
    """Start a sidecar that connects at `link`. Raises OSError."""
    module = ["-P", "-m", "publisher.cli"]  # -P: not a folder of that name in the working directory
    command = [sys.executable, *module, "serve", "--link", str(link), "--config", "-"]
    return Child(command, msgspec.json.encode(msgspec.structs.replace(config, log_format="json")))


class LogLine(msgspec.Struct, frozen=True):
    """What a child logged. `fields`: all that its line says; none for a line of no known form."""

    level: str
    message: str
    fields: dict[str, object]


class LogLines:
    """Bytes to lines, each of a bounded length: of a longer one the beginning is kept."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[LogLine]:
        """The lines that end in `data`."""
        first, *others = data.split(b"\n")
        lines = [self._begun + first, *others]
        self._begun = lines.pop()[:MAX_LINE_BYTES]
        return [parse_line(line[:MAX_LINE_BYTES]) for line in lines if line.strip()]

    def end(self) -> list[LogLine]:
        """The line that was begun and not ended."""
        return self.feed(b"\n")


def parse_line(line: bytes) -> LogLine:
    """A line of JSON with `level` and `message`; any other is a warning."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = _decode_line(line)
        level, message = fields.get("level"), fields.get("message")
        if isinstance(level, str) and isinstance(message, str):
            return LogLine(level.upper(), message, fields)
    return LogLine("WARNING", line.decode(errors="backslashreplace").rstrip(), {})


class Child:
    """One run of a command that logs to its standard error. One thread uses it."""

    def __init__(self, command: Sequence[str], settings: bytes = b"") -> None:
        """Start it; it reads `settings` from its standard input. Raises OSError."""
        with _open_memory(settings) as stdin:
            self._log, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            # Neither end waits: a worker that is stopped does not stop its sidecar's log, nor that it.
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=theirs,
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._log)
                raise
            finally:
                os.close(theirs)
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended, and someone has waited for it
            self._pidfd = -1
        except OSError:
            self._process.kill()
            self._process.wait()
            self._close_log()
            raise
        self._lines = LogLines()

    def watched(self) -> list[int]:
        """Descriptors that are readable when there is something to do."""
        return [fd for fd in (self._pidfd, self._log) if fd >= 0]

    def returncode(self) -> int | None:
        """How it ended; None while it has not."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """As `returncode`, once it has ended, or the time is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def read_log(self) -> list[LogLine]:
        """What it has logged since, a bounded part of it."""
        lines: list[LogLine] = []
        for _ in range(_READS):
            if self._log < 0:
                break
            try:
                data = os.read(self._log, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._close_log()
                lines += self._lines.end()
                break
            lines += self._lines.feed(data)
        return lines

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def close_copies(self) -> None:
        """Let go of the descriptors."""
        self._close_log()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_log(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


@contextlib.contextmanager
def _open_memory(data: bytes) -> Iterator[int]:
    """A file in memory, to be read from its start: writing it does not wait for a reader."""
    fd = os.memfd_create("kvevents-config", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
