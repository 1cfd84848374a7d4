"""`kvevents doctor`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    Parser,
    add_color,
    add_keys,
    check_count,
    read_keys,
)
from publisher.config.checks import check_text, one_line

if TYPE_CHECKING:
    from publisher.tools.doctor import Case, Finding

__all__ = ["add_options", "run"]

_LONGEST_S = 3600


def add_options(parser: Parser) -> None:
    """Of `doctor`."""
    parser.description = (
        "Says in plain words why nothing arrives from a publisher of KV events, and what\n"
        "to change. Tell it what the router was told."
    )
    parser.add_argument(
        "endpoint",
        metavar="SOURCE",
        help="the publisher's PUB endpoint, e.g. tcp://10.0.0.5:5557, or with its replay endpoint"
        " tcp://10.0.0.5:5557,5558; a name before it (w1=) is left out",
    )
    parser.add_argument("--replay-endpoint", metavar="ENDPOINT", help="its replay endpoint")
    parser.add_argument("--topic", default="", help="the filter that the router subscribes with")
    parser.add_argument(
        "--as", dest="consumer", metavar="NAME", help="which router it is for, as lint knows them"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per block that the router expects"
    )
    parser.add_argument(
        "--http", metavar="URL", help="http://HOST:PORT of the sidecar, or the engine: ask it too"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=12.0,
        metavar="S",
        help="how long to wait for a message; 12 by default, more than two of a sidecar's heartbeats",
    )
    parser.add_argument(
        "--bind",
        dest="may_bind",
        action="store_true",
        help="where nobody listens, listen for a second to see whether a publisher connects; one that"
        " binds and starts in that second finds its port taken",
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="json: a list of findings"
    )
    add_color(parser)
    add_keys(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"""\
It subscribes to everything for a moment and asks for one replay, reads some
thousands of messages at most (20,000 of a replay of empty ones), and stops when
it knows. Its last line is the likeliest cause; what to change is said there, or
above. A sink that tells_joiners tells its state anew for it; one with CURVE
counts its greeting as a handshake that failed.

examples:
  kvevents doctor tcp://10.0.0.5:5557
  kvevents doctor tcp://10.0.0.5:5557,5558 --as vllm-router --block-size 16
  kvevents doctor tcp://10.0.0.5:5557 --topic kv@ --http http://10.0.0.5:9400
  kvevents doctor tcp://h:5557 --server-key w.key --client-key r.key_secret

exit codes: 0 nothing wrong was found, {FINDINGS} something is wrong, 2 usage,
{NO_CONNECTION} nobody is there."""
    parser.names = _consumer_names


def _consumer_names() -> str:
    from kvevents.lint import CONSUMERS

    return textwrap.fill(f"names for --as: {', '.join(CONSUMERS)}", 80, break_on_hyphens=False)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.tools.colour import painter, wants_colour
    from publisher.tools.doctor import conclusion, examine, exit_code, last_lines, lines

    case = _case(options)
    as_json = options.output == "json"
    paint = painter(colours=wants_colour(options.color, sys.stdout, os.environ))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    findings: list[Finding] = []
    examination = examine(case)
    while True:
        try:
            finding = next(examination)
        except StopIteration as end:
            last = conclusion(findings, end.value)
            break
        findings.append(finding)
        if not as_json:
            print("\n".join(lines(finding, paint, width)), flush=True)
    if as_json:
        _print_json([*findings, last])
    else:
        print("\n".join(paint(line, "bold") for line in last_lines(last, width)), flush=True)
    return exit_code(findings)


def _print_json(findings: list[Finding]) -> None:
    import msgspec

    from publisher.tools.text import json_text

    told: list[dict[str, Any]] = [
        {
            "probe": one.probe,
            "verdict": one.verdict,
            "text": one_line(one.text),
            "advice": one_line(one.advice),
        }
        for one in findings
    ]
    print(json_text(msgspec.json.format(msgspec.json.encode(told), indent=2)), flush=True)


def _case(options: argparse.Namespace) -> Case:
    """Raises ValueError for what cannot be."""
    from publisher.subscriber.dial import check_client_keys
    from publisher.tools.doctor import Case
    from publisher.tools.doctor.asking import read_url
    from publisher.tools.lint import read_consumers

    check_text("SOURCE", options.endpoint)
    check_text("--topic", options.topic)
    check_count("--block-size", options.block_size)
    if not 0 < options.timeout <= _LONGEST_S:
        raise ValueError(f"--timeout: {options.timeout} is not above 0 and at most {_LONGEST_S}")
    consumer = None
    if options.consumer is not None:
        consumer, *more = read_consumers(options.consumer)
        if more:
            raise ValueError("--as: one router at a time; kvevents lint takes several")
    endpoint, replay_endpoint = _addresses(options.endpoint, options.replay_endpoint)
    return Case(
        endpoint,
        replay_endpoint,
        topic=options.topic,
        consumer=consumer,
        block_size=options.block_size,
        http=None if options.http is None else read_url("--http", options.http),
        timeout_s=options.timeout,
        may_bind=options.may_bind,
        keys=check_client_keys(*read_keys(options)),
    )


def _addresses(text: str, replay_endpoint: str | None) -> tuple[str, str | None]:
    """What is no address is a finding, not a mistake in the command; a file is the latter."""
    from pathlib import Path

    from publisher.tools.source import Address, meant, parse_sources

    if meant(text) not in (None, text):
        return text, replay_endpoint
    if "://" not in text:
        if Path(text).exists():
            raise ValueError(f"SOURCE: {text} is a file; kvevents check and lint read captures")
        return text, replay_endpoint
    (found,) = parse_sources([text], replay_endpoint)
    assert isinstance(found, Address)
    return found.endpoint, found.replay_endpoint
