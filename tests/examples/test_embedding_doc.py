"""docs/embedding.md shows pieces of the example engine, and nothing that it is not."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from textwrap import indent

import pytest

import hicache
import publisher
from examples.options import read_options
from publisher import WorkerInfo

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "embedding.md").read_text()
ENGINE = (ROOT / "examples" / "engine.py").read_text()
PIECES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_every_piece_is_in_the_engine(piece: str) -> None:
    """Line by line, but for how far it is indented."""
    assert any(indent(piece, " " * depth) in ENGINE for depth in (0, 4, 8))


def test_the_engine_is_as_short_as_is_said() -> None:
    """300 lines at the most."""
    assert len(PIECES) > 5
    assert ENGINE.count("\n") < 300


def test_the_commands_are_taken() -> None:
    """Every call of the engine has options that it knows, and every file that is named is there."""
    calls = re.findall(r"^python -m examples\.engine (.*)$", TEXT, re.MULTILINE)
    assert calls
    for call in calls:
        read_options(shlex.split(call))
    named = re.findall(r"`((?:examples|tests)/[\w/]+\.py)`", TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


# ------------------------------------------------------------------------------------ the table

(CALLS,) = re.findall(r"^<!-- calls -->\n(.*?)^<!-- /calls -->$", TEXT, re.MULTILINE | re.DOTALL)
NAMED = sorted(set(re.findall(r"`([A-Z]\w+)(?:\.(\w+))?(\([^`]*\))?", CALLS)))


def public(name: str) -> type:
    """The class, from what an engine imports."""
    found = getattr(hicache, name, None) or getattr(publisher, name)
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize(("owner", "member", "arguments"), NAMED)
def test_what_the_table_names_is_there(owner: str, member: str, arguments: str) -> None:
    """Each class is public, each call is one of its calls, with parameters of those names."""
    kind = public(owner)
    if member and not hasattr(kind, member):
        assert f"self.{member}" in inspect.getsource(kind)
    if not arguments:
        return
    parameters = inspect.signature(getattr(kind, member) if member else kind).parameters
    if any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        return
    given = [one.partition("=")[0] for one in arguments.strip("()").split(", ") if one]
    assert [name for name in given if name not in parameters] == []


def test_the_table_has_every_call_that_the_pieces_make() -> None:
    """Whatever the code above it calls of cache and sidecar is in it."""
    made = set(re.findall(r"(?:cache|_sidecar)\.(\w+)\(", "".join(PIECES)))
    assert len(made) > 8
    assert [name for name in sorted(made) if f".{name}(" not in CALLS] == []


def test_every_field_of_a_worker_is_there() -> None:
    """With the names that `WorkerInfo` takes, all of them."""
    section = TEXT.partition("`WorkerInfo`, for `spawn`")[2].partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == set(WorkerInfo.__struct_fields__)
