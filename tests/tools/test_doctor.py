"""`kvevents doctor`: each reason why nothing arrives, made for real, and what it says of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

import msgspec
import pytest
import zmq
from ports_rig import free_port, free_ports
from publisher_rig import (
    PATIENCE_S,
    RawPublisher,
    insert,
    kvevents,
    make_cache,
    payload_of,
    short_folder,
    start_kvevents,
)
from publisher_sidecar_rig import config, flushed, sink

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.frames import live_frames
from publisher import Sidecar, WorkerInfo, spawn
from publisher.cli import main
from publisher.config.endpoint import Endpoint
from publisher.config.keys import write_keys
from publisher.config.sidecar_config import CurveConfig
from publisher.tools.doctor.reach import unreached

pytestmark = pytest.mark.integration

STORED = BlockStored([7], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)
TIMEOUT = ("--timeout", "1")
BRIEFLY = ("--timeout", "0.3")
"""Where nothing is expected to come."""
PATIENTLY = ("--timeout", "30")
"""Where it ends by itself."""


@dataclass
class Report:
    """What it said."""

    code: int
    findings: list[dict[str, str]]

    @property
    def conclusion(self) -> str:
        return self.findings[-1]["text"]

    @property
    def change(self) -> str:
        """What the last line says to do."""
        return self.findings[-1]["advice"]

    def text(self, probe: str, verdict: str) -> str:
        """All that a probe said with a verdict, advice included; it must have said something."""
        found = [
            f"{one['text']} -> {one['advice']}"
            for one in self.findings
            if (one["probe"], one["verdict"]) == (probe, verdict)
        ]
        assert found, self.findings
        return "\n".join(found)

    def verdicts(self, probe: str) -> set[str]:
        return {one["verdict"] for one in self.findings if one["probe"] == probe}


def read(code: int, out: str, err: str) -> Report:
    assert err == "", err
    return Report(code, json.loads(out))


def doctor(*arguments: str) -> Report:
    """Run it to its end, here: sockets that it leaves open are seen."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", *TIMEOUT, "-o", "json", *arguments])
    return read(code, out.getvalue(), err.getvalue())


class Examination:
    """One that is under way."""

    def __init__(self, future: Future[Report]) -> None:
        self._future = future

    def report(self) -> Report:
        return self._future.result(PATIENCE_S)


@contextlib.contextmanager
def examining(*arguments: str) -> Iterator[Examination]:
    """Start it, in a thread; it has much time unless it is told otherwise, and must end by itself."""
    with ThreadPoolExecutor(1) as pool:
        yield Examination(pool.submit(doctor, "--timeout", "30", *arguments))


@contextlib.contextmanager
def sidecar_with(
    folder: Path, *, curve: CurveConfig | None = None, **settings: Any
) -> Iterator[tuple[Sidecar, HiRadixCache]]:
    """A sidecar that shows often that it lives, and its worker's cache."""
    one = sink(heartbeat_s=0.1, **settings)
    with spawn(WorkerInfo(block_size=4), config(folder, one, curve=curve)) as sidecar:
        yield sidecar, make_cache()


def told(sidecar: Sidecar, cache: HiRadixCache, first: int = 0) -> None:
    """Two blocks more, published."""
    insert(cache, range(first, first + 8))
    sidecar.pump(cache)
    flushed(sidecar, cache)


def ends_of(sidecar: Sidecar) -> tuple[str, str, str]:
    (bound,) = sidecar.client.sinks
    assert bound.replay_endpoint is not None
    return bound.endpoint, "--replay-endpoint", bound.replay_endpoint


# -------------------------------------------------------------------------------------- it is well


def test_a_sidecar_that_works(tmp_path: Path) -> None:
    """Every probe is content, it does not take its whole time, and the exit code is 0."""
    with sidecar_with(tmp_path) as (sidecar, cache):
        told(sidecar, cache)
        http = sidecar.client.http_endpoint
        assert http is not None
        with examining(*ends_of(sidecar), "--http", http, "--block-size", "4") as under_way:
            report = under_way.report()
        assert (report.code, {one["verdict"] for one in report.findings}) == (0, {"ok"})
        assert report.change == ""
        assert "XPUB" in report.text("handshake", "ok")
        assert "2 blocks stored" in report.text("replay", "ok")
        assert "heartbeat" in report.text("events", "ok")
        assert "block size 4" in report.text("content", "ok")
        assert "ours among them" in report.text("http", "ok")
        assert report.conclusion.startswith("The stream is alive: ")


