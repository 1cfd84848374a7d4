"""kvevents.lint: what each consumer loses of each dialect, and of each way a stream goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvevents_data import Golden, frames, golden
from kvevents_reference import trials

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, HashFormat
from kvevents.dialect import PRESETS
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, reset_frames
from kvevents.lint import CONSUMERS, Finding, Lint
from kvevents.lint.shapes import Quiet
from kvevents.speller import Speller
from kvevents.store_form import StoreSpeller

HASH, PARENT = 0x0123_4567_89AB_CDEF, 0x1123_4567_89AB_CDEF
TS = 1_700_000_000.25
ARRAYS_ONLY = ("llm-d-sglang", "aibrix", "kthena")
TOPICS = {"llm-d": b"kv@10.0.0.1:8000@model", "llm-d-sglang": b"kv@10.0.0.1:8000@model"}
CLEARED = {"type": "AllBlocksCleared"}

pack = msgspec.msgpack.encode


def stored(**fields: Any) -> dict[str, Any]:
    """One block as a map with every key that vLLM's decoder needs, all of it what anyone reads."""
    return {
        "type": "BlockStored",
        "block_hashes": [HASH],
        "parent_block_hash": PARENT,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def removed(**fields: Any) -> dict[str, Any]:
    """Its removal."""
    return {"type": "BlockRemoved", "block_hashes": [HASH], "medium": "GPU"} | fields


def in_array(event: dict[str, Any]) -> list[Any]:
    """The same as an array, without a LoRA name that is nil."""
    values = list(event.values())
    return values[:-1] if len(values) > 3 and values[-1] is None else values


def findings_of(
    consumer: str, *payloads: bytes, first_seq: int = 0, topic: bytes | None = None
) -> list[Finding]:
    """What the consumer loses of these batches, one after the other."""
    lint = Lint([CONSUMERS[consumer]])
    named = TOPICS.get(consumer, b"") if topic is None else topic
    found: list[Finding] = []
    for seq, payload in enumerate(payloads, first_seq):
        found += lint.live(live_frames(named, seq, payload))
    return found


def cell(found: list[Finding]) -> str:
    """How the tables below write it: the most that is lost of one batch."""
    letters = {"batch": "B", "event": "E", "block": "b", "misread": "m", "stream": "S"}
    lost = [letters[one.lost] for one in found]
    return next((letter for letter in "SBEbm" if letter in lost), ".")


def rows(table: str) -> Iterator[tuple[str, str, str]]:
    """Row, column and cell of a table whose first line names the columns."""
    head, *lines = [line for line in table.splitlines() if line.strip()]
    columns = head.partition("|")[2].split()
    for line in lines:
        name, _, cells = line.partition("|")
        for column, each in zip(columns, cells.split(), strict=True):
            yield name.strip(), column, each


# ------------------------------------------------------------------------------------- dialects

FIXED: dict[str, Any] = {
    "array of 7": (TS, [in_array(stored())], 0),
    "array of 12": (TS, [[*in_array(stored()), None, None, None, None, None]], 0),
    "array, a map at 7": (TS, [[*in_array(stored()), {"cache_salt": "s"}]], 0),
    "map with every key": (TS, [stored()], 0),
    "map without lora_name": (
        TS,
        [{key: value for key, value in stored().items() if key != "lora_name"}],
        0,
    ),
    "map, cache_salt": (TS, [stored(cache_salt="s")], 0),
    "map, session_id": (TS, [stored(session_id="s")], 0),
    "map, unknown key": (TS, [stored(favourite="tea")], 0),
}
"""The same bytes for everyone: the event's form is what it is about."""

CHANGED: dict[str, Any] = {
    "unknown event": [{"type": "BlockTouched", "block_hashes": [HASH]}],
    "negative hash": [stored(block_hashes=[-HASH])],
    "hash above i63": [stored(block_hashes=[2**64 - 1])],
    "hash of 8 bytes": [stored(block_hashes=[b"12345678"])],
    "hash of 32 bytes": [stored(block_hashes=[bytes(32)])],
    "narrow hash": [stored(block_hashes=[2**32 - 1])],
    "narrow parent": [stored(parent_block_hash=0)],
    "negative parent": [stored(parent_block_hash=-PARENT)],
    "removed, negative": [removed(block_hashes=[-HASH])],
    "no events": [],
    "pairs of tokens": [stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]])],
    "no token_ids": [stored(token_ids=[])],
    "two blocks": [stored(block_hashes=[HASH, HASH + 1], token_ids=list(range(8)))],
    "CPU": [stored(medium="CPU")],
    "CPU_PINNED": [stored(medium="CPU_PINNED")],
    "DISK": [stored(medium="DISK")],
    "STORAGE": [stored(medium="STORAGE")],
    "EXTERNAL": [stored(medium="EXTERNAL")],
    "no medium": [stored(medium=None)],
    "unknown medium": [stored(medium="FPGA")],
    "lower case": [stored(medium="gpu")],
    "removed, CPU_PINNED": [removed(medium="CPU_PINNED")],
    "lora_name": [stored(lora_name="adapter")],
    "lora_id alone": [stored(lora_id=7)],
}
"""In the form that each reads, a map where it reads both."""

