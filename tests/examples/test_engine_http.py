"""examples.engine as a process: what HTTP says, and what becomes of it when others die."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from engine_rig import PAGE, PATIENCE_S, EngineProcess, Stepped, eventually, greedy, is_gone

from examples.completions import Failed, Front, Request
from examples.options import read_options
from kvevents import BlockIndex
from publisher import Batch, Restarted, Subscriber

pytestmark = pytest.mark.integration

PROMPT = [(11 * i * i + 5 * i + 1) % 128 for i in range(21)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One for all, whose pool has 1024 tokens."""
    folder = tmp_path_factory.mktemp("engine")
    tiers = ("--device-pages", "256", "--host-pages", "256", "--storage-dir", str(folder / "pages"))
    with EngineProcess(folder, "--worker-id", "w7", *tiers) as process:
        yield process
        code, errors = process.end()
        assert code == 0
        assert [line for line in errors.splitlines() if "ended with -9; the next" not in line] == []


def tokens_of(body: Any) -> list[int]:
    """Of a completion, or of an event of a stream."""
    (choice,) = body["choices"]
    assert choice["text"] == "".join(f" {token}" for token in choice["token_ids"])
    found: list[int] = choice["token_ids"]
    return found


def test_a_completion(engine: EngineProcess) -> None:
    """OpenAI's shape, the model's tokens; asked again, as a list of one prompt, the prompt's whole pages
    count as cached.
    """
    status, first = engine.post({"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    assert status == 200
    assert tokens_of(first) == greedy(PROMPT, 5)
    assert first["id"].startswith("cmpl-w7-")
    assert (first["object"], first["model"]) == ("text_completion", "example")
    assert first["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": 21, "completion_tokens": 5, "total_tokens": 26}
    cached = {"cached_tokens": 0, "device": 0, "host": 0, "storage": 0}
    assert first["usage"] == {**usage, "prompt_tokens_details": cached}
    status, again = engine.post({"prompt": [PROMPT], "max_tokens": 5, "model": "example"})
    assert (status, tokens_of(again)) == (200, tokens_of(first))
    cached |= {"cached_tokens": 20, "device": 20}
    assert again["usage"] == {**usage, "prompt_tokens_details": cached}


def test_a_stream(engine: EngineProcess) -> None:
    """An event for each token, one that says why it ends, one of usage where that was asked for."""
    prompt = PROMPT[::-1]
    *parts, end, usage = engine.stream(
        {"prompt": prompt, "max_tokens": 4, "stream_options": {"include_usage": True}}
    )
    assert [token for part in parts for token in tokens_of(part)] == greedy(prompt, 4)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 4
    assert (tokens_of(end), end["choices"][0]["finish_reason"]) == ([], "length")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert len(list(engine.stream({"prompt": prompt, "max_tokens": 4}))) == 5


def test_many_at_once(engine: EngineProcess) -> None:
    """Sixteen clients at the same time, twice as many as run at a time, get each its own tokens."""
    prompts = [PROMPT[: 1 + i] for i in range(16)]
    with ThreadPoolExecutor(16) as clients:
        answers = list(
            clients.map(lambda it: engine.post({"prompt": it, "max_tokens": 6}), prompts)
        )
    assert [answer.status for answer in answers] == [200] * 16
    assert [tokens_of(answer.body) for answer in answers] == [greedy(one, 6) for one in prompts]


@pytest.mark.parametrize(
    ("body", "status", "field", "says"),
    [
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens", "0 is not in 1..1023"),
        ({"prompt": [1], "max_tokens": 1024}, 400, "max_tokens", "1024 is not in 1..1023"),
        ({"prompt": [1], "max_tokens": "3"}, 400, "max_tokens", "Expected `int | null`, got `str`"),
        ({"prompt": [1] * 1024}, 400, "prompt", "1024 tokens are not in 1..1023"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": [[]]}, 400, "prompt", "empty"),
        ({"prompt": [[1], [2]]}, 400, "prompt", "2 prompts are not 1"),
        ({"prompt": [3, 128]}, 400, "prompt", "prompt[1]: 128 is not in 0..127"),
        ({"prompt": [-1]}, 400, "prompt", "prompt[0]: -1 is not in 0..127"),
        ({"prompt": [1, [2]]}, 400, "prompt", "prompt[1]: a list among tokens"),
        ({"prompt": "text"}, 400, "prompt", "Expected `array`, got `str`"),
        ({}, 400, "prompt", "missing required field"),
        ({"prompt": [1], "temperature": 0.5}, 400, "temperature", "0.5 is not 0"),
        ({"prompt": [1], "n": 2}, 400, "n", "2 is not 1"),
        ({"prompt": [1], "best_of": 2}, 400, "best_of", "2 is not 1"),
        ({"prompt": [1], "suffix": "x"}, 400, "suffix", "is not served"),
        ({"prompt": [1], "stop": ["x"]}, 400, "stop", "is not served"),
        ({"prompt": [1], "logprobs": 1}, 400, "logprobs", "is not served"),
        ({"prompt": [1], "logprobs": 0}, 400, "logprobs", "is not served"),
        ({"prompt": [1], "echo": True}, 400, "echo", "is not served"),
        ({"prompt": [1], "model": "other"}, 404, "model", "'other' is not served, 'example' is"),
        ([1], 400, None, "Expected `object`, got `array`"),
        (b"{", 400, None, "Input data was truncated"),
        (b"\xff", 400, None, "the body"),
        (b'{"prompt": [1], "stop": ' + b"[" * 100_000, 400, None, "nested too deeply"),
    ],
    ids=lambda it: repr(it)[:40],
)
def test_bad_input(
    body: object, status: int, field: str | None, says: str, engine: EngineProcess
) -> None:
    """It is refused with the field and its bound."""
    got = engine.post(body)
    assert (got.status, got.body["error"]["param"]) == (status, field)
    assert got.body["error"]["type"] == "invalid_request_error"
    assert says in got.body["error"]["message"]


def test_bad_http(engine: EngineProcess) -> None:
    """Other paths, after which a connection can be used on; a body without a length, and one too long,
    after which it cannot, as is said.
    """
    assert engine.get("/v1/nothing").status == engine.post({}, "/v1/chat/completions").status == 404
    with contextlib.closing(engine.connect()) as connection:
        for path, status in (("/nothing", 404), ("/v1/completions", 200)):
            connection.request("POST", path, json.dumps({"prompt": PROMPT, "max_tokens": 1}))
            response = connection.getresponse()
            response.read()
            assert response.status == status
    for length, status in ((None, 411), ("-1", 411), (str(9 << 20), 413), ("9" * 5000, 413)):
        headers = {} if length is None else {"Content-Length": length}
        with contextlib.closing(engine.connect()) as connection:
            connection.putrequest("POST", "/v1/completions")
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            assert (response.status, response.headers["connection"]) == (status, "close")
            response.read()
            assert connection.sock is None
    assert engine.get("/health").status == 200


def test_a_client_of_http_1_0(engine: EngineProcess) -> None:
    """Gets a stream without chunks, which it does not know; also one that would keep its connection."""
    for more in (b"", b"Connection: keep-alive\r\n"):
        head, body = exchange(
            engine, b"POST /v1/completions HTTP/1.0\r\nContent-Length: 47\r\n" + more, _STREAM
        )
        assert b"transfer-encoding" not in head.lower()
        first, *_, end, nothing = body.split(b"\n\n")
        assert len(tokens_of(json.loads(first.removeprefix(b"data: ")))) == 1
        assert (end, nothing) == (b"data: [DONE]", b"")


_STREAM = b'{"prompt": [1], "max_tokens": 2, "stream":true}'
_NEXT = b"GET /health HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 24\r\n", b"411"),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n",
            b"411",
        ),
        (b"GET /health HTTP/1.1\r\nContent-Length: 24\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", b"200"),
    ],
)
def test_a_body_is_never_taken_for_a_request(
    head: bytes, status: bytes, engine: EngineProcess
) -> None:
    """Where it is not known how long one is, or nobody reads it, there is one answer and no more."""
    head, body = exchange(engine, head, _NEXT)
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"HTTP/1.1" not in body


