"""The folder that keeps a sidecar's state from run to run: private, and locked while one runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

__all__ = ["StateError", "StateFolder", "default_root"]

_LOCK_RETRY_S = 0.02
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME_LENGTH = 128


class StateError(Exception):
    """State that cannot be kept or trusted, and the configuration says not to go on without."""


def default_root() -> Path:
    """Where state is kept unless told otherwise: a folder of this user's in the temporary directory."""
    return Path(tempfile.gettempdir()) / f"kvevents-{os.getuid()}"


class StateFolder:
    """`root/name`, made when it is not there, locked until `close`.

    `wait_s`: how long to wait for an earlier sidecar to let go of it. Raises StateError, naming state_dir
    and the reason, when it cannot be made, is open to others, or stays locked.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        wait_s: float,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = root / _plain(name)
        self._next = self.path / "next"
        """There while a successor waits."""
        self._stopping = stopping
        try:
            _make_private(root)
            _make_private(self.path)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"state_dir: {self.path}: {error.strerror}") from None
        try:
            self._acquire(time.monotonic() + wait_s)
        except BaseException:
            os.close(self._lock)
            raise

    def _acquire(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                with contextlib.suppress(OSError):  # it only hastens
                    self._next.touch()
                if time.monotonic() >= deadline or self._stopping():
                    with contextlib.suppress(OSError):  # others that wait make it again
                        self._next.unlink(missing_ok=True)
                    pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "?"
                    raise StateError(
                        f"state_dir: {self.path}: in use by the sidecar with pid {pid}, which has the"
                        " same worker_id or address"
                    ) from None
                time.sleep(_LOCK_RETRY_S)  # flock has no deadline of its own
        with contextlib.suppress(OSError):
            self._next.unlink(missing_ok=True)
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except OSError:  # a full disk: the pid is for people only
            pass

    def successor_waits(self) -> bool:
        """Whether another sidecar waits for this one to let go."""
        return self._next.exists()

    def close(self) -> None:
        """Let go of the lock; safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _plain(name: str) -> str:
    """One component of a path, another for another name: one that is too long, or has what a path may
    not, ends with a digest.
    """
    plain = _NAME.sub("_", name).strip("._") or "state"
    if plain == name and len(plain) <= _NAME_LENGTH:
        return plain
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{plain[: _NAME_LENGTH - len(digest) - 1]}-{digest}"


def _make_private(path: Path) -> None:
    """Raises StateError for a folder that others own or may write to."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StateError(f"state_dir: {path}: not a directory")
    if found.st_uid != os.getuid():
        raise StateError(f"state_dir: {path}: belongs to user {found.st_uid}, not {os.getuid()}")
    if found.st_mode & 0o022:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise StateError(f"state_dir: {path}: mode {mode} lets others write to it")
