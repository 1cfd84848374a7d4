"""`kvevents completion`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from publisher.cli.parsing import USAGE, Parser

__all__ = ["add_options", "run"]

_SHELLS = ("bash", "zsh", "fish")

_FILES = ("FILE", "SOURCE", "OUT")
_FOLDERS = ("DIR", "FOLDER")
"""What options and arguments that are a file, or a folder, are called in the help."""


_BASH = """\
{name}() {{
  local head=""
  case "$1" in *,*) head="${{1%,*}},";; esac
  compgen -W "{words}" -P "$head" -- "${{1##*,}}"
}}
"""
"""The next of some words with commas between."""


def _lists() -> dict[str, tuple[str, ...]]:
    """Options, whatever command they are of, and the words of which their lists are made."""
    from kvevents.check.rules import RULES
    from kvevents.events import StorageMedium
    from kvevents.lint import CONSUMERS

    return {
        "--as": tuple(CONSUMERS),
        "--allow": tuple(RULES),
        "--event": ("stored", "removed", "cleared"),
        "--medium": tuple(StorageMedium),
        "--from": ("state", "beginning", "live"),
    }


def add_options(parser: Parser) -> None:
    """Of `completion`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Print what makes a shell complete commands, options, their choices and files."
    )
    parser.epilog = f"""\
examples, the first in ~/.bashrc or ~/.zshrc to have it always:
  eval "$(kvevents completion bash)"
  eval "$(kvevents completion zsh)"
  kvevents completion fish > ~/.config/fish/completions/kvevents.fish

exit codes: 0 printed; {USAGE} usage"""
    parser.add_argument("shell", choices=_SHELLS)


def run(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    import shtab

    from publisher.cli.commands import parser_of

    if options.shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(f"{options.shell}: needs a newer shtab, this is {shtab.__version__}")
    parser = parser_of(None)
    lists = _lists()
    preamble: list[str] = []
    for action in _actions(parser):
        words = next((lists[one] for one in action.option_strings if one in lists), None)
        if words is not None and action.choices is None:
            name = f"_kvevents_words_{len(preamble)}"
            preamble.append(_BASH.format(name=name, words=" ".join(words)))
            told = f"_values -s , {action.dest} {' '.join(words)}"
            action.complete = {"bash": name, "zsh": told}  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.help == argparse.SUPPRESS and action.choices:
            action.help = ""  # it is listed otherwise, and what is suppressed is not completed
    functions = "\n".join(preamble) if options.shell == "bash" else ""
    print(shtab.complete(parser, options.shell, preamble=functions))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
