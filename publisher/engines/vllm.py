"""vLLM's publisher: with KVEVENTS_SIDECAR=1, the sidecar in place of "zmq".

vLLM allows no other publisher than "null" and "zmq", and none but its own keys; ours are in the file of
KVEVENTS_CONFIG.
"""

from __future__ import annotations

import os
from typing import Any

from publisher.host_log import host_log

__all__ = ["SWITCH", "SidecarPublisher", "register"]

SWITCH = "KVEVENTS_SIDECAR"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_REPLACED = "zmq"

_log = host_log("kvevents.engines")


def register() -> None:
    """The entry point of `vllm.general_plugins`. Never raises; the same however often it is called."""
    switch = os.environ.get(SWITCH, "").strip().lower()
    if switch not in _ON:
        if switch not in _OFF:
            _log.warning(
                "%s: %r is none of 1, true, yes, on, 0, false, no, off; vLLM publishes itself",
                SWITCH,
                switch,
            )
        return
    try:
        from vllm.distributed.kv_events import (
            EventPublisherFactory,
        )

        EventPublisherFactory._registry[_REPLACED] = SidecarPublisher
    except Exception as error:
        _log.warning("vLLM's publishers are not where they were; vLLM publishes itself: %r", error)


class SidecarPublisher:
    """An EventPublisher of vLLM's, by its methods.

    `keys`: those that vLLM has read and filled up. Raises ConfigError that names the key.
    """

    def __init__(self, data_parallel_rank: int = 0, **keys: Any) -> None:
        from publisher.engines.sidecar import EngineSidecar
        from publisher.engines.told import changed, read_told

        self._keys = keys
        told = read_told(changed(keys), os.environ, dialect="vllm")
        self._sidecar = EngineSidecar(told, data_parallel_rank, {})

    def publish(self, events: Any) -> None:
        """Never waits, never raises. `events`: a batch, whose rank is filled in where it has none."""
        self._sidecar.publish(events.ts, events.events, events.data_parallel_rank)

    def shutdown(self) -> None:
        """End the sidecar, in order."""
        self._sidecar.close()

    def get_publisher_config(self) -> Any:
        """Where this rank's first sink is, as a KVEventsConfig of vLLM's; None while that is not known: a
        port that is still to be chosen, as before the first block is stored.
        """
        from vllm.config.kv_events import KVEventsConfig

        sidecar = self._sidecar
        sink, rank = sidecar.told.config.sinks[0], sidecar.dp_rank
        endpoint, replay_endpoint = sink.endpoints_of(rank)[0], sink.replay_endpoint_of(rank)
        if (bound := sidecar.bound) is not None and sink.mode == "bind":
            endpoint = _as_told(endpoint, bound.endpoint)
            if replay_endpoint is not None and bound.replay_endpoint is not None:
                replay_endpoint = _as_told(replay_endpoint, bound.replay_endpoint)
        elif _has_any_port(endpoint) or (replay_endpoint and _has_any_port(replay_endpoint)):
            return None
        known = {name: self._keys[name] for name in ("max_queue_size",) if name in self._keys}
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher=_REPLACED,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=sink.buffer_steps,
            hwm=sink.hwm,
            topic=sidecar.topic,
            **known,
        )


def _has_any_port(endpoint: str) -> bool:
    from publisher.config.endpoint import Endpoint

    return Endpoint.parse("endpoint", endpoint).is_any


def _as_told(told: str, bound: str) -> str:
    """As vLLM says it: as it was told, but for a free port, which is named at the node's address."""
    from publisher.config.endpoint import Endpoint

    if not _has_any_port(told):
        return told
    parsed = Endpoint.parse("endpoint", bound)
    if parsed.scheme != "tcp" or not parsed.is_wildcard:
        return bound
    from vllm.utils.network_utils import get_ip, get_tcp_uri

    return str(get_tcp_uri(get_ip(), parsed.port))
