"""The HTTP side of a sidecar, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from threading import Event, Thread, active_count
from typing import Any
from urllib.parse import urlsplit

import pytest
from publisher_rig import eventually, open_fds
from publisher_status_rig import full_status

from publisher.config.sidecar_config import ConfigError, WorkerInfo
from publisher.sidecar.web import StatusServer, kv_event_sources, server_info
from publisher.stream.status import SidecarStatus

pytestmark = pytest.mark.integration

ANY_PORT = "http://127.0.0.1:0"
PATIENCE_S = 20.0


@contextlib.contextmanager
def serving(
    status: SidecarStatus | None = None, endpoint: str = ANY_PORT, request_s: float = 5.0
) -> Iterator[StatusServer]:
    """A server of one status."""
    shown = full_status() if status is None else status
    server = StatusServer(endpoint, lambda: shown, request_s=request_s)
    try:
        yield server
    finally:
        server.close()


def connect(server: StatusServer) -> socket.socket:
    """A connection that a slow server cannot hang."""
    parts = urlsplit(server.endpoint)
    return socket.create_connection((parts.hostname or "", parts.port or 0), PATIENCE_S)


def get(server: StatusServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """One request: status, headers in lower case, body."""
    parts = urlsplit(server.endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read()
    finally:
        connection.close()


def get_json(server: StatusServer, path: str) -> Any:
    """The document at a path that has one."""
    status, headers, body = get(server, path)
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(body)


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes; a reset ends it as well."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


# --------------------------------------------------------------------------------------- documents


def test_metrics_are_in_the_format_of_prometheus() -> None:
    """/metrics is text of version 0.0.4 with our names in it."""
    with serving() as server:
        status, headers, body = get(server, "/metrics")
        assert status == 200
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(headers["content-length"]) == len(body)
        assert b'\nkv_events_sequence{sink="sink0"} 42.0\n' in body


@pytest.mark.parametrize("path", ["/healthz", "/health"])
def test_it_is_alive_while_the_loop_turns(path: str) -> None:
    """200 before the loop begins and while it turns, 503 once it is stuck."""
    status = full_status()
    with serving(status) as server:
        assert get(server, path)[0] == 200
        status.turned_at = time.monotonic() - 31.0
        assert get(server, path)[0] == 503
        status.turned_at = 0.0
        assert get(server, path)[0] == 200


def test_it_is_ready_when_bound_and_fed() -> None:
    """/readyz says what is missing, sockets or worker, and 200 once nothing is."""
    status = full_status()
    status.ready = status.source.worker_up = False
    with serving(status) as server:
        assert get(server, "/readyz")[::2] == (
            *(503, b"not every socket is bound; the worker is not there\n"),
        )
        status.ready = True
        assert get(server, "/readyz")[::2] == (503, b"the worker is not there\n")
        status.source.worker_up = True
        assert get(server, "/readyz")[::2] == (200, b"ok\n")


def test_vllms_discovery_document_has_every_key_that_vllm_router_needs() -> None:
    """By rank, with a wildcard as vLLM writes it, the encoding and the version of the schema."""
    with serving() as server:
        assert get_json(server, "/kv_event_sources") == {
            "1": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://*:5558",
                "replay_endpoint": "tcp://*:5658",
                "topic": "topic-0",
                "buffer_steps": 10_000,
                "hwm": 100_000,
                "encoding": "msgpack",
                "schema_version": 1,
                "block_size": 16,
            }
        }
        assert get_json(server, "/get_server_info")["block_size"] == 16


def test_sglangs_discovery_document_has_bases_that_a_rank_is_added_to() -> None:
    """Ports less the rank, so that a reader that adds its rank comes to the bound ones."""
    with serving() as server:
        document = get_json(server, "/server_info")
        assert document["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "topic": "topic-0",
            "block_size": 16,
            "dp_size": 2,
            "replay_endpoint_port_base": 5657,
        }
        assert document["served_model_name"] == "org/model"
        assert get_json(server, "/get_server_info") == document


def test_a_router_can_ask_for_the_sink_of_its_dialect() -> None:
    """?sink= picks one by its name; there is none of another name."""
    with serving() as server:
        assert get_json(server, "/kv_event_sources?sink=sink1")["1"]["topic"] == "topic-1"
        assert get_json(server, "/server_info?sink=sink1")["kv_events"]["topic"] == "topic-1"
        assert get(server, "/server_info?sink=other")[0] == 404


@pytest.mark.parametrize(
    ("bound", "shown", "host"),
    [
        ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6000", "127.0.0.1"),
        ("tcp://[::1]:6000", "tcp://[::1]:6000", "[::1]"),
        ("tcp://[::]:6000", "tcp://*:6000", "*"),
    ],
)
def test_addresses_are_advertised_so_that_a_port_can_follow(
    bound: str, shown: str, host: str
) -> None:
    """IPv6 keeps its brackets, and any wildcard becomes the one that engines write (96)."""
    status = full_status(1, dp_rank=0)
    sink = replace(status.sinks[0], endpoints=(bound,), replay_endpoint=None)
    assert kv_event_sources(status, sink)["0"]["endpoint"] == shown
    document = server_info(status, sink)["kv_events"]
    assert (document["endpoint_host"], document["endpoint_port_base"]) == (host, 6000)
    assert "replay_endpoint_port_base" not in document


def test_a_sink_nobody_can_connect_to_is_not_advertised() -> None:
    """One that connects is in neither document; one of ipc is in vLLM's, which takes any endpoint."""
    status = full_status(1)
    connecting = replace(status.sinks[0], mode="connect", endpoints=("tcp://router:5557",))
    assert kv_event_sources(status, connecting) == {}
    assert server_info(status, connecting)["kv_events"] is None
    local = replace(status.sinks[0], endpoints=("ipc:///run/kv",), replay_endpoint=None)
    assert kv_event_sources(status, local)["1"]["endpoint"] == "ipc:///run/kv"
    assert server_info(status, local)["kv_events"] is None
    assert server_info(full_status(0), None)["kv_events"] is None


