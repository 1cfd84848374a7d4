"""docs/architecture.md says what is where, and who imports whom."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, between
from test_layering import GLUE, OURS, imports_of, name_of

PAGE = DOCS / "architecture.md"
NAMES = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
SINGLE = "Attendant|Core|Journal|Output|Replica|Sink|Speller|View"
APART = {"sglang", "vllm", "_typeshed"}
"""The engines that load a plugin, and what is there for type checkers alone."""


def rows() -> dict[str, list[str]]:
    """Of the table of rooms, by room: what is in it, what of ours it imports, what of others."""
    table = between(PAGE, "rooms").splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return {room.strip("`"): rest for room, *rest in cells}


def rooms() -> list[str]:
    """The packages and all below them, as paths."""
    folders = {path.parent for package in OURS for path in (ROOT / package).rglob("*.py")}
    return sorted(str(folder.relative_to(ROOT)) for folder in folders)


def test_every_room_is_told_of() -> None:
    """The table has each package and subpackage, and none that is not there."""
    assert sorted(rows()) == rooms()


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_what_the_page_says(room: str) -> None:
    """What a room's own modules import, without its subpackages, is what its row says: of our packages
    exactly, of others no more than it and the rooms that "the same" speaks of.
    """
    _, ours, others = rows()[room]
    package = room.partition("/")[0]
    modules = [path for path in (ROOT / room).glob("*.py") if name_of(path) not in GLUE]
    found = {name for path in modules for name in imports_of(path)} - sys.stdlib_module_names
    told = set(re.findall(r"`(\w+)`(?! \(glue)", ours))
    assert found & set(OURS) <= told | {package}
    allowed = set(re.findall(r"[\w-]+", others)) | set(re.findall(r"[\w-]+", rows()[package][2]))
    assert {NAMES.get(name, name) for name in found - set(OURS) - APART} <= allowed
    assert "hicache" not in told or package == "hicache"


def test_the_glue_is_named() -> None:
    """The page names each module that may see cache and publisher together, and its room says so."""
    text = PAGE.read_text()
    for name in GLUE:
        assert f"`{name}`" in text
        room = name.rpartition(".")[0].replace(".", "/")
        assert "`hicache` (glue alone)" in rows()[room][1]


def test_every_module_that_is_named_is_there() -> None:
    """No path in backquotes leads nowhere, and neither does one of the picture."""
    text = PAGE.read_text()
    named = re.findall(r"`((?:kvevents|hicache|publisher|tests|examples)/[\w/.]*)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert (ROOT / "publisher/subscriber/subscriber.py").exists()


def test_the_picture_has_classes_that_exist() -> None:
    """What is drawn is defined somewhere in the packages."""
    picture = PAGE.read_text().split("```")[1]
    sources = "".join(path.read_text() for package in OURS for path in _sources(package))
    drawn = set(re.findall(rf"\b[A-Z][a-z]+[A-Z]\w+|\b(?:{SINGLE})\b", picture))
    assert len(drawn) > 12
    assert [name for name in sorted(drawn) if f"class {name}" not in sources] == []


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))
