"""What one consumer makes of one payload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvevents.lint.consumer import Consumer, Cost
from kvevents.lint.finding import Finding, Lost
from kvevents.lint.packed import (
    PackedBatch,
    PackedEvent,
    Place,
    TooLarge,
    kind_of,
    quoted,
    shown,
)

__all__ = ["Batch", "Memory", "findings_of"]

Batch: TypeAlias = PackedBatch | TooLarge | str

_STORED_FIELDS = 5
"""A BlockStored as an array cannot be shorter: the fields that every decoder needs."""

_REMOVED_FIELDS = 2

_KINDS = {
    "block_size": frozenset({"int"}),
    "lora_id": frozenset({"nil", "int"}),
    "medium": frozenset({"nil", "text"}),
    "lora_name": frozenset({"nil", "text"}),
}
_STORED, _REMOVED = frozenset({"BlockStored", "stored"}), frozenset({"BlockRemoved", "removed"})
_NAMESPACES = ("lora_name", "cache_salt", "extra_key", "extra_keys")


@dataclass(slots=True)
class Memory:
    """What a consumer is taken to have been told once: the first batch's rank, the first block size."""

    rank: int | None = None
    block_size: int | None = None


@dataclass(slots=True)
class _Report:
    """The findings of one batch."""

    seq: int | None
    consumer: Consumer
    found: list[Finding] = field(default_factory=list)

    def add(self, lost: Lost, rule: str, where: str, why: str) -> None:
        self.found.append(
            Finding(self.seq, self.consumer.name, lost, rule, where, why, self.consumer.dropping)
        )

    def add_at(self, lost: Lost, rule: str, place: Place, why: str) -> None:
        self.add(lost, rule, place.where, f"is {place.value}: {why}")

    def add_cost(self, cost: Cost | None, rule: str, place: Place) -> None:
        if cost is not None:
            self.add_at(cost[0], rule, place, cost[1])


def findings_of(
    consumer: Consumer, memory: Memory, seq: int | None, payload: bytes, batch: Batch
) -> list[Finding]:
    """What is lost of a batch, and nothing twice: an event of a batch that is lost has no finding.

    `batch`: a text where the payload could not be read, and TooLarge where it was not looked into.
    """
    report = _Report(seq, consumer)
    if isinstance(batch, str):
        report.add("batch", "payload", "payload", f"is no batch: {batch}")
        return report.found
    if consumer.max_payload is not None and len(payload) > consumer.max_payload:
        why = f"has {len(payload)} bytes: it reads at most {consumer.max_payload}"
        report.add("batch", "payload-size", "payload", why)
    if isinstance(batch, TooLarge):
        if not report.found:
            report.add("unread", "too-large", "payload", str(batch))
        return report.found
    _check_envelope(report, memory, batch)
    for event in batch.events or ():
        before = len(report.found)
        _check_event(report, memory, event)
        if len(report.found) == before:
            continue
        mine = report.found[before:]
        if any(one.lost in ("batch", "event") for one in mine):
            report.found[before:] = [one for one in mine if one.lost in ("batch", "event")]
    whole = [one for one in report.found if one.lost in ("batch", "stream")]
    return whole if any(one.lost == "batch" for one in whole) else report.found


# --------------------------------------------------------------------------------------- batches


def _check_envelope(report: _Report, memory: Memory, batch: PackedBatch) -> None:
    consumer = report.consumer
    low, high = consumer.lengths
    if batch.length < low or (high is not None and batch.length > high):
        report.add(
            "batch", "length", "payload", f"has {batch.length} elements: {_wanted(low, high)}"
        )
    if batch.trailing and not consumer.trailing:
        report.add("batch", "trailing", "payload", f"is followed by {batch.trailing} bytes more")
    if batch.ts is not None and kind_of(batch.ts) not in consumer.ts:
        why = f"it reads {' or '.join(sorted(consumer.ts))} only"
        report.add_at("batch", "ts", Place("ts", shown(batch.ts)), why)
    if batch.events is None and batch.length > 1:
        report.add("batch", "events", "events", f"is {batch.events_are}: it is no array of events")
    _check_rank(report, memory, batch.rank)


def _wanted(low: int, high: int | None) -> str:
    if high is None:
        return f"it reads {low} or more"
    return f"it reads {low} only" if low == high else f"it reads {low} to {high}"


