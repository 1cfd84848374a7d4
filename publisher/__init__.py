"""The sidecar that the serving process spawns, its worker's end, and the subscriber."""

from publisher.client import ClientStats, LinkError, SidecarClient
from publisher.config import ConfigError, SidecarConfig, SinkConfig, WorkerInfo
from publisher.spawn import Sidecar, spawn
from publisher.subscriber import Batch, Received, Subscriber, SubscriberStats, Undecodable

__all__ = [
    "Batch",
    "ClientStats",
    "ConfigError",
    "LinkError",
    "Received",
    "Sidecar",
    "SidecarClient",
    "SidecarConfig",
    "SinkConfig",
    "Subscriber",
    "SubscriberStats",
    "Undecodable",
    "WorkerInfo",
    "spawn",
]
