"""Where worker and sidecar meet: a directory of one user, and in it a socket's path and its lock.

R1  A path belongs to the worker that holds the lock beside it; the kernel drops the lock when that
    worker is gone, however it went. Only who holds it may remove what lies at the path.
R2  A lock counts only while its file is the one at its path: whoever removes it does so holding it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["Rendezvous", "Taken", "private", "remove_if_left", "shared"]

_PREFIX = "kvevents-link-"
_LOCK = "lock"
_SOCKET = "link"


class Taken(Exception):
    """Another living worker has it."""


class Rendezvous:
    """A socket's path, this process's alone until `close`."""

    def __init__(self, path: Path, lock: Path, folder: Path | None) -> None:
        """Take `lock`; raises Taken, OSError. With a `folder`, that is removed at the end."""
        self.path, self._lock, self._folder = path, lock, folder
        self._fd = _take_lock(lock)
        self._pid = os.getpid()
        try:
            path.unlink(missing_ok=True)  # of a worker that was killed
        except BaseException:
            self.close()
            raise

    def let_go(self) -> None:
        """Close this process's copy of the lock, which stays held by others that have one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Remove what was made, and leave the lock. In a forked child only `let_go`; safe twice."""
        if self._fd >= 0 and os.getpid() == self._pid:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    self.path.unlink(missing_ok=True)
                    self._lock.unlink(missing_ok=True)
        self.let_go()


def private() -> Rendezvous:
    """A folder of its own in the directory for temporary files, mode 0700. Raises OSError.

    Removes those that killed workers of this user have left.
    """
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        remove_if_left(left / _SOCKET)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            return Rendezvous(folder / _SOCKET, folder / _LOCK, folder)
        except (Taken, FileNotFoundError):  # by one that took it for left over
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def shared(directory: Path, name: str, mode: int = 0o700) -> Rendezvous:
    """The path `name` in a directory that a sidecar elsewhere sees too; made if it is not there.

    Raises ValueError for a directory that is another user's or gives more access than `mode`, Taken
    when a living worker has that name, OSError.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        directory.chmod(mode)
    _check_directory(directory, mode)
    return Rendezvous(directory / name, directory / f"{name}.lock", None)


def remove_if_left(path: Path) -> bool:
    """Remove the private folder of the socket `path` if its worker is gone; whether it was removed.

    Never raises: what is not ours, or not left over, stays.
    """
    folder = path.parent
    if not folder.name.startswith(_PREFIX):
        return False
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _check_directory(directory: Path, mode: int) -> None:
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"directory: {directory} is no directory")
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"directory: {directory} is user {status.st_uid}'s, this is user {os.geteuid()}"
        )
    if (found := stat.S_IMODE(status.st_mode)) & 0o777 & ~mode:
        raise ValueError(
            f"directory: {directory} has mode {found:04o}, which is above {mode:04o}; give a folder"
            " inside it, which is made, or mode="
        )


def _take_lock(path: Path) -> int:
    """An open file, locked. Raises Taken naming the holder."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                os.truncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise Taken(f"{path} is held by the worker of pid {holder or 'unknown'}") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
