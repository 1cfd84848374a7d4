"""What a sidecar is told: its sinks, and who the worker is. Checked once, here."""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from kvevents.events import StorageMedium
from kvevents.hashing import HashFormat
from publisher.config.checks import (
    NONE,
    ConfigError,
    check_choice,
    check_int,
    check_kind,
    check_path,
    check_seconds,
    check_text,
    one_line,
    settle_none,
    shown,
)
from publisher.config.endpoint import Endpoint, check_target
from publisher.config.ports import Socket, check_sockets
from publisher.config.sink_config import SinkConfig

__all__ = [
    "ConfigError",
    "CurveConfig",
    "RelayConfig",
    "SidecarConfig",
    "SinkConfig",
    "WorkerInfo",
    "check_endpoint",
    "check_ports",
    "check_worker",
    "is_same",
    "read_config",
    "sink_names",
    "unknown_key",
]

_MOST_RANKS = 2**31 - 1

Persist = Literal["all", "seq", "none"]
OnLostState = Literal["reset", "refuse"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

T = TypeVar("T")


def check_endpoint(key: str, endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is one that can be bound: tcp://HOST:PORT or ipc://PATH."""
    Endpoint.parse(key, endpoint)


def is_same(endpoint: str, replay_endpoint: str | None) -> bool:
    """Whether both sockets would be bound to one address; two free ports are two."""
    if replay_endpoint is None:
        return False
    return Endpoint.parse("", endpoint).takes(Endpoint.parse("", replay_endpoint))


class CurveConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who may connect. `secret_key`: our .key_secret file. `client_keys`: a folder of .key files."""

    secret_key: str
    client_keys: str

    def __post_init__(self) -> None:
        check_path("secret_key", self.secret_key)
        check_path("client_keys", self.client_keys)


class WorkerInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who the worker is. `block_size` is its page size in tokens, `hash_format` that of its cache.

    `dp_rank`: its data-parallel rank, in every batch and added to ports. `dp_size`: how many ranks share
    its configuration; None: this one and those before it. `model`, `worker_id`: for topics, and for
    dialects that name them; the state is kept by `worker_id` where there is one.
    """

    block_size: int
    hash_format: HashFormat = HashFormat.SGLANG
    dp_rank: int = 0
    model: str = ""
    worker_id: str = ""
    dp_size: int | None = None

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        check_choice("hash_format", self.hash_format, tuple(HashFormat))
        msgspec.structs.force_setattr(self, "hash_format", HashFormat(self.hash_format))
        check_int("dp_rank", self.dp_rank, 0, _MOST_RANKS)
        check_text("model", self.model)
        check_text("worker_id", self.worker_id)
        if self.dp_size is not None:
            check_int("dp_size", self.dp_size, 1, _MOST_RANKS + 1)
            if self.dp_size <= self.dp_rank:
                raise ConfigError(f"dp_size: {self.dp_size} is not above dp_rank {self.dp_rank}")

    @property
    def num_ranks(self) -> int:
        """`dp_size`, also where it is not said."""
        return self.dp_rank + 1 if self.dp_size is None else self.dp_size

    def facts(self) -> dict[str, str]:
        """What a topic may say of it: see publisher.topic."""
        return {
            "model": self.model,
            "served_model": self.model,
            "dp_rank": str(self.dp_rank),
            "worker_id": self.worker_id,
        }


class RelayConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An unmodified engine's publisher, to connect to. `topic`: the prefix to subscribe to.

    The endpoints are those of this rank; nothing is added to their ports.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    worker: WorkerInfo

    def __post_init__(self) -> None:
        settle_none(self, "replay_endpoint")
        check_target("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_target("replay_endpoint", self.replay_endpoint)
            if is_same(self.endpoint, self.replay_endpoint):
                raise ConfigError(f"replay_endpoint: {self.endpoint} is the endpoint as well")
        check_text("topic", self.topic)
        check_kind("worker", self.worker, WorkerInfo)


class SidecarConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The whole sidecar.

    `linger_s`: how long it stays after its worker is gone, for subscribers to hear of it.
    `replay_timeout_s`: a replay client that takes nothing for so long is dropped;
    `subscriber_timeout_s`: so is a subscriber, over TCP. `relay`: the engine
    to listen to; None: the worker is at the link. `state_dir`: where journals and seqs are kept; None: a
    folder of the user's own among the temporary files. `persist`: what is kept there. `on_lost_state`:
    when a seq that was kept is gone or damaged, start at 0, or do not start. `http_endpoint`: where
    metrics and health are served, rank N at the port plus N; None: nowhere.
    """

    sinks: tuple[SinkConfig, ...] = (SinkConfig(),)
    linger_s: float = 1.0
    replay_timeout_s: float = 10.0
    subscriber_timeout_s: float = 30.0
    relay: RelayConfig | None = None
    state_dir: str | None = None
    persist: Persist = "all"
    on_lost_state: OnLostState = "reset"
    http_endpoint: str | None = "http://127.0.0.1:0"
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    curve: CurveConfig | None = None

    def __post_init__(self) -> None:
        self._check_sinks()
        self._name_sinks()
        check_seconds("linger_s", self.linger_s, 0, 60)
        check_seconds("replay_timeout_s", self.replay_timeout_s, 0.1, 3600)
        check_seconds("subscriber_timeout_s", self.subscriber_timeout_s, 1, 3600)
        if self.state_dir is not None:
            check_path("state_dir", self.state_dir)
        check_choice("persist", self.persist, typing.get_args(Persist))
        check_choice("on_lost_state", self.on_lost_state, typing.get_args(OnLostState))
        settle_none(self, "http_endpoint")
        if self.http_endpoint is not None:
            Endpoint.parse_http("http_endpoint", self.http_endpoint)
        check_choice("log_format", self.log_format, typing.get_args(LogFormat))
        check_choice("log_level", self.log_level, typing.get_args(LogLevel))
        for name, kind in (("relay", RelayConfig), ("curve", CurveConfig)):
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), kind)

    def http_endpoint_of(self, dp_rank: int) -> str | None:
        """Where HTTP of one rank is served."""
        if self.http_endpoint is None:
            return None
        return str(Endpoint.parse_http("http_endpoint", self.http_endpoint).for_rank(dp_rank))

    def _check_sinks(self) -> None:
        if not isinstance(self.sinks, (list, tuple)):
            raise ConfigError(f"sinks: {shown(self.sinks)} is not a tuple of SinkConfig")
        if not self.sinks:
            raise ConfigError("sinks: at least one is needed")
        for place, sink in enumerate(self.sinks):
            check_kind(f"sinks[{place}]", sink, SinkConfig)

    def _name_sinks(self) -> None:
        names: set[str] = set()
        named: list[SinkConfig] = []
        for place, sink in enumerate(self.sinks):
            name = sink.name or f"sink{place}"
            if name in names:
                raise ConfigError(f"sinks[{place}].name: {name!r} is another sink's")
            names.add(name)
            named.append(sink if sink.name else msgspec.structs.replace(sink, name=name))
        msgspec.structs.force_setattr(self, "sinks", tuple(named))


def sink_names(config: SidecarConfig) -> tuple[str, ...]:
    """The sinks' names, in order."""
    return tuple(sink.name for sink in config.sinks)


def check_worker(config: SidecarConfig, worker: WorkerInfo) -> None:
    """Raises ConfigError when a sink has to say of the worker what it does not say of itself."""
    for place, sink in enumerate(config.sinks):
        for name in ("model", "worker_id"):
            if sink.event_form == "mooncake" and not getattr(worker, name):
                raise ConfigError(
                    f"sinks[{place}].event_form: 'mooncake' names the worker's {name}, and it has none"
                )


def check_ports(config: SidecarConfig, worker: WorkerInfo) -> None:
    """Raises ConfigError when the sockets of `worker` and all its ranks cannot be open side by side.

    Every rank of one configuration says the same. See publisher.ports for what is compared.
    """
    bound: list[Socket] = []
    targets: list[Socket] = []
    for place, sink in enumerate(config.sinks):
        key = f"sinks[{place}].endpoint"
        for endpoint in sink.endpoints:
            socket = Socket(key, Endpoint.parse(key, endpoint), moves=sink.endpoint_moves)
            (bound if sink.mode == "bind" else targets).append(socket)
        if sink.replay_endpoint is not None:
            key = f"sinks[{place}].replay_endpoint"
            replay = Endpoint.parse(key, sink.replay_endpoint)
            bound.append(Socket(key, replay, moves=sink.replay_endpoint_moves))
    if config.http_endpoint is not None:
        http = Endpoint.parse_http("http_endpoint", config.http_endpoint)
        bound.append(Socket("http_endpoint", http, moves=True))
    if config.relay is not None:
        for key in ("endpoint", "replay_endpoint"):
            endpoint_or_none = getattr(config.relay, key)
            if endpoint_or_none is not None:
                parsed = Endpoint.parse(f"relay.{key}", endpoint_or_none)
                targets.append(Socket(f"relay.{key}", parsed, moves=False))
    check_sockets(bound, targets, worker.num_ranks)


def read_config(kind: type[T], data: Any) -> T:
    """`data`, as JSON or TOML would give it, as a config.

    Raises ConfigError that begins with the path of the key and says the bound.
    """
    _check_shape(kind, data, "")
    try:
        return msgspec.convert(_without_none(kind, data), kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").removeprefix(".")
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{path}.{cause}" if path else str(cause)) from None
        raise ConfigError(one_line(f"{path}: {message}" if path else message)) from None


def _without_none(kind: Any, data: Any) -> Any:
    """`data` with None for the text "none" where a key takes a number or None."""
    if isinstance(data, list):
        (kind, *_) = typing.get_args(kind) or (None,)
        return [_without_none(kind, one) for one in data]
    if not (isinstance(data, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return data
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return {
        key: None
        if value == NONE and types.get(key) == int | None
        else _without_none(types.get(key), value)
        for key, value in data.items()
    }


def _check_shape(kind: Any, data: object, path: str) -> None:
    """Raises ConfigError for a key that is none of ours, or a value that is none of a few."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        check_choice(path, data, kinds)
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        check_choice(path, data, tuple(kind))
    elif isinstance(data, dict) and typing.get_origin(kind) is dict:
        for key in data:
            check_choice(path, key, tuple(StorageMedium))
    elif isinstance(data, (list, tuple)) and typing.get_origin(kind) is tuple:
        for place, one in enumerate(data):
            _check_shape(kinds[0], one, f"{path}[{place}]")
    elif isinstance(data, dict):
        for struct in kinds:
            if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
                _check_keys(struct, data, path)


def _check_keys(struct: type[msgspec.Struct], data: dict[object, object], path: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    prefix = f"{path}." if path else ""
    for key, value in data.items():
        if key not in fields:
            raise unknown_key(f"{prefix}{key}", str(key), fields)
        _check_shape(fields[str(key)].type, value, f"{prefix}{key}")
    for name, field in fields.items():
        if field.required and name not in data:
            raise ConfigError(f"{prefix}{name}: needed, and not there")


def unknown_key(where: str, key: str, known: typing.Iterable[str]) -> ConfigError:
    """What to raise for a key that is none of `known`; names the nearest."""
    import difflib

    near = difflib.get_close_matches(key[:64], list(known), 1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    return ConfigError(f"{one_line(where[:256])}: no such key{hint}")
