"""`kvevents plot`: pages and pictures, as a process; of captures that are whole, empty, torn, hostile."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.patches import StepPatch
from publisher_rig import PATIENCE_S, eventually, kvevents, payload_of, start_kvevents

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from kvevents.message import Channel
from kvevents.profile import Profile
from publisher.cli import main
from publisher.tools.captures.plot import plot as draw
from publisher.tools.captures.plot import profile_of
from publisher.tools.captures.plot_figure import duration, figure, png, svg

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
START = 1_700_000_000_000_000_000
MS = 1_000_000
HOSTILE = "</title><script src='//x/y.js'>\x1b[31m&$\\frac"


def stored(*hashes: int, medium: StorageMedium = GPU) -> BlockStored:
    return BlockStored(list(hashes), None, [1, 2, 3, 4] * len(hashes), 4, medium=medium)


def removed(*hashes: int, medium: StorageMedium = GPU) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium=medium)


LIFE: list[list[Event]] = [
    [AllBlocksCleared(), stored(*range(1, 9))],
    [stored(*range(1, 9), medium=CPU)],
    [removed(8, 7, 6)],
    [stored(20, 21, 22)],
    [removed(22)],
    [stored(6, 7, 8)],
    [removed(8)],
    [stored(8)],
]


def records(batches: list[list[Event]], step_ns: int = 100 * MS) -> list[bytes]:
    """A live message for each batch, from seq 0 on, a step apart."""
    return [
        pack_message(
            START + seq * step_ns, Channel.LIVE, live_frames(b"", seq, payload_of(*events))
        )
        for seq, events in enumerate(batches)
    ]


def capture(
    path: Path, told: list[bytes], *, topic: str = "", replay_endpoint: str | None = None
) -> Path:
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint=replay_endpoint, topic=topic)
    path.write_bytes(capture_start(head) + b"".join(told))
    return path


def plot(*arguments: object, code: int = 0) -> str:
    """Run it to its end, in this process; it says nothing on stdout. Returns what it says on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            done: object = main(["plot", *map(str, arguments)])
        except SystemExit as exit_:
            done = exit_.code
    assert done == code, err.getvalue()
    assert out.getvalue() == "" and "Traceback" not in err.getvalue()
    return err.getvalue()


def size_of(image: bytes) -> tuple[int, int]:
    """Width and height of a PNG, all of whose chunks are whole."""
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(image):
        (length,) = struct.unpack_from(">I", image, at)
        kind, end = image[at + 4 : at + 8], at + 8 + length
        assert zlib.crc32(image[at + 4 : end]) == struct.unpack_from(">I", image, end)[0]
        kinds.append(kind)
        at = end + 4
    assert kinds[-1] == b"IEND"
    width, height = struct.unpack_from(">II", image, 16)
    return width, height


class Page(HTMLParser):
    """A page's tags and words. Fails for one whose tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())

    def rows(self, first: str) -> list[str]:
        """The cells of a table's row, from the one that says `first` on."""
        return self.words[self.words.index(first) :]


def assert_loads_nothing(page: Page, text: str) -> None:
    """No tag that loads or runs, no reference but to the page itself, no address at all."""
    assert not {tag for tag, _ in page.tags} & {
        *("script", "link", "img", "iframe", "object", "embed", "image", "foreignobject", "base")
    }
    for _, attributes in page.tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key.endswith(("href", "src")):
                assert value is not None and value.startswith("#")
    assert "http://" not in text and "https://" not in text
    assert "@import" not in text
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))


