"""kvevents.store_form: the events that Mooncake's master would send of the same objects (RFC 1527)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import reference_hashes, to_u64, trials

from hicache.pool import KVShape, MLAShape
from hicache.storage.keys import PageFormat, sglang_mooncake_keys
from hicache.storage_tier import page_keys
from kvevents import (
    BASE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
    Namespace,
    StorageMedium,
    TokenIds,
    pack_tokens,
)
from kvevents.hashing import block_digests, chain_seed
from kvevents.store_form import StoreSpeller, check_object_key

GPU, CPU, DISK, EXT = StorageMedium
MEDIA = {DISK: "disk", EXT: "cpu"}
SIZE = 4
MODEL = "org/model-x"
TOKENS = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34, 41, 42, 43, 44]
H = reference_hashes(TOKENS, SIZE)
NAMES = [d.hex() for d in block_digests(b"", pack_tokens(TOKENS), SIZE)]
TS = 1_767_225_600.25
MS = 1_767_225_600_250

Map = dict[str, Any]
Held = set[tuple[str, str]]
"""Objects, each with the medium that it is on."""


def speller(**changes: Any) -> StoreSpeller:
    """One of the worker "w", model "org/model-x", four tokens a block."""
    settings: dict[str, Any] = {
        "block_size": SIZE,
        "hash_format": HashFormat.SGLANG,
        "media": MEDIA,
        "model": MODEL,
        "worker_id": "w",
    }
    dp_rank = changes.pop("dp_rank", 3)
    return StoreSpeller(dp_rank, **(settings | changes))


def stored(start: int = 0, stop: int = 1, **changes: Any) -> BlockStored:
    """The blocks `start` to `stop` of one prompt, on DISK."""
    event = BlockStored(
        list(H[start:stop]),
        H[start - 1] if start else None,
        TOKENS[start * SIZE : stop * SIZE],
        SIZE,
        medium=DISK,
    )
    return msgspec.structs.replace(event, **changes)


def removed(*blocks: int, medium: StorageMedium | None = DISK) -> BlockRemoved:
    return BlockRemoved([H[block] for block in blocks], medium)


def maps(payload: bytes) -> list[Map]:
    """The maps of a payload, read without any of our types."""
    ms, told, rank = msgspec.msgpack.decode(payload)
    assert type(ms) is int and type(rank) is int
    assert isinstance(told, list)
    return told


def said(payload: bytes) -> list[tuple[str, str, str]]:
    """Of each map the type, object and medium."""
    return [(m["event_type"], m.get("object_key", "-"), str(m["medium"])) for m in maps(payload)]


# ------------------------------------------------------------------------------- the bytes

_ENVELOPE: list[str] = ["event_id", "timestamp", "event_type", "type", "model_name", "block_size"]
_ENVELOPE += ["additional_salt", "lora_name", "tenant_id", "backend_id"]
_OBJECT: list[str] = ["group_id", "medium", "dp_rank", "object_key", "connector_block_hash"]
_OBJECT += ["seq_hashes", "block_hashes", "base_block_idx"]
KEYS = {
    "stored": [*_ENVELOPE, *_OBJECT, "parent_hash", "token_ids", "parent_block_hash"],
    "removed": [*_ENVELOPE, *_OBJECT],
    "cleared": [*_ENVELOPE, "medium", "dp_rank"],
}
"""The master's keys in its order, with the connector's hash after the object's key."""


def test_keys_are_the_masters_in_its_order() -> None:
    """A stored, a removed and a cleared event each have exactly the master's keys."""
    ours = speller()
    told = maps(ours.spell(TS, [stored(), removed(0)]))
    told += maps(ours.spell(TS, [AllBlocksCleared()]))
    assert [one["event_type"] for one in told] == ["stored", "removed", "cleared"]
    assert all(list(one) == KEYS[one["event_type"]] for one in told)


def pack(value: object) -> bytes:
    """MessagePack by the letter of its specification, for what occurs here."""
    match value:
        case None:
            return b"\xc0"
        case int() if value < 128:
            return bytes([value])
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case str() if len(value) < 32:
            return bytes([0xA0 | len(value)]) + value.encode()
        case str():
            return b"\xd9" + bytes([len(value)]) + value.encode()
        case list():
            return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
        case dict():
            count = len(value)
            head = bytes([0x80 | count]) if count < 16 else b"\xde" + struct.pack(">H", count)
            return head + b"".join(pack(part) for item in value.items() for part in item)
    raise TypeError(value)


