"""One source under check: its messages in, findings to its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvevents.check import Checker, Finding, Verifier
from kvevents.follower import Step, Told
from kvevents.gaps import Gap, Lost
from kvevents.reading import read
from publisher.tools.check.report import Compared, Report
from publisher.tools.source import Capture, Source

__all__ = ["Checked"]

_REPORTED = 10_000


class Checked:
    """One source under check."""

    def __init__(self, source: Source, report: Report, verifier: Verifier | None) -> None:
        self.source, self.report = source, report
        self.checker = Checker(verifier=verifier)
        self._behind = False
        """Whether a hole of which nothing was found yet may be a loss of our own."""
        self._reported: set[Finding] = set()
        self.second = Checker()
        """Of who joins anew in the end."""

    def take(self, step: Step) -> None:
        """A message, and what it brought."""
        self.report.take(list(self._own(_findings(self.checker, step, self._notice))))

    def listen(self, step: Step) -> None:
        """The same of who joins anew; what was reported of the stream is not again."""
        found = _findings(self.second, step, lambda: None)
        self.report.take([one for one in found if one not in self._reported])

    def _notice(self) -> None:
        self._behind = self._behind or self.source.is_behind

    def _own(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        holes = False
        for one in findings:
            if len(self._reported) < _REPORTED:
                self._reported.add(one)
            is_hole = one.rule in ("gap", "lost")
            holes = holes or is_hole
            if self._behind and is_hole:
                why = f"{one.what}, maybe by us alone: we read too slowly"
                yield replace(one, severity="note", what=why)
            elif one.rule == "lost" and self._ends_in_replay:
                why = f"{one.what}, maybe not: the capture ends before its replay does"
                yield replace(one, severity="note", what=why)
            else:
                yield one
        self._behind = self._behind and not holes

    @property
    def _ends_in_replay(self) -> bool:
        return isinstance(self.source, Capture) and self.source.ends_in_replay

    def close(self, compared: Compared | None) -> None:
        """There is no more."""
        self.report.take(list(self._own(self.checker.close())))
        self.report.close(self.checker, compared)


def _findings(checker: Checker, step: Step, notice: Callable[[], None]) -> list[Finding]:
    """All about one message. `notice`: called for a hole."""
    found = checker.message(step.message)
    for arrival in step.arrivals:
        if isinstance(arrival, Told):
            found += checker.read(read(arrival))
        else:
            if isinstance(arrival, (Gap, Lost)):
                notice()
            found += checker.other(arrival)
    return found
