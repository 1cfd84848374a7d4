"""How workers fare: rates, blocks, gaps, and which prompts are stored most; as of now."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvevents.block import Block
from kvevents.check import Checker, Finding
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from kvevents.follower import Malformed, Step, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import BlockHash, canonical_hash, short_hash
from kvevents.index import BlockIndex
from kvevents.message import Channel
from publisher.tools.columns import Cell, Column, Line, lay_out, short_number
from publisher.tools.fleet.fleet import Fleet, Rank, Worker
from publisher.tools.fleet.held import Held
from publisher.tools.fleet.prefixes import Prefix, Prefixes
from publisher.tools.fleet.rates import Lags, Rates
from publisher.tools.source import Capture, Source
from publisher.tools.text import printable

__all__ = ["SORTS", "Board", "Hot", "Row", "Snapshot", "lines"]

_MEDIA = tuple(StorageMedium)
_WINDOW_S, _HOT_WINDOW_S = 10, 60
_HOTTEST = 10
_NS = 1_000_000_000
_GAP = 2
"""Blanks between two columns."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a worker. `link`: "up", "down", or "file". Rates: None until it was in step. `blocks`:
    by medium; `held`: on any. Lags: arrival minus time stamp of batches that came live. What is of a
    whole stream (`gaps` and those after) is None but in its first rank's row. `lost_perhaps_ours`: those
    of `lost` that may be missing here alone. `findings`: what `kvevents check` would report, without
    notes, and without such losses.
    """

    worker: str
    rank: int | None
    link: str
    events_per_s: float | None
    stored_per_s: float | None
    removed_per_s: float | None
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

    def _store_new(self, event: BlockStored) -> bool:
        if not super()._store_new(event):
            return False
        for name in map(canonical_hash, event.block_hashes):
            self._prefixes.stored(self._number, name, self._blocks[name].parent)
        return True

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
        self.live_s: float | None = None
        """Since when what comes live is counted: what came before was the replay's to tell."""


class _Pace:
    """What is counted of one rank: events, blocks stored, blocks removed; lags."""

    def __init__(self, window_s: int | None) -> None:
        self.rates, self.lags = Rates(3, window_s), Lags()


