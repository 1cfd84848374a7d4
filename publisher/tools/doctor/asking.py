"""A doctor's questions over HTTP: what a sidecar or an engine says of itself. One GET each, in bounds."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from publisher.config.checks import one_line, shown
from publisher.config.endpoint import Endpoint
from publisher.tools.doctor.diagnosis import Finding
from publisher.tools.doctor.reach import dial_raw
from publisher.tools.doctor.zmtp import looks_like

__all__ = ["Page", "ask", "fetch", "first_words", "judge_ready", "judge_state", "read_url"]

_MOST_BYTES = 4 << 20
_GET_S = 3.0
_PROBE = "http"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer. `status`: 0 where it was none of HTTP, or none at all, for the reason in `body`."""

    status: int
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON object; empty where it is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


# ----------------------------------------------------------------------------------------- asking


def read_url(key: str, text: str) -> tuple[str, int]:
    """Host and port. Raises ValueError unless it is http://HOST:PORT, with a path or without."""
    try:
        parts = urlsplit(text)
        port = parts.port or 80
    except ValueError:
        raise ValueError(f"{key}: {shown(text)} is not http://HOST:PORT") from None
    if parts.scheme != "http" or not parts.hostname or parts.username is not None:
        raise ValueError(f"{key}: {shown(text)} is not http://HOST:PORT")
    return parts.hostname, port


def fetch(host: str, port: int, path: str, timeout_s: float) -> Page:
    """Never raises for what the other end does."""
    deadline = time.monotonic() + min(_GET_S, timeout_s)
    reached = dial_raw(Endpoint("tcp", host, port), timeout_s)
    if reached.connection is None:
        assert reached.error is not None
        return _failed(reached.error)
    name = f"[{host}]" if ":" in host else host
    request = f"GET {path} HTTP/1.0\r\nHost: {name}:{port}\r\nAccept: */*\r\n\r\n"
    with reached.connection as connection:
        try:
            connection.sendall(request.encode("ascii", errors="replace"))
            return _parse(_read_all(connection, deadline))
        except OSError as error:
            return _failed(error)


def _failed(error: OSError) -> Page:
    why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror
    return Page(0, (why or "it is not there").encode())


