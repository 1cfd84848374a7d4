"""The folder of a file store that nobody asked for: it goes away, whoever is left to remove it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["TEMPORARY", "remove_after_us", "remove_folder", "temporary_folder"]

TEMPORARY = "kvevents-demo-"
"""How its name begins."""

_REMOVALS = 50


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new one, removed at the end of the block, when nobody writes there any more."""
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_after_us(folder: Path) -> None:
    """Remove it now, and what a thread of this process, which is about to end, makes there once more."""
    remove_folder(folder)
    subprocess.Popen(
        ["sh", "-c", 'sleep 0.3; rm -rf -- "$1"', "sh", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def remove_folder(folder: Path) -> None:
    """Remove it, even from under a thread that still writes there."""
    doomed = folder.with_name(f"{folder.name}-doomed")
    for _ in range(_REMOVALS):
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        if not folder.exists() and not doomed.exists():
            break
