"""publisher.tools.source: what a command line names, and what comes of it, live and from captures."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest
from publisher_rig import ENVIRONMENT, PATIENCE_S, RawPublisher, payload_of, short_folder

from kvevents import AllBlocksCleared
from kvevents.capture import CaptureHead, CaptureWriter, capture_start, pack_message
from kvevents.follower import Told
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from kvevents.gaps import Gap, Lost
from kvevents.message import Channel, Message
from publisher.config.checks import ConfigError
from publisher.tools.source import Address, Capture, Live, Sources, parse_file, parse_sources

# ------------------------------------------------------------------------------------ parse_sources


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://h:1", Address("h:1", "tcp://h:1", None)),
        ("tcp://h:1,2", Address("h:1", "tcp://h:1", "tcp://h:2")),
        ("tcp://h:1,tcp://g:2", Address("h:1", "tcp://h:1", "tcp://g:2")),
        ("tcp://[::1]:1,2", Address("[::1]:1", "tcp://[::1]:1", "tcp://[::1]:2")),
        ("tcp://[fe80::1%eth0]:1", Address("[fe80::1%eth0]:1", "tcp://[fe80::1%eth0]:1", None)),
        ("w1=tcp://h:1,2", Address("w1", "tcp://h:1", "tcp://h:2")),
        ("=tcp://h:1", Address("h:1", "tcp://h:1", None)),
        ("a b=tcp://h:1", Address("a b", "tcp://h:1", None)),
        ("ipc:///run/a", Address("/run/a", "ipc:///run/a", None)),
        ("ipc:///run/a,b", Address("/run/a,b", "ipc:///run/a,b", None)),
        ("ipc:///run/a=b", Address("/run/a=b", "ipc:///run/a=b", None)),
        ("w=ipc:///run/a,b,ipc:///run/c", Address("w", "ipc:///run/a,b", "ipc:///run/c")),
        ("ipc:///run/a,tcp://h:2", Address("/run/a", "ipc:///run/a", "tcp://h:2")),
        ("today.capture", Path("today.capture")),
        ("monday:0830.capture", Path("monday:0830.capture")),
        ("w1=a,2", Path("w1=a,2")),
    ],
)
def test_what_a_source_can_be(text: str, expected: Address | Path) -> None:
    """A name of one's own, an endpoint, its replay endpoint or the port of one; or a file."""
    assert parse_sources([text], None) == [expected]


def test_a_replay_endpoint_apart() -> None:
    """It is that of the one endpoint."""
    found = parse_sources(["w=tcp://h:1"], "tcp://h:2")
    assert found == [Address("w", "tcp://h:1", "tcp://h:2")]


def test_several_keep_their_order() -> None:
    """Endpoints and files may be mixed."""
    found = parse_sources(["b", "tcp://h:1", "a", "x=tcp://h:1,2"], None)
    assert [one if isinstance(one, Path) else one.name for one in found] == [
        Path("b"),
        "h:1",
        Path("a"),
        "x",
    ]


@pytest.mark.parametrize(
    ("texts", "replay", "said"),
    [
        (["tcp://h:1", "tcp://h:2"], "tcp://h:3", "--replay-endpoint: it goes with one endpoint"),
        (["file"], "tcp://h:3", "--replay-endpoint: it goes with one endpoint"),
        (["tcp://h:1,2"], "tcp://h:3", "--replay-endpoint: 'tcp://h:1,2' names one already"),
        (["tcp://h:1", "tcp://h:1"], None, "SOURCE: 'h:1' is named twice"),
        (["a=tcp://h:1", "a=tcp://h:2"], None, "SOURCE: 'a' is named twice"),
        (["ipc:///run/a,5558"], None, "SOURCE: 'ipc:///run/a,5558' has a port for replays"),
    ],
)
def test_what_it_cannot_be(texts: list[str], replay: str | None, said: str) -> None:
    """ValueError, beginning with the option."""
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        parse_sources(texts, replay)


