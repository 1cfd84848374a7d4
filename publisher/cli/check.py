"""`kvevents check`."""

from __future__ import annotations

import argparse

from publisher.cli import lint
from publisher.cli.parsing import Parser

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `check`."""
    lint.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    if options.consumers is None:
        raise ValueError("the following arguments are required: --as")
    return lint.run(options)
