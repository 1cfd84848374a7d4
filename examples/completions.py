"""The HTTP side of the example engine: OpenAI's completions for prompts of token ids, health, metrics.

A thread for each connection. It knows nothing of KV: it makes a `Request` of what it is sent, submits
that to the engine, and writes down the tokens that come back.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol

import msgspec

__all__ = ["Backend", "Failed", "Front", "Held", "Request"]

_MOST_BODY_BYTES = 8 << 20
_MOST_DIGITS = 1000
"""Of its length, leading zeros too; Python reads no number of many thousands."""
_LOOK_S = 0.2
"""How often a waiting connection looks whether its client is still there."""
_LAST_S = 1.0
_MOST_SILENT_S = 60.0
"""For which a client may neither send nor take anything, while it is its turn."""
_OF_THE_SIDECAR = ("/kv_event_sources", "/server_info", "/get_server_info")
"""By which routers find the events."""


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens of a prompt that were cached, by where they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @classmethod
    def of_pages(cls, num_pages: int, on_device: int, landed: int, page_size: int) -> Held:
        """Of so many pages, those that were on the device already, and those that came from storage."""
        device = min(on_device, num_pages)
        storage = min(landed, num_pages - device)
        host = num_pages - device - storage
        return cls(device * page_size, host * page_size, storage * page_size)

    @property
    def tokens(self) -> int:
        """All that need not be computed."""
        return self.device + self.host + self.storage


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a request that was taken is not answered."""

    reason: str


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what becomes of it. The engine puts each token into `answers`, then None or Failed."""

    prompt: list[int]
    max_tokens: int
    reply: list[int] = field(default_factory=list)
    held: Held = Held()
    gone: bool = False
    """The client went away: nobody wants the rest."""
    answers: SimpleQueue[int | Failed | None] = field(default_factory=SimpleQueue)


class Backend(Protocol):
    """What the engine is to this module. Any thread calls it."""

    model: str
    worker_id: str
    vocab_size: int
    most_tokens: int
    """Of a prompt and its reply together."""

    def submit(self, request: Request) -> bool:
        """False when it is full, or ends."""

    def is_well(self) -> bool:
        """Whether it takes requests."""

    def metrics(self) -> dict[str, dict[str, float]]:
        """Values by name, and by label; those whose name ends in _total are counters."""

    def sidecar_http(self) -> str | None:
        """Where the sidecar serves HTTP."""


class _Completion(msgspec.Struct):
    """The body of a request. The last ones are read to be refused: they would change the answer."""

    prompt: list[int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Any = None
    stop: Any = None
    suffix: Any = None


class _Refused(Exception):
    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # clients that come at the same moment

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients come and go: that a connection has broken is nothing to say."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Front:
    """Serves `backend` until it is closed. Raises OSError when it cannot listen there."""

    def __init__(
        self, backend: Backend, host: str, port: int, most_silent_s: float = _MOST_SILENT_S
    ) -> None:
        self._busy = _Busy()
        ours = {"backend": backend, "numbers": count(), "busy": self._busy}
        handler = type("Handler", (_Handler,), {**ours, "timeout": most_silent_s})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be listened at: {error.strerror}") from None
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}"

    def close(self) -> None:
        """Take no more connections, and see the last answers written."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._busy.wait(_LAST_S)


class _Busy:
    """How many requests are being answered."""

    def __init__(self) -> None:
        self._count, self._changed = 0, Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until there are none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)


