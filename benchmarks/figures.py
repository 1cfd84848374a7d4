"""One row of the table: what was measured, what it is compared with, and whether it is enough.

compared("P3.p50.1000", "latency at 1,000 batches/s, p50", ours, "µs",
         reach=at_most(1.0), peer="sglang", peer_figure=theirs)
absolute("P2.p50.8", "latency beside a busy interpreter, p50", ours, "ms", reach=at_most(0.5))
skipped("P3.p50.1000", "latency at 1,000 batches/s, p50", reach=at_most(1.0), reason="no sglang")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

__all__ = [
    "Figure",
    "Reach",
    "absolute",
    "at_least",
    "at_most",
    "compared",
    "others",
    "shown",
    "skipped",
    "spread",
]


@dataclass(frozen=True, slots=True)
class Reach:
    """The bound that is to be kept, of the ratio to a peer's figure or of the figure itself."""

    kind: Literal["≤", "≥"]
    bound: float

    def met(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        return value <= self.bound if self.kind == "≤" else value >= self.bound

    def share(self, value: float) -> float | None:
        """How much of what is allowed `value` takes: up to 1 is met. None where that is no number."""
        above, below = (value, self.bound) if self.kind == "≤" else (self.bound, value)
        return above / below if below else None


def at_most(bound: float) -> Reach:
    return Reach("≤", bound)


def at_least(bound: float) -> Reach:
    return Reach("≥", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    """A row. `id` is the row's in the issue's table with what it is of: `P1.total.8`.

    `ratio` is to `peer_figure`. `met` is None where there was nothing to measure, or nothing to compare
    with. `share` is how much of the bound it takes. `spread`: least and greatest of the rounds.
    """

    id: str
    work: str
    target: str
    figure: float | None
    unit: str
    peer: str = ""
    peer_figure: float | None = None
    ratio: float | None = None
    met: bool | None = None
    share: float | None = None
    spread: tuple[float, float] | None = None
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def compared(
    row_id: str,
    work: str,
    figure: float,
    unit: str,
    *,
    reach: Reach | None,
    peer: str,
    peer_figure: float | None,
    ratio: float | None = None,
    spread: tuple[float, float] | None = None,
    note: str = "",
    versions: Mapping[str, str] | None = None,
) -> Figure:
    """A figure beside a peer's, and the reach of their ratio; None: shown, and nothing to be reached.

    `ratio` is figure / peer_figure unless given, as the median of the rounds' ratios is.
    """
    if ratio is None and peer_figure:
        ratio = figure / peer_figure
    return Figure(
        row_id,
        work,
        f"{reach.kind} {shown(reach.bound)}× {peer}" if reach else f"beside {peer}",
        figure,
        unit,
        peer,
        peer_figure,
        ratio,
        None if ratio is None or reach is None else reach.met(ratio),
        None if ratio is None or reach is None else reach.share(ratio),
        spread,
        note,
        versions or {},
    )


def absolute(
    row_id: str,
    work: str,
    figure: float,
    unit: str,
    *,
    reach: Reach | None,
    peer: str = "",
    peer_figure: float | None = None,
    spread: tuple[float, float] | None = None,
    note: str = "",
    versions: Mapping[str, str] | None = None,
) -> Figure:
    """A figure and what it is to reach itself; a peer's may be shown beside it."""
    return Figure(
        row_id,
        work,
        f"{reach.kind} {shown(reach.bound)} {unit}".rstrip() if reach else "",
        figure,
        unit,
        peer,
        peer_figure,
        figure / peer_figure if peer_figure else None,
        reach.met(figure) if reach else None,
        reach.share(figure) if reach else None,
        spread,
        note,
        versions or {},
    )


def skipped(
    row_id: str,
    work: str,
    *,
    reach: Reach | None,
    reason: str,
    unit: str = "",
    peer: str = "",
) -> Figure:
    """A row that was not measured, and why."""
    what = f"× {peer}" if peer else f" {unit}" if unit else ""
    target = f"{reach.kind} {shown(reach.bound)}{what}" if reach else ""
    return Figure(row_id, work, target, None, unit, peer, note=f"skipped: {reason}")


def shown(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return "–"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Least and greatest of the rounds; None of one round."""
    return (min(values), max(values)) if len(values) > 1 else None


def others(
    values: Mapping[str, Sequence[float]], *, ours: str, unit: str = "", absent: Mapping[str, str]
) -> str:
    """A note: the medians of the peers, and why the others took no part."""
    parts = [f"{name} {shown(median(each))}{unit}" for name, each in values.items() if name != ours]
    reasons = [f"no {name}: {why}" for name, why in absent.items()]
    return "; ".join([", ".join(parts), *reasons] if parts else reasons)