def test_events_that_arrive_end_it() -> None:
    """With live events it is over long before its time."""
    with (
        RawPublisher() as publisher,
        start_kvevents(
            f"doctor-{os.getpid()}", "doctor", publisher.endpoint, "--timeout", "3600"
        ) as process,
    ):
        publisher.await_subscriber()
        publisher.live(0, AllBlocksCleared(), STORED)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
        assert "ok  events     1 batch, 1 block stored, 1 clear in " in out
        assert out.endswith(
            "\nEvents arrive: 1 batch was received, and nothing wrong was found. What may matter: no"
            " replay endpoint is given: who joins late knows nothing of what was stored before.\n"
        )


def test_an_interrupt_ends_it() -> None:
    """Ctrl-C while it listens: there is nothing to conclude, and no traceback."""
    with (
        RawPublisher() as publisher,
        start_kvevents(f"doctor-{os.getpid()}", "doctor", publisher.endpoint) as process,
    ):
        publisher.await_subscriber()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (130, "")
        assert "Nothing arrives" not in out


def test_the_text_is_a_line_a_probe() -> None:
    """With the advice below what is wrong, and one line in the end, which names both; no colours in a
    pipe.
    """
    port = free_port()
    done = kvevents("doctor", f"tcp://127.0.0.1:{port}", *TIMEOUT)
    first, advice, last = done.stdout.splitlines()
    assert first == f"!!  connect    nobody listens at 127.0.0.1:{port}"
    assert advice.startswith(" " * 15 + "→ is the publisher up")
    cause = f"Nothing arrives because nobody listens at 127.0.0.1:{port}."
    assert last == f"{cause} → see 'connect' above"
    assert advice.endswith("look again with --bind: we listen there for a second")
    assert (done.returncode, done.stderr) == (3, "")


# ----------------------------------------------------------------------------------------- address


@pytest.mark.parametrize(
    ("endpoint", "text", "advice"),
    [
        ("tcp://*:5557", "is where one listens", "tcp://HOST:5557"),
        ("tcp://0.0.0.0:5557", "is where one listens", "tcp://HOST:5557"),
        ("tcp://127.0.0.1:0", "has no port", "/state"),
        ("127.0.0.1:5557", "has no scheme", "did you mean tcp://127.0.0.1:5557?"),
        ("w=h:5557,5558", "has no scheme", "did you mean w=tcp://h:5557,5558?"),
        ("h:5557,tcp://h:8", "has no scheme", "did you mean tcp://h:5557,tcp://h:8?"),
        ("nonsense", "has no scheme", "say tcp://HOST:PORT"),
        ("tpc://127.0.0.1:5557", "neither tcp://HOST:PORT", "say tcp://127.0.0.1:5557"),
        ("http://127.0.0.1:5557", "neither tcp://HOST:PORT", "--http"),
        ("inproc://events", "neither tcp://HOST:PORT", "tcp:// or ipc://"),
        ("tcp://127.0.0.1", "neither tcp://HOST:PORT", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "is not in 0..65535", "tcp://HOST:PORT"),
        ("ipc://*", "is where one listens", "path"),
    ],
)
def test_an_address_that_cannot_be(endpoint: str, text: str, advice: str) -> None:
    """It is a finding, with what to write in its place."""
    report = doctor(endpoint)
    said = report.text("address", "wrong")
    assert text in said
    assert advice in said.partition(" -> ")[2]
    assert report.code == 1
    assert report.conclusion.startswith("Nothing arrives because ")


def test_a_name_that_nobody_has() -> None:
    """A host that cannot be resolved is named."""
    report = doctor("tcp://nobody.invalid:5557")
    assert "nobody.invalid cannot be resolved" in report.text("connect", "wrong")
    assert report.code == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tcp://h:1", "--timeout", "0"), "--timeout: 0.0 is not above 0 and at most 3600"),
        (("tcp://h:1", "--timeout", "nan"), "--timeout: nan is not above 0 and at most 3600"),
        (("tcp://h:1", "--block-size", "0"), "--block-size: 0 is below 1"),
        (("tcp://h:1", "--as", "nobody"), "--as: 'nobody' is not one of "),
        (("tcp://h:1", "--as", "vllm,smg"), "--as: one router at a time"),
        (("tcp://h:1", "--http", "ftp://h"), "--http: 'ftp://h' is not http://HOST:PORT"),
        (("tcp://h:1", "--http", "http://h:x"), "--http: 'http://h:x' is not http://HOST:PORT"),
        (("tcp://h:1,2", "--replay-endpoint", "tcp://h:3"), "names one already"),
        (("tcp://h:1", "--server-key", "x"), "--server-key and --client-key: one is of no use"),
        (("/etc/hostname",), "SOURCE: /etc/hostname is a file"),
    ],
)
def test_what_cannot_be_asked(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in the command itself is one line, and exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1


# --------------------------------------------------------------------------------------------- ipc


def test_files_where_a_socket_should_be() -> None:
    """None, a folder, another file, one whose publisher is gone: told apart, and left as they are."""
    with short_folder() as folder:
        (folder / "file").write_text("")
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / "left"))
        for path, text in (
            ("nothing", "there is no file"),
            ("", "is a folder"),
            ("file", "is no socket"),
            ("left", "nobody listens"),
        ):
            report = doctor(f"ipc://{folder}/{path}", *BRIEFLY)
            assert text in report.text("connect", "wrong")
            assert report.code == 3
        assert sorted(one.name for one in folder.iterdir()) == ["file", "left"]