def _check_rank(report: _Report, memory: Memory, raw: msgspec.Raw | None) -> None:
    consumer = report.consumer
    if raw is None:
        report.add_cost(consumer.no_rank, "no-rank", Place("dp_rank", "absent"))
        return
    kind = kind_of(raw)
    if kind not in consumer.rank:
        report.add_at("batch", "rank-kind", _rank_place(raw), "it reads an int only")
    if kind not in ("int", "nil"):
        return
    rank = 0 if kind == "nil" else msgspec.msgpack.decode(raw)
    if kind == "nil":
        report.add_cost(consumer.nil_rank, "nil-rank", _rank_place(raw))
    elif consumer.ranks is not None and not consumer.ranks[0] <= rank <= consumer.ranks[1]:
        why = f"it reads {consumer.ranks[0]} to {consumer.ranks[1]} only"
        report.add_at("batch", "rank-range", _rank_place(raw), why)
    if memory.rank is None:
        memory.rank = rank
    elif rank != memory.rank and consumer.rank_change is not None:
        lost, why = consumer.rank_change
        told = f"the first was {memory.rank}, and {why}"
        report.add_at(lost, "rank-change", _rank_place(raw), told)


def _rank_place(raw: msgspec.Raw) -> Place:
    return Place("dp_rank", shown(raw))


# ---------------------------------------------------------------------------------------- events


def _check_event(report: _Report, memory: Memory, event: PackedEvent) -> None:
    consumer, broken = report.consumer, report.consumer.broken
    if event.form not in ("map", "array"):
        report.add(broken, "form", event.path, "is neither a map nor an array")
    elif event.form not in consumer.forms:
        other = "arrays" if event.form == "map" else "maps"
        report.add(broken, "form", event.path, f"is {_a(event.form)}: it reads {other} only")
    elif event.unreadable is not None:
        report.add(broken, "unreadable", event.path, f"cannot be read: {event.unreadable}")
    else:
        tag = event.text(consumer.tag)
        if tag in consumer.types:
            _check_known(report, memory, event, tag)
        elif tag not in consumer.no_ops:
            place = event.place(consumer.tag)
            report.add(broken, "type", place.where, f"is {place.value}: it knows no such event")


def _a(form: str) -> str:
    return "an array" if form == "array" else "a map"


def _check_known(report: _Report, memory: Memory, event: PackedEvent, tag: str) -> None:
    stored, removed = tag in _STORED, tag in _REMOVED
    if event.form == "map":
        _check_keys(report, event, tag, stored=stored, removed=removed)
    else:
        _check_slots(report, event, stored=stored, removed=removed)
    if not stored and not removed:
        return
    _check_kinds(report, event)
    _check_hashes(report, event, stored=stored)
    _check_medium(report, event, stored=stored)
    if stored:
        _check_values(report, event)
        _check_tokens(report, memory, event)
        _check_names(report, event)


def _check_keys(
    report: _Report, event: PackedEvent, tag: str, *, stored: bool, removed: bool
) -> None:
    consumer, broken = report.consumer, report.consumer.broken
    needed = consumer.stored if stored else consumer.removed if removed else frozenset()
    for key in sorted(needed - event.fields.keys()):
        report.add(broken, f"no-{key}", f"{event.path}.{key}", "is absent: it needs the key")
    if consumer.known is not None:
        for key in event.fields:
            if key not in consumer.known[tag]:
                where = f"{event.path}.{quoted(key)[1:-1]}"
                report.add(broken, "unknown-key", where, "is a key that it does not know")
                break


def _check_slots(report: _Report, event: PackedEvent, *, stored: bool, removed: bool) -> None:
    consumer, broken = report.consumer, report.consumer.broken
    least = _STORED_FIELDS if stored else _REMOVED_FIELDS if removed else 1
    if event.length < least:
        why = f"has {event.length} elements: it reads {least} or more"
        report.add(broken, "slots", event.path, why)
    elif stored and consumer.slots is not None and event.length > consumer.slots:
        why = f"has {event.length} elements: it reads {consumer.slots} at most"
        report.add(broken, "slots", event.path, why)


def _check_kinds(report: _Report, event: PackedEvent) -> None:
    consumer, broken = report.consumer, report.consumer.broken
    kinds_of = {**_KINDS, **consumer.kinds} if consumer.kinds else _KINDS
    for key, usual in kinds_of.items():
        raw = event.fields.get(key)
        if raw is None or (event.form == "map" and key in consumer.loose):
            continue
        in_slot_7 = event.form == "array" and key == "lora_name"
        kinds = consumer.slot_7 if in_slot_7 else usual
        if kind_of(raw) not in kinds:
            where = f"{event.path}[7]" if in_slot_7 else f"{event.path}.{key}"
            why = f"it reads {' or '.join(sorted(kinds))} only"
            report.add_at(broken, f"kind-{key}", Place(where, shown(raw)), why)


