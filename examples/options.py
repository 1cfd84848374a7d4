"""What the example engine can be told on its command line."""

from __future__ import annotations

import argparse

__all__ = ["read_options"]

_COUNTS = {
    "port": (0, 65_535, 8000, "0: a free one"),
    "page-size": (1, 8192, 16, "tokens in a page, which is an event's block"),
    "device-pages": (1, 1 << 24, 1024, "pages of the device, whose memory is this process's"),
    "host-pages": (0, 1 << 24, 0, "pages of the host tier; 0: none"),
    "vocab-size": (2, 1 << 20, 128, "token ids of the model"),
    "max-running": (1, 1024, 8, "requests at work at the same time"),
    "max-waiting": (1, 1 << 20, 256, "requests that may wait; the next is answered with 503"),
}


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Of `arguments`, or of this process. Raises SystemExit that names the option and its bound."""
    parser = argparse.ArgumentParser(
        "engine", description="Serves a tiny model with random weights."
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; default %(default)s")
    for name, (_, _, default, what) in _COUNTS.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what}; default %(default)s"
        )
    parser.add_argument("--model", default="example", help="its name; default %(default)s")
    parser.add_argument("--worker-id", default="", help="of this engine, for events and answers")
    parser.add_argument("--storage-dir", metavar="DIR", help="the file tier; default: none")
    parser.add_argument(
        "--kv-events", metavar="FILE", help="configuration of the sidecar, .toml or .json"
    )
    parser.add_argument(
        "--link",
        metavar="DIR",
        help="do not spawn a sidecar: one that runs elsewhere connects there",
    )
    options = parser.parse_args(arguments)
    for name, (low, high, _, _) in _COUNTS.items():
        value = getattr(options, name.replace("-", "_"))
        if not low <= value <= high:
            parser.error(f"--{name}: {value} is not in {low}..{high}")
    if options.storage_dir and not options.host_pages:
        parser.error("--storage-dir: needs a host tier, and --host-pages is 0")
    if options.link and options.kv_events:
        parser.error("--kv-events: with --link the sidecar reads its own configuration")
    return options
