"""One child process of any environment: a folder and a log of its own, a bounded stop, no survivor.

Standard library only, for children import it in environments that have nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, TypeVar

from ports_rig import free_ports

__all__ = [
    "HERE",
    "HOME",
    "Child",
    "ChildExited",
    "loopback_env",
    "needs",
    "on_free_ports",
    "venv_python",
]

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("KVEVENTS_INTEROP_HOME") or Path.home() / ".cache" / "kvevents-interop")
"""Where install.sh puts things."""

_RIGS = HERE.parent / "rigs"
"""What this module itself imports of the tests'."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_KEPT_LOG_BYTES = 4 << 20
_PORT_ATTEMPTS = 3

Started = TypeVar("Started")

# Runs a module in the child. The read end of a pipe raises SIGKILL when its write end, which the parent
# alone has, is closed: a parent that is killed leaves nothing running. The folders go last on the path,
# so they hide no installed package.
_BOOT = """
import fcntl, os, runpy, select, signal, sys
lifeline, folders, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.set_inheritable(lifeline, False)
fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
watch = select.poll()
watch.register(lifeline, select.POLLHUP)
if watch.poll(0):
    sys.exit("the parent is gone")
sys.path.extend(folders.split(os.pathsep))
sys.argv[1:] = sys.argv[4:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def needs(path: Path) -> Path:
    """`path`, which install.sh makes; skips the test where it is missing."""
    if not path.exists():
        import pytest

        pytest.skip(f"{path} is missing: run make interop")
    return path


def venv_python(name: str) -> Path:
    """The interpreter of a consumer's environment; skips the test where it is not installed."""
    return needs(HOME / "venvs" / name / "installed").parent / "bin" / "python"


def loopback_env() -> dict[str, str]:
    """Environment in which a server that listens on every interface listens on loopback alone.

    LD_PRELOAD takes no path with a space, so it names the library and LD_LIBRARY_PATH finds it.
    """
    library = needs(HOME / "lib" / "loopback_bind.so")
    others = os.environ.get("LD_LIBRARY_PATH")
    folders = f"{library.parent}:{others}" if others else str(library.parent)
    return {"LD_PRELOAD": library.name, "LD_LIBRARY_PATH": folders}


class ChildExited(RuntimeError):
    """The child ended, or did not get ready, while it was needed."""


class Child:
    """`python -m module args…`, as a context manager; `folders` are added to its path."""

    def __init__(
        self,
        python: Path,
        module: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        folders: Sequence[Path] = (HERE,),
        piped: bool = False,
    ) -> None:
        self.name = module
        self.folder = Path(tempfile.mkdtemp(prefix="interop-"))
        self._log_path = self.folder / "log"
        self._last_log = ""
        lifeline, self._lifeline = os.pipe()
        path = os.pathsep.join(map(str, (*folders, _RIGS)))
        command = [str(python), "-I", "-B", "-c", _BOOT, str(lifeline), path, module, *args]
        pipe = subprocess.PIPE if piped else None
        try:
            with self._log_path.open("ab") as log:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    stdin=pipe or subprocess.DEVNULL,
                    stdout=pipe or log,
                    stderr=log,
                    bufsize=0,
                    env=_environment(env or {}),
                    cwd=self.folder,
                    pass_fds=[lifeline],
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._lifeline)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(lifeline)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def log(self, start: int = 0) -> str:
        """What it has written from byte `start` on, without colours; the end of it also after stop()."""
        if not self._log_path.exists():
            return self._last_log
        with self._log_path.open("rb") as log:
            log.seek(start)
            return _ANSI.sub("", log.read().decode(errors="replace"))

    def failure(self, what: str) -> ChildExited:
        """An error that says what went wrong and shows the end of the log."""
        state = "is running" if self.running() else f"exited with {self.process.returncode}"
        shown = self.log()[-3000:]
        return ChildExited(f"{self.name}: {what}; it {state}. End of its log:\n{shown}")

    def send_signal(self, signum: int) -> None:
        """To this child, and to nothing else, if it is still there."""
        if self.running():
            self.process.send_signal(signum)

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 5.0) -> int:
        """Ask, wait, then kill it and what it started; its exit status. Safe to call twice."""
        try:
            self.send_signal(signum)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.process.wait(timeout_s)
        finally:
            self._release()
        return self.process.returncode

    def kill(self) -> int:
        """SIGKILL: what a crash looks like from outside."""
        return self.stop(signal.SIGKILL)

    def _release(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for stream in (self.process.stdin, self.process.stdout):
            _close(stream)
        self._last_log = self.log()[-_KEPT_LOG_BYTES:]
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def on_free_ports(count: int, start: Callable[[list[int]], Started]) -> Started:
    """Start something on free ports; on others if one was taken in the meantime."""
    for _ in range(_PORT_ATTEMPTS - 1):
        try:
            return start(free_ports(count))
        except ChildExited as failure:
            if "in use" not in str(failure):
                raise
    return start(free_ports(count))


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without proxies (all traffic is on loopback), plus `extra`."""
    env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    return env | {"NO_PROXY": "*", "no_proxy": "*", "NO_COLOR": "1"} | dict(extra)
