"""Where a sidecar's configuration comes from: flags, a file, defaults; and a few things the environment.

The first of these that says a key counts. The file is TOML or JSON with the keys of SidecarConfig. The
environment gives where keys are, which goes before the file, and what topics say of the pod; nothing
else. `--kv-events-config` takes what SGLang and vLLM take, and is one sink.
"""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvevents.dialect import DIALECTS
from publisher.config.checks import ConfigError, one_line, shown
from publisher.config.config_file import in_file, read_file
from publisher.config.engine_config import read_engine_sink
from publisher.config.sidecar_config import (
    LogFormat,
    LogLevel,
    SidecarConfig,
    WorkerInfo,
    check_ports,
    check_worker,
    read_config,
)
from publisher.config.sink_config import Mode
from publisher.config.topic import render_topic, topic_fields

__all__ = ["Settings", "add_options", "pod_facts", "read_settings", "unread"]

_POD_FACTS = {"pod_ip": "POD_IP", "pod_name": "POD_NAME", "namespace": "NAMESPACE"}
_SECRETS = {
    "curve.secret_key": "KVEVENTS_CURVE_SECRET_KEY",
    "curve.client_keys": "KVEVENTS_CURVE_CLIENT_KEYS",
}
_OF_TESTS = ("KVEVENTS_INTEROP_HOME", "KVEVENTS_PROFILE", "KVEVENTS_TEST")
_OF_ENGINES = ("KVEVENTS_CONFIG", "KVEVENTS_SIDECAR")
"""Of publisher.engines, whose sidecars have an engine's environment."""
_SERVICE_LINK = re.compile(
    r"KVEVENTS_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)?)",
    re.DOTALL,
)
"""What Kubernetes sets for a service whose name begins with kvevents."""
_MOST_UNREAD = 8
_MOST_RANKS_SHOWN = 16
_ENGINES_OPTION = "--kv-events-config"

_WORKER_FLAGS = {
    "relay.worker.block_size": "--block-size",
    "relay.worker.dp_rank": "--dp-rank",
    "relay.worker.dp_size": "--dp-size",
    "relay.worker.model": "--model",
    "relay.worker.worker_id": "--worker-id",
}
_RELAY_FLAGS = {
    "relay.endpoint": "--relay",
    "relay.replay_endpoint": "--relay-replay-endpoint",
    **_WORKER_FLAGS,
}
_SINK_FLAGS = {
    "dialect": "--dialect",
    "mode": "--mode",
    "endpoint": "--endpoint",
    "replay_endpoint": "--replay-endpoint",
    "topic": "--topic",
}
_SIDECAR_FLAGS = {
    "state_dir": "--state-dir",
    "http_endpoint": "--http-endpoint",
    "log_format": "--log-format",
    "log_level": "--log-level",
}
"""Which flag sets which key."""

