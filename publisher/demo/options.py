"""What the demo can be told, and the bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from publisher.config.sidecar_config import ConfigError, check_endpoint, is_same

__all__ = [
    "ANY_PORT",
    "BUNDLED_TRACE",
    "KV_BYTES_PER_TOKEN",
    "STORAGES",
    "WRITE_POLICIES",
    "DemoOptions",
    "add_options",
    "read_options",
]

BUNDLED_TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl.gz"
KV_BYTES_PER_TOKEN = 64
"""Two layers, one head of four float32, K and V: real pages, small enough for any machine."""

STORAGES = ("file", "mooncake", "none")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")

_MAX_PAGE_SIZE = 8192
_MAX_POOL_BYTES = 8 << 30
_HOST, _PORT, _REPLAY_PORT = "127.0.0.1", 5557, 5558
ANY_PORT = f"tcp://{_HOST}:0"

_TRACE_FORMAT = """\
A trace is JSON objects, one a line, plain or compressed with gzip:
  input_length   tokens of the prompt
  output_length  tokens of the reply
  hash_ids       one integer for each 512 tokens of the prompt, begun ones
                 included; prompts share a prefix as far as their hash_ids are
                 equal
Other keys are ignored. A line has at most 16 MiB.
"""


class DemoOptions(msgspec.Struct, frozen=True):
    """The demo's settings, checked."""

    trace: str
    requests: int
    device_pages: int
    host_pages: int
    """0: no host tier."""
    storage: str
    storage_dir: str
    """Empty: a folder that goes away with the demo."""
    mooncake_master: str
    """Empty: one that the demo starts."""
    write_policy: str
    page_size: int
    endpoint: str
    replay_endpoint: str
    movable: tuple[str, ...]
    """Those of the two that nobody asked for: a free port does as well when they are taken."""
    as_json: bool
    loop: bool = False
    """Begin the trace anew whenever it is over: there is no end but Ctrl-C."""

    @property
    def buffer_steps(self) -> int:
        """Batches the sidecar retains: few enough that the log has rolled when the router comes."""
        return max(1, min(256, self.requests // 32))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _TRACE_FORMAT
    parser.add_argument(
        "--trace",
        default=str(BUNDLED_TRACE),
        metavar="FILE",
        help="requests, plain or gzip (see below); default: the bundled conversations",
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help="at most; default 2000, and 400 with --router"
    )
    parser.add_argument(
        "--router",
        metavar="PROGRAM",
        help="a vllm-router: run two example engines behind it, under two policies, and kill one;"
        " needs a checkout",
    )
    parser.add_argument(
        "--loop",
        action="store_true",
        help="begin anew when these are over, without a summary, until Ctrl-C: time to look at it",
    )
    parser.add_argument(
        "--device-pages",
        type=int,
        metavar="N",
        help="default 16384, and 512 of each engine with --router",
    )
    parser.add_argument(
        "--host-pages",
        type=int,
        metavar="N",
        help="pages of the host tier; default: half as many again as the device's, and 1024 with"
        " --router; 0: no host tier",
    )
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        help="the tier below the host; default: file, or none without a host tier",
    )
    parser.add_argument(
        "--storage-dir",
        metavar="DIR",
        help="keep the file store there: a second run starts with what the first one left; default:"
        " a temporary folder",
    )
    parser.add_argument(
        "--mooncake-master",
        metavar="HOST:PORT",
        help="default: one started for the demo",
    )
    parser.add_argument(
        "--write-policy",
        choices=WRITE_POLICIES,
        metavar="POLICY",
        help=f"when pages are copied to the tiers below: %(choices)s; default {WRITE_POLICIES[0]}",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="tokens per page; scales the prompts, since a block of the trace (512 tokens) becomes"
        " one page; default 64, and 16 with --router",
    )
    parser.add_argument(
        "--endpoint",
        help=f"default tcp://{_HOST}:{_PORT}, or a free port when that is taken",
    )
    parser.add_argument(
        "--replay-endpoint",
        help=f"default tcp://{_HOST}:{_REPLAY_PORT}, or a free port when that is taken",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def read_options(options: argparse.Namespace) -> DemoOptions:
    """Raises ConfigError naming the option, its value and the bound."""
    requests, page_size, device_pages = (
        default if value is None else value
        for value, default in (
            (options.requests, 2000),
            (options.page_size, 64),
            (options.device_pages, 16_384),
        )
    )
    host_pages = device_pages * 3 // 2 if options.host_pages is None else options.host_pages
    for name, value, low, high in (
        ("--requests", requests, 1, 10_000_000),
        ("--page-size", page_size, 1, _MAX_PAGE_SIZE),
        ("--device-pages", device_pages, 1, 1 << 30),
        ("--host-pages", host_pages, 0, 1 << 31),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name}: {value} is not in {low}..{high}")
    for name, value in (("--device-pages", device_pages), ("--host-pages", host_pages)):
        pool = value * page_size * KV_BYTES_PER_TOKEN
        if pool > _MAX_POOL_BYTES:
            raise ConfigError(
                f"{name}: {value} pages of {page_size} tokens need {pool} bytes, above"
                f" {_MAX_POOL_BYTES}"
            )
    if options.loop and options.json:
        raise ConfigError("--json: the summary is never written with --loop")
    storage = options.storage or ("file" if host_pages else "none")
    if storage != "none" and not host_pages:
        raise ConfigError(f"--storage: {storage} needs a host tier, and --host-pages is 0")
    for name, value, needed in (
        ("--storage-dir", options.storage_dir, "file"),
        ("--mooncake-master", options.mooncake_master, "mooncake"),
    ):
        if value is not None and storage != needed:
            raise ConfigError(f"{name}: {value} needs --storage {needed}, which is {storage}")
        if value == "":
            raise ConfigError(f"{name}: empty")
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
        requests=requests,
        device_pages=device_pages,
        host_pages=host_pages,
        storage=storage,
        storage_dir=options.storage_dir or "",
        mooncake_master=options.mooncake_master or "",
        write_policy=options.write_policy or WRITE_POLICIES[0],
        page_size=page_size,
        endpoint=options.endpoint or _default_endpoint(_PORT, options.replay_endpoint),
        replay_endpoint=options.replay_endpoint
        or _default_endpoint(_REPLAY_PORT, options.endpoint),
        movable=tuple(key for key in ("endpoint", "replay_endpoint") if not getattr(options, key)),
        as_json=options.json,
        loop=options.loop,
    )


def _default_endpoint(port: int, other: str | None) -> str:
    """`port`, or any free one when the other socket was given that."""
    taken = other is not None and other.endswith(f":{port}")
    return ANY_PORT if taken else f"tcp://{_HOST}:{port}"