def test_the_bytes_are_pinned() -> None:
    """Every value of the three events, byte for byte; maps of 16 keys and more as the master's packer."""
    head: Map = {"timestamp": MS, "event_type": "", "type": "", "model_name": MODEL}
    head |= {"block_size": 4, "additional_salt": None, "lora_name": None, "tenant_id": "default"}
    head |= {"backend_id": "w"}
    name: Map = {"group_id": None, "medium": "disk", "dp_rank": 3}
    name |= {"object_key": NAMES[0], "connector_block_hash": NAMES[0]}
    name |= {"seq_hashes": [], "block_hashes": [], "base_block_idx": None}
    first = 1_767_225_600_250_000 << 12
    stored_map = {"event_id": first, **head, "event_type": "stored", "type": "BlockStored", **name}
    stored_map |= {"parent_hash": None, "token_ids": None, "parent_block_hash": None}
    removed_map = {"event_id": first + 1, **head, "event_type": "removed", "type": "BlockRemoved"}
    removed_map |= name
    cleared_map = {"event_id": first, **head, "event_type": "cleared"}
    cleared_map |= {"type": "AllBlocksCleared", "medium": None, "dp_rank": 3}
    payload = speller().spell(TS, [stored(), removed(0)])
    assert payload == pack([MS, [stored_map, removed_map], 3])
    assert payload.startswith(bytes.fromhex("93cf") + MS.to_bytes(8, "big") + b"\x92\xde\0\x15")
    assert speller().spell(TS, [AllBlocksCleared()]) == pack([MS, [cleared_map], 3])


def test_page_names_are_sglangs() -> None:
    """The digests of upstream's own vectors: tokens 11..14, 21..24, 31..34, 41..44, page 4."""
    told = maps(speller().spell(TS, [stored(0, 4)]))
    ends = [(one["object_key"][:8], one["object_key"][-4:]) for one in told]
    assert ends == [
        ("f67c5ff1", "ed97"),
        ("e1c873d8", "9a2c"),
        ("71749b3c", "d6af"),
        ("921bc52e", "dfae"),
    ]
    assert [int(one["object_key"][:16], 16) for one in told] == [to_u64(value) for value in H]


def test_a_heartbeat_is_an_empty_batch() -> None:
    """No events, no maps: `[ms, [], dp_rank]`."""
    assert speller(dp_rank=0).spell(TS, []) == pack([MS, [], 0])


@pytest.mark.parametrize(
    ("ts", "ms"), [(-1.0, 0), (0.0, 0), (1e300, 4503599626370), (4503599626.0, 4503599626000)]
)
def test_a_time_that_cannot_be_told_is_the_nearest(ts: float, ms: int) -> None:
    """An engine's clock costs no batch; event ids are 64 bits."""
    told = msgspec.msgpack.decode(speller().spell(ts, [stored(0, 1)]))
    assert told[0] == ms
    assert 0 <= told[1][0]["event_id"] < 2**64


@pytest.mark.parametrize("ts", [float("nan")])
def test_a_time_that_is_none_is_refused(ts: float) -> None:
    """What reaches here has a finite time."""
    with pytest.raises(ValueError, match="NaN"):
        speller().spell(ts, [])


def test_event_ids_rise_and_come_out_again() -> None:
    """Within a batch and to the next one; the same events at the same time are the same bytes."""
    ours, again = (speller(object_key="{digest}_k,{digest}_v") for _ in range(2))
    batches: list[tuple[float, list[Event]]] = [
        (TS, [stored(0, 3)]),
        (TS + 1e-5, [stored(3, 4), removed(3)]),
        (TS + 1, [removed(2)]),
    ]
    payloads = [ours.spell(ts, events) for ts, events in batches]
    assert payloads == [again.spell(ts, events) for ts, events in batches]
    ids = [one["event_id"] for payload in payloads for one in maps(payload)]
    assert ids == sorted(set(ids))
    assert 0 <= min(ids) <= max(ids) < 2**64


# --------------------------------------------------------------- what the readers ask for


class Rejected(Exception):
    """The conductor would drop the event."""


