"""Our bytes in the typed decoders of real engines, theirs in ours, and where they are the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interop_rig import RELEASES, EngineCodec
from interop_rpc import RemoteError

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
    TokenIds,
    block_hashes,
    decode_batch,
    pack_tokens,
)
from kvevents.dialect import PRESETS, Dialect
from kvevents.speller import Speller
from kvevents.view import View

pytestmark = pytest.mark.integration

GPU, CPU, DISK, EXTERNAL = StorageMedium
SIZE = 4
TS = 1700000000.25
SGLANG, VLLM, OLD_SGLANG, OLD_VLLM = RELEASES
NAMES = {
    SGLANG: "SGLang 0.5.23 typed decoder",
    VLLM: "vLLM 0.33.0 typed decoder",
    OLD_SGLANG: "SGLang 0.5.18 typed decoder",
    OLD_VLLM: "vLLM 0.23.0 typed decoder",
}
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def codecs() -> Iterator[Callable[[str], EngineCodec]]:
    """An engine by its release, started when it is first asked for."""
    started: dict[str, EngineCodec] = {}

    def codec(release: str) -> EngineCodec:
        if release not in started:
            started[release] = EngineCodec(release)
        return started[release]

    yield codec
    for one in started.values():
        one.__exit__(None, None, None)


def spelled(dialect: Dialect, events: list[Event], dp_rank: int = 0) -> bytes:
    """As a sink publishes them."""
    return Speller(dialect, dp_rank).spell(TS, View(dialect).apply(events))


# ------------------------------------------------------------------------- ours, in their decoders


@dataclass(frozen=True)
class Told:
    """What a consumer of a preset is to be told, in the words of docs/consumers.md."""

    hashes: str
    media: dict[StorageMedium, str]
    names: frozenset[str] = frozenset()
    blocks: int = 1 << 30
    keyed: bool = False
    """The adapter and the salt are among vLLM's extra keys."""


ALL = {GPU: "GPU", CPU: "CPU_PINNED", DISK: "DISK", EXTERNAL: "EXTERNAL"}
EVERY_NAME = frozenset({"lora_name", "cache_salt", "extra_key", "extra_keys"})
NO_EXTRA_KEY = EVERY_NAME - {"extra_key"}
LORA = frozenset({"lora_name"})
TOLD = {
    "sglang": Told("i64", ALL, EVERY_NAME),
    "vllm": Told(
        "u64",
        {GPU: "GPU", CPU: "CPU", DISK: "STORAGE", EXTERNAL: "STORAGE"},
        NO_EXTRA_KEY,
        keyed=True,
    ),
    "dynamo": Told("i64", ALL, NO_EXTRA_KEY),
    "llm-d": Told("bytes", {GPU: "GPU", CPU: "CPU"}, LORA | {"extra_keys"}),
    "aibrix": Told("i64", {GPU: "GPU"}, blocks=1),
    "mooncake": Told("u64", {GPU: "GPU", CPU: "CPU_PINNED", DISK: "DISK"}, LORA),
    "vllm-router": Told("u64", {GPU: "GPU", CPU: "CPU", DISK: "DISK", EXTERNAL: "DISK"}, LORA),
    "sgl-router": Told("i64", ALL, EVERY_NAME),
    "smg": Told("i64", ALL, LORA),
    "kthena": Told("i64", {GPU: "GPU"}),
    "legacy": Told("i64", ALL),
}
ARRAYS = ("aibrix", "kthena", "legacy")
MAPS = tuple(name for name in TOLD if name not in ARRAYS)
TAKEN_BY = [
    *[(name, release) for name in MAPS for release in (SGLANG, VLLM) if name != "llm-d"],
    ("llm-d", VLLM),  # whose hashes may be bytes; SGLang's may not
    *[(name, OLD_SGLANG) for name in ARRAYS],
]


def stored(
    tokens: list[int], medium: StorageMedium, start: int = 0, space: Namespace | None = None
) -> BlockStored:
    """The blocks of a prompt from number `start` on."""
    hashes = block_hashes(tokens, SIZE, space or Namespace())
    names = space or Namespace()
    return BlockStored(
        block_hashes=list(hashes[start:]),
        parent_block_hash=hashes[start - 1] if start else None,
        token_ids=TokenIds(pack_tokens(tokens[start * SIZE :])),
        block_size=SIZE,
        medium=medium,
        lora_name=names.lora_name,
        cache_salt=names.cache_salt,
        extra_key=names.extra_key,
    )


