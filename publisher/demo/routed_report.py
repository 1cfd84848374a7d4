"""What a run behind a real router has shown, and whether it is as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from publisher.demo.completions import Answer, Unanswered

__all__ = ["Afterwards", "Outage", "PolicyRun", "Routed", "report"]

LEAST_SHARE = 0.9
"""Of the requests for which one worker held more than the other."""
HOST_CREDIT, DISK_CREDIT = 0.8, 0.3
"""What the router counts for a token there, when it counts 1 for one on the device; its defaults."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The load under one policy. `longest`: who held the most of a prompt, and who got it."""

    policy: str
    seconds: float
    answers: Sequence[Answer | Unanswered]
    longest: Sequence[tuple[frozenset[str], str]]

    @property
    def answered(self) -> list[Answer]:
        """In order."""
        return [one for one in self.answers if isinstance(one, Answer)]

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens, those not computed."""
        total = sum(one.prompt_tokens for one in self.answered)
        return sum(one.cached for one in self.answered) / max(1, total)

    def hits(self, tier: str) -> float:
        """The part of the hit rate that came from one tier."""
        total = sum(one.prompt_tokens for one in self.answered)
        hit = sum(int(getattr(one, tier)) for one in self.answered)
        return hit / max(1, total)

    @property
    def num_decidable(self) -> int:
        """Requests for which one worker held more than the other."""
        return sum(len(best) == 1 for best, _ in self.longest)

    @property
    def share(self) -> float:
        """Of those, how many that worker got."""
        right = sum(len(best) == 1 and worker in best for best, worker in self.longest)
        return right / max(1, self.num_decidable)

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {
            "requests": len(self.answers),
            "answered": len(self.answered),
            "seconds": round(self.seconds, 3),
            "hit_rate": round(self.hit_rate, 4),
            "hits": {tier: round(self.hits(tier), 4) for tier in ("device", "host", "storage")},
            "decidable": self.num_decidable,
            "to_longest_prefix": round(self.share, 4),
        }


@dataclass(frozen=True, slots=True)
class Outage:
    """Requests while a worker was killed and started again. `back_s`: from the one to the other."""

    worker: str
    back_s: float
    answers: Sequence[Answer | Unanswered]

    @property
    def unanswered(self) -> list[str]:
        """Why, of each."""
        return [one.reason for one in self.answers if isinstance(one, Unanswered)]


@dataclass(frozen=True, slots=True)
class Afterwards:
    """A decision after the restart: tokens credited, and those that the worker had, by tier."""

    worker: str
    credit: float
    device: int
    host: int
    storage: int

    @property
    def held(self) -> float:
        """What they are worth to the router at the most."""
        return self.device + HOST_CREDIT * self.host + DISK_CREDIT * self.storage

    @property
    def is_wrong(self) -> bool:
        """Whether there was credit for what was not there."""
        return self.credit > self.held + 1e-6


@dataclass(frozen=True, slots=True)
class Routed:
    """The whole run."""

    round_robin: PolicyRun
    kv_aware: PolicyRun
    outage: Outage
    afterwards: Sequence[Afterwards]

    @property
    def same_answers(self) -> bool:
        """Whether what was cached, and where, has changed no token."""
        pairs = zip(self.round_robin.answers, self.kv_aware.answers, strict=True)
        return all(
            one.reply == other.reply
            for one, other in pairs
            if isinstance(one, Answer) and isinstance(other, Answer)
        )

    @property
    def wrong(self) -> list[Afterwards]:
        """Decisions with a wrong credit."""
        return [one for one in self.afterwards if one.is_wrong]

    @property
    def of_the_restarted(self) -> list[Afterwards]:
        """Those for the worker that was killed."""
        return [one for one in self.afterwards if one.worker == self.outage.worker]

    def problems(self) -> list[str]:
        """What is not as it should be."""
        found = []
        for run in (self.round_robin, self.kv_aware):
            reasons = [one.reason for one in run.answers if isinstance(one, Unanswered)]
            if reasons:
                found.append(f"{run.policy}: {len(reasons)} not answered, such as: {reasons[0]}")
        if not self.same_answers:
            found.append("the two policies' runs gave different tokens")
        if self.kv_aware.hit_rate <= self.round_robin.hit_rate:
            found.append("kv_aware hit no more than round_robin")
        if self.kv_aware.share < LEAST_SHARE:
            found.append(
                f"kv_aware: {self.kv_aware.share:.1%} of {self.kv_aware.num_decidable} requests went"
                f" to the longest prefix, less than {LEAST_SHARE:.0%}"
            )
        if not sum(one.credit for one in self.of_the_restarted):
            found.append(f"{self.outage.worker} got no credit any more, so nothing was shown of it")
        found += [
            f"wrong credit: {one.credit:.0f} tokens to {one.worker}, which held {one.device} on the"
            f" device, {one.host} on the host, {one.storage} on disk"
            for one in self.wrong
        ]
        return found

    def summary(self) -> dict[str, Any]:
        """For machines."""
        ours = self.of_the_restarted
        return {
            "round_robin": self.round_robin.summary(),
            "kv_aware": self.kv_aware.summary(),
            "same_answers": self.same_answers,
            "outage": {
                "worker": self.outage.worker,
                "requests": len(self.outage.answers),
                "unanswered": len(self.outage.unanswered),
                "back_s": round(self.outage.back_s, 3),
            },
            "afterwards": {
                "decisions": len(self.afterwards),
                "of_the_restarted": len(ours),
                "credited": sum(one.credit for one in ours),
                "worth": round(sum(one.held for one in ours), 1),
                "wrong": len(self.wrong),
            },
            "problems": self.problems(),
        }


def report(found: Routed) -> Iterator[str]:
    """For people."""
    for run in (found.round_robin, found.kv_aware):
        tiers = ", ".join(
            f"{name} {run.hits(tier):.1%}"
            for name, tier in (("device", "device"), ("host", "host"), ("disk", "storage"))
        )
        yield (
            f"{run.policy:<14} {len(run.answered):,} answers in {run.seconds:.1f} s;"
            f" hit rate {run.hit_rate:.1%} of the prompts' tokens ({tiers})"
        )
        yield (
            f"{'':<14} {run.share:.1%} of {run.num_decidable} requests went to the worker that held"
            " the longest prefix"
        )
    yield f"{'answers':<14} the same tokens under both: {_yes(found.same_answers)}"
    outage, ours = found.outage, found.of_the_restarted
    lost = len(outage.unanswered)
    yield (
        f"{'kill -9':<14} of {outage.worker}, back after {outage.back_s:.1f} s; of"
        f" {len(outage.answers)} requests meanwhile {lost} were not answered"
    )
    yield (
        f"{'afterwards':<14} {len(found.afterwards)} decisions, {len(ours)} for {outage.worker}:"
        f" credit for {sum(one.credit for one in ours):,.0f} tokens, and what it held was worth"
        f" {sum(one.held for one in ours):,.0f}"
    )
    yield f"wrong credit: {len(found.wrong)}"


def _yes(right: bool) -> str:  # noqa: FBT001
    return "yes" if right else "NO"
