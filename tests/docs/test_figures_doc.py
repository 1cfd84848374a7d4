"""What README and docs/operations.md say of speed is of the last run, benchmarks/results/latest.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/latest.json").read_text())
OF_WORK = {
    "busy_loop": ("P1", "P2"),
    "pace": ("P3",),
    "flood": ("P4",),
    "replays": ("P5",),
    "late_join": ("P6",),
    "requests": ("P7",),
    "tiers": ("P8",),
    "memory": ("P9",),
    "growth": ("P10",),
    "block_index": ("P11",),
    "storage": ("P12",),
}
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_NAMED = re.compile(r"`(\w+)`")
_MEASURED = re.compile(rf"({_NUMBER})(?: to ({_NUMBER}))? (?:µs|ms|s|bytes|blocks a second|%) ")


def works_of(text: str) -> list[str]:
    return [name for name in _NAMED.findall(text) if name in OF_WORK]


def values(works: list[str]) -> Iterator[float]:
    """All numbers of the rows of some works."""
    for row in ROWS:
        if any(row["id"].split(".")[0] in OF_WORK[work] for work in works):
            known = (row["figure"], row["peer_figure"], row["ratio"], *(row["spread"] or ()))
            yield from (float(one) for one in known if one is not None)
            yield from (_number(one) for one in re.findall(_NUMBER, row["note"]))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def stands_for(said: str, value: float) -> bool:
    """Whether `said` is `value`, or a thousandth of it, to as many places as are said."""
    places = len(said.partition(".")[2])
    step = 10.0**-places if places or not said.endswith("000") else 1000.0
    return any(abs(_number(said) - one) <= 0.51 * step for one in (value, value / 1000))


def readme_rows() -> list[tuple[list[str], list[str]]]:
    """Of the table: the works that a row names, and the numbers it has of them."""
    part = (ROOT / "README.md").read_text().partition("## How fast")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")]
    return [
        (works_of(cells[0]), re.findall(_NUMBER, " ".join(cells[1:])))
        for cells in rows
        if works_of(cells[0])
    ]


def paragraphs() -> list[tuple[list[str], list[str]]]:
    """The same of the sizes and times that docs/operations.md names with the work that shows them."""
    text = (ROOT / "docs/operations.md").read_text()
    lines = [line for part in text.split("\n\n") for line in _joined(part)]
    return [
        (works, [one for found in _MEASURED.findall(line) for one in found if one])
        for line in lines
        if (works := works_of(line))
    ]


def _joined(part: str) -> list[str]:
    """A table's rows one by one, text as a whole."""
    return part.splitlines() if part.startswith("|") else [part.replace("\n", " ")]


@pytest.mark.parametrize(("works", "numbers"), [*readme_rows(), *paragraphs()])
def test_a_figure_is_of_the_last_run(works: list[str], numbers: list[str]) -> None:
    """Each number is one of the rows of the work that is named beside it."""
    known = list(values(works))
    assert numbers
    for said in numbers:
        assert any(stands_for(said, one) for one in known), f"{said} is none of {works}"


def test_figures_are_looked_for() -> None:
    """Where they are: a table that lost its names would be held to nothing."""
    assert len(readme_rows()) >= 10
    assert len(paragraphs()) >= 3
    assert {work for works, _ in readme_rows() for work in works} >= {"requests", "flood", "pace"}
