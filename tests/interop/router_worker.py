"""An HTTP server as vllm-router expects its workers: it answers every completion with its name."""

from __future__ import annotations

import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any

__all__ = ["MODEL", "HttpWorker", "direct"]

MODEL = "model"

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens pages of loopback, whatever proxies there are."""


class HttpWorker:
    """Healthy at once; computes nothing.

    `documents`: the HTTP endpoint of the sidecar, whose discovery documents the worker shows as its own;
    None: it has none to show.
    """

    def __init__(self, name: str, documents: str | None = None) -> None:
        self.name, self._documents = name, documents
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def get(self, path: str) -> Any:
        """The document at a path; None: there is none."""
        if path in ("/kv_event_sources", "/get_server_info", "/server_info"):
            return None if self._documents is None else _fetched(self._documents + path)
        if path.startswith("/v1/models"):
            return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        return {"status": "ok"}

    def completion(self) -> Any:
        """The answer to a request."""
        return {
            "id": "c",
            "object": "text_completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "text": self.name, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    def close(self) -> None:
        """Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> HttpWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _fetched(url: str) -> Any:
    try:
        with direct.open(url, timeout=5.0) as response:
            return json.load(response)
    except OSError:  # the sidecar is not there now
        return None


def _handler(worker: HttpWorker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

        def reply(self, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply(worker.get(self.path))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.reply(worker.completion())

    return Handler