def integer(value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value < high:
        raise Rejected(value)


def conductor_takes(one: Map, batch_ms: int, *, sglang: bool) -> None:
    """Every check of the Mooncake source in a conductor: that of August (`sglang` False) or September."""
    integer(one["event_id"], 0, 2**64)
    integer(one["dp_rank"], 0, 2**63)
    integer(one["block_size"], 1, 2**63)
    if one["timestamp"] != batch_ms:
        raise Rejected("event timestamp conflicts with batch timestamp")
    legacy = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
    if one["type"] != legacy[one["event_type"]]:
        raise Rejected("legacy type conflicts with event_type")
    texts = ("model_name", "tenant_id", "backend_id")
    if not all(isinstance(one[name], str) and one[name] for name in texts):
        raise Rejected("a text is required")
    for name in ("additional_salt", "lora_name"):
        assert one[name] is None or isinstance(one[name], str)
    if one["event_type"] == "cleared":
        if set(one) & {*_OBJECT, "parent_hash", "token_ids", "parent_block_hash"} - _EVERYWHERE:
            raise Rejected("cleared event contains recognized object key")
        assert one["medium"] is None
        return
    if one["event_type"] == "removed" and set(one) & {
        "parent_hash",
        "token_ids",
        "parent_block_hash",
    }:
        raise Rejected("removed event contains recognized stored-only key")
    if one["medium"] not in ("cpu", "disk"):
        raise Rejected("unsupported medium")
    if one["group_id"] not in (None, "", "0"):
        raise Rejected("group_id must be a decimal integer or nil")
    if not one["object_key"]:
        raise Rejected("object_key is required")
    hash_text = one["connector_block_hash"]
    if len(hash_text) < 16 or len(hash_text) % 2 or set(hash_text) - set("0123456789abcdef"):
        raise Rejected("connector_block_hash must be even-length hex")
    for value in one["seq_hashes"]:
        integer(value, 0, 2**64)
    if one["block_hashes"] != one["seq_hashes"]:
        raise Rejected("legacy block_hashes conflicts with seq_hashes")
    if sglang:
        key: str = one["object_key"]
        at = key.find(hash_text)
        if at < 0 or (at and key[at - 1] != "_") or key[at + 64 : at + 65] not in ("", "_"):
            raise Rejected("connector_block_hash conflicts with SGLang object_key")
    projected = int(hash_text[:16] if sglang else hash_text[-16:], 16)
    if one["seq_hashes"] not in ([], [projected]):
        raise Rejected("seq_hashes conflicts with connector_block_hash")
    integer(0 if one["base_block_idx"] is None else one["base_block_idx"], 0, 2**63)
    if one["event_type"] == "stored":
        assert one["parent_hash"] == one["parent_block_hash"]
        assert one["token_ids"] is None


_EVERYWHERE = {"medium", "dp_rank"}


class DynamoEvent(msgspec.Struct):
    """What Dynamo's shared cache decodes of an event."""

    event_type: str
    object_key: str | None = None
    tenant_id: str = ""
    group_id: str | None = None


_dynamo_batch = msgspec.msgpack.Decoder(tuple[int, list[DynamoEvent], int], strict=True).decode


class Dynamo:
    """Dynamo's shared cache: one mark for each key, and `cleared` is not known. It forgets where a seq is
    missing.
    """

    def __init__(self) -> None:
        self.present: set[str] = set()

    def hear(self, payload: bytes) -> None:
        """Take a batch of a sink that leaves a seq out before a clear."""
        if any(one["event_type"] == "cleared" for one in maps(payload)):
            self.present.clear()
        self.take(payload)

    def take(self, payload: bytes) -> None:
        for event in _dynamo_batch(payload)[1]:
            assert event.tenant_id in ("", "default")
            assert event.group_id is None
            if event.object_key is None:
                continue
            if event.event_type == "stored":
                self.present.add(event.object_key)
            elif event.event_type == "removed":
                self.present.discard(event.object_key)


class Conductor:
    """A conductor: objects on media, what the first store bound an object to must not change."""

    def __init__(self, believed: Held = frozenset()) -> None:  # type: ignore[assignment]
        self.objects: dict[tuple[str, str], Map] = {one: {} for one in believed}

    def take(self, payload: bytes) -> None:
        ms, told, _ = msgspec.msgpack.decode(payload)
        for one in told:
            conductor_takes(one, ms, sglang=False)
            conductor_takes(one, ms, sglang=True)
            if one["event_type"] == "cleared":
                self.objects.clear()
                continue
            at = one["object_key"], one["medium"]
            names = ("model_name", "lora_name", "block_size", "connector_block_hash")
            binding = {name: one[name] for name in names}
            if self.objects.get(at) not in (None, {}, binding):
                raise Rejected("conflicts with stored object binding")
            if one["event_type"] == "stored":
                self.objects[at] = binding
            else:
                self.objects.pop(at, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp_rank": None}, "None"),
        ({"connector_block_hash": ""}, "even-length"),
        ({"seq_hashes": [-1], "block_hashes": [-1]}, "-1"),
        ({"block_hashes": [5]}, "legacy block_hashes"),
        ({"medium": "EXTERNAL"}, "medium"),
        ({"group_id": "sglang-hicache:x"}, "group_id"),
        ({"timestamp": 1}, "timestamp"),
        ({"model_name": None}, "text"),
    ],
)
def test_the_conductors_checks_are_checks(change: Map, reason: str) -> None:
    """What the real master sends, or a careless publisher would, is refused by the model of it here."""
    (one,) = maps(speller().spell(TS, [stored()]))
    conductor_takes(one, MS, sglang=True)
    with pytest.raises(Rejected, match=reason):
        conductor_takes(one | change, MS, sglang=True)


