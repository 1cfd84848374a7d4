"""A table of any width: columns that do not fit go on in a further line of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from publisher.tools.colour import Paint

__all__ = [
    "Cell",
    "Column",
    "Line",
    "byte_size",
    "lay_out",
    "of_batches",
    "painted",
    "short_number",
]

_GAP = 2
_INDENT = 2


class Cell(NamedTuple):
    """Text, and a style of `publisher.tools.colour`."""

    text: str
    style: str = ""


Line = list[Cell]


@dataclass(frozen=True, slots=True)
class Column:
    """`left`: its text begins where its head does; numbers end there. `most`: what is longer is cut in
    its middle; None: never. `least`: how wide it is at least. `spare`: it is left out where everything
    is zero and lines are short.
    """

    head: str
    left: bool = False
    most: int | None = None
    spare: bool = False
    least: int = 0


def lay_out(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None
) -> tuple[list[Line], list[list[Line]]]:
    """The lines of the head, and those of each row; None: one line each, however long.

    No line is longer than `width`, unless one cell alone is.
    """
    kept = list(range(len(columns)))
    widths = [_width(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    if width is not None and sum(widths) + _GAP * (len(widths) - 1) > width:
        kept = [
            at
            for at in kept
            if not (columns[at].spare and all(row[at].text in ("0", "-", "") for row in rows))
        ]
    lines = _packed(kept, widths, width)
    head = [Cell(column.head, "bold") for column in columns]
    return (
        _row(head, columns, lines, widths),
        [_row(row, columns, lines, widths) for row in rows],
    )


def _width(column: Column, cells: Sequence[Cell]) -> int:
    longest = max([len(column.head), column.least, *(len(cell.text) for cell in cells)])
    return longest if column.most is None else min(longest, max(column.most, len(column.head)))


def _packed(kept: Sequence[int], widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Which columns each line has."""
    lines: list[list[int]] = [[]]
    used = 0
    for at in kept:
        if lines[-1] and width is not None and used + _GAP + widths[at] > width:
            lines.append([])
            used = _INDENT - _GAP
        used += widths[at] + (_GAP if lines[-1] or len(lines) > 1 else 0)
        lines[-1].append(at)
    return lines


def _row(
    cells: Sequence[Cell],
    columns: Sequence[Column],
    lines: Sequence[Sequence[int]],
    widths: Sequence[int],
) -> list[Line]:
    found: list[Line] = []
    for number, line in enumerate(lines):
        told: Line = [Cell(" " * _INDENT)] if number else []
        for place, at in enumerate(line):
            if place:
                told.append(Cell(" " * _GAP))
            text = _cut(cells[at].text, widths[at])
            padding, cell = Cell(" " * (widths[at] - len(text))), Cell(text, cells[at].style)
            told += [cell, padding] if columns[at].left else [padding, cell]
        while told and not told[-1].text.strip():
            told.pop()
        found.append(told)
    return found


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def painted(line: Line, paint: Paint) -> str:
    """A line as it is written."""
    return "".join(paint(text, style) for text, style in line).rstrip()


def byte_size(count: int) -> str:
    """So many bytes, in the unit that suits them."""
    if count < 1000:
        return f"{count} bytes"
    for unit, step in (("kB", 10**3), ("MB", 10**6)):
        if count < step * 1000:
            return f"{count / step:.1f} {unit}"
    return f"{count / 10**9:,.1f} GB"


def of_batches(count: int) -> str:
    """So many batches."""
    return "1 batch" if count == 1 else f"{count:,} batches"


def short_number(value: float) -> str:
    """At most six characters: 12,345 is `12345`, 1,234,567 is `1.23M`."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}" if abs(value) < 1e15 else f"{value:.0e}"
    if abs(value) >= 100_000:
        return f"{value / 1000:.0f}k"
    return str(value) if isinstance(value, int) else _short_float(value)


def _short_float(value: float) -> str:
    if value and abs(value) < 10:
        return f"{value:.1f}"
    return f"{value:.0f}"
