"""Who holds what, once streams are in step: as tables, and as one JSON document.

The document's keys:

`workers`: a list of {worker, rank (null where nothing came), block_size, blocks: {medium: count}, any:
blocks on any medium, seq: of the last batch, whole: whether all is known, quiet: whether it came to be
in step, or quiet, in time, notes: [text]}.
`overlap`, where a prompt was given: {tokens, lora, cache_salt, extra_key, workers: best first, each
{worker, rank, block_size, prompt_blocks, blocks: {medium: leading blocks}, any, tokens: {medium:
leading tokens}, any_tokens, share: of the prompt, breaks_at_block, breaks_at_token (null: it does
not), elsewhere: [{lora, cache_salt, extra_key, blocks}], reasons: [text]}}.
`blocks`, where they were asked for: a list of {worker, rank, hash, parent: decimal strings, signed 64
bits; depth, media: [medium], lora, cache_salt, extra_key, tokens: [int]}.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvevents.events import StorageMedium
from kvevents.message import Channel
from kvevents.namespace import Namespace
from kvevents.tokens import TokenBytes, TokenIds
from publisher.tools.columns import Cell, Column, Line, lay_out
from publisher.tools.fleet.fleet import Fleet, Rank, Worker, slow, waiting
from publisher.tools.fleet.held import HeldBlock, Scored, called, media_of, score
from publisher.tools.source import Sources
from publisher.tools.text import printable

__all__ = ["Prompt", "State", "gather"]

_MEDIA = tuple(StorageMedium)
_RARE = (StorageMedium.DISK, StorageMedium.EXTERNAL)
_LONGEST_TICK_S = 0.1
_AWAY_S = 1.0
"""Between two looks so long, we stood still ourselves: that nothing came means nothing."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Whose beginning is looked for."""

    tokens: list[int]
    namespace: Namespace


