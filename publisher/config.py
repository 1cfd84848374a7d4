"""What a sidecar is told: its sinks, and who the worker is. Checked once, here."""

from __future__ import annotations

import re
import typing
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from kvevents.dialect import DIALECTS
from kvevents.hashing import HashFormat
from publisher.checks import (
    ConfigError,
    check_choice,
    check_flag,
    check_int,
    check_path,
    check_seconds,
    check_text,
    one_line,
    shown,
)
from publisher.endpoint import Endpoint
from publisher.ports import Socket, check_sockets
from publisher.topic import check_topic, topic_fields

__all__ = [
    "ConfigError",
    "CurveConfig",
    "RelayConfig",
    "SidecarConfig",
    "SinkConfig",
    "WorkerInfo",
    "check_endpoint",
    "check_ports",
    "is_same",
    "read_config",
    "sink_names",
    "unknown_key",
]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MOST_RANKS = 2**31 - 1
_LEAST_REBASE = 1000
_NONE = "none"
_UNSAID: Any = msgspec.UNSET
_REPLAY_ENDPOINT = "tcp://127.0.0.1:5558"

Mode = Literal["bind", "connect"]
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


def _settle(config: msgspec.Struct, key: str) -> None:
    """Make the text "none" None: TOML and flags have no other word for it."""
    if getattr(config, key) == _NONE:
        msgspec.structs.force_setattr(config, key, None)


def _check_target(key: str, endpoint: object) -> None:
    """Raises ConfigError unless `endpoint` can be connected to."""
    parsed = Endpoint.parse(key, endpoint)
    if parsed.is_wildcard:
        what = "path" if parsed.scheme == "ipc" else "host"
        raise ConfigError(f"{key}: {shown(endpoint)} cannot be connected to; name a {what}")
    if parsed.is_any:
        raise ConfigError(f"{key}: {shown(endpoint)} cannot be connected to; name its port")


class SinkConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One public output. What SGLang's and vLLM's --kv-events-config has too is named as there.

    `name`: its label in metrics, logs and file names; empty becomes `sink0`, `sink1` by position.
    `dialect`: how it spells a batch, one of kvevents.dialect.DIALECTS. `token_ids`: False leaves the
    prompts' tokens out. `mode`: whether the PUB socket binds, or connects to routers that bind.
    `endpoint`: where to; several only to connect. `replay_endpoint`: where the replay socket is bound;
    None: no replay; unsaid, tcp://127.0.0.1:5558 to bind and None to connect. `add_dp_rank`: whether
    rank N of a worker adds N to ports, and _dpN to a path. None: where it binds, and not where it
    connects, for ranks have their routers in common. True: there too, as engines do. False: nowhere,
    for ranks that share no host. `topic`: the first frame of every message, see
    publisher.topic. `buffer_steps`, `buffer_bytes`: how many batches, and bytes of payload, a replay can
    reach back before it starts from a snapshot. `hwm`: messages queued for one subscriber before it
    loses some. `heartbeat_s`: an idle sink publishes an empty batch this often. `coalesce_s`: batches
    of so long are merged into one. `rebase_after`: once seqs reach it they start over at 0.
    """

    name: str = ""
    dialect: str = "sglang"
    token_ids: bool = True
    mode: Mode = "bind"
    endpoint: str | tuple[str, ...] = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = _UNSAID
    add_dp_rank: bool | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    buffer_bytes: int = 256 << 20
    hwm: int = 100_000
    heartbeat_s: float = 5.0
    coalesce_s: float = 0.0
    rebase_after: int | None = None

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if self.name and _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"name: {shown(self.name)} is not 1..64 of A-Z a-z 0-9 _ . -")
        check_choice("dialect", self.dialect, DIALECTS)
        check_flag("token_ids", self.token_ids)
        check_choice("mode", self.mode, typing.get_args(Mode))
        self._settle_replay()
        self._check_endpoints()
        if self.add_dp_rank is not None:
            check_flag("add_dp_rank", self.add_dp_rank)
        self._check_topic()
        check_int("buffer_steps", self.buffer_steps, 1)
        check_int("buffer_bytes", self.buffer_bytes, 1)
        check_int("hwm", self.hwm, 1, 2**31 - 1)
        check_seconds("heartbeat_s", self.heartbeat_s, 0.01, 3600)
        check_seconds("coalesce_s", self.coalesce_s, 0, 10)
        if self.rebase_after is not None:
            check_int("rebase_after", self.rebase_after, _LEAST_REBASE)

    def _settle_replay(self) -> None:
        if self.replay_endpoint is _UNSAID:
            settled = _REPLAY_ENDPOINT if self.mode == "bind" else None
            msgspec.structs.force_setattr(self, "replay_endpoint", settled)
        _settle(self, "replay_endpoint")

    def _check_topic(self) -> None:
        check_topic("topic", self.topic)
        if "port" not in topic_fields(self.topic):
            return
        if self.mode == "connect":
            why = "the port of what it connects to says nothing of this worker"
        elif self.endpoints[0].startswith("ipc:"):
            why = f"{shown(self.endpoints[0])} has none"
        else:
            return
        raise ConfigError(f"topic: {{port}} of {shown(self.topic)}: {why}; write the port itself")

    def _check_endpoints(self) -> None:
        if isinstance(self.endpoint, tuple):
            if not self.endpoint:
                raise ConfigError("endpoint: at least one is needed")
            if len(self.endpoint) > 1 and self.mode == "bind":
                raise ConfigError(
                    f"endpoint: {shown(self.endpoint)} are several, and mode 'bind' takes one"
                )
        seen: list[Endpoint] = []
        for endpoint in self.endpoints:
            parsed = Endpoint.parse("endpoint", endpoint)
            if self.mode == "connect":
                _check_target("endpoint", endpoint)
            if any(parsed.takes(other) for other in seen):
                raise ConfigError(f"endpoint: {shown(endpoint)} is there twice")
            seen.append(parsed)
        if self.replay_endpoint is not None:
            replay = Endpoint.parse("replay_endpoint", self.replay_endpoint)
            if self.mode == "bind" and replay.takes(seen[0]):
                raise ConfigError(f"replay_endpoint: {replay} is the endpoint as well")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`endpoint` as a tuple, also where it is one."""
        return self.endpoint if isinstance(self.endpoint, tuple) else (self.endpoint,)

    @property
    def endpoint_moves(self) -> bool:
        """Whether the rank is added to `endpoint`."""
        return self.mode == "bind" if self.add_dp_rank is None else self.add_dp_rank

    @property
    def replay_endpoint_moves(self) -> bool:
        """Whether the rank is added to `replay_endpoint`."""
        return self.add_dp_rank is not False

    def endpoints_of(self, dp_rank: int) -> tuple[str, ...]:
        """Where the PUB socket of one rank binds or connects."""
        rank = dp_rank if self.endpoint_moves else 0
        return tuple(str(Endpoint.parse("endpoint", one).for_rank(rank)) for one in self.endpoints)

    def replay_endpoint_of(self, dp_rank: int) -> str | None:
        """Where the replay socket of one rank is bound."""
        if self.replay_endpoint is None:
            return None
        rank = dp_rank if self.replay_endpoint_moves else 0
        return str(Endpoint.parse("replay_endpoint", self.replay_endpoint).for_rank(rank))


class CurveConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who may connect. `secret_key`: our .key_secret file. `client_keys`: a folder of .key files."""

    secret_key: str
    client_keys: str

    def __post_init__(self) -> None:
        check_path("secret_key", self.secret_key)
        check_path("client_keys", self.client_keys)


class WorkerInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who the worker is. `block_size` is its page size in tokens, `hash_format` that of its cache.

    `dp_size`: how many ranks share its configuration; None: this one and those before it.
    """

    block_size: int
    hash_format: HashFormat = HashFormat.SGLANG
    dp_rank: int = 0
    model: str = ""
    worker_id: str = ""
    dp_size: int | None = None

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
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
        _settle(self, "replay_endpoint")
        _check_target("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_target("replay_endpoint", self.replay_endpoint)
            if is_same(self.endpoint, self.replay_endpoint):
                raise ConfigError(f"replay_endpoint: {self.endpoint} is the endpoint as well")
        check_text("topic", self.topic)


class SidecarConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The whole sidecar.

    `linger_s`: how long it stays after its worker is gone, for subscribers to hear of it.
    `replay_timeout_s`: a replay client that takes nothing for so long is dropped. `relay`: the engine
    to listen to; None: the worker is at the link. `state_dir`: where logs and seqs are kept; None: a
    folder of the user's own among the temporary files. `persist`: what is kept there. `on_lost_state`:
    when a seq that was kept is gone or damaged, start at 0, or do not start. `http_endpoint`: where
    metrics and health are served, rank N at the port plus N; None: nowhere.
    """

    sinks: tuple[SinkConfig, ...] = (SinkConfig(),)
    linger_s: float = 1.0
    replay_timeout_s: float = 10.0
    relay: RelayConfig | None = None
    state_dir: str | None = None
    persist: Persist = "all"
    on_lost_state: OnLostState = "reset"
    http_endpoint: str | None = "http://127.0.0.1:0"
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    curve: CurveConfig | None = None

    def __post_init__(self) -> None:
        if not self.sinks:
            raise ConfigError("sinks: at least one is needed")
        self._name_sinks()
        check_seconds("linger_s", self.linger_s, 0, 60)
        check_seconds("replay_timeout_s", self.replay_timeout_s, 0.1, 3600)
        if self.state_dir is not None:
            check_path("state_dir", self.state_dir)
        check_choice("persist", self.persist, typing.get_args(Persist))
        check_choice("on_lost_state", self.on_lost_state, typing.get_args(OnLostState))
        _settle(self, "http_endpoint")
        if self.http_endpoint is not None:
            Endpoint.parse_http("http_endpoint", self.http_endpoint)
        check_choice("log_format", self.log_format, typing.get_args(LogFormat))
        check_choice("log_level", self.log_level, typing.get_args(LogLevel))

    def http_endpoint_of(self, dp_rank: int) -> str | None:
        """Where HTTP of one rank is served."""
        if self.http_endpoint is None:
            return None
        return str(Endpoint.parse_http("http_endpoint", self.http_endpoint).for_rank(dp_rank))

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
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").removeprefix(".")
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{path}.{cause}" if path else str(cause)) from None
        raise ConfigError(one_line(f"{path}: {message}" if path else message)) from None


def _check_shape(kind: Any, data: object, path: str) -> None:
    """Raises ConfigError for a key that is none of ours, or a value that is none of a few."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        check_choice(path, data, kinds)
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        check_choice(path, data, tuple(kind))
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
