"""What the commands' options have in common: sources, limits, keys, and how a mistake is said."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from publisher.config.checks import check_text, one_line, shown
from publisher.tools.likeness import did_you_mean

if TYPE_CHECKING:
    from publisher.tools.source import Address

__all__ = [
    "FINDINGS",
    "NO_CONNECTION",
    "USAGE",
    "Keys",
    "Parser",
    "Version",
    "add_color",
    "add_keys",
    "add_limits",
    "add_sources",
    "check_count",
    "check_limits",
    "check_seconds",
    "read_keys",
    "read_sources",
    "say",
]

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3

Keys = tuple[str | None, tuple[str, str] | None]
"""The publisher's public key, and our own public and secret one; None and None without CURVE."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. `names`: what its help ends with, once it is asked for."""

    names: Callable[[], str] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")  # no option: -5, and -30s as well

    def format_help(self) -> str:
        more = "" if self.names is None else f"\n{self.names()}\n"
        return super().format_help() + more

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {one_line(message)}\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Where --OPTION=-- is given, argparse takes the value for the end of the options, and fails."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "'--' cannot be its value")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """With what may have been meant, where a choice is mistyped."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            likely = did_you_mean(str(value), map(str, action.choices or ()))
            if not isinstance(action, argparse._SubParsersAction):
                raise argparse.ArgumentError(action, f"{error.message}{likely}") from None
            text = f"{shown(value)} is no command{likely or '; kvevents --help lists them'}"
            raise argparse.ArgumentError(None, text) from None

    def refuse(self, unknown: list[str]) -> NoReturn:
        """What was left when all that can be read was: options that there are none of, or words."""
        known = [option for one in self._actions for option in one.option_strings]
        first = unknown[0].partition("=")[0]
        likely = did_you_mean(first, known) if first.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{likely}")


class Version(argparse.Action):
    """Says the version; it is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from publisher.version import UNKNOWN, VERSION

        if VERSION == UNKNOWN:
            parser.error("not installed, so its version is unknown")
        print(f"kvevents {VERSION}")
        parser.exit()


def say(text: str) -> None:
    """A line on stderr, whatever names are in it."""
    print(one_line(text), file=sys.stderr)


# ---------------------------------------------------------------------------------------- sources


def add_sources(parser: Parser) -> None:
    """Endpoints and captures, and where an endpoint's replays are."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a publisher's PUB endpoint, e.g. tcp://10.0.0.5:5557, or with its replay endpoint"
        " tcp://10.0.0.5:5557,5558, or with a name of your own w1=tcp://10.0.0.5:5557,5558; or a capture",
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="the replay endpoint of the one SOURCE: ask for what is retained, and close gaps",
    )
    parser.add_argument("--topic", default="", help="only topics that begin so")
    add_keys(parser)


def read_sources(options: argparse.Namespace) -> list[Address | Path]:
    """What `add_sources` takes, in the order given. Raises ValueError for what cannot be a source."""
    from publisher.tools.source import parse_sources

    check_text("--topic", options.topic)
    return parse_sources(options.sources, options.replay_endpoint)


# ----------------------------------------------------------------------------------------- limits


def add_limits(parser: argparse.ArgumentParser) -> None:
    """When to end."""
    parser.add_argument("--for", dest="for_s", type=float, metavar="S", help="end after S seconds")
    parser.add_argument("-n", "--count", type=int, metavar="N", help="end after N batches")


def check_limits(options: argparse.Namespace) -> None:
    """Raises ValueError unless they can be."""
    check_count("--count", options.count)
    check_seconds("--for", options.for_s)


def check_count(key: str, value: int | None) -> None:
    """Raises ValueError for a number below 1."""
    if value is not None and value < 1:
        raise ValueError(f"{key}: {value} is below 1")


def check_seconds(key: str, value: float | None) -> None:
    """Raises ValueError unless above 0 and at most a day."""
    if value is not None and not 0 < value <= 86_400:
        raise ValueError(f"{key}: {value} is not above 0 and at most 86400")


def add_color(parser: argparse._ActionsContainer) -> None:
    """When to write colours; read by `wants_colour`."""
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours (auto)"
    )


# ------------------------------------------------------------------------------------------- keys


def add_keys(parser: argparse.ArgumentParser) -> None:
    """CURVE."""
    parser.add_argument("--server-key", metavar="FILE", help="the publisher's .key, for CURVE")
    parser.add_argument("--client-key", metavar="FILE", help="our own .key_secret, for CURVE")


def read_keys(options: argparse.Namespace) -> Keys:
    """Raises ValueError for files that do not hold keys, or the wrong ones."""
    if options.server_key is None and options.client_key is None:
        return None, None
    from publisher.config.keys import read_public_key, read_secret_key

    if options.server_key is None or options.client_key is None:
        raise ValueError("--server-key and --client-key: one is of no use without the other")
    if options.server_key.endswith(".key_secret"):
        raise ValueError(
            f"--server-key: {options.server_key} is the publisher's secret; give its .key, and"
            " leave the secret where the publisher is"
        )
    return (
        read_public_key("--server-key", options.server_key),
        read_secret_key("--client-key", options.client_key),
    )
