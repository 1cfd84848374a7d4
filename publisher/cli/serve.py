"""`kvevents serve`."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from publisher.cli.parsing import NO_CONNECTION, Parser

if TYPE_CHECKING:
    from publisher.config.settings import Settings

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Of `serve`."""
    from publisher.config.settings import add_options

    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    with ExitStack() as stack:
        for early in (signal.SIGUSR1, signal.SIGHUP):  # there is nothing to tell anew yet
            stack.callback(signal.signal, early, signal.signal(early, signal.SIG_IGN))
        from publisher.config.settings import read_settings, unread

        if (note := unread()) is not None:
            print(f"kvevents serve: {note}", file=sys.stderr)
        settings = read_settings(options)
        if options.check:
            _print_checked(settings)
            return 0

        from publisher.sidecar.process import serve
        from publisher.sidecar.source import SourceError

        try:
            code = serve(
                settings.link, settings.config, facts=settings.facts, forever=settings.forever
            )
        except SourceError as error:
            print(f"kvevents serve: {error}", file=sys.stderr)
            return NO_CONNECTION
        stack.pop_all()  # they stay ignored: what is left is the end of the process
        return code


def _print_checked(settings: Settings) -> None:
    """The configuration, and the sockets of the ranks that were asked for; on stderr, what of a sink its
    own consumer would not take.
    """
    from publisher.config.misfits import misfits
    from publisher.config.resolved import resolved

    for line in misfits(settings.config, settings.facts):
        print(f"kvevents serve: {line}", file=sys.stderr)

    told = msgspec.to_builtins(settings.config)
    if settings.shown:
        ranks = [resolved(settings.config, one, settings.facts) for one in settings.shown]
        told["resolved"] = ranks
    print(msgspec.json.format(msgspec.json.encode(told)).decode())
