"""What is said of a stream between its events: what is missing, unreadable, or contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvevents.check import Finding
from kvevents.codec import Skipped
from kvevents.follower import Malformed
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.reading import Reading

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
    JSON alone has it, because the text was in the one before.
    """

    seq: int | None
    at_ns: int
    kind: str
    text: str
    style: str = "red"
    fields: dict[str, Any] = field(default_factory=dict)
    brief: bool = False


def of_gap(gap: Gap, at_ns: int, *, can_ask: bool, behind: bool) -> Notice:
    """`behind`: whether it may be ours alone."""
    asked = "asked for" if can_ask else "and nobody to ask: lost"
    ours = "; we read too slowly, it may be our own loss" if behind else ""
    text = f"GAP {gap.first}→{gap.first + gap.count} ({gap.count} missing, {asked}{ours})"
    fields = {"count": gap.count, "asked": can_ask, "own": behind}
    return Notice(gap.first, at_ns, "Gap", text, fields=fields)


def of_lost(lost: Lost, at_ns: int, *, brief: bool) -> Notice:
    """`brief`: its gap has said so."""
    last = lost.first + lost.count - 1
    which = f"{lost.first}" if lost.count == 1 else f"{lost.first}…{last}"
    text = f"LOST {which} ({lost.count} that nobody has any more)"
    return Notice(lost.first, at_ns, "Lost", text, fields={"count": lost.count}, brief=brief)


def of_earlier(lost: Lost, at_ns: int, why: str) -> Notice:
    """What came before the first batch that was told is no loss."""
    batches = "1 batch" if lost.count == 1 else f"{lost.count} batches"
    came = "came before" if not lost.first else f"came from {lost.first} on"
    text = f"{batches} {came}{why}"
    return Notice(lost.first, at_ns, "Earlier", text, style="dim", fields={"count": lost.count})


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
    return Notice(None, message.at_ns, "Malformed", text, fields=fields)


def of_undecodable(reading: Reading) -> Notice:
    """With its first bytes, or, in JSON, all of them."""
    payload, reason = reading.told.payload, reading.reason
    text = f"UNDECODABLE {reason} ({_head(payload)})"
    fields = {"reason": reason, "payload": payload.hex()}
    return Notice(reading.seq, reading.told.at_ns, "Undecodable", text, fields=fields)


def of_skipped(reading: Reading, skipped: Skipped) -> Notice:
    """An event that could not be read."""
    text = f"SKIPPED event {skipped.position}: {skipped.reason}"
    fields = {"position": skipped.position, "reason": skipped.reason}
    return Notice(reading.seq, reading.told.at_ns, "Skipped", text, fields=fields)


def of_finding(finding: Finding, at_ns: int) -> Notice:
    """What the check has found."""
    where = "" if finding.place.event is None else f" event {finding.place.event}"
    earlier = "" if finding.earlier is None else f" (earlier: {finding.earlier})"
    blocks = f" ({finding.blocks} blocks)" if finding.blocks > 1 else ""
    text = f"{finding.rule.upper()}{where}: {finding.what}{blocks}{earlier}"
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