class State:
    """What was gathered. `busy`: the sources that came neither to be in step nor to be quiet."""

    def __init__(self, fleet: Fleet, busy: set[int]) -> None:
        self.fleet, self._busy = fleet, busy

    @property
    def rows(self) -> list[tuple[Worker, Rank | None]]:
        """A worker of which nothing came has one without a rank."""
        found: list[tuple[Worker, Rank | None]] = []
        for worker in self.fleet.workers.values():
            ranks = [worker.ranks[number] for number in sorted(worker.ranks)]
            found += [(worker, rank) for rank in ranks] or [(worker, None)]
        return found

    @property
    def came(self) -> bool:
        """Whether anything did."""
        return any(worker.came for worker in self.fleet.workers.values())

    @property
    def waits(self) -> bool:
        """Whether batches have come that wait for a replay."""
        return any(worker.held for worker in self.fleet.workers.values())

    @property
    def whole(self) -> bool:
        """Whether nothing is missing of any worker."""
        return all(worker.is_whole(rank) for worker, rank in self.rows)

    def notes(self, worker: Worker, rank: Rank | None) -> list[str]:
        """Why a row is not all there is."""
        notes = worker.notes(rank)
        if id(worker.source) in self._busy and worker.source.connected and worker.in_step:
            notes += _why_busy(worker)
        return [printable(note) for note in notes]

    def scored(self, prompt: Prompt) -> list[Scored]:
        """Best first."""
        ranks = [(rank.worker, rank.number, rank.index) for rank in self.fleet.ranks]
        scored = score(ranks, prompt.tokens, prompt.namespace)
        before = {worker.name for worker in self.fleet.workers.values() if worker.missing.before}
        for one in scored:
            if one.worker in before and one.whole and not one.overlap.any_medium:
                one.reasons[1:] = ["what was stored before we joined is unknown: it may be held"]
        return scored

    def blocks(self, prompt: Prompt | None) -> Iterator[tuple[Rank, HeldBlock]]:
        """All, or those of the prompt's overlap."""
        for rank in self.fleet.ranks:
            if prompt is None:
                yield from ((rank, one) for one in rank.index.blocks())
            else:
                path = rank.index.path(prompt.tokens, prompt.namespace)
                yield from ((rank, one) for one in path)

    # ------------------------------------------------------------------------------------ text

    def table(self, width: int | None) -> list[Line]:
        """A row for each rank; notes are in lines of their own unless any length will do."""
        columns = [
            Column("worker", left=True, most=_name_width(width)),
            Column("rank"),
            Column("block"),
            *(Column(medium.value, spare=medium in _RARE) for medium in _MEDIA),
            Column("any"),
            Column("seq"),
        ]
        cells, notes = [], []
        for worker, rank in self.rows:
            index = None if rank is None else rank.index
            counts = [index.count(one) if index else 0 for one in _MEDIA]
            size = index.block_size if index else None
            told = ["-" if rank is None else str(rank.number), "-" if size is None else str(size)]
            told += [*map(str, counts), str(len(index) if index is not None else 0)]
            told.append("-" if worker.seq is None else str(worker.seq))
            cells.append([Cell(printable(worker.name), "bold"), *map(Cell, told)])
            notes.append((self.notes(worker, rank), worker.is_whole(rank)))
        return _with_notes(columns, cells, notes, width)

    def overlap_table(self, prompt: Prompt, width: int | None) -> list[Line]:
        """The prompt, and a row for each rank, the best first."""
        columns = [
            Column("worker", left=True, most=_name_width(width)),
            Column("rank"),
            Column("block"),
            Column("blocks"),
            Column("tokens"),
            Column("share"),
            *(Column(medium.value, spare=medium in _RARE) for medium in _MEDIA),
        ]
        cells, notes = [], []
        for one in self.scored(prompt):
            held, size = one.overlap.any_medium, one.block_size or 0
            counts = [str(one.overlap.blocks[medium]) for medium in _MEDIA]
            told = [str(one.rank), str(size) if size else "-", f"{held}/{one.whole}"]
            told += [str(held * size), f"{100 * held * size / len(prompt.tokens):.0f}%", *counts]
            style = "bold green" if held else "dim"
            cells.append([Cell(printable(one.worker), style), *map(Cell, told)])
            notes.append(([printable(reason) for reason in one.reasons], True))
        many = "1 token" if len(prompt.tokens) == 1 else f"{len(prompt.tokens)} tokens"
        of = "" if prompt.namespace == Namespace() else f", {called(prompt.namespace)}"
        title = f"prompt of {many}{printable(of)}: its leading blocks on any medium, and on each"
        titles = [title] if width is None else _wrapped(title, width)
        table = _with_notes(columns, cells, notes, width)
        return [*([Cell(one)] for one in titles), *table]

    def block_lines(self, prompt: Prompt | None) -> Iterator[str]:
        """A line for each block; columns are separated by two blanks or more."""
        names = [printable(rank.worker) for rank in self.fleet.ranks]
        wide = max([6, *map(len, names)])
        yield f"{'worker':{wide}}  rank  depth  {'hash':16}  {'parent':16}  media  tokens"
        for rank, (name, block, depth) in self.blocks(prompt):
            parent = "-" if block.parent is None else f"{block.parent & 2**64 - 1:016x}"
            at = "?" if depth is None else str(depth)
            tokens = ",".join(map(str, TokenIds(TokenBytes(block.tokens)))) or "-"
            of = "" if block.namespace == Namespace() else f"  {called(block.namespace)}"
            yield printable(
                f"{printable(rank.worker):{wide}}  {rank.number:>4}  {at:>5}"
                f"  {name & 2**64 - 1:016x}  {parent:16}  {'+'.join(media_of(block))}  {tokens}{of}"
            )

    # ------------------------------------------------------------------------------------ JSON

    def document(self, prompt: Prompt | None, *, blocks: bool) -> dict[str, Any]:
        """See above."""
        found: dict[str, Any] = {
            "workers": [self._worker(worker, rank) for worker, rank in self.rows]
        }
        if prompt is not None:
            found["overlap"] = {
                "tokens": len(prompt.tokens),
                **_names(prompt.namespace),
                "workers": [_overlap(one, len(prompt.tokens)) for one in self.scored(prompt)],
            }
        if blocks:
            found["blocks"] = [_block(rank, one) for rank, one in self.blocks(prompt)]
        return found

    def _worker(self, worker: Worker, rank: Rank | None) -> dict[str, Any]:
        index = None if rank is None else rank.index
        return {
            "worker": printable(worker.name),
            "rank": None if rank is None else rank.number,
            "block_size": None if index is None else index.block_size,
            "blocks": {one.value: 0 if index is None else index.count(one) for one in _MEDIA},
            "any": 0 if index is None else len(index),
            "seq": worker.seq,
            "whole": worker.is_whole(rank),
            "quiet": id(worker.source) not in self._busy,
            "notes": self.notes(worker, rank),
        }


