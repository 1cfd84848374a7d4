"""docs/embedding.md shows pieces of the example engine, and nothing that it is not."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import indent

import pytest

from examples.options import read_options

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