def _read(body: bytes, backend: Backend) -> tuple[Request, _Completion]:
    """Raises _Refused that names the field and its bound."""
    try:
        asked = msgspec.json.decode(body, type=_Completion)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        missing = re.search(r"required field `(\w+)`", what)
        name = missing[1] if missing else where.lstrip(".").rstrip("`")
        raise _Refused(400, f"{name or 'the body'}: {what}", name or None) from None
    except msgspec.DecodeError as error:
        raise _Refused(400, f"the body: {error}") from None
    except UnicodeDecodeError as error:
        raise _Refused(400, f"the body: {error.reason}") from None
    except RecursionError:
        raise _Refused(400, "the body: nested too deeply") from None
    if asked.model not in (None, backend.model):
        raise _Refused(404, f"model: {asked.model!r} is not served, {backend.model!r} is", "model")
    if asked.temperature:
        raise _Refused(400, f"temperature: {asked.temperature} is not 0, greedy", "temperature")
    for name in ("n", "best_of"):
        if getattr(asked, name) not in (None, 1):
            raise _Refused(400, f"{name}: {getattr(asked, name)} is not 1", name)
    for name in ("echo", "logprobs", "stop", "suffix"):
        value = getattr(asked, name)
        if value is not None and value is not False:  # logprobs may be 0, which asks for some
            raise _Refused(400, f"{name}: is not served", name)
    prompt = _prompt(asked.prompt, backend.vocab_size)
    most = backend.most_tokens - len(prompt)
    if most < 1:
        raise _Refused(
            400, f"prompt: {len(prompt)} tokens are not in 1..{backend.most_tokens - 1}", "prompt"
        )
    max_tokens = min(16, most) if asked.max_tokens is None else asked.max_tokens
    if not 1 <= max_tokens <= most:
        raise _Refused(
            400, f"max_tokens: {max_tokens} is not in 1..{most} behind this prompt", "max_tokens"
        )
    return Request(prompt, max_tokens), asked