def test_a_socket_that_is_not_ours_to_open() -> None:
    """No permission is said as such, whatever is there."""
    finding = unreached("connect", Endpoint("ipc", path="/run/s"), PermissionError(13, "no"))
    assert finding.text == "we may not connect to ipc:///run/s"
    assert finding.offline


def test_a_publisher_of_ipc() -> None:
    """Its messages come as those of tcp do."""
    with short_folder() as folder, RawPublisher() as publisher:
        publisher.pub.bind(f"ipc://{folder}/s")
        with examining(f"ipc://{folder}/s") as under_way:
            publisher.await_subscriber()
            publisher.live(0, STORED)
            assert under_way.report().code == 0


# ------------------------------------------------------------------------------------- two-sided


@pytest.mark.parametrize("of_ipc", [False, True])
def test_a_publisher_that_connects(of_ipc: bool, tmp_path: Path) -> None:
    """A sink of mode connect and a router that connects never meet: it says so, and who must bind."""
    with short_folder() as folder:
        port = free_port()
        endpoint = f"ipc://{folder}/s" if of_ipc else f"tcp://127.0.0.1:{port}"
        with sidecar_with(tmp_path, mode="connect", endpoint=endpoint, replay_endpoint=None):
            report = doctor(endpoint, "--bind")
            assert "nobody listens" in report.text("connect", "wrong") or of_ipc
            assert 'mode = "bind"' in report.text("two-sided", "wrong")
            assert report.conclusion == (
                f"Nothing arrives because a publisher connects to {endpoint}, and the router does"
                " not listen there."
            )
            assert report.code == 3
            assert report.change.startswith(f"let the router bind {endpoint}")
            report = doctor(endpoint)
            assert not report_has(report, "two-sided")
            assert "--bind" in report.change


def test_a_publisher_that_starts_meanwhile() -> None:
    """A doctor that looks at a port again and again never takes it from the publisher that binds it."""
    port = free_port()
    endpoint, looked, over = f"tcp://127.0.0.1:{port}", Flag(), Flag()

    def look() -> int:
        looks = 0
        while not over.is_set():
            assert report_has(doctor(endpoint, "--timeout", "0.1"), "connect")
            looks += 1
            looked.set()
        return looks

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            assert looked.wait(PATIENCE_S)
            for _ in range(2000):
                socket.create_server(("127.0.0.1", port)).close()  # of zmq, it would close later
        finally:
            over.set()
        assert looking.result(PATIENCE_S) > 0


def report_has(report: Report, probe: str) -> bool:
    return any(one["probe"] == probe for one in report.findings)


def test_a_router_that_waits_there_too() -> None:
    """Somebody who connects and is no publisher is not taken for one."""
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.SUB) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.connect(f"tcp://127.0.0.1:{port}")
        report = doctor(f"tcp://127.0.0.1:{port}", "--bind")
        assert "no publisher" in report.text("two-sided", "unknown")
        assert report.code == 3


def test_nobody_at_all() -> None:
    """Where nobody listens and nobody connects, the first is all there is to say."""
    port = free_port()
    report = doctor(f"tcp://127.0.0.1:{port}", "--bind")
    assert [one["probe"] for one in report.findings] == ["connect", "conclusion"]
    assert report.code == 3


# -------------------------------------------------------------------------------- other servers