def prompt(first: int, blocks: int) -> list[int]:
    return [first * 1000 + token for token in range(blocks * SIZE)]


def removed(event: BlockStored) -> BlockRemoved:
    return BlockRemoved(list(reversed(event.block_hashes)), event.medium)


def named(event: BlockStored, **more: Any) -> BlockStored:
    for name, value in more.items():
        setattr(event, name, value)
    return event


def story() -> list[Event]:
    """Something of everything. No block is on two media, so none is told for one and not for another."""
    on_each = [stored(prompt(number, 2), medium) for number, medium in enumerate(StorageMedium)]
    large = stored([0, 151643, 2**31, 2**32 - 1], GPU)
    ends = BlockStored([-(2**63), 2**63 - 1, -1, 0], large.block_hashes[0], [7] * 16, SIZE, 7, GPU)
    adapter = Namespace("adapter")
    return [
        *on_each,
        stored(prompt(9, 4), GPU),
        stored(prompt(9, 6), GPU, 4),
        large,
        ends,
        *map(removed, reversed(on_each)),
        removed(ends),
        named(stored(prompt(10, 3), GPU, 0, adapter), session_id="session-1"),
        stored(prompt(10, 4), GPU, 3, adapter),
        stored(prompt(11, 2), GPU, 0, Namespace(None, "tenant-a")),
        stored(prompt(11, 3), GPU, 2, Namespace(None, "tenant-a")),
        stored(prompt(12, 2), GPU, 0, Namespace("adapter", "tenant-a")),
        stored(prompt(13, 1), GPU, 0, Namespace(None, None, "key")),
        named(stored(prompt(14, 2), GPU), extra_keys=[[["image-1", 0], b"\x01"], ["image-2"]]),
        AllBlocksCleared(),
        stored(prompt(1, 1), GPU),
    ]


HASHES: dict[str, Callable[[int], int | bytes]] = {
    "i64": lambda value: value,
    "u64": lambda value: value % 2**64,
    "bytes": lambda value: (value % 2**64).to_bytes(8, "big"),
}


def expected(told: Told, event: Event) -> Iterator[dict[str, Any]]:
    """What a consumer that knows every key reads of an event, one of the story's."""
    if isinstance(event, AllBlocksCleared):
        yield {"type": "AllBlocksCleared"}
        return
    assert event.medium is not None
    if event.medium not in told.media:
        return
    if any(getattr(event, name, None) is not None for name in EVERY_NAME - told.names):
        return
    form = HASHES[told.hashes]
    hashes = [form(int(value)) for value in event.block_hashes]
    for start in range(0, len(hashes), told.blocks):
        some = hashes[start : start + told.blocks]
        fields: dict[str, Any] = {"block_hashes": some, "medium": told.media[event.medium]}
        fields["type"] = type(event).__name__
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            before = None if parent is None else form(int(parent))
            tokens = list(event.token_ids)
            fields |= {
                "parent_block_hash": hashes[start - 1] if start else before,
                "token_ids": tokens[start * SIZE : (start + len(some)) * SIZE],
                "block_size": SIZE,
                "lora_id": event.lora_id,
                "lora_name": event.lora_name,
                "session_id": event.session_id,
                "extra_keys": keys_of(event) if told.keyed else event.extra_keys,
                "cache_salt": None if told.keyed else event.cache_salt,
            }
        yield fields


def keys_of(event: BlockStored) -> list[Any] | None:
    """In vLLM's order: the adapter's name, then in a prompt's first block the salt."""
    if event.extra_keys is not None:
        return event.extra_keys
    keys = []
    for position in range(len(event.block_hashes)):
        first = position == 0 and event.parent_block_hash is None
        names = (event.lora_name, event.cache_salt if first else None)
        keys.append([name for name in names if name is not None] or None)
    return keys if any(keys) else None


def conforming(pairs: list[tuple[str, str]], situation: str) -> pytest.MarkDecorator:
    """A test of each preset with each release."""
    return pytest.mark.parametrize(
        ("preset", "release"),
        [
            pytest.param(
                preset,
                release,
                marks=pytest.mark.conformance(
                    preset=preset, consumer=NAMES[release], situation=situation
                ),
                id=f"{preset}-{release}",
            )
            for preset, release in pairs
        ],
    )


