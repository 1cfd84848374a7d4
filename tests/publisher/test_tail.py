"""publisher.tools.tail: a line per event, for people and scripts; nothing that a stranger smuggles in."""

from __future__ import annotations

import json
import unicodedata
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_rig import LOOPBACK, PATIENCE_S, RawPublisher, insert, make_cache

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    KVEventsError,
    Skipped,
    StorageMedium,
    decode_batch,
)
from kvevents.gaps import Gap, Lost, Restarted
from publisher import (
    Batch,
    ConfigError,
    Received,
    SidecarConfig,
    SinkConfig,
    Undecodable,
    WorkerInfo,
    spawn,
)
from publisher.tools.tail import Earlier, json_lines, tail, text_lines

GPU, CPU = StorageMedium.GPU, StorageMedium.CPU


def batch(*events: Event, skipped: tuple[Skipped, ...] = (), ts: float = 1.5) -> Batch:
    return Batch(7, KVEventBatch(ts, list(events), 3), skipped, replayed=True)


def text(received: Received | Earlier) -> list[str]:
    """The text lines, without the time of day, which depends on where this runs."""
    return [line.partition(" ")[2].strip() for line in text_lines(received)]


def objects(received: Received | Earlier) -> list[dict[str, Any]]:
    return [json.loads(line) for line in json_lines(received)]


# ------------------------------------------------------------------------------------------- text


def test_events_as_text() -> None:
    """A line for each event: time, seq, kind, medium, how many blocks, the first one, its parent, and
    the namespace where there is one.
    """
    stored = BlockStored([1, 2], None, [1, 2, 3, 4], 2, medium=GPU)
    child = BlockStored([-1], 2, [5, 6], 2, medium=CPU, lora_name="ad", cache_salt="s")
    lines = text(batch(stored, child, BlockRemoved([2], CPU), AllBlocksCleared()))
    assert [line.split() for line in lines] == [
        *(["7", "stored", "GPU", "2", "blocks", "000000000000", "←", "start", "4", "tokens"],),
        [
            *("7", "stored", "CPU_PINNED", "1", "block", "ffffffffffff", "←", "000000000000"),
            *("2", "tokens", "lora_name='ad'", "cache_salt='s'"),
        ],
        ["7", "removed", "CPU_PINNED", "1", "block", "000000000000"],
        ["7", "cleared"],
    ]


def test_one_is_singular_and_columns_stay() -> None:
    """1 block, 1 token, 1 batch; what follows stands where it stands behind many."""
    one, many = text(
        batch(
            BlockStored([1], 2, [5], 1, medium=GPU), BlockStored([1, 2], 2, [5, 6], 1, medium=GPU)
        )
    )
    assert " 1 block " in one and one.endswith(" 1 token")
    assert " 2 blocks " in many and many.endswith(" 2 tokens")
    assert one.index("←") == many.index("←")
    assert text(Earlier(1)) == ["0 1 batch came before; --replay-endpoint asks for their state"]


def test_the_time_is_of_the_batch() -> None:
    """Hours to milliseconds, and a `?` for a ts that is no time."""
    (line,) = text_lines(batch(AllBlocksCleared(), ts=1_700_000_000.25))
    assert line[2] == line[5] == ":"
    assert line[8:13] == ".250 "
    for ts in (float("nan"), float("inf"), -1e300, 1e300):
        (line,) = text_lines(batch(AllBlocksCleared(), ts=ts))
        assert line.startswith("?")
    for ts in (-1e-20, -0.5, 0.9999999):
        (line,) = text_lines(batch(AllBlocksCleared(), ts=ts))
        assert line[8] == "." and line[12] == " "


def test_anomalies_as_text() -> None:
    """Gap, loss, restart, an event that was skipped and a batch that could not be read."""
    skipped = Skipped(2, "type: 'X' is unknown")
    assert text(batch(skipped=(skipped,))) == ["7 SKIPPED event 2: type: 'X' is unknown"]
    undecodable = Undecodable(8, b"\xc1" * 40, "no msgpack")
    assert text(undecodable) == [f"8 UNDECODABLE no msgpack ({'c1' * 16}…)"]
    assert text(Gap(3, 2)) == ["3 GAP 2 missing, asking for a replay"]
    assert text(Lost(3, 2)) == ["3 LOST 2 that nobody has any more"]
    assert text(Restarted(0)) == ["0 RESTART of the publisher"]
    assert text(Earlier(9)) == ["0 9 batches came before; --replay-endpoint asks for their state"]