ENVELOPES: dict[str, Any] = {
    "batch of 2": lambda events: (TS, events),
    "batch of 4": lambda events: (TS, events, 0, "publisher"),
    "dp_rank nil": lambda events: (TS, events, None),
    "dp_rank text": lambda events: (TS, events, "0"),
    "ts an int": lambda events: (1_700_000_000, events, 0),
    "ts nil": lambda events: (None, events, 0),
}

DIALECTS = """
dialect               | llm-d llm-d-sglang aibrix smg vllm-router vllm sglang kthena sgl-router mooncake mooncake-vllm dynamo dynamo-relay
array of 7            | .     .            .      .   B           B    B      .      .          E        E             .      .
array of 12           | .     B            .      .   B           B    B      .      .          E        E             .      .
array, a map at 7     | B     B            B      .   B           B    B      .      .          E        E             .      .
map with every key    | .     B            B      .   .           .    .      B      .          .        .             .      .
map without lora_name | .     B            B      .   B           B    .      B      .          .        E             .      .
map, cache_salt       | m     B            B      .   B           .    .      B      .          .        m             .      .
map, session_id       | .     B            B      .   .           .    .      B      .          .        .             .      .
map, unknown key      | .     B            B      .   B           .    .      B      .          .        .             .      .
unknown event         | B     B            B      E   B           B    B      B      B          E        E             B      B
negative hash         | .     .            .      .   B           .    .      .      .          .        E             .      .
hash above i63        | .     .            .      .   .           .    .      .      B          .        .             .      .
hash of 8 bytes       | .     .            .      .   .           .    B      B      B          .        .             B      B
hash of 32 bytes      | .     .            .      .   .           .    B      B      B          .        .             B      B
narrow hash           | B     B            .      .   .           .    .      .      .          .        .             .      .
narrow parent         | B     B            .      .   .           .    .      .      .          .        .             .      .
negative parent       | .     .            .      .   B           .    .      .      .          .        E             .      .
removed, negative     | .     .            .      .   B           .    .      .      .          .        E             .      .
batch of 2            | B     B            .      .   .           .    .      .      .          B        B             B      B
batch of 4            | B     B            B      .   B           .    .      .      .          .        B             B      B
dp_rank nil           | .     .            B      .   .           .    .      .      .          m        .             .      .
dp_rank text          | B     B            B      .   B           B    B      B      B          B        B             B      B
ts an int             | .     .            B      .   .           .    .      .      .          B        B             .      .
ts nil                | B     B            B      .   B           B    B      B      B          B        B             B      B
no events             | .     .            .      .   .           .    .      .      .          .        .             .      .
pairs of tokens       | B     B            B      .   B           B    B      B      .          b        E             m      m
no token_ids          | b     b            B      E   b           .    .      .      .          b        .             E      E
two blocks            | .     .            m      .   .           .    .      .      .          .        .             .      .
CPU                   | .     .            m      .   .           .    .      m      E          .        E             .      .
CPU_PINNED            | m     m            m      .   m           .    .      m      .          .        E             .      .
DISK                  | m     m            m      .   .           .    .      m      .          .        E             .      .
STORAGE               | m     m            m      .   .           .    .      m      E          E        E             .      .
EXTERNAL              | m     m            m      .   m           .    .      m      .          E        E             .      .
no medium             | .     .            .      .   .           .    .      .      .          .        .             .      .
unknown medium        | m     m            m      E   m           .    .      m      E          E        E             E      E
lower case            | .     .            m      .   m           .    .      m      E          E        E             E      E
removed, CPU_PINNED   | .     .            m      .   .           .    .      m      .          .        E             .      .
lora_name             | .     .            m      .   .           .    .      m      .          .        .             .      .
lora_id alone         | .     .            m      .   m           .    .      .      .          E        .             m      m
"""  # noqa: E501
"""What is lost of one batch: B the batch, E the event, b its blocks; m it is read as what it is not."""


def payload_for(consumer: str, dialect: str) -> bytes:
    """A batch in a dialect, as far as the dialect says, and else as the consumer reads it."""
    if dialect in FIXED:
        return pack(FIXED[dialect])
    spelled = in_array if consumer in ARRAYS_ONLY else dict
    events = [spelled(event) for event in CHANGED.get(dialect, [stored()])]
    envelope = ENVELOPES.get(dialect, lambda events: (TS, events, 0))
    return pack(envelope(events))


@pytest.mark.parametrize(("dialect", "consumer", "expected"), list(rows(DIALECTS)))
def test_who_loses_what_of_a_dialect(dialect: str, consumer: str, expected: str) -> None:
    """Each cell of the table of real decoders: a loss is found and says where, and no more is found."""
    found = findings_of(consumer, payload_for(consumer, dialect))
    assert cell(found) == expected, found
    for one in found:
        assert one.consumer == consumer and one.seq == 0
        assert one.where and one.why


def test_the_table_is_of_every_consumer_of_events() -> None:
    """A consumer that is added has its column, and a dialect its row."""
    cells = list(rows(DIALECTS))
    assert {column for _, column, _ in cells} == CONSUMERS.keys() - {"mooncake-store"}
    assert {row for row, _, _ in cells} == {*FIXED, *CHANGED, *ENVELOPES}