class Server:
    """A port at which each connection is told something, in a thread each, until it hangs up."""

    def __init__(self, first: bytes, *, endless: bool = False) -> None:
        self._first, self._endless = first, endless
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(self._first)
            while self._endless:
                connection.sendall(self._first)
            while connection.recv(4096):
                pass

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("first", "endless", "text"),
    [
        (b"", False, "accepts connections and says nothing"),
        (b"\x1b[2J\x1b[31mboo\n", False, "its first bytes are the bytes 1b 5b"),
        (b"SSH-2.0-x\r\n", False, "an SSH server"),
        (b"\x15\x03\x01\x00\x02\x02\x46", False, "TLS"),
        (b"all work and no play ", True, "the text 'all work and no play"),
        (b"\xff" * 10, True, "does not speak ZMTP"),
    ],
)
def test_a_server_of_another_kind(first: bytes, endless: bool, text: str) -> None:
    """Silent, garbage, another protocol, bytes without end: named by its first bytes, and in time."""
    with Server(first, endless=endless) as server:
        before = time.monotonic()
        report = doctor(server.endpoint, *(PATIENTLY if first else BRIEFLY))
        assert text in report.text("handshake", "wrong")
        assert report.code == 1
        assert time.monotonic() - before < PATIENCE_S


def test_an_http_server(tmp_path: Path) -> None:
    """Of the sidecar itself: a port of the right host is easily the wrong one."""
    with sidecar_with(tmp_path) as (sidecar, _):
        http = sidecar.client.http_endpoint
        assert http is not None
        report = doctor(http.replace("http://", "tcp://"), *BRIEFLY)
        assert "HTTP" in report.text("handshake", "wrong")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("SUB", "two subscribers never meet"),
        ("PULL", "a PULL socket, which takes work"),
        ("REP", "a REP socket"),
    ],
)
def test_a_socket_of_another_type(kind: str, text: str) -> None:
    """A router that binds there, or a socket of another service."""
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as one:
        one.setsockopt(zmq.LINGER, 0)
        port = one.bind_to_random_port("tcp://127.0.0.1")
        report = doctor(f"tcp://127.0.0.1:{port}", *PATIENTLY)
        assert text in report.text("handshake", "wrong")
        assert report.code == 1


def test_swapped_endpoints(tmp_path: Path) -> None:
    """The replay socket's address in the place of the PUB socket's, and the other way round."""
    with sidecar_with(tmp_path) as (sidecar, _):
        endpoint, _, replay_endpoint = ends_of(sidecar)
        report = doctor(replay_endpoint, "--replay-endpoint", endpoint, *PATIENTLY)
        assert "swap the two" in report.text("handshake", "wrong")
        assert "swap the two" in report.text("replay", "wrong")
        assert "is a replay socket" in report.conclusion


# ------------------------------------------------------------------------------------------- CURVE


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tuple[str, str, str], Path]]:
    """A sidecar that speaks CURVE, its addresses, and the folder of everybody's keys."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("server", "stranger"):
        write_keys(folder, name)
    write_keys(folder / "clients", "router")
    curve = CurveConfig(
        secret_key=str(folder / "server.key_secret"), client_keys=str(folder / "clients")
    )
    with sidecar_with(folder, curve=curve) as (sidecar, cache):
        told(sidecar, cache)
        yield ends_of(sidecar), folder


def keys(folder: Path, server: str, client: str) -> tuple[str, ...]:
    return (
        *("--server-key", str(folder / f"{server}.key")),
        *("--client-key", str(folder / f"{client}.key_secret")),
    )


def test_the_right_keys(guarded: tuple[tuple[str, str, str], Path]) -> None:
    """Both sockets let us in, and the stream is looked into as any other."""
    addresses, folder = guarded
    report = doctor(*addresses, *keys(folder, "server", "clients/router"), *PATIENTLY)
    assert report.code == 0
    assert "takes both keys" in report.text("handshake", "ok")
    assert "2 blocks stored" in report.text("replay", "ok")


@pytest.mark.parametrize(
    ("server", "client", "text", "advice"),
    [
        (None, None, "speaks CURVE alone, and no keys are given", "--server-key FILE"),
        ("server", "stranger", "does not let our key in", "curve.client_keys"),
        ("stranger", "clients/router", "its key is another", "curve.secret_key"),
    ],
)
def test_keys_that_do_not_fit(
    guarded: tuple[tuple[str, str, str], Path],
    server: str | None,
    client: str | None,
    text: str,
    advice: str,
) -> None:
    """None, one that is not let in, and one that is not the server's are three things to change."""
    addresses, folder = guarded
    given = () if server is None or client is None else keys(folder, server, client)
    report = doctor(*addresses, *given, *PATIENTLY)
    for probe in ("handshake", "replay"):
        said = report.text(probe, "wrong")
        assert text in said
        assert advice in said
    assert report.code == 1
    assert text in report.conclusion
    assert advice in report.change


