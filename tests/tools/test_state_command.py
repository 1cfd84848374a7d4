"""`kvevents state`: as a process, against sidecars, publishers by hand, captures, and nobody."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from publisher_crew import BLOCK, Hand, crew
from publisher_rig import (
    ENVIRONMENT,
    PATIENCE_S,
    RawPublisher,
    kill,
    kvevents,
    payload_of,
    receive_until,
    router_view,
    start_kvevents,
    still_running,
)

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Namespace, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.frames import live_frames
from kvevents.message import Channel
from publisher import Batch, Subscriber
from publisher.cli.commands import parser_of
from publisher.cli.hint import doctor_command

pytestmark = pytest.mark.integration

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
UTF_8 = {**ENVIRONMENT, "LC_ALL": "C.UTF-8"}
NOWHERE = "tcp://127.0.0.1:1"
SOON = ("--quiet", "0.1")
PROMPT = list(range(500, 540))
NOT_QUIET = "not quiet: it answers no replay, and what it holds changed to the end"


def stored(name: int, first: int = 10, **more: object) -> BlockStored:
    """A block of two tokens."""
    told: dict[str, object] = {"medium": GPU} | more
    return BlockStored([name], None, [first, first + 1], 2, **told)  # type: ignore[arg-type]


def capture(path: Path, *payloads: bytes) -> Path:
    """Of live batches from seq 0."""
    told = [
        pack_message(seq, Channel.LIVE, live_frames(b"", seq, payload))
        for seq, payload in enumerate(payloads)
    ]
    path.write_bytes(capture_start(CaptureHead(endpoint="tcp://h:1")) + b"".join(told))
    return path


def table(text: str) -> list[list[str]]:
    """The rows of the first table; a note is one cell."""
    lines = text.partition("\n\n")[0].splitlines()
    return [line.split(maxsplit=9) for line in lines[1:]]


def by_shell(
    redirection: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with its streams as a shell would set them."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m publisher.cli "$@" {redirection}', sys.executable, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **environment},
    )


@pytest.fixture(scope="module")
def hands() -> Iterator[list[Hand]]:
    """Two workers: the first has dropped the end of the prompt from the device."""
    with crew("w1", "w2") as hands:
        first, second = hands
        first.serve(PROMPT)
        for start in (0, 100, 200):
            first.serve(range(start, start + 12))
        second.serve(PROMPT[:12])
        second.serve(range(12), Namespace(lora_name="x"))
        for hand in hands:
            hand.flush()
        yield hands


@pytest.fixture
def publisher() -> Iterator[RawPublisher]:
    with RawPublisher() as publisher:
        yield publisher


def test_two_workers_with_two_tiers(hands: list[Hand]) -> None:
    """Counts of each worker, rank and medium are the caches' own, as a table and as a document."""
    sources = [hand.source for hand in hands]
    plain, as_json = (
        kvevents("state", *sources, *SOON),
        kvevents("state", *sources, *SOON, "--json"),
    )
    assert (plain.returncode, plain.stderr, as_json.returncode) == (0, "", 0)
    seqs = [hand.flush() for hand in hands]
    for hand, row, one in zip(
        hands, table(plain.stdout), json.loads(as_json.stdout)["workers"], strict=True
    ):
        counts = hand.counts()
        held = len(hand.held())
        assert counts["CPU_PINNED"] and counts["GPU"]
        assert row[:3] == [hand.name, "0", str(BLOCK)]
        assert row[3:8] == [*map(str, counts.values()), str(held)]
        assert 0 <= int(row[8]) <= seqs[hands.index(hand)]
        assert one["blocks"] == counts and one["any"] == held
        assert (one["worker"], one["rank"], one["block_size"]) == (hand.name, 0, BLOCK)
        assert (one["whole"], one["quiet"], one["notes"]) == (True, True, [])


