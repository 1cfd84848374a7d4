"""What one run does: its settings and its faults, all drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

__all__ = ["PROCESSES", "SUBSCRIBERS", "Fault", "Kind", "Plan", "draw_plan"]

SUBSCRIBERS = ("A", "B", "C")
"""A: a `Subscriber` of the first sink. B: one of the second, through the proxy. C: a consumer that
knows nothing of ours, of both.
"""

PROCESSES = ("worker", "sidecar", *SUBSCRIBERS)

_LOAD_S = (2.0, 3.0)
_QUIET_TAIL_S = 0.2
_LONGEST_S = 0.9


class Kind(StrEnum):
    """What can go wrong."""

    KILL_SIDECAR = "kill sidecar"
    KILL_WORKER = "kill worker"
    KILL_SUBSCRIBER = "kill subscriber"
    STOP = "stop and continue"
    FULL_RING = "full ring"
    DEAF = "subscriber stops reading"
    STUCK_REPLAY = "replay client stops reading"
    GARBAGE = "garbage on sockets"
    CUT = "connections cut"
    DELAY = "bytes delayed"
    DISK_FULL = "disk full"
    CLOCK_JUMP = "clock jump"


_DIALECTS = ("sglang", "vllm", "dynamo", "mooncake", "vllm-router", "smg", "aibrix")

_LASTING = {Kind.STOP, Kind.FULL_RING, Kind.DEAF, Kind.CUT, Kind.DELAY, Kind.DISK_FULL}
_CLOCK_JUMPS_S = (-86_400.0, -3_600.0, -1.0, 1.0, 3_600.0, 86_400.0 * 400)


@dataclass(frozen=True, slots=True)
class Fault:
    """`at` seconds after the load began; `seconds`: how long, or for a clock how far."""

    at: float
    kind: Kind
    target: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return " ".join(
            [f"{self.kind.value}", *([self.target] if self.target else []), f"{self.seconds:.2f} s"]
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run. The pools are small, so that blocks leave every tier all the time."""

    seed: int
    load_s: float
    requests_per_s: float
    first_request: int
    page_size: int
    device_pages: int
    host_pages: int
    write_policy: str
    flushes: bool
    """Whether the cache is flushed now and then."""
    ring_bytes: int
    hwm: int
    buffer_steps: int
    buffer_bytes: int
    coalesce_s: float
    token_ids: bool
    """Of the second sink, as is `coalesce_s`, and `dialect`."""
    faults: tuple[Fault, ...]
    dialect: str


def draw_plan(seed: int, kinds: Iterable[Kind] = tuple(Kind)) -> Plan:
    """The plan of a seed; the same seed and kinds give the same plan. With at least as many seeds in a
    row as kinds, each kind is used.
    """
    allowed, random = list(kinds), Random(seed)
    load_s = random.uniform(*_LOAD_S)
    drawn = [allowed[seed % len(allowed)], *random.choices(allowed, k=random.randint(2, 6))]
    return Plan(
        seed=seed,
        load_s=load_s,
        requests_per_s=random.choice((50.0, 100.0, 200.0)),
        first_request=random.randrange(1000),
        page_size=random.choice((1, 4, 16)),
        device_pages=random.choice((256, 1024)),
        host_pages=random.choice((512, 2048)),
        write_policy=random.choice(("write_through", "write_through_selective", "write_back")),
        flushes=random.random() < 0.3,
        ring_bytes=random.choice((32 << 10, 64 << 10, 1 << 20)),
        hwm=random.choice((50, 100_000)),
        buffer_steps=random.choice((20, 200, 10_000)),
        buffer_bytes=random.choice((256 << 10, 4 << 20)),
        coalesce_s=random.choice((0.0, 0.02, 0.2)),
        token_ids=random.random() < 0.5,
        faults=tuple(
            sorted((_draw(random, kind, load_s) for kind in drawn), key=lambda one: one.at)
        ),
        dialect=random.choice(_DIALECTS),
    )


def _draw(random: Random, kind: Kind, load_s: float) -> Fault:
    at = random.uniform(0.1, load_s - _QUIET_TAIL_S)
    seconds = random.uniform(0.05, _LONGEST_S) if kind in _LASTING else 0.0
    target = ""
    match kind:
        case Kind.KILL_WORKER:
            at = random.uniform(0.1, load_s / 2)  # the next one is to work too
            target = random.choice(("alone", "alone", "with its sidecar"))
        case Kind.KILL_SUBSCRIBER | Kind.DEAF:
            target = random.choice(SUBSCRIBERS)
        case Kind.STOP:
            target = random.choice(PROCESSES)
        case Kind.CLOCK_JUMP:
            seconds = random.choice(_CLOCK_JUMPS_S)
        case _:
            pass
    return Fault(at, kind, target, seconds)
