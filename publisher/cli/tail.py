"""`kvevents tail`."""

from __future__ import annotations

import argparse

from publisher.checks import check_text
from publisher.cli.parsing import NO_CONNECTION, Parser, add_keys, read_keys, say

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `tail`."""
    parser.add_argument("endpoint", help="the publisher's PUB endpoint, e.g. tcp://127.0.0.1:5557")
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="its replay endpoint: start with the state now, and close gaps",
    )
    parser.add_argument("--topic", default="", help="only topics that begin so")
    parser.add_argument("-n", "--count", type=int, metavar="N", help="end after N events")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--timeout", type=float, metavar="S", help="end after S seconds of silence")
    add_keys(parser)
    parser.epilog = f"Exit code {NO_CONNECTION} when nothing came at all in --timeout seconds."


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.tools.tail import tail

    if options.count is not None and options.count < 1:
        raise ValueError(f"--count: {options.count} is below 1")
    if options.timeout is not None and not 0 < options.timeout <= 86_400:
        raise ValueError(f"--timeout: {options.timeout} is not above 0 and at most 86400")
    check_text("--topic", options.topic)
    server_key, client_keys = read_keys(options)
    seen = tail(
        options.endpoint,
        options.replay_endpoint,
        topic=options.topic,
        count=options.count,
        as_json=options.output == "json",
        timeout_s=options.timeout,
        write=lambda line: print(line, flush=True),
        server_key=server_key,
        client_keys=client_keys,
    )
    if seen:
        return 0
    silence = f"nothing came from {options.endpoint} in {options.timeout:g} s"
    if options.replay_endpoint is not None:
        silence += f": it is not there, or {options.replay_endpoint} does not answer"
    say(f"kvevents tail: {silence}")
    return NO_CONNECTION