def test_who_holds_a_prompt(hands: list[Hand]) -> None:
    """The best worker first; what each tier holds of its beginning is what the caches hold; where the
    chain breaks.
    """
    tokens = [*PROMPT, 1, 2, 3]
    text = ",".join(map(str, tokens))
    ran = kvevents("state", *(hand.source for hand in hands), "--tokens", text, "-o", "json", *SOON)
    assert ran.returncode == 0
    overlap = json.loads(ran.stdout)["overlap"]
    assert overlap["tokens"] == 43
    by_name = {hand.name: hand for hand in hands}
    for one in overlap["workers"]:
        hand = by_name[one["worker"]]
        held = hand.leading_on_any(tokens)
        assert one["blocks"] == hand.leading(tokens)
        assert (one["any"], one["any_tokens"]) == (held, held * BLOCK)
        assert one["tokens"] == {name: n * BLOCK for name, n in one["blocks"].items()}
        assert one["share"] == pytest.approx(held * BLOCK / 43, abs=1e-4)
        assert one["prompt_blocks"] == 10
        assert one["breaks_at_block"] == (None if held == 10 else held)
    best, other = overlap["workers"]
    assert (best["worker"], best["any"]) == ("w1", 10)
    assert best["blocks"]["GPU"] < best["blocks"]["CPU_PINNED"] == 10
    assert other["reasons"] == ["the chain breaks at block 3, token 12"]

    told = kvevents("state", *(hand.source for hand in hands), "--tokens", text, *SOON).stdout
    title, _, first, second = told.split("\n\n")[1].splitlines()
    assert title.startswith("prompt of 43 tokens: ")
    assert first.split()[:6] == ["w1", "0", "4", "10/10", "40", "93%"]
    assert second.split()[:6] == ["w2", "0", "4", "3/10", "12", "28%"]