@pytest.mark.parametrize(
    ("consumer", "event", "lost", "rule"),
    [
        ("dynamo", stored(ownership="tier"), "event", "value-ownership"),
        ("dynamo", stored(ownership=""), "event", "value-ownership"),
        ("dynamo", stored(locality="REMOTE"), "event", "value-locality"),
        ("smg", stored(locality="REMOTE"), "event", "value-locality"),
        ("smg", stored(kv_cache_spec_kind="mamba"), "event", "value-kv_cache_spec_kind"),
        ("smg", stored(block_hashes=[HASH, HASH]), "event", "repeated-hash"),
        ("smg", stored(token_ids=[1, 2, 3]), "event", "token-count"),
        ("smg", stored(token_ids=[1, 2, 3, 2**32]), "event", "token-range"),
        ("smg", stored(medium=""), "event", "medium-stored"),
        ("smg", stored(extra_key="k"), "misread", "namespace-extra_key"),
        ("dynamo", stored(kv_cache_spec_kind="mamba"), "event", "value-kv_cache_spec_kind"),
        ("dynamo", stored(block_hashes=[HASH, HASH]), "event", "repeated-hash"),
        ("dynamo", stored(parent_block_hash=HASH), "event", "repeated-hash"),
        ("dynamo", stored(token_ids=[1, 2, 3]), "block", "token-count"),
        ("dynamo", stored(token_ids=[2**32]), "batch", "token-range"),
        ("dynamo", stored(medium=7), "batch", "kind-medium"),
        ("dynamo", stored(extra_key="k"), "misread", "namespace-extra_key"),
        ("aibrix", in_array(stored(token_ids=[1])), "event", "token-count"),
        ("aibrix", in_array(stored(token_ids=[1] * 5)), "event", "token-count"),
        ("vllm-router", stored(extra_keys=[["salt"]]), "misread", "namespace-extra_keys"),
        ("sgl-router", stored(block_hashes=[HASH] * 65_537), "batch", "max-hashes"),
        ("vllm-router", {"type": "BlockRemoved", "block_hashes": [HASH]}, "batch", "no-medium"),
        ("vllm-router", removed(session_id="s"), "batch", "unknown-key"),
        ("vllm-router", CLEARED | {"medium": "GPU"}, "batch", "unknown-key"),
        ("vllm-router", stored(lookahead_token_ids=[[1]]), "batch", "unknown-key"),
        ("vllm-router", removed(block_hashes=[]), "batch", "no-hashes"),
        ("vllm-router", stored(token_ids=[1, 2, 3, -1]), "batch", "token-range"),
        ("vllm", {"type": "BlockRemoved", "block_hashes": [HASH]}, "batch", "no-medium"),
    ],
)
def test_what_else_a_consumer_minds(consumer: str, event: Any, lost: str, rule: str) -> None:
    """Fields that are not in the table, each with what it costs."""
    found = findings_of(consumer, pack((TS, [event], 0)))
    assert (lost, rule) in {(one.lost, one.rule) for one in found}


def test_an_adapter_repeated_among_the_extra_keys_is_no_other_namespace() -> None:
    """vLLM's extra_keys name the LoRA adapter too, which lora_name says already."""
    event = stored(lora_name="adapter", extra_keys=[["adapter"]])
    assert findings_of("vllm-router", pack((TS, [event], 0))) == []


def test_a_batch_of_many_megabytes_is_too_large_for_vllm_router() -> None:
    """16 MiB of payload at most."""
    event = stored(session_id="s" * (16 << 20))
    (found,) = findings_of("vllm-router", pack((TS, [event], 0)))
    assert (found.lost, found.rule) == ("batch", "payload-size")


@pytest.mark.parametrize(
    ("consumer", "lost"),
    [("dynamo-relay", "stream"), ("mooncake", "batch"), ("dynamo", None), ("aibrix", None)],
)
def test_another_rank_than_the_first(consumer: str, lost: str | None) -> None:
    """A relay of Dynamo never takes the worker again, Mooncake drops the batch, others go on."""
    found = findings_of(consumer, pack((TS, [], 1)), pack((TS, [], 2)))
    assert [one.lost for one in found] == ([] if lost is None else [lost])


def test_another_block_size_than_the_first() -> None:
    """Dynamo has one block size for a worker."""
    other = stored(block_size=2, token_ids=[1, 2])
    found = findings_of("dynamo", pack((TS, [stored()], 0)), pack((TS, [other], 0)))
    assert [(one.seq, one.lost, one.rule) for one in found] == [(1, "event", "block-size")]


def test_one_bad_event_is_all_that_is_lost_where_events_are_read_one_by_one() -> None:
    """SMG loses the unknown event of three; vllm-router all of them."""
    payload = pack((TS, [stored(), {"type": "?"}, removed()], 0))
    (smg,) = findings_of("smg", payload)
    (router,) = findings_of("vllm-router", payload)
    assert (smg.lost, smg.where) == ("event", "events[1].type")
    assert (router.lost, router.where) == ("batch", "events[1].type")


def test_what_is_lost_with_more_is_not_lost_again() -> None:
    """Nobody misreads an event of a batch that he drops."""
    events = [stored(medium="CPU_PINNED", lora_id=3), stored(block_hashes=[-1])]
    found = findings_of("vllm-router", pack((TS, events, 0)))
    assert {one.rule for one in found} == {"negative-hash"}


# ------------------------------------------------------------------------- Mooncake's own form


