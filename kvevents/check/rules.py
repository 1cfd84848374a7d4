"""What a stream is held to: a word for each rule, and the invariant of docs/check.md that it is of."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

from kvevents.check.finding import Severity

__all__ = ["RULES", "Rule"]


class Rule(NamedTuple):
    """`severity`: what it mostly is; a finding may be less than a violation where that is usual."""

    invariant: int
    severity: Severity


RULES: Final = MappingProxyType(
    {
        "removed-unknown": Rule(1, "violation"),
        "stored-again": Rule(2, "violation"),
        "state": Rule(8, "violation"),
        "content": Rule(9, "violation"),
        "hash": Rule(9, "violation"),
        "hash-scheme": Rule(9, "note"),
        "two-names": Rule(10, "violation"),
        "parent-elsewhere": Rule(11, "note"),
        "child-left": Rule(11, "note"),
        "orphan": Rule(12, "violation"),
        "own-parent": Rule(12, "violation"),
        "length": Rule(13, "violation"),
        "block-size": Rule(13, "violation"),
        "token-ids": Rule(13, "violation"),
        "extra-keys": Rule(13, "violation"),
        "no-blocks": Rule(13, "note"),
        "no-identity": Rule(14, "violation"),
        "ts-back": Rule(15, "note"),
        "end-seq": Rule(16, "violation"),
        "lost": Rule(17, "violation"),
        "gap": Rule(17, "note"),
        "restart": Rule(17, "note"),
        "restart-without-clear": Rule(17, "note"),
        "first-seq": Rule(17, "note"),
        "silence": Rule(18, "note"),
        "replay-bytes": Rule(19, "violation"),
        "replay-order": Rule(19, "violation"),
        "replay-start": Rule(19, "note"),
        "replay-no-end": Rule(19, "violation"),
        "snapshot": Rule(20, "violation"),
        "malformed": Rule(24, "violation"),
        "undecodable": Rule(24, "violation"),
        "skipped": Rule(24, "violation"),
        "rank-changes": Rule(29, "note"),
        "silent": Rule(32, "note"),
    }
)
"""By name."""
