"""publisher.tools.{top,rates,prefixes,screen}: counts per second, hot prefixes, and a table that fits."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, Namespace, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.codec import encode_batch
from kvevents.events import KVEventBatch
from kvevents.follower import Step
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from kvevents.hashing import BlockHash
from kvevents.message import Channel
from publisher.cli.commands import parser_of
from publisher.cli.top import _SORTS
from publisher.tools.fleet.prefixes import Prefixes
from publisher.tools.fleet.rates import Lags, Rates
from publisher.tools.fleet.screen import render
from publisher.tools.fleet.state import Prompt, State
from publisher.tools.fleet.top import SORTS, Board, Hot, Row, Snapshot, _ordered, lines
from publisher.tools.source import Capture, Sources

GPU = StorageMedium.GPU


# ------------------------------------------------------------------------------------------ rates


def test_rates_are_of_the_window() -> None:
    """What is older does not count; before there is so much, what there is."""
    rates = Rates(2, window_s=10)
    assert rates.per_second(5.0) == [0, 0]
    rates.look(100.0)
    rates.add(101.0, (8, 0))
    assert rates.per_second(104.0) == [2, 0]
    rates.add(120.5, (30, 5))
    assert rates.per_second(121.0) == [3, 0.5]
    assert rates.per_second(140.0) == [0, 0]


def test_rates_of_all_the_time() -> None:
    """Until it was looked at last, or until now."""
    rates = Rates(1, window_s=None)
    rates.add(100.0, (10,))
    assert rates.per_second(None) == [10]  # a second at least
    rates.look(120.0)
    assert rates.per_second(None) == [0.5]
    assert rates.per_second(200.0) == [0.1]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), max_size=30))
def test_rates_count_what_a_list_would(told: list[tuple[float, int]]) -> None:
    """In order of time, the window's sum is that of the events in it."""
    rates, now = Rates(1, window_s=10), 100.5
    rates.look(0.0)
    for at, count in sorted(told):
        rates.add(at, (count,))
    (found,) = rates.per_second(now)
    assert found * 10.5 == pytest.approx(sum(count for at, count in told if int(at) >= 90))


def test_lags_are_shown_as_they_are() -> None:
    """Below zero too; what is no number is left out."""
    lags = Lags()
    assert lags.quantiles(0.5) == [None]
    for lag in (float("nan"), float("inf"), -2.0, 1.0, 3.0, 9.0):
        lags.add(lag)
    assert lags.quantiles(0, 0.5, 0.99) == [-2, 3, 9]


# --------------------------------------------------------------------------------------- prefixes


def name(number: int) -> BlockHash:
    return BlockHash(number)


def test_a_prefix_goes_to_where_it_branches() -> None:
    """1-2-3 then 4 and 5: up to 3; beneath are all five, and the tip is held by one rank of two."""
    prefixes = Prefixes()
    prefixes.second = 7
    for number, parent in ((1, None), (2, 1), (3, 2), (4, 3), (5, 3)):
        prefixes.stored(0, name(number), None if parent is None else name(parent))
    prefixes.stored(1, name(1), None)
    (one,) = prefixes.hottest(3)
    assert (one.root, one.tip, one.blocks, one.beneath, one.held_by) == (1, 3, 3, 5, [0])
    assert (one.stores, one.again) == (6, 0)
    prefixes.dropped(0, name(5))
    assert prefixes.hottest(1)[0].tip == 4
    prefixes.stored(0, name(5), name(3))
    (one,) = prefixes.hottest(1)
    assert (one.tip, one.stores, one.again) == (3, 7, 1)