def mooncake_stored(**fields: Any) -> dict[str, Any]:
    """An object as a conductor takes it."""
    return {
        "event_id": 1,
        "timestamp": 1_700_000_000_250,
        "event_type": "stored",
        "model_name": "m",
        "block_size": 4,
        "tenant_id": "default",
        "medium": "cpu",
        "dp_rank": 0,
        "object_key": "key",
        "connector_block_hash": "00" * 32,
    } | fields


@pytest.mark.parametrize(
    ("changes", "cell_"),
    [
        ({}, "."),
        ({"medium": "DISK"}, "."),
        ({"medium": "EXTERNAL"}, "E"),
        ({"dp_rank": None}, "E"),
        ({"connector_block_hash": None}, "E"),
        ({"model_name": None}, "E"),
        ({"block_hashes": [-1]}, "E"),
        ({"token_ids": None}, "."),
        ({"token_ids": 7}, "E"),
        ({"tenant_id": "other"}, "E"),
        ({"event_type": "touched"}, "E"),
        ({"event_type": "cleared", "medium": None}, "."),
    ],
)
def test_objects_in_a_store(changes: dict[str, Any], cell_: str) -> None:
    """What the conductor and Dynamo's shared cache refuse of an object costs the object."""
    payload = pack((1_700_000_000_250, [mooncake_stored(**changes)], 0))
    assert cell(findings_of("mooncake-store", payload)) == cell_


def test_a_store_counts_milliseconds() -> None:
    """A batch whose ts is a float is lost."""
    assert cell(findings_of("mooncake-store", pack((TS, [mooncake_stored()], 0)))) == "B"


# ---------------------------------------------------------------------------------- our presets


@pytest.mark.parametrize("name", sorted(CONSUMERS.keys() & PRESETS.keys()))
def test_our_presets_are_taken_whole(name: str) -> None:
    """Whatever a sink tells in a consumer's own dialect, that consumer loses nothing of."""
    dialect, tokens = PRESETS[name].dialect, [1, 2, 3, 4]
    lora = "adapter" if "lora_name" in dialect.namespaces else None
    events: list[Event] = [AllBlocksCleared()]
    for medium, _ in dialect.media:
        digest = -0x30680C1112A4A61B  # SGLang's of these tokens, 4 to a block
        events.append(BlockStored([digest], None, tokens, 4, medium=medium))
        events.append(BlockStored([7, 8], digest, [*range(8)], 4, medium=medium, lora_name=lora))
        events.append(BlockRemoved([8], medium=medium))
    if name == "mooncake-store":
        payload = StoreSpeller(
            0,
            block_size=4,
            hash_format=HashFormat.SGLANG,
            media=dict(dialect.media),
            model="m",
            worker_id="w",
        ).spell(TS, events)
    else:
        payload = Speller(dialect, 0).spell(TS, events)
    topic = PRESETS[name].topic.format(pod_ip="10.0.0.1", model="m").encode()
    assert findings_of(name, payload, topic=topic) == []


# --------------------------------------------------------------------------------------- golden


def test_what_vllm_router_says_of_sglang() -> None:
    """SGLang 0.5.23's own bytes are dropped for want of lora_name, and for their signed hashes."""
    payload = next(one.payload for one in golden() if str(one) == "sglang/store_root")
    lines = [str(one) for one in findings_of("vllm-router", payload, first_seq=0)]
    drops = "seq 0        vllm-router    drops the batch: events[0]."
    assert lines == [
        f"{drops}lora_name is absent: it needs the key",
        f"{drops}block_hashes[0] is -3488128144981237669: it reads unsigned hashes only",
    ]


@pytest.mark.parametrize("batch", golden(), ids=str)
def test_an_engines_decoder_reads_what_it_sends(batch: Golden) -> None:
    """The typed decoders of vLLM 0.33 and SGLang 0.5.23 lose nothing of their own engine's bytes, but the
    pairs that they refuse themselves; and every array of older ones.
    """
    arrays = batch.engine.endswith("-array")
    for engine in ("vllm", "sglang"):
        found = cell(findings_of(engine, batch.payload))
        if arrays and batch.events:
            assert found == "B"
        elif engine == batch.engine:
            assert found == ("B" if batch.typed_decoder_rejects else ".")


@pytest.mark.parametrize("engine", ["sglang", "vllm", "sglang-array", "vllm-array"])
def test_real_publishers_replays(engine: str) -> None:
    """The answers of newer engines have the topic; those of older ones are nothing to three consumers."""
    lint = Lint(CONSUMERS.values(), replay=True)
    lint.asked(0)
    told = frames()
    found = [
        one
        for name in ("replay_0", "replay_1", "replay_end")
        for one in lint.answer(told[f"{engine}/{name}"])
        if one.rule == "replay-frames"
    ]
    expected = {"llm-d", "llm-d-sglang", "vllm-router", "vllm"} if "-array" in engine else set()
    assert {one.consumer for one in found} == expected


# --------------------------------------------------------------------------------- how it goes on

