"""`kvevents record`: messages into a file, as they come."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvevents.capture import CaptureHead, CaptureWriter
from kvevents.message import Channel
from publisher.listener import wait_for
from publisher.tools.captures.ending import like_ctrl_c
from publisher.tools.interrupt import Interrupt
from publisher.tools.source import Live

__all__ = ["STDOUT", "Recorded", "record"]

STDOUT = Path("-")


@dataclass(slots=True)
class Recorded:
    """What came of it. `batches`: in the file; `left_out`: messages too large for a record; `behind`: at
    times more came than was read, or nothing was read, so what is missing may be this program's own loss.
    """

    batches: int = 0
    left_out: int = 0
    behind: bool = False


def record(
    live: Live, head: CaptureHead, file: Path, *, for_s: float | None, count: int | None
) -> Recorded:
    """Write until `for_s` seconds are over, `count` batches came, or Ctrl-C, SIGTERM or SIGHUP.

    The file is made, readable by its owner alone: prompts are in it. What came together is written
    together, at once, and can be read from then on, so a kill costs at most what came last; where no
    batch came, the file is removed again. `STDOUT` is written to as it is. Raises ValueError when the
    file is there already or cannot be written; what was written then stays, and is whole.
    """
    writer, recorded = CaptureWriter(head), Recorded()
    until = float("inf") if for_s is None else time.monotonic() + for_s
    with Interrupt() as interrupt, like_ctrl_c(), _opened(file) as fd:
        try:
            _write(fd, writer.start())
            while not interrupt.came and time.monotonic() < until and recorded.batches != count:
                interrupt.wait(partial(wait_for, [live.listener], until))
                _write(fd, _turn(live, writer, recorded, count))
            _write(fd, writer.close())
            if file != STDOUT:
                os.fsync(fd)
        finally:
            if not recorded.batches and file != STDOUT:
                file.unlink(missing_ok=True)
    return recorded


def _turn(live: Live, writer: CaptureWriter, recorded: Recorded, count: int | None) -> bytes:
    """What has come, packed."""
    packed = []
    steps = live.listener.turn()
    for message, _ in steps:
        try:
            packed.append(writer.add(message))
        except ValueError:
            recorded.left_out += 1
            continue
        recorded.batches += message.is_batch
        recorded.behind |= message.channel == Channel.BEHIND
        if recorded.batches == count:
            break
    return b"".join([*packed, writer.flush()])


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        if file == STDOUT:
            yield sys.stdout.fileno()
            return
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"-w: {file}: {error.strerror}") from None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