MISTYPED = [
    ("127.0.0.1:7101", "tcp://127.0.0.1:7101"),
    ("localhost:5557", "tcp://localhost:5557"),
    ("host:5557,5558", "tcp://host:5557,5558"),
    ("w1=host:5557", "w1=tcp://host:5557"),
    ("h:1,g:2", "tcp://h:1,tcp://g:2"),
    ("h:1,tcp://g:2", "tcp://h:1,tcp://g:2"),
    ("tcp://h:1,g:2", "tcp://h:1,tcp://g:2"),
    ("[::1]:5557", "tcp://[::1]:5557"),
    ("tcp:h:1", "tcp://h:1"),
    ("tcp:/h:1", "tcp://h:1"),
    ("tcp/h:1", "tcp://h:1"),
    ("ipc:/run/a", "ipc:///run/a"),
]


@pytest.mark.parametrize(("text", "meant"), MISTYPED)
def test_what_was_meant_is_asked(text: str, meant: str) -> None:
    """An endpoint without its scheme is no file that is not there; what is proposed can be one."""
    with pytest.raises(ValueError, match=r"^SOURCE: .*; did you mean ") as error:
        parse_sources([text], None)
    assert str(error.value).endswith(f"; did you mean {meant}?")
    assert all(isinstance(one, Address) for one in parse_sources([meant], None))
    if not text.startswith("tcp://"):
        with pytest.raises(ValueError, match=r"^FILE: .* is no capture; `kvevents record "):
            parse_file(text, "FILE")


def test_a_file_that_looks_like_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one if it is there; and the file of a socket is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host:5557").touch()
    assert parse_sources(["host:5557"], None) == [parse_file("host:5557", "FILE")]
    assert parse_file("host:5557", "FILE") == Path("host:5557")
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as there:
        there.bind(f"{folder}/s")
        with pytest.raises(ValueError, match=f"a socket, and no file; did you mean ipc://{folder}"):
            parse_sources([f"{folder}/s"], None)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tcp://*:1", "ENDPOINT"),
        ("tcp://h", "ENDPOINT"),
        ("udp://h:1", "ENDPOINT"),
        ("tcp://h:1,99999", "--replay-endpoint"),
        ("tcp://h:1,tcp://*:2", "--replay-endpoint"),
        ("tcp://h:1,x://y", "--replay-endpoint"),
    ],
)
def test_an_endpoint_that_cannot_be(text: str, key: str) -> None:
    """ConfigError, and nothing is left open, of the sources before it either."""
    with pytest.raises(ConfigError, match=f"^{key}: "):
        Sources([Address("a", "tcp://127.0.0.1:1", None), *parse_sources([text], None)])


# --------------------------------------------------------------------------------------- captures

Record = tuple[int, Channel, list[bytes]]


def live(at: int, seq: int, payload: bytes = b"x") -> Record:
    return at, Channel.LIVE, live_frames(b"", seq, payload)


def capture(file: Path, *records: Record, replay: bool = False) -> Path:
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2" if replay else None)
    file.write_bytes(capture_start(head) + b"".join(pack_message(*one) for one in records))
    return file


def brief(sources: Sources) -> list[tuple[str, int, list[object]]]:
    """Where from, when, and what it brought."""
    return [
        (
            Path(source.name).name,
            step.message.at_ns,
            [one.seq if isinstance(one, Told) else one for one in step.arrivals],
        )
        for source, step in (one for one in sources.steps() if one is not None)
    ]


def test_captures_are_merged_by_time(tmp_path: Path) -> None:
    """Each message in its place among those of the others, however they were named."""
    one = capture(tmp_path / "one", live(1, 0), live(4, 1), live(5, 2))
    two = capture(tmp_path / "two", live(2, 7), live(3, 8), live(6, 9))
    with Sources([two, one]) as sources:
        assert [(name, at) for name, at, _ in brief(sources)] == [
            ("one", 1),
            ("two", 2),
            ("two", 3),
            ("one", 4),
            ("one", 5),
            ("two", 6),
        ]


