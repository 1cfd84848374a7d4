"""The `kvevents` command.

Exit codes: 0 ok, 1 findings (what was looked for is not so), 2 usage, 3 no connection.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from publisher.checks import check_text, one_line

if TYPE_CHECKING:
    from publisher.lint_command import Outcome
    from publisher.settings import Settings

__all__ = ["main"]

FINDINGS, USAGE, NO_CONNECTION = 1, 2, 3

_NEEDS = {
    "tail": ("publisher", ("zmq",)),
    "demo": ("demo", ("zmq", "torch")),
    "serve": ("publisher", ("zmq",)),
    "keygen": ("publisher", ("zmq",)),
    "lint": ("publisher", ("zmq",)),
    "check": ("publisher", ("zmq",)),
    "record": ("publisher", ("zmq",)),
}
"""A command's extra, and the modules it brings."""


class _OutputError(Exception):
    """Standard output cannot be written."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. `names`: what its help ends with, once it is asked for."""

    names: Callable[[], str] | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def format_help(self) -> str:
        more = "" if self.names is None else f"\n{self.names()}\n"
        return super().format_help() + more

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {one_line(message)}\n")


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
            _flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        _discard_output()
        return 0
    except _OutputError as error:
        _discard_output()
        _say(f"kvevents: standard output: {error}")
        return USAGE


def _flush() -> None:
    """While a closed pipe, or a full disk, can still be caught."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputError(error.strerror) from None


def _discard_output() -> None:
    """What is still to be written can never be."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    """A line on stderr, whatever names are in it."""
    print(one_line(text), file=sys.stderr)


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser(prog="kvevents", description="KV-cache events of LLM inference workers.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_tail(commands.add_parser("tail", help="print a stream, one line per event"))
    _add_demo(commands.add_parser("demo", help="worker, sidecar and router on a real trace"))
    _add_serve(commands.add_parser("serve", help="the sidecar itself; a worker spawns it"))
    _add_lint(commands.add_parser("lint", help="which consumers would lose what, and why"))
    _add_check(commands.add_parser("check", help="whether a stream is right, for these consumers"))
    _add_record(commands.add_parser("record", help="write messages to a capture, for lint to read"))
    _add_keygen(commands.add_parser("keygen", help="a pair of keys for CURVE"))
    options = parser.parse_args(arguments)
    extra, modules = _NEEDS[options.command]
    if not all(importlib.util.find_spec(module) for module in modules):
        parser.error(f"{options.command} needs pip install 'kvevents[{extra}]'")
    try:
        return int(options.run(options))
    except (ValueError, TypeError) as error:
        _say(f"kvevents {options.command}: {error}")
        parser.exit(USAGE)


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
    _add_keys(parser)
    parser.epilog = f"Exit code {NO_CONNECTION} when nothing came at all in --timeout seconds."
    parser.set_defaults(run=_tail)


def _tail(options: argparse.Namespace) -> int:
    from publisher.tail import tail

    if options.count is not None and options.count < 1:
        raise ValueError(f"--count: {options.count} is below 1")
    if options.timeout is not None and not 0 < options.timeout <= 86_400:
        raise ValueError(f"--timeout: {options.timeout} is not above 0 and at most 86400")
    check_text("--topic", options.topic)
    server_key, client_keys = _read_keys(options)
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
    if options.replay_endpoint is not None:
        silence += f": it is not there, or {options.replay_endpoint} does not answer"
    _say(f"kvevents tail: {silence}")
    return NO_CONNECTION


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server-key", metavar="FILE", help="the publisher's .key, for CURVE")
    parser.add_argument("--client-key", metavar="FILE", help="our own .key_secret, for CURVE")


def _read_keys(options: argparse.Namespace) -> tuple[str | None, tuple[str, str] | None]:
    """The publisher's public key, and our own two; None and None without CURVE."""
    if options.server_key is None and options.client_key is None:
        return None, None
    from publisher.curve import read_public_key, read_secret_key

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


def _add_lint(parser: _Parser) -> None:
    parser.add_argument(
        "--as",
        dest="consumers",
        metavar="NAME[,NAME…]",
        help="these consumers only; else every one",
    )
    _add_lint_options(parser)


def _add_check(parser: _Parser) -> None:
    parser.add_argument(
        "--as", dest="consumers", metavar="NAME[,NAME…]", required=True, help="for these consumers"
    )
    _add_lint_options(parser)


