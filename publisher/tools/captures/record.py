"""`kvevents record`: messages into a file, as they come."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvevents.capture import CaptureHead, CaptureWriter
from kvevents.follower import Step, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel
from publisher.subscriber.listener import wait_for
from publisher.tools.captures.ending import like_ctrl_c
from publisher.tools.interrupt import Interrupt
from publisher.tools.source import Live

__all__ = ["STDOUT", "Recorded", "record"]

STDOUT = Path("-")


@dataclass(slots=True)
class Recorded:
    """What came of it. `batches`, `size`: in the file, the latter in bytes; `left_out`: messages too
    large for it; `gaps`: how often batches were missing, and `lost`: how many are, but for those before
    the first; `behind`: at times more came than was read, or nothing was read, so what is missing may be
    this program's own loss.
    """

    batches: int = 0
    left_out: int = 0
    gaps: int = 0
    lost: int = 0
    behind: bool = False
    seconds: float = 0.0
    size: int = 0
    _begun: bool = False
    """Whether a batch of this run was told."""

    def take(self, step: Step) -> None:
        """What is in the file now."""
        self.batches += step.message.is_batch
        self.behind |= step.message.channel == Channel.BEHIND
        for one in step.arrivals:
            match one:
                case Told():
                    self._begun = True
                case Restarted():
                    self._begun = False
                case Gap():
                    self.gaps += 1
                case Lost() if self._begun:
                    self.lost += one.count


def record(
    live: Live,
    head: CaptureHead,
    file: Path,
    *,
    for_s: float | None,
    count: int | None,
    begun: Callable[[], None] = lambda: None,
) -> Recorded:
    """Write until `for_s` seconds are over, `count` batches came, or Ctrl-C, SIGTERM or SIGHUP.

    The file is made, readable by its owner alone: prompts are in it. What came together is written
    together, at once, and can be read from then on, so a kill costs at most what came last; where no
    batch came, the file is removed again. `STDOUT` is written to as it is. `begun` is called once the
    file is there. Raises ValueError when the file is there already or cannot be written; what was
    written then stays, and is whole.
    """
    writer, recorded = CaptureWriter(head), Recorded()
    began = time.monotonic()
    until = float("inf") if for_s is None else began + for_s
    with Interrupt() as interrupt, like_ctrl_c(), _opened(file) as fd:
        try:
            recorded.size += _write(fd, writer.start())
            begun()
            while not interrupt.came and time.monotonic() < until and recorded.batches != count:
                interrupt.wait(partial(wait_for, [live.listener], until))
                recorded.size += _write(fd, _turn(live, writer, recorded, count))
            recorded.size += _write(fd, writer.close())
            if file != STDOUT:
                os.fsync(fd)
        finally:
            if not recorded.batches and file != STDOUT:
                file.unlink(missing_ok=True)
    recorded.seconds = time.monotonic() - began
    return recorded


def _turn(live: Live, writer: CaptureWriter, recorded: Recorded, count: int | None) -> bytes:
    """What has come, packed."""
    packed = []
    steps = live.listener.turn()
    for step in steps:
        try:
            packed.append(writer.add(step.message))
        except ValueError:
            recorded.left_out += 1
            continue
        recorded.take(step)
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


def _write(fd: int, data: bytes) -> int:
    """How much that was."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
