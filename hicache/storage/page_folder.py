"""Where a store's files are: one for each page, in a directory that others may share."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path

from hicache.storage.backend import StorageError, StoredPage
from hicache.storage.keys import KeyScheme, PageFormat
from hicache.storage.page_file import (
    PASSING,
    BadPage,
    encode_metadata,
    footer_size,
    read_page,
    read_trailer,
    write_page,
)

__all__ = ["FoundPage", "PageFolder"]

FoundPage = tuple[StoredPage, int, float]
"""A page, the bytes of its file, and when that was written."""

_ASIDE = ".old-"


class PageFolder:
    """The files of one format, held by one process at a time; a lock says so, that a kill releases.

    A key's name is its path. Names with a folder in front are in one that belongs to the format, and
    whatever else is in there goes. Flat names share the directory: what is not provably ours stays.

    Raises StorageError naming directory and reason, or for keys that give a page two names or one that
    is too long.
    """

    def __init__(
        self, directory: Path | str, form: PageFormat, keys: Callable[[PageFormat], KeyScheme]
    ) -> None:
        self.directory = Path(directory).absolute()
        self._fingerprint, self._page_bytes = form.fingerprint, form.bytes_per_page
        self._names = keys(form)
        sample = self._names(bytes(32))
        if len(sample) != 1:
            raise StorageError(f"keys: {len(sample)} names for a page, a file has one")
        self._owned = "/" in sample[0]
        self._root = self.directory / sample[0].split("/")[0] if self._owned else self.directory
        self._lock_name = self._root.name if self._owned else self._fingerprint
        self._prefix = str(self.directory / "_")[:-1]
        self._temporary = f".{self._fingerprint}.tmp"
        self._spares: list[str] = []
        self._num_spared = 0
        self._lock_fd, self._pid = -1, os.getpid()
        self._num_aside = time.time_ns()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._write_something()
            most = os.pathconf(self._root, "PC_NAME_MAX")
        except OSError as error:
            self.close()
            raise StorageError(f"directory: {self.directory}: {error.strerror or error}") from None
        longest = max(len(os.fsencode(part)) for part in sample[0].split("/"))
        if longest > most:
            self.close()
            raise StorageError(f"keys: a name has {longest} bytes, at most {most} can be had")

    def size_of(self, page: StoredPage) -> int:
        """Bytes of its file."""
        metadata = encode_metadata(page, self._fingerprint)
        return self._page_bytes + len(metadata) + footer_size

    def write(
        self, page: StoredPage, content: memoryview, checksum: Callable[[], int] | None = None
    ) -> None:
        """Write or replace a page's file. Raises OSError, and the page has the file that it had.

        `checksum`: see `write_page`.
        """
        path = self._path(page.key)
        spare = self._spares.pop() if self._spares else None
        temporary = spare or f"{path.rpartition('/')[0]}/{self._temporary}"
        metadata = encode_metadata(page, self._fingerprint)
        write_page(path, temporary, content, metadata, checksum)

    def read(self, key: bytes, num_bytes: int, content: memoryview) -> None:
        """Fill `content` from a page's file. Raises OSError, and BadPage if it is not that page's."""
        read_page(self._path(key), num_bytes, key, self._fingerprint, content)

    def has(self, key: bytes, num_bytes: int) -> bool:
        """Whether a page's file is there, in its full length."""
        try:
            return Path(self._path(key)).lstat().st_size == num_bytes
        except OSError:
            return False

    def remove(self, key: bytes) -> None:
        """Remove a page's file, if there is one. Raises OSError."""
        Path(self._path(key)).unlink(missing_ok=True)

    def spare(self, key: bytes) -> None:
        """Remove a page's file, and leave its space to the next page that is written, until `trim`: what
        took the file system a while to find need not be looked for again. Raises OSError.

        Not where others may be reading the file: they would see it change. Nor one that has another name.
        """
        path = self._path(key)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        if self._owned and stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            self._num_spared += 1
            name = f"{self._root}/{self._temporary}{self._num_spared}"
            os.replace(path, name)  # noqa: PTH105  a Path costs as much as the call
            self._spares.append(name)
        else:
            self.remove(key)

    def trim(self, num_left: int = 0) -> None:
        """Give back the space that was left to pages to come, but for so many."""
        while len(self._spares) > num_left:
            with suppress(OSError):
                Path(self._spares.pop()).unlink()

    def free_bytes(self, num_files: int) -> int:
        """What so many new files can have together, each wasting a block at most. Raises OSError."""
        try:
            found = os.statvfs(self._root)
        except FileNotFoundError:  # somebody removed it; a new one will do
            self._root.mkdir(parents=True, exist_ok=True)
            found = os.statvfs(self._root)
        if found.f_files and found.f_favail < num_files < len(self._spares):
            self.trim(num_files)  # those are files, and folders are short
            found = os.statvfs(self._root)
        num_spares = len(self._spares)
        num_new = 2 * num_files - num_spares  # each may need a folder too
        if found.f_files and found.f_favail < num_new:
            return 0
        spared = num_spares * self._page_bytes
        return (found.f_bavail - num_files) * found.f_frsize + spared

    def scan(self) -> tuple[list[FoundPage], int]:
        """Every page there is, and how many files were removed for being none. Raises OSError."""
        found: list[FoundPage] = []
        num_removed = 0
        for file in self._files():
            try:
                stat = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # somebody else tidies up
            if page := self._page_in(file.path, stat.st_size):
                found.append((page, stat.st_size, stat.st_mtime))
            elif file.name.startswith(self._temporary):
                Path(file.path).unlink(missing_ok=True)
            elif self._owned:
                Path(file.path).unlink(missing_ok=True)
                num_removed += 1
        return found, num_removed

    def set_aside(self) -> bool:
        """Have no page any more, from now on, whatever happens next. False where the directory is shared
        with others' files: then each page is to be removed. Raises OSError.
        """
        if not self._owned:
            return False
        self._num_aside += 1
        self._root.rename(self.directory / f"{self._root.name}{_ASIDE}{self._num_aside}")
        self._root.mkdir()
        return True

    def remove_aside(self) -> None:
        """Give back the space of what was set aside, now or in an earlier run."""
        for old in self.directory.glob(f"{self._root.name}{_ASIDE}*"):
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Let others have the directory. Safe to call twice."""
        if self._lock_fd >= 0:
            if os.getpid() == self._pid:  # a forked process has the lock too, and is not its owner
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write_something(self) -> None:
        """Raises OSError for a directory that cannot be written to. One that is full can, later."""
        probe = self._root / self._temporary
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise

    def _lock(self) -> None:
        path = self.directory / f"{self._lock_name}.lock"
        self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held = f"(it holds {path.name})"
            error.strerror = f"another store of the same format uses it, until it is closed {held}"
            raise

    def _path(self, key: bytes) -> str:
        return self._prefix + self._names(key)[0]

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """What may be a page or a leftover."""
        folders = [str(self._root)]
        while folders:
            with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for one in entries:
                    if not one.is_dir(follow_symlinks=False):
                        yield one
                    elif self._owned:
                        folders.append(one.path)

    def _page_in(self, path: str, num_bytes: int) -> StoredPage | None:
        """The page that a file has, if it is ours and where it belongs. Raises OSError where that cannot
        be told.
        """
        try:
            page, fingerprint = read_trailer(path, num_bytes, self._page_bytes)
        except BadPage:
            return None
        except OSError as error:
            if error.errno in PASSING:
                raise
            return None
        ours = fingerprint == self._fingerprint and self._path(page.key) == path
        return page if ours else None
