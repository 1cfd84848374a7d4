"""`kvevents record`: messages into a file, as they come."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from kvevents.capture import CaptureHead, capture_start, pack_message
from publisher.tools.source import Sources

__all__ = ["record"]


def record(
    sources: Sources, head: CaptureHead, file: Path, *, for_s: float | None, count: int | None
) -> int:
    """Write until `for_s` seconds are over, `count` batches came, or Ctrl-C.

    The file is made, readable by its owner alone: prompts are in it. Each record is written at once, so
    that a kill costs at most the last; where no batch came, the file is removed again. Returns how many
    came. Raises ValueError when the file is there already or cannot be written.
    """
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"-w: {file}: {error.strerror}") from None
    came = 0
    whole = False
    try:
        _write(fd, capture_start(head))
        with contextlib.suppress(KeyboardInterrupt):
            until = float("inf") if for_s is None else time.monotonic() + for_s
            for _, (message, _) in sources.live_steps(until):
                _write(fd, pack_message(message.at_ns, message.channel, message.frames))
                came += message.is_batch
                if came == count:
                    break
        whole = True
    except OSError as error:
        raise ValueError(f"-w: {file}: {error.strerror}") from None
    finally:
        os.close(fd)
        if whole and not came:
            file.unlink(missing_ok=True)
    return came


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
