"""The sidecar's log, to streams that are full, gone or shared."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.sidecar.logs import LOGGER, LineHandler, Throttle, configure, fields

pytestmark = pytest.mark.integration

log = logging.getLogger("kvevents.test")


class Stream:
    """A descriptor that a log can go to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        """It."""
        return self.fd


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    yield
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.level, logger.propagate = level, propagate
    logging.getLogger("kvevents.test").disabled = False


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, Stream]]:
    """A pipe: what to read from, and where the log goes."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        yield reading, Stream(writing)
    finally:
        for fd in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(fd)


def lines(fd: int) -> list[str]:
    """All that is in a pipe now; every line must be whole."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 1 << 20):
            data += chunk
    assert data.endswith(b"\n") or not data
    return data.decode().splitlines()


# ------------------------------------------------------------------------------------------- lines


def test_a_text_line_says_when_how_bad_who_and_what() -> None:
    """With the fields behind it, as key=value."""
    with pipe() as (reading, stream):
        configure(stream=stream)
        log.info("worker %s is gone", "w7", extra=fields(sink="a", next_seq=42))
        (line,) = lines(reading)
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO kvevents\.test worker w7 is gone"
            r" sink=a next_seq=42",
            line,
        )


def test_a_json_line_is_one_object() -> None:
    """With the fields as keys, which cannot take the place of its own."""
    with pipe() as (reading, stream):
        configure("json", stream=stream)
        log.warning("worker %s is gone", "w7", extra=fields(sink="a", level="forged"))
        (line,) = lines(reading)
        told = json.loads(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", told.pop("ts"))
        assert told == {
            "level": "warning",
            "logger": "kvevents.test",
            "message": "worker w7 is gone",
            "sink": "a",
        }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_is_part_of_its_line(log_format: str) -> None:
    """The traceback's end, with its newlines spelled out."""
    with pipe() as (reading, stream):
        configure("json" if log_format == "json" else "text", stream=stream)
        try:
            raise ValueError("bad\nvalue")
        except ValueError:
            log.exception("it broke")
        (line,) = lines(reading)
        assert r"ValueError: bad\nvalue" in line


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_what_is_below_the_level_is_not_written(level: str) -> None:
    """Lines of the level and above it."""
    levels = ["debug", "info", "warning", "error"]
    with pipe() as (reading, stream):
        configure(level=level, stream=stream)  # type: ignore[arg-type]
        for one in levels:
            getattr(log, one)("said")
        assert [line.split()[1].lower() for line in lines(reading)] == levels[levels.index(level) :]


def test_configuring_again_replaces_what_was_set() -> None:
    """One line each, in the new format, and nothing goes to the root logger's handlers."""
    with pipe() as (reading, stream):
        configure(stream=stream)
        configure("json", stream=stream)
        log.info("once")
        (line,) = lines(reading)
        assert json.loads(line)["message"] == "once"
        assert not logging.getLogger(LOGGER).propagate


@given(st.text())
def test_nothing_that_is_said_breaks_its_line(text: str) -> None:
    """Newlines, escape sequences, line separators and lone surrogates are spelled out in both formats."""
    for log_format in ("text", "json"):
        with pipe() as (reading, stream):
            configure("json" if log_format == "json" else "text", stream=stream)
            log.info("%s", text, extra=fields(sink=text))
            (line,) = lines(reading)
            assert line.isprintable()
            if log_format == "json" and len(text) < 100:
                assert json.loads(line)["message"] == text


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "é" * 100_000, "\n" * 100_000, "\U0001f600" * 5000]
)
def test_a_long_line_is_cut_to_what_a_pipe_takes_whole(text: str) -> None:
    """At 4096 bytes, as text that decodes and as JSON that parses, also with a traceback."""
    for log_format in ("text", "json"):
        with pipe() as (reading, stream):
            configure("json" if log_format == "json" else "text", stream=stream)
            try:
                raise ValueError(text)
            except ValueError:
                log.exception("%s", text)
            (line,) = lines(reading)
            assert 500 < len(line.encode()) < select.PIPE_BUF
            if log_format == "json":
                assert json.loads(line)["message"].endswith("...")


# ----------------------------------------------------------------------------------------- streams