def exchange(engine: EngineProcess, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """All that is answered until the connection is closed: the head of it, and the rest."""
    with contextlib.closing(engine.connect()) as connection:
        connection.connect()
        connection.sock.sendall(head + b"\r\n" + body)
        found = b""
        while data := connection.sock.recv(1 << 16):
            found += data
    head, _, rest = found.partition(b"\r\n\r\n")
    return head, rest


def test_a_prompt_that_leaves_less_than_the_default(engine: EngineProcess) -> None:
    """Gets as many tokens as there is room for, where none were asked for."""
    assert len(tokens_of(engine.post({"prompt": [1] * 1020}).body)) == 4
    assert len(tokens_of(engine.post({"prompt": [1]}).body)) == 16


def test_many_clients_at_the_same_moment(engine: EngineProcess) -> None:
    """Are let in, also while the engine has no time for them; those that break off then say nothing."""
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    with contextlib.ExitStack() as stack:
        engine.process.send_signal(signal.SIGSTOP)
        stack.callback(engine.process.send_signal, signal.SIGCONT)
        address = ("127.0.0.1", engine.port)
        clients = [
            stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(200)
        ]
        for client in clients:
            client.sendall(request * 5)
        for client in clients[1:]:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        engine.process.send_signal(signal.SIGCONT)
        assert clients[0].recv(15) == b"HTTP/1.1 200 OK"


def test_what_routers_and_people_ask_for(engine: EngineProcess) -> None:
    """Its model, where its events are, and its metrics, which say where the sidecar's are."""
    (card,) = engine.get("/v1/models").body["data"]
    assert (card["id"], card["max_model_len"]) == ("example", 1024)
    assert engine.get("/kv_event_sources").body["0"]["endpoint"] == engine.endpoint
    assert engine.get("/server_info").body["block_size"] == PAGE
    assert engine.get("/get_server_info").body == engine.get("/server_info").body
    before = engine.metric('requests_total{outcome="done"}')
    engine.post({"prompt": [1], "max_tokens": 1})
    assert engine.metric('requests_total{outcome="done"}') == before + 1
    text = engine.get("/metrics").body
    assert 'engine_sidecar_info{http_endpoint="http://127.0.0.1:' in text
    assert "# TYPE engine_requests_total counter\n" in text
    assert "# TYPE engine_requests gauge\n" in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(stream: bool, engine: EngineProcess) -> None:
    """Its request ends long before its thousand tokens, and is counted."""
    name, tokens = 'requests_total{outcome="gone"}', 'tokens_total{kind="reply"}'
    before, said = engine.metric(name), engine.metric(tokens)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1000, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", engine.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)  # whoever looked on first might find all of it said
    eventually(lambda: engine.metric(name) == before + 1)
    assert engine.metric('requests{state="running"}') == 0
    assert engine.metric(tokens) - said < 1000


def test_its_sidecar_is_killed_while_it_serves(engine: EngineProcess) -> None:
    """With requests under way: all are answered, another sidecar comes, and a subscriber learns from it
    what is cached, also of what was computed meanwhile.
    """
    prompts = [[i, *PROMPT[:-1]] for i in range(12)]
    killed = engine.sidecar()
    with ThreadPoolExecutor(4) as clients:
        answers = [
            clients.submit(engine.post, {"prompt": it, "max_tokens": 8}) for it in prompts[:6]
        ]
        os.kill(killed, signal.SIGKILL)
        answers += [
            clients.submit(engine.post, {"prompt": it, "max_tokens": 8}) for it in prompts[6:]
        ]
        assert [answer.result().status for answer in answers] == [200] * 12
    eventually(lambda: engine.metric("sidecar_restarts_total") == 1)
    index = BlockIndex()
    with Subscriber(engine.endpoint, engine.replay_endpoint) as subscriber:

        def all_known() -> bool:
            for one in subscriber.receive(0.1):
                match one:
                    case Batch():
                        index.apply(one.batch.events)
                    case Restarted():
                        index.clear()
            held = [index.overlap(it).blocks for it in prompts]
            return all(set(one.values()) >= {len(PROMPT) // PAGE} for one in held)

        eventually(all_known)
    assert engine.metric("batches_refused_total") == 0


def test_sigterm(tmp_path: Path) -> None:
    """What runs is answered, who comes then gets 503, and engine and sidecar end with code 0."""
    with EngineProcess(tmp_path, "--device-pages", "256") as engine:
        sidecar = engine.sidecar()
        with ThreadPoolExecutor(1) as client:
            slow = client.submit(engine.post, {"prompt": PROMPT, "max_tokens": 100})
            eventually(lambda: engine.metric('requests{state="running"}') or _done(engine))
            with contextlib.closing(engine.connect()) as late:
                late.connect()
                os.kill(sidecar, signal.SIGSTOP)  # so long the engine, which waits for it, is there
                engine.process.send_signal(signal.SIGTERM)
                eventually(lambda: _status(late) == 503)
                os.kill(sidecar, signal.SIGCONT)
            assert len(tokens_of(slow.result().body)) == 100
        _, errors = engine.process.communicate(timeout=PATIENCE_S)
        assert (engine.process.returncode, errors) == (0, "")
        eventually(lambda: is_gone(sidecar))


def _done(engine: EngineProcess) -> float:
    """How many it has answered."""
    return engine.metric('requests_total{outcome="done"}')


def _status(connection: Any) -> int:
    """Of its health, on a connection that is there already."""
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    return int(response.status)


def test_a_full_queue(tmp_path: Path) -> None:
    """Who comes when as many wait as may gets 503 at once; those who waited are answered."""
    with Stepped(tmp_path, "--max-waiting", "1", "--worker-id", "w") as stepped:
        front = Front(stepped.engine, "127.0.0.1", 0)
        with contextlib.closing(front), ThreadPoolExecutor(1) as client:
            first = client.submit(_post, front.url, {"prompt": PROMPT, "max_tokens": 3})
            eventually(stepped.engine._queue.full)
            assert _post(front.url, {"prompt": PROMPT, "max_tokens": 3})[0] == 503
            while not first.done():
                stepped.step()
            status, body = first.result()
            assert (status, tokens_of(body)) == (200, greedy(PROMPT, 3))
            with pytest.raises(OSError, match=rf"127.0.0.1:{front.port} cannot be listened at"):
                Front(stepped.engine, "127.0.0.1", front.port)


def test_an_engine_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits gets 503 with the reason, and so does who asks for a sidecar that is not there; the last
    answers are written before the front is closed.
    """
    monkeypatch.setattr("examples.completions._LAST_S", PATIENCE_S)
    with Stepped(tmp_path) as stepped, ThreadPoolExecutor(2) as others:
        front = Front(stepped.engine, "127.0.0.1", 0)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", front.port)) as connection:
            connection.request("GET", "/server_info")
            response = connection.getresponse()
            assert response.status == 503
            assert json.load(response)["error"]["type"] == "unavailable"
        waiting = others.submit(_post, front.url, {"prompt": PROMPT, "max_tokens": 3})
        eventually(stepped.engine._queue.qsize)

        def ends() -> None:
            while front._server.socket.fileno() >= 0:
                pass
            stop = Event()
            stop.set()
            stepped.engine.run(stop)

        ending = others.submit(ends)
        front.close()
        assert front._busy._count == 0
        ending.result()
        status, body = waiting.result()
        assert (status, body["error"]["message"]) == (503, "the engine ends")


class Failing:
    """A backend that says one token of each reply, and why there are no more."""

    model, worker_id, vocab_size, most_tokens = "example", "w", 128, 64

    def submit(self, request: Request) -> bool:
        request.answers.put(5)
        request.answers.put(Failed("the engine ends"))
        return True

    def is_well(self) -> bool:
        return True

    def metrics(self) -> dict[str, dict[str, float]]:
        return {}

    sidecar = ""

    def sidecar_http(self) -> str | None:
        return self.sidecar or None


def test_a_sidecar_that_ends_as_it_answers() -> None:
    """Is one that does not answer."""
    failing = Failing()
    with (
        contextlib.closing(Front(failing, "127.0.0.1", 0)) as front,
        socket.create_server(("127.0.0.1", 0)) as sidecar,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", front.port)) as connection,
    ):
        failing.sidecar = f"http://127.0.0.1:{sidecar.getsockname()[1]}"
        connection.request("GET", "/server_info")
        asked, _ = sidecar.accept()
        with asked:
            asked.recv(1 << 16)
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
        response = connection.getresponse()
        assert response.status == 503
        assert "the sidecar does not answer" in response.read().decode()


def test_a_stream_that_fails() -> None:
    """Says why in an event of its own, and ends as any other."""
    with (
        contextlib.closing(Front(Failing(), "127.0.0.1", 0)) as front,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", front.port)) as connection,
    ):
        connection.request("POST", "/v1/completions", b'{"prompt": [1], "stream": true}')
        token, failed, *end = connection.getresponse().read().decode().split("\n\n")
        assert tokens_of(json.loads(token.removeprefix("data: "))) == [5]
        assert json.loads(failed.removeprefix("data: "))["error"]["message"] == "the engine ends"
        assert end == ["data: [DONE]", ""]


_HEAD = b"POST /v1/completions HTTP/1.1\r\n"


@pytest.mark.parametrize("half", [b"", b"POST /v1", _HEAD, _HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_a_client_that_says_nothing(half: bytes, tmp_path: Path) -> None:
    """Or not all that it has to say, does not keep its connection for ever."""
    with Stepped(tmp_path) as stepped:
        front = Front(stepped.engine, "127.0.0.1", 0, most_silent_s=0.1)
        with contextlib.closing(front), socket.create_connection(("127.0.0.1", front.port)) as one:
            one.settimeout(PATIENCE_S)
            one.sendall(half)
            assert one.recv(1) == b""


def _post(url: str, body: object) -> tuple[int, Any]:
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--page-size", "0"], "--page-size: 0 is not in 1..8192"),
        (["--max-waiting", "0"], "--max-waiting: 0 is not in 1..1048576"),
        (["--port", "65536"], "--port: 65536 is not in 0..65535"),
        (["--vocab-size", "1"], "--vocab-size: 1 is not in 2..1048576"),
        (["--device-pages", "0"], "--device-pages: 0 is not in 1..16777216"),
        (["--max-running", "0"], "--max-running: 0 is not in 1..1024"),
        (["--storage-dir", "x"], "--storage-dir: needs a host tier, and --host-pages is 0"),
        (["--link", "x", "--kv-events", "y"], "--kv-events: with --link the sidecar reads its own"),
    ],
)
def test_bad_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the option with its bound."""
    with pytest.raises(SystemExit) as ended:
        read_options(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
