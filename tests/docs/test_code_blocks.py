"""All code blocks of the documents are run, read or parsed; those that cannot be say why.

A block that is not run has a comment right before it, `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, Block, blocks_of, pages

from publisher import SidecarConfig, read_config
from publisher.cli.commands import COMMANDS, parser_of
from publisher.config.engine_config import read_engine_sink

RUN_BY = {
    ROOT / "README.md": ("tests/test_readme.py", {"python"}),
    DOCS / "configuration.md": ("tests/publisher/test_configuration_doc.py", {"python"}),
    DOCS / "deployment.md": ("tests/deploy/test_deployment_doc.py", {"sh", "yaml", "dockerfile"}),
    DOCS / "embedding.md": ("tests/examples/test_embedding_doc.py", {"python"}),
    DOCS / "engines.md": ("tests/engines/test_engine_doc.py", {"sh", "toml"}),
    DOCS / "wire.md": ("tests/docs/test_wire_doc.py", {"python"}),
}
"""Pages with a test of their own, and the languages of which it runs or reads the blocks."""

NOT_RUN = {DOCS / "consumers.md": 4}
"""How many blocks of a page are marked so."""

PLAIN = ("", "text")
"""What a command prints, pictures, frames."""

TOOLS = {"cd", "cp", "curl", "eval", "export", "git", "jq", "mkdir", "pytest", "ruff", "mypy"}
"""Commands that are not ours, and need no word here."""

BLOCKS = [block for page in pages() for block in blocks_of(page)]


def of(language: str, *, elsewhere: bool = False) -> list[Block]:
    """Those of a language that are run; `elsewhere`: also those that another test takes."""
    theirs = {page for page, (_, languages) in RUN_BY.items() if language in languages}
    return [
        one
        for one in BLOCKS
        if one.language == language
        and not one.why_not_run
        and (elsewhere or one.page not in theirs)
    ]


def each_of(language: str, *, elsewhere: bool = False) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", of(language, elsewhere=elsewhere), ids=str)


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    """Nothing is shown in a language that no test here knows, unless the page says why."""
    known = {"python", "sh", "toml", "json", *PLAIN}
    unknown = [
        str(one)
        for one in BLOCKS
        if one.language not in known | RUN_BY.get(one.page, ("", set()))[1] and not one.why_not_run
    ]
    assert unknown == []


def test_blocks_that_are_not_run_say_why() -> None:
    """They are so few, and each has a reason of some words."""
    told = [one for one in BLOCKS if one.why_not_run]
    assert Counter(one.page for one in told) == NOT_RUN
    assert all(len(one.why_not_run.split()) > 2 for one in told)


# ------------------------------------------------------------------------------------------ Python


@each_of("python", elsewhere=True)
def test_python_compiles(block: Block) -> None:
    """Each block is a program."""
    ast.parse(block.text, str(block))


@pytest.mark.integration
@each_of("python")
def test_python_runs(block: Block, tmp_path: Path) -> None:
    """Alone, in a folder of its own, to its end and without a word on stderr."""
    (tmp_path / "block.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_run_elsewhere_is() -> None:
    """A page whose blocks are not taken here has a test that takes them from it."""
    for page, (test, languages) in RUN_BY.items():
        text = (ROOT / test).read_text()
        assert f'"{page.name}"' in text, test
        for language in languages:
            assert f"```{language}" in text or f'"{language}"' in text, test
            assert any(one.language == language for one in blocks_of(page)), page


# ------------------------------------------------------------------------------------------- shell


def commands(block: Block) -> Iterator[list[str]]:
    """Each command of a block, split as a shell would; those behind a pipe or && are commands too."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word[:1] in set("|&;"):
                if command:
                    yield command
                command = []
            elif word[:1] not in set("()<>") and not (not command and re.match(r"\w+=", word)):
                command.append(word)


@each_of("sh")
def test_shell_can_be_typed(block: Block) -> None:
    """What is ours in it exists: commands and their options, targets, modules, extras, files; what is not
    is known, or the block says why it is not run.
    """
    for words in commands(block):
        check(words)


def check(words: list[str]) -> None:
    name, *rest = words
    program = name.rpartition("/")[2]
    if program == "kvevents":
        assert rest[0] in COMMANDS, words
        parser_of(rest[0]).parse_args(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in rest if "=" not in word and not word.startswith("-")]
        assert set(wanted) <= set(targets), words
    elif program.startswith("python"):
        check_python(rest)
    elif program == "pip":
        check_pip(rest)
    else:
        assert name in TOOLS or (ROOT / name).is_file(), words


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        path = ROOT / arguments[1].replace(".", "/")
        known = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        assert known or arguments[1] in ("venv", "pip", "pytest"), arguments
    else:
        assert (ROOT / arguments[0]).is_file(), arguments


def check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(project["optional-dependencies"])
    for one in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        assert set(one.split(",")) <= known, arguments


def test_what_is_installed_in_the_text_exists() -> None:
    """Every `'.[extra]'` and `kvevents[extra]` that a page names is one of the project's."""
    for page in pages():
        for one in re.findall(r"(?:\.|kvevents)\[([a-z,]+)\]", page.read_text()):
            check_pip([f"[{one}]"])


# ----------------------------------------------------------------------------------- configuration


@each_of("toml")
def test_toml_is_a_sidecars_configuration(block: Block) -> None:
    """The real reader takes it."""
    read_config(SidecarConfig, tomllib.loads(block.text))


@each_of("json")
def test_json_is_what_it_is_shown_as(block: Block) -> None:
    """A sidecar's configuration or an engine's `--kv-events-config` is taken by its real reader; anything
    else is JSON at least.
    """
    told = json.loads(block.text)
    if "sinks" in told:
        read_config(SidecarConfig, told)
    elif "publisher" in told:
        sink = {key: value for key, value in told.items() if key != "publisher"}
        read_engine_sink(json.dumps({"publisher": "zmq", **sink}), {})


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files that are linked to exist, and so do the headings or names in them; no address is invented."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            assert target == "https://no-color.org", target
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            text = there.read_text()
            assert anchor in anchors(text) or f'id="{anchor}"' in text, target


def test_the_index_leads_to_every_page() -> None:
    """Each document is linked from docs/index.md; of the decisions the first is, the others follow it."""
    linked = set(re.findall(r"\]\(([^)#]+)\)", (DOCS / "index.md").read_text()))
    told = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    missing = {page for page in told - linked if not page.startswith("design/")}
    assert missing == set()


def anchors(text: str) -> set[str]:
    """Of a page's headings, as the pages' tool and others name them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads]
    return {re.sub(r"[\s]+", "-", one) for one in plain}