def test_no_64_bit_hash_pleases_both_conductors() -> None:
    """Why `seq_hashes` are empty: one takes the digest's first 8 bytes, one the last."""
    (one,) = maps(speller().spell(TS, [stored()]))
    for digits, sglang in ((NAMES[0][:16], True), (NAMES[0][-16:], False)):
        hashes = [int(digits, 16)]
        told = one | {"seq_hashes": hashes, "block_hashes": hashes}
        conductor_takes(told, MS, sglang=sglang)
        with pytest.raises(Rejected, match="seq_hashes"):
            conductor_takes(told, MS, sglang=not sglang)


# -------------------------------------------------------------------------------- media


def test_an_object_is_told_on_each_medium() -> None:
    """DISK is `disk`, EXTERNAL `cpu`; the second of them needs no tokens."""
    ours = speller()
    assert said(ours.spell(TS, [stored()])) == [("stored", NAMES[0], "disk")]
    told = ours.spell(TS, [stored(medium=EXT, token_ids=[])])
    assert said(told) == [("stored", NAMES[0], "cpu")]
    assert ours.left_out == 0


def test_what_is_left_on_one_medium_is_stored_again() -> None:
    """Dynamo has one mark for a key: after the removal it would believe the object gone."""
    ours, dynamo = speller(), Dynamo()
    dynamo.take(ours.spell(TS, [stored(), stored(medium=EXT)]))
    payload = ours.spell(TS, [removed(0)])
    assert said(payload) == [("removed", NAMES[0], "disk"), ("stored", NAMES[0], "cpu")]
    dynamo.take(payload)
    assert dynamo.present == {NAMES[0]}
    payload = ours.spell(TS, [removed(0, medium=EXT)])
    assert said(payload) == [("removed", NAMES[0], "cpu")]
    dynamo.take(payload)
    assert not dynamo.present


def test_a_removal_without_a_medium_is_one_from_all() -> None:
    """As a subscriber is to read it."""
    ours = speller()
    ours.spell(TS, [stored(), stored(medium=EXT)])
    told = ours.spell(TS, [removed(0, medium=None)])
    assert said(told) == [("removed", NAMES[0], "disk"), ("removed", NAMES[0], "cpu")]


def test_a_removal_of_what_is_not_there_is_not_told() -> None:
    """Neither of an unknown block nor from a medium on which it is not."""
    ours = speller()
    ours.spell(TS, [stored()])
    assert said(ours.spell(TS, [removed(0, medium=EXT), removed(1), removed(0, medium=GPU)])) == []


def test_other_media_are_not_told() -> None:
    """Nor counted: they are not this sink's."""
    ours = speller()
    told = ours.spell(TS, [stored(medium=GPU), stored(medium=CPU), stored(medium=None)])
    assert said(told) == []
    assert ours.left_out == 0


# ------------------------------------------------------------------- clears and snapshots


def test_a_clear_is_one_map_whatever_is_held() -> None:
    """No object is removed by name: 200,000 would take 75 MB. Nothing held is kept after it."""
    ours = speller()
    assert ours.clears_by_gap
    ours.spell(TS, [stored(0, 2), stored(medium=EXT)])
    assert said(ours.spell(TS, [AllBlocksCleared()])) == [("cleared", "-", "None")]
    assert said(ours.spell(TS, [removed(1, 0), stored(1, 2), stored(token_ids=[])])) == []
    assert said(ours.spell(TS, [AllBlocksCleared()])) == [("cleared", "-", "None")]


def test_what_is_stored_twice_is_told_twice_and_removed_once() -> None:
    """A snapshot may say again what is there."""
    ours = speller()
    assert len(maps(ours.spell(TS, [stored(), stored()]))) == 2
    assert len(maps(ours.spell(TS, [removed(0)]))) == 1


def test_a_clear_and_a_store_of_one_batch_leave_the_store() -> None:
    """What comes after the clear is told; what came before it in the batch is not, for to one who forgets
    before the batch it would be there.
    """
    ours, dynamo, conductor = speller(), Dynamo(), Conductor()
    for events in (
        [stored(0, 2)],
        [stored(2, 3), AllBlocksCleared(), AllBlocksCleared(), stored()],
    ):
        payload = ours.spell(TS, [*events])
        dynamo.hear(payload)
        conductor.take(payload)
    assert said(payload) == [("cleared", "-", "None"), ("stored", NAMES[0], "disk")]
    assert dynamo.present == {NAMES[0]}
    assert set(conductor.objects) == {(NAMES[0], "disk")}


