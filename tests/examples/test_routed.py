"""`kvevents demo --router` without a router: its options, its load, its verdict."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import msgspec
import pytest
from engine_rig import PATIENCE_S, Stepped, eventually, greedy, is_gone
from ports_rig import free_port, free_ports

from examples.completions import Front
from publisher.demo import routed_options
from publisher.demo.completions import Answer, Prompt, Unanswered, ask, ask_all
from publisher.demo.options import add_options
from publisher.demo.routed import read_prompts
from publisher.demo.routed_options import RoutedOptions, read_routed_options
from publisher.demo.routed_report import Afterwards, Outage, PolicyRun, Routed, report
from publisher.demo.site import SiteError, _Process
from publisher.demo.tied import free_ports as tied_ports
from publisher.demo.tied import tied
from publisher.demo.trace import TraceError

ROUTER = "/bin/true"


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["--router", ROUTER, *arguments])


# ------------------------------------------------------------------------------------------ options


def test_what_is_not_said_is_made_for_this_run() -> None:
    """Defaults are those of RoutedOptions; what is said counts."""
    assert read_routed_options(options()) == RoutedOptions(ROUTER)
    read = read_routed_options(options("--requests", "50", "--page-size", "8", "--json"))
    assert read == RoutedOptions(ROUTER, requests=50, page_size=8, as_json=True)
    read = read_routed_options(options("--device-pages", "64", "--host-pages", "128"))
    assert read == RoutedOptions(ROUTER, device_pages=64, host_pages=128)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--router", "no-such-router"], "--router: no-such-router is no program here"),
        (["--requests", "3"], "--requests: 3 is not in 20..100000 with --router"),
        (["--page-size", "0"], "--page-size: 0 is not in 1..256 with --router"),
        (["--device-pages", "63"], "--device-pages: 63 is not in 64..65536 with --router"),
        (["--host-pages", "63"], "--host-pages: 63 is not in 64..65536 with --router"),
        (["--loop"], "--loop: not with --router"),
        (["--storage", "none"], "--storage: not with --router"),
        (["--storage-dir", "x"], "--storage-dir: not with --router"),
        (["--mooncake-master", "h:1"], "--mooncake-master: not with --router"),
        (["--write-policy", "write_back"], "--write-policy: not with --router"),
        (["--endpoint", "tcp://127.0.0.1:1"], "--endpoint: not with --router"),
        (["--replay-endpoint", "tcp://127.0.0.1:1"], "--replay-endpoint: not with --router"),
    ],
    ids=str,
)
def test_bad_options(arguments: list[str], says: str) -> None:
    """Each is named with its bound."""
    with pytest.raises(ValueError, match=says):
        read_routed_options(options(*arguments))


def test_an_installed_package_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no examples folder, that is what is said."""
    monkeypatch.setattr(routed_options, "ENGINE", Path("/nowhere/engine.py"))
    with pytest.raises(ValueError, match="--router: needs a checkout of kvevents"):
        read_routed_options(options())


# ------------------------------------------------------------------------------------------- the load


