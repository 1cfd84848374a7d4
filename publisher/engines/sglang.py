"""SGLang's publisher "sidecar": `--kv-events-config '{"publisher": "sidecar", …}'`.

SGLang's own class for that option ignores keys that it does not know, so the option's text is looked at
once more, on its way through SGLang's factory: with a hook of SGLang's, where it has hooks.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from publisher.host_log import host_log

__all__ = ["SidecarPublisher", "register"]

NAME = "sidecar"
_FACTORY = "sglang.srt.disaggregation.kv_events.EventPublisherFactory"

_log = host_log("kvevents.engines")
_text: contextvars.ContextVar[str | None] = contextvars.ContextVar("kv_events_config", default=None)
"""What the option says, while the factory is at it."""


def register() -> None:
    """The entry point of `sglang.srt.plugins`. Never raises; the same however often it is called."""
    try:
        from sglang.srt.disaggregation.kv_events import (
            EventPublisherFactory,
        )

        if NAME in EventPublisherFactory._registry:
            return
        EventPublisherFactory.register_publisher(NAME, SidecarPublisher)
    except Exception as error:
        _log.warning(
            "SGLang's publishers are not where they were; there is no publisher %r: %r", NAME, error
        )
        return
    try:
        from sglang.srt.plugins.hook_registry import (
            HookRegistry,
            HookType,
        )

        HookRegistry.register(f"{_FACTORY}.create", _creating, HookType.AROUND)
    except Exception as error:
        _log.warning(
            "SGLang has no hooks as it had; of --kv-events-config only SGLang's own keys are read, and"
            " ours from the file of KVEVENTS_CONFIG: %r",
            error,
        )


def _creating(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around EventPublisherFactory.create(cls, config, attn_dp_rank)."""
    text = next((one for one in (*args[1:2], kwargs.get("config")) if isinstance(one, str)), None)
    token = _text.set(text)
    try:
        return create(*args, **kwargs)
    finally:
        _text.reset(token)


class SidecarPublisher:
    """An EventPublisher of SGLang's, by its methods.

    `keys`: those that SGLang's factory has read and filled up. Raises ConfigError that names the key.
    """

    def __init__(self, attn_dp_rank: int = 0, **keys: Any) -> None:
        from publisher.engines.sidecar import EngineSidecar
        from publisher.engines.told import read_told

        told = read_told(_said(keys), os.environ, dialect="sglang")
        self._sidecar = EngineSidecar(told, attn_dp_rank, _of_the_engine())

    def publish(self, events: Any) -> None:
        """Never waits, never raises. `events`: a batch, whose rank is filled in where it has none."""
        self._sidecar.publish(events.ts, events.events, events.attn_dp_rank)

    def shutdown(self) -> None:
        """End the sidecar, in order."""
        self._sidecar.close()

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Where another process of this host can subscribe; None where the first sink connects."""
        sidecar = self._sidecar
        sidecar.ensure(block_size)
        sink, bound = sidecar.told.config.sinks[0], sidecar.bound
        if bound is None or sink.mode != "bind":
            return None
        source = {
            "dp_rank": sidecar.dp_rank,
            "endpoint": _local(bound.endpoint),
            "topic": sidecar.topic,
            "block_size": block_size,
        }
        if bound.replay_endpoint is not None:
            source["replay_endpoint"] = _local(bound.replay_endpoint)
        return source


def _said(keys: dict[str, Any]) -> dict[str, Any]:
    """What the option says: all of it, where its text is known."""
    from publisher.engines.told import changed

    text = _text.get()
    if text is None:
        return changed(keys)
    said = msgspec.json.decode(text)
    assert isinstance(said, dict), "SGLang has read it as an object"
    return {name: value for name, value in said.items() if value is not None}


def _of_the_engine() -> dict[str, Any]:
    """What SGLang's configuration says, as far as it is where it was."""
    found: dict[str, Any] = {}
    with _as_far_as_known():
        from sglang.srt.arg_groups.overrides import (
            kv_event_block_size_of,
        )
        from sglang.srt.runtime_context import get_server_args

        found["block_size"] = _count(kv_event_block_size_of(get_server_args()))
    with _as_far_as_known():
        from sglang.srt.runtime_context import get_parallel

        found["dp_size"] = _count(get_parallel().num_dp_ranks)
    with _as_far_as_known():
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        name = args.served_model_name or args.model_path
        found["model"] = name if isinstance(name, str) else None
    return found


@contextlib.contextmanager
def _as_far_as_known() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _log.debug("SGLang does not say: %r", error)


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _local(endpoint: str) -> str:
    """A wildcard as loopback, and a path in full; a name of Linux's, `@...`, is in no folder."""
    from publisher.config.endpoint import Endpoint

    parsed = Endpoint.parse("endpoint", endpoint)
    if parsed.scheme == "ipc" and not parsed.path.startswith("@"):
        return f"ipc://{os.path.abspath(parsed.path)}"  # noqa: PTH100  a path that need not exist
    if not parsed.is_wildcard:
        return endpoint
    host = "[::1]" if ":" in parsed.host else "127.0.0.1"
    return f"tcp://{host}:{parsed.port}"
