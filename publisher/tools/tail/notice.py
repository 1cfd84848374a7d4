"""What is said of a stream between its events: what is missing, unreadable, or contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvevents.check import Finding
from kvevents.codec import Skipped
from kvevents.follower import Malformed
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel
from kvevents.reading import Reading
from publisher.tools.columns import of_batches

__all__ = [
    "Notice",
    "of_earlier",
    "of_finding",
    "of_gap",
    "of_lost",
    "of_malformed",
    "of_restart",
    "of_skipped",
    "of_undecodable",
]

_HEAD = 16
"""Bytes shown of what cannot be read."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`text`: for people; anything may be in it. `kind`, `fields`: of its JSON object. `brief`: whether
    JSON alone has it, because the text was in the one before. `unread`: whether it stands for something
    published that could not be read. `bare`: whether people are not shown its time and seq.
    """

    seq: int | None
    at_ns: int
    kind: str
    text: str
    style: str = "red"
    fields: dict[str, Any] = field(default_factory=dict)
    brief: bool = False
    unread: bool = False
    bare: bool = False


def of_gap(gap: Gap, at_ns: int, *, can_ask: bool, own: str = "") -> Notice:
    """`own`: why it may be the loss of who listens alone; empty: it is not."""
    asked = "asked for" if can_ask else "and nobody to ask: lost"
    why = f"; {own}" if own else ""
    text = f"GAP {gap.first}→{gap.first + gap.count} ({gap.count} missing, {asked}{why})"
    fields = {"count": gap.count, "asked": can_ask, "own": bool(own)}
    return Notice(gap.first, at_ns, "Gap", text, fields=fields)


def of_lost(lost: Lost, at_ns: int, *, brief: bool, own: str = "") -> Notice:
    """`brief`: its gap has said so. `own`: as in `of_gap`."""
    last = lost.first + lost.count - 1
    which = f"{lost.first}" if lost.count == 1 else f"{lost.first}…{last}"
    why = f"; {own}" if own else ""
    text = f"LOST {which} ({lost.count} that nobody has any more{why})"
    fields = {"count": lost.count, "own": bool(own)}
    return Notice(lost.first, at_ns, "Lost", text, fields=fields, brief=brief)


def of_earlier(lost: Lost, at_ns: int, why: str) -> Notice:
    """What came before the first batch that was told is no loss. It has no time: that of the first
    batch, when it is known, is after that batch's own.
    """
    last = lost.first + lost.count - 1
    which = f"{lost.first}" if lost.count == 1 else f"{lost.first}…{last}"
    text = f"before this: {of_batches(lost.count)} (seq {which}){why}"
    fields = {"count": lost.count}
    return Notice(lost.first, at_ns, "Earlier", text, style="dim", fields=fields, bare=True)


def of_restart(restarted: Restarted, at_ns: int, last: int | None) -> Notice:
    """`last`: the seq before."""
    before = "" if last is None else f" seq {last}→{restarted.seq}"
    text = f"RESTART{before} of the publisher"
    return Notice(restarted.seq, at_ns, "Restarted", text, fields={"before": last})


def of_malformed(malformed: Malformed) -> Notice:
    """With the beginning of its longest frame."""
    message = malformed.message
    frames = [frame.hex() for frame in message.frames[:_HEAD]]
    longest = max(message.frames, key=len, default=b"")
    text = f"MALFORMED {malformed.reason} ({_head(longest)})"
    fields = {"reason": malformed.reason, "frames": frames}
    unread = message.channel == Channel.LIVE
    return Notice(None, message.at_ns, "Malformed", text, fields=fields, unread=unread)


def of_undecodable(reading: Reading) -> Notice:
    """With its first bytes, or, in JSON, all of them."""
    payload, reason = reading.told.payload, reading.reason
    text = f"UNDECODABLE {reason} ({_head(payload)})"
    fields = {"reason": reason, "payload": payload.hex()}
    return Notice(reading.seq, reading.told.at_ns, "Undecodable", text, fields=fields, unread=True)


def of_skipped(reading: Reading, skipped: Skipped) -> Notice:
    """An event that could not be read."""
    text = f"SKIPPED event {skipped.position}: {skipped.reason}"
    fields = {"position": skipped.position, "reason": skipped.reason}
    return Notice(reading.seq, reading.told.at_ns, "Skipped", text, fields=fields, unread=True)


def of_finding(finding: Finding, at_ns: int, said: str | None = None) -> Notice:
    """What the check has found. `said`: what people are told of it instead."""
    where = "" if finding.place.event is None else f" event {finding.place.event}"
    earlier = "" if finding.earlier is None else f" (earlier: {finding.earlier})"
    blocks = f" ({finding.blocks} blocks)" if finding.blocks > 1 else ""
    text = said or f"{finding.rule.upper()}{where}: {finding.what}{blocks}{earlier}"
    fields: dict[str, Any] = {
        "event": finding.place.event,
        "rule": finding.rule,
        "invariant": finding.invariant,
        "severity": finding.severity,
        "what": finding.what,
        "earlier": None if finding.earlier is None else finding.earlier._asdict(),
        "medium": finding.medium,
        "blocks": finding.blocks,
        "block_hash": None if finding.block_hash is None else str(finding.block_hash),
    }
    style = "yellow" if finding.severity == "note" else "red"
    return Notice(finding.place.seq, at_ns, "Finding", text, style=style, fields=fields)


def _head(data: bytes) -> str:
    return data[:_HEAD].hex() + "…" * (len(data) > _HEAD)