def test_swapped_endpoints_behind_keys(guarded: tuple[tuple[str, str, str], Path]) -> None:
    """A socket of the wrong type is not taken for a wrong key."""
    (endpoint, _, replay_endpoint), folder = guarded
    given = keys(folder, "server", "clients/router")
    report = doctor(replay_endpoint, "--replay-endpoint", endpoint, *given, *PATIENTLY)
    assert "is a replay socket" in report.text("handshake", "wrong")
    assert "is the PUB socket" in report.text("replay", "wrong")


def test_keys_for_a_publisher_without(guarded: tuple[tuple[str, str, str], Path]) -> None:
    """Keys that are given where nobody speaks CURVE shut the router out as well."""
    with RawPublisher() as publisher:
        given = keys(guarded[1], "server", "clients/router")
        report = doctor(publisher.endpoint, *given, *PATIENTLY)
        assert "speaks no CURVE" in report.text("handshake", "wrong")


# ------------------------------------------------------------------------------------ it says nothing


def test_an_engine_that_says_nothing() -> None:
    """Connected and idle, with nothing to ask: what to turn on."""
    with RawPublisher() as publisher:
        report = doctor(publisher.endpoint, *BRIEFLY)
        said = report.text("events", "wrong")
        assert "said nothing" in said
        assert "enable_kv_cache_events" in said
        assert "--disable-radix-cache" in said
        assert "no replay endpoint is given" in report.text("replay", "unknown")
        assert report.code == 1
        assert report.conclusion.startswith(
            "Nothing arrives because the publisher said nothing in "
        )
        assert "enable_kv_cache_events" in report.change


def serve(publisher: RawPublisher, *answers: tuple[int, Event]) -> None:
    """As an engine: nothing so late as JOIN, then what it retains."""
    client, _ = publisher.request()
    publisher.end(client)
    client, start = publisher.request()
    assert start == 0
    for seq, event in answers:
        publisher.answer(client, seq, event)
    publisher.end(client)


def test_an_engine_that_has_never_said_anything() -> None:
    """Its replay is empty: there is nothing to wait for until events are turned on."""
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses, *TIMEOUT) as under_way:
            serve(publisher)
            report = under_way.report()
        assert "it retains nothing" in report.text("replay", "ok")
        assert "no event in its replay" in report.text("events", "wrong")
        assert report.conclusion.endswith("and there is no event in its replay.")
        assert "enable_kv_cache_events" in report.change
        assert report.code == 1


def test_an_engine_that_is_idle_now() -> None:
    """Its replay has blocks: nothing is wrong, and nothing arrives because nothing happens."""
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses, *TIMEOUT) as under_way:
            serve(publisher, (0, STORED))
            report = under_way.report()
        assert "1 block stored" in report.text("replay", "ok")
        assert "nothing happens" in report.text("events", "unknown")
        assert report.conclusion.startswith("Nothing arrives because nothing happens: ")
        assert report.code == 0