def test_a_topic_filters_a_capture_too(tmp_path: Path) -> None:
    """As if no other had been subscribed to; an answer that says no topic is of the one asked."""

    def said(at: int, seq: int, topic: bytes | None, channel: Channel) -> Record:
        if channel == Channel.LIVE:
            return at, channel, live_frames(topic or b"", seq, b"x")
        return at, channel, replay_answer(topic, seq, b"x", delimited=seq % 2 == 0)

    file = capture(
        tmp_path / "c",
        (1, Channel.ASKED, replay_request(0)),
        said(2, 0, b"kv@a", Channel.ANSWER),
        said(3, 1, b"kv@b", Channel.ANSWER),
        said(4, 1, b"kv@a", Channel.ANSWER),
        said(5, 2, None, Channel.ANSWER),
        (6, Channel.ANSWER, replay_end(delimited=True)),
        said(7, 3, b"kv@b", Channel.LIVE),
        said(8, 3, b"kv@a@m", Channel.LIVE),
        replay=True,
    )
    for topic, at in (("kv@a", [1, 2, 4, 5, 6, 8]), ("foo", [1, 5, 6]), ("", list(range(1, 9)))):
        with Sources([file], topic=topic) as sources:
            told = [(source, step) for source, step in filter(None, sources.steps())]
            assert [step.message.at_ns for _, step in told] == at
            assert sources.captures[0].batches == len(at) - 2


def test_a_capture_ends_with_what_was_held(tmp_path: Path) -> None:
    """A hole whose replay is not in it is given up with its last message."""
    asked = 2, Channel.ASKED, replay_request(0)
    file = capture(tmp_path / "c", asked, live(3, 5), live(4, 6), replay=True)
    with Sources([file]) as sources:
        assert brief(sources) == [("c", 2, []), ("c", 3, []), ("c", 4, [Lost(0, 5), 5, 6])]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # a recorder that closes no gaps
        ([live(1, 0), live(2, 3), live(3, 4)], [0, Gap(1, 2), Lost(1, 2), 3, 4]),
        # one that asks at once, and from somewhere else
        (
            [
                (1, Channel.ASKED, replay_request(2)),
                (2, Channel.ANSWER, replay_answer(b"", 2, b"x", delimited=True)),
                (3, Channel.ANSWER, replay_end(delimited=True)),
                live(4, 3),
            ],
            [2, 3],
        ),
        # one that asks only once, in vain
        (
            [
                (1, Channel.ASKED, replay_request(JOIN)),
                (2, Channel.OVER, []),
                live(3, 4),
                live(4, 5),
            ],
            [Lost(0, 4), 4, 5],
        ),
    ],
)
def test_a_recorder_with_habits_of_its_own(
    tmp_path: Path, records: list[Record], expected: list[object]
) -> None:
    """What we would have asked for, and it did not, is lost; all else is told."""
    file = capture(tmp_path / "c", *records, replay=True)
    with Sources([file]) as sources:
        assert [one for _, _, arrivals in brief(sources) for one in arrivals] == expected


def test_a_packed_capture_is_one_too(tmp_path: Path) -> None:
    """Its batches are counted, and nothing of it is left out."""
    writer, file = CaptureWriter(CaptureHead(endpoint="tcp://h:1")), tmp_path / "c"
    records = [Message(*live(n, n)) for n in range(3000)]
    file.write_bytes(b"".join([writer.start(), *map(writer.add, records), writer.flush()]))
    source = Capture(file)
    assert list(source.messages()) == records
    assert (source.batches, source.left_out, source.fault(3000)) == (3000, 0, None)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (-1, "{file}: the last {size} bytes were left out: it was cut off"),
        (None, None),
    ],
)
def test_what_is_left_out_is_said(tmp_path: Path, cut: int | None, said: str | None) -> None:
    """Nothing, where nothing is."""
    file = capture(tmp_path / "c", live(1, 0), live(2, 1))
    file.write_bytes(file.read_bytes()[:cut])
    source = Capture(file)
    batches = sum(one.is_batch for one in source.messages())
    told = source.fault(batches)
    assert told == (said and said.format(file=file, size=source.left_out))