def _read_all(connection: socket.socket, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < _MOST_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


def _parse(data: bytes) -> Page:
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not head.startswith(b"HTTP/") or len(words) < 2 or not words[1][:3].isdigit():
        what = looks_like(data) if data else "nothing"
        return Page(0, f"it answers {what}, which is not HTTP".encode())
    return Page(int(words[1][:3]), body)


def first_words(connection: socket.socket, deadline: float) -> str | None:
    """What says something only when it is asked in HTTP; None: nothing even then. Does not close it."""
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        data = connection.recv(256)
    except OSError:
        return None
    return looks_like(data) if data else None


# ---------------------------------------------------------------------------------------- judging


def ask(
    host: str, port: int, endpoint: Endpoint | None, timeout_s: float, *, subscribed: bool
) -> Iterator[Finding]:
    """What the server there says. `subscribed`: whether we are at `endpoint` now, as it should see."""
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    page = fetch(host, port, "/state", timeout_s)
    if not page.status:
        text = f"{where} cannot be asked: {page.body.decode(errors='replace')}"
        advice = (
            "the sidecar logs its HTTP port, which is a free one unless http_endpoint says another"
        )
        yield Finding(_PROBE, "unknown", one_line(text), advice)
        return
    if "sinks" in page.document:
        ready = fetch(host, port, "/readyz", timeout_s)
        yield from judge_ready(where, ready)
        yield from judge_state(page.document, endpoint, subscribed=subscribed)
        return
    yield _judge_engine(where, host, port, timeout_s)


def judge_ready(where: str, page: Page) -> Iterator[Finding]:
    """Of /readyz."""
    if page.status == 200:
        yield Finding(_PROBE, "ok", f"the sidecar at {where} is ready, and its worker is there")
        return
    why = one_line(page.body[:200].decode(errors="replace").strip()) or f"status {page.status}"
    advice = ""
    if "engine" in why:
        advice = "start the engine; it has to bind where relay.endpoint says: tcp://*:PORT"
    elif "worker" in why:
        advice = "start the worker; spawn() or listen() in it is what connects the two"
    text = f"the sidecar at {where} is not ready: {why}"
    yield Finding(_PROBE, "wrong", text, advice, stops=True)


def judge_state(
    state: dict[str, Any], endpoint: Endpoint | None, *, subscribed: bool
) -> Iterator[Finding]:
    """Of /state; anything may be in it."""
    source = _dict(state.get("source"))
    relayed = source.get("kind") == "relay"
    messages = _dict(source.get("messages"))
    offered = messages.get("offered")
    if source.get("worker_up") is True and offered == 0:
        text = "the sidecar's worker is there and has told it nothing"
        advice = "the worker has to call sidecar.pump(cache) after each change"
        if relayed:
            advice = "is the engine's own publisher silent? ask the doctor about its endpoint"
        yield Finding(_PROBE, "wrong", text, advice, stops=True)
    if source.get("in_step") is False and source.get("worker_up") is True:
        text = "something the worker told was lost, and it is asked to tell its state anew"
        yield Finding(_PROBE, "unknown", text, "it does so at its next pump(); is that called?")
    if isinstance(refused := messages.get("refused"), int) and refused and not relayed:
        text = f"{refused} messages of the worker were refused, and told anew since"
        yield Finding(_PROBE, "unknown", text)
    if isinstance(orphans := state.get("orphans_since_clear"), int) and orphans:
        held = any(_dict(state.get("live_blocks")).values())
        text = (
            f"{orphans} blocks were left out since all was last cleared, for they are behind others of"
            " which nothing was heard: routers do not know of such prompts"
        )
        yield Finding(_PROBE, "wrong", text, _FLUSH, stops=not held)
    size = _dict(state.get("left_out_blocks")).get("wrong_block_size")
    if isinstance(size, int) and size:
        text = f"{size} blocks of the engine were left out: they are not of the size it was told"
        advice = (
            "give block_size (--block-size) as the engine has it: its --block-size or --page-size"
        )
        yield Finding(_PROBE, "wrong", text, advice, stops=True)
    sinks = [one for one in _list(state.get("sinks")) if isinstance(one, dict)]
    yield from _judge_sinks(sinks, endpoint, subscribed=subscribed)
    yield from _judge_curve(_dict(state.get("curve")))


def _judge_sinks(
    sinks: list[dict[str, Any]], endpoint: Endpoint | None, *, subscribed: bool
) -> Iterator[Finding]:
    if endpoint is None:
        return
    ours = [one for one in sinks if any(_is_at(endpoint, each) for each in _addresses(one))]
    if not ours:
        told = "; ".join(
            f"{one.get('name')}: {one.get('mode')} {' '.join(_addresses(one))}" for one in sinks[:8]
        )
        text = f"none of the sidecar's sinks is at {endpoint}, but {told}"
        advice = "take the address of the sink whose dialect is your router's"
        yield Finding(_PROBE, "wrong", one_line(text[:600]), advice)
        return
    for one in ours:
        yield _judge_sink(one, endpoint, subscribed=subscribed)
        filtered = _dict(one.get("dropped")).get("filtered")
        if isinstance(filtered, int) and filtered:
            text = f"its dialect {one.get('dialect')} has left out {filtered} events"
            yield Finding(
                _PROBE, "unknown", one_line(text[:200]), "docs/consumers.md says which and why"
            )


def _judge_sink(sink: dict[str, Any], endpoint: Endpoint, *, subscribed: bool) -> Finding:
    name = one_line(str(sink.get("name"))[:80])
    if sink.get("mode") == "connect":
        text = f"the sidecar's sink {name} connects to {endpoint}: the router has to bind it"
        advice = (
            'have the router listen there, or set mode = "bind", and connect the router to that'
        )
        return Finding(_PROBE, "wrong", text, advice, stops=True)
    if subscribed and sink.get("subscribers") == 0:
        text = f"the sidecar's sink {name} sees no subscriber, though we are one at {endpoint}"
        advice = "another sidecar, or a proxy, is at that address"
        return Finding(_PROBE, "wrong", text, advice)
    own = ", ours among them" if subscribed else ""
    text = (
        f"its sink {name}, dialect {sink.get('dialect')}: batches published: {sink.get('batches')},"
        f" subscriptions: {sink.get('subscribers')}{own}"
    )
    return Finding(_PROBE, "ok", one_line(text[:300]))


def _judge_curve(curve: dict[str, Any]) -> Iterator[Finding]:
    denied = curve.get("denied")
    if isinstance(denied, int) and denied:
        text = f"{denied} handshakes were denied: their keys are not in curve.client_keys"
        advice = f"it knows {curve.get('keys')} keys now; SIGHUP makes it read the folder again"
        yield Finding(_PROBE, "unknown", one_line(text), one_line(advice[:200]))


def _judge_engine(where: str, host: str, port: int, timeout_s: float) -> Finding:
    """Of a server that is none of our sidecars."""
    for path in ("/get_server_info", "/server_info"):
        told = fetch(host, port, path, timeout_s).document
        if "disable_radix_cache" not in told and "kv_events_config" not in told:
            continue
        if told.get("disable_radix_cache") is True:
            text = f"the SGLang server at {where} has no radix cache, and so no events"
            return Finding(_PROBE, "wrong", text, "start it without --disable-radix-cache")
        if not told.get("kv_events_config"):
            text = f"the SGLang server at {where} has no --kv-events-config, and so no events"
            return Finding(_PROBE, "wrong", text, _SGLANG, stops=True)
        return Finding(_PROBE, "ok", f"the SGLang server at {where} has events turned on")
    health = fetch(host, port, "/health", timeout_s)
    if health.status == 200:
        text = f"the server at {where} is up; it is none of our sidecars"
        return Finding(_PROBE, "ok", text)
    text = f"the server at {where} is none of our sidecars (its /health says {health.status})"
    return Finding(_PROBE, "unknown", text)


_SGLANG = (
    'start it with --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557",'
    ' "replay_endpoint": "tcp://*:5558"}\''
)


_FLUSH = (
    "flush the engine's cache, once (SGLang: POST /flush_cache; vLLM in development mode: POST"
    " /reset_prefix_cache). It does not come to that where a relay starts with the engine, asks its"
    " replay endpoint, and the engine's buffer_steps are enough"
)


def _addresses(sink: dict[str, Any]) -> list[str]:
    return [one for one in _list(sink.get("endpoints")) if isinstance(one, str)]


def _is_at(endpoint: Endpoint, text: str) -> bool:
    """Whether they could be one: by the port, for a host has many names."""
    try:
        told = Endpoint.parse("", text)
    except ValueError:
        return False
    if "ipc" in (told.scheme, endpoint.scheme):
        return told.takes(endpoint)
    return told.port == endpoint.port


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