def test_what_is_taken_up_again_goes_on_alike() -> None:
    """A process that goes on where another ended makes the bytes that the other would have made."""
    before, after = speller(), speller()
    before.spell(TS, [stored(0, 2)])
    after.hold([stored(0, 2)])
    for events in ([stored(2, 3)], [removed(2)], [AllBlocksCleared()]):
        assert after.spell(TS, [*events]) == before.spell(TS, [*events])


def test_a_snapshot_does_not_need_what_is_held() -> None:
    """`fresh` has the same settings and holds nothing; the one it is from goes on as it was."""
    ours = speller(object_key="{model}_{digest}_{dp_rank}_{worker_id}")
    (salted, *_) = reference_hashes(TOKENS, SIZE, cache_salt="s", dynamo=True)
    dynamo = speller(hash_format=HashFormat.DYNAMO).fresh()
    assert len(maps(dynamo.spell(TS, [stored(cache_salt="s", block_hashes=[salted])]))) == 1
    ours.spell(TS, [stored(0, 2)])
    fresh = ours.fresh()
    assert said(fresh.spell(TS, [removed(0)])) == []
    snapshot = fresh.spell(TS, [AllBlocksCleared(), stored(0, 2)])
    assert [one["object_key"] for one in maps(snapshot)[1:]] == [
        f"org-model-x_{name}_3_w" for name in NAMES[:2]
    ]
    assert len(maps(ours.spell(TS, [removed(1, 0)]))) == 2


def test_media_come_in_one_order_however_they_came() -> None:
    """A process that takes up the events has them by medium; its bytes are those of the other."""
    before, after = speller(), speller()
    before.spell(TS, [stored(medium=EXT), stored()])
    after.hold([stored(), stored(medium=EXT)])
    payload = before.spell(TS, [removed(0, medium=None)])
    assert said(payload) == [("removed", NAMES[0], "disk"), ("removed", NAMES[0], "cpu")]
    assert after.spell(TS, [removed(0, medium=None)]) == payload


# ------------------------------------------------------------------- parents that are not there


def test_a_block_goes_before_its_parent_and_comes_back_with_it() -> None:
    """Engines drop a parent's copy first; what is told depends on what is held alone."""
    ours = speller()
    ours.spell(TS, [stored(0, 3), stored(1, 2, medium=EXT)])
    assert said(ours.spell(TS, [removed(0)])) == [
        ("removed", NAMES[2], "disk"),
        ("removed", NAMES[1], "disk"),
        ("removed", NAMES[1], "cpu"),
        ("removed", NAMES[0], "disk"),
    ]
    assert ours.left_out == 2
    assert said(ours.spell(TS, [stored(2, 3, medium=EXT), removed(2), removed(1)])) == []
    assert said(ours.spell(TS, [stored()])) == [
        ("stored", NAMES[0], "disk"),
        ("stored", NAMES[1], "cpu"),
        ("stored", NAMES[2], "cpu"),
    ]


def test_a_block_waits_for_its_parent() -> None:
    """However far behind; what leaves meanwhile is not told."""
    ours = speller()
    assert said(ours.spell(TS, [stored(3, 4), stored(2, 3, medium=EXT), stored(1, 2)])) == []
    assert ours.left_out == 3
    ours.spell(TS, [removed(3)])
    assert said(ours.spell(TS, [stored()])) == [
        ("stored", NAMES[0], "disk"),
        ("stored", NAMES[1], "disk"),
        ("stored", NAMES[2], "cpu"),
    ]


def test_nothing_waits_for_a_block_that_cannot_be_told() -> None:
    """Neither what came after it nor what came before it."""
    ours = speller()
    ours.spell(TS, [stored(2, 3, parent_block_hash=77), stored(1, 2, block_hashes=[77])])
    assert said(ours.spell(TS, [stored()])) == [("stored", NAMES[0], "disk")]
    assert said(ours.spell(TS, [stored(3, 4, parent_block_hash=77)])) == []
    assert ours.left_out == 3


# --------------------------------------------------------------------------- left out


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": TOKENS[:5]},
        {"token_ids": [-1, 2, 3, 4]},
        {"token_ids": [1, 2, 3, 4]},
        {"block_hashes": [77]},
        {"block_size": 2},
        {"parent_block_hash": 5},
        {"lora_name": "a"},
        {"lora_id": 7},
        {"cache_salt": "s"},
        {"extra_key": "k"},
        {"extra_keys": [["mm"]]},
        {"group_idx": 1},
        {"lora_name": "x" * 1025},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_block_without_a_digest_is_left_out(change: Map) -> None:
    """Counted, and not told: of other tokens, another algorithm, size, parent or namespace; nor where a
    block of that hash is held."""
    for held in ([], [stored(medium=EXT)]):
        ours = speller()
        ours.hold(held)
        assert said(ours.spell(TS, [stored(**change)])) == []
        assert ours.left_out == 1
        assert said(ours.spell(TS, [removed(0)])) == []