@pytest.mark.parametrize("data", [b"", b"kveve", b"\x1f", b"\x1f\x8b\x08"])
def test_a_capture_that_was_hardly_begun(tmp_path: Path, data: bytes) -> None:
    """Nothing comes of it, and it is no error."""
    file = tmp_path / "c"
    file.write_bytes(data)
    source = Capture(file)
    assert (list(source.steps()), source.head, source.can_replay) == ([], None, False)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """ValueError, with the option, the file and the reason, when it is read."""
    (tmp_path / "none").write_text("{}")
    for file, key, said in (
        (tmp_path, "SOURCE", "Is a directory"),
        (tmp_path / "no", "SOURCE", "No such file"),
        (tmp_path / "none", "FILE", "no capture"),
    ):
        with pytest.raises(ValueError, match=f"^{key}: {file}: {said}"):
            list(Capture(file, key).steps())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 256, "File name too long"),
        ("x/" * 50_000, "File name too long"),
        ("a\0b", "embedded null"),
        ("\ud800", "can't encode"),
        ("text/x", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("s", "No such device or address"),
        ("/dev/zero", "no capture"),
        ("/proc/self/mem", "Input/output error"),
    ],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)
def test_what_cannot_be_opened_or_read_is_a_line(name: str, said: str) -> None:
    """Whatever the system says of it, and of whatever length its name: ValueError, and a short one."""
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as there:
        there.bind(f"{folder}/s")
        (folder / "text").write_text("{}")
        (folder / "loop").symlink_to("loop")
        (file,) = parse_sources([f"{folder}/{name}"], None) if name != "s" else [folder / name]
        assert isinstance(file, Path)
        if name.startswith("/"):
            file = Path(name)
        with pytest.raises(ValueError, match=r"^SOURCE: ") as error:
            list(Capture(file).steps())
    assert said in str(error.value) and len(str(error.value)) < 500
    with pytest.raises(ValueError, match=r"^SOURCE: '' is no file"):
        parse_sources([""], None)


def damaged(file: Path) -> bytes:
    """A capture of which 2 batches are whole."""
    data = capture(file, live(1, 0), live(2, 1), live(3, 2)).read_bytes()
    return data[:-1] + b"?"


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    """It has no size; how much was left out of it is known all the same."""
    data, pipe = damaged(tmp_path / "c"), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[data])
    writer.start()
    source = Capture(pipe)
    assert sum(one.is_batch for one in source.messages()) == 2
    writer.join()
    share = f"{100 * source.left_out / len(data):.0f} % of the file"
    assert source.left_out and share in (source.fault(2) or "")


@pytest.mark.parametrize("command", ["tail", "state", "check", "plot"])
def test_standard_input_is_a_source(tmp_path: Path, command: str) -> None:
    """Named as the system names it: what is left out is said in a line."""
    more = ("-o", f"{tmp_path}/x.svg") if command == "plot" else ()
    done = subprocess.run(
        [sys.executable, "-m", "publisher.cli", command, "/dev/stdin", *more],
        input=damaged(tmp_path / "c"),
        capture_output=True,
        check=False,
        timeout=60,
        env=ENVIRONMENT,
    )
    err = done.stderr.decode()
    assert done.returncode in (0, 1), err
    assert "/dev/stdin: 2 batches were read, the other " in err and "Traceback" not in err


# ------------------------------------------------------------------------------------------- live


def seqs_of(
    sources: Sources, counts: dict[str, int], tick_s: float | None = None
) -> tuple[dict[str, list[int]], int]:
    """What comes until there are so many of each source; and the ticks meanwhile."""
    got: dict[str, list[int]] = {name: [] for name in counts}
    ticks = 0
    for one in sources.steps(time.monotonic() + PATIENCE_S, tick_s):
        if one is None:
            ticks += 1
        else:
            source, step = one
            got[source.name] += [a.seq for a in step.arrivals if isinstance(a, Told)]
        if all(len(got[name]) >= count for name, count in counts.items()):
            break
    return got, ticks