def test_an_idle_publisher_that_the_router_could_not_read() -> None:
    """What is retained is judged as what comes would be, and is why, not that nothing happens."""
    signed = BlockStored([-7], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        arguments = "--as", "vllm-router", "--block-size", "16"
        with examining(*addresses, *TIMEOUT, *arguments) as under_way:
            serve(publisher, (0, signed), (1, signed))
            report = under_way.report()
        assert "nothing happens" in report.text("events", "unknown")
        assert "expects 16" in report.text("blocks", "wrong")
        assert report.conclusion == (
            "No message came, and the router has no use for what is replayed: seq 0 (and 1 more)"
            " vllm-router drops the batch: events[0].block_hashes[0] is -7: it reads unsigned hashes"
            " only (and 1 thing more is wrong)."
        )
        assert 'dialect = "vllm-router"' in report.change
        assert report.code == 1


def test_a_sidecar_whose_worker_tells_nothing(tmp_path: Path) -> None:
    """Heartbeats alone: with a replay it is known that nothing was told before, without it is not."""
    with sidecar_with(tmp_path) as (sidecar, _):
        report = doctor(*ends_of(sidecar))
        said = report.text("events", "wrong")
        assert "its worker tells nothing" in said
        assert "pump(cache)" in said
        assert report.code == 1
        report = doctor(ends_of(sidecar)[0])
        assert "nothing changes" in report.text("events", "unknown")
        assert report.code == 0


def test_a_publisher_that_only_clears() -> None:
    """AllBlocksCleared and nothing else."""
    with (
        RawPublisher() as publisher,
        examining(publisher.endpoint, *TIMEOUT) as under_way,
    ):
        publisher.await_subscriber()
        publisher.live(0, AllBlocksCleared())
        report = under_way.report()
        assert "only AllBlocksCleared" in report.text("events", "wrong")


def test_a_publisher_that_only_removes() -> None:
    """Removals alone may be a full cache's; that is said, and not held against it."""
    with (
        RawPublisher() as publisher,
        examining(publisher.endpoint, *TIMEOUT) as under_way,
    ):
        publisher.await_subscriber()
        publisher.live(5, BlockRemoved([7], medium=StorageMedium.GPU))
        report = under_way.report()
        assert "none is stored" in report.text("events", "unknown")
        assert report.code == 0


# -------------------------------------------------------------------------------- it says something


def heard(frames: list[bytes], *arguments: str) -> Report:
    """What it says of a publisher that sends one message."""
    with RawPublisher() as publisher, examining(publisher.endpoint, *arguments) as under_way:
        publisher.await_subscriber()
        publisher.pub.send_multipart(frames)
        return under_way.report()


@pytest.mark.parametrize(("topic", "code"), [("kv@", 1), ("kv-ev", 0), ("", 0)])
def test_a_filter(topic: str, code: int) -> None:
    """One that the messages' topic does not begin with keeps every event away; both are named."""
    report = heard(live_frames(b"kv-events", 0, payload_of(STORED)), "--topic", topic)
    assert report.code == code
    if code:
        assert report.conclusion == (
            "Nothing arrives because messages come under topic 'kv-events', and the filter is 'kv@'."
        )
        assert "set the router's filter to 'kv-events'" in report.change
        assert "the publisher's topic to 'kv@' (\"topic\" in --kv-events-config" in report.change
    else:
        assert "'kv-events'" in report.text("topic", "ok")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"", b"\0" * 8], "2 frames, not 3"),
        ([b"hello"], "1 frames, not 3"),
        ([b"", b"\0" * 4, b"\x93"], "seq: 4 bytes, not 8"),
        (live_frames(b"", 0, b"\xc1garbage\x1b[2J"), "no payload of 1 message can be read"),
        (live_frames(b"", 0, msgspec.msgpack.encode([1.0, [["Odd", 1]], 0])), "no event of"),
    ],
)
def test_messages_that_are_no_kv_events(frames: list[bytes], reason: str) -> None:
    """Other frames, other payloads, other events: it says which, at once or when the time is up."""
    arguments = ("--timeout", "1")
    report = heard(frames, *arguments)
    assert reason in report.text("events", "wrong")
    assert report.code == 1
    assert "\x1b" not in report.conclusion


ARRAYS = msgspec.msgpack.encode(
    [1.0, [["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"]], 0]
)


def test_the_wrong_dialect() -> None:
    """A router that reads maps is told arrays: what it loses, and which dialect it reads."""
    report = heard(live_frames(b"", 0, ARRAYS), "--as", "vllm-router")
    said = report.text("fit", "wrong")
    assert "events[0] is an array: it reads maps only" in said
    assert 'dialect = "vllm-router"' in said
    assert report.code == 1
    assert report.conclusion.startswith(
        "Events arrive: 1 batch was received, but the router has no use for them: seq 0 vllm-router"
    )
    assert "events[0] is an array: it reads maps only" in report.conclusion
    assert 'dialect = "vllm-router"' in report.change
    report = heard(live_frames(b"", 0, ARRAYS), "--as", "aibrix")
    assert report.text("fit", "ok").startswith("the form fits (frames, topic, fields, hashes): aib")
    assert report.code == 0


@pytest.mark.parametrize(
    ("router", "advice"),
    [
        ("llm-d", "set the publisher's topic to kv@IP:PORT@MODEL, for llm-d reads no other"),
        ("vllm-router", "set the publisher's topic to '', for vllm-router reads no other"),
        ("smg", "set the router's filter to 'kv-events'"),
    ],
)
def test_a_filter_of_a_router(router: str, advice: str) -> None:
    """What a router cannot be told is not advised; its topic comes before all that it causes."""
    frames = live_frames(b"kv-events", 0, payload_of(STORED))
    report = heard(frames, "--as", router, "--topic", "kv@", "--block-size", "16")
    assert report.conclusion.startswith("Nothing arrives because messages come under topic 'kv-eve")
    assert report.change.startswith(advice)


def test_what_makes_all_useless_comes_before_a_replay() -> None:
    """A router that shows no block for its dialect is not sent after the replay, which is wrong too."""
    with RawPublisher() as publisher:
        addresses = f"w1={publisher.endpoint},{publisher.replay_endpoint}", "--as", "vllm-router"
        with examining(*addresses) as under_way:
            publisher.await_subscriber()
            publisher.pub.send_multipart(live_frames(b"", 0, ARRAYS))
            report = under_way.report()
    assert "does not answer" in report.text("replay", "wrong")
    assert "it reads maps only" in report.conclusion


