"""The sidecar that the serving process spawns, its worker's end, and the subscriber."""

from importlib import import_module
from typing import TYPE_CHECKING

from kvevents.gaps import Gap, Lost, Restarted
from publisher.attendant import Respawn, SidecarState
from publisher.client import ClientStats, LinkError, SidecarClient
from publisher.config import (
    ConfigError,
    CurveConfig,
    RelayConfig,
    SidecarConfig,
    SinkConfig,
    WorkerInfo,
    read_config,
)
from publisher.config_file import load_config
from publisher.spawn import Sidecar, listen, spawn

if TYPE_CHECKING:
    from publisher.subscriber import Batch, Received, Subscriber, SubscriberStats, Undecodable
else:
    _NEED_ZMQ = {"Batch", "Received", "Subscriber", "SubscriberStats", "Undecodable"}

    def __getattr__(name):
        """The subscriber's names, once they are asked for: only they need pyzmq in this process."""
        if name not in _NEED_ZMQ:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("publisher.subscriber"), name)


__all__ = [
    "Batch",
    "ClientStats",
    "ConfigError",
    "CurveConfig",
    "Gap",
    "LinkError",
    "Lost",
    "Received",
    "RelayConfig",
    "Respawn",
    "Restarted",
    "Sidecar",
    "SidecarClient",
    "SidecarConfig",
    "SidecarState",
    "SinkConfig",
    "Subscriber",
    "SubscriberStats",
    "Undecodable",
    "WorkerInfo",
    "listen",
    "load_config",
    "read_config",
    "spawn",
]
