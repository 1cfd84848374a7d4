"""How workers fare: rates, blocks, gaps, and which prompts are stored most; as of now."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

import msgspec

from kvevents.check import Checker, Finding
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from kvevents.follower import Malformed, Step, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import BlockHash
from kvevents.index import Block, BlockIndex
from kvevents.message import Channel
from publisher.tools.columns import Cell, Column, Line, lay_out, short_number
from publisher.tools.fleet.fleet import Fleet, Rank, Worker
from publisher.tools.fleet.held import Held
from publisher.tools.fleet.prefixes import Prefix, Prefixes
from publisher.tools.fleet.rates import Lags, Rates
from publisher.tools.source import Capture, Source
from publisher.tools.text import printable

__all__ = ["Board", "Hot", "Row", "Snapshot", "lines"]

_MEDIA = tuple(StorageMedium)
_WINDOW_S, _HOT_WINDOW_S = 10, 60
_HOTTEST = 10
_NS = 1_000_000_000


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a worker. `link`: "up", "down", or "file". `blocks`: by medium; `held`: on any. Lags:
    arrival minus time stamp of batches that came live. What is of a whole stream (`gaps` and those after)
    is None but in its first rank's row. `lost_perhaps_ours`: those of `lost` that may be missing here
    alone. `findings`: what `kvevents check` would report, without notes, and without such losses.
    """

    worker: str
    rank: int | None
    link: str
    events_per_s: float
    stored_per_s: float
    removed_per_s: float
    blocks: dict[str, int]
    held: int
    block_size: int | None
    lag_p50_s: float | None
    lag_p99_s: float | None
    seq: int | None
    gaps: int | None
    lost: int | None
    lost_perhaps_ours: int | None
    replays: int | None
    restarts: int | None
    findings: int | None
    notes: list[str]