def gather(sources: Sources, *, quiet_s: float, for_s: float, warn: Callable[[str], None]) -> State:
    """Captures to their end; what is live until each has been in step for `quiet_s`, or for `for_s`, or
    Ctrl-C. One that cannot say that it is, because it answers no replay, must have changed nothing for
    `quiet_s` instead. `warn`: is told once of each worker what keeps it waiting. Raises ValueError for a
    capture that is none.
    """
    fleet, warned = Fleet(sources.all), set[int]()
    begun = time.monotonic()
    settled_at = {id(source): begun for source in sources.live}
    looked_at, back_at = begun, -math.inf
    try:
        for one in sources.steps(begun + for_s, min(quiet_s / 4, _LONGEST_TICK_S)):
            now = time.monotonic()
            if now - looked_at > _AWAY_S:
                settled_at, back_at = dict.fromkeys(settled_at, now), now
            looked_at = now
            if one is not None:
                source, step = one
                worker = fleet.of(source)
                was_late = worker.is_late or step.message.channel == Channel.ABREAST
                was_in_step = worker.in_step and not was_late
                changed = fleet.take(source, step)
                if not was_in_step or (changed and not worker.answered):
                    settled_at[id(source)] = now
                continue
            for worker in fleet.workers.values():
                if worker.replay_is_silent and id(worker) not in warned:
                    warned.add(id(worker))
                    warn(f"{worker.name}: {waiting(worker)}")
            if sources.drained and not _busy(fleet, sources, settled_at, now - quiet_s):
                break
        now = time.monotonic()
        back_at = now if now - looked_at > _AWAY_S else back_at
        for source, step in sources.live_steps(back_at + _AWAY_S):  # the time was up meanwhile
            fleet.take(source, step)
    except KeyboardInterrupt:
        pass
    for source, step in sources.rest():
        fleet.take(source, step)
    return State(fleet, _busy(fleet, sources, settled_at, looked_at - quiet_s))


def _busy(fleet: Fleet, sources: Sources, settled_at: dict[int, float], since: float) -> set[int]:
    """Those live sources that are not in step, are behind their replays, are read too late, or settled
    only after that.
    """
    return {
        id(source)
        for source in sources.live
        if not fleet.of(source).in_step
        or not fleet.of(source).told_all
        or source.follower.ahead
        or source.is_behind
        or settled_at[id(source)] > since
    }


# ---------------------------------------------------------------------------------------- helpers


def _why_busy(worker: Worker) -> list[str]:
    """Of one that no replay is awaited of."""
    if not worker.told_all:
        return ["nothing has come of it yet"]
    if worker.is_late:
        return [f"{slow(worker.source)}: what waits was not read yet"]
    if ahead := worker.source.follower.ahead:
        return [] if worker.is_astray else [f"what comes live is {ahead} batches behind its replay"]
    if not worker.answered:
        return ["not quiet: it answers no replay, and what it holds changed to the end"]
    return []


def _name_width(width: int | None) -> int | None:
    return None if width is None else max(8, width // 4)


def _with_notes(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    notes: Sequence[tuple[list[str], bool]],
    width: int | None,
) -> list[Line]:
    """Each row's notes behind it, or below it; they are yellow where something is missing."""
    if width is None:
        told = ["; ".join(texts) for texts, _ in notes]
        wide = [[*row, Cell(text)] for row, text in zip(rows, told, strict=True)]
        head, bodies = lay_out([*columns, Column("note", left=True)], wide, None)
        return [*head, *(line for body in bodies for line in body)]
    head, bodies = lay_out(columns, rows, width)
    lines = [*head]
    for body, (texts, fine) in zip(bodies, notes, strict=True):
        lines += body
        for text in texts:
            style = "dim" if fine else "yellow"
            lines += [[Cell("    "), Cell(part, style)] for part in _wrapped(text, width - 4)]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width))


def _names(namespace: Namespace) -> dict[str, str | None]:
    return {
        "lora": namespace.lora_name,
        "cache_salt": namespace.cache_salt,
        "extra_key": namespace.extra_key,
    }


def _overlap(one: Scored, tokens: int) -> dict[str, Any]:
    size, held = one.block_size or 0, one.overlap.any_medium
    broken = held < one.whole
    return {
        "worker": printable(one.worker),
        "rank": one.rank,
        "block_size": one.block_size,
        "prompt_blocks": one.whole,
        "blocks": {medium.value: one.overlap.blocks[medium] for medium in _MEDIA},
        "any": held,
        "tokens": {medium.value: one.overlap.blocks[medium] * size for medium in _MEDIA},
        "any_tokens": held * size,
        "share": round(held * size / tokens, 4),
        "breaks_at_block": held if broken else None,
        "breaks_at_token": held * size if broken else None,
        "elsewhere": [_names(other) | {"blocks": blocks} for other, blocks in one.elsewhere],
        "reasons": one.reasons,
    }


def _block(rank: Rank, one: HeldBlock) -> dict[str, Any]:
    return {
        "worker": printable(rank.worker),
        "rank": rank.number,
        "hash": str(one.name),
        "parent": None if one.block.parent is None else str(one.block.parent),
        "depth": one.depth,
        "media": [medium.value for medium in media_of(one.block)],
        **_names(one.block.namespace),
        "tokens": TokenIds(TokenBytes(one.block.tokens)).tolist(),
    }
