"""The folder of a file store that nobody asked for: it goes away, whoever is left to remove it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["TEMPORARY", "remove_folder", "temporary_folder"]

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