def test_the_block_size() -> None:
    """One that the router does not expect, and several in one stream."""
    frames = live_frames(b"", 0, payload_of(STORED))
    report = heard(frames, "--block-size", "16")
    assert "blocks have 4 tokens, and the router expects 16" in report.text("blocks", "wrong")
    assert report.code == 1
    assert "the router has no use for them: blocks have 4 tokens" in report.conclusion
    assert "vLLM --block-size" in report.change
    other = BlockStored([8], None, [1, 2], 2, medium=StorageMedium.GPU)
    report = heard(live_frames(b"", 0, payload_of(STORED, other)))
    assert "block sizes 2, 4 are in one stream" in report.text("blocks", "wrong")


def test_tokens() -> None:
    """Left out they are missed by most routers; of another length than the blocks they are wrong."""
    bare = BlockStored([8], None, [], 4, medium=StorageMedium.GPU)
    report = heard(live_frames(b"", 0, payload_of(bare)))
    assert "token_ids are left out" in report.text("content", "unknown")
    assert report.code == 0
    partial = ["BlockStored", [7], None, [1, 2, 3], 4, None, "GPU"]
    report = heard(live_frames(b"", 0, msgspec.msgpack.encode([1.0, [partial], 0])))
    assert "not as many as block_hashes × block_size" in report.text("content", "wrong")


# ------------------------------------------------------------------------------------------ replay


def test_a_replay_that_is_not_answered() -> None:
    """A ROUTER that takes requests and says nothing is found out, beside a stream that works."""
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses) as under_way:
            publisher.await_subscriber()
            publisher.live(0, STORED)
            report = under_way.report()
        assert "does not answer" in report.text("replay", "wrong")
        assert "does not answer" in report.conclusion
        assert "the replay_endpoint of this publisher" in report.change
        assert report.conclusion.startswith("Events arrive: ")
        assert report.code == 1


def test_a_replay_that_does_not_end() -> None:
    """Answers without an END."""
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses, *TIMEOUT) as under_way:
            client, _ = publisher.request()
            publisher.answer(client, 0, STORED)
            report = under_way.report()
        assert "did not end it" in report.text("replay", "wrong")


def test_a_replay_that_takes_longer_than_we_do() -> None:
    """One was ended, so it is not stuck; what the next has not told yet may be told later."""
    with RawPublisher() as publisher:
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses, *TIMEOUT) as under_way:
            client, _ = publisher.request()
            publisher.end(client)
            client, _ = publisher.request()
            publisher.answer(client, 0)
            report = under_way.report()
        assert "to seq 0, and more" in report.text("replay", "ok")
        assert "none has an event; the rest was not looked at" in report.conclusion
        assert report.code == 0


def test_a_replay_endpoint_where_nobody_is() -> None:
    """What an engine needs for one."""
    port = free_port()
    with RawPublisher() as publisher:
        report = doctor(
            publisher.endpoint, "--replay-endpoint", f"tcp://127.0.0.1:{port}", *BRIEFLY
        )
        said = report.text("replay", "wrong")
        assert "nobody listens" in said
        assert "replay_endpoint" in said
        assert report.code == 1


def test_a_replay_of_thousands_is_not_read_to_its_end() -> None:
    """It has enough at some thousands of messages, and hangs up."""
    with RawPublisher() as publisher:
        publisher.router.setsockopt(zmq.SNDHWM, 0)
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses) as under_way:
            publisher.await_subscriber()
            client, _ = publisher.request()
            with contextlib.suppress(zmq.ZMQError):  # it has hung up
                for seq in range(4000):
                    publisher.answer(client, seq, STORED)
            publisher.live(4000, STORED)
            report = under_way.report()
        assert "3000 batches, 3000 blocks stored, to seq 2999, and more" in report.text(
            "replay", "ok"
        )


def test_a_store_behind_thousands_of_heartbeats() -> None:
    """A replay that begins with a clear and thousands of empty batches is read to what it holds."""
    with RawPublisher() as publisher:
        publisher.router.setsockopt(zmq.SNDHWM, 0)
        addresses = publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint
        with examining(*addresses) as under_way:
            publisher.await_subscriber()
            client, _ = publisher.request()
            publisher.end(client)
            client, start = publisher.request()
            assert start == 0
            publisher.answer(client, 0, AllBlocksCleared())
            for seq in range(1, 3501):
                publisher.answer(client, seq)
            publisher.answer(client, 3501, STORED)
            publisher.answer(client, 3502)
            publisher.end(client)
            publisher.live(3503)
            report = under_way.report()
        said = report.text("replay", "ok")
        assert "3502 batches, 1 block stored, 1 clear, 3500 empty, to seq 3501, and more" in said
        assert "1 block stored, to seq 3501, and more" in report.text("events", "ok")
        assert report.code == 0