def _prompt(asked: list[int | list[int]], vocab_size: int) -> list[int]:
    """Token ids, or a list of one such prompt."""
    if asked and isinstance(asked[0], list):
        if len(asked) > 1:
            raise _Refused(400, f"prompt: {len(asked)} prompts are not 1", "prompt")
        return _prompt([*asked[0]], vocab_size)
    for place, token in enumerate(asked):
        if not isinstance(token, int):
            raise _Refused(400, f"prompt[{place}]: a list among tokens", "prompt")
        if not 0 <= token < vocab_size:
            raise _Refused(400, f"prompt[{place}]: {token} is not in 0..{vocab_size - 1}", "prompt")
    if not asked:
        raise _Refused(400, "prompt: empty, at least one token is needed", "prompt")
    return [token for token in asked if isinstance(token, int)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    backend: Backend
    numbers: Iterator[int]
    busy: _Busy

    def log_message(self, *_: object) -> None:
        """Requests are counted, not logged."""

    def do_GET(self) -> None:
        backend, path = self.backend, self.path.partition("?")[0]
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            self.close_connection = True  # what is not read would be taken for the next request
        if path == "/health":
            well = backend.is_well()
            self._send(200 if well else 503, {"status": "ok" if well else "ending"})
        elif path == "/v1/models":
            card = {"id": backend.model, "object": "model", "owned_by": "examples"}
            card["max_model_len"] = backend.most_tokens  # type: ignore[assignment]  # as vLLM has it
            self._send(200, {"object": "list", "data": [card]})
        elif path == "/metrics":
            self._send_bytes(200, _exposition(backend.metrics()), "text/plain; version=0.0.4")
        elif path in _OF_THE_SIDECAR:
            self._pass_on(path)
        else:
            self._refuse(_Refused(404, f"{path} is not served"))

    def do_POST(self) -> None:
        with self.busy:
            self._complete()

    def _complete(self) -> None:
        try:
            body = self._body()
            if self.path.partition("?")[0] != "/v1/completions":
                raise _Refused(404, f"{self.path} is not served")
            request, asked = _read(body, self.backend)
            if not self.backend.submit(request):
                raise _Refused(503, "as many requests are waiting as may wait; try again")
            name = f"cmpl-{self.backend.worker_id}-{next(self.numbers)}"
            try:
                self._answer(name, request, asked)
            finally:
                request.gone = True
        except _Refused as refused:
            self._refuse(refused)
        except OSError:  # whoever asked is not there any more
            self.close_connection = True

    def _body(self) -> bytes:
        length, *others = self.headers.get_all("content-length", [""])
        if not length.isdecimal() or others or "transfer-encoding" in self.headers:
            self.close_connection = True  # where this body ends is not known
            raise _Refused(411, "content-length: is needed, once, without transfer-encoding")
        if len(length) > _MOST_DIGITS or int(length) > _MOST_BODY_BYTES:
            self.close_connection = True
            raise _Refused(413, f"the body: {length[:20]} bytes are not in 0..{_MOST_BODY_BYTES}")
        return self.rfile.read(int(length))

    # ---------------------------------------------------------------------------------- answers

    def _answer(self, name: str, request: Request, asked: _Completion) -> None:
        tokens = self._tokens(request)
        if not asked.stream:
            for _ in tokens:
                pass
            choice = _choice(request.reply, "length")
            self._send(200, self._object(name, [choice], _usage(request)))
            return
        first = next(tokens)  # until here a failure has a status of its own
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if self._takes_chunks:
            self.send_header("transfer-encoding", "chunked")
        else:  # then it ends with the connection
            self.close_connection = True
            self.send_header("connection", "close")
        self.end_headers()
        try:
            self._event(self._object(name, [_choice([first], None)]))
            for token in tokens:
                self._event(self._object(name, [_choice([token], None)]))
            self._event(self._object(name, [_choice([], "length")]))
            if (asked.stream_options or {}).get("include_usage"):
                self._event(self._object(name, [], _usage(request)))
        except _Refused as failed:
            self._event(_error(failed))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _tokens(self, request: Request) -> Iterator[int]:
        """As they come. Raises _Refused when no more do, ConnectionError when the client is gone."""
        looked = time.monotonic()
        while True:
            try:
                answer = request.answers.get(timeout=_LOOK_S)
            except Empty:
                pass
            else:
                if answer is None:
                    return
                if isinstance(answer, Failed):
                    raise _Refused(503, answer.reason)
                yield answer
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._look()

    def _look(self) -> None:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError

    def _object(
        self, name: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.backend.model,
            "choices": choices,
        }
        return answer if usage is None else {**answer, "usage": usage}

    def _pass_on(self, path: str) -> None:
        """What the sidecar says of itself, for routers that ask the engine."""
        sidecar = self.backend.sidecar_http()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            if sidecar is None:
                raise OSError
            with opener.open(sidecar + path, timeout=2.0) as answer:
                self._send_bytes(200, answer.read(), "application/json")
        except (OSError, HTTPException):  # of the latter kind is an answer that breaks off
            self._refuse(_Refused(503, "the sidecar does not answer now"))

    # -------------------------------------------------------------------------------------- out

    def _refuse(self, refused: _Refused) -> None:
        self._send(refused.status, _error(refused))

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(answer).encode(), "application/json")

    def _send_bytes(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _event(self, answer: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(answer).encode() + b"\n\n")

    @property
    def _takes_chunks(self) -> bool:
        """HTTP/1.0 knows none."""
        return self.request_version >= "HTTP/1.1"

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self._takes_chunks else data)


def _exposition(metrics: dict[str, dict[str, float]]) -> bytes:
    """The text format of Prometheus."""
    lines = []
    for name, values in metrics.items():
        lines.append(f"# TYPE engine_{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for label, value in values.items():
            lines.append(f"engine_{name}{f'{{{label}}}' if label else ''} {value}")
    return "".join(f"{line}\n" for line in lines).encode()


def _choice(tokens: list[int], finish_reason: str | None) -> dict[str, Any]:
    """There is no tokenizer: the text is the ids, and `token_ids` has them as vLLM's does."""
    text = "".join(f" {token}" for token in tokens)
    return {
        "index": 0,
        "text": text,
        "token_ids": tokens,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def _usage(request: Request) -> dict[str, Any]:
    held, prompt, reply = request.held, len(request.prompt), len(request.reply)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {
            "cached_tokens": held.tokens,
            "device": held.device,
            "host": held.host,
            "storage": held.storage,
        },
    }


def _error(refused: _Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "unavailable"
    error = {"message": refused.message, "type": kind, "param": refused.param, "code": None}
    return {"error": error}
