"""publisher.engines.events: objects that no engine of ours makes, and how little one of them costs."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy
import pytest
import torch

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from publisher.engines.events import EventReader


class Foreign(msgspec.Struct, tag=True, omit_defaults=True):
    """As engines define theirs."""


def kind(name: str, *, of: str = "", **fields: Any) -> Any:
    """An event of that name, and with these fields alone. `of`: its class, where another."""
    made = msgspec.defstruct(of or name, [(key, Any) for key in fields], bases=(Foreign,), tag=name)
    return made(**fields)


def store(**changed: Any) -> Any:
    fields = {
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
    }
    return kind("BlockStored", **{**fields, **changed})


def test_lists_are_passed_on() -> None:
    """Hashes that are signed already, and tokens, are the engine's own lists."""
    event = store()
    (read,) = EventReader().read([event])
    assert isinstance(read, BlockStored)
    assert read.block_hashes is event.block_hashes
    assert read.token_ids is event.token_ids
    assert read.medium is StorageMedium.GPU


@pytest.mark.parametrize(
    "spelled",
    [
        (1, 2, 3, 4),
        range(1, 5),
        array("q", [1, 2, 3, 4]),
        numpy.arange(1, 5, dtype=numpy.uint32),
        torch.arange(1, 5),
    ],
    ids=lambda it: type(it).__module__,
)
def test_tokens_that_are_no_list(spelled: Any) -> None:
    """Come out as a list of ints, also those of an array whose items are none."""
    (read,) = EventReader().read([store(token_ids=spelled)])
    assert isinstance(read, BlockStored)
    assert read.token_ids == [1, 2, 3, 4]
    assert {*map(type, read.token_ids)} == {int}


@pytest.mark.parametrize(
    "odd", [5, None, numpy.array(5), torch.ones(2, 2), [(1, 2), (2, 3)]], ids=repr
)
def test_tokens_that_are_none(odd: Any) -> None:
    """No list, or none of ints, they cost the event."""
    reader = EventReader()
    assert reader.read([store(token_ids=odd)]) == []
    assert reader.skipped == 1


@pytest.mark.parametrize("spelled", [2**64 - 1, b"\xff" * 8, bytes(24) + b"\xff" * 8, -1])
def test_hashes(spelled: int | bytes) -> None:
    """Unsigned and bytes come out as the signed 64 bits that they are, parents too."""
    event = store(block_hashes=[spelled, 5], parent_block_hash=spelled)
    gone = kind("BlockRemoved", block_hashes=[spelled], medium="CPU")
    stored, removed = EventReader().read([event, gone])
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([-1, 5], -1)
    assert removed == BlockRemoved([-1], StorageMedium.CPU)


@pytest.mark.parametrize(
    ("medium", "ours"),
    [
        (None, StorageMedium.GPU),
        ("CPU_PINNED", StorageMedium.CPU),
        ("STORAGE", StorageMedium.DISK),
        (StorageMedium.EXTERNAL, StorageMedium.EXTERNAL),
    ],
)
def test_media(medium: str | None, ours: StorageMedium) -> None:
    """By our names; without a word, the device."""
    (read,) = EventReader().read([store(medium=medium)])
    assert isinstance(read, BlockStored)
    assert read.medium is ours


def test_what_is_not_understood_costs_itself() -> None:
    """Among others, in order; it is counted, and why the last one was not is known."""
    reader = EventReader()
    events = [
        store(),
        store(medium="TAPE"),
        None,
        store(token_ids=[[1, 2], [2, 3]]),
        kind("BlockMoved", block_hashes=[1]),
        kind("BlockStored", block_hashes=[1]),
        store(block_hashes=[None]),
        kind("AllBlocksCleared"),
    ]
    read = reader.read(events)
    assert [type(one).__name__ for one in read] == ["BlockStored", "AllBlocksCleared"]
    assert reader.skipped == 6
    assert reader.last_error.startswith("BlockStored: ")
    assert AllBlocksCleared() in read


def test_every_field_of_ours_is_taken() -> None:
    """Under its name, of stores and of removals."""
    more: dict[str, Any] = {
        "lora_name": "a",
        "cache_salt": "s",
        "session_id": "i",
        "extra_key": "k",
        "extra_keys": [["x"]],
        "group_idx": 1,
        "kv_cache_spec_kind": "full",
        "locality": "l",
    }
    of_removed: dict[str, Any] = {"group_idx": 2, "locality": "m"}
    gone = kind("BlockRemoved", block_hashes=[1], medium="GPU", **of_removed)
    stored, removed = EventReader().read([store(lora_id=7, **more), gone])
    assert {name: getattr(stored, name) for name in ("lora_id", *more)} == {"lora_id": 7, **more}
    assert {name: getattr(removed, name) for name in of_removed} == of_removed


def test_classes_of_other_names() -> None:
    """Are read as their payload is: hashes and parents signed, and the device without a word."""
    fields = {"block_hashes": [2**64 - 1], "token_ids": [1, 2], "block_size": 2, "lora_id": None}
    odd = [
        kind("BlockStored", of="SaltedStore", **fields, parent_block_hash=2**64 - 2),
        kind("BlockRemoved", of="Gone", block_hashes=[b"\xff" * 8]),
        kind("AllBlocksCleared", of="Flushed"),
    ]
    stored, removed, cleared = EventReader().read(odd)
    assert stored == BlockStored([-1], -2, [1, 2], 2, None, StorageMedium.GPU)
    assert removed == BlockRemoved([-1], StorageMedium.GPU)
    assert cleared == AllBlocksCleared()


def test_fields_of_a_class_that_has_fewer_or_more() -> None:
    """Those that we have are taken, whichever class the name stands for this time."""
    reader = EventReader()
    more = store(lora_name="a", cache_salt="s", ownership="x", session_id=None)
    read = reader.read([store(), more])
    assert [getattr(one, "lora_name", 0) for one in read] == [None, "a"]
    assert [getattr(one, "cache_salt", 0) for one in read] == [None, "s"]
