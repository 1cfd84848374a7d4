"""The `kvevents` command.

Exit codes: 0 ok, 1 findings (what was looked for is not so), 2 usage, 3 no connection.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

if TYPE_CHECKING:
    from publisher.settings import Settings

__all__ = ["main"]

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3

_NEEDS = {
    "tail": ("publisher", ("zmq",)),
    "demo": ("demo", ("zmq", "torch")),
    "serve": ("publisher", ("zmq",)),
    "keygen": ("publisher", ("zmq",)),
}
"""A command's extra, and the modules it brings."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


class _Version(argparse.Action):
    """Says the version; it is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from publisher.version import UNKNOWN, VERSION

        if VERSION == UNKNOWN:
            parser.error("not installed, so its version is unknown")
        print(f"kvevents {VERSION}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # while a closed pipe can still be caught
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser(prog="kvevents", description="KV-cache events of LLM inference workers.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_tail(commands.add_parser("tail", help="print a stream, one line per event"))
    _add_demo(commands.add_parser("demo", help="worker, sidecar and router on a real trace"))
    _add_serve(commands.add_parser("serve", help="the sidecar itself; a worker spawns it"))
    _add_keygen(commands.add_parser("keygen", help="a pair of keys for CURVE"))
    options = parser.parse_args(arguments)
    extra, modules = _NEEDS[options.command]
    if not all(importlib.util.find_spec(module) for module in modules):
        parser.error(f"{options.command} needs pip install 'kvevents[{extra}]'")
    try:
        return int(options.run(options))
    except (ValueError, TypeError) as error:
        parser.exit(USAGE, f"kvevents {options.command}: {error}\n")


def _add_tail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoint", help="the publisher's PUB endpoint, e.g. tcp://127.0.0.1:5557")
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="its replay endpoint: start with the state now, and close gaps",
    )
    parser.add_argument("--topic", default="", help="only topics that begin so")
    parser.add_argument("-n", "--count", type=int, metavar="N", help="end after N events")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--timeout", type=float, metavar="S", help="end after S seconds of silence")
    parser.add_argument("--server-key", metavar="FILE", help="the publisher's .key, for CURVE")
    parser.add_argument("--client-key", metavar="FILE", help="our own .key_secret, for CURVE")
    parser.epilog = f"Exit code {NO_CONNECTION} when nothing came at all in --timeout seconds."
    parser.set_defaults(run=_tail)


def _tail(options: argparse.Namespace) -> int:
    from publisher.tail import tail

    if options.count is not None and options.count < 1:
        raise ValueError(f"--count: {options.count} is below 1")
    if options.timeout is not None and not 0 < options.timeout <= 86_400:
        raise ValueError(f"--timeout: {options.timeout} is not above 0 and at most 86400")
    server_key, client_keys = None, None
    if options.server_key is not None or options.client_key is not None:
        from publisher.curve import read_public_key, read_secret_key

        if options.server_key is None or options.client_key is None:
            raise ValueError("--server-key and --client-key: one is of no use without the other")
        if options.server_key.endswith(".key_secret"):
            raise ValueError(
                f"--server-key: {options.server_key} is the publisher's secret; give its .key, and"
                " leave the secret where the publisher is"
            )
        server_key = read_public_key("--server-key", options.server_key)
        client_keys = read_secret_key("--client-key", options.client_key)
    seen = tail(
        options.endpoint,
        options.replay_endpoint,
        topic=options.topic,
        count=options.count,
        as_json=options.output == "json",
        timeout_s=options.timeout,
        write=lambda line: print(line, flush=True),
        server_key=server_key,
        client_keys=client_keys,
    )
    if seen:
        return 0
    silence = f"nothing came from {options.endpoint} in {options.timeout:g} s"
    print(f"kvevents tail: {silence}", file=sys.stderr)
    return NO_CONNECTION


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from publisher.demo.options import add_options

    add_options(parser)
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from publisher.demo.options import read_options
    from publisher.demo.run import run_demo

    return run_demo(read_options(options))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from publisher.settings import add_options

    add_options(parser)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    for early in (signal.SIGUSR1, signal.SIGHUP):  # there is nothing to tell anew yet
        signal.signal(early, signal.SIG_IGN)
    from publisher.settings import read_settings, unread

    if (note := unread()) is not None:
        print(f"kvevents serve: {note}", file=sys.stderr)
    settings = read_settings(options)
    if options.check:
        _print_checked(settings)
        return 0

    from publisher.sidecar import serve
    from publisher.source import SourceError

    try:
        return serve(settings.link, settings.config, facts=settings.facts, forever=settings.forever)
    except SourceError as error:
        print(f"kvevents serve: {error}", file=sys.stderr)
        return NO_CONNECTION


def _print_checked(settings: Settings) -> None:
    """The configuration, and the sockets of the ranks that were asked for."""
    from publisher.resolved import resolved

    told = msgspec.to_builtins(settings.config)
    if settings.shown:
        ranks = [resolved(settings.config, one, settings.facts) for one in settings.shown]
        told["resolved"] = ranks
    print(msgspec.json.format(msgspec.json.encode(told)).decode())


def _add_keygen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="where to; it is made when it is not there"
    )
    parser.add_argument(
        "--name", default="kvevents", help="of the files, NAME.key and NAME.key_secret"
    )
    parser.set_defaults(run=_keygen)


def _keygen(options: argparse.Namespace) -> int:
    from publisher.curve import write_keys

    try:
        public, secret = write_keys(Path(options.directory), options.name)
    except OSError as error:
        raise ValueError(f"DIR: {options.directory}: {error.strerror or error}") from None
    print(public)
    print(secret)
    return 0


if __name__ == "__main__":
    sys.exit(main())
