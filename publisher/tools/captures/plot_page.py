"""Profiles as one page of HTML: a picture and the numbers of each. It loads nothing and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from kvevents.hashing import short_hash
from kvevents.profile import Counts, Profile
from publisher.tools.captures.plot_figure import INK, PAPER, SHADE, duration, svg
from publisher.tools.text import printable

if TYPE_CHECKING:
    from publisher.tools.captures.plot import Plotted

__all__ = ["page"]

_HEADS = 10
_STYLE = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --shade: #d0d7de }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --shade: #3d444d }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin-top: 2.5rem; overflow-wrap: anywhere }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem }
svg { width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--shade); padding: .25rem .8rem .25rem 0; text-align: right }
th { font-weight: 600 } th:first-child, td:first-child { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.2rem; margin: 0 }
dt { opacity: .75 } dd { margin: 0; overflow-wrap: anywhere }
.note { opacity: .8; font-size: .9rem } .fault { border-left: 4px solid #e5534b; padding-left: .8rem }
"""
_NOTE = """\
<p class="note"><b>Stored again</b>: stores of blocks that had been removed from the same tier, with no
clear in between. <b>Kept elsewhere</b>: another tier had the block at that moment, and it can be a copy
of that; all others were computed again, or came from where no event tells of. <b>Distance</b>: how many
distinct other blocks came to the tier meanwhile. A tier that evicts the least recently used block, larger
by that and one, would still have had it, so it is the most that was missing. <b>Kept at twice</b>: those
whose distance is below the tier's peak, which a tier twice as large would have kept. <b>Life</b>: of
blocks whose store and removal were both seen.</p>
"""


def page(plotted: Sequence[Plotted]) -> bytes:
    """A section for each."""
    names = ", ".join(one.name for one in plotted)
    body = "\n".join(_section(one, number) for number, one in enumerate(plotted))
    text = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_text(f"KV-cache events: {names}")}</title>
<style>
{_STYLE}</style>
</head>
<body>
<h1>KV-cache events</h1>
{body}
{_NOTE}</body>
</html>
"""
    return text.encode()


def _section(one: Plotted, number: int) -> str:
    fault = "" if one.fault is None else f'<p class="fault">{_text(one.fault)}</p>\n'
    facts = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>\n" for key, value in _facts(one))
    return f"""\
<section>
<h2>{_text(one.name)}</h2>
{fault}<dl>
{facts}</dl>
<figure class="wide" style="margin: 1rem 0">{_inline(svg(one.profile, "", salt=str(number)))}</figure>
{_tiers(one.profile)}{_returning(one.profile)}</section>"""


def _facts(one: Plotted) -> Iterator[tuple[str, str]]:
    profile, timeline = one.profile, one.profile.timeline
    if one.head is not None:
        yield "publisher", one.head.endpoint
        if one.head.replay_endpoint is not None:
            yield "replay", one.head.replay_endpoint
        if one.head.topic:
            yield "topic", one.head.topic
    if timeline.start_ns is not None:
        yield "from", _moment(timeline.start_ns)
        yield "to", f"{_moment(timeline.end_ns)}, {duration(timeline.end_ns - timeline.start_ns)}"
    yield "batches", f"{profile.batches:,}"
    if profile.replayed:
        yield "of them replayed", f"{profile.replayed:,}, which are not in the rates"
    events = ", ".join(f"{count:,} {kind}" for kind, count in profile.events.items())
    yield "events", f"{sum(profile.events.values()):,}: {events}"
    if profile.has_others:
        yield "ranks", f"more than {len(profile.ranks)}; those beyond are taken for one, `others`"
    elif len(profile.ranks) > 1:
        yield "ranks", f"{len(profile.ranks)}"
    if profile.earlier:
        before = f"{profile.earlier:,}, which were not told: what was stored then is in no count"
        yield "batches before", before
    if profile.missed:
        ours = "; the recorder was too slow or stopped at times, and may have lost them itself"
        yield "batches lost", f"{profile.missed:,}{ours if one.behind else ''}"
    if profile.undecodable:
        yield "batches not readable", f"{profile.undecodable:,}"
    if profile.skipped:
        yield "events not readable", f"{profile.skipped:,}"


def _tiers(profile: Profile) -> str:
    head = ("tier", "stored", "removed", "cleared", "resident", "peak", "median life", "p99 life")
    again = ("stored again", "kept elsewhere", "median away", "median distance", "kept at twice")
    rows = [[medium.value, *_row(counts)] for medium, counts in profile.tiers().items()]
    return _table("Tiers, in blocks", (*head, *again), rows)


def _row(counts: Counts) -> list[str]:
    returns = counts.returns
    distance = counts.distances.quantile(0.5)
    return [
        *(f"{n:,}" for n in (counts.stored, counts.removed, counts.cleared)),
        *(f"{n:,}" for n in (counts.resident, counts.peak)),
        *(_age(counts.lifetimes.quantile(share)) for share in (0.5, 0.99)),
        f"{returns:,} ({returns / max(1, counts.stored):.0%})",
        _share(counts.elsewhere, returns),
        _age(counts.away.quantile(0.5)),
        "–" if distance is None else f"{distance:,}",
        _share(counts.kept_by(2000), returns),
    ]


def _returning(profile: Profile) -> str:
    rows = [
        [
            short_hash(head.block_hash),
            head.medium.value,
            "others" if head.rank is None else f"{head.rank}",
            *(f"{head.times:,}", f"{head.blocks:,}"),
        ]
        for head in profile.heads(_HEADS)
    ]
    head = ("first block", "tier", "rank", "times", "blocks stored again")
    return _table("Prefixes that return most", head, rows)


def _table(title: str, head: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f"""\
<h3>{_text(title)}</h3>
<div class="wide"><table>
<tr>{top}</tr>
{lines}</table></div>
"""


def _inline(drawn: bytes) -> str:
    """An SVG as a part of a page: without what names it as a file, and in the page's colours."""
    text = drawn.decode()
    start, _, rest = text[text.index("<svg") :].partition(">")
    start = re.sub(r'\s+(xmlns(:\w+)?|version|width|height)="[^"]*"', "", start)
    rest = re.sub(r"\s*<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    for colour, variable in ((INK, "--ink"), (PAPER, "--paper"), (SHADE, "--shade")):
        rest = rest.replace(colour, f"var({variable})")
    return f'{start} role="img">{rest}'


def _text(value: str) -> str:
    return escape(printable(value))


def _moment(at_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "no date"


def _age(ns: int | None) -> str:
    return "–" if ns is None else duration(ns)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
