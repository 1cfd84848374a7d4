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
    if options.router is not None:
        from publisher.demo.routed import run_routed
        from publisher.demo.routed_options import read_routed_options

        return run_routed(read_routed_options(options))
    from publisher.demo.options import read_options
    from publisher.demo.run import run_demo

    return run_demo(read_options(options))