Data = dict[str, typing.Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What `kvevents serve` was told. `link`: the worker's unix socket; None: `config` has a relay.

    `facts`: what topics may say of the pod. `forever`: wait for a worker, and for the next. `shown`:
    the ranks whose sockets --check tells of.
    """

    link: Path | None
    config: SidecarConfig
    facts: Mapping[str, str]
    forever: bool
    shown: tuple[WorkerInfo, ...] = ()


def unread(environ: Mapping[str, str] | None = None) -> str | None:
    """What to say of variables that look like ours and are not read; None: there are none."""
    environ = os.environ if environ is None else environ
    known = (*_OF_TESTS, *_OF_ENGINES, *_SECRETS.values())
    names = sorted(
        name
        for name in environ
        if name.startswith("KVEVENTS_")
        and name not in known
        and _SERVICE_LINK.fullmatch(name) is None
    )
    if not names:
        return None
    told = [one_line(name[:80]) for name in names[:_MOST_UNREAD]]
    more = [f"{len(names) - len(told)} more"] if len(names) > len(told) else []
    are = "is" if len(names) == 1 else "are"
    these = ", ".join((*_POD_FACTS.values(), *_SECRETS.values()))
    return f"{', '.join((*told, *more))} {are} not read; of the environment these are: {these}"


def pod_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of the pod, for topics. A variable that is empty is not there."""
    return {field: value for field, name in _POD_FACTS.items() if (value := environ.get(name, ""))}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `read_settings` reads."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--link", metavar="PATH", help="the worker's unix socket")
    source.add_argument(
        "--relay", metavar="ENDPOINT", help="instead of a link: an engine's own PUB socket"
    )
    relay = parser.add_argument_group("of the engine behind --relay; with --check, of the worker")
    relay.add_argument(
        "--relay-replay-endpoint", metavar="ENDPOINT", help="its replay socket, or none"
    )
    relay.add_argument("--block-size", type=int, metavar="TOKENS", help="its page size; needed")
    relay.add_argument("--dp-rank", type=int, metavar="N", help="its data-parallel rank; 0")
    relay.add_argument("--dp-size", type=int, metavar="N", help="how many ranks there are")
    relay.add_argument("--model", metavar="NAME", help="the model it serves")
    relay.add_argument("--worker-id", metavar="ID", help="its name")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings, .toml or .json; - reads JSON from standard input",
    )
    sink = parser.add_argument_group("the sink, when there is one")
    sink.add_argument(
        _ENGINES_OPTION, metavar="JSON", help="the sink, as SGLang and vLLM are told of theirs"
    )
    sink.add_argument(
        "--dialect", choices=DIALECTS, metavar="NAME", help=f"who reads it: {', '.join(DIALECTS)}"
    )
    sink.add_argument("--mode", choices=typing.get_args(Mode), help="bind, or connect to routers")
    sink.add_argument(
        "--endpoint", action="append", metavar="ENDPOINT", help="may be repeated to connect"
    )
    sink.add_argument("--replay-endpoint", metavar="ENDPOINT", help="where to bind it, or none")
    sink.add_argument("--topic", metavar="TEMPLATE", help="e.g. kv@{pod_ip}:8000@{model}")
    parser.add_argument("--state-dir", metavar="DIR", help="where journals and seqs are kept")
    parser.add_argument(
        "--http-endpoint", metavar="http://HOST:PORT", help="metrics and health, or none"
    )
    parser.add_argument("--log-format", choices=typing.get_args(LogFormat))
    parser.add_argument("--log-level", choices=typing.get_args(LogLevel))
    parser.add_argument(
        "--forever", action="store_true", help="wait for a worker, and for the next once it is gone"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the configuration as JSON and end; told of the worker, also its ranks' sockets",
    )


