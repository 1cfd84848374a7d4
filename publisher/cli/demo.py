"""`kvevents demo`."""

from __future__ import annotations

import argparse

from publisher.cli.parsing import Parser

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `demo`."""
    from publisher.demo.options import add_options

    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    from publisher.demo.options import read_options
    from publisher.demo.run import run_demo

    return run_demo(read_options(options))
