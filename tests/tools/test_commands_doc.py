"""docs/commands.md, the README and the helps: what they show can be typed."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from publisher.cli.commands import COMMANDS, parser_of

ROOT = Path(__file__).parent.parent.parent
DOC = ROOT / "docs/commands.md"
PAGES = (
    DOC,
    ROOT / "README.md",
    ROOT / "docs/consumers.md",
    ROOT / "docs/check.md",
    ROOT / "docs/capture.md",
)


def commands_in(text: str) -> list[list[str]]:
    """Each `kvevents …` of a text, split as a shell would; without what it pipes to and comments."""
    found = []
    for line in re.findall(r"kvevents [a-z]+[^\n]*", text.replace("\\\n", " ")):
        words = _words(re.split(r"\s{2,}", line.replace(')"', " )"))[0])
        if words[1] in COMMANDS:
            found.append(words[1:])
    return found


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;()<>&")
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: word[0] not in "|;()<>&", lexer))


def blocks_of(page: Path) -> str:
    """The text of a page's shell blocks."""
    return "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL))


def check(words: list[str]) -> None:
    """That the parser takes them."""
    parser_of(words[0]).parse_args(words)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.exists()], ids=lambda page: page.name
)
def test_what_a_page_shows_can_be_typed(page: Path) -> None:
    """Every command line in its shell blocks is one that the command takes."""
    for words in commands_in(blocks_of(page)):
        check(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_help_shows_can_be_typed(command: str) -> None:
    """Every example in a command's help is one that the command takes."""
    parser = parser_of(command)
    help_of = next(
        action.choices[command]
        for action in parser._actions
        if isinstance(action.choices, dict) and command in action.choices
    )
    text = help_of.format_help()
    for words in commands_in(text.partition("examples:")[2]):
        check(words)
    if command not in ("serve", "keygen", "demo", "completion"):
        assert "examples:" in text
        assert "exit codes:" in text.lower()


def test_every_command_is_on_the_page() -> None:
    """The page shows each command that looks at a stream or a capture, and none that is not there."""
    shown = {words[0] for words in commands_in(blocks_of(DOC))}
    assert shown == set(COMMANDS) - {"serve", "keygen", "demo"}


def test_the_first_help_says_where_to_go() -> None:
    """All commands in groups, examples for what people come to ask, and the exit codes."""
    text = parser_of("").format_help()
    for command, one in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(one.help)}$", text, re.MULTILINE), command
    assert "--tokens-file" in text
    assert "kvevents doctor" in text
    assert "3 no connection" in text
    for words in commands_in(text.partition("examples:")[2].replace("kvevents COMMAND", "")):
        check(words)