def page_of(file: Path) -> Page:
    """The page of a capture, drawn in this process, once it is seen that it loads nothing."""
    output = file.with_name("drawn.html")
    draw([file], output, pytest.fail)
    text = output.read_text()
    page = Page(text)
    assert_loads_nothing(page, text)
    return page


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A capture of LIFE, and its page, which the command drew, as a process."""
    folder = tmp_path_factory.mktemp("life")
    file = capture(folder / "life.capture", records(LIFE), topic="kv", replay_endpoint="tcp://h:2")
    done = kvevents("plot", str(file), "-o", str(folder / "life.html"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return file, (folder / "life.html").read_text()


# -------------------------------------------------------------------------------------- pictures


def test_a_page_has_the_picture_and_the_numbers(life: tuple[Path, str]) -> None:
    """One file that loads nothing; source, time span, counts, a row for each tier, and what returns."""
    page = Page(life[1])
    assert_loads_nothing(page, life[1])
    assert sum(tag == "svg" for tag, _ in page.tags) == 1
    for words in (
        *("tcp://h:1", "tcp://h:2", "kv", "2023-11-14 22:13:20 UTC"),
        *("2023-11-14 22:13:20 UTC, 700 ms", "9: 5 stored, 3 removed, 1 cleared"),
        *("Resident blocks, by tier", "How long blocks stay"),
    ):
        assert words in page.words, words
    assert page.rows("Prefixes that return most")[6:11] == ["000000000006", "GPU", "0", "1", "3"]
    tiers = page.rows("kept at twice")[1:]
    told = ["GPU", "15", "5", "0", "10", "10", "201 ms", "201 ms", "4 (27%)", "100%", "302 ms", "3"]
    assert tiers[:13] == [*told, "100%"]
    assert tiers[13:18] == ["CPU_PINNED", "8", "0", "0", "8"]


def test_a_page_follows_light_and_dark(life: tuple[Path, str]) -> None:
    """No ink, grid or ground of the picture has a colour of its own, so the page's style decides."""
    text = life[1]
    assert "prefers-color-scheme: dark" in text
    drawn = text[text.index("<svg") : text.index("</svg>")]
    assert "var(--ink)" in drawn and "var(--paper)" in drawn and "var(--shade)" in drawn
    for colour in ("#000000", "#ffffff", "#24292f", "#d0d7de"):
        assert colour not in drawn


def test_a_picture_depends_on_the_capture_only(life: tuple[Path, str], tmp_path: Path) -> None:
    """No date, no chance: another process draws the same bytes."""
    draw([life[0]], tmp_path / "other.html", pytest.fail)
    assert (tmp_path / "other.html").read_text() == life[1]


