"""examples.engine, step by step: what it says does not depend on the cache, and pages are never lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from engine_rig import PAGE, Stepped, greedy

from examples.completions import Failed, Held, Request
from examples.engine import Engine
from hicache import Tier

PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(30)]
"""Seven pages and a half."""
TIERS = ("--host-pages", "64", "--storage-dir")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Stepped]:
    """Sixteen pages on the device, and nothing below."""
    with Stepped(tmp_path, "--device-pages", "16") as stepped:
        yield stepped


def test_where_a_prefix_comes_from_changes_no_token(tmp_path: Path) -> None:
    """Computed, on the device, on the host, or from the files of an engine before: the tokens are those
    of the model alone, and `held` says where the prefix was.
    """
    expected = greedy(PROMPT, 6)
    whole = len(PROMPT) // PAGE * PAGE
    arguments = ("--device-pages", "32", *TIERS, str(tmp_path / "pages"))
    with Stepped(tmp_path, *arguments) as stepped:
        computed = stepped.ask(PROMPT, 6)
        again = stepped.ask(PROMPT, 6)
        assert stepped.cache.settle(10)
        stepped.cache.reset_device()
        loaded = stepped.ask(PROMPT, 6)
        assert stepped.all_is_let_go()
    with Stepped(tmp_path, *arguments) as later:
        fetched = later.ask(PROMPT, 6)
        assert later.all_is_let_go()
    asked = (computed, again, loaded, fetched)
    assert [one.held for one in asked] == [
        Held(),
        Held(device=whole),
        Held(host=whole),
        Held(storage=whole),
    ]
    assert [one.reply for one in asked] == [expected] * 4


def test_who_else_is_served_changes_no_token(tmp_path: Path) -> None:
    """Eight requests of different lengths in one batch get what each gets alone."""
    asked = [(PROMPT[: 3 + 3 * i], 4 + i) for i in range(8)]
    with Stepped(tmp_path, "--device-pages", "256") as stepped:
        requests = [stepped.submit(*one) for one in asked]
        stepped.step()
        assert stepped.running == 8
        stepped.finish(*requests)
        assert [one.reply for one in requests] == [greedy(*one) for one in asked]
        assert stepped.all_is_let_go()


def test_a_long_prompt_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """It is computed in parts, between which others get their next tokens; and as a whole it is right."""
    rng = random.Random(1)
    long = [rng.randrange(128) for _ in range(700)]
    with Stepped(tmp_path, "--device-pages", "256") as stepped:
        short = stepped.submit(PROMPT, 8)
        stepped.step()
        slow = stepped.submit(long, 2)
        stepped.step()
        stepped.step()
        assert (len(short.reply), len(slow.reply)) == (3, 0)
        stepped.finish(short, slow)
        assert slow.reply == greedy(long, 2)


def test_what_has_no_room_waits_its_turn(small: Stepped) -> None:
    """Of sixteen pages a first request has nine. A second wants nine too, and waits, with nothing locked;
    a third that would fit does not overtake it. All are answered.
    """
    first = small.submit(PROMPT, 6)
    second = small.submit(PROMPT[::-1], 6)
    third = small.submit(PROMPT[:2], 2)
    small.step()
    small.step()
    assert small.running == 1 and not third.reply
    assert small.engine.metrics()["requests"] == {'state="running"': 1, 'state="waiting"': 2}
    small.finish(first)
    assert not second.reply and not third.reply
    small.finish(second, third)
    assert [one.reply for one in (first, second, third)] == [
        greedy(PROMPT, 6),
        greedy(PROMPT[::-1], 6),
        greedy(PROMPT[:2], 2),
    ]
    assert small.all_is_let_go()


def test_a_prompt_that_is_cached_to_its_end(small: Stepped) -> None:
    """Its last token is computed all the same, for what comes next depends on it."""
    prompt = PROMPT[:28]
    first, again = small.ask(prompt, 3), small.ask(prompt, 3)
    assert first.reply == again.reply == greedy(prompt, 3)
    assert again.held == Held(device=24)


def test_a_reply_is_cached_too(small: Stepped) -> None:
    """Its whole pages, but for the last token's, whose KV was never computed."""
    first = small.ask(PROMPT, 6)
    again = small.ask(PROMPT + first.reply + [1], 2)
    assert again.held == Held(device=32)
    assert again.reply == greedy(PROMPT + first.reply + [1], 2)


def test_two_that_compute_the_same_keep_one_copy(tmp_path: Path) -> None:
    """Of pages that two requests computed at the same time the cache has one copy, with which both go on,
    also when a third one fills the pages of the other copy.
    """
    prompt, third = PROMPT[:20], PROMPT[::-1] * 2
    with Stepped(tmp_path, "--device-pages", "36") as stepped:
        two = [stepped.submit(prompt, 20) for _ in range(2)]
        while not all(one.reply for one in two):
            stepped.step()
        assert stepped.cache.num_resident == len(prompt) // PAGE
        last = stepped.submit(third, 20)
        stepped.step()
        assert stepped.running == 3
        stepped.finish(*two, last)
        assert [one.reply for one in two] == [greedy(prompt, 20)] * 2
        assert last.reply == greedy(third, 20)
        assert stepped.all_is_let_go()


