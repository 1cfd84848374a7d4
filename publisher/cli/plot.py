"""`kvevents plot`."""

from __future__ import annotations

import argparse

from publisher.cli.parsing import Parser

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `plot`."""


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    raise ValueError("not built yet")
