"""publisher.demo: the main job end to end, also when any of its processes dies."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import socket as sockets
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    eventually,
    kill,
    kvevents,
    running,
    start_kvevents,
    still_running,
    tagged,
)

from kvevents import block_hashes
from publisher.demo.options import BUNDLED_TRACE, add_options, read_options
from publisher.demo.report import bar, difference, json_summary, text_summary
from publisher.demo.trace import Request, pages_of, prompt, read_trace, reply

README = Path(__file__).parents[2] / "README.md"
FREE_PORTS = ("--endpoint", LOOPBACK, "--replay-endpoint", LOOPBACK)
KEYS = {
    *("requests", "hit_rate", "stored_blocks", "removed_blocks", "batches", "gaps", "replayed"),
    *("resident_blocks", "router_blocks", "view_equal", "endpoint", "replay_endpoint"),
}
ROUTER, WORKER, SIDECAR, TAIL = (
    *("publisher.demo.router", "publisher.demo.worker", "serve --link", "publisher.demo.tail"),
)
_numbers = count()


@pytest.fixture
def tag() -> Iterator[str]:
    """A mark for every process of a test; none may be left soon after its end."""
    tag = f"{os.getpid()} {next(_numbers)}"
    yield tag
    assert still_running(tagged(tag), PATIENCE_S) == set()


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvevents("demo", *arguments)


def demo_arguments(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stdout."""
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found.keys() >= KEYS
    return found


# ------------------------------------------------------------------------------------ to the end


@pytest.mark.integration
def test_the_router_sees_what_the_cache_holds() -> None:
    """One JSON object, exit code 0: all requests were run, the router joined late, and its view is the
    cache.
    """
    done = demo("--json", "--requests", "100", *FREE_PORTS)
    assert (done.returncode, done.stderr) == (0, "")
    found = summary_of(done)
    assert found["view_equal"] is True
    assert found["requests"] == 100
    assert found["router_blocks"] == found["resident_blocks"] > 0
    assert found["resident_blocks"] == found["stored_blocks"] - found["removed_blocks"]
    assert found["joined_at"] > 0 and found["replayed"] > 0
    assert (found["lost"], found["refused"], found["wrong_pages"]) == (0, 0, 0)
    assert 0 < found["hit_rate"] < 1
    assert found["checked_pages"] > 0
    assert 0 < found["publish_cpu_us_p50"] <= found["publish_cpu_us_p99"]
    assert found["blocks_per_step"] >= 1


@pytest.mark.integration
@pytest.mark.parametrize("page_size", ["1", pytest.param("16", marks=pytest.mark.stress)])
def test_evictions_do_not_deceive_the_router(page_size: str) -> None:
    """With far fewer device pages than the trace needs, at any page size, the view is still the cache.
    Case 49: that a page of one token is dear is said.
    """
    done = demo(
        *("--json", "--requests", "300", "--device-pages", "300", "--page-size", page_size),
        *FREE_PORTS,
    )
    assert done.returncode == 0
    assert done.stderr.startswith("block_size: 1: each token is a block") is (page_size == "1")
    assert done.stderr.count("\n") == (page_size == "1")
    found = summary_of(done)
    assert found["view_equal"] is True
    device, host, disk = (found["tiers"][medium] for medium in ("GPU", "CPU_PINNED", "DISK"))
    assert device["removed"] > 1000 and device["resident"] <= 300
    assert host["removed"] > 300 and host["resident"] <= 450
    assert disk["stored"] > 300
    assert all(of["view_equal"] is True for of in found["tiers"].values())
    assert (found["wrong_pages"], found["failed_transfers"]) == (0, 0)


@pytest.mark.integration
def test_a_trace_with_next_to_nothing_in_it(tmp_path: Path, tag: str) -> None:
    """Requests without a whole page, text for people: the first line says where it publishes, the view is
    the cache, and it ends soon although the tail never got its lines.
    """
    trace = tmp_path / "trace"
    trace.write_text(
        '{"input_length": 0, "output_length": 0, "hash_ids": []}\n'
        '{"input_length": 600, "output_length": 1, "hash_ids": [5, 6]}\n'
        '{"input_length": 5, "output_length": 1, "hash_ids": [7]}\n'
    )
    with start_kvevents(tag, "demo", "--trace", str(trace), *FREE_PORTS) as process:
        out, err = process.communicate(timeout=60.0)
        assert (process.returncode, err) == (0, "")
        assert "router view == cache: yes (3 blocks compared)" in out
        assert "requests       3 in" in out
        first = out.splitlines()[0]
        assert re.fullmatch(
            r"publishes on tcp://127.0.0.1:\d+, replays on tcp://127.0.0.1:\d+", first
        )
        assert still_running(tagged(tag), 10.0) == set()