EMPTY, CLEAR = pack((TS, [], 0)), pack((TS, [CLEARED], 0))
CLEAR_AS_ARRAY = pack((TS, [list(CLEARED.values())], 0))
WAYS: dict[str, list[tuple[int, bytes]]] = {
    "from 0": [(0, EMPTY), (1, EMPTY)],
    "late join": [(5, EMPTY)],
    "late join, cleared": [(5, CLEAR)],
    "gap": [(0, EMPTY), (2, EMPTY)],
    "jump, cleared": [(0, EMPTY), (1000, CLEAR)],
    "back to 0": [(0, EMPTY), (1, EMPTY), (0, pack((TS + 1, [], 0)))],
    "back to 0, cleared": [(0, EMPTY), (1, EMPTY), (0, CLEAR)],
    "resumed, cleared": [(0, EMPTY), (1, CLEAR)],
    "the same again": [(0, EMPTY), (1, EMPTY), (1, EMPTY)],
    "END on the PUB socket": [(0, EMPTY), (2**64 - 1, b"")],
    "END, then 0, cleared": [(0, EMPTY), (1, EMPTY), (2**64 - 1, b""), (0, CLEAR)],
    "a seq of 2^63": [(0, EMPTY), (2**63, EMPTY)],
}
WITH_REPLAY = """
way                   | llm-d aibrix smg vllm-router sgl-router mooncake mooncake-vllm dynamo dynamo-relay kthena vllm
from 0                | .     .      .   .           .          .        .             .      .            .      .
late join             | .     J      .   .           J          .        J             .      J            J      .
late join, cleared    | .     .      .   .           .          .        .             .      .            .      .
gap                   | .     S      .   .           S          .        S             .      S            S      .
jump, cleared         | S     .      .   .           .          S        .             .      .            .      .
back to 0             | .     S      .   .           B          B        .             B      S            S      .
back to 0, cleared    | .     .      .   .           B          B        .             B      .            .      .
resumed, cleared      | .     .      .   .           .          .        .             .      .            .      .
the same again        | .     .      .   .           .          .        .             .      .            .      .
END on the PUB socket | .     S      S   .           .          .        .             .      .            .      .
END, then 0, cleared  | .     S      S   .           .          B        .             B      .            .      .
a seq of 2^63         | .     S      .   .           S          B        S             .      S            S      .
"""  # noqa: E501
WITHOUT_REPLAY = """
way                   | llm-d smg vllm-router mooncake dynamo
from 0                | .     .   .           .        .
late join             | J     J   J           J        J
late join, cleared    | .     .   .           .        .
gap                   | S     S   S           S        S
jump, cleared         | .     .   .           S        .
back to 0             | S     .   .           B        B
back to 0, cleared    | .     .   .           B        B
resumed, cleared      | .     .   .           .        .
"""


@pytest.mark.parametrize(
    ("replay", "way", "consumer", "expected"),
    [(True, *row) for row in rows(WITH_REPLAY)] + [(False, *row) for row in rows(WITHOUT_REPLAY)],
)
def test_who_can_follow(replay: bool, way: str, consumer: str, expected: str) -> None:
    """S: what comes later, or came before, is lost or stale; B: the batch that goes back is dropped; J:
    nothing is found, and the summary says that it joined late.
    """
    lint = Lint([CONSUMERS[consumer]], replay=replay)
    found: list[Finding] = []
    clear = CLEAR_AS_ARRAY if consumer in ARRAYS_ONLY else CLEAR
    for seq, payload in WAYS[way]:
        told = clear if payload is CLEAR else payload
        found += lint.live(live_frames(TOPICS.get(consumer, b""), seq, told))
    (tally,) = lint.tallies
    assert (cell(found) if tally.joined is None else "J") == expected, found


def test_a_late_join_is_no_finding_and_is_over_with_a_clear() -> None:
    """A live batch before the snapshot costs nobody anything once the snapshot is there."""
    lint = Lint([CONSUMERS["sgl-router"]])
    assert lint.live(live_frames(b"", 7, pack((TS, [stored()], 0)))) == []
    history = "what was stored before is unknown to it: it asks for no replay"
    assert (
        str(lint.tallies[0]) == "sgl-router experimental, Aug 2026: takes the one batch, 1 block;"
        f" joined at seq 7: {history}"
    )
    assert lint.live(live_frames(b"", 8, CLEAR)) == []
    assert str(lint.tallies[0]).endswith("takes all 2 batches, 1 block")


def test_who_takes_all_and_gains_nothing_is_told_why() -> None:
    """A conductor that joined late reads what comes, and what helps it is said as well."""
    lint = Lint([CONSUMERS["mooncake"]])
    assert lint.live(live_frames(b"", 7, pack((TS, [stored()], 0)))) == []
    assert str(lint.tallies[0]).endswith(
        "joined at seq 7: those before are missing to it, so it counts the worker as stale until that is"
        " registered anew"
    )


def test_nothing_stored_is_not_all_taken() -> None:
    """Heartbeats and clears alone: no block was seen, and it is said so; a store's objects are blocks."""
    lint = Lint([CONSUMERS["dynamo"]])
    for seq, payload in enumerate((CLEAR, EMPTY)):
        lint.live(live_frames(b"", seq, payload))
    assert str(lint.tallies[0]) == "dynamo 1.6.1: saw no block in 2 batches"
    lint = Lint([CONSUMERS["mooncake-store"]])
    lint.live(live_frames(b"", 0, pack((1, [mooncake_stored(type="BlockStored")], 0))))
    assert str(lint.tallies[0]).endswith("takes the one batch, 1 block")


def test_a_clear_at_a_gap_is_what_a_store_means() -> None:
    """Dynamo clears at the gap, the conductor at `cleared`: one left out before it costs neither."""
    clear = pack((1, [{"event_type": "cleared"}], 0))
    lint = Lint([CONSUMERS["mooncake-store"]])
    assert [lint.live(live_frames(b"", seq, clear)) for seq in (0, 2)] == [[], []]
    (found,) = lint.live(live_frames(b"", 4, pack((1, [], 0))))
    assert found.rule == "gap"


