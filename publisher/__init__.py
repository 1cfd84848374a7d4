"""The sidecar that the serving process spawns, its worker's end, and the subscriber."""

TYPE_CHECKING = False  # nothing is imported at first: a Ctrl-C meanwhile would be a traceback
if TYPE_CHECKING:
    from kvevents.gaps import Gap, Lost, Restarted
    from publisher.config.config_file import load_config
    from publisher.config.sidecar_config import (
        ConfigError,
        CurveConfig,
        RelayConfig,
        SidecarConfig,
        SinkConfig,
        WorkerInfo,
        read_config,
    )
    from publisher.subscriber.subscriber import (
        Batch,
        Received,
        Subscriber,
        SubscriberStats,
        Undecodable,
    )
    from publisher.worker.attendant import Respawn, SidecarState
    from publisher.worker.client import ClientStats, LinkError, SidecarClient
    from publisher.worker.spawned import Sidecar, listen, spawn
else:
    _HOMES = {
        "kvevents.gaps": "Gap Lost Restarted",
        "publisher.worker.attendant": "Respawn SidecarState",
        "publisher.worker.client": "ClientStats LinkError SidecarClient",
        "publisher.config.sidecar_config": "ConfigError CurveConfig RelayConfig"
        " SidecarConfig SinkConfig WorkerInfo read_config",
        "publisher.config.config_file": "load_config",
        "publisher.worker.spawned": "Sidecar listen spawn",
        "publisher.subscriber.subscriber": "Batch Received Subscriber SubscriberStats Undecodable",
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name):
        """A public name, once it is asked for: a worker needs no pyzmq, and a command starts at once."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value


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