# ---------------------------------------------------------------------------------------- tiers

ENDLESS = ("--requests", "5000", "--device-pages", "400", "--host-pages", "0")
"""No store that would have to be removed at the end."""
SMALL = ("--json", "--requests", "200", "--device-pages", "400", "--host-pages", "600", *FREE_PORTS)


@pytest.mark.integration
def test_a_trace_that_begins_anew(tag: str) -> None:
    """With --loop more comes than its requests tell once, and Ctrl-C is the end."""
    options = ("--loop", "--requests", "20", "--device-pages", "200", "--host-pages", "0")
    with start_kvevents(tag, "demo", *options, *FREE_PORTS) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().split()[2].rstrip(",")
        done = kvevents("tail", endpoint, "--count", "150")
        assert (done.returncode, process.poll()) == (0, None)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60.0)
        assert (process.returncode, err) == (130, "")


@pytest.mark.integration
def test_ctrl_c_lasts_until_the_sidecar_has_ended(tag: str) -> None:
    """Also of one that took the place of another: its ports are free for the next demo."""
    with start_kvevents(tag, "demo", *ENDLESS, *FREE_PORTS) as process:
        find(tag, TAIL)
        first = find(tag, SIDECAR)
        kill(first)
        sidecar = eventually(
            lambda: running({pid: of for pid, of in tagged(tag).items() if pid != first}, SIDECAR)
        )
        assert process.stdout is not None
        while "joined" not in process.stdout.readline():
            pass  # the worker has told of it long before
        kill(sidecar, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert still_running([process.pid], 0.5) == {process.pid}
        kill(sidecar, signal.SIGCONT)
        _, err = process.communicate(timeout=60.0)
        assert process.returncode == 130
        first_line, *rest = err.splitlines()
        assert re.fullmatch(
            r"the sidecar of pid \d+ ended with -9; the next starts in .*", first_line
        )
        assert all("tell its state anew" in line for line in rest)


def test_a_loop_has_no_summary() -> None:
    """It is said at once."""
    with pytest.raises(ValueError, match="--json: the summary is never written with --loop"):
        read_options(demo_arguments("--loop", "--json"))


@pytest.mark.integration
def test_a_second_run_over_the_same_store_starts_warm(tmp_path: Path) -> None:
    """What the first run left on disk is announced at once, and hit; the store's folder stays."""
    arguments = (*SMALL, "--storage-dir", str(tmp_path / "store"))
    cold, warm = (summary_of(demo(*arguments)) for _ in range(2))
    assert cold["restored_blocks"] == 0
    assert warm["restored_blocks"] == cold["tiers"]["DISK"]["resident"] > 0
    assert warm["tiers"]["DISK"]["hits"] > cold["tiers"]["DISK"]["hits"]
    for found in (cold, warm):
        assert all(of["view_equal"] is True for of in found["tiers"].values())
        assert (found["wrong_pages"], found["violations"]) == (0, [])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "media"),
    [
        (("--host-pages", "0"), {"GPU"}),
        (("--storage", "none"), {"GPU", "CPU_PINNED"}),
        (("--write-policy", "write_back"), {"GPU", "CPU_PINNED", "DISK"}),
        pytest.param(
            ("--write-policy", "write_through_selective"),
            {"GPU", "CPU_PINNED", "DISK"},
            marks=pytest.mark.stress,
        ),
    ],
)
def test_each_choice_of_tiers_is_told_right(arguments: tuple[str, ...], media: set[str]) -> None:
    """Whatever tiers there are and whenever pages go to them, the view is the cache on each."""
    done = demo(*SMALL, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    found = summary_of(done)
    assert found["tiers"].keys() == media
    assert all(of["view_equal"] is True for of in found["tiers"].values())
    assert all(of["stored"] > 0 for of in found["tiers"].values())
    assert (found["wrong_pages"], found["failed_transfers"]) == (0, 0)


@pytest.mark.integration
@pytest.mark.parametrize("victim", ["nobody", "demo", WORKER])
def test_a_store_that_nobody_asked_for_goes_away(victim: str, tag: str, tmp_path: Path) -> None:
    """The store's own folder is removed at the end, large as it is, also when the demo, or its worker, is
    killed with SIGKILL.
    """
    with start_kvevents(
        *(tag, "demo", *SMALL[:1], "--requests", "50" if victim == "nobody" else "1000"),
        *FREE_PORTS,
        TMPDIR=str(tmp_path),
    ) as process:
        eventually(lambda: 1 if any(tmp_path.glob("kvevents-demo-*/*/*/*")) else None)
        if victim == "demo":
            process.kill()
        elif victim == WORKER:
            kill(find(tag, victim))
        process.communicate(timeout=100.0)
        eventually(lambda: None if any(tmp_path.glob("kvevents-demo-*")) else 1)
        assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.integration
def test_a_store_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """Exit code 2, and a line that names the option and the folder."""
    (tmp_path / "file").touch()
    done = demo(*SMALL, "--storage-dir", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvevents demo: --storage-dir: {tmp_path / 'file'}")
    assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------- bad surroundings


@pytest.mark.integration
def test_an_endpoint_in_use_is_one_line(tag: str) -> None:
    """Exit code 2, the option and the endpoint on one line, and no process left."""
    with sockets.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        arguments = ("demo", "--json", "--endpoint", taken, "--replay-endpoint", LOOPBACK)
        with start_kvevents(tag, *arguments) as process:
            out, err = process.communicate(timeout=60.0)
            assert (process.returncode, out) == (2, "")
            assert err.startswith(f"kvevents demo: --endpoint: {taken} cannot be bound: ")
            assert "in use" in err
            assert err.count("\n") == 1
            assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.integration
def test_two_demos_at_once_do_not_meet(tag: str) -> None:
    """They are on four ports: where a default one is taken, a free one does as well."""
    arguments = ("demo", "--loop", "--requests", "20", "--device-pages", "200", "--host-pages", "0")
    with start_kvevents(tag, *arguments) as one, start_kvevents(tag, *arguments) as two:
        both = [one, two]
        assert one.stdout is not None and two.stdout is not None
        said = [process.stdout.readline() for process in both if process.stdout is not None]
        assert len({port for line in said for port in re.findall(r":(\d+)", line)}) == 4
        assert [process.poll() for process in both] == [None, None]
        for process in both:
            process.send_signal(signal.SIGINT)
        ended = [(process.communicate(timeout=60.0)[1], process.returncode) for process in both]
        assert ended == [("", 130), ("", 130)]
        assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.parametrize("option", ["--endpoint", "--replay-endpoint"])
def test_a_default_port_gives_way_to_one_that_was_asked_for(option: str) -> None:
    """`--endpoint` on the replay socket's default port, and the other way round: the default is any
    free port.
    """
    port = {"--endpoint": 5558, "--replay-endpoint": 5557}[option]
    settings = read_options(demo_arguments(option, f"tcp://127.0.0.1:{port}"))
    assert f"tcp://127.0.0.1:{port}" in (settings.endpoint, settings.replay_endpoint)
    assert LOOPBACK in (settings.endpoint, settings.replay_endpoint)
    assert settings.movable == ("replay_endpoint" if option == "--endpoint" else "endpoint",)


@pytest.mark.integration
def test_an_endpoint_that_cannot_be_bound_is_named_as_given(tag: str) -> None:
    """Its underscores are its own."""
    there = "ipc:///nonexistent_folder/pub_1"
    arguments = ("demo", "--json", "--endpoint", LOOPBACK, "--replay-endpoint", there)
    with start_kvevents(tag, *arguments) as process:
        out, err = process.communicate(timeout=60.0)
        assert (process.returncode, out) == (2, "")
        assert err.startswith(f"kvevents demo: --replay-endpoint: {there} cannot be bound: ")
        assert err.count("\n") == 1
        assert still_running(tagged(tag), 10.0) == set()


# ---------------------------------------------------------------------------------- sudden deaths


def find(tag: str, part: str) -> int:
    """The process of the demo whose command line has this in it, once it is there."""
    return eventually(lambda: running(tagged(tag), part))


@pytest.mark.integration
def test_a_killed_router_does_not_stop_the_worker(tag: str) -> None:
    """Kill -9 as soon as it is there: all requests are run, and the summary says that nobody knows what
    the router believed; exit code 1.
    """
    with start_kvevents(
        tag, "demo", "--json", "--requests", "700", "--storage", "none", *FREE_PORTS
    ) as process:
        kill(find(tag, ROUTER))
        out, err = process.communicate(timeout=60.0)
        assert (process.returncode, err) == (1, "")
        found = json.loads(out)
        assert found["requests"] == 700
        assert [found[key] for key in ("view_equal", "router_blocks", "gaps", "replayed")] == [
            *(None, None, None, None)
        ]
        assert found["stored_blocks"] > 0
        assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.integration
def test_a_killed_sidecar_does_not_end_the_demo(tag: str) -> None:
    """Kill -9 in the middle: another takes its place, and the router's view is the cache's at the end."""
    with start_kvevents(
        tag, "demo", "--requests", "1000", "--storage", "none", *FREE_PORTS
    ) as process:
        find(tag, TAIL)  # it is started once the sidecar is ready: the requests are running
        kill(find(tag, SIDECAR))
        out, _ = process.communicate(timeout=60.0)
        assert process.returncode == 0
        assert "router view == cache: yes" in out
        assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.integration
def test_a_killed_worker_ends_the_demo(tag: str) -> None:
    """Kill -9 in the middle: one line says which it was, the exit code is not 0, and nothing is left."""
    with start_kvevents(
        tag, "demo", "--requests", "1500", "--storage", "none", *FREE_PORTS
    ) as process:
        find(tag, TAIL)  # it is started once the sidecar is ready: the requests are running
        kill(find(tag, WORKER))
        _, err = process.communicate(timeout=60.0)
        assert process.returncode not in (0, None)
        assert err.count("\n") == 1
        assert err.startswith("kvevents demo: ")
        assert "-9" in err
        assert still_running(tagged(tag), 10.0) == set()


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_parent_is_the_end_of_all(tag: str, number: signal.Signals) -> None:
    """Two seconds after Ctrl-C or SIGTERM no process of the demo is left."""
    with start_kvevents(tag, "demo", *ENDLESS, *FREE_PORTS) as process:
        find(tag, TAIL)
        everyone = tagged(tag)
        for part in (WORKER, SIDECAR, TAIL):
            assert running(everyone, part)
        process.send_signal(number)
        assert still_running(everyone, 10.0) == set()  # two, where nothing else runs
        _, err = process.communicate()
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert err == ""


@pytest.mark.integration
def test_kill_9_of_the_parent_is_the_end_of_all(tag: str) -> None:
    """Two seconds after kill -9 of the parent nothing is left but a tail that was stopped; that one ends
    as soon as it runs again, although nothing comes any more that could tell it.
    """
    with start_kvevents(tag, "demo", *ENDLESS, *FREE_PORTS) as process:
        sleeper = find(tag, TAIL)
        kill(sleeper, signal.SIGSTOP)
        everyone = tagged(tag)
        process.kill()
        assert still_running(everyone.keys() - {sleeper}, 10.0) == set()
        kill(sleeper, signal.SIGCONT)
        assert still_running([sleeper], 10.0) == set()


# ----------------------------------------------------------------------------------------- report


def test_a_difference_is_readable() -> None:
    """By medium: how many blocks on which side, and the first ten of them, in hexadecimal."""
    cache = {"GPU": ["1", "-1", "5"], "DISK": []}
    assert difference(cache, cache) == []
    assert difference(cache, {"GPU": ["5"], "DISK": ["255"]}) == [
        "GPU: 2 blocks the router does not know of: ffffffffffffffff, 0000000000000001",
        "DISK: 1 blocks the router believes in wrongly: 00000000000000ff",
    ]
    (line,) = difference({"GPU": [str(number) for number in range(10, 33)]}, {})
    assert line.startswith("GPU: 23 blocks the router does not know of: 000000000000000a, ")
    assert line.endswith(", and 13 more")
    assert line.count(",") == 10


def test_a_progress_bar_is_one_line() -> None:
    """From empty to full, also for nothing at all."""
    assert bar(0, 10, 5) == "[.....] 0/10 requests"
    assert bar(1500, 3000, 4) == "[##..] 1,500/3,000 requests"
    assert bar(10, 10, 3) == "[###] 10/10 requests"
    assert bar(0, 0, 3) == "[...] 0/0 requests"


SAID_BY_WORKER: dict[str, Any] = {
    "summary": {
        **dict.fromkeys(("endpoint", "replay_endpoint"), LOOPBACK),
        **dict.fromkeys(("requests", "stored_blocks", "removed_blocks", "events", "batches"), 4),
        **dict.fromkeys(("too_large", "refused", "retellings", "wrong_pages"), 0),
        **dict.fromkeys(("publish_us_p50", "publish_us_p99", "hit_rate"), 0.5),
        "publish_cpu_us_p50": 40.0,
        "publish_cpu_us_p99": 1234.0,
        "blocks_per_step": 7.4,
        "checked_pages": 1500,
        "seconds": 0.0,
        "worker_mb_when_full": None,
        "worker_mb": 1.0,
        "violations": [],
        "resident_blocks": 2,
        "restored_blocks": 0,
        "storage_error": "",
        "tiers": {"GPU": {"hits": 0.5, "resident": 2, "stored": 4, "removed": 2}},
    },
    "blocks": {"GPU": ["1", "2"]},
}


@pytest.mark.parametrize(
    ("view", "equal", "verdict"),
    [
        ({"GPU": ["2", "1"]}, True, "router view == cache: yes (2 blocks compared)"),
        ({"GPU": ["1"]}, False, "router view == cache: NO"),
        ({"GPU": ["1", "3"]}, False, "router view == cache: NO"),
        (None, None, "router view == cache: unknown, the router ended"),
    ],
)
def test_the_verdict_is_the_comparison(
    view: dict[str, list[str]] | None, equal: bool | None, verdict: str
) -> None:
    """Equal sets, whatever their order; anything else is not; without a router nobody knows."""
    said = {"view": view, "joined_at": 3, "gaps": 0, "replayed": 1, "lost": 0}
    summary = json_summary(SAID_BY_WORKER, None if view is None else said)
    assert summary["view_equal"] is summary["tiers"]["GPU"]["view_equal"] is equal
    assert summary.keys() >= KEYS
    assert list(text_summary(summary, 256))[-1] == verdict


def test_the_text_says_what_was_checked_and_what_is_measured() -> None:
    """As --json does: how many pages were compared with what they have to be, and how many were wrong;
    the thread's own time beside the clock's, and for how many blocks.
    """
    said = dict(SAID_BY_WORKER["summary"], wrong_pages=2, violations=["T1: of the tree"])
    lines = list(text_summary(json_summary(SAID_BY_WORKER | {"summary": said}, None), 256))
    (pages,) = (line for line in lines if line.startswith("KV pages"))
    assert "1,500 read back on a hit, 2 of them wrong; 1 invariants of the cache broken" in pages
    (cost,) = (line for line in lines if line.startswith("publish cost"))
    assert "40 µs p50, 1,234 µs p99 of the worker's CPU" in cost and "7 blocks" in cost
    (clock,) = (line for line in lines if line.startswith("publish time"))
    assert "0 µs p50, 0 µs p99 by the clock" in clock


def test_the_sample_of_the_readme_has_the_lines_of_a_summary() -> None:
    """Each line of it begins as one of a summary does, and they are in that order."""
    (sample,) = re.findall(r"^publishes on .*?^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    shown = [line[:14] for line in sample.splitlines()[1:-1] if not line.startswith("...")]
    summary = SAID_BY_WORKER["summary"]
    tiers = dict.fromkeys(("GPU", "CPU_PINNED", "DISK"), summary["tiers"]["GPU"])
    worker = {"summary": summary | {"tiers": tiers}, "blocks": {medium: ["1"] for medium in tiers}}
    router = {"view": worker["blocks"], "joined_at": 3, "gaps": 0, "replayed": 1, "lost": 0}
    lines = [line[:14] for line in text_summary(json_summary(worker, router), 256)]
    assert [line for line in lines if line in shown] == shown
    assert {"publish cost  ", "KV pages      "} <= set(shown)


# ------------------------------------------------------------------------------------------ trace


def test_the_bundled_trace_is_read_as_far_as_asked() -> None:
    """The first requests in order, all of them sound."""
    some = read_trace(BUNDLED_TRACE, 50)
    assert len(some) == 50
    assert read_trace(BUNDLED_TRACE, 7) == some[:7]
    with gzip.open(BUNDLED_TRACE) as lines:
        first = json.loads(next(iter(lines)))
    assert some[0].hash_ids == first["hash_ids"]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_prompt_has_a_page_for_each_hash_id(page_size: int) -> None:
    """Equal ids are equal pages, so that prefixes are shared as in the workload; a partial last block
    stays partial; a reply is shared with nobody.
    """
    one, two = Request(1024, 512, [7, 8]), Request(1300, 512, [7, 8, 9])
    pages = list(pages_of(prompt(two, page_size), page_size))
    assert list(pages_of(prompt(one, page_size), page_size)) == pages[:2]
    assert len(prompt(one, page_size)) == 2 * page_size * 4
    assert len(prompt(two, page_size)) == -(-1300 * page_size // 512) * 4
    assert pages[0] != pages[1]
    replies: list[Callable[[], bytes]] = [
        lambda: reply(1, one, page_size),
        lambda: reply(2, one, page_size),
    ]
    first, second = (make() for make in replies)
    assert first != second
    assert len(first) == page_size * 4
    hashes = block_hashes(prompt(one, page_size), page_size)
    assert block_hashes(prompt(two, page_size), page_size)[:2] == hashes