def test_a_clear_that_is_not_read_clears_nothing() -> None:
    """AIBrix, which reads arrays, keeps what is gone where the clear is a map."""
    lint = Lint([CONSUMERS["aibrix"]])
    for seq in (0, 1):
        assert lint.live(live_frames(b"", seq, EMPTY)) == []
    found = lint.live(live_frames(b"", 0, CLEAR))
    assert {one.lost for one in found} == {"stream", "batch"}


def test_all_up_to_the_old_seq_is_dropped() -> None:
    """Dynamo drops each batch of the new run until the old run's seq is passed, and counts again."""
    lint = Lint([CONSUMERS["dynamo"]], replay=True)
    for seq in range(5):
        lint.live(live_frames(b"", seq, EMPTY))
    found = [lint.live(live_frames(b"", seq, CLEAR)) for seq in range(6)]
    assert [bool(one) for one in found] == [True] * 5 + [False]
    assert str(lint.tallies[0]) == "dynamo 1.6.1: loses 5 of 11 batches"


def test_sgl_router_starts_anew_with_the_sentinel() -> None:
    """With it, seq 0 is a new run; without, it is old."""
    lint = Lint([CONSUMERS["sgl-router"]])
    for message in (
        live_frames(b"", 0, EMPTY),
        live_frames(b"", 1, EMPTY),
        reset_frames(b""),
        live_frames(b"", 0, CLEAR),
    ):
        assert lint.live(message) == []


@pytest.mark.parametrize(
    ("topic", "losing"),
    [
        (b"", {"llm-d", "llm-d-sglang"}),
        (b"kv-events", {"llm-d", "llm-d-sglang", "vllm-router"}),
        (b"kv@10.0.0.1:8000@m", {"vllm-router", "kthena"}),
        (b"kv@10.0.0.1:8000@m@x", {"llm-d", "llm-d-sglang", "vllm-router", "kthena"}),
        (b"\x1b[31m\xff", {"llm-d", "llm-d-sglang", "vllm-router", "kthena"}),
    ],
)
def test_topics(topic: bytes, losing: set[str]) -> None:
    """Who does not read a message for its topic."""
    found = Lint(CONSUMERS.values()).live(live_frames(topic, 0, EMPTY))
    assert {one.consumer for one in found if one.rule == "topic"} == losing


@pytest.mark.parametrize(
    ("message", "taking"),
    [
        ([b"", bytes(8)], set()),
        ([b"", bytes(8), EMPTY, b"more"], {"smg"}),
        ([b"", bytes(7), EMPTY], set()),
        ([], set()),
    ],
)
def test_frames_of_another_shape(message: list[bytes], taking: set[str]) -> None:
    """Three frames and a seq of 8 bytes, or the message is lost to nearly everyone."""
    lint = Lint(CONSUMERS.values())
    lost = {one.consumer for one in lint.live(message) if one.rule in ("frames", "seq-bytes")}
    assert CONSUMERS.keys() - lost == taking


def test_llm_d_takes_longer_seqs() -> None:
    """8 bytes at least."""
    found = Lint([CONSUMERS["llm-d"]]).live([TOPICS["llm-d"], bytes(9), EMPTY])
    assert found == []


# --------------------------------------------------------------------------------------- replays


def replay_findings(start: int, *messages: list[bytes], over: bool = False) -> dict[str, set[str]]:
    """Who minds what, by rule, of a replay."""
    lint = Lint(CONSUMERS.values(), replay=True)
    lint.asked(start)
    found = [one for message in messages for one in lint.answer(message)]
    found += lint.over() if over else []
    by_rule: dict[str, set[str]] = {}
    for one in found:
        if one.lost == "stream":
            by_rule.setdefault(one.rule, set()).add(one.consumer)
    return by_rule


def answer(seq: int, payload: bytes = EMPTY) -> list[bytes]:
    """A whole one."""
    return replay_answer(b"", seq, payload, delimited=True)


END = replay_end(delimited=True)
LLM_D = {"llm-d", "llm-d-sglang"}


def test_a_whole_replay() -> None:
    """From the seq asked for, without a hole, with END: nobody minds."""
    assert replay_findings(0, answer(0), answer(1), END) == {}


def test_a_replay_without_topics() -> None:
    """3 frames: llm-d, vllm-router and vLLM index nothing; Dynamo, SMG and Mooncake take both."""
    bare = replay_answer(None, 0, EMPTY, delimited=True)
    expected = {"replay-frames": LLM_D | {"vllm-router", "vllm"}}
    assert replay_findings(0, bare, replay_end(delimited=True, with_topic=False)) == expected


def test_a_replay_that_does_not_reach_back() -> None:
    """A buffer that has rolled: some index nothing, some keep what is gone; a clear helps those."""
    never = LLM_D | {"vllm-router", "mooncake"}
    assert replay_findings(0, answer(3), END) == {"rolled": never | {"dynamo", "smg"}}
    assert replay_findings(0, answer(3, CLEAR), END) == {"rolled": never}


def test_a_joined_replay_begins_where_it_does() -> None:
    """JOIN asks for no seq."""
    assert replay_findings(JOIN, answer(300, CLEAR), answer(301), END) == {}