def test_why_nothing_is_held(hands: list[Hand]) -> None:
    """A prompt that is held by an adapter alone, and one that is shorter than a block."""
    source = hands[1].source
    told = kvevents("state", source, "--tokens", ",".join(map(str, range(12))), *SOON).stdout
    assert "3 of 3 blocks are held under lora 'x', not under the base" in told
    asked = ("--tokens-file", "-", "--lora", "x", "--json", *SOON)
    ran = kvevents("state", source, *asked)  # its stdin is empty
    assert (ran.returncode, ran.stdout) == (2, "")
    why = "kvevents state: --tokens-file: standard input is empty, or closed\n"
    assert ran.stderr == why == by_shell("<&-", "state", source, *asked).stderr
    ran = subprocess.run(
        [sys.executable, "-m", "publisher.cli", "state", source, *asked],
        input=json.dumps({"input_ids": list(range(12))}),
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    overlap = json.loads(ran.stdout)["overlap"]
    assert overlap["lora"] == "x" and overlap["workers"][0]["any"] == 3
    told = kvevents("state", source, "--tokens", "0,1,2", *SOON).stdout
    assert "the prompt has 3 tokens, less than a block of 4: nothing can be found" in told


def test_tokens_that_are_left_out() -> None:
    """A stream without token ids cannot be asked for a prompt, and says so; counts are right."""
    with crew("w", token_ids=False) as (hand,):
        hand.serve(PROMPT)
        hand.flush()
        told = kvevents("state", hand.source, "--tokens", ",".join(map(str, PROMPT)), "--json")
        document = json.loads(told.stdout)
        assert document["workers"][0]["blocks"] == hand.counts()
        (one,) = document["overlap"]["workers"]
        assert one["reasons"] == [
            "token ids are left out of all blocks: these cannot be found by tokens"
        ]


def test_blocks_are_listed(hands: list[Hand]) -> None:
    """Each block with its hash, parent, depth, media and tokens: all, or those of a prompt."""
    source, cache = hands[0].source, hands[0].cache
    blocks = json.loads(kvevents("state", source, "--blocks", "--json", *SOON).stdout)["blocks"]
    for medium, held in cache.resident_blocks().items():
        assert {int(one["hash"]) for one in blocks if medium in one["media"]} == held
    named = {one["hash"]: one for one in blocks}
    for one in blocks:
        assert one["depth"] == (named[one["parent"]]["depth"] + 1 if one["parent"] else 0)
    text = ",".join(map(str, PROMPT))
    listed = kvevents("state", source, "--blocks", "--tokens", text, *SOON).stdout.split("\n\n")[2]
    rows = [line.split() for line in listed.splitlines()[1:]]
    assert [int(row[2]) for row in rows] == list(range(10))
    assert ",".join(row[6] for row in rows) == text
    assert [row[4] for row in rows[1:]] == [row[3] for row in rows[:-1]]


# ------------------------------------------------------------------------------- not all is known


Tell = Callable[[RawPublisher], None]


def told(publisher: RawPublisher, tell: Tell, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """What it says of a publisher that tells this once it has a subscriber: code, row, stderr."""
    with start_kvevents("state", "state", *arguments, "--json") as process:
        publisher.await_subscriber()
        tell(publisher)
        out, err = process.communicate(timeout=PATIENCE_S)
    (row,) = json.loads(out)["workers"]
    return process.returncode, row, err


def test_joined_live(publisher: RawPublisher) -> None:
    """Without a replay endpoint what was stored before is unknown: said, and exit code 1."""
    code, row, _ = told(publisher, lambda one: one.live(7, stored(1)), publisher.endpoint)
    assert (code, row["seq"], row["blocks"]["GPU"]) == (1, 7, 1)
    assert row["notes"] == ["joined live: what was stored before is unknown"]


def test_a_gap_leaves_it_stale(publisher: RawPublisher) -> None:
    """Batches that are lost are counted."""

    def tell(one: RawPublisher) -> None:
        one.live(0, stored(1))
        one.live(4, stored(2), BlockRemoved([9], GPU))

    code, row, _ = told(publisher, tell, publisher.endpoint)
    assert (code, row["notes"], row["whole"]) == (1, ["stale: 3 batches lost"], False)


def test_a_replay_endpoint_that_does_not_answer(publisher: RawPublisher) -> None:
    """It is given up, and said; what came live is shown."""
    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    code, row, _ = told(publisher, lambda one: one.live(7, stored(1)), source, "--for", "2")
    assert (code, row["blocks"]["GPU"]) == (1, 1)
    assert row["notes"] == [
        "its replay endpoint does not answer: what was stored before is unknown"
    ]


def test_a_replay_that_begins_too_late(publisher: RawPublisher) -> None:
    """An engine that retains only the last batches."""

    def tell(one: RawPublisher) -> None:
        client, _ = one.request()
        one.end(client)
        client, start = one.request()
        assert start == 0
        one.answer(client, 5, stored(1))
        one.end(client)

    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    code, row, _ = told(publisher, tell, source)
    assert (code, row["seq"], row["blocks"]["GPU"]) == (1, 5, 1)
    assert row["notes"] == [
        "its replays do not go back far enough: what was stored before is unknown"
    ]


def test_a_busy_stream_is_in_step_all_the_same(publisher: RawPublisher) -> None:
    """With a replay it need not get quiet: its state is shown long before --for, and is whole."""
    source = f"{publisher.endpoint},{publisher.replay_endpoint}"
    arguments = ("--for", "3600", "--quiet", "0.2", "--json")
    with start_kvevents("in step", "state", source, *arguments) as process:
        publisher.await_subscriber()
        client, _ = publisher.request()
        publisher.answer(client, 0, stored(1))
        publisher.end(client)
        seq, deadline = 1, time.monotonic() + PATIENCE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, "it waits for quiet"
            publisher.live(seq, stored(seq + 1))
            seq += 1
            publisher.pub.poll(20)
        out, _ = process.communicate()
    (row,) = json.loads(out)["workers"]
    assert (process.returncode, row["whole"], row["quiet"], row["notes"]) == (0, True, True, [])
    assert 0 < row["blocks"]["GPU"] <= seq


def test_a_busy_stream_without_replays_is_looked_at_for_so_long(publisher: RawPublisher) -> None:
    """It cannot say that it is in step: after --for its state is shown, and that it was not quiet."""
    arguments = ("--for", "1", "--quiet", "0.8", "--json")
    with start_kvevents("busy", "state", publisher.endpoint, *arguments) as process:
        publisher.await_subscriber()
        seq = 0
        while process.poll() is None:
            publisher.live(seq, stored(seq + 1))
            seq += 1
            publisher.pub.poll(20)
        out, _ = process.communicate()
    (row,) = json.loads(out)["workers"]
    assert (process.returncode, row["notes"], row["quiet"]) == (0, [NOT_QUIET], False)
    assert 0 < row["blocks"]["GPU"] <= seq


def test_ctrl_c_means_that_it_is_enough(publisher: RawPublisher) -> None:
    """What came so far is shown."""
    arguments = (publisher.endpoint, "--quiet", "60", "--for", "60")
    with start_kvevents("enough", "state", *arguments) as process:
        publisher.await_subscriber()
        publisher.live(0, stored(1))
        publisher.pub.poll(500)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err
    assert process.returncode in (0, 3)
    assert (NOT_QUIET if process.returncode == 0 else "nothing has come of it yet") in out


def test_nobody_is_there(publisher: RawPublisher) -> None:
    """No connection to any: 3, and whom; with another that is there its state is shown, and 1."""
    ran = kvevents("state", NOWHERE, "--for", "0.5")
    assert ran.returncode == 3
    why = f"kvevents state: no connection to {NOWHERE}; why: kvevents doctor {NOWHERE}\n"
    assert ran.stderr == why
    assert table(ran.stdout)[0][-2:] == ["-", "not connected"]
    sources = (f"a={publisher.endpoint}", f"b={NOWHERE}")
    with start_kvevents("one", "state", *sources, "--for", "2", "--json") as process:
        publisher.await_subscriber()
        publisher.live(0, stored(1))
        out, _ = process.communicate(timeout=PATIENCE_S)
    there, gone = json.loads(out)["workers"]
    assert (process.returncode, there["whole"], gone["whole"]) == (1, True, False)
    assert (gone["rank"], gone["notes"]) == (None, ["not connected"])


def test_nothing_came(publisher: RawPublisher) -> None:
    """Connected, but idle: 3, with what to do."""
    source = f"a b={publisher.endpoint},{publisher.replay_endpoint}"
    ran = kvevents("state", source, "--for", "2", "--topic", "kv@ x")
    assert ran.returncode == 3
    assert ran.stderr == (
        f"kvevents state: nothing came from {publisher.endpoint};"
        f" why: kvevents doctor '{source}' --topic 'kv@ x'\n"
    )


def test_swapped_endpoints(publisher: RawPublisher) -> None:
    """Nobody can subscribe to a replay endpoint; what is said is a command that sees what is wrong."""
    source = f"{publisher.replay_endpoint},{publisher.endpoint}"
    ran = kvevents("state", source, "--for", "0.5")
    told, _, command = ran.stderr.partition("; why: kvevents ")
    assert told == f"kvevents state: no connection to {publisher.replay_endpoint}"
    assert ran.returncode == 3
    assert "swap the two" in kvevents(*shlex.split(command)).stdout


ODD = "-k'v\u202e\n\\x"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6))
@example(ODD)
@settings(deadline=None, max_examples=10)
def test_a_command_to_paste_says_what_was_said(topic: str) -> None:
    """A shell makes the same options of it, whatever is in them, and no terminal is moved by it."""
    options = argparse.Namespace(
        sources=["w=tcp://h:1,2"],
        replay_endpoint=None,
        topic=topic,
        server_key="a b.key",
        client_key="$c.key_secret",
    )
    command = doctor_command(options, "w=tcp://h:1,2")
    assert command.isprintable()
    ran = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env=UTF_8
    )
    words = ran.stdout.decode().split("\0")[1:-1]
    found = parser_of("doctor").parse_args(words)
    assert (found.endpoint, found.topic) == ("w=tcp://h:1,2", topic)
    assert (found.server_key, found.client_key) == ("a b.key", "$c.key_secret")


