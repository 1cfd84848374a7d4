"""What a doctor says: findings, one a probe or more, and what they come to in the end."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from publisher.config.checks import one_line
from publisher.tools.colour import Paint

__all__ = [
    "Arrivals",
    "Finding",
    "Verdict",
    "Voids",
    "conclusion",
    "exit_code",
    "last_lines",
    "lines",
]

Verdict = Literal["ok", "wrong", "unknown"]
Voids = Literal["most", "all"]

_SIGNS = {"ok": "ok", "wrong": "!!", "unknown": "??"}
_COLOURS = {"ok": "green", "wrong": "bold red", "unknown": "yellow"}
_PROBE_WIDTH = 11
_ADVICE = "→ "
_CAUSES = (
    *("address", "two-sided", "connect", "handshake", "http", "topic", "events", "content"),
    *("fit", "blocks", "replay"),
)
"""Probes, those first without which the others do not matter: a router looks at the size of a block when
it has read it. A replay brings only what was before.
"""

_OF_WHAT_CAME = ("content", "fit", "blocks")
_USES = {"all": "no use for {}", "most": "no use for most of {}"}
_REPEATED = 60
"""Advice up to so long is told twice; more is not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe came to. `text`: a clause that can stand behind "because". `advice`: what to change.

    `stops`: alone it keeps everything from arriving at a router that is told what we were. `voids`: how
    much of what arrives is of no use to that router. `offline`: nobody was there to speak with.
    `sums_up`: it repeats those before, and is no cause. `about`: of a conclusion, the probe whose advice
    it has.
    """

    probe: str
    verdict: Verdict
    text: str
    advice: str = ""
    stops: bool = False
    voids: Voids | None = None
    offline: bool = False
    sums_up: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How much came live: `batches`, with `events` in them."""

    batches: int = 0
    events: int = 0


def lines(finding: Finding, paint: Paint, width: int | None) -> list[str]:
    """For people: at most `width` columns each, where one is given."""
    sign = paint(_SIGNS[finding.verdict], _COLOURS[finding.verdict])
    margin = " " * (len("ok") + 2 + _PROBE_WIDTH)
    head = f"{sign}  {finding.probe:<{_PROBE_WIDTH}}"
    told = _wrap(finding.text, None if width is None else width - len(margin))
    found = [f"{head}{told[0]}", *(f"{margin}{line}" for line in told[1:])]
    if finding.advice:
        inner = margin + " " * len(_ADVICE)
        advice = _wrap(finding.advice, None if width is None else width - len(inner))
        found.append(f"{margin}{_ADVICE}{advice[0]}")
        found += [f"{inner}{line}" for line in advice[1:]]
    return found


def _wrap(text: str, width: int | None) -> list[str]:
    text = one_line(text)
    if width is None:
        return [text]
    return textwrap.wrap(text, max(30, width), break_on_hyphens=False) or [""]


def conclusion(findings: Sequence[Finding], arrivals: Arrivals) -> Finding:
    """What they come to: the likeliest cause, and what to change."""
    found = sorted(findings, key=lambda one: _CAUSES.index(one.probe))
    wrong = [one for one in found if one.verdict == "wrong" and not one.sums_up]
    stopping = [one for one in wrong if one.stops]
    spoiling = _spoiling(wrong)
    if not spoiling:  # what is wrong with what was told before is no better when more comes
        if not arrivals.events:
            stopping += [one for one in found if one.stops]
        if not arrivals.batches:
            stopping += wrong
    if stopping:
        return _conclude(wrong, f"Nothing arrives because {stopping[0].text}.", stopping[0])
    told = _told(arrivals)
    if wrong:
        cause = (spoiling or wrong)[0]
        more = f" (and {_more(len(wrong) - 1)})" if len(wrong) > 1 else ""
        return _conclude(wrong, f"{told}, {_but(cause, arrivals)}{cause.text}{more}.", cause)
    told += ", and nothing wrong was found"
    unsure = next((one for one in found if one.verdict == "unknown"), None)
    if unsure is None:
        return _conclude(wrong, f"{told}.")
    return _conclude(wrong, f"{told}. What may matter: {unsure.text}.", unsure)


def _spoiling(wrong: list[Finding]) -> list[Finding]:
    """Causes in what came, live or replayed; those that spoil most of it first."""
    voiding = [one for one in wrong if one.voids is not None]
    return voiding or [one for one in wrong if one.probe in _OF_WHAT_CAME]


def _told(arrivals: Arrivals) -> str:
    if not arrivals.batches:
        return "No message came"
    came = "Events arrive" if arrivals.events else "The stream is alive"
    batches = "1 batch was" if arrivals.batches == 1 else f"{arrivals.batches} batches were"
    return f"{came}: {batches} received"


def _but(cause: Finding, arrivals: Arrivals) -> str:
    """What stands before a cause."""
    if cause.voids is None:
        return "but " if arrivals.batches else "and of what is replayed: "
    if not arrivals.batches:
        return f"and the router has {_USES[cause.voids].format('what is replayed')}: "
    them = "them" if arrivals.events else "what it says"
    return f"but the router has {_USES[cause.voids].format(them)}: "


def _conclude(wrong: list[Finding], text: str, cause: Finding | None = None) -> Finding:
    verdict: Verdict = "wrong" if wrong else "ok"
    if cause is None:
        return Finding("conclusion", verdict, text)
    return Finding("conclusion", verdict, text, cause.advice, about=cause.probe)


def last_lines(last: Finding, width: int | None) -> list[str]:
    """A conclusion, for people, who have read the advice above: one line where no width is given."""
    advice = last.advice if len(last.advice) <= _REPEATED else f"see '{last.about}' above"
    return _wrap(f"{last.text} {_ADVICE}{advice}" if advice else last.text, width)


def _more(count: int) -> str:
    return "1 thing more is wrong" if count == 1 else f"{count} things more are wrong"


def exit_code(findings: Sequence[Finding]) -> int:
    """0: nothing is wrong. 1: something is. 3: nobody was there."""
    wrong = [one for one in findings if one.verdict == "wrong"]
    if any(one.offline and one.stops for one in wrong):
        return 3
    return 1 if wrong else 0
