"""`kvevents record`."""

from __future__ import annotations

import argparse
from pathlib import Path

from publisher.cli.parsing import (
    NO_CONNECTION,
    Parser,
    add_limits,
    add_sources,
    check_limits,
    read_keys,
    read_sources,
    say,
)

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `record`."""
    add_sources(parser)
    parser.add_argument(
        "-w", "--write", metavar="FILE", required=True, help="the capture; it must not be there yet"
    )
    add_limits(parser)
    parser.epilog = f"Exit code {NO_CONNECTION} when nothing came."


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    import time

    from kvevents.capture import CaptureHead
    from publisher.tools.record import record
    from publisher.tools.source import Address, Sources

    check_limits(options)
    addresses = read_sources(options)
    address = addresses[0]
    if len(addresses) != 1 or not isinstance(address, Address):
        raise ValueError("SOURCE: one endpoint is recorded at a time")
    server_key, client_keys = read_keys(options)
    head = CaptureHead(
        endpoint=address.endpoint,
        replay_endpoint=address.replay_endpoint,
        topic=options.topic,
        started_ns=time.time_ns(),
    )
    with Sources(
        [address], topic=options.topic, server_key=server_key, client_keys=client_keys
    ) as sources:
        file = Path(options.write)
        came = record(sources, head, file, for_s=options.for_s, count=options.count)
        if not sources.live[0].connected:
            say(f"kvevents record: no connection to {address.endpoint}")
    if not came:
        say("kvevents record: nothing came")
        return NO_CONNECTION
    what = "batch is" if came == 1 else "batches are"
    say(f"kvevents record: {came} {what} in {options.write}")
    return 0
