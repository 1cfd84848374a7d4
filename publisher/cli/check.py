"""`kvevents check`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from publisher.cli import lint
from publisher.cli.following import nothing_came, say_begun, unreached
from publisher.cli.parsing import (
    FINDINGS,
    NO_CONNECTION,
    USAGE,
    Parser,
    add_limits,
    add_sources,
    check_limits,
    read_keys,
    read_sources,
    say,
)

if TYPE_CHECKING:
    from publisher.tools.check.check import Outcome
    from publisher.tools.check.report import Report
    from publisher.tools.source import Live, Source

__all__ = ["add_options", "run"]

_DESCRIPTION = """\
Hold a stream to what docs/check.md says of every stream: a block is removed
only where it is stored, its parent was told before it, a replay is what came
live, and so on. Each line names the batch and event that breaks a rule, the
rule, its invariant's number, and the earlier event that it contradicts.
"""

_EXAMPLES = f"""\
examples:
  kvevents check tcp://10.0.0.5:5557,5558 --for 60
      a minute of a live stream; in the end what was followed is compared with
      what a new subscriber is told
  kvevents check worker.capture --verify-hashes
      a capture; each block's hash is made again from its tokens
  kvevents check w1=tcp://a:5557,5558 w2=tcp://b:5557,5558 --strict -o json
      two at once, until Ctrl-C; notes count as well; an object per line
  kvevents check worker.capture --as vllm-router
      what that consumer would lose of it: the same as `kvevents lint`

schemes for --verify-hashes: {{schemes}}

exit codes: 0 nothing was broken; {FINDINGS} something was (with --strict also where
there are notes), a capture is damaged or a replay was not over; {USAGE} usage;
{NO_CONNECTION} no connection, nothing came, or no block was stored.
"""


def add_options(parser: Parser) -> None:
    """Of `check`."""
    from kvevents.check.hashes import SCHEMES

    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES.format(schemes=", ".join(SCHEMES))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_sources(parser)
    parser.add_argument(
        "--verify-hashes",
        nargs="?",
        const="auto",
        type=_scheme,
        choices=SCHEMES,
        metavar="SCHEME",
        help="make each block's hash again, by this scheme or by whichever fits (auto); without a"
        " SCHEME it goes behind the sources",
    )
    parser.add_argument(
        "--hash-seed", metavar="TEXT", help="PYTHONHASHSEED of the vLLM that makes the hashes"
    )
    parser.add_argument("--strict", action="store_true", help="notes count, too")
    parser.add_argument(
        "--allow", metavar="RULE[,RULE…]", help="rules that do not count, and are not reported"
    )
    parser.add_argument(
        "--no-rejoin",
        action="store_true",
        help="do not join anew in the end to compare what a new subscriber is told",
    )
    parser.add_argument(
        "--as",
        dest="consumers",
        metavar="NAME[,NAME…]",
        help="look at it as these consumers do, as `lint` does, and at nothing else",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="write findings of one kind each time"
    )
    add_limits(parser)


def _scheme(text: str) -> str:
    """Whatever stands behind the option is taken for its scheme, also where it is meant as a source."""
    from kvevents.check.hashes import SCHEMES

    if text not in SCHEMES and ("://" in text or os.path.lexists(text)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no scheme: put the sources first, or write --verify-hashes=auto {text}"
        )
    return text


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    if options.consumers is not None:
        _refuse_with_consumers(options)
        return lint.run(options)
    from kvevents.check import Verifier
    from publisher.tools.check.check import check
    from publisher.tools.check.report import Report, read_rules
    from publisher.tools.source import Live, Sources

    check_limits(options)
    allowed = read_rules(options.allow)
    scheme, hash_seed = options.verify_hashes, options.hash_seed
    if hash_seed is not None and scheme not in ("auto", "vllm-sha256-cbor"):
        raise ValueError("--hash-seed: it goes with --verify-hashes vllm-sha256-cbor")
    if hash_seed is not None:
        _check_seed(hash_seed)
    addresses = read_sources(options)
    server_key, client_keys = read_keys(options)
    settings = {"topic": options.topic, "server_key": server_key, "client_keys": client_keys}
    several = len(addresses) > 1

    def report(source: Source) -> Report:
        return Report(
            lambda line: print(line, flush=True),
            source.name,
            several=several,
            as_json=options.output == "json",
            verbose=options.verbose,
            allowed=allowed,
        )

    def verifier() -> Verifier | None:
        return None if scheme is None else Verifier(scheme, hash_seed)

    def second(live: Live) -> Live:
        return Live(live.address, **settings)

    with Sources(addresses, **settings) as sources:
        say_begun(options, "checking", sources.all)
        outcome = check(
            sources,
            report,
            verifier,
            for_s=options.for_s,
            count=options.count,
            second=None if options.no_rejoin else second,
            warn=lambda text: say(f"kvevents check: {text}"),
        )
        for line in unreached(options, sources.all):
            say(f"kvevents check: {line}")
        nothing = nothing_came(options, sources.all)
    return _exit_code(outcome, nothing, strict=options.strict)


def _refuse_with_consumers(options: argparse.Namespace) -> None:
    for key in ("verify_hashes", "hash_seed", "strict", "allow", "no_rejoin"):
        if getattr(options, key):
            raise ValueError(f"--{key.replace('_', '-')}: it does not go with --as")


def _check_seed(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("--hash-seed: it is not UTF-8") from None


def _exit_code(outcome: Outcome, nothing: str, *, strict: bool) -> int:
    if outcome.violations or outcome.faults:
        return FINDINGS
    if not outcome.batches:
        say(f"kvevents check: {nothing}")
        return NO_CONNECTION
    if not outcome.blocks:
        from publisher.tools.columns import of_batches

        say(f"kvevents check: no block was stored in {of_batches(outcome.batches)}")
        return NO_CONNECTION
    if strict and outcome.notes:
        return FINDINGS
    return NO_CONNECTION if outcome.unconnected else 0
