"""publisher.stream.weight: what a batch that is kept takes, beside what CPython has taken for it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvevents import BlockRemoved, BlockStored, KVEventBatch, StorageMedium, decode_batch
from kvevents.codec import encode_batch
from kvevents.columns import Columns
from kvevents.events import Event
from publisher.link.packed import pack_plain, unpack
from publisher.stream.weight import weight

Kept = tuple[bytes, Sequence[Event]]


def batch(
    number: int, num_events: int, num_blocks: int, page: int, *, odd: bool = False
) -> KVEventBatch:
    """Stores, and the removal of as much; hashes and tokens as large as they come. `odd`: with names."""
    events: list[Event] = []
    for place in range(num_events):
        first = 2**61 + (number * num_events + place) * num_blocks
        tokens = [100_000 + (number + place + one) % 30_000 for one in range(num_blocks * page)]
        hashes: list[int | bytes] = [*range(first, first + num_blocks)]
        keys = [("adapter-7", f"image-{number}-{one:032x}") for one in range(num_blocks)]
        more: dict[str, Any] = {"extra_keys": keys, "lora_name": "adapter"} if odd else {}
        events.append(BlockStored(hashes, None, tokens, page, medium=StorageMedium.GPU, **more))
        events.append(BlockRemoved([*hashes], StorageMedium.GPU))
    return KVEventBatch(1.0, events, 0)


def packed(told: KVEventBatch) -> Kept:
    """As a plugin's worker hands it over."""
    body = bytearray()
    found = unpack(bytes(body), flags) if (flags := pack_plain(told, body)) else None
    assert found is not None and found.payload is not None
    return found.payload, found.events


def decoded(told: KVEventBatch) -> Kept:
    """As a relay reads it."""
    payload = encode_batch(told)
    return payload, decode_batch(payload).batch.events


def unpacked(told: KVEventBatch) -> Kept:
    """As it is made by hand: tokens in a list, which nobody else holds."""
    payload = encode_batch(told)
    events: list[Event] = [
        BlockStored([*one.block_hashes], None, [int(str(t)) for t in one.token_ids], one.block_size)
        if isinstance(one, BlockStored)
        else one
        for one in decode_batch(payload).batch.events
    ]
    return payload, events


def check(told: list[KVEventBatch], kept_as: Callable[[KVEventBatch], Kept]) -> None:
    """What is kept of these weighs never less than it takes, and not twice as much."""
    kept_as(told[0])
    gc.collect()
    tracemalloc.start()
    try:
        kept = [kept_as(one) for one in told]
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= sum(weight(*one) for one in kept) <= 2 * taken


@pytest.mark.parametrize("kept_as", [packed, decoded, unpacked])
@pytest.mark.parametrize(
    ("num_events", "num_blocks", "page"), [(1, 1, 64), (8, 1, 16), (1, 64, 64)]
)
def test_it_is_about_what_is_taken(
    kept_as: Callable[[KVEventBatch], Kept], num_events: int, num_blocks: int, page: int
) -> None:
    """Whatever a batch is made of, and whoever has read it."""
    check([batch(number, num_events, num_blocks, page) for number in range(50)], kept_as)


def test_names_and_keys_count() -> None:
    """Of an engine's events, which may have some for each block."""
    check([batch(number, 1, 64, 64, odd=True) for number in range(50)], decoded)


def test_columns_need_not_become_events() -> None:
    """To be weighed: those would be kept, and take more."""
    _, events = packed(batch(0, 1, 4, 16))
    assert isinstance(events, Columns)
    weight(b"", events)
    assert events._events is None


def test_nothing_of_a_batch_is_free() -> None:
    """Each hash of columns, and the extra keys of each block, of which an engine may tell many."""
    _, events = packed(batch(0, 1, 100, 1))
    assert isinstance(events, Columns)
    assert weight(b"", events) > 200 * 48
    (plain, _), (keyed, _) = (decoded(batch(0, 1, 100, 1, odd=odd))[1] for odd in (False, True))
    assert weight(b"", [keyed]) > weight(b"", [plain]) + 100 * 250
