"""The sidecar's log: one line a message, text or JSON, to a stream that may be full or gone.

Nobody need read the stream. A line for which there is no room now is dropped and counted, and the next
that finds room is preceded by one that says so; the loop never waits for a reader.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import stat
import sys
import time
from collections import OrderedDict
from typing import Any, Literal, Protocol, TypeAlias

__all__ = ["LOGGER", "LineHandler", "Throttle", "configure", "fields"]

LOGGER = "kvevents"

_LINE_BYTES = select.PIPE_BUF  # a pipe takes so much whole or not at all
_CUT = b"..."
_TRACE_LENGTH = 2000  # its end says most
_KEYS = 256

Level: TypeAlias = Literal["debug", "info", "warning", "error"]


class HasFileno(Protocol):
    """What a log can go to."""

    def fileno(self) -> int: ...


def configure(
    log_format: Literal["text", "json"] = "text",
    level: Level = "info",
    stream: HasFileno | None = None,
) -> LineHandler:
    """Send what `kvevents` loggers say to `stream` (None: stderr), and nowhere else.

    What an earlier call set is replaced. `handler.dropped` counts the lines that found no room.
    """
    handler = LineHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logger = logging.getLogger(LOGGER)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For `extra=`: what a JSON line has as keys of its own, and a text line as key=value."""
    return {"fields": values}


class LineHandler(logging.Handler):
    """Writes lines without waiting and without ever raising."""

    def __init__(self, stream: HasFileno | None) -> None:
        super().__init__()
        self.dropped = 0
        """Lines that found no room, since the start."""
        self._untold = 0
        self._fd, self._owned = _open(stream)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or count it as dropped."""
        try:
            line = _line(self.format(record))
            if self._untold and self._write(_line(self.format(self._notice()))):
                self._untold = 0
            written = not self._untold and self._write(line)
        except Exception:  # a message that cannot be formatted costs only itself
            written = False
        if not written:
            self.dropped += 1
            self._untold += 1

    def close(self) -> None:
        """Safe to call twice."""
        super().close()
        if self._owned and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _notice(self) -> logging.LogRecord:
        told = {
            "name": LOGGER,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"{self._untold} log lines found no room and were dropped",
        }
        return logging.makeLogRecord(told)

    def _write(self, line: bytes) -> bool:
        if self._fd < 0:
            return False
        try:
            room = select.poll()
            room.register(self._fd, select.POLLOUT)
            if not any(events & select.POLLOUT for _, events in room.poll(0)):
                return False
            return os.write(self._fd, line) > 0
        except OSError:
            return False


def _open(stream: HasFileno | None) -> tuple[int, bool]:
    """A descriptor for the stream, and whether it is ours to close; -1 for one that is closed.

    A pipe is opened anew: not to wait is a mark on the open file, and others may share this one. Between
    looking for room and writing they might take it.
    """
    try:
        if stream is None:  # what Python leaves of a stderr that was closed at the start
            return -1, False
        fd = stream.fileno()
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                return os.open(f"/proc/self/fd/{fd}", flags), True
        return fd, False
    except (OSError, ValueError):
        return -1, False


def _line(text: str) -> bytes:
    line = text.encode(errors="backslashreplace")
    if len(line) >= _LINE_BYTES:
        line = line[: _LINE_BYTES - len(_CUT) - 1].decode(errors="ignore").encode() + _CUT
    return line + b"\n"


class _TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO kvevents.sidecar message key=value."""

    def format(self, record: logging.LogRecord) -> str:
        told = [_time(record), record.levelname, record.name, _printable(record.getMessage())]
        told += [f"{key}={_printable(str(value))}" for key, value in _fields(record).items()]
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            told.append(_printable(trace[-_TRACE_LENGTH:]))
        return " ".join(told)


class _JsonFormatter(logging.Formatter):
    """An object with ts, level, logger, message, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            **_fields(record),
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)[-_TRACE_LENGTH:]
        line = json.dumps(told, default=str)
        length = _TRACE_LENGTH
        while len(line) >= _LINE_BYTES:  # cut where it stays an object
            kept = {key: told[key] for key in ("ts", "level", "logger")}
            kept["message"] = told["message"][:length] + _CUT.decode()
            if record.exc_info:
                kept["exception"] = told["exception"][-length:]
            line = json.dumps(kept)
            length //= 2
        return line


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    values: dict[str, Any] = getattr(record, "fields", {})
    return values


def _printable(text: str) -> str:
    """`text` on one line: what could break the line, or steer a terminal, is spelled out."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


class Throttle:
    """One line for each key and interval; the others are counted. Keeps the newest keys only."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._keys: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, key: str, now: float) -> int | None:
        """How many were held back since the last one that went; None: hold this one back too.

        `now` is monotonic.
        """
        again_at, held_back = self._keys.get(key, (now, 0))
        if now < again_at:
            self._keys[key] = again_at, held_back + 1
            return None
        self._keys[key] = now + self._interval_s, 0
        self._keys.move_to_end(key)
        if len(self._keys) > _KEYS:
            self._keys.popitem(last=False)
        return held_back