def test_an_empty_batch_has_no_line() -> None:
    """Heartbeats are silent, in both forms."""
    assert list(text_lines(batch())) == list(json_lines(batch())) == []


@pytest.mark.parametrize("hashes", [[b"\xff" * 32], [b"\xff"], [2**64 - 1], [-(2**63)], []])
def test_any_hash_has_a_short_form(hashes: list[int | bytes]) -> None:
    """Digests, unsigned and signed 64-bit ones, and none at all."""
    (line,) = text_lines(batch(BlockRemoved(hashes)))
    assert len(line.split()[-1]) == (12 if hashes else 1)


# ------------------------------------------------------------------------------------------- JSON


def test_events_as_json() -> None:
    """An object for each event, with its batch's ts, seq and rank; the fields are those of the wire."""
    stored = BlockStored([1, 2], 5, [1, 2, 3, 4], 2, medium=GPU, cache_salt="s")
    first, second, third = objects(batch(stored, BlockRemoved([b"\1\2"]), AllBlocksCleared()))
    common = {"ts": 1.5, "seq": 7, "dp_rank": 3, "replayed": True}
    assert first == common | {
        "type": "BlockStored",
        "block_hashes": ["1", "2"],
        "parent_block_hash": "5",
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "cache_salt": "s",
        "session_id": None,
        "extra_key": None,
        "extra_keys": None,
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "locality": None,
    }
    removed = {"block_hashes": ["0102"], "medium": None, "group_idx": None, "locality": None}
    assert second == common | {"type": "BlockRemoved"} | removed
    assert third == common | {"type": "AllBlocksCleared"}


def test_anomalies_as_json() -> None:
    """Each is an object with a type of its own."""
    (skipped,) = objects(batch(skipped=(Skipped(2, "why"),)))
    assert (skipped["type"], skipped["reason"], skipped["seq"]) == ("Skipped", "why", 7)
    assert objects(Undecodable(8, b"\xc1", "why")) == [
        {"seq": 8, "type": "Undecodable", "reason": "why", "payload": "c1"}
    ]
    assert objects(Gap(3, 2)) == [{"seq": 3, "type": "Gap", "count": 2}]
    assert objects(Lost(3, 2)) == [{"seq": 3, "type": "Lost", "count": 2}]
    assert objects(Restarted(4)) == [{"seq": 4, "type": "Restarted"}]
    assert objects(Earlier(9)) == [{"seq": 0, "type": "Earlier", "count": 9}]


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 2**63 - 1, 2**53 + 1, 0, -1])
def test_64_bits_survive_json(value: int) -> None:
    """Case 41: read with floats for numbers, as jq does, a hash and a parent are still themselves."""
    stored = BlockStored([value], value, [1], 1, medium=GPU)
    for line in json_lines(batch(stored, BlockRemoved([value], GPU))):
        found = json.loads(line, parse_int=float)
        assert int(found["block_hashes"][0]) == value
        if found["type"] == "BlockStored":
            assert int(found["parent_block_hash"]) == value


# ------------------------------------------------------------------------------ what names can do

names = st.text(
    st.sampled_from("\x1b\n\r\t\0\x07\x7f\x85\x9b\u2028\u202e[31m'\"\\é日")
    | st.characters(codec="utf-8"),
    min_size=1,
    max_size=20,
)


def assert_harmless(line: str) -> None:
    """Nothing in it moves a cursor, changes a colour, starts a line or turns the writing around."""
    assert len(line.splitlines()) == 1
    assert [c for c in line if unicodedata.category(c) == "Cc"] == []


@given(name=names)
def test_names_cannot_reach_the_terminal_raw(name: str) -> None:
    """Control characters in LoRA names, salts and keys are escaped in both forms, and come back from
    JSON as they were.
    """
    stored = BlockStored(
        [1], None, [1], 1, medium=GPU, lora_name=name, cache_salt=name, extra_key=name
    )
    (line,) = text_lines(batch(stored))
    assert_harmless(line)
    assert line.isprintable()
    (line,) = json_lines(batch(stored))
    assert_harmless(line)
    found = json.loads(line)
    assert found["lora_name"] == found["cache_salt"] == found["extra_key"] == name


