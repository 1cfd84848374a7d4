"""What a sidecar is told: its sinks, and who the worker is. Checked once, here."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvevents.hashing import HashFormat

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
_TEXT_BYTES = 4096
_IPC_PATH_BYTES = 107  # sockaddr_un, less the final zero

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot be. The message begins with its key."""


def check_endpoint(key: str, endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is one that can be bound: tcp://HOST:PORT or ipc://PATH."""
    if not isinstance(endpoint, str):
        raise ConfigError(f"{key}: {endpoint!r} is not a string")
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


def _check_int(key: str, value: object, low: int, high: int | None = None) -> None:
    if type(value) is not int:
        raise ConfigError(f"{key}: {value!r} is not an int")
    if high is None and value < low:
        raise ConfigError(f"{key}: {value} is below {low}")
    if high is not None and not low <= value <= high:
        raise ConfigError(f"{key}: {value} is not in {low}..{high}")


def _check_text(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {value!r} is not a string")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}: {value!r} cannot be encoded: {error.reason}") from None
    if length > _TEXT_BYTES:
        raise ConfigError(f"{key}: {length} bytes are above {_TEXT_BYTES}")


def _check_seconds(key: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key}: {value!r} is not a number")
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is not in {low}..{high}")


def is_same(endpoint: str, replay_endpoint: str | None) -> bool:
    """Whether both sockets would be bound to one address; two free ports are two."""
    return endpoint == replay_endpoint and not endpoint.endswith((":0", ":*"))


class SinkConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One public output. What SGLang's and vLLM's --kv-events-config has too is named as there.

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
        _check_text("topic", self.topic)
        _check_int("buffer_steps", self.buffer_steps, 1)
        _check_int("buffer_bytes", self.buffer_bytes, 1)
        _check_int("hwm", self.hwm, 1, 2**31 - 1)
        _check_seconds("heartbeat_s", self.heartbeat_s, 0.01, 3600)


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
        _check_seconds("linger_s", self.linger_s, 0, 60)
        _check_seconds("replay_timeout_s", self.replay_timeout_s, 0.1, 3600)


class WorkerInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who the worker is. `block_size` is its page size in tokens, `hash_format` that of its cache."""

    block_size: int
    hash_format: HashFormat = HashFormat.SGLANG
    dp_rank: int = 0
    model: str = ""
    worker_id: str = ""

    def __post_init__(self) -> None:
        _check_int("block_size", self.block_size, 1)
        _check_int("dp_rank", self.dp_rank, 0, 2**31 - 1)
        _check_text("model", self.model)
        _check_text("worker_id", self.worker_id)


def read_config(kind: type[T], data: Any) -> T:
    """`data`, as JSON would give it, as a config. Raises ConfigError naming the key and the bound."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from None
