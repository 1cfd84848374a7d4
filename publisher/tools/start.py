"""Where in a stream to begin: what `--from` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvevents.frames import JOIN, MAX_SEQ
from publisher.config.checks import shown

__all__ = ["Start", "parse_start"]

_MOST = 1_000_000
"""Batches that are kept until the newest has come."""


@dataclass(frozen=True, slots=True)
class Start:
    """`state`: the state now. `beginning`: all that is retained. `live`: what comes from now on. `seq`:
    batch `number`. `last`: the last `number` batches that say something.
    """

    kind: Literal["state", "beginning", "live", "seq", "last"]
    number: int = 0

    @property
    def asked(self) -> int | None:
        """What a replay is asked for; None: nothing."""
        match self.kind:
            case "state":
                return JOIN
            case "live":
                return None
        return self.number if self.kind == "seq" else 0


def parse_start(text: str) -> Start:
    """Raises ValueError for what is none."""
    match text:
        case "state" | "beginning" | "live":
            return Start(text)
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
        raise ValueError(f"--from: {shown(text)} is not state, beginning, live, a seq or -N")
    number = int(digits)
    if text != digits:
        if not 1 <= number <= _MOST:
            raise ValueError(f"--from: {text} is not in -{_MOST}..-1")
        return Start("last", number)
    if number > MAX_SEQ:
        raise ValueError(f"--from: {text} is above {MAX_SEQ}")
    return Start("seq", number)
