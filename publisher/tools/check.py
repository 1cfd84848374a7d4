"""`kvevents check`: streams and captures held to their invariants, a line for each that is broken."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvevents.check import RULES, Checker, Finding, Place, Verifier
from kvevents.follower import Step, Told
from kvevents.gaps import Gap, Lost
from kvevents.hashing import BlockHash
from kvevents.message import Channel
from kvevents.reading import read
from publisher.checks import one_line, shown
from publisher.listener import wait_for
from publisher.tools.source import Live, Source, Sources

__all__ = ["Outcome", "Report", "check", "read_rules"]

_COMPARE_S = 10.0
"""How long a second subscriber may take to come to where the first is."""

_REPORTED = 10_000
_TICK_S = 0.1


def read_rules(text: str | None) -> frozenset[str]:
    """Those named, with commas between. Raises ValueError for a name that is none."""
    if text is None:
        return frozenset()
    names = text.split(",")
    for name in names:
        if name not in RULES:
            raise ValueError(f"--allow: {shown(name)} is not one of {', '.join(RULES)}")
    return frozenset(names)


@dataclass(slots=True)
class _Repeated:
    """Findings of one kind. `count`: all of them."""

    first: Finding
    count: int = 1
    last: Place = Place(0)  # noqa: RUF009  # it cannot be changed


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
        self._kinds: dict[tuple[str, str], _Repeated] = {}

    @property
    def violations(self) -> int:
        """How many there were."""
        return sum(self._count("violation").values())

    @property
    def notes(self) -> int:
        """How many there were."""
        return sum(self._count("note").values())

    def _count(self, severity: str) -> Counter[str]:
        found = {rule: one.count for (rule, kind), one in self._kinds.items() if kind == severity}
        return Counter(found)

    def take(self, findings: Sequence[Finding]) -> None:
        """Findings about one message."""
        for finding in findings:
            if finding.rule in self._allowed:
                continue
            key = finding.rule, finding.severity
            kind = self._kinds.get(key)
            if kind is None:
                self._kinds[key] = _Repeated(finding, last=finding.place)
            else:
                kind.count += 1
                kind.last = finding.place
            if kind is None or self._verbose:
                self._line(_text(finding), {"type": "finding", **_plain(finding)})

    def close(self, checker: Checker, compared: Compared | None) -> None:
        """What came more than once, and what it comes to."""
        for (rule, _), kind in self._kinds.items():
            if kind.count > 1 and not self._verbose:
                more = {"count": kind.count, "last_seq": str(kind.last.seq)}
                text = f"{kind.count:,} times to {kind.last}: {rule}"
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
        told = ", ".join(_number(*one) for one in (*counts, (checker.blocks, "block", "blocks")))
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
        self._write(msgspec.json.encode({"source": self._source, **told}).decode())

    def _line(self, text: str, told: dict[str, Any]) -> None:
        if self._as_json:
            self._object(told)
        else:
            self._write(one_line(f"{self._source}  {text}" if self._several else text))


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


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _verified(verifier: Verifier | None) -> str:
    if verifier is None:
        return ""
    if verifier.scheme is None:
        return " (no hash could be verified)"
    told = f"verified {_number(verifier.verified, 'hash', 'hashes')} as {verifier.scheme}"
    if verifier.unverifiable:
        told += f", {verifier.unverifiable:,} could not be"
    return f" ({told})"


# -------------------------------------------------------------------------------------- a source


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
            return f"a new subscriber is told the same {_number(self.blocks, 'block', 'blocks')}"
        return "a new subscriber is told something else"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all sources together. `faults`: captures that are damaged, and replays that were not over."""

    batches: int
    blocks: int
    violations: int
    notes: int
    faults: int
    unconnected: int


class _Checked:
    """One source under check."""

    def __init__(self, source: Source, report: Report, verifier: Verifier | None) -> None:
        self.source, self.report = source, report
        self.checker = Checker(verifier=verifier)
        self._behind = False
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
        for one in findings:
            if len(self._reported) < _REPORTED:
                self._reported.add(one)
            if self._behind and one.rule in ("gap", "lost"):
                why = f"{one.what}, maybe by us alone: we read too slowly"
                yield replace(one, severity="note", what=why)
            else:
                yield one

    def close(self, compared: Compared | None) -> None:
        """There is no more."""
        self.report.take(list(self._own(self.checker.close())))
        self.report.close(self.checker, compared)