class Hot(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix: `blocks` in a chain from `root` to `tip`, where it branches. `beneath`: blocks held, the
    chain's too. `workers`: ranks that hold the tip. `stores`: blocks that came to a worker in the window,
    `again`: that it had dropped before.
    """

    root: str
    tip: str
    blocks: int
    tokens: int | None
    beneath: int
    workers: int
    stores: int
    again: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: seconds since the epoch. `window_s`: of the rates; None: all the time that was seen.
    `left_out`: stores of blocks that were too many for `hottest`.
    """

    at_s: float
    window_s: int | None
    rows: list[Row]
    hottest: list[Hot]
    left_out: int = 0


class _Watched(Held):
    """An index that tells of blocks that come and go."""

    def __init__(self, number: int, prefixes: Prefixes) -> None:
        super().__init__()
        self._number, self._prefixes = number, prefixes

    def clear(self) -> None:
        for name in self._blocks:
            self._prefixes.dropped(self._number, name)
        super().clear()

    def _put(self, block_hash: BlockHash, block: Block) -> None:
        BlockIndex._put(self, block_hash, block)
        self._prefixes.stored(self._number, block_hash, block.parent)

    def _drop(self, block_hash: BlockHash, block: Block) -> None:
        super()._drop(block_hash, block)
        self._prefixes.dropped(self._number, block_hash)


class _Stream:
    """What is counted of one source."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.gaps = self.replays = self.restarts = self.findings = self.lost = self.ours = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        """When its first and its last message came."""


class _Pace:
    """What is counted of one rank: events, blocks stored, blocks removed; lags."""

    def __init__(self, window_s: int | None) -> None:
        self.rates, self.lags = Rates(3, window_s), Lags()


class Board:
    """Of all sources. `windowed`: rates are of the last seconds, not of all the time."""

    def __init__(self, sources: Sequence[Source], *, windowed: bool) -> None:
        self._window_s = _WINDOW_S if windowed else None
        self._prefixes = Prefixes(_HOT_WINDOW_S if windowed else None)
        self._watched: list[_Watched] = []
        self.fleet = Fleet(sources, self._new_index)
        self._streams = {id(source): _Stream() for source in sources}
        self._paces: dict[tuple[int, int], _Pace] = {}
        self._begun_s = time.time()

    @property
    def came(self) -> bool:
        """Whether anything did."""
        return any(worker.came for worker in self.fleet.workers.values())

    @property
    def waits(self) -> bool:
        """Whether batches have come that wait for a replay."""
        return any(worker.held for worker in self.fleet.workers.values())

    def take(self, source: Source, step: Step) -> None:
        """A message and what it brought."""
        worker, stream = self.fleet.begin(source, step), self._streams[id(source)]
        stream.last_s = step.message.at_ns / _NS
        stream.first_s = stream.last_s if stream.first_s is None else stream.first_s
        stream.replays += step.message.channel == Channel.ASKED
        self._judge(worker, stream, stream.checker.message(step.message))
        for arrival in step.arrivals:
            if isinstance(arrival, Told):
                self._told(worker, stream, arrival)
                continue
            match arrival:
                case Gap():
                    stream.gaps += 1
                case Restarted():
                    stream.restarts += 1
                case Lost(first, count):
                    stream.lost += count if first else 0
                    stream.ours += count if first and worker.is_ours(first) else 0
                case Malformed():
                    pass
            self.fleet.other(worker, arrival)
            self._judge(worker, stream, stream.checker.other(arrival))

    def _told(self, worker: Worker, stream: _Stream, told: Told) -> None:
        self._prefixes.second = None if told.replayed else told.at_ns // _NS
        reading, applied = self.fleet.told(worker, told)
        self._judge(worker, stream, stream.checker.read(reading))
        if told.replayed or reading.batch is None or reading.rank not in worker.ranks:
            return
        pace, at = self._pace(worker, reading.rank), told.at_ns / _NS
        pace.lags.add(at - reading.batch.ts)
        stored = removed = 0
        for event in applied:
            match event:
                case BlockStored():
                    stored += len(event.block_hashes)
                case BlockRemoved():
                    removed += len(event.block_hashes)
                case AllBlocksCleared():
                    pass
        pace.rates.add(at, (len(reading.events), stored, removed))

    def _judge(self, worker: Worker, stream: _Stream, found: Sequence[Finding]) -> None:
        for one in found:
            ours = one.rule == "lost" and worker.is_ours(one.place.seq)
            stream.findings += one.severity == "violation" and not ours

    def _pace(self, worker: Worker, number: int) -> _Pace:
        key = id(worker.source), number
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = _Pace(self._window_s)
            begun_s = self._begun_s
            if isinstance(worker.source, Capture):
                begun_s = self._streams[id(worker.source)].first_s or 0.0
            found.rates.look(begun_s)
        return found

    def _new_index(self, _worker: str, _rank: int) -> Held:
        self._watched.append(_Watched(len(self._watched), self._prefixes))
        return self._watched[-1]

    # -------------------------------------------------------------------------------- snapshot

    def snapshot(self) -> Snapshot:
        """As of now."""
        now = time.time()
        self._prefixes.forget(int(now))
        rows: list[Row] = []
        for worker in self.fleet.workers.values():
            numbers: list[int | None] = [*sorted(worker.ranks)]
            for place, number in enumerate(numbers or [None]):
                rows.append(self._row(worker, number, now, first=place == 0))
        hottest = [self._hot(one) for one in self._prefixes.hottest(_HOTTEST)]
        return Snapshot(
            at_s=now,
            window_s=self._window_s,
            rows=rows,
            hottest=hottest,
            left_out=self._prefixes.left_out,
        )

    def _row(self, worker: Worker, number: int | None, now: float, *, first: bool) -> Row:
        stream = self._streams[id(worker.source)]
        rank: Rank | None = None if number is None else worker.ranks[number]
        index = Held() if rank is None else rank.index
        is_file = isinstance(worker.source, Capture)
        pace = _Pace(None) if number is None else self._pace(worker, number)
        rates = pace.rates.per_second(stream.last_s if is_file else now)
        events, stored, removed = (round(rate, 3) for rate in rates)
        lags = pace.lags.quantiles(0.5, 0.99)
        p50, p99 = (None if lag is None else round(lag, 6) for lag in lags)
        return Row(
            worker=printable(worker.name),
            rank=number,
            link="file" if is_file else "up" if worker.source.connected else "down",
            events_per_s=events,
            stored_per_s=stored,
            removed_per_s=removed,
            blocks={medium.value: index.count(medium) for medium in _MEDIA},
            held=len(index),
            block_size=index.block_size,
            lag_p50_s=p50,
            lag_p99_s=p99,
            seq=worker.seq,
            gaps=stream.gaps if first else None,
            lost=stream.lost if first else None,
            lost_perhaps_ours=stream.ours if first else None,
            replays=stream.replays if first else None,
            restarts=stream.restarts if first else None,
            findings=stream.findings if first else None,
            notes=[printable(note) for note in self._notes(worker, rank, first=first)],
        )

    def _notes(self, worker: Worker, rank: Rank | None, *, first: bool) -> list[str]:
        """What is of the whole stream is said once."""
        notes = worker.notes(rank)
        if not first:
            of_all = set(worker.notes(None))
            return [note for note in notes if note not in of_all]
        if worker.own_gaps:
            gaps = "1 gap is" if worker.own_gaps == 1 else f"{worker.own_gaps} gaps are"
            notes.append(f"{gaps} perhaps our own: it was read too slowly then")
        return notes

    def _hot(self, prefix: Prefix) -> Hot:
        sizes = [self._watched[number].block_size for number in prefix.held_by]
        size = next((one for one in sizes if one), None)
        return Hot(
            root=str(prefix.root),
            tip=str(prefix.tip),
            blocks=prefix.blocks,
            tokens=None if size is None else size * prefix.blocks,
            beneath=prefix.beneath,
            workers=len(prefix.held_by),
            stores=prefix.stores,
            again=prefix.again,
        )


# ------------------------------------------------------------------------------------------- text

_COLUMNS = (
    ("rank", 4),
    ("link", 4),
    ("ev/s", 6),
    ("stored/s", 8),
    ("removed/s", 9),
    ("GPU", 6),
    ("CPU", 6),
    ("DISK", 5),
    ("EXT", 5),
    ("lag p50", 7),
    ("lag p99", 7),
    ("seq", 8),
    ("gaps", 4),
    ("lost", 4),
    ("replays", 7),
    ("restarts", 8),
    ("findings", 8),
)
_SPARE = ("DISK", "EXT", "gaps", "lost", "replays", "restarts", "findings")
_TIER_STYLES = ("green", "yellow", "blue", "magenta")
_HOT_COLUMNS = ("prefix from", "to", "blocks", "tokens", "beneath", "held by", "stores", "again")
_TALLEST_NOTES = 8


def lines(snapshot: Snapshot, width: int | None, height: int | None = None) -> list[Line]:
    """The table, its totals, and below it the hottest prefixes; no line is longer than `width`. Where it
    is higher than `height`, rows of workers are left out, and it says how many.
    """
    columns = [Column("worker", left=True, most=None if width is None else max(8, width // 5))]
    columns += [Column(name, least=least, spare=name in _SPARE) for name, least in _COLUMNS]
    cells = [_cells(row) for row in snapshot.rows]
    head, bodies = lay_out(columns, [*cells, _totals(snapshot.rows)], width)
    title, notes, hottest = (
        _title(snapshot, width),
        _notes(snapshot, width),
        _hottest(snapshot, width),
    )
    *workers, totals = bodies
    shown = len(workers)
    if height is not None:
        room = height - len(title) - len(head) - len(totals) - len(notes) - len(hottest) - 1
        if room < sum(map(len, workers)):
            shown = max(1, room // max(1, len(head)))
    body = [line for one in workers[:shown] for line in one]
    if shown < len(workers):
        body.append([Cell(f"… and {len(workers) - shown} more", "dim")])
    return [*title, *head, *body, *(totals if len(workers) > 1 else []), *notes, *hottest]


def _title(snapshot: Snapshot, width: int | None) -> list[Line]:
    rows = snapshot.rows
    sources = {row.worker: row.link for row in rows}
    up = sum(link == "up" for link in sources.values())
    files = sum(link == "file" for link in sources.values())
    told = [f"{up} of {len(sources) - files} up"] if len(sources) > files else []
    told += [f"{files} captures" if files > 1 else "1 capture"] if files else []
    window = "all that was seen" if snapshot.window_s is None else f"the last {snapshot.window_s} s"
    text = f"{', '.join(told)}; rates of {window}"
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at_s))
    if width is not None and len(text) + 24 > width:
        return [[Cell("kvevents top", "bold cyan")], [Cell(text)]]
    return [[Cell("kvevents top", "bold cyan"), Cell(f"  {clock}  {text}")]]


def _cells(row: Row) -> list[Cell]:
    link = Cell(row.link, {"up": "green", "down": "bold red"}.get(row.link, ""))
    rates = [row.events_per_s, row.stored_per_s, row.removed_per_s]
    return [
        Cell(row.worker, "bold"),
        Cell("-" if row.rank is None else str(row.rank)),
        link,
        *(Cell(short_number(rate)) for rate in rates),
        *_tiers(row.blocks),
        Cell(_lag(row.lag_p50_s)),
        Cell(_lag(row.lag_p99_s)),
        Cell("-" if row.seq is None else str(row.seq)),
        *_troubles([row.gaps, row.lost, row.replays, row.restarts, row.findings]),
    ]


def _tiers(blocks: dict[str, int]) -> list[Cell]:
    return [
        Cell(short_number(blocks[medium]), style)
        for medium, style in zip(_MEDIA, _TIER_STYLES, strict=True)
    ]


def _troubles(counts: Sequence[int | None]) -> list[Cell]:
    styles = ("yellow", "bold red", "", "yellow", "bold red")
    return [
        Cell("" if count is None else short_number(count), style if count else "")
        for count, style in zip(counts, styles, strict=True)
    ]


def _totals(rows: Sequence[Row]) -> list[Cell]:
    blocks = {medium.value: sum(row.blocks[medium] for row in rows) for medium in _MEDIA}
    rates = [
        sum(row.events_per_s for row in rows),
        sum(row.stored_per_s for row in rows),
        sum(row.removed_per_s for row in rows),
    ]
    counts = [
        sum(row.gaps or 0 for row in rows),
        sum(row.lost or 0 for row in rows),
        sum(row.replays or 0 for row in rows),
        sum(row.restarts or 0 for row in rows),
        sum(row.findings or 0 for row in rows),
    ]
    told = [Cell("total", "bold"), Cell(""), Cell(""), *map(Cell, map(short_number, rates))]
    return [*told, *_tiers(blocks), Cell(""), Cell(""), Cell(""), *_troubles(counts)]


def _notes(snapshot: Snapshot, width: int | None) -> list[Line]:
    """What is not known, a line each."""
    told: list[Line] = []
    for row in snapshot.rows:
        who = row.worker if row.rank is None else f"{row.worker}/{row.rank}"
        for note in row.notes:
            text = f"{who}: {note}"
            parts = [text] if width is None else textwrap.wrap(text, max(20, width))
            told += [[Cell(part, "yellow")] for part in parts]
    if len(told) > _TALLEST_NOTES:
        more = len(told) - _TALLEST_NOTES + 1
        told[_TALLEST_NOTES - 1 :] = [[Cell(f"… and {more} more notes", "yellow")]]
    return told


def _hottest(snapshot: Snapshot, width: int | None) -> list[Line]:
    if not snapshot.hottest:
        return []
    columns = [Column(name, left=at < 2) for at, name in enumerate(_HOT_COLUMNS)]
    cells = [
        [
            Cell(_short(one.root), "cyan"),
            Cell(_short(one.tip) if one.blocks > 1 else ""),
            Cell(str(one.blocks)),
            Cell("-" if one.tokens is None else str(one.tokens)),
            Cell(short_number(one.beneath)),
            Cell(str(one.workers)),
            Cell(short_number(one.stores), "bold" if one.stores else ""),
            Cell(short_number(one.again), "yellow" if one.again else ""),
        ]
        for one in snapshot.hottest
    ]
    head, bodies = lay_out(columns, cells, width)
    window = "" if snapshot.window_s is None else f" in the last {_HOT_WINDOW_S} s"
    title = f"hottest prefixes, up to where they branch; blocks stored{window}"
    if snapshot.left_out:
        title = f"{title}; {short_number(snapshot.left_out)} not looked at"
    return [
        [],
        [Cell(_fitting(title, width), "bold cyan")],
        *head,
        *(line for one in bodies for line in one),
    ]


def _fitting(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def _short(block_hash: str) -> str:
    return f"{int(block_hash) & 2**64 - 1:016x}"[:12]


def _lag(lag_s: float | None) -> str:
    if lag_s is None:
        return "-"
    if abs(lag_s) < 0.99995:  # what is shown as 1.0s has a letter less than 1000.0ms
        return f"{lag_s * 1000:.1f}ms"
    return f"{lag_s:.1f}s" if abs(lag_s) < 10_000 else f"{lag_s:.1e}s"