def test_a_block_without_tokens_is_left_out() -> None:
    """Unless it is held on the other medium: then its digest is known."""
    ours = speller()
    assert said(ours.spell(TS, [stored(0, 2, token_ids=[]), stored(1, 2)])) == []
    assert ours.left_out == 3


def test_what_is_removed_is_not_known_any_more() -> None:
    """Neither as a parent nor by its hash."""
    ours = speller()
    ours.spell(TS, [stored(), removed(0)])
    assert said(ours.spell(TS, [stored(1, 2), stored(token_ids=[])])) == []
    assert ours.left_out == 2


def test_an_extra_key_costs_its_block_and_what_is_behind_it() -> None:
    """Not the blocks before it in the event: cut otherwise, they would be told."""
    ours = speller()
    told = ours.spell(TS, [stored(0, 3, extra_keys=[None, ["image"], None])])
    assert said(told) == [("stored", NAMES[0], "disk")]
    assert ours.left_out == 2


@pytest.mark.parametrize("change", [{"block_size": 2}, {"lora_id": 7}, {"group_idx": 1}], ids=str)
def test_every_block_left_out_counts(change: Map) -> None:
    """Not only every event."""
    ours = speller()
    ours.hold([stored(0, 3, **change)])
    assert ours.left_out == 3


def test_a_removal_from_another_group_is_not_of_ours() -> None:
    """A hybrid model's groups have equal hashes, and each its own blocks."""
    ours = speller()
    ours.spell(TS, [stored()])
    assert said(ours.spell(TS, [msgspec.structs.replace(removed(0), group_idx=1)])) == []
    assert len(maps(ours.spell(TS, [msgspec.structs.replace(removed(0), group_idx=0)]))) == 1


def test_what_follows_a_block_left_out_is_left_out() -> None:
    """In the same event and in the next; what comes before it is told."""
    ours = speller()
    hashes = [H[0], 77, H[2]]
    told = ours.spell(TS, [stored(0, 3, block_hashes=hashes), stored(3, 4)])
    assert said(told) == [("stored", NAMES[0], "disk")]
    assert ours.left_out == 3


def test_unsigned_and_packed_hashes_are_the_same_blocks() -> None:
    """Whatever form the event has them in; tokens may be packed."""
    ours = speller()
    unsigned: list[int | bytes] = [to_u64(value) for value in H[:2]]
    event = stored(0, 2, block_hashes=unsigned, token_ids=TokenIds(pack_tokens(TOKENS[:8])))
    assert len(maps(ours.spell(TS, [event]))) == 2
    assert len(maps(ours.spell(TS, [removed(1, 0)]))) == 2


# --------------------------------------------------------------------------- namespaces


@pytest.mark.parametrize("hash_format", HashFormat)
@pytest.mark.parametrize(
    "namespace",
    [
        BASE,
        Namespace(lora_name="a"),
        Namespace(cache_salt="s"),
        Namespace(extra_key="k"),
        Namespace("a", "s", "k"),
    ],
    ids=str,
)
def test_names_are_those_of_the_stored_pages(namespace: Namespace, hash_format: HashFormat) -> None:
    """`{digest}` is the key under which hicache stores the page, in any namespace and hash format."""
    names = {
        "lora_name": namespace.lora_name,
        "cache_salt": namespace.cache_salt,
        "extra_key": namespace.extra_key,
    }
    hashes = reference_hashes(TOKENS, SIZE, dynamo=hash_format is HashFormat.DYNAMO, **names)
    ours = speller(hash_format=hash_format)
    first = stored(0, 2, block_hashes=hashes[:2], **names)
    rest = stored(2, 4, block_hashes=hashes[2:], parent_block_hash=hashes[1], **names)
    told = maps(ours.spell(TS, [first, rest]))
    digests = b"".join(block_digests(chain_seed(namespace), pack_tokens(TOKENS), SIZE))
    assert [one["object_key"] for one in told] == [
        key.hex() for key in page_keys(digests, namespace)
    ]
    assert {(one["lora_name"], one["additional_salt"]) for one in told} == {
        (namespace.lora_name, namespace.cache_salt)
    }
    assert ours.left_out == 0


# ------------------------------------------------------------------------- object keys