def test_several_captures_are_sections_of_one_page(tmp_path: Path) -> None:
    """One after the other, each with its own picture; a picture is of one only."""
    files = [capture(tmp_path / name, records(LIFE[:n])) for name, n in (("a", 3), ("b", 8))]
    plot(*files, "-o", tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert_loads_nothing(page, text)
    assert sum(tag == "svg" for tag, _ in page.tags) == 2
    assert page.words.index(str(files[0])) < page.words.index(str(files[1]))
    said = plot(*files, "-o", tmp_path / "both.png", code=2)
    assert said == "kvevents plot: FILE: 2 captures fit on a page of .html only\n"
    assert not (tmp_path / "both.png").exists()


def test_what_went_wrong_is_marked(tmp_path: Path) -> None:
    """Losses, restarts, clears and what cannot be read are in the picture, and how many there were."""
    told = records(LIFE)
    again = [
        pack_message(
            START + 10**9 + seq, Channel.LIVE, live_frames(b"", seq, payload_of(*LIFE[seq]))
        )
        for seq in (0, 1)
    ]
    junk = [
        pack_message(START + 10**9 + 5, Channel.LIVE, live_frames(b"", 2, b"\xc1")),
        pack_message(START + 10**9 + 6, Channel.LIVE, [b"one frame"]),
    ]
    file = capture(tmp_path / "c", [*told[:3], *told[5:], *again, *junk])
    page = page_of(file)
    for words in (
        "loss (1)",
        "restart (1)",
        "cleared (2)",
        "not readable (2)",
        "batches lost",
    ):
        assert words in page.words, words
    assert page.rows("batches lost")[1] == "2"
    assert page.rows("batches not readable")[1] == "2"


def test_what_was_there_before_has_no_age(tmp_path: Path) -> None:
    """Blocks that came in answer to a replay are drawn, but not how long they stay."""
    answer = [
        pack_message(START, Channel.ASKED, replay_request(JOIN)),
        pack_message(
            START, Channel.ANSWER, replay_answer(b"", 0, payload_of(stored(1)), delimited=True)
        ),
        pack_message(START, Channel.ANSWER, replay_end(delimited=True)),
        pack_message(START + MS, Channel.LIVE, live_frames(b"", 1, payload_of(removed(1)))),
    ]
    file = capture(tmp_path / "c", answer, replay_endpoint="tcp://h:2")
    words = page_of(file).words
    assert "no block was seen from its store to its removal" in words
    assert profile_of(file).profile.tiers()[GPU].unknown_ages == 1


@pytest.mark.parametrize(
    ("batches", "step_ns"),
    [
        ([[]], 1),
        ([[stored(1)]], 0),
        ([[AllBlocksCleared()]], 1),
        ([[removed(1)]], 1),
        ([[stored(1), removed(1)]] * 2, -5),
        ([[stored(1), removed(1)]] * 9, 2**59),
    ],
    ids=["heartbeat", "store", "clear", "removal", "back-in-time", "centuries"],
)
def test_any_capture_can_be_drawn(batches: list[list[Event]], step_ns: int, tmp_path: Path) -> None:
    """However little is in it, and however strange its clock; what there is none of is said."""
    file = capture(tmp_path / "c", records(batches, step_ns))
    words, events = page_of(file).words, profile_of(file).profile.events
    for text, kind in (
        ("no block was stored", "stored"),
        ("no block was stored again after its removal", "removed"),
        ("no block was seen from its store to its removal", "removed"),
    ):
        assert (text in words) == (not events[kind] or not events["stored"])


def test_an_empty_capture_is_drawn(tmp_path: Path) -> None:
    """A page that says that there was nothing, and exit code 3."""
    said = plot(capture(tmp_path / "c", []), "-o", tmp_path / "c.html", code=3)
    assert said == "kvevents plot: no batch is in it\n"
    text = (tmp_path / "c.html").read_text()
    assert_loads_nothing(Page(text), text)
    assert "nothing was told" in text


def test_names_from_the_wire_are_only_words(tmp_path: Path) -> None:
    """Neither a file's name, nor an endpoint, nor a topic can be more than text, on a page or in one."""
    file = capture(
        tmp_path / "<b>$x & \x1b[2J", records(LIFE), topic=HOSTILE, replay_endpoint=HOSTILE
    )
    plot(file, "-o", tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text()
    page = Page(text)
    assert_loads_nothing(page, text)
    assert "\x1b" not in text
    assert "b" not in {tag for tag, _ in page.tags[: page.tags.index(("section", {}))]}
    drawn = svg(Profile(), file.name + HOSTILE)
    assert b"\x1b" not in drawn and b"<b>" not in drawn and b"<script" not in drawn
    assert size_of(png(Profile(), HOSTILE)) == (1200, 1080)


def test_what_turns_or_hides_text_is_written_out(tmp_path: Path) -> None:
    """Of a file's name, of endpoints and topics: on the page, and in the picture; no font lacks any."""
    evil = "a\u202eb\u2066c\u200bd\U000e0041e\ufeff\x9b\u0627漢😀"
    file = capture(tmp_path / evil, records(LIFE), topic=evil, replay_endpoint=f"tcp://{evil}:1")
    draw([file], tmp_path / "c.html", pytest.fail)
    text = (tmp_path / "c.html").read_text()
    for hidden in "\u202e\u2066\u200b\U000e0041\ufeff\x9b":
        assert hidden not in text
        assert text.count(ascii(hidden)[1:-1]) >= 4  # title, heading, replay endpoint, topic
    assert "\u0627漢😀" in text
    name = profile_of(file).name
    assert "a\\u202eb\\u2066c" in svg(Profile(), name).decode()
    assert size_of(png(Profile(), name)) == (1200, 1080)  # and no warning


def test_a_replay_is_no_burst_of_events(tmp_path: Path) -> None:
    """The state that it begins with is resident at once, and in no rate; the page says how much."""
    answer = [
        pack_message(START, Channel.ASKED, replay_request(JOIN)),
        *[
            pack_message(
                START,
                Channel.ANSWER,
                replay_answer(b"", seq, payload_of(stored(seq)), delimited=True),
            )
            for seq in range(9)
        ],
        pack_message(START, Channel.ANSWER, replay_end(delimited=True)),
        pack_message(START + MS, Channel.LIVE, live_frames(b"", 9, payload_of(stored(9)))),
    ]
    file = capture(tmp_path / "c", answer, replay_endpoint="tcp://h:2")
    page = page_of(file)
    assert page.rows("of them replayed")[1] == "9, which are not in the rates"
    assert any(words.startswith("Live events per second") for words in page.words)
    stretches = profile_of(file).profile.timeline.stretches
    assert sum(one.events[0] for one in stretches) == 1
    assert [one.resident[0] for one in stretches] == [9, 10]


def test_more_ranks_than_are_shown(tmp_path: Path) -> None:
    """Those beyond the first 64 are one, and the page says so."""
    payloads = [
        msgspec.msgpack.encode([1.0, [event], rank])
        for rank in range(70)
        for event in (stored(rank, 1000), removed(1000), stored(1000))
    ]
    told = [
        pack_message(START + seq, Channel.LIVE, live_frames(b"", seq, payload))
        for seq, payload in enumerate(payloads)
    ]
    page = page_of(capture(tmp_path / "c", told))
    assert page.rows("ranks")[1] == "more than 64; those beyond are taken for one, `others`"
    assert page.rows("Prefixes that return most")[8] == "others"


def test_a_loss_may_be_the_recorders(tmp_path: Path) -> None:
    """Where it was stopped or too slow, the page says so; what it says of itself is nothing else."""
    told = records(LIFE)
    behind = pack_message(START + 1, Channel.BEHIND, [])
    abreast = pack_message(START + 10**9, Channel.ABREAST, [])
    page = page_of(capture(tmp_path / "c", [told[0], behind, *told[3:], abreast]))
    assert page.rows("batches lost")[1] == (
        "2; the recorder was too slow or stopped at times, and may have lost them itself"
    )
    assert "batches not readable" not in page.words


def test_joining_late_is_no_loss(tmp_path: Path) -> None:
    """The stream had begun before: the page says how much was not told, and no loss is marked."""
    later = [
        pack_message(START + seq * MS, Channel.LIVE, live_frames(b"", seq, payload_of(stored(seq))))
        for seq in (40, 41, 44)
    ]
    joined = page_of(capture(tmp_path / "joined", later[:2]))
    assert not any("loss (" in words for words in joined.words)
    assert "batches lost" not in joined.words
    assert joined.rows("batches before")[1].startswith("40, which were not told")
    assert "Resident blocks, by tier: those stored since it joined" in joined.words
    lossy = profile_of(capture(tmp_path / "lossy", later)).profile
    assert "loss (1)" in labels_of(lossy)
    assert (lossy.missed, lossy.earlier) == (2, 40)


def labels_of(profile: Profile) -> list[str]:
    """What the first panel's legend says."""
    return [str(one) for one in figure(profile, "").axes[0].get_legend_handles_labels()[1]]


def line_of(profile: Profile, panel: int, label: str) -> list[tuple[float, float]]:
    """The points of a line in the figure."""
    axes = figure(profile, "").axes[panel]
    (line,) = (one for one in axes.lines if one.get_label() == label)
    xs, ys = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def test_the_state_that_a_replay_tells_is_no_cache_that_fills(tmp_path: Path) -> None:
    """The curve begins where the replay ends, with all it has told; the stretch before is shaded."""
    answer = [
        pack_message(START, Channel.ASKED, replay_request(JOIN)),
        *[
            pack_message(
                START + seq * 100 * MS,
                Channel.ANSWER,
                replay_answer(b"", seq, payload_of(stored(seq)), delimited=True),
            )
            for seq in range(10)
        ],
        pack_message(START + 900 * MS, Channel.ANSWER, replay_end(delimited=True)),
    ]
    live = pack_message(
        START + 4000 * MS, Channel.LIVE, live_frames(b"", 10, payload_of(stored(10)))
    )
    profile = profile_of(capture(tmp_path / "a", [*answer, live], replay_endpoint="x")).profile
    assert line_of(profile, 0, "GPU") == [(0.9, 10.0), (4.0, 11.0), (4.0, 11.0)]
    assert "replay of the state: 900 ms" in labels_of(profile)
    alone = profile_of(capture(tmp_path / "b", answer, replay_endpoint="x")).profile
    assert line_of(alone, 0, "GPU")[0] == (0.0, 1.0), "there is nothing else to draw"


@pytest.mark.parametrize(
    ("batches", "step_ns", "bins"),
    [
        (15, 200 * MS, 3),
        (300, 200 * MS, 58),
        (3000, 200 * MS, 117),
        (30, 10_000 * MS, 20),
        (1000, 2 * MS, 118),
        (1, 1, 1),
    ],
)
def test_rates_are_of_what_is_more_than_a_batch(
    tmp_path: Path, batches: int, step_ns: int, bins: int
) -> None:
    """As many bins as there can be with several batches in each, or of a second, and few if it is slow;
    of a steady stream each has nearly its rate, the last one too.
    """
    told = records([[stored(seq)] for seq in range(batches)], step_ns)
    profile = profile_of(capture(tmp_path / "c", told)).profile
    (steps,) = figure(profile, "").axes[1].patches
    assert isinstance(steps, StepPatch)
    values = list(steps.get_data()[0])
    assert len(values) == bins
    assert sum(values) > 0
    if batches > 100:
        rate = 1e9 / step_ns
        assert all(0.6 * rate <= value <= 1.4 * rate for value in values), values


def test_nothing_hides_on_an_axis_or_under_another(life: tuple[Path, str]) -> None:
    """What happened first is beside the axis; no tier's curve is filled; no line strikes a sentence."""
    profile = profile_of(life[0]).profile
    resident, *_, returns = figure(profile, "").axes
    assert resident.get_xlim()[0] < 0
    assert [one.get_label() for one in resident.collections] == ["cleared (1)"]
    assert [line.get_linestyle() for line in returns.lines].count("--") == 1
    nothing = figure(Profile(), "").axes[-1]
    assert not nothing.lines


# ------------------------------------------------------------------------- files, good and bad


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_it_leaves_nothing_half_made(tmp_path: Path, number: int) -> None:
    """In the midst of reading: what it has begun to write is gone, and what was there is as it was."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.png").write_bytes(b"the one before")
    arguments = ("plot", str(tmp_path / "pipe"), "-o", str(tmp_path / "x.png"))
    with start_kvevents("plot", *arguments) as process:
        eventually(lambda: 1 if len(list(tmp_path.iterdir())) > 2 else None)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == 130
    assert sorted(one.name for one in tmp_path.iterdir()) == ["pipe", "x.png"]
    assert (tmp_path / "x.png").read_bytes() == b"the one before"


def test_a_damaged_capture_is_drawn_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """What was left out is said, on the page too; exit code 1."""
    told = records(LIFE)
    spoilt = bytearray(told[5])
    spoilt[-1] ^= 1
    file = capture(tmp_path / "c", [*told[:5], bytes(spoilt), *told[6:]])
    said = plot(file, "-o", tmp_path / "c.html", code=1)
    assert "5 batches were read" in said and "left out" in said
    page = Page((tmp_path / "c.html").read_text())
    assert any("5 batches were read" in words for words in page.words)
    assert page.rows("batches")[1] == "5"


def test_a_capture_that_is_cut_off_is_whole_but_for_its_last(tmp_path: Path) -> None:
    """A kill is no damage: said, and exit code 0."""
    file = capture(tmp_path / "c", records(LIFE))
    file.write_bytes(file.read_bytes()[:-7])
    assert "was cut off" in plot(file, "-o", tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{c}", "-o", "{d}/x.pdf"], "-o: '{d}/x.pdf' does not end in .html, .png, .svg"),
        (["{c}", "-o", "{d}/html"], "-o: '{d}/html' does not end in .html, .png, .svg"),
        (["{c}", "-o", "{d}/no/x.png"], "-o: {d}/no/x.png: No such file or directory"),
        (["{c}", "-o", "{d}/f.png"], "-o: '{d}/f.png' is there already, and is no file"),
        (["{c}", "-o", "{c}"], "-o: '{c}' is the capture itself"),
        (["{d}/none", "-o", "{d}/x.png"], "FILE: {d}/none: No such file or directory"),
        (["{d}/text", "-o", "{d}/x.png"], "FILE: {d}/text: no capture: it does not begin"),
        (["{d}", "-o", "{d}/x.png"], "FILE: {d}: Is a directory"),
        (["x" * 300, "-o", "{d}/x.png"], f"FILE: {'x' * 300}: File name too long"),
        (["x" * 300, "-o", "{c}"], f"FILE: {'x' * 300}: File name too long"),
        (["{c}", "-o", "x" * 300 + ".png"], f"-o: '{'x' * 119}...: File name too long"),
        (["h:1,2", "-o", "{d}/x.png"], "FILE: h:1,2 is no capture; `kvevents record tcp://h:1,2"),
        (["tcp://h:1", "-o", "{d}/x.png"], "FILE: tcp://h:1 is no capture; `kvevents record"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    """Exit code 2, and nothing is left behind, changed or made."""
    file = capture(tmp_path / "c.svg", records(LIFE))
    (tmp_path / "f.png").mkdir()
    (tmp_path / "text").write_text("hello, this is no capture at all")
    before = {entry: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()}
    names = {"c": str(file), "d": str(tmp_path)}
    said = plot(*(one.format(**names) for one in arguments), code=2)
    assert said.startswith(f"kvevents plot: {reason.format(**names)}")
    assert len(said.splitlines()) == 1
    assert {entry: entry.stat().st_mtime_ns for entry in tmp_path.iterdir()} == before


def test_a_picture_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    """The output is replaced once all is drawn: by an image, of the size that the help says."""
    (tmp_path / "x.PNG").write_bytes(b"the one before")
    plot(tmp_path / "none", "-o", tmp_path / "x.PNG", code=2)
    assert (tmp_path / "x.PNG").read_bytes() == b"the one before"
    plot(capture(tmp_path / "c", records(LIFE)), "-o", tmp_path / "x.PNG")
    assert size_of((tmp_path / "x.PNG").read_bytes()) == (1200, 1080)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "x.PNG"]


def test_durations_are_in_the_unit_that_suits_them() -> None:
    """Three digits."""
    second = 1_000_000_000
    told = [duration(second * n) for n in (0, 0.0012, 1, 59.5, 60, 7200, 200_000)]
    assert told == ["0 ms", "1.2 ms", "1 s", "59.5 s", "1 min", "2 h", "2.31 days"]
