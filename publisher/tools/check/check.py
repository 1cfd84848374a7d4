"""`kvevents check`: streams and captures held to their invariants, a line for each that is broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvevents.check import Verifier
from publisher.tools.check.checked import Checked
from publisher.tools.check.rejoin import compare
from publisher.tools.check.report import Compared, Report
from publisher.tools.interrupt import InterruptCount
from publisher.tools.source import Live, Source, Sources

__all__ = ["Outcome", "check"]

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all sources together. `faults`: captures that are damaged, and replays that were not over."""

    batches: int
    blocks: int
    violations: int
    notes: int
    faults: int
    unconnected: int


def check(
    sources: Sources,
    report: Callable[[Source], Report],
    verifier: Callable[[], Verifier | None],
    *,
    for_s: float | None,
    count: int | None,
    second: Callable[[Live], Live] | None,
    warn: Callable[[str], None],
) -> Outcome:
    """Captures to their ends, and streams until `for_s` is over, `count` batches came, or Ctrl-C.

    `second`: makes a subscriber that joins anew in the end, to compare with; None: none does. Raises
    ValueError for a file that is no capture.
    """
    checked = {one: Checked(one, report(one), verifier()) for one in sources.all}
    faults = 0
    compared: dict[Source, Compared] = {}
    with InterruptCount() as interrupts:
        enough = _follow(sources, checked, for_s, count, interrupts)
        if second is not None:
            for live, step in sources.rest():
                checked[live].take(step)
            before = interrupts.count
            for live in sources.live:
                if live.can_replay and live.follower.connections and interrupts.count == before:
                    compared[live] = compare(live, checked[live], second, interrupts)
    for live in sources.live:
        if live.connected and live.follower.recovering and not enough:
            warn(f"{live.name}: the replay was not over")
            faults += 1
    for capture in () if enough else sources.captures:  # read to the end
        one = checked[capture]
        if (fault := capture.fault(capture.batches)) is not None:
            one.report.left_out(capture.left_out, capture.damaged or "it was cut off")
            faults += capture.damaged is not None
            warn(fault)
    for source, one in checked.items():
        one.close(compared.get(source))
    each = list(checked.values())
    return Outcome(
        batches=sum(one.checker.batches for one in each),
        blocks=sum(one.checker.blocks for one in each),
        violations=sum(one.report.violations for one in each),
        notes=sum(one.report.notes for one in each),
        faults=faults,
        unconnected=sum(not live.follower.connections for live in sources.live),
    )


def _follow(
    sources: Sources,
    checked: dict[Source, Checked],
    for_s: float | None,
    count: int | None,
    interrupts: InterruptCount,
) -> bool:
    """Whether `count` batches have come; False: all came, or the time is up."""
    until = float("inf") if for_s is None else time.monotonic() + for_s
    batches = 0
    for told in sources.steps(until, _TICK_S):
        if told is None:
            if interrupts.count:
                break
            continue
        source, step = told
        one = checked[source]
        before = one.checker.batches
        one.take(step)
        batches += one.checker.batches - before
        if count is not None and batches >= count:
            return True
        if interrupts.count:
            break
    return False