def test_the_load_is_conversations(tmp_path: Path) -> None:
    """Prompts of the trace, without what all begin with, in the model's vocabulary, none of whole pages
    alone, and each conversation with three turns at least.
    """
    prompts = read_prompts(RoutedOptions(ROUTER, requests=40))
    assert len(prompts) == 100
    assert all(0 <= token < 128 for one in prompts for token in one.tokens)
    assert all(len(one.tokens) % 16 and len(one.tokens) <= 32 * 16 + 1 for one in prompts)
    assert all(1 <= one.max_tokens <= 12 for one in prompts)
    firsts = {one.tokens[:16] for one in prompts}
    assert 10 < len(firsts) < 70
    trace = tmp_path / "trace"
    line = '{"input_length": 1024, "output_length": 600, "hash_ids": [0, %d]}\n'
    trace.write_text("".join(line % (number // 3) for number in range(240)))
    some = read_prompts(RoutedOptions(ROUTER, requests=40, trace=str(trace)))
    assert {len(one.tokens) for one in some} == {17}
    assert len({one.tokens for one in some[:6]}) == 2
    with pytest.raises(TraceError, match=r"--requests 200 and 60 more are not in 0\.\.240"):
        read_prompts(RoutedOptions(ROUTER, requests=200, trace=str(trace)))


def test_the_length_of_the_load(tmp_path: Path) -> None:
    """Prompts and replies are as long as the trace says, a block of it a page; what has nothing of its
    own, and what is longer than an eighth of the device, is left out.
    """
    trace = tmp_path / "trace"
    kinds = [(0, 512), (9, 4608), (1, 88), (8, 4096)]
    lines = [
        {
            "input_length": 512 * bool(count) + own,
            "output_length": 160,
            "hash_ids": [0, *range(100 * count + 1, 101 * count + 1)],
        }
        for count, own in kinds
        for _ in range(40)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    prompts = read_prompts(
        RoutedOptions(ROUTER, requests=20, trace=str(trace), device_pages=64, page_size=16)
    )
    assert {len(one.tokens) for one in prompts} == {3, 8 * 16 + 1}
    assert {one.max_tokens for one in prompts} == {5}


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        (b"", "RemoteDisconnected: "),
        (b"nonsense\r\n\r\n", "BadStatusLine: "),
        (b"HTTP/1.0 502 no\r\n\r\nwhy", "502 why"),
        (b"HTTP/1.0 200 ok\r\n\r\n{}", "ValidationError: "),
    ],
    ids=repr,
)
def test_what_is_no_answer_is_said(answered: bytes, says: str) -> None:
    """Whatever comes from there."""
    address = ("127.0.0.1", free_port())
    with socket.create_server(address) as server, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, f"http://127.0.0.1:{address[1]}", "example", Prompt((1,), 1))
        with server.accept()[0] as connection:
            while not connection.recv(1 << 16).endswith(b"}"):
                pass
            connection.sendall(answered)
        found = asked.result()
        assert isinstance(found, Unanswered) and found.reason.startswith(says)


def test_an_answer(tmp_path: Path) -> None:
    """From whom it is, and what it had of the prompt where."""
    prompt = Prompt(tuple(range(10)), 3)
    tiers = ("--host-pages", "8", "--storage-dir", str(tmp_path / "pages"))
    found: list[Answer | Unanswered] = []
    for _ in range(2):
        with (
            Stepped(tmp_path, "--worker-id", "w7", *tiers) as engine,
            closing(Front(engine.engine, "127.0.0.1", 0)) as front,
            ThreadPoolExecutor(1) as client,
        ):
            for _ in range(2):
                asked = client.submit(ask, front.url, "example", prompt)
                while not asked.done():
                    engine.step()
                found.append(asked.result())
            assert engine.all_is_let_go()
    reply = tuple(greedy(prompt.tokens, 3))
    cached = [(0, 0, 0), (8, 0, 0), (0, 0, 8), (8, 0, 0)]
    assert found == [Answer("w7", 10, *one, reply) for one in cached]


def test_several_clients_ask_at_the_same_time() -> None:
    """As many as there are; what came of each is in order."""
    all_at_once = Barrier(3, timeout=PATIENCE_S)

    def asked(prompt: Prompt) -> Unanswered:
        all_at_once.wait()
        return Unanswered(str(prompt.max_tokens))

    found = ask_all([Prompt((1,), number) for number in range(6)], 3, asked)
    assert found == [Unanswered(str(number)) for number in range(6)]


def test_what_cannot_be_asked_is_said() -> None:
    """Nobody listens there: no exception, but the reason."""
    answer = ask("http://127.0.0.1:1", "example", Prompt((1,), 1))
    assert isinstance(answer, Unanswered) and "URLError" in answer.reason


# --------------------------------------------------------------------------------------- the processes


@pytest.mark.integration
def test_a_process_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is waited for without colours, and from its last start on; it is told of no proxy; and
    an end is shown with what was said.
    """
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    says = r"printf '\033[32mready\033[0m to go %s.\n' $HTTP_PROXY"
    command = f"if [ -e once ]; then echo again; exit 3; fi; touch once; {says}; exec sleep 60"
    with _Process(["sh", "-c", command], tmp_path / "it.log", tmp_path) as process:
        process.await_line(r"ready to go \.")
        process.kill()
        process.start()
        with pytest.raises(SiteError, match=r"(?s)it did not start.*:\nagain$"):
            process.await_line("ready to go")


def test_ports_that_are_given_out() -> None:
    """Are free, and below those that the kernel gives to connections."""
    with ExitStack() as stack:
        taken = set(free_ports(200))
        for port in taken:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        given = tied_ports(1000)
    assert not taken.intersection(given)
    assert all(10_000 <= port < 32_000 for port in given)


@pytest.mark.integration
def test_a_tied_process_ends_with_who_started_it() -> None:
    """Also where that one is killed."""
    code = (
        f"import subprocess as s; print(s.Popen({tied(['sleep', '60'])}).pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        name = Path(f"/proc/{pid}/comm")
        eventually(lambda: name.read_text() == "sleep\n")
        parent.kill()
    eventually(lambda: is_gone(pid))


# ----------------------------------------------------------------------------------------- the verdict


def answer(worker: str, device: int = 0, host: int = 0, storage: int = 0) -> Answer:
    return Answer(worker, 100, device, host, storage, (1, 2))


BOTH = frozenset({"worker0", "worker1"})
ONE = frozenset({"worker1"})
GOOD = Routed(
    PolicyRun("round_robin", 1.0, [answer("worker0"), answer("worker1", 16)], [(ONE, "worker0")]),
    PolicyRun(
        "kv_aware",
        1.0,
        [answer("worker0", 32), answer("worker1", 16, 16, 16)],
        [(ONE, "worker1"), (BOTH, "worker0")],
    ),
    Outage("worker0", 2.0, [answer("worker1"), Unanswered("502")]),
    [Afterwards("worker0", 4.8, 0, 0, 16), Afterwards("worker1", 28.0, 16, 16, 0)],
)


def test_a_good_run_has_no_problems() -> None:
    """And is told in a few lines, with the numbers that people look for."""
    assert GOOD.problems() == []
    text = "\n".join(report(GOOD))
    assert "hit rate 40.0% of the prompts' tokens (device 24.0%, host 8.0%, disk 8.0%)" in text
    assert "100.0% of 1 requests went to the worker that held the longest prefix" in text
    assert "of 2 requests meanwhile 1 were not answered" in text
    assert text.endswith("wrong credit: 0")
    assert GOOD.summary()["kv_aware"]["hit_rate"] == 0.4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kv_aware": GOOD.round_robin}, "kv_aware hit no more than round_robin"),
        (
            {"kv_aware": replace(GOOD.kv_aware, longest=[(ONE, "worker0"), (ONE, "worker1")])},
            "50.0% of 2 requests went to the longest prefix",
        ),
        ({"kv_aware": replace(GOOD.kv_aware, longest=[(BOTH, "worker0")])}, "0.0% of 0 requests"),
        (
            {
                "round_robin": replace(
                    GOOD.round_robin, answers=[answer("worker0"), Unanswered("x")]
                )
            },
            "round_robin: 1 not answered, such as: x",
        ),
        (
            {
                "round_robin": replace(
                    GOOD.round_robin,
                    answers=[Answer("worker0", 9, 0, 0, 0, (3,)), answer("worker1")],
                )
            },
            "gave different tokens",
        ),
        (
            {"afterwards": [*GOOD.afterwards, Afterwards("worker0", 16.0, 0, 0, 16)]},
            "wrong credit: 16 tokens to worker0, which held 0 on the device, 0 on the host, 16 on disk",
        ),
        ({"afterwards": GOOD.afterwards[1:]}, "worker0 got no credit any more"),
        (
            {"kv_aware": replace(GOOD.kv_aware, answers=[answer("worker0", 99), Unanswered("y")])},
            "kv_aware: 1 not answered, such as: y",
        ),
        ({"afterwards": [Afterwards("worker0", 4.81, 0, 0, 16)]}, "wrong credit: 5 tokens"),
        ({"afterwards": [Afterwards("worker0", 12.81, 0, 16, 0)]}, "wrong credit: 13 tokens"),
        ({"afterwards": []}, "worker0 got no credit any more"),
    ],
    ids=str,
)
def test_what_is_not_as_it_should_be_is_a_problem(changed: dict[str, object], says: str) -> None:
    """Each alone."""
    found = replace(GOOD, **changed)  # type: ignore[arg-type]
    assert any(says in line for line in found.problems())
    assert found.summary()["problems"] == found.problems()


def test_nine_of_ten_are_enough() -> None:
    """To the longest prefix."""
    longest = [(ONE, "worker1")] * 9 + [(ONE, "worker0")]
    assert replace(GOOD, kv_aware=replace(GOOD.kv_aware, longest=longest)).problems() == []


def test_a_bad_run_is_not_told_as_a_good_one() -> None:
    """Neither for people nor for machines."""
    other = [replace_reply(one) for one in GOOD.round_robin.answered]
    bad = replace(GOOD, round_robin=replace(GOOD.round_robin, answers=other))
    assert any(line.endswith("the same tokens under both: NO") for line in report(bad))
    assert bad.summary()["same_answers"] is False
    assert GOOD.summary()["outage"]["unanswered"] == 1


def replace_reply(one: Answer) -> Answer:
    return msgspec.structs.replace(one, reply=(9,))