@conforming(TAKEN_BY, "every field of every event")
def test_their_decoders_read_what_we_say(
    codecs: Callable[[str], EngineCodec], preset: str, release: str
) -> None:
    """Each field of each event is what the preset promises, and nothing is left out but what it names."""
    wanted = [fields for event in story() for fields in expected(TOLD[preset], event)]
    for rank in (0, 3):
        batch = codecs(release).decode(spelled(PRESETS[preset].dialect, story(), rank))
        assert (batch["ts"], batch["dp_rank"]) == (TS, rank)
        assert [event["type"] for event in batch["events"]] == [one["type"] for one in wanted]
        for event, fields in zip(batch["events"], wanted, strict=True):
            assert event == {name: fields.get(name) for name in event}


@conforming(TAKEN_BY, "an empty batch")
def test_their_decoders_read_a_heartbeat(
    codecs: Callable[[str], EngineCodec], preset: str, release: str
) -> None:
    """An empty batch is one."""
    batch = codecs(release).decode(spelled(PRESETS[preset].dialect, [], 3))
    assert batch == {"ts": TS, "events": [], "dp_rank": 3}


def test_a_lora_slot_makes_arrays_vllms(codecs: Callable[[str], EngineCodec]) -> None:
    """vLLM 0.23 takes arrays only with the adapter's name: with `namespaces` it is there."""
    events: list[Event] = [
        stored(prompt(1, 2), GPU),
        stored(prompt(2, 2), GPU, 0, Namespace("adapter")),
        BlockRemoved([5], GPU),
    ]
    named_slot = Dialect(event_form="array", namespaces=("lora_name",))
    batch = codecs(OLD_VLLM).decode(spelled(named_slot, events))
    names = [event["lora_name"] for event in batch["events"][:2]]
    assert names == [None, "adapter"]
    assert batch["events"][2]["block_hashes"] == [5]
    with pytest.raises(RemoteError, match="Expected `array` of at least length"):
        codecs(OLD_VLLM).decode(spelled(PRESETS["legacy"].dialect, events))


# ----------------------------------------------------------------------------------- theirs, in ours

I64, U64 = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)
Text = st.none() | st.text(max_size=4)
OWN_MEDIA = {SGLANG: list(ALL.values()), VLLM: ["GPU", "CPU", "STORAGE"]}
OWN_MEDIA |= {OLD_SGLANG: OWN_MEDIA[SGLANG], OLD_VLLM: ["GPU", "CPU"]}
READ = {"CPU": CPU, "STORAGE": DISK} | {medium.value: medium for medium in StorageMedium}
Keys = st.none() | st.lists(
    st.text(max_size=4) | U64 | st.binary(max_size=4) | st.tuples(st.text(), I64).map(list),
    max_size=3,
)


@st.composite
def stores(draw: st.DrawFn, release: str) -> dict[str, Any]:
    """A store as the release's engine may tell it, with the fields that it has."""
    one = I64 if "sglang" in release else U64
    hashes = draw(st.lists(one, min_size=1, max_size=4, unique=True))
    count = SIZE * len(hashes)
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": draw(st.none() | one.filter(lambda parent: parent != hashes[0])),
        "token_ids": draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)),
        "block_size": SIZE,
        "lora_id": draw(st.none() | st.integers(0, 9)),
        "medium": draw(st.sampled_from(OWN_MEDIA[release])),
    }
    if release == OLD_SGLANG:
        salt = draw(st.none() | st.just({"cache_salt": draw(st.text(max_size=4))}))
        return event if salt is None else event | {"metadata": salt}
    event["lora_name"] = draw(Text)
    if release == SGLANG:
        return event | {"cache_salt": draw(Text), "session_id": draw(Text)}
    keys = st.lists(Keys, min_size=len(hashes), max_size=len(hashes))
    event |= {
        "extra_keys": draw(st.none() | keys),
        "group_idx": draw(st.none() | st.integers(0, 3)),
        "kv_cache_spec_kind": draw(st.sampled_from([None, "full_attention", "mamba"])),
    }
    return event if release == OLD_VLLM else event | {"session_id": draw(Text)}


