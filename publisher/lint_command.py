"""`kvevents lint`: who would lose what of live streams and of captures, one line each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvevents.capture import CaptureReader, Channel, Message
from kvevents.errors import KVEventsError
from kvevents.lint import CONSUMERS, Consumer, Finding, Lint
from publisher.tap import Tap, wait_for

__all__ = ["Linted", "Report", "lint", "read_consumers"]

_CHUNK = 1 << 20
_MAX_HELD = 100_000


def read_consumers(text: str | None) -> list[Consumer]:
    """Those named, with commas between; None: every one. Raises ValueError for a name that is none."""
    if text is None:
        return list(CONSUMERS.values())
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CONSUMERS:
            raise ValueError(f"--as: {name!r} is not one of {', '.join(CONSUMERS)}")
    return [CONSUMERS[name] for name in names]


@dataclass(slots=True)
class _Repeated:
    """Findings of one kind. `count`: all of them."""

    first: Finding
    count: int = 1
    last_seq: int | None = None


class Report:
    """Findings of one source as lines.

    The first of a kind is written when it comes, and how many there were at the end; `verbose`: all are.
    """

    def __init__(
        self, write: Callable[[str], None], source: str, *, as_json: bool, verbose: bool
    ) -> None:
        self._write, self._source = write, source
        self._as_json, self._verbose = as_json, verbose
        self._kinds: dict[tuple[str, str], _Repeated] = {}

    @property
    def findings(self) -> int:
        """How many there were."""
        return sum(kind.count for kind in self._kinds.values())

    def take(self, findings: Sequence[Finding]) -> None:
        """Findings about one message."""
        for finding in findings:
            key = finding.consumer, finding.rule
            kind = self._kinds.get(key)
            if kind is None:
                self._kinds[key] = _Repeated(finding, last_seq=finding.seq)
            else:
                kind.count += 1
                kind.last_seq = finding.seq
            if kind is None or self._verbose:
                self._line(str(finding), {"type": "finding", **_plain(finding)})

    def close(self, lint: Lint) -> None:
        """What came more than once, and what became of each consumer."""
        for kind in self._kinds.values():
            if kind.count > 1 and not self._verbose:
                more = {"count": kind.count, "last_seq": kind.last_seq}
                text = f"{kind.count} times to {kind.last_seq}: {kind.first}"
                self._line(text, {"type": "repeated", **_plain(kind.first), **more})
        for tally in lint.tallies:
            told = {
                "type": "summary",
                "consumer": tally.consumer.name,
                "version": tally.consumer.version,
                "observed": tally.consumer.observed,
                "batches": tally.batches,
                "lost": {what: tally.lost[what] for what in sorted(tally.lost)},
            }
            self._line(str(tally), told)

    def _line(self, text: str, told: dict[str, Any]) -> None:
        if self._as_json:
            self._write(msgspec.json.encode({"source": self._source, **told}).decode())
        else:
            self._write(f"{self._source}  {text}" if self._source else text)


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "seq": finding.seq,
        "consumer": finding.consumer,
        "lost": finding.lost,
        "rule": finding.rule,
        "where": finding.where,
        "why": finding.why,
    }


class Linted:
    """One source under lint: its messages in, findings out; a replay goes before what came live
    meanwhile.
    """

    def __init__(self, consumers: Sequence[Consumer], report: Report, *, replay: bool) -> None:
        self.lint, self.report = Lint(consumers, replay=replay), report
        self.batches = 0
        """How many came."""
        self._replaying = replay
        self._held: list[list[bytes]] = []

    def take(self, message: Message) -> None:
        """One message, of whatever channel."""
        frames = message.frames
        self.batches += message.is_batch
        match message.channel:
            case Channel.ASKED:
                self._replaying = True
                self.lint.asked(int.from_bytes(frames[-1] if frames else b"", "big"))
            case Channel.ANSWER:
                self.report.take(self.lint.answer(frames))
                self._replaying = self._replaying and not message.ends_replay
            case Channel.OVER:
                self.report.take(self.lint.over())
                self._replaying = False
            case Channel.LIVE:
                self._held.append(frames)
        if not self._replaying or len(self._held) > _MAX_HELD:
            self.release()

    def release(self) -> None:
        """Let what was held come in its turn."""
        held, self._held = self._held, []
        for frames in held:
            self.report.take(self.lint.live(frames))

    def close(self) -> None:
        """There is no more."""
        self.release()
        self.report.close(self.lint)


def lint(
    files: Sequence[tuple[Path, Report]],
    taps: Sequence[tuple[Tap, Report]],
    consumers: Sequence[Consumer],
    *,
    replay: bool,
    for_s: float | None,
    count: int | None,
    warn: Callable[[str], None],
) -> tuple[int, int]:
    """Captures to their ends, and streams until `for_s` is over, `count` batches came, or Ctrl-C.

    `replay`: whether the taps ask for one. Returns how many batches came, and how many findings. Raises
    ValueError for a file that is no capture.
    """
    linted: list[Linted] = []
    for file, report in files:
        one: Linted | None = None
        for reader, message in _messages_of(file, warn):
            if one is None:
                has_replay = reader.head is not None and reader.head.replay_endpoint is not None
                one = Linted(consumers, report, replay=has_replay)
            one.take(message)
            if one.batches == count:
                break
        one = one or Linted(consumers, report, replay=False)
        one.close()
        linted.append(one)
    streams = [(tap, Linted(consumers, report, replay=replay)) for tap, report in taps]
    if streams:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(streams, for_s, count)
        for _, stream in streams:
            stream.close()
    linted += [stream for _, stream in streams]
    return sum(one.batches for one in linted), sum(one.report.findings for one in linted)


def _follow(streams: Sequence[tuple[Tap, Linted]], for_s: float | None, count: int | None) -> None:
    until = float("inf") if for_s is None else time.monotonic() + for_s
    while time.monotonic() < until:
        wait_for([tap for tap, _ in streams], until)
        for tap, stream in streams:
            for message in tap.drain():
                stream.take(message)
                if sum(each.batches for _, each in streams) == count:
                    return


def _messages_of(
    file: Path, warn: Callable[[str], None]
) -> Iterator[tuple[CaptureReader, Message]]:
    reader = CaptureReader()
    try:
        with file.open("rb") as capture:
            while chunk := capture.read(_CHUNK):
                for message in reader.feed(chunk):
                    yield reader, message
    except OSError as error:
        raise ValueError(f"SOURCE: {file}: {error.strerror}") from None
    except KVEventsError as error:
        raise ValueError(f"SOURCE: {file}: {error}") from None
    if reader.torn:
        why = reader.damaged or "it was cut off"
        warn(f"{file}: the last {reader.torn} bytes were left out: {why}")
