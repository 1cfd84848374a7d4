"""A wall clock that can be set from outside: a file of one float64, the seconds by which it is off.

`skew_spawned` brings it to the Python processes that this one starts: a copy of this module is their
`sitecustomize`, which finds the file's name in `STRESS_CLOCK`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import time
from pathlib import Path

__all__ = ["skew_clock", "skew_spawned"]


def skew_clock(path: Path) -> None:
    """From now on, `time.time` of this process is off by what the file says."""
    with path.open("r+b") as file:
        offset = mmap.mmap(file.fileno(), 8)
    real, read = time.time, struct.Struct("<d").unpack_from
    time.time = lambda: real() + read(offset)[0]


def skew_spawned(clock: Path, folder: Path) -> None:
    """Every Python process started from now on has this clock; `folder` is new and on its path."""
    folder.mkdir()
    shutil.copy(__file__, folder / "sitecustomize.py")
    os.environ["STRESS_CLOCK"] = str(clock)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([path] if path else [])])


if "STRESS_CLOCK" in os.environ:
    skew_clock(Path(os.environ["STRESS_CLOCK"]))