def test_as_much_as_the_pool_has_is_served(small: Stepped) -> None:
    """The longest request there may be gets every page, and pages are evicted for it."""
    small.ask(PROMPT, 6)
    tokens = (PROMPT * 3)[:60]
    assert small.engine.most_tokens == 64
    assert small.ask(tokens, 4).reply == greedy(tokens, 4)
    assert small.all_is_let_go()


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_whoever_goes_away_leaves_nothing_behind(steps: int, tmp_path: Path) -> None:
    """Before it has pages, with its prompt half computed, or while it decodes: its pages are free or
    cached, its locks gone, and others go on.
    """
    long = (PROMPT * 12)[:330]
    with Stepped(tmp_path, "--device-pages", "128") as stepped:
        other = stepped.submit(PROMPT, 12)
        stepped.step()
        gone = stepped.submit(long, 20)
        waiting = stepped.submit(long[::-1], 20)  # there is room for one of the two
        for _ in range(steps):
            stepped.step()
        gone.gone = waiting.gone = True
        stepped.finish(other)
        assert other.reply == greedy(PROMPT, 12)
        assert len(gone.reply) < 20 and not waiting.reply
        assert stepped.engine.metrics()["requests_total"]['outcome="gone"'] == 2
        assert stepped.all_is_let_go()


def test_whoever_goes_away_while_pages_are_fetched(tmp_path: Path) -> None:
    """A request whose prefix is on its way from files or host leaves nothing locked."""
    arguments = ("--device-pages", "32", *TIERS, str(tmp_path / "pages"))
    with Stepped(tmp_path, *arguments) as stepped:
        stepped.ask(PROMPT, 2)
        assert stepped.cache.settle(10)
    with Stepped(tmp_path, *arguments) as stepped:
        gone = stepped.submit(PROMPT, 2)
        stepped.engine._take()
        ((_, start),) = stepped.engine._starting
        next(start)  # the fetch has begun
        start.close()
        assert stepped.all_is_let_go()
        assert stepped.cache.resident_pages(Tier.HOST) == {}  # nor has anything come
        gone.gone = True
        stepped.step()
        assert not gone.reply
        assert stepped.ask(PROMPT, 2).reply == greedy(PROMPT, 2)


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_of_requests(seed: int, tmp_path: Path) -> None:
    """Requests at random, many with a prefix in common, some given up, in pools far too small for all:
    every one that stays gets the model's own tokens, and no page is lost.
    """
    rng = random.Random(seed)
    trunks = [[rng.randrange(128) for _ in range(24)] for _ in range(4)]
    arguments = ("--device-pages", "20", "--host-pages", "24", "--max-running", "4")
    with Stepped(tmp_path, *arguments, "--storage-dir", str(tmp_path / "pages")) as stepped:
        asked: list[Request] = []
        for _ in range(30):
            prompt = rng.choice(trunks)[: rng.randrange(1, 25)]
            prompt = prompt + [rng.randrange(128) for _ in range(rng.randrange(8))]
            asked.append(stepped.submit(prompt, rng.randrange(1, 7)))
            for _ in range(rng.randrange(3)):
                stepped.step()
            if rng.random() < 0.2:
                asked.pop(rng.randrange(len(asked))).gone = True
        stepped.finish(*asked)
        for _ in range(3):
            stepped.step()
        assert [one.reply for one in asked] == [greedy(one.prompt, one.max_tokens) for one in asked]
        assert stepped.all_is_let_go()
        assert sum(one.held.tokens for one in asked) > 0


def test_a_request_is_refused_when_too_many_wait(tmp_path: Path) -> None:
    """As many wait as may; the next is refused and counted, and none is taken once the engine ends."""
    with Stepped(tmp_path, "--max-waiting", "2") as stepped:
        waiting = [stepped.submit(PROMPT, 1) for _ in range(2)]
        assert not stepped.engine.submit(Request(PROMPT, 1))
        stepped.finish(*waiting)
        assert _outcomes(stepped.engine) == {"done": 2, "gone": 0, "refused": 1}
        stepped.engine._ending = True
        assert not stepped.engine.submit(Request(PROMPT, 1))


def test_what_is_at_work_as_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is finished, also what has not begun to run; without the time for it, it is told so. What the cache
    did last is told of.
    """
    stop = Event()
    stop.set()
    with Stepped(tmp_path) as stepped:
        request = stepped.submit(PROMPT, 3)
        stepped.engine._take()
        stepped.engine.run(stop)
        assert request.reply == greedy(PROMPT, 3)
        offered = stepped._sidecar.client.stats.offered
        stepped.cache.reset_device()
        stepped.engine.close()
        assert stepped._sidecar.client.stats.offered == offered + 1
    monkeypatch.setattr("examples.engine._DRAIN_S", 0.0)
    with Stepped(tmp_path) as stepped:
        running = stepped.submit(PROMPT, 3)
        stepped.step()
        stepped.engine.run(stop)
        assert running.answers.get_nowait() == running.reply[0]
        assert isinstance(running.answers.get_nowait(), Failed)


def test_who_comes_as_the_engine_ends_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request taken in the instant in which the engine ends gets its failure; nobody waits for ever."""
    with Stepped(tmp_path) as stepped:
        engine, request, stop, at_it = stepped.engine, Request(PROMPT, 1), Event(), Event()
        put = engine._queue.put_nowait

        def slowly(one: Request) -> None:
            at_it.set()
            time.sleep(0.2)
            put(one)

        monkeypatch.setattr(engine._queue, "put_nowait", slowly)
        client = Thread(target=engine.submit, args=(request,))
        client.start()
        at_it.wait()
        stop.set()
        engine.run(stop)
        client.join()
        assert isinstance(request.answers.get_nowait(), Failed)


def _outcomes(engine: Engine) -> dict[str, float]:
    found = engine.metrics()["requests_total"]
    return {label.split('"')[1]: count for label, count in found.items()}