@pytest.mark.parametrize(
    ("template", "form", "tag"),
    [
        (
            "{model}_{digest}_0_k,{model}_{digest}_0_v",
            PageFormat(MODEL, KVShape(2, 4, 8), SIZE),
            "",
        ),
        (
            "t_{model}_{digest}_1_2_k,t_{model}_{digest}_1_2_v",
            PageFormat(MODEL, KVShape(2, 4, 8), SIZE, 1, 2, 2, 4),
            "t",
        ),
        ("{model}_{digest}__k", PageFormat(MODEL, MLAShape(2, 576), SIZE), ""),
        (
            "{model}_{digest}_3_k",
            PageFormat(MODEL, MLAShape(2, 576), SIZE, pp_rank=3, pp_size=4),
            "",
        ),
    ],
    ids=["kv", "kv of a rank and stage", "latents", "latents of a stage"],
)
def test_sglangs_names_can_be_given(template: str, form: PageFormat, tag: str) -> None:
    """A page of K and V is two objects, stored and removed together, called as hicache calls them."""
    ours, conductor = speller(object_key=template), Conductor()
    payload = ours.spell(TS, [stored(0, 2)])
    conductor.take(payload)
    names = [
        name
        for digest in NAMES[:2]
        for name in sglang_mooncake_keys(form, tag)(bytes.fromhex(digest))
    ]
    assert [one["object_key"] for one in maps(payload)] == names
    conductor.take(ours.spell(TS, [removed(1, 0)]))
    assert not conductor.objects


def dynamo_keys(layout: Map, page_hash: str) -> list[str]:
    """What Dynamo looks for, given the layout that workers publish."""
    prefix = f"{layout['key_prefix']}_" if layout["key_prefix"] else ""
    return [f"{prefix}{page_hash}{s}" for pool in layout["pools"] for s in pool["suffixes"]]


@pytest.mark.parametrize(
    ("template", "layout"),
    [
        ("{digest}", {"key_prefix": None, "pools": [{"suffixes": [""]}]}),
        (
            "{model}_{digest}_0_k,{model}_{digest}_0_v,{model}_{digest}_1_k,{model}_{digest}_1_v",
            {
                "key_prefix": "org-model-x",
                "pools": [{"suffixes": ["_0_k", "_0_v", "_1_k", "_1_v"]}],
            },
        ),
        (
            "{digest}__c4,{digest}__swa",
            {"key_prefix": None, "pools": [{"suffixes": ["__c4"]}, {"suffixes": ["__swa"]}]},
        ),
    ],
)
def test_dynamos_layout_can_be_given(template: str, layout: Map) -> None:
    """A key for each suffix of each pool: Dynamo finds every object of a page, and then the page."""
    ours, dynamo = speller(object_key=template), Dynamo()
    dynamo.take(ours.spell(TS, [stored(0, 2)]))
    wanted = [key for digest in NAMES[:2] for key in dynamo_keys(layout, digest)]
    assert dynamo.present == set(wanted)


def test_every_field_of_a_key() -> None:
    """`{model}` has "-" for "/", `{block_hash}` is unsigned; braces of a value stay what they are."""
    key = "{{{worker_id}}}/{model}/{dp_rank}/{block_hash}/{digest}"
    check_object_key(key)
    (one,) = maps(speller(object_key=key, worker_id="{w},").spell(TS, [stored()]))
    assert one["object_key"] == f"{{{{w}},}}/org-model-x/3/{NAMES[0][:16]}/{NAMES[0]}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "'' has neither {digest} nor {block_hash}"),
        ("{model}", "'{model}' has neither"),
        ("{digest}_k,{model}_v", "'{model}_v' has neither"),
        ("{digest},", "'' has neither"),
        ("{digest}{hash}", "{hash} is not one of {digest}, {block_hash}, {model}"),
        ("{digest}{}", "{} is not one of"),
        ("{digest}{0}", "{0} is not one of"),
        ("{digest}{model.upper}", "{model.upper} is not one of"),
        ("{digest:x}", "{digest} takes no format"),
        ("{digest!r}", "{digest} takes no format"),
        ("{digest}_{", "'{digest}_{': "),
        ("{digest}}", "'{digest}}': "),
        ("{digest}_k, {digest}_v", "' {digest}_v' begins or ends with a space"),
        ("{digest},{digest}", "names an object twice"),
    ],
)
def test_a_bad_key_is_named(template: str, reason: str) -> None:
    """The error names what is wrong, whoever finds it."""
    for check in (check_object_key, lambda key: speller(object_key=key)):
        with pytest.raises(ValueError, match=r"^object_key: ") as error:
            check(template)
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": ""}, "model: empty"),
        ({"worker_id": ""}, "worker_id: empty"),
        ({"block_size": 0}, "block_size: 0 is below 1"),
        ({"dp_rank": -1}, "dp_rank: -1 is below 0"),
    ],
)
def test_a_setting_that_no_reader_takes_is_refused(change: Map, reason: str) -> None:
    """The conductor requires each of them."""
    with pytest.raises(ValueError, match=reason):
        speller(**change)