class _Interrupts:
    """Counts Ctrl-C instead of being stopped anywhere by it: in the middle of a batch half of it would be
    known, and the other half taken for a lie.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def _notice(self, *_: object) -> None:
        self.count += 1

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


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
    checked = {one: _Checked(one, report(one), verifier()) for one in sources.all}
    faults = 0
    compared: dict[Source, Compared] = {}
    with _Interrupts() as interrupts:
        enough = _follow(sources, checked, for_s, count, interrupts)
        if second is not None:
            for live, step in sources.rest():
                checked[live].take(step)
            before = interrupts.count
            for live in sources.live:
                if live.can_replay and live.follower.connections and interrupts.count == before:
                    compared[live] = _compare(live, checked[live], second, interrupts)
    for live in sources.live:
        if not live.follower.connections:
            warn(f"no connection to {live.address.endpoint}")
        elif live.connected and live.follower.recovering and not enough:
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
    checked: dict[Source, _Checked],
    for_s: float | None,
    count: int | None,
    interrupts: _Interrupts,
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


# --------------------------------------------------------------------------------- joining anew


def _compare(
    live: Live, first: _Checked, second: Callable[[Live], Live], interrupts: _Interrupts
) -> Compared:
    """Follow on until a subscriber that joins now is at the same seq; then both hold the same."""
    why_not = _why_not(live, first.checker)
    if why_not is not None and not live.follower.recovering:
        return Compared(why_not=why_not)
    deadline, before = time.monotonic() + _COMPARE_S, interrupts.count
    joined = second(live)
    one, other = _Side(live, first.take), _Side(joined, first.listen)
    try:
        while time.monotonic() < deadline and interrupts.count == before:
            behind = _behind(one, first.checker, other, first.second)
            if behind is None:
                return _difference(first)
            if not behind.turn_once():
                wait_for(
                    [live.listener, joined.listener], min(deadline, time.monotonic() + _TICK_S)
                )
                one.receive()
                other.receive()
    finally:
        joined.close()
    if interrupts.count > before:
        return Compared(why_not="interrupted")
    if why_not := _why_not(live, first.checker):
        return Compared(why_not=why_not)
    if first.second.batches and not first.second.exact:
        return Compared(why_not="what is retained does not reach back to where its state began")
    return Compared(why_not=f"a new subscriber was not told all of it in {_COMPARE_S:.0f} s")


def _why_not(live: Live, checker: Checker) -> str | None:
    """Why what was followed cannot be compared with anything; None: it can."""
    if not live.connected:
        return "the publisher is gone"
    return None if checker.exact else "not all that is held was seen to be stored"


class _Side:
    """One of two subscribers, told step by step. `settled`: no replay is under way at the last step."""

    def __init__(self, live: Live, take: Callable[[Step], None]) -> None:
        self._live, self._take = live, take
        self._pending: deque[Step] = deque()
        self.settled = False

    def receive(self) -> None:
        """Have what came wait."""
        steps = self._live.listener.turn()
        self._pending += steps
        if any(step.message.channel != Channel.LIVE for step in steps):
            self.settled = False

    def turn_once(self) -> bool:
        """Take the next step; False where there is none."""
        if self._pending:
            self._take(self._pending.popleft())
        if not self._pending:
            self.settled = not self._live.follower.recovering
        return bool(self._pending)


def _behind(one: _Side, first: Checker, other: _Side, second: Checker) -> _Side | None:
    """Who of the two has to be told more; None: neither."""
    if not other.settled or second.next_seq is None or not second.exact:
        return other
    if not one.settled or first.next_seq is None or not first.exact:
        return one
    if first.next_seq == second.next_seq:
        return None
    return one if first.next_seq < second.next_seq else other


def _difference(first: _Checked) -> Compared:
    followed, told = first.checker.resident(), first.second.resident()
    place = Place((first.second.next_seq or 1) - 1)
    found = [
        _state_finding(key, followed.get(key, set()), told.get(key, set()), place)
        for key in sorted(followed.keys() | told.keys(), key=str)
        if followed.get(key) != told.get(key)
    ]
    first.report.take(found)
    return Compared(blocks=sum(map(len, followed.values())), same=not found)


def _state_finding(
    key: tuple[int, int | None, Any], followed: set[BlockHash], told: set[BlockHash], place: Place
) -> Finding:
    rank, _, medium = key
    more, less = followed - told, told - followed
    parts = []
    if more:
        parts.append(
            f"{_number(len(more), 'block', 'blocks')} that a new subscriber is not told of"
        )
    if less:
        parts.append(
            f"{_number(len(less), 'block', 'blocks')} that only a new subscriber is told of"
        )
    rule = RULES["state"]
    return Finding(
        rule.invariant,
        "state",
        rule.severity,
        place,
        f"rank {rank}, {medium}: {' and '.join(parts)}",
        medium=medium,
        block_hash=min(more or less),
        blocks=len(more) + len(less),
    )
