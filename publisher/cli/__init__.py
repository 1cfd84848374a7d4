"""The `kvevents` command. Each command has a module here: its options, and what it runs.

Exit codes: 0 ok, 1 findings (what was looked for is not so), 2 usage, 3 no connection.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from publisher.cli.parsing import USAGE, Parser, Version, say

__all__ = ["COMMANDS", "main", "parser_of"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: a line of help, the extra that it needs, and the modules that this brings."""

    help: str
    extra: str = "publisher"
    modules: tuple[str, ...] = ("zmq",)


COMMANDS = {
    "tail": Command("print a stream, one line per event"),
    "state": Command("which worker holds what, on which tier; and how much of a prompt"),
    "top": Command("a live table of workers: rates, blocks, gaps", "tools", ("zmq", "rich")),
    "doctor": Command("why nothing arrives, and what to change"),
    "check": Command("whether a stream keeps its promises, and the event that breaks one"),
    "lint": Command("which routers would lose what of a stream, and why"),
    "record": Command("write a stream to a capture; all of the above read it too"),
    "play": Command("publish a capture again, with its replay socket"),
    "plot": Command("a picture of a capture: tiers, rates, lifetimes", "tools", ("matplotlib",)),
    "serve": Command("the sidecar itself; a worker spawns it"),
    "keygen": Command("a pair of keys for CURVE"),
    "demo": Command("worker, sidecar and router on a real trace", "demo", ("zmq", "torch")),
    "completion": Command("print what makes a shell complete these", "tools", ("shtab",)),
}

_GROUPS = {
    "look at a stream, live or in a capture": "tail state top doctor check lint",
    "captures": "record play plot",
    "the sidecar, and more": "serve keygen demo completion",
}

_EPILOG = """\
examples:
  kvevents tail tcp://10.0.0.5:5557,5558            what is told, from the state now on (5558: replays)
  kvevents state w1=tcp://10.0.0.5:5557,5558 w2=tcp://10.0.0.6:5557,5558 --tokens-file prompt.json
                                                    who holds how much of a prompt, on which tier
  kvevents doctor tcp://10.0.0.5:5557 --as llm-d    why a router sees no block
  kvevents COMMAND --help                           more of them

exit codes: 0 ok, 1 findings, 2 usage, 3 no connection (or nothing came)
"""


class _OutputError(Exception):
    """Standard output cannot be written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        _discard_output()
        return 0
    except _OutputError as error:
        _discard_output()
        say(f"kvevents: standard output: {error}")
        return USAGE


def parser_of(command: str | None) -> Parser:
    """The parser with this command's options, and the names of all; None: with all of their options."""
    parser = Parser(
        prog="kvevents",
        usage="kvevents [-h] [--version] COMMAND ...",
        description=f"KV-cache events of LLM inference workers.\n\n{_listed()}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="kvevents"
    )
    for name, one in COMMANDS.items():
        added = commands.add_parser(
            name, help=one.help, description=f"{one.help[0].upper()}{one.help[1:]}."
        )
        if command in (None, name):
            import_module(f"publisher.cli.{name}").add_options(added)
    return parser


def _listed() -> str:
    lines: list[str] = []
    for title, names in _GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<11} {COMMANDS[name].help}" for name in names.split())]
        lines.append("")
    return "\n".join(lines[:-1])


def _run(arguments: Sequence[str]) -> int:
    chosen = next((one for one in arguments if not one.startswith("-")), "")
    parser = parser_of(chosen)
    options = parser.parse_args(arguments)
    command = COMMANDS[options.command]
    if not all(importlib.util.find_spec(module) for module in command.modules):
        parser.error(f"{options.command} needs pip install 'kvevents[{command.extra}]'")
    try:
        return int(import_module(f"publisher.cli.{options.command}").run(options))
    except (ValueError, TypeError) as error:
        say(f"kvevents {options.command}: {error}")
        parser.exit(USAGE)


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
