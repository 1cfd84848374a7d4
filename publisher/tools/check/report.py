"""What is found in a stream, as lines, and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvevents.check import RULES, Checker, Finding, Place, Verifier
from publisher.config.checks import one_line, shown
from publisher.tools.repeats import Repeats
from publisher.tools.text import json_text, printable

__all__ = ["Compared", "Report", "number", "read_rules"]


def read_rules(text: str | None) -> frozenset[str]:
    """Those named, with commas between. Raises ValueError for a name that is none."""
    if text is None:
        return frozenset()
    names = text.split(",")
    for name in names:
        if name not in RULES:
            raise ValueError(f"--allow: {shown(name)} is not one of {', '.join(RULES)}")
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was followed, with what a new subscriber is told. `why_not`: None: they were compared.

    `blocks`: how many were followed, on each medium.
    """

    blocks: int = 0
    same: bool = False
    why_not: str | None = None

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"not compared with what a new subscriber is told: {self.why_not}"
        if self.same:
            return f"a new subscriber is told the same {number(self.blocks, 'block', 'blocks')}"
        return "a new subscriber is told something else"


class Report:
    """Findings of one source as lines, and what they come to.

    The first of a kind is written when it comes, and how many there were at the end; `verbose`: all are.
    `source`: what the lines begin with, as text only where there are `several`. `allowed`: rules of which
    nothing is written nor counted.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        source: str,
        *,
        several: bool,
        as_json: bool,
        verbose: bool,
        allowed: frozenset[str] = frozenset(),
    ) -> None:
        self._write, self._source, self._several = write, one_line(source), several
        self._as_json, self._verbose, self._allowed = as_json, verbose, allowed
        self._kinds = Repeats[Finding]()

    @property
    def violations(self) -> int:
        """How many there were."""
        return sum(self._count("violation").values())

    @property
    def notes(self) -> int:
        """How many there were."""
        return sum(self._count("note").values())

    def _count(self, severity: str) -> Counter[str]:
        kinds = (one for one in self._kinds if one.first.severity == severity)
        return Counter({one.first.rule: one.count for one in kinds})

    def take(self, findings: Sequence[Finding]) -> None:
        """Findings about one message."""
        for finding in findings:
            if finding.rule in self._allowed:
                continue
            if self._kinds.take((finding.rule, finding.severity), finding) or self._verbose:
                self._line(_text(finding), {"type": "finding", **_plain(finding)})

    def close(self, checker: Checker, compared: Compared | None) -> None:
        """What came more than once, and what it comes to."""
        for kind in self._kinds:
            if kind.count > 1 and not self._verbose:
                more = {"count": kind.count, "last_seq": str(kind.last.place.seq)}
                text = f"{kind.first.rule}: {kind.count:,} times in all, last at {kind.last.place}"
                self._line(text, {"type": "repeated", **_plain(kind.first), **more})
        if self._as_json:
            self._object(self._summary(checker, compared))
        else:
            self._write(f"{self._source}: {self._verdict(checker, compared)}")

    def left_out(self, size: int, why: str) -> None:
        """Bytes at the end of a capture that were not read; as text, that is a warning."""
        if self._as_json:
            self._object({"type": "capture", "left_out_bytes": size, "why": why})

    def _verdict(self, checker: Checker, compared: Compared | None) -> str:
        counts = ((checker.batches, "batch", "batches"), (checker.events, "event", "events"))
        told = ", ".join(number(*one) for one in (*counts, (checker.blocks, "block", "blocks")))
        broken, noted = self._count("violation"), self._count("note")
        if broken:
            verdict = f"breaks its promises: {_counts(broken)}"
        elif checker.blocks:
            verdict = "keeps its promises"
        else:
            verdict = "nothing to hold it to"
        parts = [verdict]
        if noted:
            parts.append(f"notes: {_counts(noted)}")
        if compared is not None:
            parts.append(str(compared))
        return f"{told}: {'; '.join(parts)}{_verified(checker.verifier)}"

    def _summary(self, checker: Checker, compared: Compared | None) -> dict[str, Any]:
        verifier = checker.verifier
        return {
            "type": "summary",
            "batches": checker.batches,
            "events": checker.events,
            "blocks": checker.blocks,
            "violations": dict(self._count("violation")),
            "notes": dict(self._count("note")),
            "hashes": None
            if verifier is None
            else {
                "scheme": verifier.scheme,
                "verified": verifier.verified,
                "wrong": verifier.wrong,
                "unverifiable": verifier.unverifiable,
            },
            "rejoined": None
            if compared is None
            else {"same": compared.same, "blocks": compared.blocks, "why_not": compared.why_not},
        }

    def _object(self, told: dict[str, Any]) -> None:
        self._write(json_text(msgspec.json.encode({"source": self._source, **told})))

    def _line(self, text: str, told: dict[str, Any]) -> None:
        if self._as_json:
            self._object(told)
        else:
            self._write(printable(f"{self._source}  {text}" if self._several else text))


def _text(finding: Finding) -> str:
    more = f", and {finding.blocks - 1:,} more" if finding.blocks > 1 else ""
    against = "" if finding.earlier is None else f"; see {finding.earlier}"
    mark = "note: " if finding.severity == "note" else ""
    what = f"{mark}{finding.what}{more}{against}"
    return f"{finding.place!s:<16} {finding.rule} ({finding.invariant}): {what}"


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        **_where(finding.place),
        "rule": finding.rule,
        "invariant": finding.invariant,
        "severity": finding.severity,
        "what": finding.what,
        "earlier": None if finding.earlier is None else _where(finding.earlier),
        "medium": finding.medium,
        "block_hash": None if finding.block_hash is None else str(finding.block_hash),
        "blocks": finding.blocks,
    }


def _where(place: Place) -> dict[str, Any]:
    return {"seq": str(place.seq), "event": place.event}


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{rule} {count:,}" for rule, count in counts.most_common())


def number(count: int, one: str, many: str) -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many}"


def _verified(verifier: Verifier | None) -> str:
    if verifier is None:
        return ""
    if verifier.scheme is None:
        return " (no hash could be verified)"
    told = f"verified {number(verifier.verified, 'hash', 'hashes')} as {verifier.scheme}"
    if verifier.unverifiable:
        told += f", {verifier.unverifiable:,} could not be"
    return f" ({told})"
