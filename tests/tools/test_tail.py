"""publisher.tools: what `kvevents tail` writes; nothing that a stranger smuggles in."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    Skipped,
    StorageMedium,
)
from kvevents.check import Finding, Place
from kvevents.follower import Malformed, Told
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.message import Channel, Message
from kvevents.reading import Reading, read
from publisher.tools.colour import painter
from publisher.tools.source import Address, Capture
from publisher.tools.start import Start, parse_start
from publisher.tools.tail.formats import LETTERS, Format
from publisher.tools.tail.hexdump import hexdump
from publisher.tools.tail.hints import Seen, Watch
from publisher.tools.tail.kept import Kept
from publisher.tools.tail.lines import Lines, clock
from publisher.tools.tail.notice import (
    Notice,
    of_earlier,
    of_finding,
    of_gap,
    of_lost,
    of_malformed,
    of_restart,
    of_skipped,
    of_undecodable,
)
from publisher.tools.tail.objects import Objects
from publisher.tools.tail.stream import Stream

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
PLAIN = painter(colours=False)


def stream(name: str = "w") -> Stream:
    return Stream(Capture(Path(name)), name, None)


def reading(*events: Event, ts: float = 1.5, topic: bytes = b"") -> Reading:
    told = Told(7, b"", replayed=True, topic=topic, at_ns=2_500_000_000)
    return Reading(told, KVEventBatch(ts, list(events), 3))


def lines_of(one: Reading, verbose: int = 0) -> list[str]:
    """Text lines, with the time of day, which depends on where this runs."""
    source = stream()
    lines = Lines([source], PLAIN, verbose)
    lines.begin(source, one)
    return [lines.event(at, event) for at, event in enumerate(one.events)]


def text(one: Reading, verbose: int = 0) -> list[list[str]]:
    return [line.split()[1:] for line in lines_of(one, verbose)]


def objects(one: Reading | Notice) -> list[dict[str, Any]]:
    source, writer = stream(), Objects()
    if isinstance(one, Notice):
        return [json.loads(writer.notice(source, one))]
    writer.begin(source, one)
    return [json.loads(writer.event(at, event)) for at, event in enumerate(one.events)]


def said(notice: Notice) -> str:
    """A notice as text, without the time."""
    return Lines([stream()], PLAIN, 0).notice(stream(), notice)[13:].rstrip("\n")


# ------------------------------------------------------------------------------------------- text


def test_events_as_text() -> None:
    """A line for each event: time, seq, kind, medium, how many blocks, the first one, its parent, how
    many tokens, and the namespace where there is one.
    """
    stored = BlockStored([1 << 60, 2], None, [1, 2, 3, 4], 2, medium=GPU)
    child = BlockStored([-1], 2, [5, 6], 2, medium=CPU, lora_name="ad", cache_salt="s")
    assert text(reading(stored, child, BlockRemoved([2], CPU), AllBlocksCleared())) == [
        ["7", "stored", "GPU", "2", "100000000000", "←", "start", "4"],
        [
            *("7", "stored", "CPU_PINNED", "1", "ffffffffffff", "←", "000000000002", "2"),
            *("lora_name='ad'", "cache_salt='s'"),
        ],
        ["7", "removed", "CPU_PINNED", "1", "000000000002"],
        ["7", "cleared", "replayed"],
    ]


def test_columns_stay_within_80() -> None:
    """Each stands below its title; a line of one source without names fits a terminal."""
    many = BlockStored([1] * 4096, -2, [5] * 65536, 16, medium=CPU)
    header = Lines([stream()], PLAIN, 0).header.rstrip("\n")
    for line in lines_of(reading(many, BlockStored([1], None, [5], 1, medium=GPU))):
        assert len(line) <= 81, "80, and the line end"
        for title, end in (("seq", "7"), ("blocks", None), ("tokens", None)):
            at = header.index(title) + len(title)
            assert line[at - 1].isdigit() and not line[at].isdigit()
            assert end is None or line[at - 1] == end
        assert line.index("←") == header.index("←")
        assert line[header.index("medium") - 1] == " "


def test_more_is_on_the_same_line() -> None:
    """-v: block size, topic, whether it is replayed, all hashes, the first tokens; -vv: all of them."""
    stored = BlockStored([1, 2], None, list(range(20)), 10, medium=GPU, group_idx=1)
    (line,) = text(reading(stored, topic=b"kv\x1b"), verbose=1)
    for part in ("size=10", "topic=kv\\x1b", "replayed", "group_idx=1"):
        assert part in line
    assert "hashes=000000000001,000000000002" in line
    assert "tokens=0,1,2,3,4,5,6,7,…" in line
    (line,) = text(reading(stored), verbose=2)
    assert f"tokens={','.join(map(str, range(20)))}" in line
    live = Reading(
        Told(7, b"", replayed=False, at_ns=2_500_000_000), KVEventBatch(1.5, [stored], 0)
    )
    assert "lag=1000.0ms" in text(live, verbose=1)[0]


def test_the_time_is_of_the_batch() -> None:
    """Hours to milliseconds, and a `?` for a ts that is no time."""
    line = clock(1_700_000_000.25)
    assert (line[2], line[5], line[8:]) == (":", ":", ".250")
    for ts in (float("nan"), float("inf"), -1e300, 1e300):
        assert clock(ts) == f"{'?':12}"
    for ts in (-1e-20, -0.5, 0.9999999):
        assert clock(ts)[8] == "." and len(clock(ts)) == 12


@pytest.mark.parametrize("hashes", [[b"\xff" * 32], [b"\xff"], [2**64 - 1], [-(2**63)], []])
def test_any_hash_has_a_short_form(hashes: list[int | bytes]) -> None:
    """Digests, unsigned and signed 64-bit ones, and none at all."""
    (line,) = text(reading(BlockRemoved(hashes)))
    assert len(line[-1]) == (12 if hashes else 1)


def test_sources_and_ranks_have_columns_once_there_are_several() -> None:
    """One source and rank: none. A second rank: a column, and the header once more. Two sources: both."""
    one, other, event = stream("a"), stream("longer"), AllBlocksCleared()
    lines = Lines([one], PLAIN, 0)
    one.ranks.add(3)
    assert not lines.needs_header(one)
    one.ranks.add(4)
    assert lines.needs_header(one) and not lines.needs_header(one)
    lines.begin(one, reading(event))
    assert lines.event(0, event).split()[1:] == ["3", "7", "cleared", "replayed"]
    assert "rank" in lines.header
    lines = Lines([one, other], PLAIN, 0)
    written = []
    for each in (one, other):
        lines.begin(each, reading(event))
        written.append(lines.event(0, event))
    assert [line.split()[1:] for line in written] == [
        ["a/3", "7", "cleared", "replayed"],
        ["longer/3", "7", "cleared", "replayed"],
    ]
    assert len(set(map(len, written))) == 1
    assert lines.header.index("seq") + 2 == written[0].index("7 cleared")


def test_colours_are_around_words() -> None:
    """Of the medium, and of what is wrong; without them the line is the same."""
    event = BlockStored([1], None, [1], 1, medium=CPU)
    source = stream()
    lines = Lines([source], painter(colours=True), 0)
    lines.begin(source, reading(event))
    line = lines.event(0, event)
    assert "\x1b[33mCPU_PINNED\x1b[0m" in line
    assert [line.replace("\x1b[33m", "").replace("\x1b[0m", "")] == lines_of(reading(event))
    assert "\x1b[31mGAP" in lines.notice(source, of_gap(Gap(3, 2), 0, can_ask=True))


def test_what_is_wrong_as_text() -> None:
    """Gap, loss, restart, what could not be read, what the check has found, with the earlier event."""
    assert said(of_gap(Gap(118, 3), 0, can_ask=True)) == "   118 GAP 118→121 (3 missing, asked for)"
    assert "nobody to ask: lost" in said(of_gap(Gap(1, 2), 0, can_ask=False))
    assert (
        said(of_gap(Gap(1, 2), 0, can_ask=True, own="it is ours"))
        == "     1 GAP 1→3 (2 missing, asked for; it is ours)"
    )
    assert (
        said(of_lost(Lost(3, 1), 0, brief=False, own="it is ours"))
        == "     3 LOST 3 (1 that nobody has any more; it is ours)"
    )
    assert (
        said(of_lost(Lost(3, 2), 0, brief=False)) == "     3 LOST 3…4 (2 that nobody has any more)"
    )
    assert Lines([stream()], PLAIN, 0).notice(stream(), of_lost(Lost(3, 2), 0, brief=True)) == ""
    assert said(of_restart(Restarted(0), 0, 9)) == "     0 RESTART seq 9→0 of the publisher"
    assert said(of_earlier(Lost(0, 1), 0, "")) == "       before this: 1 batch (seq 0)"
    assert (
        said(of_earlier(Lost(5, 1009), 0, ", gone"))
        == "       before this: 1,009 batches (seq 5…1013), gone"
    )
    earlier = Lines([stream()], PLAIN, 0).notice(stream(), of_earlier(Lost(0, 1), 0, ""))
    assert earlier.startswith(" " * 20 + "before"), "no time and no seq, which are later ones"
    bad = read(Told(8, b"\xc1" * 40, replayed=False))
    assert said(of_undecodable(bad)).startswith("     8 UNDECODABLE payload: ")
    assert said(of_undecodable(bad)).endswith(f"({'c1' * 16}…)")
    assert said(of_skipped(bad, Skipped(2, "why"))) == "     8 SKIPPED event 2: why"
    malformed = Malformed(Message(0, Channel.LIVE, [b"ab", b"\x1b[m"]), "2 frames")
    assert said(of_malformed(malformed)) == "       MALFORMED 2 frames (1b5b6d)"
    found = Finding(12, "orphan", "violation", Place(8, 1), "no parent", Place(3, 0))
    assert said(of_finding(found, 0)) == "     8 ORPHAN event 1: no parent (earlier: seq 3 event 0)"
    found = Finding(1, "removed-unknown", "note", Place(8), "what", blocks=3)
    assert said(of_finding(found, 0)) == "     8 REMOVED-UNKNOWN: what (3 blocks)"


# ------------------------------------------------------------------------------------------- JSON


def test_events_as_json() -> None:
    """An object for each event, with its source and its batch's ts, seq and rank; the fields are those
    of the wire.
    """
    stored = BlockStored([1, 2], 5, [1, 2, 3, 4], 2, medium=GPU, cache_salt="s")
    first, second, third = objects(reading(stored, BlockRemoved([b"\1\2"]), AllBlocksCleared()))
    common = {"source": "w", "at": 2.5, "ts": 1.5, "seq": 7, "dp_rank": 3, "replayed": True}
    assert first == common | {
        "event": 0,
        "type": "BlockStored",
        "block_hashes": ["1", "2"],
        "parent_block_hash": "5",
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "cache_salt": "s",
        "session_id": None,
        "extra_key": None,
        "extra_keys": None,
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "locality": None,
    }
    removed = {"block_hashes": ["0102"], "medium": None, "group_idx": None, "locality": None}
    assert second == common | {"event": 1, "type": "BlockRemoved"} | removed
    assert third == common | {"event": 2, "type": "AllBlocksCleared"}


def test_what_is_wrong_as_json() -> None:
    """Each is an object with a type of its own; of what cannot be read, all bytes."""
    bad = read(Told(8, b"\xc1", replayed=False))
    malformed = Malformed(Message(0, Channel.LIVE, [b"ab"]), "why")
    found = Finding(2, "twice", "violation", Place(8, 1), "what", Place(3, 0), GPU, None, 4)
    for notice, fields in (
        (
            of_skipped(bad, Skipped(2, "why")),
            {"type": "Skipped", "position": 2, "reason": "why", "seq": 8},
        ),
        (of_undecodable(bad), {"type": "Undecodable", "payload": "c1", "seq": 8}),
        (
            of_gap(Gap(3, 2), 0, can_ask=True),
            {"type": "Gap", "seq": 3, "count": 2, "asked": True, "own": False},
        ),
        (
            of_lost(Lost(3, 2), 0, brief=True, own="why"),
            {"type": "Lost", "seq": 3, "count": 2, "own": True},
        ),
        (of_restart(Restarted(4), 0, 9), {"type": "Restarted", "seq": 4, "before": 9}),
        (of_earlier(Lost(0, 9), 0, ""), {"type": "Earlier", "seq": 0, "count": 9}),
        (of_malformed(malformed), {"type": "Malformed", "frames": ["6162"], "reason": "why"}),
        (
            of_finding(found, 0),
            {
                "type": "Finding",
                "seq": 8,
                "event": 1,
                "rule": "twice",
                "invariant": 2,
                "severity": "violation",
                "earlier": {"seq": 3, "event": 0},
                "medium": "GPU",
            },
        ),
    ):
        (told,) = objects(notice)
        assert {name: told[name] for name in fields} == fields
        assert told["source"] == "w"


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 2**63 - 1, 2**53 + 1, 0, -1])
def test_64_bits_survive_json(value: int) -> None:
    """Case 41: read with floats for numbers, as jq does, a hash and a parent are still themselves."""
    source, writer = stream(), Objects()
    for event in (BlockStored([value], value, [1], 1, medium=GPU), BlockRemoved([value], GPU)):
        writer.begin(source, reading(event))
        found = json.loads(writer.event(0, event), parse_int=float)
        assert int(found["block_hashes"][0]) == value
        if found["type"] == "BlockStored":
            assert int(found["parent_block_hash"]) == value


@pytest.mark.parametrize(
    "key", [{(1, 2): 3}, {b"\xff": 1}, msgspec.msgpack.Ext(5, b"x"), b"\xff", 2**64 - 1]
)
def test_an_engines_extra_keys_are_no_obstacle(key: object) -> None:
    """Whatever MessagePack can say and JSON cannot is said somehow."""
    (found,) = objects(reading(BlockStored([1], None, [1], 1, medium=GPU, extra_keys=[[key]])))
    assert found["block_hashes"] == ["1"]
    assert found["extra_keys"][0]


# ------------------------------------------------------------------------------ formats and dumps


def formatted(template: str, *events: Event) -> str:
    source, writer, one = stream(), Format(template), reading(*events)
    writer.begin(source, one)
    return "".join(writer.event(at, event) for at, event in enumerate(events))


def test_a_format_of_ones_own() -> None:
    """Letters and escapes; a line end where there is none; `-` for what there is none of."""
    stored = BlockStored([1, b"\2" * 8], -1, [5, 6], 1, medium=GPU, lora_name="a\x1bd")
    line = formatted("%w %r %s %i %e %m %n %h %p %b %c %k %l %S %y", stored)
    assert line == "w 3 7 0 stored GPU 2 000000000001 ffffffffffff 1 2 5,6 a\\x1bd - replayed\n"
    assert formatted(r"%H\t%P\\%%", stored) == "1,0202020202020202\t-1\\%\n"
    assert formatted(r"%T %a\0", stored) == "1.5 2.500000\0"
    assert formatted("%e %m %n %h %k\\n", BlockRemoved([2], CPU), AllBlocksCleared()) == (
        "removed CPU_PINNED 1 000000000002 -\ncleared - 0 - -\n"
    )
    for letter in LETTERS:
        assert formatted(f"%{letter}", stored, AllBlocksCleared()).count("\n") == 2


def test_a_format_in_columns() -> None:
    """A width between % and letter: to the right, or with - to the left; what is longer is not cut."""
    stored = BlockStored([1 << 16], None, [5, 6], 1, medium=GPU)
    assert formatted("%4s|%-8e|%3n|%2m|%%%-3l.", stored) == "   7|stored  |  1|GPU|%-  .\n"
    with pytest.raises(ValueError, match=r"%1001s.*1\.\.1000"):
        Format("%1001s")


@pytest.mark.parametrize(
    "template",
    [
        "%q",
        "%",
        "\\",
        "\\x",
        "%s %Z",
        "%5%",
        "%-",
        "%-s",
        "%0s",
        "%08s",
        "%5",
        "%--5s",
        "%5\ns",
        "%٣s",
    ],
)
def test_a_format_that_is_none(template: str) -> None:
    """ValueError says which letter, and which there are."""
    with pytest.raises(ValueError, match="--format: "):
        Format(template)


def test_a_hexdump_is_its_bytes() -> None:
    """16 a line, offset first; the hex is the data, and dots stand for what is no ASCII."""
    data = bytes(range(256)) + b"\x1b[31mx"
    rows = list(hexdump(data))
    assert [int(row[:8], 16) for row in rows] == list(range(0, len(data), 16))
    assert bytes.fromhex("".join(row[10:58] for row in rows)) == data
    assert all(row.isascii() and row.isprintable() and len(row) <= 76 for row in rows)
    assert rows[-1].endswith(".[31mx")


@pytest.mark.parametrize(
    ("said_", "start", "asked"),
    [
        ("state", Start("state"), 2**64 - 2),
        ("beginning", Start("beginning"), 0),
        ("live", Start("live"), None),
        ("5", Start("seq", 5), 5),
        ("-5", Start("last", 5), 0),
    ],
)
def test_where_to_begin(said_: str, start: Start, asked: int | None) -> None:
    """Words, a seq, or how many of the last."""
    assert parse_start(said_) == start
    assert start.asked == asked


@pytest.mark.parametrize(
    "said_", ["", "-", "-0", "--5", "5.0", "start", "-1000001", str(2**63), "٣"]
)
def test_where_not_to_begin(said_: str) -> None:
    """ValueError names the option and what was said."""
    with pytest.raises(ValueError, match="--from: "):
        parse_start(said_)


# ----------------------------------------------------------------------------- the last so many


@given(
    said=st.lists(st.booleans(), max_size=40),
    number=st.integers(1, 5),
    beats=st.sampled_from([0, 1, 150]),
)
def test_the_last_that_say_something(said: list[bool], number: int, beats: int) -> None:
    """The last so many with events, in order, however many heartbeats are between them; and what is said
    of the stream between them.
    """
    kept, told, seq = Kept(number), [], 0
    for speaks in said:
        for _ in range(beats):
            kept.add((Reading(Told(seq, b"", replayed=False), KVEventBatch(1.0, [], 0)), []))
            seq += 1
        if speaks:
            one = Reading(
                Told(seq, b"", replayed=False), KVEventBatch(1.0, [AllBlocksCleared()], 0)
            )
            kept.add((one, []))
            told.append(seq)
        else:
            kept.add(of_gap(Gap(seq, 1), 0, can_ask=False))
            told.append(-seq - 1)
        seq += 1
    shown = [
        -(one.seq or 0) - 1 if isinstance(one, Notice) else one[0].seq
        for one in kept.entries()
        if isinstance(one, Notice) or one[0].events
    ]
    batches = [at for at, one in enumerate(told) if one >= 0]
    first = batches[-number] if len(batches) > number else 0
    assert shown == told[first:]


# ------------------------------------------------------------------------------ why nothing comes

CONNECTED = Seen(connected=True)
ADDRESS = Address("w", "tcp://h:5557", "tcp://h:5558")


def hints(*looks: tuple[float, Seen], topic: str = "") -> list[str]:
    """What is said of a publisher that looks so at these times."""
    watch = Watch(ADDRESS, topic=topic, doctor="DOCTOR", now=0.0)
    return [text for now, seen in looks for text in watch.look(seen, now)]


def with_(**changes: Any) -> Seen:
    return replace(CONNECTED, **changes)


@pytest.mark.parametrize(
    ("seen", "topic", "said"),
    [
        (Seen(connected=False), "", "not connected to tcp://h:5557 yet: nobody listens there"),
        (CONNECTED, "", "connected to tcp://h:5557, but nothing has come yet: it is idle"),
        (
            CONNECTED,
            "kv",
            "connected to tcp://h:5557, but it has sent nothing whose topic begins with 'kv'",
        ),
        (with_(told=True), "kv", "connected to tcp://h:5557, but it has sent nothing whose topic"),
        (
            with_(recovering=True, unanswered_s=2.6, held=1),
            "",
            "1 batch has come from tcp://h:5557 and must wait: the replay endpoint tcp://h:5558 has not",
        ),
        (
            with_(recovering=True, unanswered_s=2.6),
            "kv",
            "the replay endpoint tcp://h:5558 has not answered for 3 s: what comes waits for it",
        ),
        (with_(refused=True), "", "tcp://h:5557 has refused us; --server-key"),
    ],
)
def test_a_cause_is_said_once_and_soon(seen: Seen, topic: str, said: str) -> None:
    """After three seconds, not before for what may yet come; with the command that looks further."""
    (text,) = hints((0.0, seen), (3.1, seen), (9.0, seen), (60.0, seen), topic=topic)
    assert text.startswith(said) and text.endswith("`DOCTOR` says more")
    if seen in (CONNECTED, Seen(connected=False)):
        assert hints((0.0, seen), (2.9, seen), topic=topic) == []


@pytest.mark.parametrize(
    ("seen", "topic"),
    [
        (with_(told=True), ""),
        (with_(came=3, fits=True, told=True), "kv"),
        (with_(told=True, fits=True), "kv"),
        (with_(recovering=True, unanswered_s=0.5), "kv"),
        (with_(recovering=True, held=70), ""),
    ],
)
def test_nothing_is_said_of_what_is_as_it_should_be(seen: Seen, topic: str) -> None:
    """Batches come, or the state has, or a long replay is being told."""
    assert hints(*((float(now), seen) for now in range(30)), topic=topic) == []


def test_each_time_that_a_connection_is_gone() -> None:
    """For more than three seconds; a short break is nothing."""
    gone, there = Seen(connected=False), with_(came=1, told=True)
    texts = hints((0, there), (1, gone), (5, gone), (6, there), (7, gone), (9, there), (20, gone))
    assert texts == ["the connection to tcp://h:5557 is gone; it is tried again"]
    assert len(hints((0, there), (1, gone), (5, gone), (6, there), (7, gone), (11, gone))) == 2


def test_replays_that_are_ahead_for_long() -> None:
    """Of another publisher's, while batches come; not when we are late, or it was only for a moment, or
    there is nothing to compare with.
    """

    def looks(**changes: Any) -> list[str]:
        seen = [with_(told=True, came=at, ahead=90 - at, **changes) for at in range(9)]
        return hints(*enumerate(seen))

    (text,) = looks()
    assert text.startswith(
        "the replay endpoint tcp://h:5558 is 87 batches ahead of what comes from"
    )
    assert looks(behind=True) == []
    moment = with_(told=True, came=5)
    assert hints(*((at, replace(moment, ahead=at % 2, came=at)) for at in range(9))) == []
    assert hints(*((at, replace(moment, ahead=9)) for at in range(9))) == []


def test_a_batch_that_comes_into_a_wait_is_said_too() -> None:
    """First that the replay is not answered, then that there are batches; not the other way round."""
    idle, busy = (with_(recovering=True, unanswered_s=3.0, held=held) for held in (0, 5))
    assert [text[:9] for text in hints((3, idle), (4, busy), (5, idle))] == [
        "the repla",
        "5 batches",
    ]
    assert [text[:9] for text in hints((3, busy), (4, idle))] == ["5 batches"]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (with_(refused=True), "it has refused us; --server-key"),
        (Seen(connected=False), "nobody listens there"),
        (with_(held=2), "2 batches came that had to wait for the answer of the replay endpoint"),
        (with_(ahead=9, came=4), "the replay endpoint tcp://h:5558 is 9 batches ahead"),
        (with_(told=True), "it is there, but it has sent nothing whose topic begins with 'kv'"),
        (with_(fits=True), "it is there, but idle"),
    ],
)
def test_why_nothing_came_in_the_end(seen: Seen, said: str) -> None:
    """The same causes, and the command."""
    text = Watch(ADDRESS, topic="kv", doctor="DOCTOR", now=0.0).why(seen)
    assert text.startswith(said) and text.endswith("`DOCTOR` says more")


# ------------------------------------------------------------------------------ what names can do

names = st.text(
    st.sampled_from("\x1b\n\r\t\0\x07\x7f\x85\x9b\u2028\u202e[31m'\"\\é日")
    | st.characters(codec="utf-8"),
    min_size=1,
    max_size=20,
)


def assert_harmless(line: str) -> None:
    """Nothing in it moves a cursor, changes a colour, starts a line or turns the writing around."""
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    assert [c for c in line[:-1] if unicodedata.category(c) == "Cc"] == []


@given(name=names)
def test_names_cannot_reach_the_terminal_raw(name: str) -> None:
    """Control characters in LoRA names, salts, keys and topics are escaped in every form, and come back
    from JSON as they were.
    """
    stored = BlockStored(
        [1],
        None,
        [1],
        1,
        medium=GPU,
        lora_name=name,
        cache_salt=name,
        extra_key=name,
        session_id=name,
    )
    one = reading(stored, topic=name.encode())
    for verbose in (0, 1, 2):
        (line,) = lines_of(one, verbose)
        assert_harmless(line)
        assert line[:-1].isprintable()
    assert_harmless(formatted("%l %S %x", stored))
    source, writer = stream(), Objects()
    writer.begin(source, one)
    line = writer.event(0, stored)
    assert_harmless(line)
    found = json.loads(line)
    assert found["lora_name"] == found["cache_salt"] == found["extra_key"] == name


@given(name=names)
def test_what_is_wrong_with_a_stranger_cannot_either(name: str) -> None:
    """Tags, media, field names and times that come with control characters: the reasons given for
    skipping them have none.
    """
    fields = {"type": "BlockRemoved", "block_hashes": [1]}
    payloads = [
        [1.0, [{"type": name}, {**fields, "medium": name}, {**fields, name: 1}, [name], name], 0],
        [name, [], 0],
        [1.0, [], name],
        [1.0, name, 0],
    ]
    source = stream()
    lines, writer = Lines([source], PLAIN, 0), Objects()
    for payload in payloads:
        one = read(Told(7, msgspec.msgpack.encode(payload), replayed=False))
        notices = [of_skipped(one, skipped) for skipped in one.skipped]
        notices += [of_undecodable(one)] if one.batch is None else []
        for notice in notices:
            for line in (lines.notice(source, notice), writer.notice(source, notice)):
                assert_harmless(line)
            assert lines.notice(source, notice)[:-1].isprintable()
