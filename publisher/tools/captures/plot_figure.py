"""A profile as a figure: what was where, how fast it changed, how long it stayed, what came back.

Nothing of matplotlib's that is shared is touched: no pyplot, no settings that outlive a drawing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import ScaledTranslation

from kvevents.events import StorageMedium
from kvevents.profile import Counts, Profile
from kvevents.timeline import KINDS, MARKS, Stretch, Timeline
from publisher.tools.text import printable

__all__ = ["INK", "PAPER", "SHADE", "duration", "figure", "png", "svg"]

INK, SHADE, PAPER = "#24292f", "#d0d7de", "#ffffff"
"""Of text, of grids, and behind it all. In an SVG that is part of a page these are replaced."""

_MEDIUM_COLOURS = {
    StorageMedium.GPU: "#2f81f7",
    StorageMedium.CPU: "#d98200",
    StorageMedium.DISK: "#2da44e",
    StorageMedium.EXTERNAL: "#a55bd6",
}
_KIND_COLOURS = dict(zip(KINDS, ("#2f81f7", "#e5534b", "#8c959f"), strict=True))
_MARK_COLOURS = dict(
    zip(MARKS, ("#d98200", "#e5534b", "#d6409f", "#8c959f", "#a55bd6"), strict=True)
)
_MARK_WORDS = {"lost": "loss", "restarted": "restart", "undecodable": "not readable"}
_INCHES, _DPI = (10.0, 9.0), 120
_BINS, _FEW_BINS = 120, 20
"""Of the rates: as many as can be told apart; and as there are of a stream too slow for `_PER_BIN`."""
_PER_BIN = 5
"""How many times something came in a bin, on average: with fewer, it is seen that batches are whole."""
_SLOW_BIN_S = 1.0
_MARGIN = 0.008
"""Of the time that is shown, before and behind it: what happened first is not hidden by the axis."""
_NS = 1e9
_SHORTEST_S = 1e-3
"""What is shorter is so by the publisher's batches, and not by the blocks."""
_TICKS_S = (
    *(1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0),
    *(86_400.0 * 10**n for n in range(8)),
)
_MOST_TICKS = 8
_SHORT_LABEL = 30
_BELOW = 30 / 72
"""Inches from an axis to what is below its ticks and its label."""
_UNITS = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "days"))


def png(profile: Profile, title: str) -> bytes:
    """1200 × 1080 pixels."""
    with matplotlib.rc_context(_settings(title)):
        drawn, out = figure(profile, title), io.BytesIO()
        FigureCanvasAgg(drawn)
        drawn.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def svg(profile: Profile, title: str, salt: str = "") -> bytes:
    """The same as lines and text. `salt`: of the names in it, that two on one page not share."""
    with matplotlib.rc_context(_settings(title + salt)):
        drawn, out = figure(profile, title), io.BytesIO()
        FigureCanvasSVG(drawn)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawn.savefig(out, format="svg", metadata=nothing)
    return out.getvalue().replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")


def _settings(salt: str) -> Any:
    return {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": 9.0,
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "axes.facecolor": PAPER,
        "axes.titlesize": 10.0,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": SHADE,
        "grid.linewidth": 0.6,
        "xtick.color": INK,
        "ytick.color": INK,
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "legend.frameon": False,
        "legend.fontsize": 8.0,
        "path.simplify": True,
    }


def figure(profile: Profile, title: str) -> Figure:
    """All panels, for any profile, an empty one too. Names in it are only those of ASCII."""
    drawn = Figure(figsize=_INCHES, layout="constrained")
    drawn.suptitle(_plain(title), fontsize=11, x=0.01, ha="left")
    panels = drawn.subplot_mosaic(
        [["resident", "resident"], ["events", "blocks"], ["lifetimes", "returns"]],
        height_ratios=[1.25, 1, 1.1],
    )
    clock, tiers = _Clock.of(profile.timeline), profile.tiers()
    _resident(panels["resident"], profile, tiers, clock)
    what = "Live {}" if profile.replayed else "{}"
    _rates(panels["events"], profile.timeline, clock, "events", what)
    _rates(panels["blocks"], profile.timeline, clock, "blocks", what)
    _lifetimes(panels["lifetimes"], tiers)
    _returns(panels["returns"], tiers)
    return drawn


# ------------------------------------------------------------------------------------------ panels


