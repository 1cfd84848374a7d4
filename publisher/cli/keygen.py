"""`kvevents keygen`."""

from __future__ import annotations

import argparse
from pathlib import Path

from publisher.cli.parsing import Parser

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `keygen`."""
    parser.add_argument(
        "directory", metavar="DIR", help="where to; it is made when it is not there"
    )
    parser.add_argument(
        "--name", default="kvevents", help="of the files, NAME.key and NAME.key_secret"
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.config.keys import write_keys

    try:
        public, secret = write_keys(Path(options.directory), options.name)
    except OSError as error:
        raise ValueError(f"DIR: {options.directory}: {error.strerror or error}") from None
    print(public)
    print(secret)
    return 0
