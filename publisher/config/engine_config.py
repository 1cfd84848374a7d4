"""`--kv-events-config`: the JSON that tells SGLang and vLLM where to publish, as one of our sinks."""

from __future__ import annotations

import typing

import msgspec

from publisher.config.checks import (
    ConfigError,
    check_choice,
    check_flag,
    check_int,
    one_line,
    shown,
)
from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import SinkConfig, unknown_key

__all__ = ["read_engine_sink"]

Data = dict[str, typing.Any]

_DEFAULTS: Data = {
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "add_dp_rank": True,
    "buffer_steps": 10_000,
    "hwm": 100_000,
}
_THEIR_OWN = (
    "publisher",
    "enable_kv_cache_events",
    "max_queue_size",
    "bind",
    "format",
)
"""Keys of theirs that are none of a sink's. `bind` and `format` are SGLang's, `enable_...` vLLM's."""

_FORMATS = {"default": "sglang", "dynamo": "dynamo"}
"""The dialects that SGLang calls so."""


def read_engine_sink(text: str, flags: Data) -> Data:
    """The sink that the JSON describes, as read_config takes it. `flags`: keys of a sink that change it.

    Raises ConfigError that begins with the key, for what differs from a sink or would be silent.
    """
    try:
        told = msgspec.json.decode(text)
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(one_line(str(error))) from None
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    if not isinstance(told, dict):
        raise ConfigError(f"{shown(told)} is not an object")
    known = (*SinkConfig.__struct_fields__, *_THEIR_OWN)
    for key in told:
        if key not in known:
            raise unknown_key(key, key, known)
    sink = _DEFAULTS | {key: value for key, value in told.items() if key not in _THEIR_OWN}
    _take_their_own(told, sink)
    sink |= flags
    if "mode" not in sink:
        _infer_mode(sink)
    return sink


def _take_their_own(told: Data, sink: Data) -> None:
    """Move what the engines' own keys say into `sink`. A configuration that is silent is an error."""
    publisher = told.get("publisher", "zmq")
    if publisher in (None, "null"):
        raise ConfigError(f"publisher: {publisher!r}, and nothing would be published")
    check_choice("publisher", publisher, ("zmq",))
    enabled = told.get("enable_kv_cache_events", True)
    check_flag("enable_kv_cache_events", enabled)
    if not enabled:
        raise ConfigError("enable_kv_cache_events: False, and nothing would be published")
    check_int("max_queue_size", told.get("max_queue_size", 0), 0)
    form = told.get("format")
    if form is not None:
        check_choice("format", form, tuple(_FORMATS))
        if sink.setdefault("dialect", _FORMATS[form]) != _FORMATS[form]:
            raise ConfigError(f"format: {form!r}, and dialect is {shown(sink['dialect'])}")
    if told.get("bind") is not None:
        check_flag("bind", told["bind"])
        mode = "bind" if told["bind"] else "connect"
        if sink.setdefault("mode", mode) != mode:
            raise ConfigError(f"bind: {told['bind']}, and mode is {shown(sink['mode'])}")


def _infer_mode(sink: Data) -> None:
    """As the engines do: ipc, `*`, 0.0.0.0 and every IPv6 address with `::` bind, all else connects.

    Not so on loopback, where it is most likely a mistake: routers connect as well.
    """
    endpoint = sink["endpoint"]
    if not isinstance(endpoint, str):
        sink["mode"] = "connect"
        return
    parsed = Endpoint.parse("endpoint", endpoint)
    if parsed.scheme == "ipc" or parsed.is_wildcard or parsed.port is None or "::" in parsed.host:
        sink["mode"] = "bind"
    elif parsed.is_loopback:
        raise ConfigError(
            f"endpoint: {endpoint!r} without a mode: SGLang and vLLM connect there, and so do routers,"
            ' so nothing would ever arrive; add "mode": "bind", or "mode": "connect"'
        )
    else:
        sink["mode"] = "connect"
