"""A stream as its consumers would follow it: message after message, and one replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvevents.frames import JOIN
from kvevents.lint.consumer import Consumer, Replays, Topic
from kvevents.lint.finding import Finding, Lost
from kvevents.lint.packed import PackedBatch, TooLarge, Unreadable, quoted, read_batch
from kvevents.lint.rules import Batch, Memory, findings_of
from kvevents.lint.shapes import Quiet, batch_shapes, frames_shape

__all__ = ["Lint", "Tally"]

_SEQ_BYTES = 8
_MAX_SHAPED = 1 << 20
_END_SEQ = 2**64 - 1


@dataclass(slots=True)
class Tally:
    """Of one consumer: how many batches came, how many blocks were stored in them, and how much is lost.

    `lost`: of "batch" and "unread" the batches, of "event", "block" and "misread" the events, of "stream"
    the messages that show it. `joined`: the seq that it began at, and what became of what was stored
    before, which is of our own joining and no fault of the stream; None once that does not matter.
    """

    consumer: Consumer
    batches: int = 0
    blocks: int = 0
    joined: tuple[int, str] | None = None
    lost: Counter[Lost] = field(default_factory=Counter)

    def take(self, batch: Batch) -> None:
        """One batch more."""
        self.batches += 1
        if isinstance(batch, PackedBatch):
            self.blocks += batch.blocks

    def __str__(self) -> str:
        told = self.verdict
        if self.joined is not None:
            told += "; joined at seq {}: {}".format(*self.joined)
        return f"{self.consumer.name} {self.consumer.version}: {told}"

    @property
    def verdict(self) -> str:
        """How much is lost of how much, in half a sentence."""
        count = self.lost
        lost: list[str] = []
        if batches := count["batch"]:
            whole = batches >= self.batches
            lost.append(_all_of(self.batches) if whole else f"{batches:,} of {self._batches()}")
        if events := count["event"]:
            lost.append(_number(events, "event", "events"))
        if blocks := count["block"]:
            lost.append(f"the blocks of {_number(blocks, 'event', 'events')}")
        parts = [f"loses {' and '.join(lost)}"] if lost else []
        if misread := count["misread"]:
            parts.append(f"misreads {_number(misread, 'event', 'events')}")
        if stream := count["stream"]:
            parts.append(f"cannot follow the stream {_times(stream)}")
        if unread := count["unread"]:
            parts.append(f"is not judged in {_number(unread, 'batch', 'batches')}")
        return ", ".join(parts) or self._taken()

    def _taken(self) -> str:
        if not self.batches:
            return "saw no batch"
        if not self.blocks:
            return f"saw no block in {self._batches()}"
        return f"takes {_all_of(self.batches)}, {_number(self.blocks, 'block', 'blocks')}"

    def _batches(self) -> str:
        return _number(self.batches, "batch", "batches")


def _all_of(batches: int) -> str:
    return "the one batch" if batches == 1 else f"all {batches:,} batches"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


@dataclass(slots=True)
class _Follower:
    """What one consumer believes of the stream. `last`: the seq that it has come to."""

    consumer: Consumer
    tally: Tally
    bit: int
    """Its own in `Quiet`."""
    memory: Memory = field(default_factory=Memory)
    last: int | None = None

    def count(self, findings: list[Finding]) -> list[Finding]:
        """Take findings about one message into the tally; returns the first of each rule."""
        if not findings:
            return findings
        subjects = {(one.lost, _subject(one)) for one in findings}
        self.tally.lost.update(lost for lost, _ in subjects)
        return list({one.rule: one for one in reversed(findings)}.values())[::-1]


class Lint:
    """Live messages go to `live`, in order; a replay to `asked`, `answer` and `over`, before those that
    came live meanwhile.

    `replay`: whether the stream's publisher serves replays. What comes is never trusted: any bytes give
    findings, and no exception.
    """

    def __init__(self, consumers: Iterable[Consumer], *, replay: bool = False) -> None:
        self._followers = [
            _Follower(consumer, Tally(consumer), 1 << position)
            for position, consumer in enumerate(consumers)
        ]
        self._replay = replay
        self._previous: tuple[int, bytes] | None = None
        """Seq and payload of the live message before."""
        self._asked = 0
        self._answered: int | None = None
        """The seq of the last answer."""
        self._covered = range(0)
        """Seqs that a replay has brought, and that may come live as well, once."""
        self._quiet = Quiet()
        self.own_gaps = 0
        """How many there were where what is missing may be the loss of whoever listens for us."""

    @property
    def tallies(self) -> list[Tally]:
        """One for each consumer, as of now."""
        return [follower.tally for follower in self._followers]

    # ------------------------------------------------------------------------------------ live

    def live(self, frames: Sequence[bytes], *, behind: bool = False) -> list[Finding]:
        """What each consumer loses of a message from the PUB socket. `behind`: whether what is missing
        before it may be a loss of our own (`Channel.BEHIND`), which no consumer is judged by.
        """
        raw_seq, payload = (*frames[1:3], b"", b"")[:2]
        seq = _seq(raw_seq)
        if seq == _END_SEQ:
            return [one for each in self._followers for one in _end_findings(each, payload)]
        if seq is not None and self._previous == (seq, payload):
            return []  # the same message again
        own_gap = (
            behind
            and seq is not None
            and self._previous is not None
            and seq > self._previous[0] + 1
        )
        self.own_gaps += own_gap
        self._previous = None if seq is None else (seq, payload)
        covered = seq is not None and seq in self._covered
        if not covered:
            self._covered = range(0)  # what comes below from now on is another run
        batch = _read(payload)
        clears = _cleared(batch)
        shapes = _shapes(batch, payload)
        around = frames_shape(frames, seq)
        shapes = [] if around is None or not shapes else [around, *shapes]
        quiet, learnt = self._quiet.of(shapes), 0
        found: list[Finding] = []
        for follower in self._followers:
            if covered and follower.consumer.replays is not None:
                continue
            inside: list[Finding] = []
            if not follower.bit & quiet:
                inside = _message_findings(follower.consumer, frames, seq)
                lost = any(one.lost == "batch" for one in inside)
                told = findings_of(follower.consumer, follower.memory, seq, payload, batch)
                inside += [one for one in told if not lost or one.lost == "batch"]
                learnt |= 0 if inside else follower.bit
            cleared = clears and not any(_hides_first(one) for one in inside)
            if cleared:
                follower.tally.joined = None
            if own_gap and seq is not None and follower.last is not None:
                follower.last = max(follower.last, seq - 1)
            mine = [] if seq is None else self._seq_findings(follower, seq, cleared=cleared)
            if not covered:
                follower.tally.take(batch)
                mine += inside
            found += follower.count(mine)
        self._quiet.learn(shapes, learnt)
        return found

    def _seq_findings(self, follower: _Follower, seq: int, *, cleared: bool) -> list[Finding]:
        consumer, last = follower.consumer, follower.last
        rules = consumer.sequence
        if rules.drops_old and last is not None and seq <= last:
            why = f"{seq} is not above {last}: it drops all up to there"
            return [_finding(consumer, seq, "batch", "old-seq", "seq", why)]
        follower.last = seq
        losses = rules.alone
        if self._replay and rules.replaying is not None:
            losses = rules.replaying
        if last is None:
            if losses.late is not None and seq > 0 and not cleared:
                follower.tally.joined = seq, losses.late
            return []
        if seq > last + 1:
            text = losses.cleared_gap if cleared else losses.gap
            rule, what = "gap", f"{seq} comes after {last}"
        elif seq <= last:
            text = losses.cleared_back if cleared else losses.back
            rule, what = "back", f"{seq} comes after {last}"
        else:
            return []
        if text is None:
            return []
        return [_finding(consumer, seq, "stream", rule, "seq", f"{what}: {text}")]

    # ---------------------------------------------------------------------------------- replay

    def asked(self, start: int) -> None:
        """A replay was asked for, from `start`; `answer` is about this one from now on."""
        self._asked, self._answered = start, None

    def answer(self, frames: Sequence[bytes]) -> list[Finding]:
        """What each consumer loses of a message from the replay socket, without the identity."""
        raw_seq, payload = (b"", b"", *frames)[-2:]
        seq = _seq(raw_seq)
        end = seq == _END_SEQ and not payload
        batch = _read(payload)
        clears = _cleared(batch)
        shapes = _shapes(batch, payload)
        quiet, learnt = self._quiet.of(shapes), 0
        found: list[Finding] = []
        for follower in self._followers:
            consumer = follower.consumer
            mine: list[Finding] = []
            if consumer.replays is not None:
                mine += _shape_findings(consumer, consumer.replays, frames, seq)
                if not end:
                    mine += self._order_findings(
                        consumer, consumer.replays, seq, payload, cleared=clears
                    )
            if not end:
                follower.tally.take(batch)
            if not end and payload:
                if not follower.bit & quiet:
                    inside = findings_of(consumer, follower.memory, seq, payload, batch)
                    learnt |= 0 if inside else follower.bit
                    mine += inside
                if consumer.replays is not None and seq is not None:
                    follower.last = seq
            found += follower.count(mine)
        self._quiet.learn(shapes, learnt)
        if seq is not None and not end:
            first = seq if self._answered is None else self._covered.start
            self._covered, self._answered = range(first, seq + 1), seq
        return found

    def _order_findings(
        self,
        consumer: Consumer,
        replays: Replays,
        seq: int | None,
        payload: bytes,
        *,
        cleared: bool,
    ) -> list[Finding]:
        if seq is None:
            return []
        if not payload and replays.empty is not None:
            why = f"is empty before the end: {replays.empty}"
            return [_finding(consumer, seq, "stream", "empty", "replay", why)]
        if self._answered is None:
            late = self._asked != JOIN and seq > self._asked
            text = (replays.rolled_cleared if cleared else replays.rolled) if late else None
            rule, what = "rolled", f"begins with {seq}, not {self._asked}"
        else:
            text = replays.hole if seq != self._answered + 1 else None
            rule, what = "hole", f"has {seq} after {self._answered}"
        if text is None:
            return []
        return [_finding(consumer, seq, "stream", rule, "replay", f"{what}: {text}")]

    def over(self) -> list[Finding]:
        """The replay that was asked for has not come to its end, and was given up."""
        found: list[Finding] = []
        for follower in self._followers:
            consumer = follower.consumer
            if consumer.replays is not None and consumer.replays.no_end is not None:
                why = f"has no end: {consumer.replays.no_end}"
                mine = _finding(consumer, self._answered, "stream", "no-end", "replay", why)
                found += follower.count([mine])
        return found


# ---------------------------------------------------------------------------------- one message


def _message_findings(
    consumer: Consumer, frames: Sequence[bytes], seq: int | None
) -> list[Finding]:
    """What is wrong with the frames around the payload."""
    low, high = consumer.frames
    count = len(frames)
    if count < low or (high is not None and count > high):
        wanted = f"{low}" if high is not None else f"{low} or more"
        why = f"has {count} frames: it reads {wanted} only"
        return [_finding(consumer, seq, "batch", "frames", "message", why)]
    found: list[Finding] = []
    low, high = consumer.seq_bytes
    if (size := len(frames[1])) < low or (high is not None and size > high):
        wanted = f"{low}" if high is not None else f"{low} or more"
        why = f"has {size} bytes: it reads {wanted} only"
        found.append(_finding(consumer, seq, "batch", "seq-bytes", "seq", why))
    elif seq is not None and seq > consumer.max_seq:
        why = f"is {seq}: it reads at most {consumer.max_seq}"
        found.append(_finding(consumer, seq, "batch", "seq-range", "seq", why))
    if (wanted_topic := _topic(consumer.topic, frames[0])) is not None:
        why = f"is {_text(frames[0])}: {wanted_topic}"
        found.append(_finding(consumer, seq, "batch", "topic", "topic", why))
    return found


def _topic(rule: Topic, topic: bytes) -> str | None:
    """Why it is not read; None: it is."""
    if rule == "any":
        return None
    if rule == "kv@pod@model":
        parts = topic.split(b"@")
        if len(parts) == 3 and parts[0] == b"kv":
            return None
        return "it reads kv@POD@MODEL only, with two @"
    return None if topic in rule else f"it reads {' or '.join(map(_text, rule))} only"


def _text(topic: bytes) -> str:
    return quoted(topic.decode(errors="backslashreplace"))


def _shape_findings(
    consumer: Consumer, replays: Replays, frames: Sequence[bytes], seq: int | None
) -> list[Finding]:
    count = len(frames)
    if count in replays.frames and frames[0] == b"":
        return []
    wanted = " or ".join(map(str, sorted(replays.frames)))
    why = (
        f"has {count} frames: it reads {wanted} only, the first of them empty, and indexes nothing"
    )
    return [_finding(consumer, seq, "stream", "replay-frames", "replay answer", why)]


def _end_findings(follower: _Follower, payload: bytes) -> list[Finding]:
    consumer = follower.consumer
    rules = consumer.sequence
    if rules.reset == "always" or (rules.reset == "by payload" and payload):
        follower.last = None
    if rules.end is None or payload:
        return []
    why = f"is 2^64 - 1, without a payload, on the PUB socket: {rules.end}"
    return follower.count([_finding(consumer, None, "stream", "end", "seq", why)])


def _subject(finding: Finding) -> str:
    """What is lost: the event, or the message."""
    if finding.lost in ("batch", "stream", "unread"):
        return ""
    return finding.where[: finding.where.find("]") + 1]


def _finding(
    consumer: Consumer, seq: int | None, lost: Lost, rule: str, where: str, why: str
) -> Finding:
    return Finding(seq, consumer.name, lost, rule, where, why, consumer.dropping)


def _seq(raw: bytes) -> int | None:
    return int.from_bytes(raw, "big") if len(raw) == _SEQ_BYTES else None


def _read(payload: bytes) -> Batch:
    """The batch, or why there is none."""
    try:
        return read_batch(payload)
    except TooLarge as error:
        return error
    except Unreadable as error:
        return str(error)


def _shapes(batch: Batch, payload: bytes) -> list[Hashable]:
    """What is large has none: some consumer may mind its size."""
    if not isinstance(batch, PackedBatch) or len(payload) > _MAX_SHAPED:
        return []
    return batch_shapes(batch)


def _hides_first(finding: Finding) -> bool:
    """Whether the first event is lost, be it alone or with the batch."""
    return finding.lost == "batch" or (finding.lost == "event" and _subject(finding) == "events[0]")


def _cleared(batch: Batch) -> bool:
    """Whether a consumer that reads it forgets everything first."""
    if not isinstance(batch, PackedBatch) or not batch.events:
        return False
    first = batch.events[0]
    return first.text("type") == "AllBlocksCleared" or first.text("event_type") == "cleared"
