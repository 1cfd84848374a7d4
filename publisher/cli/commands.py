"""All commands: what each is for, what it needs, and their parser."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from publisher.cli.parsing import USAGE, Parser, Version, say

__all__ = ["COMMANDS", "parser_of", "prepare"]


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
  kvevents tail tcp://10.0.0.5:5557,5558
      what is told, from the state now on; 5558 is where replays are
  kvevents state w1=tcp://10.0.0.5:5557,5558 --tokens-file prompt.json
      who holds how much of a prompt, on which tier
  kvevents doctor tcp://10.0.0.5:5557 --as llm-d
      why a router sees no block
  kvevents COMMAND --help
      a command's options, and more examples

{needs}

exit codes: 0 ok, 1 findings, 2 usage, 3 no connection (or nothing came)
"""


def parser_of(command: str | None) -> Parser:
    """The parser with this command's options, and the names of all; None: with all of their options."""
    parser = Parser(
        prog="kvevents",
        usage="kvevents [-h] [--version] COMMAND ...",
        description=f"KV-cache events of LLM inference workers.\n\n{_listed()}",
        epilog=_EPILOG.format(needs=_needs()),
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


def _needs() -> str:
    """Which extra each command is in."""
    lines = ["to install:"]
    for extra in dict.fromkeys(one.extra for one in COMMANDS.values()):
        names = ", ".join(name for name, one in COMMANDS.items() if one.extra == extra)
        if extra == "publisher":
            names = "all but these:"
        package = f"'kvevents[{extra}]'"
        lines.append(f"  pip install {package:<23} {names}")
    return "\n".join(lines)


def prepare(arguments: Sequence[str]) -> Callable[[], int]:
    """Read them; returns what runs the command. Raises SystemExit for what cannot be, once it is said."""
    chosen = next((one for one in arguments if not one.startswith("-")), "")
    parser = parser_of(chosen)
    if not arguments:
        parser.error("which COMMAND? kvevents --help lists them")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _parser_below(parser, options.command).refuse(unknown)
    command = COMMANDS[options.command]
    if not all(importlib.util.find_spec(module) for module in command.modules):
        parser.error(f"{options.command} needs pip install 'kvevents[{command.extra}]'")
    return lambda: _run(options)


def _parser_below(parser: Parser, command: str) -> Parser:
    """The command's own."""
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    found = commands.choices[command]
    assert isinstance(found, Parser)
    return found


def _run(options: argparse.Namespace) -> int:
    """Raises SystemExit, once that is said, for what the command cannot do."""
    try:
        return int(import_module(f"publisher.cli.{options.command}").run(options))
    except ValueError as error:
        say(f"kvevents {options.command}: {error}")
        raise SystemExit(USAGE) from None
