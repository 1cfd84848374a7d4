"""The HTTP side: metrics, health, and the documents by which routers find the sinks.

A thread accepts, and one more for each request answers from the status; none of them touches the loop.
All is bounded: requests at once, the time and the bytes each may take to ask, and closing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from threading import Lock, Thread
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import ConfigError
from publisher.sidecar.metrics import CONTENT_TYPE, scrape
from publisher.stream.status import SidecarStatus, SinkStatus, is_stuck

__all__ = ["StatusServer", "kv_event_sources", "server_info", "state"]

_REQUESTS_AT_ONCE = 8
_REQUEST_S = 5.0
_REQUEST_BYTES = 16 << 10
_BACKLOG = 16
_NO_DESCRIPTORS_S = 0.1
_CLOSE_S = 1.0
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"

Read: TypeAlias = Callable[[], SidecarStatus]
Answer: TypeAlias = tuple[HTTPStatus, str, bytes]


# -------------------------------------------------------------------------------------- documents


def kv_event_sources(status: SidecarStatus, sink: SinkStatus | None) -> dict[str, Any]:
    """What vLLM shows at /kv_event_sources: the sockets by rank. Empty for a sink that connects."""
    if sink is None or sink.mode == "connect":
        return {}
    document = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _advertised(sink.endpoints[0]),
        "replay_endpoint": sink.replay_endpoint and _advertised(sink.replay_endpoint),
        "topic": sink.topic,
        "buffer_steps": sink.buffer_steps,
        "hwm": sink.hwm,
        "encoding": "msgpack",
        "schema_version": 1,
        "block_size": status.worker.block_size,
    }
    return {str(status.worker.dp_rank): document}


def server_info(status: SidecarStatus, sink: SinkStatus | None) -> dict[str, Any]:
    """What SGLang shows at /server_info, as far as it is about events. Readers add the rank to a base."""
    worker = status.worker
    return {
        "model_path": worker.model,
        "served_model_name": worker.model,
        "block_size": worker.block_size,
        "page_size": worker.block_size,
        "dp_size": status.worker.num_ranks,
        "kv_events": _kv_events(status, sink),
    }


def _kv_events(status: SidecarStatus, sink: SinkStatus | None) -> dict[str, Any] | None:
    if sink is None or sink.mode == "connect":
        return None
    endpoint = Endpoint.parse("endpoint", _advertised(sink.endpoints[0]))
    if endpoint.port is None:  # of ipc, which this document has no words for
        return None
    rank = status.worker.dp_rank
    document: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": str(endpoint).removeprefix("tcp://").rpartition(":")[0],
        "endpoint_port_base": endpoint.port - rank,
        "topic": sink.topic,
        "block_size": status.worker.block_size,
        "dp_size": status.worker.num_ranks,
    }
    if sink.replay_endpoint is not None:
        port = Endpoint.parse("replay_endpoint", sink.replay_endpoint).port
        if port is not None:
            document["replay_endpoint_port_base"] = port - rank
    return document


def _advertised(endpoint: str) -> str:
    """A wildcard as engines write it; readers put the host they reached the worker at in its place."""
    found = Endpoint.parse("endpoint", endpoint)
    return str(replace(found, host="*")) if found.is_wildcard else endpoint


def state(status: SidecarStatus, now: float) -> dict[str, Any]:
    """All there is to tell, for people. `now`: seconds since the epoch."""
    source, books = status.source, status.source.books
    return {
        "version": status.version,
        "pid": status.pid,
        "uptime_s": round(now - status.started_at, 3),
        "ready": status.ready,
        "worker": {name: getattr(status.worker, name) for name in status.worker.__struct_fields__},
        "source": {
            "kind": source.kind,
            "worker_up": source.worker_up,
            "in_step": source.in_step,
            "messages": books._asdict() | {"refused": books.refused},
            "events": _counts(source.received.events),
            "blocks": _counts(source.received.blocks),
            "resyncs": source.resyncs,
            "last_loss": source.last_loss,
            "link_bytes": source.link_bytes,
            "link_capacity": source.link_capacity,
        },
        "live_blocks": dict(status.live_blocks),
        "left_out_blocks": asdict(status.left_out),
        "orphans_since_clear": status.orphans_since_clear,
        "sinks": [_sink_state(sink) for sink in status.sinks],
        "journal": asdict(status.journal),
        "curve": status.curve and asdict(status.curve),
        "log_lines_dropped": status.log_lines_dropped,
    }


def _sink_state(sink: SinkStatus) -> dict[str, Any]:
    return {
        "name": sink.name,
        "dialect": sink.dialect,
        "mode": sink.mode,
        "endpoints": list(sink.endpoints),
        "replay_endpoint": sink.replay_endpoint,
        "topic": sink.topic,
        "next_seq": sink.next_seq,
        "oldest_seq": sink.oldest_seq,
        "retained_batches": sink.retained_batches,
        "retained_bytes": sink.retained_bytes,
        "batches": sink.batches,
        "bytes": sink.bytes,
        "events": _counts(sink.published.events),
        "blocks": _counts(sink.published.blocks),
        "dropped": dict(sink.dropped),
        "held_events": sink.held_events,
        "subscribers": sink.subscribers,
        "overflows": sink.overflows,
        "replay": asdict(sink.replay),
    }


def _counts(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    """Only what has been; "stored GPU", "removed" where no medium was named."""
    return {" ".join(filter(None, key)): count for key, count in list(counts.items()) if count}


# ----------------------------------------------------------------------------------------- server


class StatusServer:
    """Serves the status that `read` gives until it is closed.

    `endpoint`: http://HOST:PORT, of this rank. Raises ConfigError naming
    http_endpoint when it cannot be bound, with nothing left open. `request_s`: how long a client may take
    to ask, and then to read.
    """

    def __init__(self, endpoint: str, read: Read, *, request_s: float = _REQUEST_S) -> None:
        self._read, self._request_s = read, request_s
        self._listener = _listen(endpoint)
        host, port = self._listener.getsockname()[:2]
        self.endpoint = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Where it listens, the port filled in."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = Lock()
        self._requests: dict[socket.socket, Thread] = {}
        self._closed = False
        self._thread = Thread(target=self._accept, name="kvevents-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, cutting off requests that are under way; within a second or so. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            under_way = list(self._requests.items())
            for connection, _ in under_way:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(self._wake, 1)
        deadline = time.monotonic() + _CLOSE_S
        for thread in (self._thread, *(thread for _, thread in under_way)):
            if thread.ident is not None:  # else it could not be started
                thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        if not self._thread.is_alive():
            os.close(self._wake)

    def _accept(self) -> None:
        poller = select.poll()
        for fd in (self._listener.fileno(), self._wake):
            poller.register(fd, select.POLLIN)
        out_of_descriptors = select.poll()
        out_of_descriptors.register(self._wake, select.POLLIN)
        while True:
            poller.poll()
            if self._closed:
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:  # it stays readable: do not spin
                out_of_descriptors.poll(_NO_DESCRIPTORS_S * 1000)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = Thread(target=self._serve, args=(connection,), daemon=True)
        with self._lock:
            if (
                len(self._requests) >= _REQUESTS_AT_ONCE
            ):  # whoever has been asking longest makes room
                with contextlib.suppress(OSError):
                    next(iter(self._requests)).shutdown(socket.SHUT_RDWR)
            busy = self._closed or len(self._requests) >= 2 * _REQUESTS_AT_ONCE
            if not busy:
                self._requests[connection] = thread
        if busy:
            connection.settimeout(0)
            with contextlib.suppress(OSError):
                connection.send(_BUSY)
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):  # the client went away
                _Handler(connection, self._read, self._request_s)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with self._lock:
            del self._requests[connection]
            connection.close()


def _listen(text: str) -> socket.socket:
    endpoint = Endpoint.parse_http("http_endpoint", text)
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.settimeout(0)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter: a part of the name is empty or too long
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"http_endpoint: {text} cannot be bound: {reason}") from None
    return listener


class _TooMuchError(Exception):
    """The request has more bytes than it may have."""


class _RequestReader(io.RawIOBase):
    """A connection's bytes, for a bounded time in all, however slowly they drip, and so many of them."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s
        self._left = _REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise _TooMuchError
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request."""

    default_request_version = "HTTP/1.0"

    def __init__(self, connection: socket.socket, read: Read, request_s: float) -> None:
        self._read, self._request_s = read, request_s
        super().__init__(connection, None, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_RequestReader(self.connection, self._request_s))

    def handle(self) -> None:
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        try:
            self.handle_one_request()
        except _TooMuchError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def do_GET(self) -> None:
        try:
            status, content_type, body = self._answer()
        except (
            Exception
        ) as error:  # a document that cannot be made must not end in a dead connection
            status, content_type = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT
            body = f"{type(error).__name__}\n".encode()
        self._send(status, content_type, body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, *_: object, **__: object) -> None:
        """In plain text, and nothing of the request in it."""
        self.close_connection = True
        status, headers = HTTPStatus(code), {}
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status, headers = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}
        self._send(status, _TEXT, f"{status.phrase}\n".encode(), **headers)

    def version_string(self) -> str:
        return "kvevents"

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def _send(self, status: HTTPStatus, content_type: str, body: bytes, **headers: str) -> None:
        self.connection.settimeout(
            self._request_s
        )  # for all of an answer, not for each piece of it
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> Answer:
        path, _, query = self.path.partition("?")
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, scrape(self._read)
        status = self._read()
        match path:
            case "/healthz" | "/health":
                return _healthz(status)
            case "/readyz":
                return _readyz(status)
            case "/state":
                return _json(state(status, time.time()))
            case "/kv_event_sources" | "/server_info" | "/get_server_info":
                return _discovery(path, parse_qs(query).get("sink"), status)
        return HTTPStatus.NOT_FOUND, _TEXT, b"not found\n"


def _healthz(status: SidecarStatus) -> Answer:
    if is_stuck(status, time.monotonic()):
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"the loop is stuck\n"
    return HTTPStatus.OK, _TEXT, b"ok\n"


def _readyz(status: SidecarStatus) -> Answer:
    missing = [
        told
        for there, told in (
            (status.ready, "not every socket is bound"),
            (
                status.source.worker_up,
                "the engine is not connected"
                if status.source.kind == "relay"
                else "the worker is not there",
            ),
        )
        if not there
    ]
    if missing:
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, ("; ".join(missing) + "\n").encode()
    return HTTPStatus.OK, _TEXT, b"ok\n"


_ASKERS = {
    "/kv_event_sources": ("vllm-router", "vllm"),
    "/server_info": ("sgl-router", "sglang"),
    "/get_server_info": ("vllm-router", "sglang"),
}
"""The dialects of those who look for sinks at a path, the likelier first."""


def _discovery(path: str, names: list[str] | None, status: SidecarStatus) -> Answer:
    """Of the sink asked for by name; without a name, of the first that is for those who ask here, or else
    of the first.
    """
    sinks = [sink for sink in status.sinks if names is None or sink.name in names]
    if names is not None and not sinks:
        return HTTPStatus.NOT_FOUND, _TEXT, b"no such sink\n"
    make = kv_event_sources if path == "/kv_event_sources" else server_info
    theirs = [sink for dialect in _ASKERS[path] for sink in sinks if sink.dialect == dialect]
    return _json(make(status, next(iter((*theirs, *sinks)), None)))


def _json(document: dict[str, Any]) -> Answer:
    return HTTPStatus.OK, _JSON, json.dumps(document, default=str).encode()
