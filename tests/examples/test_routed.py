"""`kvevents demo --router` without a router: its options, its load, its verdict."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from publisher.demo import routed_options
from publisher.demo.completions import Answer, Prompt, Unanswered, ask
from publisher.demo.options import add_options
from publisher.demo.routed import read_prompts
from publisher.demo.routed_options import RoutedOptions, read_routed_options
from publisher.demo.routed_report import Afterwards, Outage, PolicyRun, Routed, report
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--router", "no-such-router"], "--router: no-such-router is no program here"),
        (["--requests", "3"], "--requests: 3 is not in 20..100000 with --router"),
        (["--page-size", "0"], "--page-size: 0 is not in 1..256 with --router"),
        (["--loop"], "--loop: not with --router"),
        (["--storage", "none"], "--storage: not with --router"),
        (["--write-policy", "write_back"], "--write-policy: not with --router"),
        (["--endpoint", "tcp://127.0.0.1:1"], "--endpoint: not with --router"),
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


def test_what_cannot_be_asked_is_said() -> None:
    """Nobody listens there: no exception, but the reason."""
    answer = ask("http://127.0.0.1:1", "example", Prompt((1,), 1))
    assert isinstance(answer, Unanswered) and "URLError" in answer.reason


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
        ({"afterwards": []}, "worker0 got no credit any more"),
    ],
    ids=str,
)
def test_what_is_not_as_it_should_be_is_a_problem(changed: dict[str, object], says: str) -> None:
    """Each alone."""
    assert any(says in line for line in replace(GOOD, **changed).problems())  # type: ignore[arg-type]