def test_the_hottest_are_those_of_the_window() -> None:
    """Stores count for a minute, and what has none of them is not shown."""
    prefixes = Prefixes(60)
    prefixes.second = None
    for number in range(10, 15):
        prefixes.stored(0, name(number), name(number - 1) if number > 10 else None)
    prefixes.second = 100
    prefixes.stored(0, name(1), None)
    assert [one.root for one in prefixes.hottest(9)] == [1]
    prefixes.second = 101
    prefixes.stored(0, name(15), name(14))
    assert [one.root for one in prefixes.hottest(9)] == [10, 1]
    prefixes.forget(159)
    assert [(one.root, one.stores) for one in prefixes.hottest(9)] == [(10, 1), (1, 1)]
    prefixes.forget(160)
    assert [(one.root, one.stores) for one in prefixes.hottest(9)] == [(10, 1)]
    prefixes.forget(161)
    assert prefixes.hottest(9) == []


def test_circles_end() -> None:
    """A stream may say that two blocks are behind each other."""
    prefixes = Prefixes()
    prefixes.second = 0
    prefixes.stored(0, name(1), name(2))
    prefixes.stored(0, name(2), name(1))
    assert [one.blocks for one in prefixes.hottest(5)] == [2]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 2), st.integers(0, 9), st.none() | st.integers(0, 9)
        ),
        max_size=40,
    )
)
def test_nothing_is_left_of_what_is_dropped(
    told: list[tuple[bool, int, int, int | None]],
) -> None:
    """Whatever comes and goes: what is beneath the prefixes is what is held, and in the end nothing."""
    prefixes, held = Prefixes(), set[tuple[int, int]]()
    prefixes.second = 0
    for comes, rank, number, parent in told:
        if comes:
            prefixes.stored(rank, name(number), None if parent is None else name(parent))
            held.add((rank, number))
        else:
            prefixes.dropped(rank, name(number))
            held.discard((rank, number))
        found = prefixes.hottest(99)
        assert sum(one.beneath for one in found) <= len({number for _, number in held})
        assert all({(rank, one.tip) for rank in one.held_by} <= held for one in found)
    for rank, number in held:
        prefixes.dropped(rank, name(number))
    assert prefixes.hottest(99) == []
    assert not prefixes._nodes and not prefixes._beneath and not prefixes._behind._of


class Recount:
    """What `Prefixes` says, counted anew from all that has been: a block is of the prefix that the one
    before it was of when it came, or begins its own.
    """

    def __init__(self, window_s: int | None) -> None:
        self._window_s = window_s
        self._held: dict[int, set[int]] = {}
        self._above: dict[int, tuple[int | None, int]] = {}
        self._gone: set[tuple[int, int]] = set()
        self._stores: list[tuple[int, int, bool]] = []

    def stored(self, rank: int, number: int, parent: int | None, second: int | None) -> None:
        if number not in self._held:
            root = number if parent not in self._held else self._above[parent][1]
            self._above[number] = parent, root
        self._held.setdefault(number, set()).add(rank)
        again = (rank, number) in self._gone
        self._gone.discard((rank, number))
        if second is not None:
            self._stores.append((second, self._above[number][1], again))

    def dropped(self, rank: int, number: int) -> None:
        if rank not in self._held.get(number, ()):
            return
        self._gone.add((rank, number))
        self._held[number].discard(rank)
        if not self._held[number]:
            del self._held[number]

    def hottest(self, now: int) -> list[tuple[int, int, int, int, list[int], int, int]]:
        found = []
        for root in self._held:
            told = [
                again
                for second, of, again in self._stores
                if of == root and (self._window_s is None or second > now - self._window_s)
            ]
            beneath = [one for one in self._held if self._above[one][1] == root]
            if told and beneath:
                tip, length = self._chain(root)
                holders = sorted(self._held[tip])
                found.append((root, tip, length, len(beneath), holders, len(told), sum(told)))
        return sorted(found, key=lambda one: (-one[5], -one[3], -one[0]))

    def _chain(self, root: int) -> tuple[int, int]:
        tip, length = root, 1
        while True:
            behind = [one for one in self._held if self._above[one][0] == tip]
            if len(behind) != 1 or behind[0] == root:
                return tip, length
            tip, length = behind[0], length + 1


tree_steps = st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 15), st.none())
odd_steps = st.tuples(
    st.booleans(), st.integers(0, 2), st.integers(1, 6), st.none() | st.integers(1, 6)
)