def addresses(*publishers: RawPublisher) -> Sequence[Address]:
    return [Address(f"w{n}", one.endpoint, None) for n, one in enumerate(publishers)]


def test_several_are_listened_to(tmp_path: Path) -> None:
    """Each by its name; captures come before them."""
    file = capture(tmp_path / "c", live(1, 0), live(2, 1))
    with (
        RawPublisher() as one,
        RawPublisher() as two,
        Sources([*addresses(one, two), file], start=None) as sources,
    ):
        assert [type(source) for source in sources.all] == [Live, Live, Capture]
        for publisher in (one, two):
            publisher.await_subscriber()
        for seq in range(5):
            one.live(seq, AllBlocksCleared())
            two.live(seq + 10, AllBlocksCleared())
        names = {"w0": 5, "w1": 5, sources.captures[0].name: 2}
        got, _ = seqs_of(sources, names)
        assert list(got.values()) == [list(range(5)), list(range(10, 15)), [0, 1]]
        assert all(source.connected for source in sources.all)


def test_ticks_lose_nothing() -> None:
    """However often they come, or however long each is seen to: messages go on between them."""
    with RawPublisher() as publisher, Sources(addresses(publisher)) as sources:
        publisher.await_subscriber()
        for seq in range(3000):
            publisher.live(seq, payload=b"x")
        got, ticks = seqs_of(sources, {"w0": 3000}, tick_s=1e-9)
        assert got["w0"] == list(range(3000))
        assert ticks > 10


def test_the_end_of_the_time_loses_nothing() -> None:
    """What was taken and not given comes the next time; it is known whether there is such."""
    with RawPublisher() as publisher, Sources(addresses(publisher)) as sources:
        publisher.await_subscriber()
        for seq in range(3000):
            publisher.live(seq, payload=b"x")
        got: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        undrained = 0
        while len(got) < 3000:
            assert time.monotonic() < deadline
            for one in sources.steps(time.monotonic() + 0.0005):
                assert one is not None
                got += [a.seq for a in one[1].arrivals if isinstance(a, Told)]
            undrained += not sources.drained
        assert got == list(range(3000))
        assert undrained and sources.drained


def test_silence_ticks_and_ends_in_time() -> None:
    """Nothing comes: None, at least as often as it was told, until the time is up."""
    with RawPublisher() as publisher, Sources(addresses(publisher)) as sources:
        told = sources.steps(time.monotonic() + PATIENCE_S, 0.02)
        ticks = [one for one in itertools.islice(told, 10) if one is None]
        assert len(ticks) >= 3
        assert not any(sources.steps(time.monotonic() + 0.1, 0.02))
        assert list(sources.steps(0.0)) == []


def test_a_unix_socket_with_a_comma() -> None:
    """What is in a path is no replay endpoint."""
    with short_folder() as folder, RawPublisher() as publisher:
        endpoint = f"ipc://{folder}/a,b"
        publisher.pub.bind(endpoint)
        with Sources(parse_sources([endpoint], None)) as sources:
            publisher.await_subscriber()
            publisher.live(0, AllBlocksCleared())
            got, _ = seqs_of(sources, {f"{folder}/a,b": 1})
            assert got == {f"{folder}/a,b": [0]}


def test_closing_twice_is_nothing() -> None:
    """Of one, and of several."""
    sources = Sources(addresses())
    sources.close()
    sources.close()
    with RawPublisher() as publisher:
        live_one = Live(addresses(publisher)[0])
        live_one.close()
        live_one.close()


def test_an_empty_payload_is_told() -> None:
    """Whatever a batch says, it is told in its turn."""
    with RawPublisher() as publisher, Sources(addresses(publisher)) as sources:
        publisher.await_subscriber()
        publisher.live(0, payload=payload_of())
        assert seqs_of(sources, {"w0": 1})[0] == {"w0": [0]}
