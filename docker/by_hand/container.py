"""An image's processes as a container would run them.

Everything is read-only but what is mounted; the user is the image's, without a capability; each process
that is started is the first of a pid namespace. Mounts are made in the mount namespace of this process,
which `unshare` has given it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from docker.by_hand.builder import Image

__all__ = [
    "READY_S",
    "Container",
    "bring_up_loopback",
    "end",
    "mount_volume",
    "say",
    "unmount_volume",
]

READY_S = 30.0
"""How long anything may take."""
_LOOK_S = 0.2
_STATUS = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=2).status)"
_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096


class Container:
    """Of an image, with volumes: by where they are mounted, the folder. Raises OSError.

    `environment`: what its processes have besides the image's.
    """

    def __init__(
        self,
        image: Image,
        volumes: Mapping[str, Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.image, self._root = image, image.root
        self._environment = image.environment | dict(environment or {})
        self.user, self.group = (int(one) for one in image.user.split(":"))
        places = {self._root / path.lstrip("/"): folder for path, folder in volumes.items()}
        for place in places:  # made by who starts containers, where the image has none
            place.mkdir(parents=True, exist_ok=True)
        _mount(str(self._root), self._root, None, _MS_BIND)
        _mount("proc", self._root / "proc", "proc", 0)
        _mount("/dev", self._root / "dev", None, _MS_BIND)
        for place, folder in places.items():
            _mount(str(folder), place, None, _MS_BIND)
        _mount(str(self._root), self._root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """End it with `end`, or kill it: with `unshare` goes what that has started."""
        return subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", *self._inside(command)]
        )

    def output(self, command: Sequence[str]) -> str:
        """What it prints; raises CalledProcessError for an exit code that is not 0."""
        done = subprocess.run(self._inside(command), check=True, capture_output=True, text=True)
        return done.stdout

    def fails(self, command: Sequence[str]) -> bool:
        """Whether it ends with another exit code than 0."""
        done = subprocess.run(self._inside(command), check=False, capture_output=True)
        return done.returncode != 0

    def is_unanswered(self, url: str) -> bool:
        """Whether this is answered with another status than 200, or not at all."""
        return self.fails(["python", "-c", _STATUS, url])

    def until(self, command: Sequence[str], told: str) -> None:
        """Until it ends with 0; says `told`. Raises AssertionError when that does not come."""
        deadline = time.monotonic() + READY_S
        while self.fails(command):
            assert time.monotonic() < deadline, f"not {told} within {READY_S} s"
            time.sleep(_LOOK_S)
        say(told)

    def until_answered(self, url: str, told: str) -> None:
        """`until` it is answered with status 200."""
        self.until(["python", "-c", _STATUS, url], told)

    def _inside(self, command: Sequence[str]) -> list[str]:
        """Below the root, as the image's user and with nothing of this process's environment."""
        environment = [f"{name}={value}" for name, value in self._environment.items()]
        ids = [f"--reuid={self.user}", f"--regid={self.group}", "--clear-groups"]
        confined = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        at = ["env", "-i", f"--chdir={self.image.folder}", *environment]
        return ["chroot", str(self._root), "setpriv", *ids, *confined, *at, *command]


def end(started: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
    """Send a signal to what `unshare` has started; its exit code. One that has ended gets none."""
    if started.poll() is not None:
        return started.returncode
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), number)
    return started.wait(timeout=READY_S)


def mount_volume(folder: Path, group: int) -> Path:
    """An empty one at `folder`, as Kubernetes makes it: root's, and everybody's to write to."""
    folder.mkdir()
    _mount("tmpfs", folder, "tmpfs", 0, f"mode=2777,uid=0,gid={group}")
    return folder


def unmount_volume(folder: Path) -> None:
    """What is mounted at `folder`; containers that have it keep it."""
    subprocess.run(["umount", "--lazy", folder], check=True)


def bring_up_loopback() -> None:
    """Of this process's network namespace. Raises OSError."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(any_socket, get_flags, asked))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14s", b"lo", flags | up, b""))


def say(*words: str) -> None:
    """A line for something that is so."""
    print("ok:", *words, flush=True)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    told = [source.encode(), os.fsencode(target), kind.encode() if kind else None]
    if _LIBC.mount(*told, ctypes.c_ulong(flags), options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
