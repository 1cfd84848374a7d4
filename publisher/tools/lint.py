"""`kvevents lint`: who would lose what of live streams and of captures, one line each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvevents.lint import CONSUMERS, Consumer, Finding, Lint
from kvevents.message import Channel, Message
from publisher.config.checks import one_line
from publisher.tools.likeness import did_you_mean
from publisher.tools.repeats import Repeated, Repeats
from publisher.tools.source import Capture, Live, Source, Sources
from publisher.tools.text import json_text, printable

__all__ = ["Linted", "Outcome", "Report", "lint", "read_consumers"]

_MAX_HELD, _MAX_HELD_BYTES = 20_000, 64 << 20
_SEQ_BYTES = 8


def read_consumers(text: str | None) -> list[Consumer]:
    """Those named, with commas between; None: every one. Raises ValueError for a name that is none."""
    if text is None:
        return list(CONSUMERS.values())
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CONSUMERS:
            likely = did_you_mean(name, CONSUMERS)
            raise ValueError(f"--as: {name!r} is not one of {', '.join(CONSUMERS)}{likely}")
    return [CONSUMERS[name] for name in names]


class Report:
    """What is found in one source, as lines: in the end of each consumer what becomes of it, and below
    that why, each reason with how often and where. Without `as_json`, `source` may be empty.

    `at_once`: the first finding of a kind is written when it comes as well; `verbose`: each is.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        source: str,
        *,
        as_json: bool,
        verbose: bool,
        at_once: bool = False,
    ) -> None:
        self._write, self._source = write, one_line(source)
        self._as_json, self._verbose, self._at_once = as_json, verbose, at_once or as_json
        self._kinds = Repeats[Finding]()

    @property
    def findings(self) -> int:
        """How many there were."""
        return sum(kind.count for kind in self._kinds)

    def take(self, findings: Sequence[Finding]) -> None:
        """Findings about one message."""
        for finding in findings:
            is_first = self._kinds.take((finding.consumer, finding.rule), finding)
            if self._verbose or (is_first and self._at_once):
                self._line(str(finding), {"type": "finding", **_plain(finding)})

    def close(self, lint: Lint) -> None:
        """What became of each consumer, and why."""
        if self._as_json:
            self._close_json(lint)
            return
        reasons: dict[str, list[str]] = {}
        for kind in self._kinds:
            reasons.setdefault(kind.first.consumer, []).append(_reason(kind))
        idle: dict[str, list[str]] = {}
        for tally in lint.tallies:
            name = tally.consumer.name
            if not tally.blocks and name not in reasons:
                idle.setdefault(tally.verdict, []).append(name)
        for tally in lint.tallies:
            name, verdict = tally.consumer.name, tally.verdict
            alike = idle.get(verdict, []) if name not in reasons else []
            if len(alike) < 2:
                self._text(str(tally))
            elif name == alike[0]:
                everyone = len(alike) == len(lint.tallies)
                who = f"all {len(alike)} consumers" if everyone else ", ".join(alike)
                self._text(f"{who}: {verdict}")
            for reason in reasons.get(name, ()):
                self._text(f"  {reason}")

    def _close_json(self, lint: Lint) -> None:
        for kind in self._kinds:
            if kind.count > 1 and not self._verbose:
                more = {"count": kind.count, "last_seq": kind.last.seq}
                self._object({"type": "repeated", **_plain(kind.first), **more})
        for tally in lint.tallies:
            told = {
                "type": "summary",
                "consumer": tally.consumer.name,
                "version": tally.consumer.version,
                "observed": tally.consumer.observed,
                "batches": tally.batches,
                "blocks": tally.blocks,
                "joined_at": None if tally.joined is None else tally.joined[0],
                "lost": {what: tally.lost[what] for what in sorted(tally.lost)},
            }
            self._object(told)

    def left_out(self, size: int, why: str) -> None:
        """Bytes at the end of a capture that were not read; as text, that is a warning."""
        if self._as_json:
            self._object({"type": "capture", "left_out_bytes": size, "why": why})

    def _object(self, told: dict[str, Any]) -> None:
        self._write(json_text(msgspec.json.encode({"source": self._source, **told})))

    def _text(self, text: str) -> None:
        self._write(printable(f"{self._source}  {text}" if self._source else text))

    def _line(self, text: str, told: dict[str, Any]) -> None:
        if self._as_json:
            self._object(told)
        else:
            self._text(text)


def _reason(kind: Repeated[Finding]) -> str:
    """One kind of loss: what the consumer does, how often and where, and what is there, at first."""
    one = kind.first
    return f"{one.verb}{_places(kind)}: {one.where} {one.why}"