def test_a_replay_with_a_hole() -> None:
    """A ROUTER that drops: whoever checks gives up, and Dynamo keeps what is gone."""
    expected = {"hole": LLM_D | {"vllm-router", "mooncake", "smg", "dynamo"}}
    assert replay_findings(0, answer(0), answer(2), END) == expected


def test_a_replay_without_an_end() -> None:
    """Dynamo waits for ever."""
    expected = {"no-end": LLM_D | {"vllm-router", "mooncake", "smg", "dynamo"}}
    assert replay_findings(0, answer(0), over=True) == expected


def test_an_empty_payload_in_a_replay() -> None:
    """Dynamo takes it for the end."""
    assert replay_findings(0, answer(0), answer(1, b""), END) == {"empty": {"dynamo"}}


def test_what_a_replay_has_brought_is_not_counted_twice() -> None:
    """Live messages that it covers are the same batches; the next is no gap to those who asked."""
    lint = Lint([CONSUMERS["dynamo"], CONSUMERS["aibrix"]], replay=True)
    lint.asked(0)
    for message in (answer(0), answer(1), END):
        assert lint.answer(message) == []
    found = [one for seq in (1, 2, 3) for one in lint.live(live_frames(b"", seq, EMPTY))]
    assert found == []
    assert [tally.joined is None for tally in lint.tallies] == [True, False]
    assert [tally.batches for tally in lint.tallies] == [4, 4]


def test_a_restart_into_what_a_replay_has_brought_is_a_restart() -> None:
    """Once the stream has passed the replay, a seq that goes back is of another run."""
    lint = Lint([CONSUMERS["dynamo"]], replay=True)
    lint.asked(0)
    for message in (answer(0), answer(1), END):
        assert lint.answer(message) == []
    for seq in (1, 2):
        assert lint.live(live_frames(b"", seq, EMPTY)) == []
    (found,) = lint.live(live_frames(b"", 0, CLEAR))
    assert (found.lost, found.rule) == ("batch", "old-seq")


# ------------------------------------------------------------------------------------ any bytes

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True)
    | st.text(max_size=30)
    | st.binary(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)
events = st.one_of(
    st.builds(
        lambda base, key, value: base | {key: value},
        st.sampled_from([stored(), removed(), CLEARED, mooncake_stored()]),
        st.sampled_from([*stored(), *mooncake_stored(), "cache_salt", "extra_keys", "\x1b[31m"]),
        anything,
    ),
    st.builds(lambda event, more: [*in_array(event), *more], st.just(stored()), st.lists(anything)),
    anything,
)
batches = st.builds(
    lambda ts, events, rank, more: pack([ts, events, rank, *more]),
    anything,
    st.lists(events, max_size=4) | anything,
    anything,
    st.lists(anything, max_size=1),
)
payloads = st.one_of(
    st.binary(max_size=200),
    batches,
    st.builds(lambda payload, cut: payload[:cut], batches, st.integers(0, 200)),
    st.builds(lambda payload, more: payload + more, batches, st.binary(max_size=5)),
)


@trials(40)
@given(
    told=st.lists(st.sampled_from(range(4)), max_size=8),
    made=st.lists(batches | payloads, min_size=4, max_size=4),
    topic=st.sampled_from([b"", b"kv@a@b"]),
)
def test_who_lost_nothing_of_a_shape_is_not_looked_at_again(
    told: list[int], made: list[bytes], topic: bytes
) -> None:
    """And still the same is found, of batches that come again and again, live and in replays, as by who
    looks into each of them.
    """
    quick, slow = Lint(CONSUMERS.values()), Lint(CONSUMERS.values())
    for seq, which in enumerate(told):
        slow._quiet = Quiet()
        if which == 3:
            message = replay_answer(topic, seq, made[which], delimited=True)
            assert quick.answer(message) == slow.answer(message)
        else:
            message = live_frames(topic, seq, made[which])
            assert quick.live(message) == slow.live(message)
    assert quick.tallies == slow.tallies


