"""A block's life: every way in which it can come to a medium and leave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_answers import held
from interop_worker import ExampleWorker, Store

from kvevents import StorageMedium

__all__ = ["ROOM", "life"]

ROOM = 8
"""Pages of the worker's store, so that two prompts do not fit."""


def life(worker: ExampleWorker, prompt: Sequence[int], storage: Store) -> Iterator[str]:
    """Does one thing after the other, and says what was done; `prompt`: four blocks, inserted."""
    yield "inserted"
    worker.backup(prompt)
    yield "backed up"
    worker.evict_device(4)
    yield "evicted from the device, the host has it"
    worker.load_back(prompt)
    yield "loaded back"
    worker.evict_host(3)
    yield "evicted from the host, the device has it"
    worker.evict_device(2)
    yield "evicted from the device, nobody has the last of it"
    worker.insert(prompt)
    worker.backup(prompt)
    yield "inserted and backed up again"
    worker.write_storage()
    assert len(worker.resident()[StorageMedium(storage)]) == 4
    yield "written to the store"
    worker.evict_device(4)
    worker.evict_host(4)
    yield "evicted from device and host, the store has it"
    worker.prefetch(prompt)
    yield "prefetched"
    worker.load_back(prompt)
    yield "loaded back again"
    other = worker.prompt(6)
    worker.insert(other)
    worker.backup(other)
    worker.write_storage()
    assert len(worker.resident()[StorageMedium(storage)]) <= ROOM
    yield "evicted from the store"
    worker.reset_device()
    assert not worker.resident()[StorageMedium.GPU]
    yield "the device was reset"
    worker.flush()
    assert held(worker.resident()) == {}
    yield "flushed"
    worker.insert(prompt)
    yield "inserted after the flush"
