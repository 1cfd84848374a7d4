"""docs/wire.md shows what the code sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from docs_pages import DOCS, Block, blocks_of
from publisher_rig import insert, make_cache
from publisher_sidecar_rig import config

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    Namespace,
    StorageMedium,
    TokenIds,
    block_hashes,
    decode_batch,
    encode_batch,
    pack_tokens,
)
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from publisher import WorkerInfo, spawn

PAGE = DOCS / "wire.md"
GPU, CPU, DISK, _ = StorageMedium
HASHES = block_hashes(range(1, 13), 4)
NAMED = Namespace("adapter", "tenant-a", "ek")


def stored(
    hashes: Sequence[int], parent: int | None, tokens: range, medium: StorageMedium, **names: str
) -> BlockStored:
    packed = TokenIds(pack_tokens(tokens))
    return BlockStored(list(hashes), parent, packed, 4, medium=medium, **names)  # type: ignore[arg-type]


BATCHES: dict[str, list[Event]] = {
    "heartbeat": [],
    "store": [stored(HASHES[:2], None, range(1, 9), GPU)],
    "store-child": [stored(HASHES[2:], HASHES[1], range(9, 13), CPU)],
    "store-namespace": [
        stored(
            block_hashes(range(1, 5), 4, NAMED),
            None,
            range(1, 5),
            GPU,
            lora_name="adapter",
            cache_salt="tenant-a",
            extra_key="ek",
        )
    ],
    "store-without-tokens": [stored(HASHES[:2], None, range(0), DISK)],
    "remove": [BlockRemoved([HASHES[1], HASHES[0]], GPU)],
    "clear": [AllBlocksCleared()],
}


def payload(name: str) -> bytes:
    return encode_batch(KVEventBatch(1700000000.25, BATCHES[name], 0))


MESSAGES = {
    "live": live_frames(b"kv", 0, payload("clear")),
    "request": replay_request(1),
    "request-join": replay_request(JOIN),
    "answer": replay_answer(b"kv", 0, payload("clear"), delimited=True),
    "end": replay_end(delimited=True),
}


def golden() -> dict[str, Block]:
    """The page's golden blocks by name."""
    found = [one for one in blocks_of(PAGE) if one.note.startswith("golden: ")]
    return {one.note.removeprefix("golden: "): one for one in found}


def test_every_golden_block_has_a_test() -> None:
    """None is on the page that nobody makes again, and none is missing there."""
    assert golden().keys() == BATCHES.keys() | MESSAGES.keys()


@pytest.mark.parametrize("name", BATCHES)
def test_payloads_are_those_of_the_encoder(name: str) -> None:
    """The bytes of the page, without its comments, are the batch's payload, and read as that batch."""
    told = re.sub(r"#.*", "", golden()[name].text)
    assert bytes.fromhex(told) == payload(name)
    decoded = decode_batch(bytes.fromhex(told))
    assert (decoded.batch.events, decoded.skipped) == (BATCHES[name], ())


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_those_that_are_sent(name: str) -> None:
    """A line of the page for each frame, a dash for an empty one."""
    told = [bytes.fromhex(line.replace("-", "")) for line in golden()[name].text.splitlines()]
    assert told == MESSAGES[name]


def hash_rows() -> list[list[str]]:
    text = PAGE.read_text().partition("<!-- golden hashes -->\n")[2]
    rows = text.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def page_code(word: str) -> dict[str, Any]:
    """What the Python block that has `word` in it defines."""
    (code,) = [one.text for one in blocks_of(PAGE) if one.language == "python" and word in one.text]
    defined: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), defined)
    return defined


def test_the_hashes_of_the_page_are_ours() -> None:
    """Each row of the table is what we compute, and so does the page's own function; also for a prompt
    whose last block is not full.
    """
    theirs = page_code("def block_hashes")["block_hashes"]
    rows = hash_rows()
    assert len(rows) == 5
    for lora_name, cache_salt, extra_key, *told in rows:
        ours = block_hashes(range(1, 9), 4, Namespace(lora_name, cache_salt, extra_key))
        spelled = [f"{one}` = `{one & (2**64 - 1):016x}" for one in ours]
        assert told == spelled
        assert theirs(list(range(1, 12)), 4, lora_name, cache_salt, extra_key) == ours


@pytest.mark.integration
def test_the_subscriber_of_the_page_follows(tmp_path: Path) -> None:
    """The page's own subscriber, which knows nothing of ours, holds what the cache holds: told to it at
    its start, told live, and after what it had missed.
    """
    cache = make_cache(num_pages=8)
    worker = WorkerInfo(block_size=cache.page_size, worker_id="wire")
    with spawn(worker, config(tmp_path)) as sidecar:
        insert(cache, range(8))
        assert sidecar.pump(cache)
        assert sidecar.client.flush(cache, 10.0) is not None
        (bound,) = sidecar.client.sinks
        view = page_code("class View")["View"](bound.endpoint, str(bound.replay_endpoint))
        try:
            assert view.held == {"GPU": cache.resident_blocks()[GPU]}
            _await_subscriber(view, cache, sidecar)
            insert(cache, range(100, 124))  # evicts some of what was there
            assert sidecar.pump(cache)
            while view.held["GPU"] != cache.resident_blocks()[GPU]:
                assert view.sub.poll(10_000), "nothing more comes"
                view.receive()
            view.expected -= 1  # as if it had missed the last one
            insert(cache, range(200, 204))
            assert sidecar.pump(cache)
            while view.held["GPU"] != cache.resident_blocks()[GPU]:
                assert view.sub.poll(10_000), "nothing more comes"
                view.receive()
        finally:
            view.sub.close(linger=0)
            view.context.term()


def _await_subscriber(view: Any, cache: Any, sidecar: Any) -> None:
    """Until something comes: what is published before is not for it."""
    tokens = 1000
    while not view.sub.poll(20):
        tokens += 4
        insert(cache, range(tokens, tokens + 4))
        assert sidecar.pump(cache)
