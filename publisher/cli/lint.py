"""`kvevents lint`."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from publisher.cli.following import nothing_came, say_begun, unreached
from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    Parser,
    add_limits,
    add_sources,
    check_limits,
    read_keys,
    read_sources,
    say,
)

if TYPE_CHECKING:
    from publisher.tools.lint import Outcome
    from publisher.tools.source import Source

__all__ = ["add_options", "run"]

_DESCRIPTION = """\
Which routers would lose what of a stream, and why: a line for each router, and
below it one for each kind of loss, with how often and in which seqs it came. Of
a live stream the first loss of a kind is written when it comes as well. No
router is needed: how each reads was observed from its own code.
"""

_EPILOG = """\
examples:
  kvevents lint tcp://10.0.0.5:5557,5558 --for 10
      every router, what is retained and ten seconds of what comes
  kvevents lint monday.capture --as dynamo,llm-d -v
      these two, of a capture, and each loss when it comes
  kvevents lint tcp://10.0.0.5:5557 --as vllm-router -n 100 -o json
      an object per line: findings, how often each came, and a summary

exit codes: 0 nothing is lost; 1 something would be, a capture is damaged, or a
  replay does not end; 2 usage; 3 nothing came, or no block was stored
"""


def add_options(parser: Parser) -> None:
    """Of `lint`."""
    parser.add_argument(
        "--as",
        dest="consumers",
        metavar="NAME[,NAME…]",
        help="these routers only; else every one",
    )
    add_sources(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="write each loss when it comes"
    )
    add_limits(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.names = _consumer_names


def _consumer_names() -> str:
    from kvevents.lint import CONSUMERS

    text = f"names for --as: {', '.join(CONSUMERS)}"
    return textwrap.fill(text, 78, subsequent_indent="  ", break_on_hyphens=False)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.tools.lint import Report, lint, read_consumers
    from publisher.tools.source import Live, Sources

    check_limits(options)
    consumers = read_consumers(options.consumers)
    addresses = read_sources(options)
    server_key, client_keys = read_keys(options)
    as_json = options.output == "json"
    several = len(addresses) > 1

    def report(source: Source) -> Report:
        return Report(
            lambda line: print(line, flush=True),
            source.name if several or as_json else "",
            as_json=as_json,
            verbose=options.verbose,
            at_once=isinstance(source, Live),
        )

    with Sources(
        addresses, topic=options.topic, attempts=1, server_key=server_key, client_keys=client_keys
    ) as sources:
        say_begun(options, "looking at", sources.all)
        outcome = lint(
            sources,
            report,
            consumers,
            for_s=options.for_s,
            count=options.count,
            warn=lambda text: say(f"kvevents {options.command}: {text}"),
        )
        for line in unreached(options, sources.all):
            say(f"kvevents {options.command}: {line}")
        nothing = nothing_came(options, sources.all)
    return _exit_code(options.command, outcome, nothing)


def _exit_code(command: str, outcome: Outcome, nothing: str) -> int:
    if not outcome.batches:
        say(f"kvevents {command}: {nothing}")
        return FINDINGS if outcome.faults else NO_CONNECTION
    if not outcome.blocks:
        from publisher.tools.columns import of_batches

        say(f"kvevents {command}: no block was stored in {of_batches(outcome.batches)}")
    if outcome.findings or outcome.faults:
        return FINDINGS
    return 0 if outcome.blocks else NO_CONNECTION