def _places(kind: Repeated[Finding]) -> str:
    first, last = kind.first.seq, kind.last.seq
    at = "" if first is None else f" at seq {first}"
    if kind.count == 1:
        return at
    whole = kind.first.lost in ("batch", "stream", "unread")
    often = f" {kind.count:,} times" if whole else f" in {kind.count:,} batches"
    if first is None or last is None:
        return often
    return f"{often},{at}" if first == last else f"{often}, first{at}, last at seq {last}"


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "seq": finding.seq,
        "consumer": finding.consumer,
        "lost": finding.lost,
        "rule": finding.rule,
        "where": finding.where,
        "why": finding.why,
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all sources together. `faults`: captures that are damaged, and replays without an end."""

    batches: int
    blocks: int
    findings: int
    faults: int


class Linted:
    """One source under lint: its messages in, findings out; a replay goes before what came live
    meanwhile.
    """

    def __init__(self, consumers: Sequence[Consumer], report: Report, *, replay: bool) -> None:
        self.lint, self.report = Lint(consumers, replay=replay), report
        self.batches = 0
        """How many came."""
        self.faults = 0
        self._replaying = replay
        self._held: list[tuple[list[bytes], bool]] = []
        self._behind = False
        self._held_bytes = 0
        self._asked = self._answered = self._given_up = False

    def take(self, message: Message) -> None:
        """One message, of whatever channel."""
        frames = message.frames
        self.batches += message.is_batch
        match message.channel:
            case Channel.ASKED:
                if frames and len(frames[-1]) == _SEQ_BYTES:
                    self._replaying = self._asked = True
                    self.lint.asked(int.from_bytes(frames[-1], "big"))
            case Channel.ANSWER:
                self._answered = True
                self.report.take(self.lint.answer(frames))
                self._replaying = self._replaying and not message.ends_replay
            case Channel.OVER:
                self.report.take(self.lint.over())
                self._replaying, self._given_up = False, True
            case Channel.BEHIND | Channel.ABREAST:
                self._behind = message.channel == Channel.BEHIND
                return
            case Channel.LIVE:
                self._held.append((frames, self._behind))
                self._held_bytes += sum(map(len, frames))
            case _:
                return
        full = len(self._held) > _MAX_HELD or self._held_bytes > _MAX_HELD_BYTES
        if full or not self._replaying:
            self.release()

    def release(self) -> None:
        """Let what was held come in its turn."""
        held, self._held, self._held_bytes = self._held, [], 0
        for frames, behind in held:
            self.report.take(self.lint.live(frames, behind=behind))

    @property
    def blocks(self) -> int:
        """How many were stored."""
        return max((tally.blocks for tally in self.lint.tallies), default=0)

    def missing_end(self, *, time_is_up: bool) -> str | None:
        """Why the replay that was asked for has no end; None: it has, or there was still time."""
        if self._asked and (self._given_up or (self._replaying and time_is_up)):
            return (
                "the replay was not over"
                if self._answered
                else "the replay endpoint did not answer"
            )
        return None

    def close(self) -> None:
        """There is no more."""
        self.release()
        self.report.close(self.lint)


def lint(
    sources: Sources,
    report: Callable[[Source], Report],
    consumers: Sequence[Consumer],
    *,
    for_s: float | None,
    count: int | None,
    warn: Callable[[str], None],
) -> Outcome:
    """Captures to their ends, and streams until `for_s` is over, `count` batches came, or Ctrl-C.

    Raises ValueError for a file that is no capture.
    """
    linted = [
        _lint_capture(capture, report(capture), consumers, count, warn)
        for capture in sources.captures
    ]
    streams = {one: Linted(consumers, report(one), replay=one.can_replay) for one in sources.live}
    time_is_up = True
    if streams:
        with contextlib.suppress(KeyboardInterrupt):
            time_is_up = not _follow(sources, streams, for_s, count)
    for stream in streams.values():
        stream.close()
    live = list(streams.values())
    linted += live
    for one in linted:
        if (why := one.missing_end(time_is_up=time_is_up and one in live)) is not None:
            one.faults += 1
            warn(why)
        if own := one.lint.own_gaps:
            gaps = "1 gap is" if own == 1 else f"{own:,} gaps are"
            warn(f"{gaps} held against nobody: we read too slowly, and may have lost the batches")
    return Outcome(
        batches=sum(one.batches for one in linted),
        blocks=sum(one.blocks for one in linted),
        findings=sum(one.report.findings for one in linted),
        faults=sum(one.faults for one in linted),
    )


def _lint_capture(
    capture: Capture,
    report: Report,
    consumers: Sequence[Consumer],
    count: int | None,
    warn: Callable[[str], None],
) -> Linted:
    linted = None
    for message in capture.messages():
        if linted is None:
            linted = Linted(consumers, report, replay=capture.can_replay)
        linted.take(message)
        if linted.batches == count:
            break
    else:
        linted = linted or Linted(consumers, report, replay=False)
        if (fault := capture.fault(linted.batches)) is not None:
            report.left_out(capture.left_out, capture.damaged or "it was cut off")
            linted.faults += capture.damaged is not None
            warn(fault)
    linted.close()
    return linted


def _follow(
    sources: Sources, streams: dict[Live, Linted], for_s: float | None, count: int | None
) -> bool:
    """Whether `count` batches have come; False: the time is up."""
    until = float("inf") if for_s is None else time.monotonic() + for_s
    for source, step in sources.live_steps(until):
        streams[source].take(step.message)
        if sum(each.batches for each in streams.values()) == count:
            return True
    return False