# ------------------------------------------------------------------------- any sequence

PROMPTS = [(tuple(tokens), lora) for tokens in ([1, 2, 3], [1, 2, 4], [5]) for lora in (None, "a")]
"""Prompts of one token a block, two of which begin alike, each with and without an adapter."""


class Blocks:
    """A world of blocks on two media, moved only as a view may move them."""

    def __init__(self) -> None:
        self.on: dict[StorageMedium, set[tuple[tuple[int, ...], str | None]]] = {
            DISK: set(),
            EXT: set(),
        }

    def step(self, action: str, medium: StorageMedium, prompt: int, depth: int) -> Iterator[Event]:
        """The events of storing a prompt's first blocks, dropping what is beyond, or clearing."""
        tokens, lora = PROMPTS[prompt]
        here = self.on[medium]
        if action == "clear":
            for blocks in self.on.values():
                blocks.clear()
            yield AllBlocksCleared()
        elif action == "store":
            chain = [(tokens[:end], lora) for end in range(1, min(depth, len(tokens)) + 1)]
            new = [block for block in chain if block not in here]
            here.update(new)
            yield from self._stores(new, medium)
        else:
            gone = [b for b in here if b[1] == lora and b[0][:depth] == tokens[:depth]]
            here.difference_update(gone)
            if gone:
                gone.sort(key=lambda block: -len(block[0]))
                yield BlockRemoved([hash_of(block) for block in gone], medium)

    def snapshot(self) -> Iterator[Event]:
        """All there is, parents first, one block an event."""
        yield AllBlocksCleared()
        for medium, blocks in self.on.items():
            for block in sorted(blocks, key=lambda block: len(block[0])):
                yield from self._stores([block], medium)

    def objects(self, name: Callable[[tuple[tuple[int, ...], str | None]], list[str]]) -> Held:
        return {(n, MEDIA[m]) for m, blocks in self.on.items() for b in blocks for n in name(b)}

    def _stores(self, chain: list[Any], medium: StorageMedium) -> Iterator[BlockStored]:
        if chain:
            (tokens, lora), hashes = chain[0], [hash_of(block) for block in chain]
            parent = hash_of((tokens[:-1], lora)) if len(tokens) > 1 else None
            told = [block[0][-1] for block in chain]
            yield BlockStored([*hashes], parent, told, 1, medium=medium, lora_name=lora)


def hash_of(block: tuple[tuple[int, ...], str | None]) -> int:
    tokens, lora = block
    return reference_hashes(tokens, 1, lora_name=lora)[-1]


def objects_of(block: tuple[tuple[int, ...], str | None]) -> list[str]:
    """The names of a block's two objects, by hicache."""
    tokens, lora = block
    namespace = Namespace(lora_name=lora)
    digests = b"".join(block_digests(chain_seed(namespace), pack_tokens(list(tokens)), 1))
    form = PageFormat(MODEL, KVShape(2, 4, 8), 1)
    return [*sglang_mooncake_keys(form)(page_keys(digests, namespace)[-1])]


Steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear"]),
        st.sampled_from([DISK, EXT]),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 3),
    ),
    max_size=25,
)


@trials(150)
@given(st.lists(Steps, max_size=4))
def test_readers_believe_exactly_what_is_held(runs: list[list[Any]]) -> None:
    """After any stores, removals and clears: Dynamo has every key that is anywhere, a conductor each
    object on each medium, whatever it believed before a snapshot, and a process that takes up the events
    goes on with the same bytes."""
    ours = speller(block_size=1, object_key="{model}_{digest}_0_k,{model}_{digest}_0_v")
    world, dynamo, conductor = Blocks(), Dynamo(), Conductor()
    past: list[Event] = []
    for steps in runs:
        events = [event for step in steps for event in world.step(*step)]
        later = ours.fresh()
        later.hold(past)
        past += events
        payload = ours.spell(TS, events)
        assert later.spell(TS, events) == payload
        dynamo.hear(payload)
        conductor.take(payload)
        held = world.objects(objects_of)
        assert set(conductor.objects) == held
        assert dynamo.present == {name for name, _ in held}
        snapshot = ours.fresh().spell(TS, list(world.snapshot()))
        late, astray = Dynamo(), Conductor({("gone", "cpu"), ("gone", "disk")})
        late.hear(snapshot)
        astray.take(snapshot)
        assert (late.present, set(astray.objects)) == (dynamo.present, held)
    assert ours.left_out == 0