def test_the_state_is_all_there_is_to_tell() -> None:
    """/state has source, sinks, books and live blocks; counts that are zero are left out."""
    with serving() as server:
        document = get_json(server, "/state")
        assert document["worker"]["block_size"] == 16
        assert document["source"]["messages"] == {
            "offered": 100,
            "published": 80,
            "missed": 5,
            "skipped": 4,
            "unreadable": 1,
            "pending": 10,
            "refused": 10,
        }
        events = document["sinks"][0]["events"]
        assert list(events) == ["stored GPU", "stored DISK", "removed", "removed GPU", "cleared"]
        assert set(events.values()) == {1}
        assert document["sinks"][1]["next_seq"] == 42
        assert document["live_blocks"]["GPU"] == 7
        assert document["curve"] == {"keys": 2, "accepted": 5, "denied": 1, "failed": 1}
        assert 59 < document["uptime_s"] < 120


# ------------------------------------------------------------------------------------------ limits


def test_head_has_the_headers_of_get_and_no_body() -> None:
    """HEAD on every path."""
    with serving() as server:
        for path in ("/healthz", "/state", "/kv_event_sources", "/nowhere"):
            status, headers, body = get(server, path, "HEAD")
            assert (status, body) == (404 if path == "/nowhere" else 200, b"")
            assert int(headers["content-length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_changed(method: str) -> None:
    """Any other method is refused, with those that are allowed."""
    with serving() as server:
        status, headers, _ = get(server, "/state", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "//[", "/?x", "/%00", "*"])
def test_there_is_nothing_else(path: str) -> None:
    """Other paths are not found; what was asked for is not in the answer."""
    with serving() as server:
        status, _, body = get(server, path)
        assert (status, body) == (404, b"not found\n")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n",
        b"\0" * 100,
        b"",
    ],
    ids=[
        "long line",
        "long header",
        "many headers",
        "TLS",
        "no path",
        "version",
        "empty",
        "0",
        "-",
    ],
)
def test_a_bad_request_costs_itself_only(
    request_bytes: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused or cut off, says nothing on stderr, and the next request is answered."""
    with serving() as server:
        with connect(server) as connection:
            with contextlib.suppress(OSError):  # cut off before all was said
                connection.sendall(request_bytes)
                connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert not answer or answer.split()[1][:1] in (b"4", b"5")
            assert b"aaaa" not in answer
        assert get(server, "/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_client_that_drips_is_cut_off() -> None:
    """The time is for the whole request: a byte now and then does not buy more of it."""
    began, gone = time.monotonic(), Event()
    with serving(request_s=0.3) as server, connect(server) as connection:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not gone.wait(0.05):
                    connection.sendall(b"X")

        thread = Thread(target=drip)
        thread.start()
        assert read_all(connection) == b""
        gone.set()
        thread.join()
        assert 0.25 < time.monotonic() - began < 5.0


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """An answer that nobody takes ends with the time for it, and holds no thread longer."""
    status = full_status()
    status.source.last_loss = "x" * (32 << 20)  # more than the sockets hold
    with serving(status, request_s=0.3) as server, connect(server) as connection:
        connection.sendall(b"GET /state HTTP/1.1\r\n\r\n")
        ended = Event()

        def wait() -> None:
            for thread in list(server._requests.values()):
                thread.join()
            ended.set()

        assert connection.recv(1) == b"H"  # it is being answered
        waiter = Thread(target=wait)
        waiter.start()
        assert ended.wait(PATIENCE_S)
        waiter.join()


def test_a_flood_of_connections_keeps_nobody_out() -> None:
    """Few are served at once; whoever has been asking longest makes room for who comes next, so those
    that never finish cannot make a probe fail.
    """
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connect(server)).sendall(b"GET /healthz HTTP/1.1\r\n")
            assert len(server._requests) <= 16
        eventually(lambda: 1 if get(server, "/healthz")[0] == 200 else None)


def test_a_document_that_cannot_be_made_is_an_error_of_that_request() -> None:
    """500 with the kind of error and no more; the server goes on."""
    statuses: list[SidecarStatus] = []
    server = StatusServer(ANY_PORT, lambda: statuses[0])
    try:
        status, _, body = get(server, "/state")
        assert (status, body) == (500, b"IndexError\n")
        statuses.append(full_status())
        assert get(server, "/state")[0] == 200
    finally:
        server.close()


# ---------------------------------------------------------------------------------- binding, closing


def test_the_bound_port_is_read_back() -> None:
    """Port 0 becomes a real one, and two servers never share one."""
    with serving() as one, serving() as other:
        assert one.endpoint.startswith("http://127.0.0.1:")
        assert not one.endpoint.endswith(":0")
        assert one.endpoint != other.endpoint


def test_it_listens_on_ipv6() -> None:
    """http://[::1]:0 binds, is advertised with brackets, and answers (96)."""
    with serving(endpoint="http://[::1]:0") as server:
        assert server.endpoint.startswith("http://[::1]:")
        assert get(server, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://127.0.0.1", "http_endpoint: .*127.0.0.1"),
        ("https://127.0.0.1:0", "http_endpoint: "),
        ("http://127.0.0.1:65536", "http_endpoint: .*65536"),
        ("http://192.0.2.1:0", "http_endpoint: http://192.0.2.1:0 cannot be bound: "),
        ("http://nowhere.invalid:0", "http_endpoint: http://nowhere.invalid:0 cannot be bound: "),
        ("http://a..b:0", r"^http_endpoint: http://a\.\.b:0 cannot be bound: ."),
        (f"http://{'a' * 64}:0", "^http_endpoint: http://a{64}:0 cannot be bound: ."),
    ],
)
def test_an_endpoint_that_cannot_be_bound_is_an_error_with_key_and_reason(
    endpoint: str, reason: str
) -> None:
    """Not a server that nobody reaches."""
    with pytest.raises(ConfigError, match=reason):
        StatusServer(endpoint, full_status)


