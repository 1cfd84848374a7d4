"""A real Mooncake master on loopback, those who join it, and stores for the contract's tests.

`mooncake_rig.py MASTER_ADDRESS` is a worker in a process of its own: it answers each line of input,
`put FIRST LAST` or `get FIRST LAST`, with how many leading pages of the prompt of those tokens it stored
or got, and `close FIRST LAST`, once it has closed the store with a put of them under way, with 0.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from ports_rig import free_port
from storage_rig import FORM, TIMEOUT_S, StorageRig, get, pages_of, put

from hicache.storage.keys import KeyScheme, PageFormat, default_keys
from hicache.storage.mooncake import MooncakeConfig, MooncakeStorage

__all__ = [
    "SEGMENT",
    "Lender",
    "Master",
    "Replacer",
    "Worker",
    "config_of",
    "mooncake_rig",
    "open_storage",
    "require_mooncake",
    "wait_until",
]

ROOT = Path(__file__).parents[2]
PATHS = (str(ROOT), str(ROOT / "tests/rigs"))
"""Where a worker finds what it imports."""
SEGMENT = 16 << 20
"""The least that Mooncake takes."""

JOIN = """
import sys
from mooncake.store import MooncakeDistributedStore
store, (address, segment) = MooncakeDistributedStore(), sys.argv[1:]
segment = int(segment)
assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, segment, "tcp", "", address) == 0
print("ready", flush=True)
"""
LEND = "sys.stdin.read()"
REPLACE = """
import time
names = sys.stdin.readline().split()
size = int(sys.stdin.readline())
others = [name + "-other" for name in names]
for line in sys.stdin:
    assert store.put_batch(names, [b"1" * size] * len(names)) == 0
    print("there", flush=True)
    time.sleep(float(sys.stdin.readline()))
    assert set(store.batch_remove(names, True)) == {0}
    assert store.put_batch(others, [b"2" * size] * len(others)) == 0
    print("replaced", flush=True)
    sys.stdin.readline()
    assert set(store.batch_remove(others, True)) == {0}
"""


class Master:
    """`mooncake_master`, listening on loopback only. Skips the test where Mooncake cannot be had.

    `rpc_port`: where another one was before. No lease ends within a test: a read that takes longer than
    its lease fails.
    """

    def __init__(self, rpc_port: int = 0) -> None:
        require_mooncake()
        self.rpc_port, self.metrics_port = rpc_port or free_port(), free_port()
        self.address = f"127.0.0.1:{self.rpc_port}"
        settings: dict[str, str | int] = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.rpc_port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "default_kv_lease_ttl": 60_000,
            "minloglevel": 2,
            "logtostderr": "true",
        }
        command = [f"--{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncake.cli", *command], stderr=subprocess.DEVNULL
        )
        try:
            wait_until(self.is_ready)
        except BaseException:
            self.kill()
            raise

    def is_ready(self) -> bool:
        """Whether it says so, and listens: it may say so a little before."""
        assert self._process.poll() is None, "the master ended"
        try:
            socket.create_connection(("127.0.0.1", self.rpc_port), 5).close()
            return bool(json.loads(self.ask("health"))["service_ready"])
        except OSError:
            return False

    def ask(self, what: str) -> str:
        """One of its pages for operators."""
        url = f"http://127.0.0.1:{self.metrics_port}/{what}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    def names(self) -> set[str]:
        """Of all objects."""
        return set(self.ask("get_all_keys").split())

    def pause(self) -> None:
        """From now on it is there but does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()


class _Process:
    """One that ends with the test, if not before."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
        )
        assert self.answer() == "ready"

    def say(self, *words: str | float) -> None:
        """A line of its input."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        """A line of its output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()


class Lender(_Process):
    """Lends memory, and does nothing else."""

    def __init__(self, master: Master) -> None:
        super().__init__("-c", JOIN + LEND, master.address, str(SEGMENT))


class Replacer(_Process):
    """Stores objects of ones, deletes them after a while, and has their memory filled with twos."""

    def __init__(self, master: Master, names: Sequence[str], num_bytes: int) -> None:
        super().__init__("-c", JOIN + REPLACE, master.address, str(SEGMENT))
        self.say(*names)
        self.say(num_bytes)


class Worker(_Process):
    """Another worker, which lends memory too."""

    def __init__(self, master: Master) -> None:
        super().__init__(__file__, master.address)

    def ask(self, what: str, first: int, last: int) -> int:
        """Have it put or get the pages of a prompt, or close with them; what it answers."""
        self.say(what, first, last)
        return int(self.answer())


_tags = count()


@contextmanager
def mooncake_rig(master: Master) -> Iterator[StorageRig]:
    """A store that is empty to whoever opens it, though others share the master."""

    def make() -> MooncakeStorage:
        return open_storage(master, keys=partial(tagged_keys, tag=str(next(_tags))))

    rig = StorageRig(make, remembers=False)
    try:
        yield rig
    finally:
        rig.close()


def tagged_keys(form: PageFormat, tag: str) -> KeyScheme:
    """Names that no other tag has."""
    names = default_keys(form)
    return lambda key: tuple(f"{tag}_{name}" for name in names(key))


def open_storage(
    master: Master,
    *,
    form: PageFormat = FORM,
    keys: Callable[[PageFormat], KeyScheme] = default_keys,
    segment: int = 0,
) -> MooncakeStorage:
    """A store that joins the master and lends `segment` bytes."""
    return MooncakeStorage(config_of(master.address, segment), form, keys=keys)


def config_of(address: str, segment: int = 0) -> MooncakeConfig:
    """A worker on loopback."""
    return MooncakeConfig("127.0.0.1", address, global_segment_size=segment, local_buffer_size=0)


def require_mooncake() -> None:
    """Skip where there is no Mooncake, and say why."""
    try:
        library = import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake cannot be imported: {error}")
    if not Path(str(library.__file__)).with_name("mooncake_master").exists():
        pytest.skip("this build of Mooncake has no mooncake_master")


def wait_until(condition: Callable[[], bool]) -> None:
    """For what only a look can tell."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)


def work(address: str) -> None:
    """What a worker does."""
    rig = StorageRig(lambda: MooncakeStorage(config_of(address, SEGMENT), FORM), remembers=False)
    storage = rig.open()
    print("ready", flush=True)
    for line in sys.stdin:
        what, first, last = line.split()
        pages = pages_of(range(int(first), int(last)))
        match what:
            case "put":
                print(put(rig, storage, pages), flush=True)
            case "get":
                print(get(rig, storage, [page.key for page in pages]), flush=True)
            case "close":
                storage.put(pages, array("q", range(len(pages))))
                storage.close()
                print(0, flush=True)


if __name__ == "__main__":
    work(sys.argv[1])