class Board:
    """Of all sources. `windowed`: rates are of the last seconds, not of all the time. `hottest`: how many
    prefixes are told. `sort`: one of `SORTS`; None: rows are in the order of the sources.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        windowed: bool,
        hottest: int = _HOTTEST,
        sort: str | None = None,
    ) -> None:
        self._hottest, self._sort = hottest, sort
        self._window_s = _WINDOW_S if windowed else None
        self._prefixes = Prefixes(_HOT_WINDOW_S if windowed else None)
        self._watched: list[_Watched] = []
        self.fleet = Fleet(sources, self._new_index)
        self._streams = {id(source): _Stream() for source in sources}
        self._paces: dict[tuple[int, int], _Pace] = {}

    @property
    def came(self) -> bool:
        """Whether anything did."""
        return any(worker.came for worker in self.fleet.workers.values())

    @property
    def waits(self) -> bool:
        """Whether batches have come that wait for a replay."""
        return any(worker.held for worker in self.fleet.workers.values())

    @property
    def joined(self) -> int:
        """How many sources have been in step."""
        return sum(stream.live_s is not None for stream in self._streams.values())

    @property
    def joins(self) -> bool:
        """Whether the rates of some source wait for a replay of which something has come, or may yet."""
        return any(
            worker.source.connected
            and self._streams[key].live_s is None
            and not worker.replay_is_silent
            for key, worker in self.fleet.workers.items()
        )

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
        if stream.live_s is None and worker.in_step:
            stream.live_s = stream.first_s if isinstance(source, Capture) else stream.last_s

    def _told(self, worker: Worker, stream: _Stream, told: Told) -> None:
        self._prefixes.second = None if told.replayed else told.at_ns // _NS
        reading, applied = self.fleet.told(worker, told)
        self._judge(worker, stream, stream.checker.read(reading))
        if told.replayed or reading.batch is None or reading.rank not in worker.ranks:
            return
        at = told.at_ns / _NS
        # the first of those that waited for the replay came before it was over
        stream.live_s = at if stream.live_s is None else min(stream.live_s, at)
        pace = self._pace(worker, reading.rank, stream.live_s)
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
            excused = one.rule == "lost" and (
                worker.is_ours(one.place.seq) or worker.ends_in_replay
            )
            stream.findings += one.severity == "violation" and not excused

    def _pace(self, worker: Worker, number: int, begun_s: float) -> _Pace:
        key = id(worker.source), number
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = _Pace(self._window_s)
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
        hottest = [self._hot(one) for one in self._prefixes.hottest(self._hottest)]
        return Snapshot(
            at_s=now,
            window_s=self._window_s,
            rows=rows if self._sort is None else _ordered(rows, self._sort),
            hottest=hottest,
            left_out=self._prefixes.left_out,
        )

    def _row(self, worker: Worker, number: int | None, now: float, *, first: bool) -> Row:
        stream = self._streams[id(worker.source)]
        rank: Rank | None = None if number is None else worker.ranks[number]
        index = Held() if rank is None else rank.index
        is_file = isinstance(worker.source, Capture)
        pace = _Pace(None)
        if number is not None:
            pace = self._paces.get((id(worker.source), number), pace)
        told = pace.rates.per_second(stream.last_s if is_file else now)
        rates = [None if stream.live_s is None else round(rate, 3) for rate in told]
        lags = pace.lags.quantiles(0.5, 0.99)
        p50, p99 = (None if lag is None else round(lag, 6) for lag in lags)
        return Row(
            worker=printable(worker.name),
            rank=number,
            link="file" if is_file else "up" if worker.source.connected else "down",
            events_per_s=rates[0],
            stored_per_s=rates[1],
            removed_per_s=rates[2],
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


_VALUES: dict[str, Callable[[Row], float | None]] = {
    "rank": lambda row: row.rank,
    "ev/s": lambda row: row.events_per_s,
    "stored/s": lambda row: row.stored_per_s,
    "removed/s": lambda row: row.removed_per_s,
    "GPU": lambda row: row.blocks["GPU"],
    "CPU": lambda row: row.blocks["CPU_PINNED"],
    "DISK": lambda row: row.blocks["DISK"],
    "EXT": lambda row: row.blocks["EXTERNAL"],
    "lag": lambda row: row.lag_p50_s,
    "seq": lambda row: row.seq,
    "gaps": lambda row: row.gaps,
    "lost": lambda row: row.lost,
    "replays": lambda row: row.replays,
    "restarts": lambda row: row.restarts,
    "findings": lambda row: row.findings,
}
SORTS = ("worker", *_VALUES)
"""What rows may be ordered by."""


def _ordered(rows: Sequence[Row], column: str) -> list[Row]:
    """By one of `SORTS`: names from the first on, else the largest number first. Rows of a worker that
    have no number of their own there go with its first.
    """
    if column == "worker":
        return sorted(rows, key=lambda row: row.worker)
    value, firsts = _VALUES[column], dict[str, float | None]()
    for row in rows:
        firsts.setdefault(row.worker, value(row))

    def place(row: Row) -> float:
        told = value(row)
        told = firsts[row.worker] if told is None else told
        return math.inf if told is None else -told

    return sorted(rows, key=place)


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
_TROUBLES = ("gaps", "lost", "replays", "restarts", "findings")
_SPARE = ("rank", "DISK", "EXT", *_TROUBLES)
"""They say nothing where all of them are 0."""
_TELLING = (
    *("worker", "rank", "link", "ev/s", "GPU", "lost", "gaps", "findings", "restarts", "CPU"),
    *("lag p50", "stored/s", "DISK", "EXT", "seq", "removed/s", "lag p99", "replays"),
)
"""The most telling columns first: the others are left out where a terminal is narrow."""
_TIER_STYLES = ("green", "yellow", "blue", "magenta")
_HOT_COLUMNS = ("prefix from", "to", "blocks", "tokens", "beneath", "held by", "stores", "again")
_TALLEST_NOTES = 8
_SURE_NOTES = 2
"""Lines of notes that have their place before the prefixes have any."""
_LOWEST_HOTTEST = 4


def lines(snapshot: Snapshot, width: int | None, height: int | None = None) -> list[Line]:
    """The table, its totals, below it the hottest prefixes, and notes. No line is longer than `width`:
    the columns that tell least are left out. Nor are there more lines than `height`: rows of workers
    come first, then two lines of notes, then prefixes, then the other notes.
    """
    columns = [Column("worker", left=True, most=None if width is None else max(8, width // 5))]
    columns += [Column(name, least=least) for name, least in _COLUMNS]
    cells = [_cells(row) for row in snapshot.rows]
    cells += [_totals(snapshot.rows)] if len(snapshot.rows) > 1 else []
    kept = _kept(columns, cells, width)
    head, bodies = lay_out(
        [columns[at] for at in kept], [[row[at] for at in kept] for row in cells], width
    )
    title, hottest, notes = (
        _title(snapshot, width),
        _hottest(snapshot, width),
        _notes(snapshot, width),
    )
    workers, totals = bodies[: len(snapshot.rows)], bodies[len(snapshot.rows) :]
    body = [line for one in workers for line in one]
    end = [line for one in totals for line in one]
    tall = sum(map(len, notes))
    if height is None:
        gap: list[Line] = [[]] if hottest and notes else []
        return [*title, *head, *body, *end, *hottest, *gap, *_cut(notes, _TALLEST_NOTES)]
    room = max(0, height - len(title) - len(head) - len(end))
    if room < len(body):
        room -= min(1, tall) + 1
        shown = max(1, room // max(1, len(head)))
        body = [line for one in workers[:shown] for line in one]
        body.append([Cell(f"… and {len(workers) - shown} more", "dim")])
        return [*title, *head, *body, *end, *_cut(notes, 1)]
    room -= len(body)
    prefixes = room - min(tall, _SURE_NOTES)
    hottest = hottest[:prefixes] if prefixes >= _LOWEST_HOTTEST else []
    return [*title, *head, *body, *end, *hottest, *_cut(notes, room - len(hottest))]


def _kept(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None
) -> list[int]:
    """Which of them have room in one line: the most telling, and last those in which all is 0."""
    if width is None:
        return list(range(len(columns)))
    heads = [column.head for column in columns]
    bare = [head for head in _SPARE if _is_bare(row[heads.index(head)] for row in rows)]
    kept, left = list[int](), width
    for head in [*(one for one in _TELLING if one not in bare), *bare]:
        at = heads.index(head)
        column = columns[at]
        longest = max(len(head), column.least, *(len(row[at].text) for row in rows))
        longest = longest if column.most is None else min(longest, max(column.most, len(head)))
        needed = longest + (_GAP if kept else 0)
        if not kept or needed <= left:
            kept.append(at)
            left -= needed
    return sorted(kept)


def _is_bare(cells: Iterable[Cell]) -> bool:
    return all(cell.text in ("0", "-", "") for cell in cells)


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
        return [[Cell("kvevents top", "bold cyan")], [Cell(_fitting(text, width))]]
    return [[Cell("kvevents top", "bold cyan"), Cell(f"  {clock}  {text}")]]


def _cells(row: Row) -> list[Cell]:
    link = Cell(row.link, {"up": "green", "down": "bold red"}.get(row.link, ""))
    rates = [row.events_per_s, row.stored_per_s, row.removed_per_s]
    return [
        Cell(row.worker, "bold"),
        Cell("-" if row.rank is None else str(row.rank)),
        link,
        *(Cell("-" if rate is None else short_number(rate)) for rate in rates),
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
        sum(row.events_per_s or 0.0 for row in rows),
        sum(row.stored_per_s or 0.0 for row in rows),
        sum(row.removed_per_s or 0.0 for row in rows),
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


def _notes(snapshot: Snapshot, width: int | None) -> list[list[Line]]:
    """What is not known: the lines of each note, once for all workers that it is of."""
    many = Counter(row.worker for row in snapshot.rows)
    who = dict[str, list[str]]()
    for row in snapshot.rows:
        name = row.worker if many[row.worker] == 1 else f"{row.worker}/{row.rank}"
        for note in row.notes:
            who.setdefault(note, []).append(name)
    told: list[list[Line]] = []
    for note, names in who.items():
        text = f"{_listed(names, None if width is None else width - len(note) - 2)}: {note}"
        parts = [text] if width is None else textwrap.wrap(text, max(20, width))
        told.append([[Cell(part, "yellow")] for part in parts])
    return told


def _listed(names: Sequence[str], width: int | None) -> str:
    """As many of them as fit, at least one, and how many more there are."""
    shown = len(names)
    while True:
        more = len(names) - shown
        text = ", ".join(names[:shown]) + (f" and {more} more" if more else "")
        if shown == 1 or width is None or len(text) <= width:
            return text
        shown -= 1


def _cut(notes: Sequence[list[Line]], most: int) -> list[Line]:
    """As many whole ones as have room in so many lines, and how many more there are."""
    for shown in range(min(len(notes), max(0, most)), -1, -1):
        told = [line for note in notes[:shown] for line in note]
        if more := len(notes) - shown:
            which = f"… and {more} more" if shown else f"{more}"
            told.append([Cell(f"{which} note{'s' if more > 1 else ''} without room", "yellow")])
        if len(told) <= most:
            return told
    return []


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
    return short_hash(int(block_hash))


def _lag(lag_s: float | None) -> str:
    if lag_s is None:
        return "-"
    if abs(lag_s) < 0.99995:  # what is shown as 1.0s has a letter less than 1000.0ms
        return f"{lag_s * 1000:.1f}ms"
    return f"{lag_s:.1f}s" if abs(lag_s) < 10_000 else f"{lag_s:.1e}s"