@given(name=names)
def test_what_is_wrong_with_a_stranger_cannot_either(name: str) -> None:
    """Tags, media, field names and times that come with control characters: the reasons given for
    skipping them have none.
    """
    fields = {"type": "BlockRemoved", "block_hashes": [1]}
    payloads = [
        [1.0, [{"type": name}, {**fields, "medium": name}, {**fields, name: 1}, [name], name], 0],
        [name, [], 0],
        [1.0, [], name],
        [1.0, name, 0],
    ]
    for payload in payloads:
        data = msgspec.msgpack.encode(payload)
        try:
            decoded = decode_batch(data)
        except KVEventsError as error:
            one: Received = Undecodable(7, data, str(error))
        else:
            one = Batch(7, decoded.batch, decoded.skipped, replayed=False)
        for line in text_lines(one):
            assert_harmless(line)
            assert line.isprintable()
        for line in json_lines(one):
            assert_harmless(line)
            json.loads(line)


# ------------------------------------------------------------------------------------------- tail


@pytest.mark.integration
def test_tail_writes_up_to_count() -> None:
    """From a real sidecar: a clear and the state first, then as many events as asked for, in either form;
    and with nothing more to come it ends after the timeout.
    """
    cache = make_cache()
    sink = SinkConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, heartbeat_s=3600.0)
    with spawn(WorkerInfo(block_size=4), SidecarConfig(sinks=(sink,), linger_s=0.0)) as sidecar:
        for step in range(5):
            insert(cache, range(step * 100, step * 100 + 8))
            sidecar.pump(cache)
        assert sidecar.client.flush(cache, PATIENCE_S) is not None
        (bound,) = sidecar.client.sinks
        for as_json, count, expected in ((True, 3, 3), (False, 5, 5), (False, None, 7)):
            lines: list[str] = []
            assert tail(
                bound.endpoint,
                bound.replay_endpoint,
                topic="",
                count=count,
                as_json=as_json,
                timeout_s=PATIENCE_S if count else 0.3,
                write=lines.append,
            )
            assert len(lines) == expected
            if as_json:
                assert [json.loads(line)["seq"] for line in lines] == [0, 1, 1]


@pytest.mark.integration
def test_joining_without_a_replay_endpoint_is_no_loss() -> None:
    """What came before the first batch was not asked for; a hole after it is a loss; neither of them is
    one of the two events asked for.
    """
    lines: list[str] = []
    with RawPublisher() as publisher:

        def publish() -> None:
            publisher.await_subscriber()
            for seq in (5, 8):
                publisher.live(seq, AllBlocksCleared())

        thread = Thread(target=publish)
        thread.start()
        assert tail(
            publisher.endpoint,
            None,
            topic="",
            count=2,
            as_json=False,
            timeout_s=PATIENCE_S,
            write=lines.append,
        )
        thread.join()
    assert [line.partition(" ")[2].strip() for line in lines] == [
        "0 5 batches came before; --replay-endpoint asks for their state",
        "5 cleared",
        "6 GAP 2 missing, asking for a replay",
        "6 LOST 2 that nobody has any more",
        "8 cleared",
    ]


@pytest.mark.integration
def test_tail_says_whether_anything_came() -> None:
    """False when nobody was there for the timeout."""
    assert not tail(
        "tcp://127.0.0.1:1",
        None,
        topic="",
        count=None,
        as_json=False,
        timeout_s=0.05,
        write=lambda line: None,
    )


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://h:0", "tcp://h:*", "x", "tcp://a b:1"])
def test_tail_names_an_endpoint_that_cannot_be(endpoint: str) -> None:
    """ConfigError says which of the two, and why; where a publisher binds nobody can connect to."""
    for key, endpoints in (
        ("ENDPOINT", (endpoint, None)),
        ("--replay-endpoint", ("tcp://127.0.0.1:1", endpoint)),
    ):
        with pytest.raises(ConfigError) as error:
            tail(
                *endpoints,
                topic="",
                count=None,
                as_json=False,
                timeout_s=0.05,
                write=lambda line: None,
            )
        assert repr(endpoint) in str(error.value)
        assert str(error.value).startswith((f"{key}: ", "endpoint: ", "replay_endpoint: "))