def test_batches_that_wait_for_a_replay(publisher: RawPublisher) -> None:
    """While nobody answers it is said that batches came and wait, and for whom; and in the end too. A
    replay that pauses, but has brought something, is said not to be over.
    """
    with RawPublisher() as slow:
        both = [f"{one.endpoint},{one.replay_endpoint}" for one in (publisher, slow)]
        with start_kvevents("waits", "state", *both, "--for", "60") as process:
            for one in (publisher, slow):
                one.await_subscriber()
                client, _ = one.request()
                for seq in range(3):
                    one.live(seq + 5, stored(seq + 1))
            slow.answer(client, 0, stored(9))
            assert process.stderr is not None
            told = process.stderr.readline()
            slow.pub.poll(300)  # so that it is silent for as long
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
    waits = (
        f"3 batches have come and wait: the replay endpoint {publisher.replay_endpoint} does not"
    )
    assert f": {waits} answer" in told
    assert waits in out and waits in err.partition("; why: ")[0]
    assert out.count("does not answer") == 1 and slow.replay_endpoint not in out + err
    assert "its replay is not over: 3 batches wait behind it" in out
    assert process.returncode == 1


# -------------------------------------------------------------------------------------- a restart


_WORKER = """
import signal
from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn
sink = SinkConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
with spawn(WorkerInfo(block_size=1), SidecarConfig(sinks=(sink,), linger_s=20.0)) as sidecar:
    tokens = (7).to_bytes(4, "little")
    sidecar.client.publish([StoreNew(StorageMedium.GPU, BlockId(0), 1, None, BASE, tokens)])
    (bound,) = sidecar.client.sinks
    print(sidecar.pid, bound.endpoint, bound.replay_endpoint, flush=True)
    signal.pause()
"""