@pytest.mark.parametrize(
    ("one", "other", "consumer"),
    [
        (stored(), stored(medium="CPU_PINNED"), "vllm-router"),
        (stored(), stored(block_size=2), "dynamo"),
        (stored(), stored(cache_salt="s"), "llm-d"),
        (stored(lora_name=""), stored(lora_name="x"), "aibrix"),
        (stored(cache_salt="s"), stored(cache_salt="s", locality="REMOTE"), "smg"),
        (stored(block_hashes=[]), stored(), "vllm-router"),
        (stored(), stored(block_hashes=[HASH, HASH]), "smg"),
        (stored(), stored(token_ids=[1, 2, 3]), "smg"),
        (stored(), stored(token_ids=[2**32, 2, 3, 4]), "smg"),
        (stored(lora_id=1, lora_name="x"), stored(lora_id=1), "dynamo"),
        (mooncake_stored(), mooncake_stored(tenant_id="t"), "mooncake-store"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_tells_shapes_apart(one: Any, other: Any, consumer: str) -> None:
    """What differs in what some consumer minds is looked at, after however much of the other; nothing but
    values is not looked at again, whatever the values.
    """
    spelled = in_array if consumer in ARRAYS_ONLY else dict
    batches = [
        pack((1 if "event_type" in each else TS, [spelled(each)], 0)) for each in (one, other)
    ]
    for first, second in (batches, batches[::-1]):
        alone = [one.rule for one in findings_of(consumer, first, second)]
        after = [one.rule for one in findings_of(consumer, first, first, first, second)]
        assert set(alone) == set(after) != set()


@example(
    messages=[
        ("live", live_frames(b"", 0, b"\0")),
        ("answer", live_frames(b"", 0, b"")),
        ("live", live_frames(b"", 0, b"")),
    ],
    replay=False,
)
@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from(["live", "answer", "asked", "over"]),
            st.lists(st.binary(max_size=9) | payloads, max_size=5)
            | st.builds(
                lambda seq, payload: live_frames(b"", seq, payload), st.integers(0, 4), payloads
            ),
        ),
        max_size=5,
    ),
    replay=st.booleans(),
)
def test_any_bytes_give_findings(messages: list[tuple[str, list[bytes]]], replay: bool) -> None:
    """No exception; each finding is one line of bounded length that can be printed."""
    lint = Lint(CONSUMERS.values(), replay=replay)
    found: list[Finding] = []
    for kind, message in messages:
        match kind:
            case "live":
                found += lint.live(message)
            case "answer":
                found += lint.answer(message)
            case "asked":
                lint.asked(len(message))
            case _:
                found += lint.over()
    for one in found:
        line = str(one)
        assert line.isprintable() and len(line) < 500
    for tally in lint.tallies:
        assert tally.lost["batch"] <= tally.batches
        assert str(tally)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        pack((TS, [], 0)) + b"\xc1",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x81" * 50_000 + b"\x00",
        pack((TS, [{"type": "BlockStored", "block_hashes": {"\n" * 5000: 1}}], 0)),
        pack((TS, [stored(**{"\x1b" * 5000: 1})], 0)),
        pack((TS, [stored(medium="\u202e" * 5000)], 0)),
        b"\x93\xcb" + bytes(8) + b"\x91\x81\xa4type\xa2\xff\xfe\x00",
    ],
    ids=range(10),
)
def test_known_horrors(payload: bytes) -> None:
    """Nested without end, lengths that are lies, text that is none, control characters."""
    found = Lint(CONSUMERS.values()).live(live_frames(b"", 0, payload))
    assert found
    for one in found:
        assert str(one).isprintable() and len(str(one)) < 500


@pytest.mark.parametrize("after", [b"\x00", b"\xc1", b"\xdd\xff\xff\xff\xff"])
def test_bytes_after_the_payload(after: bytes) -> None:
    """Dynamo does not mind them; the engines' decoders do, and vllm-router, and SMG."""
    payload = pack((TS, [stored()], 0)) + after
    assert findings_of("dynamo", payload) == []
    for consumer in ("vllm", "sglang", "vllm-router", "smg"):
        (found,) = findings_of(consumer, payload)
        assert (found.rule, found.why) == ("trailing", f"is followed by {len(after)} bytes more")


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (pack((TS, [stored(block_hashes=[1] * 1_000_001)], 0)), "1000001 hashes in events[0]"),
        (pack((TS, [0] * 20_001, 0)), "20001 events"),
        (pack((TS, [0] * 500_000, 0)), "500000 events"),
        (pack([0] * 2_000_000), "2000000 elements"),
        (pack((TS, [], 0)) + bytes(30 << 20), "31457292 bytes"),
        (b"\x93\xcb" + bytes(8) + b"\xdd\x01\xe0\0\0" + b"\x01" * (30 << 20), "31457295 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_large_is_not_looked_into(payload: bytes, why: str) -> None:
    """It takes no time, it is said, and the stream goes on; who drops it for its size does so still."""
    start = time.process_time()
    lint = Lint(CONSUMERS.values())
    found = lint.live(live_frames(b"", 0, payload))
    assert time.process_time() - start < 1.0
    found = [one for one in found if one.rule not in ("topic", "payload-size")]
    assert {(one.lost, one.rule) for one in found} == {("unread", "too-large")}
    assert all(one.why.startswith(f"has {why}: ") for one in found)
    by_name = {tally.consumer.name: str(tally) for tally in lint.tallies}
    assert by_name["dynamo"] == "dynamo 1.6.1: is not judged in 1 batch"
    too_large_for_it = len(payload) > 16 << 20
    assert ("loses the one batch" in by_name["vllm-router"]) == too_large_for_it
    assert lint.live(live_frames(TOPICS["llm-d"], 1, pack((TS, [], 0)))) is not None


def test_bytes_that_are_no_batch_take_no_time() -> None:
    """Garbage of many values, whole or not, is one finding, at once."""
    start = time.process_time()
    for payload in (b"\x92" + b"\x01" * (15 << 20), b"\x01" * (15 << 20), b"\x91" * (15 << 20)):
        assert findings_of("dynamo", payload)[0].lost == "batch"
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("consumer", "rank", "expected"),
    [
        ("dynamo", -1, "."),
        ("dynamo", 2**31, "B"),
        ("vllm-router", -1, "B"),
        ("vllm-router", 2**31, "."),
        ("mooncake-store", -1, "B"),
    ],
)
def test_ranks_out_of_range(consumer: str, rank: int, expected: str) -> None:
    """Each has an int of its own width."""
    ts = 1 if consumer == "mooncake-store" else TS
    assert cell(findings_of(consumer, pack((ts, [], rank)))) == expected