_Tiers: TypeAlias = dict[StorageMedium, Counts]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times as a panel shows them, from the first one on."""

    start_ns: int
    span: float
    scale_ns: float
    unit: str

    @classmethod
    def of(cls, timeline: Timeline) -> _Clock:
        start = timeline.start_ns or 0
        span_s = max(timeline.end_ns - start, timeline.width_ns) / _NS
        scale, unit = next(
            ((scale, unit) for scale, unit in reversed(_UNITS) if span_s >= 2 * scale), _UNITS[0]
        )
        return cls(start, span_s / scale, scale * _NS, unit)

    def __call__(self, at_ns: int) -> float:
        return (at_ns - self.start_ns) / self.scale_ns

    def put_on(self, axes: Axes) -> None:
        axes.set_xlim(-self.span * _MARGIN, self.span * (1 + _MARGIN))
        axes.set_xlabel(f"time since the first batch ({self.unit})")


def _resident(axes: Axes, profile: Profile, tiers: _Tiers, clock: _Clock) -> None:
    since = ": those stored since it joined" if profile.earlier else ""
    axes.set_title(f"Resident blocks, by tier{since}")
    axes.set_ylabel("blocks")
    clock.put_on(axes)
    stretches, until_ns = profile.timeline.stretches, profile.replayed_until_ns
    begin_ns = clock.start_ns
    if (
        until_ns is not None and profile.replayed < profile.batches
    ):  # how fast it is told is no news
        begin_ns = until_ns
    for place, medium in enumerate(StorageMedium):
        if medium not in tiers:
            continue
        told = [one.resident[place] for one in stretches if one.start_ns <= begin_ns]
        times, counts = [clock(begin_ns)], told[-1:] or [0]
        for stretch in stretches[len(told) :]:
            times.append(clock(stretch.start_ns))
            counts.append(stretch.resident[place])
        times.append(clock.span)
        counts.append(counts[-1])
        colour = _MEDIUM_COLOURS[medium]
        axes.plot(times, counts, drawstyle="steps-post", color=colour, lw=1.5, label=medium.value)
    if until_ns is not None and until_ns > clock.start_ns:
        label = f"replay of the state: {duration(until_ns - clock.start_ns)}"
        axes.axvspan(0, clock(until_ns), color=SHADE, alpha=0.6, lw=0, zorder=0, label=label)
    _marks(axes, stretches, clock)
    _counts(axes)
    _legend(axes, bool(tiers), "no block was stored")


def _marks(axes: Axes, stretches: Sequence[Stretch], clock: _Clock) -> None:
    for mark in MARKS:
        at = [clock(stretch.start_ns) for stretch in stretches if stretch.marks[mark]]
        if at:
            times = sum(stretch.marks[mark] for stretch in stretches)
            label = f"{_MARK_WORDS.get(mark, mark)} ({times:,})"
            axes.vlines(
                *(at, 0, 1),
                colors=_MARK_COLOURS[mark],
                linestyles="dotted" if mark in ("gap", "cleared") else "solid",
                linewidth=1.1,
                transform=axes.get_xaxis_transform(),
                label=label,
            )


def _rates(axes: Axes, timeline: Timeline, clock: _Clock, what: str, of: str) -> None:
    """Per second, in stretches that the eye can tell apart."""
    span = max(timeline.end_ns - (timeline.start_ns or 0), 0) + timeline.width_ns
    per_bin = -(-span // (timeline.width_ns * _bins(timeline, span)))
    width_ns = per_bin * timeline.width_ns
    bins = max(1, round(span / width_ns))
    sums = {kind: [0] * bins for kind in KINDS[:2]}
    for stretch in timeline.stretches:
        place = min((stretch.start_ns - clock.start_ns) // width_ns, bins - 1)
        for number, kind in enumerate(KINDS[:2]):
            sums[kind][place] += getattr(stretch, what)[number]
    title = of.format(what)
    axes.set_title(f"{title[0].upper()}{title[1:]} per second (over {duration(width_ns)})")
    axes.set_ylabel(f"{what}/s")
    clock.put_on(axes)
    ends_ns = [*(place * width_ns for place in range(bins)), span]
    edges = [clock(clock.start_ns + end_ns) for end_ns in ends_ns]
    for kind, counts in sums.items():
        rates = [
            count * _NS / (end - start)
            for count, (start, end) in zip(counts, pairwise(ends_ns), strict=True)
        ]
        if any(rates):
            axes.stairs(rates, edges, color=_KIND_COLOURS[kind], lw=1.2, label=kind)
    _counts(axes)
    _legend(axes, any(any(counts) for counts in sums.values()), "nothing was told")


def _bins(timeline: Timeline, span_ns: int) -> int:
    """How many, at most, such that what is seen is how fast it goes, and not each batch."""
    came = sum(any(stretch.events[:2]) for stretch in timeline.stretches)
    slow = min(_FEW_BINS, int(span_ns / _NS / _SLOW_BIN_S))
    return max(1, min(_BINS, max(came // _PER_BIN, slow)))


def _lifetimes(axes: Axes, tiers: _Tiers) -> None:
    axes.set_title("How long blocks stay")
    axes.set_xlabel("from store to removal, at most")
    axes.set_ylabel("share of the removed")
    shortest, longest = 1.0, _SHORTEST_S
    for medium, counts in tiers.items():
        if not counts.lifetimes.count:
            continue
        points = [(max(ns / _NS, _SHORTEST_S), times) for ns, times in counts.lifetimes]
        shortest, longest = min(shortest, points[0][0]), max(longest, points[-1][0])
        label = (
            f"{medium.value}: {counts.lifetimes.count:,} removed, {counts.resident:,} still there"
        )
        _cumulative(axes, points, medium, label, start=_SHORTEST_S / 10)
    axes.set_xscale("log")
    low, high = min(shortest, longest / 10) / 1.5, longest * 1.5
    axes.set_xlim(low, high)
    ticks = [tick for tick in _TICKS_S if low <= tick <= high]
    axes.set_xticks(ticks[:: -(-len(ticks) // _MOST_TICKS) or 1])
    axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds * _NS))
    axes.minorticks_off()
    any_removed = any(counts.lifetimes.count for counts in tiers.values())
    _shares(axes, any_removed, "no block was seen from its store to its removal")


def _returns(axes: Axes, tiers: _Tiers) -> None:
    axes.set_title("Blocks stored again: how large a tier keeps them")
    axes.set_xlabel("size of the tier, 1 = its peak; evicting the least recently used")
    axes.set_ylabel("share kept, at least")
    largest = 4.0
    for medium, counts in tiers.items():
        if not counts.returns:
            continue
        points = [(size / 1000, times) for size, times in sorted(counts.sizes.items())]
        largest = max(largest, points[-1][0])
        twice = counts.kept_by(2000) / counts.returns
        label = f"{medium.value}: {counts.returns:,} stored again, {twice:.0%} kept at twice"
        _cumulative(axes, points, medium, label, start=1.0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1.0, largest * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_formatter(NullFormatter())
    any_returned = any(counts.returns for counts in tiers.values())
    if any_returned:
        axes.axvline(2.0, color=INK, lw=0.8, ls="dashed")
    _shares(axes, any_returned, "no block was stored again after its removal")


def _cumulative(
    axes: Axes, points: list[tuple[float, int]], medium: StorageMedium, label: str, start: float
) -> None:
    total = sum(times for _, times in points)
    shares = [seen / total for seen in accumulate(times for _, times in points)]
    values = [value for value, _ in points]
    axes.plot(
        *([start, *values, values[-1] * 1e6], [0.0, *shares, 1.0]),
        drawstyle="steps-post",
        color=_MEDIUM_COLOURS[medium],
        lw=1.5,
        label=label,
    )


def _counts(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"
    )


def _shares(axes: Axes, anything: bool, otherwise: str) -> None:  # noqa: FBT001
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(axes, anything, otherwise)


def _legend(axes: Axes, anything: bool, otherwise: str) -> None:  # noqa: FBT001
    """What the lines are, below all of them, or that there are none."""
    if labels := axes.get_legend_handles_labels()[1]:
        assert axes.figure is not None
        below = ScaledTranslation(0, -_BELOW, axes.figure.dpi_scale_trans)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0.0, 0.0),
            bbox_transform=axes.transAxes + below,
            borderaxespad=0.0,
            handlelength=1.4,
            ncols=5 if max(map(len, labels)) <= _SHORT_LABEL else 1,
        )
    if not anything:
        axes.text(
            *(0.5, 0.5, otherwise),
            transform=axes.transAxes,
            ha="center",
            va="center",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 4.0},  # over the grid
        )


# ------------------------------------------------------------------------------------------- words


def duration(ns: float) -> str:
    """In the unit that suits it."""
    seconds = ns / _NS
    for scale, unit in reversed(_UNITS):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def _plain(name: str) -> str:
    """What every font has, and of a length that fits."""
    text = printable(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 100 else f"…{text[-99:]}"