def test_a_full_pipe_drops_lines_and_says_how_many() -> None:
    """A parent that does not read blocks nothing: lines are counted, and told once there is room (86)."""
    with pipe() as (reading, stream):
        handler = configure(stream=stream)
        for number in range(5000):
            log.info("line %d %s", number, "x" * 80)
        read = lines(reading)
        assert 0 < len(read) < 5000
        assert handler.dropped == 5000 - len(read)
        log.info("again")
        notice, again = lines(reading)
        assert notice.endswith(f"{handler.dropped} log lines found no room and were dropped")
        assert again.endswith("again")


def test_the_others_of_a_shared_pipe_may_still_wait() -> None:
    """Not to wait is a mark on an open file, which a parent may share: the log has one of its own."""
    with pipe() as (_, stream):
        configure(stream=stream)
        log.info("said")
        assert fcntl.fcntl(stream.fd, fcntl.F_GETFL) & os.O_NONBLOCK == 0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_reader_that_is_gone_costs_nothing(log_format: str) -> None:
    """Lines are dropped and counted; nothing is raised."""
    with pipe() as (reading, stream):
        handler = configure("json" if log_format == "json" else "text", stream=stream)
        os.close(reading)
        log.info("said")
        log.info("said")
        assert handler.dropped == 2


def test_a_stream_that_is_closed_costs_nothing() -> None:
    """Before it is configured or after: a descriptor that is gone, a file object that is closed, none."""
    with pipe() as (_, stream):
        os.close(stream.fd)
        closed = io.StringIO()
        for bad in (stream, closed, None):
            handler = LineHandler(bad)
            handler.handle(logging.makeLogRecord({"msg": "said"}))
            assert handler.dropped == 1
            handler.close()
            handler.close()


def test_a_socket_that_nobody_reads_blocks_nothing() -> None:
    """As of a parent that made a socket pair for it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = configure(stream=theirs)
        for _ in range(5000):
            log.info("%s", "x" * 1000)
        assert handler.dropped > 0
        assert ours.recv(100).endswith(b"x")


def test_a_file_takes_every_line(tmp_path: Path) -> None:
    """A regular file always has room."""
    with (tmp_path / "log").open("w") as file:
        handler = configure(stream=file)
        for number in range(100):
            log.info("line %d", number)
        assert handler.dropped == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 100


def test_a_message_that_cannot_be_made_costs_only_itself() -> None:
    """Arguments that do not fit, or that raise when they are printed."""

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pipe() as (reading, stream):
        handler = configure(stream=stream)
        log.info("%d", "x")
        log.info("%s", Broken())
        assert handler.dropped == 2
        log.info("fine")
        assert lines(reading)[-1].endswith("fine")


def test_a_process_whose_stderr_is_closed_logs_on() -> None:
    """Where Python has no sys.stderr at all, configuring and logging still work."""
    code = """
import logging, os
os.close(1)
from publisher.sidecar.logs import configure
handler = configure()
logging.getLogger("kvevents.test").error("said")
os._exit(0 if handler.dropped == 1 else 9)
"""
    command = f"exec {sys.executable} -c '{code}' 2>&-"
    done = subprocess.run(["/bin/sh", "-c", command], check=False, timeout=60)
    assert done.returncode == 0


# ---------------------------------------------------------------------------------------- throttle


def test_a_million_events_make_a_line_a_second() -> None:
    """What happens all the time is said once an interval, with how often it was not said (86)."""
    throttle = Throttle(1.0)
    said = [
        held_back
        for number in range(1_000_000)
        if (held_back := throttle.take("ring full", number / 100_000)) is not None
    ]
    assert len(said) == 10
    assert said[0] == 0
    assert said[1:] == [99_999] * 9


def test_keys_are_throttled_apart() -> None:
    """One that is said often holds no other back."""
    throttle = Throttle(1.0)
    assert [throttle.take(key, 0.0) for key in "aaba"] == [0, None, 0, None]
    assert throttle.take("a", 1.0) == 2
    assert throttle.take("b", 1.0) == 0


def test_keys_are_bounded() -> None:
    """Keys that a peer could make take no more memory than so many; the oldest are forgotten."""
    throttle = Throttle(3600.0)
    for number in range(10_000):
        assert throttle.take(f"key {number}", 0.0) == 0
    assert len(throttle._keys) <= 256
    assert throttle.take("key 9999", 0.0) is None
