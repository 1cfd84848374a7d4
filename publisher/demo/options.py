"""What the demo can be told, and the bounds."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import msgspec

from publisher.config import ConfigError, check_endpoint, is_same

__all__ = ["BUNDLED_TRACE", "KV_BYTES_PER_TOKEN", "DemoOptions", "add_options", "read_options"]

BUNDLED_TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl.gz"
KV_BYTES_PER_TOKEN = 64
"""Two layers, one head of four float32, K and V: real pages, small enough for any machine."""

_MAX_PAGE_SIZE = 8192
_MAX_POOL_BYTES = 8 << 30
_HOST, _PORT, _REPLAY_PORT = "127.0.0.1", 5557, 5558


class DemoOptions(msgspec.Struct, frozen=True):
    """The demo's settings, checked."""

    trace: str
    requests: int
    device_pages: int
    page_size: int
    endpoint: str
    replay_endpoint: str
    as_json: bool

    @property
    def buffer_steps(self) -> int:
        """Batches the sidecar retains: few enough that the log has rolled when the router comes."""
        return max(1, min(256, self.requests // 8))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", default=str(BUNDLED_TRACE), metavar="FILE", help="requests, plain or .gz"
    )
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    parser.add_argument("--device-pages", type=int, default=16_384, metavar="N")
    parser.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens per page")
    parser.add_argument(
        "--endpoint", help=f"default tcp://{_HOST}:{_PORT}, or a free port when that is taken"
    )
    parser.add_argument(
        "--replay-endpoint",
        help=f"default tcp://{_HOST}:{_REPLAY_PORT}, or a free port when that is taken",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def read_options(options: argparse.Namespace) -> DemoOptions:
    """Raises ConfigError naming the option, its value and the bound."""
    for name, value, high in (
        ("--requests", options.requests, 10_000_000),
        ("--page-size", options.page_size, _MAX_PAGE_SIZE),
        ("--device-pages", options.device_pages, 1 << 30),
    ):
        if not 1 <= value <= high:
            raise ConfigError(f"{name}: {value} is not in 1..{high}")
    pool = options.device_pages * options.page_size * KV_BYTES_PER_TOKEN
    if pool > _MAX_POOL_BYTES:
        raise ConfigError(
            f"--device-pages: {options.device_pages} pages of {options.page_size} tokens need"
            f" {pool} bytes, above {_MAX_POOL_BYTES}"
        )
    for name, endpoint in (
        ("--endpoint", options.endpoint),
        ("--replay-endpoint", options.replay_endpoint),
    ):
        if endpoint is not None:
            check_endpoint(name, endpoint)
    if options.endpoint is not None and is_same(options.endpoint, options.replay_endpoint):
        raise ConfigError(f"--replay-endpoint: {options.endpoint} is the endpoint as well")
    return DemoOptions(
        trace=options.trace,
        requests=options.requests,
        device_pages=options.device_pages,
        page_size=options.page_size,
        endpoint=options.endpoint or _default_endpoint(_PORT, options.replay_endpoint),
        replay_endpoint=options.replay_endpoint
        or _default_endpoint(_REPLAY_PORT, options.endpoint),
        as_json=options.json,
    )


def _default_endpoint(port: int, other: str | None) -> str:
    """`port` when it is free and not the other socket's, else 0: the system picks one."""
    if other is not None and other.endswith(f":{port}"):
        return f"tcp://{_HOST}:0"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return f"tcp://{_HOST}:0"
    return f"tcp://{_HOST}:{port}"