def test_a_port_that_is_taken_is_an_error() -> None:
    """The second server on one port is refused, with the reason, and the first goes on."""
    with serving() as server:
        with pytest.raises(
            ConfigError, match=r"^http_endpoint: .* cannot be bound: Address already"
        ):
            StatusServer(server.endpoint, full_status)
        assert get(server, "/healthz")[0] == 200


def test_closing_cuts_off_whoever_is_connected() -> None:
    """It ends within its second, though clients hold their connections; twice is once."""
    with serving() as server, contextlib.ExitStack() as stack:
        holders = [stack.enter_context(connect(server)) for _ in range(4)]
        for one in holders:
            one.sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - began < 3.0
        for one in holders:
            answer = read_all(one)  # 503 when it was about to be accepted
            assert not answer or answer.startswith(b"HTTP/1.0 503 ")
        with pytest.raises(OSError, match=r"."):
            connect(server)


def test_nothing_stays_open() -> None:
    """After refusals and clients that were cut off, close leaves no descriptor and no thread."""
    fds, threads = open_fds(), active_count()
    with serving() as server, contextlib.ExitStack() as stack:
        for one in [stack.enter_context(connect(server)) for _ in range(12)]:
            one.sendall(b"GET / HTTP/1.1\r\n")
        server.close()
    assert open_fds() == fds
    assert active_count() == threads


def test_secrets_are_nowhere_to_be_read() -> None:
    """No document has a key in it: the status holds none."""
    status = full_status()
    status.worker = WorkerInfo(block_size=16)
    with serving(status) as server:
        for path in ("/state", "/metrics", "/server_info", "/kv_event_sources"):
            body = get(server, path)[2].lower()
            assert b"secret" not in body
            assert b"token_ids" not in body


def test_who_asks_finds_the_sink_of_its_dialect() -> None:
    """Wherever it stands among the sinks; without one of its own, the first."""
    status = full_status()
    first, second, *_ = status.sinks
    status.sinks = (replace(first, dialect="llm-d"), replace(second, dialect="vllm-router"))
    with serving(status) as server:
        assert get_json(server, "/kv_event_sources")["1"]["topic"] == second.topic
        assert get_json(server, "/get_server_info")["kv_events"]["topic"] == second.topic
        assert get_json(server, "/server_info")["kv_events"]["topic"] == first.topic
