"""Processes for tests of stores on disk.

`storage_peer.py write DIRECTORY` puts prompts until it is killed, and prints the key of each page once
it is stored. `storage_peer.py full DIRECTORY` mounts a small file system there and fills it.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from storage_rig import FORM, NUM_PAGES, StorageRig, get, pages_of, put

from hicache.storage.backend import StorageError
from hicache.storage.file import FileStorage


def write(directory: Path) -> None:
    """Two branches of a prompt, then the next prompt."""
    storage = FileStorage(directory, FORM, min_free_bytes=0)
    rig = StorageRig(lambda: storage, remembers=True)
    rig.open()
    for number in count(len(storage.held())):
        start = range(number * 100, number * 100 + 40)
        for tokens in ([*start], [*start[:20], *range(4)]):
            pages = pages_of(tokens)
            assert put(rig, storage, pages) == len(pages)
            print(*(page.key.hex() for page in pages), flush=True)


def full(directory: Path) -> None:
    """150 blocks, 3 a page: out of inodes, at the start too, full, short of the floor, then read-only."""
    mount(directory, "size=600k,nr_inodes=70")
    rig = StorageRig(lambda: FileStorage(directory, FORM, min_free_bytes=0), remembers=True)
    storage = rig.open()
    first, second = pages_of(range(4 * NUM_PAGES)), pages_of(range(1000, 1000 + 4 * 20))
    some = put(rig, storage, first)
    assert 20 < some < 40, some
    assert storage.stats.failed_puts == NUM_PAGES - some
    assert "no room" in storage.stats.last_error, storage.stats
    for start in range(2000, 2800, 100):  # what is given up is to leave room for folders too
        assert put(rig, storage, pages_of(range(start, start + 4 * 4))) == 4, storage.stats
    assert storage.take_lost()
    with suppress(OSError):  # somebody takes the last ones
        for number in count():
            (directory / f"{number}").touch()
    storage = rig.open()
    assert get(rig, storage, [page.key for page in pages_of(range(2700, 2716))]) == 4
    mount(directory, "remount,nr_inodes=1000")
    stored = put(rig, storage, first)
    assert 40 < stored <= 50, stored
    assert "no room" in storage.stats.last_error, storage.stats
    assert get(rig, storage, [page.key for page in first]) == stored
    assert not set(storage.take_lost()).intersection(page.key for page in first[:stored])

    rig.make = lambda: FileStorage(directory, FORM, min_free_bytes=100 << 10)
    storage = rig.open()
    assert put(rig, storage, second) == 20
    assert storage.stats.evicted == len(storage.take_lost()) > 20
    free = 4096 * int(subprocess.check_output(["stat", "-f", "-c", "%a", directory]))
    assert free >= 100 << 10, free

    assert get(rig, storage, [page.key for page in second]) == 20
    rig.close()
    mount(directory, "remount,ro")
    with pytest.raises(StorageError, match=f"^directory: {directory}: Read-only file system"):
        FileStorage(directory, FORM)


def mount(directory: Path, options: str) -> None:
    """In a mount namespace of our own, so it ends with the process."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], check=True)


if __name__ == "__main__":
    {"write": write, "full": full}[sys.argv[1]](Path(sys.argv[2]))
