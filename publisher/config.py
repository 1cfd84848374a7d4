"""What a sidecar is told: its sinks, and who the worker is. Checked once, here."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

__all__ = [
    "ConfigError",
    "SidecarConfig",
    "SinkConfig",
    "WorkerInfo",
    "check_endpoint",
    "is_same",
    "read_config",
]

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:/\[\]]+):(?P<port>\*|[0-9]+)")
_IPC_PATH_BYTES = 107  # sockaddr_un, less the final zero

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot be. The message begins with its key."""


def check_endpoint(key: str, endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is one that can be bound: tcp://HOST:PORT or ipc://PATH."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path or len(path.encode()) > _IPC_PATH_BYTES:
            raise ConfigError(f"{key}: {endpoint!r} needs a path of 1..{_IPC_PATH_BYTES} bytes")
        return
    found = _TCP.fullmatch(endpoint)
    if found is None:
        raise ConfigError(f"{key}: {endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if found["port"] != "*" and int(found["port"]) > 65_535:
        raise ConfigError(f"{key}: port {found['port']} of {endpoint!r} is not in 0..65535")


def is_same(endpoint: str, replay_endpoint: str | None) -> bool:
    """Whether both sockets would be bound to one address; two free ports are two."""
    return endpoint == replay_endpoint and not endpoint.endswith((":0", ":*"))


class SinkConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One public output. The names are those of SGLang's and vLLM's --kv-events-config.

    `endpoint`, `replay_endpoint`: where to bind the PUB and the replay socket; without the latter,
    no replay. `topic`: the first frame of every message. `buffer_steps`, `buffer_bytes`: how many
    batches, and bytes of payload, a replay can reach back before it starts from a snapshot. `hwm`:
    messages queued for one subscriber before it loses some. `heartbeat_s`: an idle sink publishes an
    empty batch this often.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = "tcp://127.0.0.1:5558"
    topic: str = ""
    buffer_steps: int = 10_000
    buffer_bytes: int = 256 << 20
    hwm: int = 100_000
    heartbeat_s: float = 5.0

    def __post_init__(self) -> None:
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)
            if is_same(self.endpoint, self.replay_endpoint):
                raise ConfigError(f"replay_endpoint: {self.endpoint} is the endpoint as well")
        for key in ("buffer_steps", "buffer_bytes"):
            if (value := getattr(self, key)) < 1:
                raise ConfigError(f"{key}: {value} is below 1")
        if not 1 <= self.hwm < 2**31:
            raise ConfigError(f"hwm: {self.hwm} is not in 1..{2**31 - 1}")
        if not 0.01 <= self.heartbeat_s <= 3600:
            raise ConfigError(f"heartbeat_s: {self.heartbeat_s} is not in 0.01..3600")


class SidecarConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The whole sidecar.

    `linger_s`: how long it stays after its worker is gone, for subscribers to hear of it.
    `replay_timeout_s`: a replay client that takes nothing for so long is dropped.
    """

    sinks: tuple[SinkConfig, ...] = (SinkConfig(),)
    linger_s: float = 1.0
    replay_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.sinks:
            raise ConfigError("sinks: at least one is needed")
        if not 0 <= self.linger_s <= 60:
            raise ConfigError(f"linger_s: {self.linger_s} is not in 0..60")
        if not 0.1 <= self.replay_timeout_s <= 3600:
            raise ConfigError(f"replay_timeout_s: {self.replay_timeout_s} is not in 0.1..3600")


class WorkerInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who the worker is. `block_size` is its page size in tokens."""

    block_size: int
    dp_rank: int = 0
    model: str = ""
    worker_id: str = ""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size: {self.block_size} is below 1")
        if not 0 <= self.dp_rank < 2**31:
            raise ConfigError(f"dp_rank: {self.dp_rank} is not in 0..{2**31 - 1}")


def read_config(kind: type[T], data: Any) -> T:
    """`data`, as JSON would give it, as a config. Raises ConfigError naming the key and the bound."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from None