def _check_hashes(report: _Report, event: PackedEvent, *, stored: bool) -> None:
    consumer, broken, places = report.consumer, report.consumer.broken, event.hashes
    for rule, place, taken, why in (
        ("broken-hash", places.broken, False, "a hash is an int or bytes"),
        ("negative-hash", places.negative, consumer.negative, "it reads unsigned hashes only"),
        ("large-hash", places.large, consumer.large, "it reads hashes up to 2^63 - 1 only"),
        ("digest", places.digest, consumer.digests, "it reads ints only"),
        (
            "narrow-hash",
            places.narrow,
            consumer.narrow,
            "it reads ints that are packed with 64 bits, or bytes, only",
        ),
    ):
        if place is not None and not taken:
            report.add_at(broken, rule, place, why)
    where = f"{event.path}.block_hashes"
    if consumer.max_hashes is not None and places.count > consumer.max_hashes:
        why = f"has {places.count} hashes: it reads {consumer.max_hashes} at most"
        report.add(broken, "max-hashes", where, why)
    if places.count == 0 and places.broken is None:
        report.add_cost(consumer.no_hashes, "no-hashes", Place(where, "empty"))
    if not stored:
        return
    if consumer.many_hashes is not None and places.count > 1:
        lost, why = consumer.many_hashes
        report.add(lost, "many-hashes", where, f"has {places.count} hashes: {why}")
    if consumer.repeated_hash is not None and places.repeated is not None:
        lost, why = consumer.repeated_hash
        report.add(lost, "repeated-hash", places.repeated.where, f"is there already: {why}")


def _check_medium(report: _Report, event: PackedEvent, *, stored: bool) -> None:
    consumer = report.consumer
    medium = event.text("medium")
    if consumer.media is None or medium is None:
        return
    if (medium.lower() if consumer.any_case else medium) in consumer.media:
        return
    cost = consumer.stored_elsewhere if stored else consumer.removed_elsewhere
    report.add_cost(cost, f"medium-{'stored' if stored else 'removed'}", event.place("medium"))


def _check_values(report: _Report, event: PackedEvent) -> None:
    for key, (values, why) in report.consumer.only.items():
        given = event.text(key) if event.given(key) else None
        if given not in values or (event.given(key) and given is None):
            report.add_at("event", f"value-{key}", event.place(key), why)


def _check_tokens(report: _Report, memory: Memory, event: PackedEvent) -> None:
    consumer, tokens = report.consumer, event.tokens
    size = event.number("block_size")
    if size is not None:
        if memory.block_size is None:
            memory.block_size = size
        elif size != memory.block_size and consumer.block_size_change is not None:
            lost, why = consumer.block_size_change
            told = f"the first was {memory.block_size}, and {why}"
            report.add_at(lost, "block-size", event.place("block_size"), told)
    if tokens is None or (tokens.nil is not None and consumer.nil_tokens):
        return
    if (broken := tokens.broken or tokens.nil) is not None:
        report.add_at(consumer.broken, "broken-tokens", broken, "a token is an int")
    elif tokens.pairs is not None:
        report.add_cost(consumer.pairs, "pairs", tokens.pairs)
    elif tokens.out_of_range is not None:
        if consumer.token_range:
            report.add_at(
                consumer.broken, "token-range", tokens.out_of_range, "it reads 0 to 2^32 - 1 only"
            )
    elif not tokens.count:
        if event.hashes.count:
            report.add_cost(
                consumer.no_tokens, "no-tokens", Place(f"{event.path}.token_ids", "empty")
            )
    elif size is not None:
        _check_count(report, event, tokens.count, event.hashes.count * size)


def _check_count(report: _Report, event: PackedEvent, count: int, needed: int) -> None:
    consumer = report.consumer
    cost = (
        consumer.few_tokens if count < needed else consumer.many_tokens if count > needed else None
    )
    if cost is not None:
        lost, why = cost
        where = f"{event.path}.token_ids"
        report.add(lost, "token-count", where, f"has {count} of {needed} ids: {why}")


def _check_names(report: _Report, event: PackedEvent) -> None:
    consumer = report.consumer
    for key in _NAMESPACES:
        if key in consumer.namespaces or not _sets_apart(event, key):
            continue
        why = "it does not read that, and counts the blocks for prompts without"
        report.add_at("misread", f"namespace-{key}", event.place(key), why)
    if event.given("lora_id") and not event.given("lora_name"):
        report.add_cost(consumer.lora_id_alone, "lora-id", event.place("lora_id"))


def _sets_apart(event: PackedEvent, key: str) -> bool:
    """Whether the field says anything."""
    return event.extra if key == "extra_keys" else event.text(key) not in (None, "")