def test_a_worker_that_was_killed_holds_nothing() -> None:
    """Its sidecar clears what it held: the state is empty, and whole."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert worker.stdout is not None
    with worker.stdout:
        pid, endpoint, replay_endpoint = worker.stdout.readline().split()
        try:
            router_view(endpoint, replay_endpoint, until=2)
            source = f"{endpoint},{replay_endpoint}"
            before = json.loads(kvevents("state", source, "--json").stdout)["workers"]
            assert [one["any"] for one in before] == [1]
            with Subscriber(endpoint, replay_endpoint) as subscriber:
                receive_until(subscriber, bool)
                worker.kill()
                worker.wait()
                receive_until(
                    subscriber,
                    lambda received: any(
                        isinstance(one, Batch)
                        and not one.replayed
                        and AllBlocksCleared() in one.batch.events
                        for one in received
                    ),
                )
            ran = kvevents("state", source, "--json")
            (row,) = json.loads(ran.stdout)["workers"]
            assert (ran.returncode, row["any"], row["whole"]) == (0, 0, True)
            assert row["seq"] > before[0]["seq"]
        finally:
            worker.kill()
            worker.wait()
            kill(int(pid), signal.SIGTERM)
            assert not still_running([int(pid)], PATIENCE_S)


# --------------------------------------------------------------------------------------- captures


def test_captures_to_their_end(tmp_path: Path) -> None:
    """Several, each a worker; what would move a terminal is written out; what is cut off is said."""
    one = capture(tmp_path / "one", payload_of(stored(1), stored(1, medium=CPU)))
    evil = payload_of(stored(2, lora_name="\x1b[2Jx\n"))
    other = capture(tmp_path / "other", evil, payload_of(stored(3, first=20)))
    other.write_bytes(other.read_bytes()[:-3])
    ran = kvevents("state", str(one), str(other), "--tokens", "10,11", "--blocks")
    assert ran.returncode == 0
    rows = table(ran.stdout)
    assert [row[3:9] for row in rows] == [list("110010"), list("100010")]
    assert "\x1b" not in ran.stdout and "\\x1b[2Jx" in ran.stdout
    assert "left out" in ran.stderr and str(other) in ran.stderr


def test_a_damaged_capture_is_a_finding(tmp_path: Path) -> None:
    """1, and why, although what came before it is shown; one that was cut off is as good as any."""
    file = capture(tmp_path / "c", payload_of(stored(1)), payload_of(stored(2, first=20)))
    whole = file.read_bytes()
    for command in ("state", "top"):
        file.write_bytes(whole[:-1])
        ran = kvevents(command, str(file))
        assert ran.returncode == 0 and "was cut off" in ran.stderr
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        ran = kvevents(command, str(file))
        assert ran.returncode == 1 and str(file) in ran.stdout
        assert "1 batch was read" in ran.stderr and "checksum" in ran.stderr


@pytest.mark.parametrize("command", ["state", "top"])
def test_output_that_goes_nowhere(tmp_path: Path, command: str) -> None:
    """Closed, or full: no traceback."""
    file = str(capture(tmp_path / "c", payload_of(stored(1))))
    assert by_shell(">&-", command, file).returncode in (0, 2)
    full = by_shell(">/dev/full", command, file)
    assert full.returncode == 2 and full.stderr.count("\n") == 1


def test_a_document_is_safe_to_show(tmp_path: Path) -> None:
    """Line ends and what turns text are escapes in it, and the same text to a program."""
    odd = "\u2028\x85\u202e"
    file = str(capture(tmp_path / "c", payload_of(stored(1, lora_name=odd))))
    ran = kvevents("state", file, "--blocks", "--json")
    assert ran.stdout.replace("\n", "").isprintable()
    assert json.loads(ran.stdout)["blocks"][0]["lora"] == odd


@pytest.mark.parametrize(
    "arguments",
    ["state FILE --blocks", "state FILE --blocks -o json", "tail FILE -o json", "check -h"],
)
def test_an_output_that_is_not_utf_8(tmp_path: Path, arguments: str) -> None:
    """Names and help are written as well as can be, and JSON is JSON, with the same text in it."""
    name = "é\U0001f600\x7f"
    file = str(capture(tmp_path / "c", payload_of(stored(1, lora_name=name))))
    told = [file if one == "FILE" else one for one in arguments.split()]
    ran = by_shell("", *told, PYTHONIOENCODING="ascii:strict")
    assert ran.returncode == 0
    assert ran.stdout.isascii()
    match told[0], told[-1]:
        case "state", "json":
            assert json.loads(ran.stdout)["blocks"][0]["lora"] == name
        case "tail", _:
            assert json.loads(ran.stdout)["lora_name"] == name
        case "state", _:
            assert r"\xe9\U0001f600\x7f" in ran.stdout


@pytest.mark.parametrize("command", ["state", "top"])
def test_the_help_explains_its_table(command: str) -> None:
    """In 80 columns, each column of it."""
    help_text = by_shell("", command, "--help", COLUMNS="80").stdout
    assert max(map(len, help_text.splitlines())) <= 80
    heads = {
        "state": "rank block GPU CPU_PINNED any seq note blocks tokens share",
        "top": "rank link ev/s stored/s removed/s GPU EXT lag p50 p99 seq gaps lost replays"
        " restarts findings blocks tokens beneath held stores again",
    }
    body = help_text.partition("positional")[0]
    assert set(heads[command].split()) <= set(re.findall(r"[\w/]+", body))
    assert command != "state" or "/tokenize" in help_text


def test_colours_are_as_asked_for(tmp_path: Path) -> None:
    """Never, or always; to a pipe, without a word, never."""
    file = str(capture(tmp_path / "c", payload_of(stored(1))))
    plain = kvevents("state", file, "--color", "never").stdout
    coloured = kvevents("state", file, "--color", "always").stdout
    assert plain == kvevents("state", file).stdout
    assert "\x1b[" not in plain and "\x1b[1m" in coloured


# ------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--tokens", "1,x"), "--tokens: token 1: 'x' is not an int"),
        (("--tokens=--5",), "--tokens: token 0: '--5' is not an int"),
        (("--tokens", "1,-5"), "--tokens: token 1: -5 is not in 0..4294967295"),
        (("--tokens-file", "/nonexistent"), "--tokens-file: /nonexistent: No such file"),
        (("--tokens", "1", "--tokens-file", "-"), "not allowed with argument"),
        (("--lora", "x"), "--lora: it is a prompt's, and goes with --tokens"),
        (("--tokens", "1", "--cache-salt", "x" * 2000), "--cache-salt: 2000 bytes are above 1024"),
        (("--quiet", "0"), "--quiet: 0.0 is not above 0"),
        (("--for", "nan"), "--for: nan is not above 0"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], why: str) -> None:
    """One line on stderr that names the option, nothing on stdout, and 2."""
    ran = kvevents("state", NOWHERE, *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert why in ran.stderr and ran.stderr.count("\n") == 1
