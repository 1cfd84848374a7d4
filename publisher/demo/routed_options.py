"""What `kvevents demo --router` can be told, and the bounds."""

from __future__ import annotations

import argparse

import msgspec

from publisher.config.sidecar_config import ConfigError
from publisher.demo.options import BUNDLED_TRACE
from publisher.demo.site import ENGINE, find_router

__all__ = ["RoutedOptions", "read_routed_options"]

_NOT_HERE = ("loop", "storage", "storage_dir", "mooncake_master", "write_policy")
_NOR_HERE = ("endpoint", "replay_endpoint")


class RoutedOptions(msgspec.Struct, frozen=True):
    """Settings, checked."""

    router: str
    """The program."""
    trace: str = str(BUNDLED_TRACE)
    requests: int = 400
    """For each policy."""
    page_size: int = 16
    device_pages: int = 512
    """Of each worker."""
    host_pages: int = 1024
    as_json: bool = False

    @property
    def most_pages(self) -> int:
        """Longer prompts of the trace are left out."""
        return min(32, self.device_pages // 8)


def read_routed_options(options: argparse.Namespace) -> RoutedOptions:
    """Raises ConfigError naming the option, its value and the bound."""
    if not ENGINE.is_file():
        raise ConfigError(
            "--router: needs a checkout of kvevents: its workers are examples/engine.py, which is not"
            " installed"
        )
    for name in (*_NOT_HERE, *_NOR_HERE):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: not with --router")
    given = {
        name: value
        for name in ("trace", "requests", "page_size", "device_pages", "host_pages")
        if (value := getattr(options, name)) is not None
    }
    for name, low, high in (
        ("requests", 20, 100_000),
        ("page_size", 1, 256),
        ("device_pages", 64, 1 << 16),
        ("host_pages", 64, 1 << 16),
    ):
        if not low <= given.get(name, low) <= high:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {given[name]} is not in {low}..{high} with --router"
            )
    return RoutedOptions(find_router(options.router), **given, as_json=options.json)