@settings(max_examples=300)
@given(
    st.lists(tree_steps, max_size=60) | st.lists(odd_steps, max_size=60),
    st.booleans(),
    st.sampled_from([None, 3]),
    st.integers(0, 9),
)
@example(
    [
        (True, 0, 8, 4),
        (True, 0, 9, 8),
        (True, 0, 4, None),
        (False, 0, 8, None),
        (True, 0, 8, 4),
        (False, 0, 9, None),
    ],
    False,
    None,
    0,
)
def test_prefixes_are_what_a_recount_says(
    told: list[tuple[bool, int, int, int | None]],
    is_tree: bool,
    window_s: int | None,
    replayed: int,
) -> None:
    """Of any stream, also of a tree that is joined in the middle, so that blocks come and go behind ones
    that were never told: after every step the hottest are those of a count of all that was.
    """
    prefixes, recount = Prefixes(window_s), Recount(window_s)
    for at, (comes, rank, number, odd) in enumerate(told):
        parent = (number // 2 or None) if is_tree else odd
        second = None if at < replayed else at // 2
        prefixes.second = second
        if not comes:
            prefixes.dropped(rank, name(number))
            recount.dropped(rank, number)
        elif rank not in recount._held.get(number, ()):  # an index tells of new ones alone
            prefixes.stored(rank, name(number), None if parent is None else name(parent))
            recount.stored(rank, number, parent, second)
        prefixes.forget(at // 2)
        assert [tuple(one) for one in prefixes.hottest(99)] == recount.hottest(at // 2)
        assert [tuple(one) for one in prefixes.hottest(2)] == recount.hottest(at // 2)[:2]


# ------------------------------------------------------------------------------------------ board


def capture(path: Path, *batches: tuple[float, list[Event]]) -> Capture:
    """Each batch comes at its second, 2 ms after its time."""
    told = [
        pack_message(
            int(at * 1e9) + 2_000_000,
            Channel.LIVE,
            live_frames(b"", seq, encode_batch(KVEventBatch(at, events, 0))),
        )
        for seq, (at, events) in enumerate(batches)
    ]
    path.write_bytes(capture_start(CaptureHead(endpoint="tcp://h:1")) + b"".join(told))
    return Capture(path)


def test_a_capture_shows_its_end_and_rates_over_its_time(tmp_path: Path) -> None:
    """Events and blocks per second from the first message to the last, lags, hot prefixes."""
    first: list[Event] = [BlockStored([1, 2], None, [1, 2], 1, medium=GPU)]
    then: list[Event] = [
        BlockStored([3], 2, [3], 1, medium=GPU),
        BlockRemoved([3], GPU),
        BlockStored([3], 2, [3], 1, medium=StorageMedium.CPU),
    ]
    source = capture(tmp_path / "c", (1000.0, first), (1010.0, then))
    board = Board([source], windowed=False)
    for step in source.steps():
        board.take(source, step)
    (row,) = board.snapshot().rows
    assert (row.events_per_s, row.stored_per_s, row.removed_per_s) == (0.4, 0.4, 0.1)
    assert (row.blocks["GPU"], row.blocks["CPU_PINNED"], row.held, row.seq) == (2, 1, 3, 1)
    assert row.lag_p50_s == pytest.approx(0.002, abs=1e-4)
    assert (row.link, row.gaps, row.lost, row.restarts) == ("file", 0, 0, 0)
    (hot,) = board.snapshot().hottest
    assert (hot.root, hot.tip, hot.blocks, hot.tokens, hot.workers) == ("1", "3", 3, 3, 1)
    assert (hot.stores, hot.again) == (4, 1)


def test_what_is_replayed_is_held_and_no_rate(tmp_path: Path) -> None:
    """A snapshot shows what is held; it is no store of now. A clear leaves no prefix."""
    block = BlockStored([1], None, [1], 1, medium=GPU)
    answers = [
        [b"", b"", (4).to_bytes(8, "big"), encode_batch(KVEventBatch(1.0, [block], 0))],
        [b"", b"", b"\xff" * 8, b""],
    ]
    live = live_frames(b"", 5, encode_batch(KVEventBatch(1.0, [AllBlocksCleared()], 0)))
    told = [(Channel.ASKED, replay_request(JOIN)), *((Channel.ANSWER, one) for one in answers)]
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2")
    for more in ([], [(Channel.LIVE, live)]):
        records = [pack_message(at, *one) for at, one in enumerate([*told, *more])]
        (tmp_path / "c").write_bytes(capture_start(head) + b"".join(records))
        source = Capture(tmp_path / "c")
        board = Board([source], windowed=False)
        for step in source.steps():
            board.take(source, step)
        (row,) = board.snapshot().rows
        assert (row.held, row.stored_per_s, row.replays) == (0 if more else 1, 0, 1)
        found = [(one.root, one.stores) for one in board.snapshot().hottest]
        assert found == []


@pytest.mark.parametrize("over", [False, True])
def test_rates_begin_when_a_stream_is_in_step(tmp_path: Path, over: bool) -> None:
    """What comes during the join is the replay's to tell: there is no rate before it is over, and then it
    is of the time since the first batch that waited for it.
    """
    block = BlockStored([1], None, [1], 1, medium=GPU)

    def batch(at: float) -> bytes:
        return encode_batch(KVEventBatch(float(at), [block], 0))

    told = [
        (0, Channel.ASKED, replay_request(JOIN)),
        (1, Channel.ANSWER, [b"", b"", (10).to_bytes(8, "big"), batch(0)]),
        *((at, Channel.LIVE, live_frames(b"", 5 + at, batch(at))) for at in (4, 5, 6, 7, 8, 9)),
        *([(10, Channel.ANSWER, [b"", b"", b"\xff" * 8, b""])] * over),
    ]
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2")
    records = [pack_message(at * 10**9, channel, frames) for at, channel, frames in told]
    (tmp_path / "c").write_bytes(capture_start(head) + b"".join(records))
    source = Capture(tmp_path / "c")
    board = Board([source], windowed=False)
    for message in source.messages():
        board.take(source, Step(message, source.follower.take(message)))
    (row,) = board.snapshot().rows
    assert (board.joined, board.joins) == (int(over), not over)
    rates = (row.events_per_s, row.stored_per_s, row.lag_p50_s)
    if over:  # seq 11 to 14: they came at 6 and until 10
        assert rates == (1.0, 1.0, 0.0)
        return
    assert rates == (None, None, None)
    assert row.notes == ["its replay is not over: 6 batches wait behind it"]
    assert "-" in text_of(board.snapshot(), None)[2].split()


def row_of(file: Path, head: bytes, told: Sequence[tuple[Channel, list[bytes]]]) -> Row:
    """The one row of a capture of these, which is written to `file`."""
    file.write_bytes(head + b"".join(pack_message(at, *one) for at, one in enumerate(told)))
    with Sources([file]) as sources:
        board = Board(sources.all, windowed=False)
        for one in sources.steps():
            assert one is not None, "nothing is live"
            board.take(*one)
    (row,) = board.snapshot().rows
    return row


def test_what_is_lost_by_us_is_no_finding(tmp_path: Path) -> None:
    """Batches that did not come while too little was read are counted apart, and said; the same without
    that is the publisher's.
    """
    head = capture_start(CaptureHead(endpoint="tcp://h:1"))
    empty = encode_batch(KVEventBatch(1.0, [], 0))
    for behind in (True, False):
        told = [
            (Channel.LIVE, live_frames(b"", 0, empty)),
            (Channel.BEHIND, []),
            *([] if behind else [(Channel.ABREAST, [])]),
            (Channel.LIVE, live_frames(b"", 4, empty)),
            (Channel.ABREAST, []),
            (Channel.LIVE, live_frames(b"", 5, empty)),
        ]
        file = tmp_path / "c"
        row = row_of(file, head, told)
        assert (row.gaps, row.lost, row.lost_perhaps_ours) == (1, 3, 3 if behind else 0)
        assert row.findings == (0 if behind else 1)
        assert any("perhaps our own" in note for note in row.notes) is behind
        assert any("perhaps by us alone" in note for note in row.notes) is behind


def test_a_replay_that_stopped_before_its_end_is_noted(tmp_path: Path) -> None:
    """What it had still to tell is not in the table."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2"))
    clear = encode_batch(KVEventBatch(1.0, [AllBlocksCleared()], 0))
    for frames, notes in (
        ([], ["a replay stopped before its end"]),
        (replay_end(delimited=True), []),
    ):
        told = [
            (Channel.ASKED, replay_request(JOIN)),
            (Channel.ANSWER, replay_answer(b"", 3, clear, delimited=True)),
            *([(Channel.ANSWER, frames)] if frames else []),
        ]
        file = tmp_path / "c"
        row = row_of(file, head, told)
        assert [note.partition(":")[0] for note in row.notes if "replay" in note] == notes


def test_ranks_without_end_cost_no_memory(tmp_path: Path) -> None:
    """What is kept is of so many ranks only, the notes say how many others there were, and once."""
    head = capture_start(CaptureHead(endpoint="tcp://h:1"))
    told = [
        live_frames(b"", seq, msgspec.msgpack.encode([1.0, [BlockStored([1], None, [1], 1)], seq]))
        for seq in range(1200)
    ]
    file = tmp_path / "c"
    file.write_bytes(head + b"".join(pack_message(1, Channel.LIVE, one) for one in told))
    source = Capture(file)
    board = Board([source], windowed=False)
    for step in source.steps():
        board.take(source, step)
    assert len(board._watched) == len(board._paces) == len(board.snapshot().rows) == 1024
    notes = [note for row in board.snapshot().rows for note in row.notes]
    assert notes == ["only 1024 ranks are looked at: 176 batches of others left out"]


odd_ints = st.sampled_from([0, 1, 2, 3, -1, 2**63, 2**64 - 1])
odd_hashes = st.lists(odd_ints | st.sampled_from([b"", b"\1", b"\xff" * 32]), max_size=3)
odd_words = st.sampled_from([None, "", "x", "\x1b[2J", "GPU", "REMOTE", "full_attention", 7])
odd_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "?"])},
    optional={
        "block_hashes": odd_hashes,
        "parent_block_hash": odd_ints | st.none(),
        "token_ids": st.lists(odd_ints, max_size=4),
        "block_size": st.sampled_from([0, 1, 2, -1, 2**63]),
        "medium": odd_words,
        "lora_name": odd_words,
        "extra_keys": st.none() | st.lists(st.none() | st.lists(odd_words, max_size=1), max_size=2),
        "group_idx": st.none() | odd_ints,
        "kv_cache_spec_kind": odd_words,
        "locality": odd_words,
    },
)
odd_batches = st.tuples(
    st.sampled_from([1.0, -1e300, float("nan"), 5]),
    st.lists(odd_events, max_size=4),
    st.sampled_from([None, 0, 1, -1, 2**62]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(odd_ints, odd_batches | st.binary(max_size=9)), max_size=6))
def test_anything_may_come(
    tmp_path: Path, told: list[tuple[int, tuple[object, ...] | bytes]]
) -> None:
    """Whatever is on the wire: it is counted or shown, nothing of it raises, or reaches a terminal."""
    file, head = tmp_path / "odd", capture_start(CaptureHead(endpoint="tcp://h:1"))
    frames = [
        [b"", (seq % 2**64).to_bytes(8, "big"), one]
        if isinstance(one, bytes)
        else live_frames(b"", seq % 2**63, msgspec.msgpack.encode(one))
        for seq, one in told
    ]
    file.write_bytes(
        head + b"".join(pack_message(at, Channel.LIVE, f) for at, f in enumerate(frames))
    )
    source = Capture(file)
    board = Board([source], windowed=False)
    for step in source.steps():
        board.take(source, step)
    json.loads(msgspec.json.encode(board.snapshot()))
    assert render(board.snapshot(), 80).plain.replace("\n", "").isprintable()
    state = State(board.fleet, set())
    prompt = Prompt([1, 2, 3], Namespace(lora_name="x"))
    json.loads(msgspec.json.encode(state.document(prompt, blocks=True)))
    for width in (80, None):
        for line in [*state.table(width), *state.overlap_table(prompt, width)]:
            assert all(cell.text.isprintable() for cell in line)
            assert width is None or sum(len(cell.text) for cell in line) <= 80
    assert all(line.isprintable() for line in state.block_lines(None))
    for rank in board.fleet.ranks:
        resident = rank.index.resident
        assert all(rank.index.count(medium) == len(held) for medium, held in resident.items())


# ------------------------------------------------------------------------------------------- text


def row(number: int, **more: object) -> Row:
    """A worker with numbers that are all different."""
    base = 1000 * number
    told: dict[str, object] = {
        "worker": f"engine-{number}.kv.svc.cluster.local:5557",
        "rank": number,
        "link": "up",
        "events_per_s": base + 11.0,
        "stored_per_s": base + 12.0,
        "removed_per_s": base + 13.0,
        "blocks": {"GPU": base + 14, "CPU_PINNED": base + 15, "DISK": base + 16}
        | {"EXTERNAL": base + 17},
        "held": base,
        "block_size": 16,
        "lag_p50_s": -0.0123,
        "lag_p99_s": base + 18.5,
        "seq": 10**9 + number,
        "gaps": base + 19,
        "lost": base + 20,
        "lost_perhaps_ours": 0,
        "replays": base + 21,
        "restarts": base + 22,
        "findings": base + 23,
        "notes": [],
    }
    return Row(**told | more)  # type: ignore[arg-type]


def snapshot(workers: int) -> Snapshot:
    """Of so many workers."""
    hot = [
        Hot(
            root=str(2**62 + number),
            tip=str(-(2**62) - number),
            blocks=100 + number,
            tokens=16 * (100 + number),
            beneath=54321,
            workers=7,
            stores=4321,
            again=321,
        )
        for number in range(5)
    ]
    rows = [row(number) for number in range(1, workers + 1)]
    return Snapshot(at_s=0.0, window_s=10, rows=rows, hottest=hot)


ALL_AT = 220
"""So wide is a terminal that has room for all columns."""


def text_of(shown: Snapshot, width: int | None, height: int | None = None) -> list[str]:
    """The lines of it."""
    return ["".join(cell.text for cell in line).rstrip() for line in lines(shown, width, height)]


def heads(shown: Snapshot, width: int) -> set[str]:
    """The columns that there is room for."""
    (head,) = (line for line in text_of(shown, width) if line.startswith("worker"))
    return set(re.split(r"  +", head))


@pytest.mark.parametrize("width", [ALL_AT, None])
def test_a_wide_terminal_has_every_number(width: int | None) -> None:
    """Of every row, and what is of all of them."""
    shown = snapshot(3)
    words = set(re.split(r"\s+", "\n".join(text_of(shown, width))))
    for one in shown.rows:
        number = one.rank
        assert number is not None
        numbers = {f"{1000 * number + n}" for n in (*range(11, 18), *range(19, 24))}
        assert numbers | {f"{1000 * number + 18.5}s", "-12.3ms", str(one.seq)} <= words
    for hot in shown.hottest:
        numbers = {str(hot.blocks), str(hot.tokens), "54321", "7", "4321", "321"}
        assert numbers | {"400000000000", "bfffffffffff"} <= words
    assert "total" in words and "6033" in words  # events/s of all


@pytest.mark.parametrize("width", range(30, ALL_AT, 10))
def test_a_row_is_one_line_at_any_width(width: int) -> None:
    """Columns are left out instead, and a wider terminal never tells less of what is lost."""
    shown = snapshot(3)
    told = text_of(shown, width)
    assert max(map(len, told)) <= width
    assert sum(line.startswith(("engine-", "eng", "total")) for line in told) == 4
    at = next(at for at, line in enumerate(told) if line.startswith("worker"))
    assert told[at + 4].startswith("total")
    assert width < 60 or "lost" in heads(shown, width)


def test_what_is_left_out_first() -> None:
    """At 80 columns: what is 0 everywhere, then what tells least; troubles, and ranks, stay."""
    fine: dict[str, object] = dict.fromkeys(("gaps", "lost", "restarts", "findings"), 0)
    healthy = [row(number, rank=0, worker=f"w{number}", **fine) for number in (1, 2)]
    of = Snapshot(at_s=0.0, window_s=10, rows=healthy, hottest=[])
    assert {"link", "ev/s", "stored/s", "GPU", "CPU", "lag p50"} <= heads(of, 80)
    assert not {"rank", "lost", "replays"} & heads(of, 80)
    assert {"rank", "lost", "replays", "lag p99"} <= heads(of, ALL_AT)
    ill = [row(1, rank=rank, worker="w1", **fine | {"lost": 5, "findings": 1}) for rank in (0, 1)]
    of = Snapshot(at_s=0.0, window_s=10, rows=ill, hottest=[])
    assert {"rank", "lost", "findings", "ev/s", "GPU"} <= heads(of, 80)


@pytest.mark.parametrize(("workers", "prefixes"), [(1, 10), (3, 10), (8, 9), (12, 5), (17, 0)])
def test_rows_come_first(workers: int, prefixes: int) -> None:
    """In 80 x 24: every worker, with its notes in one line; then the prefixes that have room."""
    note = "joined live: what was stored before is unknown"
    rows = [row(number, rank=0, worker=f"w{number}", notes=[note]) for number in range(workers)]
    hottest = snapshot(1).hottest * 2
    told = text_of(Snapshot(at_s=0.0, window_s=10, rows=rows, hottest=hottest), 80, 24)
    assert len(told) <= 24
    assert [f"w{number}" for number in range(workers)] == [
        line.split()[0] for line in told if re.match(r"w\d", line) and note not in line
    ]
    assert sum("400000000000" in line for line in told) == prefixes
    (notes,) = (line for line in told if note in line)
    assert notes.startswith("w0: " if workers == 1 else "w0, w1")
    assert told[-1] == notes


def test_notes_that_are_alike_are_one() -> None:
    """Of all that have them; of more than fit in a line the first, and how many more; ranks are named
    where there are several.
    """
    rows = [
        row(1, worker="a", rank=0, notes=["late", "same"]),
        row(1, worker="a", rank=1, notes=["same"]),
        row(2, worker="b", rank=0, notes=["same"]),
        *(row(number, worker=f"worker-{number}", notes=["x" * 30]) for number in range(40)),
    ]
    told = text_of(Snapshot(at_s=0.0, window_s=10, rows=rows, hottest=[]), 80)
    late, same, long = told[-3:]
    assert late == "a/0: late"
    assert same == "a/0, a/1, b: same"
    assert long.startswith("worker-0, worker-1, worker-2 and 37 more: x") and len(long) <= 80


def test_rows_are_ordered_as_asked_for(tmp_path: Path) -> None:
    """The largest first, names from the first on; what has no number last; ranks stay with their worker;
    each column that may be asked for is one.
    """
    rows = [
        row(1, worker="c", rank=0, lost=0, lag_p50_s=None, events_per_s=5.0),
        row(1, worker="c", rank=1, lost=None, lag_p50_s=0.2, events_per_s=None),
        row(2, worker="a", rank=0, lost=7, lag_p50_s=0.3, events_per_s=9.0),
        row(2, worker="a", rank=1, lost=None, lag_p50_s=-0.1, events_per_s=0.0),
        row(3, worker="b", rank=0, lost=3, lag_p50_s=0.1, events_per_s=7.0),
    ]

    def order(column: str) -> str:
        return " ".join(f"{one.worker}{one.rank}" for one in _ordered(rows, column))

    assert order("worker") == "a0 a1 b0 c0 c1"
    assert order("lost") == "a0 a1 b0 c0 c1"
    assert order("ev/s") == "a0 b0 c0 c1 a1"
    assert order("lag") == "a0 c1 b0 a1 c0"
    parsed = parser_of("top").parse_args(["top", "x", "--sort", "lost", "--json"])
    assert (parsed.sort, parsed.output, parsed.prefixes) == ("lost", "json", 10)
    assert _SORTS == SORTS and all(order(column) for column in SORTS)
    block = BlockStored([1], None, [1], 1, medium=GPU)
    many = [
        capture(tmp_path / name, (1.0, [block] * stores))
        for name, stores in (("a", 1), ("b", 3), ("c", 2))
    ]
    board = Board(many, windowed=False, hottest=0, sort="stored/s")
    for source in many:
        for step in source.steps():
            board.take(source, step)
    shown = board.snapshot()
    assert [Path(one.worker).name for one in shown.rows] == ["b", "c", "a"]
    assert shown.hottest == [] and not any("hottest" in line for line in text_of(shown, 80))


NAMES = ["a", "vllm-decode-7f9c6d5b8-x2x4q.inference.svc.cluster.local:5557", "w" * 300]
large = st.integers(0, 9_999_999)
rates = st.floats(0, 9_999_999)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([80, 100, 120, 200]),
    st.lists(
        st.builds(
            lambda which, counts, speeds, notes: row(
                which,
                worker=NAMES[which % 3],
                rank=which,
                blocks=dict(zip(["GPU", "CPU_PINNED", "DISK", "EXTERNAL"], counts, strict=False)),
                events_per_s=speeds[0],
                stored_per_s=speeds[1],
                removed_per_s=speeds[2],
                seq=2**63 - 1 - counts[0],
                lag_p50_s=-speeds[0],
                gaps=counts[4],
                lost=counts[5],
                replays=counts[6],
                notes=notes,
            ),
            st.integers(0, 1023),
            st.lists(large, min_size=7, max_size=7),
            st.lists(rates, min_size=3, max_size=3),
            st.lists(st.sampled_from(["not connected", "stale: 3 batches lost " * 9, "x" * 250])),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_no_line_is_wider_than_the_terminal(width: int, rows: list[Row]) -> None:
    """Whatever the names, numbers and notes: as text to a pipe, and as what rich writes, where nothing is
    cropped away either.
    """
    shown = Snapshot(at_s=0.0, window_s=10, rows=rows, hottest=snapshot(1).hottest, left_out=10**9)
    text = ["".join(cell.text for cell in line).rstrip() for line in lines(shown, width)]
    assert max(map(len, text)) <= width
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(shown, width), end="")
    assert [line.rstrip() for line in captured.get().split("\n")] == text


def test_rows_are_left_out_where_the_terminal_is_low() -> None:
    """As few as can be, and it is said how many workers are not shown; a note keeps its line."""
    shown = snapshot(40)
    shown.rows[0].notes.append("not connected")
    told = text_of(shown, 140, 30)
    assert len(told) == 30
    assert sum(line.startswith("eng") for line in told) == 25 + 1  # its note
    assert "… and 15 more" in told and told[-1].endswith(": not connected")
    assert not any("hottest" in line for line in told)


def test_notes_and_what_is_down(tmp_path: Path) -> None:
    """A worker without a connection has a row of nothing and a note."""
    gone = row(1, link="down", rank=None, seq=None, lag_p50_s=None, notes=["not connected"])
    shown = Snapshot(at_s=0.0, window_s=10, rows=[gone], hottest=[])
    text = render(shown, 80).plain
    assert "engine-1.kv.svc.cluster.local:5557: not connected" in text
    assert "0 of 1 up" in text and "total" not in text
