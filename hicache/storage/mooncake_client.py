"""The client of a Mooncake Store, as its C++ library behaves (0.3.13, measured).

C1  Every pointer handed over lies in the registered memory: the library follows it wherever it leads.
C2  No call is under way when the client is closed, and none comes after: either ends the process.
C3  A master that is known to be away is not asked: an unanswered call costs seconds, each time.

Calls release the GIL and may come from several threads. `setup` and `close` hold it: every thread of
the process stands still meanwhile, so neither is begun against a master that does not answer.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NamedTuple

from hicache.storage.backend import StorageError

__all__ = [
    "NOT_FOUND",
    "OK",
    "TRANSFER_FAILED",
    "MooncakeClient",
    "MooncakeConfig",
    "Part",
    "meaning",
]

OK: Final = 0
NOT_FOUND: Final = -704
TRANSFER_FAILED: Final = -800
_WRONG_SIZE: Final = -600
_MASTER_AWAY: Final = -900
_MEANING: Final = {
    -1: "internal error",
    -200: "no room in any segment",
    _WRONG_SIZE: "wrong size or argument",
    -703: "still being written",
    NOT_FOUND: "not found",
    -706: "leased to a reader",
    -707: "the reader's lease ended meanwhile",
    TRANSFER_FAILED: "the transfer failed",
    _MASTER_AWAY: "the master cannot be reached",
    -901: "the master does not answer",
}
_SETUP_BLAMES: Final = {
    -1: ("metadata_server", "protocol", "device_name", "master_server_address"),
    _WRONG_SIZE: ("global_segment_size", "local_buffer_size", "local_hostname"),
}
_ENVIRONMENT: Final = {
    "MC_LOG_LEVEL": "ERROR",  # or about 15 lines a client on stderr; read when the library is loaded
    "MC_RPC_TIMEOUT_MS": "5000",  # of a call to the master, which moves no pages; else 30 s
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # else 20, 4.5 s each, and every thread waits
}
_SMALLEST_SEGMENT: Final = 16 << 20
_CONNECT_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How to join a Mooncake Store; the names are Mooncake's and SGLang's.

    `local_hostname`: where other workers reach this one. `master_server_address`: host:port, or a URL
    for a master found through etcd or Redis. `global_segment_size`: bytes of memory this worker lends
    to all, 0 to lend none. `local_buffer_size`: bytes for copies, which pages do not need.

    Raises StorageError for a value out of range.
    """

    local_hostname: str
    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int = 4 << 30
    local_buffer_size: int = 16 << 20
    protocol: str = "tcp"
    device_name: str = ""

    def __post_init__(self) -> None:
        for name in ("local_hostname", "master_server_address", "metadata_server", "protocol"):
            if not getattr(self, name):
                raise StorageError(f"{name}: empty")
        for name in ("global_segment_size", "local_buffer_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise StorageError(f"{name}: {value!r} is not a number of bytes")
        if 0 < self.global_segment_size < _SMALLEST_SEGMENT:
            raise StorageError(
                f"global_segment_size: {self.global_segment_size} is neither 0 nor at least "
                f"{_SMALLEST_SEGMENT}"
            )
        _host_and_port(self.master_server_address)


class Part(NamedTuple):
    """An object of the store, and the memory it comes from or goes to."""

    name: str
    address: int
    num_bytes: int
    group: str | None
    """What it is to be evicted with; None: by itself."""


class MooncakeClient:
    """One connection. Calls return a code for each object, in order; the store's faults are codes too.

    Raises StorageError when the library is not there, the master does not answer, or the library will
    not start with these values. Sets Mooncake's variables for its log level, the patience of calls and
    the number of tries to start, where the environment does not set them.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._memory = range(0)
        _knock(config.master_server_address)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            library = import_module("mooncake.store")
        except ImportError as error:
            raise StorageError(
                f"mooncake: {error}; kvevents[mooncake] is the extra to install, libibverbs1 the package"
            ) from None
        self._store: Any = library.MooncakeDistributedStore()
        self._new_replicate_config: Callable[[], Any] = library.ReplicateConfig
        self._has_groups = hasattr(library.ReplicateConfig, "group_ids")
        self._is_healthy: Callable[[], int] = getattr(self._store, "health_check", lambda: OK)
        code = self._store.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code != OK:
            blamed = _SETUP_BLAMES.get(code, ("master_server_address",))
            values = ", ".join(f"{name}: {getattr(config, name)!r}" for name in blamed)
            raise StorageError(f"{values}: setup: {meaning(code)}")

    def register(self, address: int, num_bytes: int) -> int:
        """Let pages come from and go to this memory, until `close`. The code."""
        code = int(self._store.register_buffer(address, num_bytes))
        if code == OK:
            self._memory = range(address, address + num_bytes)
        return code

    def look(self, names: Sequence[str]) -> list[int]:
        """OK for those that are there, whose leases are renewed; NOT_FOUND for those that are not."""
        states = self._ask(self._store.batch_is_exist, names)
        return [{1: OK, 0: NOT_FOUND}.get(state, state) for state in states]

    def put(self, parts: Sequence[Part]) -> list[int]:
        """Store objects. One that is there already stays as it is, and its code is OK too."""
        names, addresses, sizes = self._spread(parts)
        groups = [part.group for part in parts]
        if not (self._has_groups and all(groups)):
            return self._ask(self._store.batch_put_from, names, addresses, sizes)
        config = self._new_replicate_config()
        config.group_ids = groups
        return self._ask(self._store.batch_put_from, names, addresses, sizes, config)

    def get(self, parts: Sequence[Part]) -> list[int]:
        """Fill memory from objects: OK where all of it was."""
        names, addresses, sizes = self._spread(parts)
        results = self._ask(self._store.batch_get_into, names, addresses, sizes)
        return [
            OK if result == size else result if result < 0 else _WRONG_SIZE
            for result, size in zip(results, sizes, strict=True)
        ]

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects, whether leased to a reader or not."""
        return self._ask(self._store.batch_remove, names, True)  # noqa: FBT003

    def close(self) -> None:
        """Leave the store: at exit when the master is away, as that takes 11 s of every thread's time."""
        if self._memory:
            self._store.unregister_buffer(self._memory.start)
            self._memory = range(0)
        if self.look(["is the master there?"]) == [NOT_FOUND]:
            self._store.close()
        else:
            atexit.register(self._store.close)

    def _ask(
        self, call: Callable[..., Sequence[int]], names: Sequence[str], *rest: Any
    ) -> list[int]:
        if not names:
            return []
        if self._is_healthy() != OK:  # what the library's own thread last saw, every second
            return [_MASTER_AWAY] * len(names)
        codes = list(call(list(names), *rest))
        assert len(codes) == len(names), "Mooncake answers for every object"
        return codes

    def _spread(self, parts: Sequence[Part]) -> tuple[list[str], list[int], list[int]]:
        for part in parts:
            last = part.address + part.num_bytes - 1
            assert part.address in self._memory and last in self._memory, "C1"
        return (
            [part.name for part in parts],
            [part.address for part in parts],
            [part.num_bytes for part in parts],
        )


def meaning(code: int) -> str:
    """A code as people read it."""
    return f"{_MEANING.get(code, 'see ErrorCode in Mooncake')} ({code})"


def _knock(address: str) -> None:
    """Raises StorageError when nobody listens where the master should, if the address tells where."""
    where = _host_and_port(address)
    if where is not None:
        try:
            socket.create_connection(where, _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise StorageError(f"master_server_address: {address}: {error}") from None


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None for a URL. Raises StorageError for what is neither that nor host:port."""
    if "://" in address:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise StorageError(f"master_server_address: {address!r} is not host:port")
    return host.strip("[]"), int(port)