def read_settings(
    options: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> Settings:
    """The settings. Raises ConfigError that names the flag, the variable or the key, in one line."""
    environ = os.environ if environ is None else environ
    data = {} if options.config is None else read_file("--config", options.config)
    of_file = tuple(data)
    told: dict[str, str] = {}
    """By path of a key: the flag or variable that its value is from."""
    _take_sink_flags(data, options, told)
    _take_flags(data, options, _SIDECAR_FLAGS, told)
    _take_secrets(data, environ, told)
    _take_source(data, options, told)
    try:
        config = read_config(SidecarConfig, data)
        facts = pod_facts(environ)
        worker = _worker(config, options)
        _check(config, facts, worker)
    except ConfigError as error:
        said = in_file(_renamed(str(error), told), options.config or "-", of_file)
        raise ConfigError(said) from None
    link = None if options.link is None else Path(options.link)
    return Settings(link, config, facts, options.forever, _shown(config, worker, options))


def _worker(config: SidecarConfig, options: argparse.Namespace) -> WorkerInfo | None:
    """The relay's; to be checked, one as the flags say; None: the link will tell."""
    if config.relay is not None:
        return config.relay.worker
    if not options.check:
        return None
    data: Data = {"block_size": 1}
    told: dict[str, str] = {}
    flags = {path.rpartition(".")[2]: flag for path, flag in _WORKER_FLAGS.items()}
    _take_flags(data, options, flags, told)
    try:
        return read_config(WorkerInfo, data)
    except ConfigError as error:
        raise ConfigError(_renamed(str(error), told)) from None


def _shown(
    config: SidecarConfig, worker: WorkerInfo | None, options: argparse.Namespace
) -> tuple[WorkerInfo, ...]:
    """The relay's rank, that of --dp-rank, or else all of --dp-size. None where no worker is told of."""
    flags = [getattr(options, _option(flag)) for flag in _WORKER_FLAGS.values()]
    if (
        not options.check
        or worker is None
        or (config.relay is None and flags.count(None) == len(flags))
    ):
        return ()
    if config.relay is not None or options.dp_rank is not None:
        return (worker,)
    ranks = range(min(worker.num_ranks, _MOST_RANKS_SHOWN))
    return tuple(msgspec.structs.replace(worker, dp_rank=rank) for rank in ranks)


def _check(config: SidecarConfig, pod: Mapping[str, str], worker: WorkerInfo | None) -> None:
    """Raises ConfigError for what can be known before any socket is open."""
    if worker is not None:
        check_ports(config, worker)
    if config.relay is not None:
        check_worker(config, config.relay.worker)
    for place, sink in enumerate(config.sinks):
        key = f"sinks[{place}].topic"
        for field in topic_fields(sink.topic):
            if field in _POD_FACTS and field not in pod:
                why = f"the environment has no {_POD_FACTS[field]}"
                raise ConfigError(f"{key}: {{{field}}} of {shown(sink.topic)} has no value: {why}")
        if worker is None:
            continue
        facts = {**pod, **worker.facts(), "port": "0"}
        if config.relay is not None or all(facts.get(one) for one in topic_fields(sink.topic)):
            render_topic(key, sink.topic, facts)


def _renamed(message: str, told: Mapping[str, str]) -> str:
    """The message with the key as the user spelled it."""
    key, colon, rest = message.partition(": ")
    for path, name in told.items():
        if key == path:
            return f"{name}{colon}{rest}"
        if name == _ENGINES_OPTION and key.startswith(f"{path}."):
            return f"{name}: {key.removeprefix(path + '.')}{colon}{rest}"
    return message


# --------------------------------------------------------------------------- flags and environment


def _take_sink_flags(data: Data, options: argparse.Namespace, told: dict[str, str]) -> None:
    flags: Data = {}
    spelled: dict[str, str] = {}
    _take_flags(flags, options, _SINK_FLAGS, spelled)
    if options.kv_events_config is not None:
        if "sinks" in data:
            raise ConfigError(f"{_ENGINES_OPTION}: --config has sinks already")
        try:
            data["sinks"] = [read_engine_sink(options.kv_events_config, flags)]
        except ConfigError as error:
            raise ConfigError(f"{_ENGINES_OPTION}: {error}") from None
    elif flags:
        sinks = data.setdefault("sinks", [{}])
        if not isinstance(sinks, list) or not all(isinstance(sink, dict) for sink in sinks):
            return  # no sinks at all, as will be said
        if len(sinks) != 1:
            flag = next(iter(spelled.values()))
            raise ConfigError(f"{flag}: is for one sink, and --config has {len(sinks)}")
        data["sinks"] = [sinks[0] | flags]
    told.update({f"sinks[0].{key}": flag for key, flag in spelled.items()})
    if options.kv_events_config is not None:
        told["sinks[0]"] = _ENGINES_OPTION


def _take_flags(
    data: Data, options: argparse.Namespace, flags: Mapping[str, str], told: dict[str, str]
) -> None:
    for path, flag in flags.items():
        value = getattr(options, _option(flag))
        if value is None:
            continue
        if flag == "--endpoint" and len(value) == 1:
            (value,) = value
        _put(data, path, value)
        told[path] = flag


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _put(data: Data, path: str, value: object) -> None:
    """Set a key, and what it is in; what should be an object and is none stays, to be refused."""
    *outer, key = path.split(".")
    place: typing.Any = data
    for name in outer:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            return
    place[key] = value


def _take_secrets(data: Data, environ: Mapping[str, str], told: dict[str, str]) -> None:
    for path, name in _SECRETS.items():
        value = environ.get(name, "")
        if not value:
            continue
        if not os.path.exists(value):  # noqa: PTH110 - takes any text, also what can be no path
            raise ConfigError(f"{name}: no such path; it is where the key is, not the key itself")
        _put(data, path, value)
        told[path] = name


def _take_source(data: Data, options: argparse.Namespace, told: dict[str, str]) -> None:
    """Exactly one of link and relay; none is enough to be checked."""
    if options.link == "":  # as a path it would be the folder that this runs in
        raise ConfigError("--link: '' is not a path")
    if options.link is not None and data.get("relay") is not None:
        raise ConfigError("--link: --config has a relay, and there is one source")
    if options.relay is not None or data.get("relay") is not None:
        _take_flags(data, options, _RELAY_FLAGS, told)
        if options.relay is not None and isinstance(data["relay"], dict):
            data["relay"].setdefault("worker", {})
            told["relay.worker.block_size"] = "--block-size"
        return
    spelled: dict[str, str] = {}
    _take_flags({}, options, _RELAY_FLAGS, spelled)
    flags = [
        flag for path, flag in spelled.items() if not options.check or path not in _WORKER_FLAGS
    ]
    if flags:
        raise ConfigError(f"{flags[0]}: is for --relay; the worker at a link says it itself")
    if options.link is None and not options.check:
        raise ConfigError("--link: needed, or --relay")
