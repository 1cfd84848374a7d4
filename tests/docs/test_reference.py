"""The reference names all that is public, and each of it has words of its own."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from docs_pages import DOCS, ROOT

PAGES = {
    package: DOCS / "reference" / f"{package}.md"
    for package in ("hicache", "kvevents", "publisher")
}
BESIDES = (
    *("hicache.storage", "kvevents.dialect", "kvevents.frames", "kvevents.hashing"),
    *("kvevents.records", "publisher.config.keys"),
)
"""Modules that are public besides the packages' own names."""


def named(package: str) -> list[str]:
    """What the page of a package has an entry of, dotted."""
    return re.findall(r"^::: (\S+)$", PAGES[package].read_text(), re.MULTILINE)


def find(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", PAGES)
def test_all_that_is_public_is_in_the_reference(package: str) -> None:
    """Every name of a package's `__all__`, and of the modules that are public besides, has an entry; and
    each entry is of something that can be imported so.
    """
    told = named(package)
    public = set(importlib.import_module(package).__all__)
    wanted = {f"{package}.{name}" for name in public}
    for module in BESIDES:
        if module.startswith(f"{package}."):
            names = importlib.import_module(module).__all__
            wanted |= {f"{module}.{name}" for name in names if name not in public}
    assert set(told) == wanted
    assert len(told) == len(set(told))
    for one in told:
        find(one)


@pytest.mark.parametrize("dotted", [one for package in PAGES for one in named(package)])
def test_every_entry_has_words(dotted: str) -> None:
    """A class and its public methods and properties, a function, a constant or an alias: each has a
    docstring, which is what the reference is made of.
    """
    found = find(dotted)
    if inspect.isclass(found):
        assert found.__dict__.get("__doc__"), dotted
        for name, member in vars(found).items():
            if not name.startswith("_") and _is_code(member):
                assert _words(member), f"{dotted}.{name}"
    elif callable(found) and hasattr(found, "__code__"):
        assert found.__doc__, dotted
    else:
        assert _has_words(dotted), dotted


def _is_code(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))


def _words(member: Any) -> str | None:
    inner = member.fget if isinstance(member, property) else member
    words = inner.__doc__
    assert words is None or isinstance(words, str)
    return words


@cache
def _bodies(package: str) -> list[list[ast.stmt]]:
    return [ast.parse(path.read_text()).body for path in sorted((ROOT / package).rglob("*.py"))]


def _has_words(dotted: str) -> bool:
    """Whether a string follows the assignment, in the module that makes it."""
    package, _, name = dotted.partition(".")
    for body in _bodies(package):
        for node, after in pairwise(body):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=told)])
                    | ast.AnnAssign(target=ast.Name(id=told))
                ) if told == name.rpartition(".")[2]:
                    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                case _:
                    pass
    return False


def test_tools_of_the_documents_are_pinned() -> None:
    """What makes the pages and what checks a release is pinned, so that a build is the same later."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.split(r"[\[>=<;]", one)[0] for one in (*extras["docs"], *extras["release"])}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    assert wanted
    assert wanted <= pinned


def test_the_pages_tool_reads_the_documents() -> None:
    """`make docs` builds what is here, strictly."""
    settings = Path(DOCS / "site" / "mkdocs.yml").read_text()
    assert "docs_dir: .." in settings
    makefile = (ROOT / "Makefile").read_text()
    assert "mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml" in makefile
