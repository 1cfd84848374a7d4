"""What was followed, compared with what a subscriber is told that joins now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvevents.check import RULES, Checker, Finding, Place
from kvevents.follower import Step
from kvevents.hashing import BlockHash
from kvevents.message import Channel
from publisher.subscriber.listener import wait_for
from publisher.tools.check.checked import Checked
from publisher.tools.check.report import Compared, number
from publisher.tools.interrupt import InterruptCount
from publisher.tools.source import Live

__all__ = ["compare"]

_COMPARE_S = 10.0
"""How long a second subscriber may take to come to where the first is."""

_TICK_S = 0.1


def compare(
    live: Live, first: Checked, second: Callable[[Live], Live], interrupts: InterruptCount
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


def _difference(first: Checked) -> Compared:
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
        parts.append(f"{number(len(more), 'block', 'blocks')} that a new subscriber is not told of")
    if less:
        parts.append(
            f"{number(len(less), 'block', 'blocks')} that only a new subscriber is told of"
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