def _add_lint_options(parser: _Parser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a publisher's PUB endpoint, e.g. tcp://127.0.0.1:5557, or a capture",
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="the publisher's replay endpoint: ask for what is retained, and look at the answer too",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="write findings of one kind each time"
    )
    _add_limits(parser)
    parser.epilog = (
        f"Exit code {FINDINGS} when something would be lost, a capture is damaged or a replay does not"
        f" end, {NO_CONNECTION} when nothing came, or no block was stored."
    )
    parser.names = _consumer_names
    parser.set_defaults(run=_lint)


def _consumer_names() -> str:
    from kvevents.lint import CONSUMERS

    return f"names for --as: {', '.join(CONSUMERS)}"


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", default="", help="only topics that begin so")
    parser.add_argument(
        "--for", dest="for_s", type=float, metavar="SECONDS", help="end after so long"
    )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="end after N batches")
    _add_keys(parser)


def _check_limits(options: argparse.Namespace) -> None:
    if options.count is not None and options.count < 1:
        raise ValueError(f"--count: {options.count} is below 1")
    if options.for_s is not None and not 0 < options.for_s <= 86_400:
        raise ValueError(f"--for: {options.for_s} is not above 0 and at most 86400")
    check_text("--topic", options.topic)


def _lint(options: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from publisher.lint_command import Report, lint, read_consumers
    from publisher.tap import Tap

    _check_limits(options)
    consumers = read_consumers(options.consumers)
    endpoints = [source for source in options.sources if "://" in source]
    if options.replay_endpoint is not None and (len(options.sources), len(endpoints)) != (1, 1):
        raise ValueError("--replay-endpoint: it goes with one endpoint, and nothing else")
    server_key, client_keys = _read_keys(options)

    def report(source: str) -> Report:
        label = source if len(options.sources) > 1 or options.output == "json" else ""
        return Report(
            lambda line: print(line, flush=True),
            label,
            as_json=options.output == "json",
            verbose=options.verbose,
        )

    with ExitStack() as stack:
        taps = [
            stack.enter_context(
                Tap(
                    endpoint,
                    options.replay_endpoint,
                    topic=options.topic,
                    server_key=server_key,
                    client_keys=client_keys,
                )
            )
            for endpoint in endpoints
        ]
        outcome = lint(
            [(Path(name), report(name)) for name in options.sources if "://" not in name],
            list(zip(taps, map(report, endpoints), strict=True)),
            consumers,
            replay=options.replay_endpoint is not None,
            for_s=options.for_s,
            count=options.count,
            warn=lambda text: _say(f"kvevents {options.command}: {text}"),
        )
    return _lint_code(options.command, outcome)


def _lint_code(command: str, outcome: Outcome) -> int:
    if not outcome.batches:
        _say(f"kvevents {command}: nothing came")
        return FINDINGS if outcome.faults else NO_CONNECTION
    if not outcome.blocks:
        batches = "1 batch" if outcome.batches == 1 else f"{outcome.batches} batches"
        _say(f"kvevents {command}: no block was stored in {batches}")
    if outcome.findings or outcome.faults:
        return FINDINGS
    return 0 if outcome.blocks else NO_CONNECTION


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the publisher's PUB endpoint")
    parser.add_argument(
        "-w", "--write", metavar="FILE", required=True, help="the capture; it must not be there yet"
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        help="its replay endpoint: ask for what is retained",
    )
    _add_limits(parser)
    parser.epilog = f"Exit code {NO_CONNECTION} when nothing came."
    parser.set_defaults(run=_record)


def _record(options: argparse.Namespace) -> int:
    import time

    from kvevents.capture import CaptureHead
    from publisher.record_command import record
    from publisher.tap import Tap

    _check_limits(options)
    server_key, client_keys = _read_keys(options)
    head = CaptureHead(
        endpoint=options.endpoint,
        replay_endpoint=options.replay_endpoint,
        topic=options.topic,
        started_ns=time.time_ns(),
    )
    with Tap(
        options.endpoint,
        options.replay_endpoint,
        topic=options.topic,
        server_key=server_key,
        client_keys=client_keys,
    ) as tap:
        came = record(tap, head, Path(options.write), for_s=options.for_s, count=options.count)
        if not tap.connected:
            _say(f"kvevents record: no connection to {options.endpoint}")
    if not came:
        _say("kvevents record: nothing came")
        return NO_CONNECTION
    what = "batch is" if came == 1 else "batches are"
    _say(f"kvevents record: {came} {what} in {options.write}")
    return 0


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
    """The configuration, and the sockets of the ranks that were asked for; on stderr, what of a sink its
    own consumer would not take.
    """
    from publisher.misfits import misfits
    from publisher.resolved import resolved

    for line in misfits(settings.config, settings.facts):
        print(f"kvevents serve: {line}", file=sys.stderr)

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