@st.composite
def removals(draw: st.DrawFn, release: str) -> dict[str, Any]:
    one = I64 if "sglang" in release else U64
    event: dict[str, Any] = {
        "type": "BlockRemoved",
        "block_hashes": draw(st.lists(one, min_size=1, max_size=4)),
        "medium": draw(st.sampled_from(OWN_MEDIA[release])),
    }
    return event | ({"group_idx": draw(st.none() | st.integers(0, 3))} if "vllm" in release else {})


def batches(release: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    cleared = st.just({"type": "AllBlocksCleared"})
    return st.lists(st.one_of(stores(release), removals(release), cleared), max_size=4)


def meaning(given: dict[str, Any]) -> Event:
    """The event in our words."""
    if given["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    fields = {name: value for name, value in given.items() if name not in ("type", "metadata")}
    fields["medium"] = READ[given["medium"]]
    if given["type"] == "BlockRemoved":
        return BlockRemoved(**fields)
    return BlockStored(**fields | given.get("metadata", {}))


@pytest.mark.parametrize("release", RELEASES)
@FEW
@given(data=st.data())
def test_we_read_what_they_say(
    codecs: Callable[[str], EngineCodec], release: str, data: st.DataObject
) -> None:
    """Each field of each event that we have is the one the engine was given, whatever it is."""
    given = data.draw(batches(release))
    rank = data.draw(st.none() | st.integers(0, 7))
    decoded = decode_batch(codecs(release).encode(TS, given, rank))
    assert (decoded.batch.ts, decoded.batch.dp_rank) == (TS, rank)
    assert decoded.batch.events == [meaning(event) for event in given]
    assert decoded.skipped == ()


@pytest.mark.parametrize("release", [VLLM])
def test_keys_that_are_not_ours_are_passed_over(
    codecs: Callable[[str], EngineCodec], release: str
) -> None:
    """Windows, tiers and lookahead of vLLM 0.33 do not keep an event from being read."""
    given = {
        "type": "BlockStored",
        "block_hashes": [5],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
    }
    more = {
        "kv_cache_spec_sliding_window": 128,
        "ownership": "tier-1",
        "lookahead_token_ids": [[9]],
    }
    decoded = decode_batch(codecs(release).encode(TS, [given | more]))
    assert decoded.batch.events == [meaning(given)]
    assert decoded.skipped == ()


# ------------------------------------------------------------------------------------ the same bytes

SAME = {"vllm": VLLM, "legacy": OLD_SGLANG}


@conforming(list(SAME.items()), "byte for byte what the engine's own encoder writes")
def test_ours_are_the_bytes_of_theirs(
    codecs: Callable[[str], EngineCodec], preset: str, release: str
) -> None:
    """The engine that is given what the preset promises writes the same payload, map headers and all."""
    wanted = [fields for event in story() for fields in expected(TOLD[preset], event)]
    for rank in (0, 3):
        payload = codecs(release).encode(TS, wanted, rank)
        assert spelled(PRESETS[preset].dialect, story(), rank) == payload


@pytest.mark.parametrize(("preset", "release"), SAME.items())
@FEW
@given(data=st.data())
def test_theirs_come_out_as_they_went_in(
    codecs: Callable[[str], EngineCodec], preset: str, release: str, data: st.DataObject
) -> None:
    """What the engine tells, decoded and spelled again, is the payload that it was: of vLLM 0.33 where an
    adapter's name is among the extra keys too, of SGLang 0.5.18 what has no salt.
    """
    told = [event for event in data.draw(batches(release)) if "metadata" not in event]
    for event in told:
        if event.get("extra_keys") is None and "lora_name" in event:
            event["lora_name"] = None
    rank = data.draw(st.integers(0, 7))
    payload = codecs(release).encode(TS, told, rank)
    ours = [signed(event) for event in decode_batch(payload).batch.events]
    assert Speller(PRESETS[preset].dialect, rank).spell(TS, ours) == payload


def signed(event: Event) -> Event:
    """As a relay has it."""

    def signed_hash(value: Any) -> int:
        return (int(value) + 2**63) % 2**64 - 2**63

    if isinstance(event, (BlockStored, BlockRemoved)):
        event.block_hashes = [signed_hash(value) for value in event.block_hashes]
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event.parent_block_hash = signed_hash(event.parent_block_hash)
    return event