def test_a_replay_socket_next_door() -> None:
    """Nobody has named it, and it is at the next port: it is suggested."""
    with zmq.Context() as context:
        with context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as router:
            pub.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.LINGER, 0)
            port = bound_together(pub, router)
            report = doctor(f"tcp://127.0.0.1:{port}", *BRIEFLY)
        said = report.text("replay", "unknown")
        assert f"--replay-endpoint tcp://127.0.0.1:{port + 1}" in said


def bound_together(pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> int:
    """Two ports in a row; the first of them."""
    for _ in range(50):
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with contextlib.suppress(zmq.ZMQError):
            router.bind(f"tcp://127.0.0.1:{port + 1}")
            return port
        pub.unbind(f"tcp://127.0.0.1:{port}")
    raise AssertionError("there are no two ports in a row")


# -------------------------------------------------------------------------------------------- HTTP


def test_another_sidecars_http(tmp_path: Path) -> None:
    """A sidecar that has no sink at the endpoint says where its own are."""
    with sidecar_with(tmp_path) as (sidecar, _), RawPublisher() as publisher:
        http = sidecar.client.http_endpoint
        assert http is not None
        report = doctor(publisher.endpoint, "--http", http)
        said = report.text("http", "wrong")
        assert f"none of the sidecar's sinks is at {publisher.endpoint}" in said
        assert sidecar.client.sinks[0].endpoint in said


def test_a_worker_that_has_told_nothing(tmp_path: Path) -> None:
    """/state knows, where the stream alone cannot tell."""
    with sidecar_with(tmp_path) as (sidecar, _):
        http = sidecar.client.http_endpoint
        assert http is not None
        report = doctor(ends_of(sidecar)[0], "--http", http)
        assert "has told it nothing" in report.text("http", "wrong")
        assert report.conclusion == (
            "Nothing arrives because the sidecar's worker is there and has told it nothing."
        )


def test_a_sink_that_connects_to_the_router(tmp_path: Path) -> None:
    """/state says that the router must bind, also where we may not."""
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    with sidecar_with(tmp_path, mode="connect", endpoint=endpoint, replay_endpoint=None) as (
        sidecar,
        _,
    ):
        http = sidecar.client.http_endpoint
        assert http is not None
        report = doctor(endpoint, "--http", http, *PATIENTLY)
        assert "the router has to bind it" in report.text("http", "wrong")


@contextlib.contextmanager
def engine(pages: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """An engine's HTTP server; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, b""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("pages", "verdict", "text"),
    [
        (
            {"/get_server_info": b'{"kv_events_config": null, "disable_radix_cache": false}'},
            *("wrong", "has no --kv-events-config"),
        ),
        (
            {"/get_server_info": b'{"kv_events_config": "{}", "disable_radix_cache": true}'},
            *("wrong", "has no radix cache"),
        ),
        (
            {"/server_info": b'{"kv_events_config": "{...}", "disable_radix_cache": false}'},
            *("ok", "has events turned on"),
        ),
        ({"/health": b""}, "ok", "is up; it is none of our sidecars"),
        ({}, "unknown", "its /health says 404"),
        ({"/state": b'{"sinks": 7, "source": [], "curve": "\\ud800"}'}, "wrong", "none of the"),
        ({"/state": b"[" * 100_000}, "unknown", "its /health says 404"),
    ],
)
def test_an_engines_http(pages: dict[str, bytes], verdict: str, text: str) -> None:
    """What it says of its own settings, or that it is there; whatever it says is taken as it is."""
    served = {path: (200, body) for path, body in pages.items()}
    port = free_port()
    with engine(served) as http:
        report = doctor(f"tcp://127.0.0.1:{port}", "--http", http, *PATIENTLY)
        assert text in report.text("http", verdict)
        assert report.code == 3


def test_an_http_address_of_nobody() -> None:
    """It is said, and nothing else suffers."""
    http, pub = free_ports(2)
    arguments = f"tcp://127.0.0.1:{pub}", "--http", f"http://127.0.0.1:{http}"
    assert "cannot be asked" in doctor(*arguments).text("http", "unknown")
    with Server(b"") as silent:
        report = doctor(*BRIEFLY, *arguments[:2], silent.endpoint.replace("tcp", "http"))
        assert "does not answer" in report.text("http", "unknown")
