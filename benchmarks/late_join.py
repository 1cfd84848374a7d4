"""A subscriber that joins late: until its view is exact; and what the sidecar keeps for it: P6.

A worker's cache tells its records: prompts of 250 blocks with tokens of their own. When all is published,
a `Subscriber` connects and applies what comes to a `BlockIndex`, in this process, until that holds what
was told: as many blocks, whose hashes have the same digest as those computed from the tokens. Memory is
what the sidecar's process has grown by since it was ready, a log of 1,000 batches among it.
"""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.figures import Figure, Reach, absolute, at_most, shown, spread
from benchmarks.options import Options
from benchmarks.report import run_alone
from kvevents import BASE, BlockIndex, HashFormat, StorageMedium, block_hashes
from kvevents.records import BlockId, Clear, Record, StoreNew
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.subscriber.subscriber import Batch, Subscriber

__all__ = ["NAME", "main", "measure"]

NAME = "late_join"
PAGE_SIZE, PROMPT_BLOCKS, LOG_BATCHES = 64, 250, 1000
SIZES = {100_000: 3, 1_000_000: 1}
"""Blocks, and how many subscribers join one after the other."""
REACHES = {100_000: at_most(2.0), 1_000_000: at_most(20.0)}
MEMORY_REACH, GROWTH_REACH = at_most(600.0), at_most(1.5)
PATIENCE_S = 60.0
_LOOPBACK = "tcp://127.0.0.1:0"


class Prompts:
    """A `RecordSource` of prompts that nobody has sent before."""

    page_size, hash_format, retelling = PAGE_SIZE, HashFormat.SGLANG, False

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._next_id = 0

    def add(self, tokens: bytes) -> None:
        """A prompt of whole blocks."""
        count = len(tokens) // (4 * PAGE_SIZE)
        first = BlockId(self._next_id)
        self._records.append(StoreNew(StorageMedium.GPU, first, count, None, BASE, tokens))
        self._next_id += count

    def take_records(self) -> list[Record]:
        taken, self._records = self._records, []
        return taken

    def begin_retell(self) -> None:
        """Asked for at the beginning, when there is nothing."""
        assert self._next_id == 0, "the ring has room"
        self._records = [Clear()]

    def retell(self, num_blocks: int) -> None:
        raise AssertionError(f"nothing is told anew, not {num_blocks} blocks")


@dataclass(frozen=True, slots=True)
class Joined:
    """`join_s`: of each subscriber. `told_s`: until all was told."""

    join_s: list[float]
    bytes_per_block: float
    told_s: float


def measure(options: Options) -> list[Figure]:
    found = {
        blocks: join(options.size(blocks, blocks // 10), options.rounds or joins)
        for blocks, joins in SIZES.items()
    }
    figures: list[Figure] = []
    for blocks, one in found.items():
        figures += _figures(blocks, options.size(blocks, blocks // 10), one, REACHES[blocks])
    few, many = SIZES
    per_block = median(found[many].join_s) / many / (median(found[few].join_s) / few)
    return [
        *figures,
        absolute(
            "P6.growth",
            f"late join: time per block with {many // few} times as many",
            per_block,
            "×",
            reach=GROWTH_REACH,
        ),
    ]


def _figures(usual: int, blocks: int, found: Joined, reach: Reach) -> list[Figure]:
    """`usual`: the blocks of a run that is not quick."""
    return [
        absolute(
            f"P6.join.{usual}",
            f"late join with {blocks:,} blocks of {PAGE_SIZE} tokens: until the view is exact",
            median(found.join_s),
            "s",
            reach=reach,
            spread=spread(found.join_s),
            note=f"told in {shown(found.told_s)} s",
        ),
        absolute(
            f"P6.memory.{usual}",
            f"memory of the sidecar with {blocks:,} blocks",
            found.bytes_per_block,
            "B/block",
            reach=MEMORY_REACH,
            note=f"{min(1.0, LOG_BATCHES * PROMPT_BLOCKS / blocks):.0%} are in the log's payloads too",
        ),
    ]


def join(blocks: int, joins: int) -> Joined:
    with _sidecar() as sidecar:
        empty = _resident_bytes(sidecar.pid)
        began = time.perf_counter()
        wanted = _tell(sidecar, blocks)
        told_s = time.perf_counter() - began
        grown = _resident_bytes(sidecar.pid) - empty
        join_s = [_join(sidecar, wanted, blocks) for _ in range(joins)]
    return Joined(join_s, grown / blocks, told_s)


@contextmanager
def _sidecar() -> Iterator[Sidecar]:
    sink = SinkConfig(endpoint=_LOOPBACK, replay_endpoint=_LOOPBACK, buffer_steps=LOG_BATCHES)
    with tempfile.TemporaryDirectory() as directory:
        config = SidecarConfig(sinks=(sink,), state_dir=directory, linger_s=0.0)
        with spawn(WorkerInfo(block_size=PAGE_SIZE), config) as sidecar:
            yield sidecar


def _tell(sidecar: Sidecar, blocks: int) -> bytes:
    """Tell of so many blocks, until it is published; returns the digest of their hashes."""
    source, random, hashes = Prompts(), Random(0), set[int]()
    sidecar.pump(source)
    for _ in range(blocks // PROMPT_BLOCKS):
        tokens = random.randbytes(4 * PAGE_SIZE * PROMPT_BLOCKS)
        source.add(tokens)
        while not _has_room(sidecar):
            time.sleep(0.001)
        assert sidecar.pump(source), "the ring has room"
        hashes.update(block_hashes(tokens, PAGE_SIZE))
    assert sidecar.client.flush(source, PATIENCE_S) is not None, "everything is published"
    return _digest(hashes)


def _has_room(sidecar: Sidecar) -> bool:
    ring = sidecar.client._ring
    return ring.free_bytes * 2 > ring.capacity


def _join(sidecar: Sidecar, wanted: bytes, blocks: int) -> float:
    """Seconds from the connection until the index holds what was told."""
    sink = sidecar.client.sinks[0]
    index = BlockIndex()
    began = time.perf_counter()
    with Subscriber(sink.endpoint, sink.replay_endpoint) as subscriber:
        while len(index) < blocks or subscriber.recovering:
            received = subscriber.receive(PATIENCE_S)
            assert received, "what was told comes"
            for one in received:
                assert isinstance(one, Batch), one
                index.apply(one.batch.events)
    spent = time.perf_counter() - began
    assert _digest(index.resident[StorageMedium.GPU]) == wanted, "the view is exact"
    del index
    gc.collect()
    return spent


def _digest(hashes: Iterable[int]) -> bytes:
    found = sha256()
    for one in sorted(hashes):
        found.update(one.to_bytes(8, "little", signed=True))
    return found.digest()


def _resident_bytes(pid: int) -> int:
    pages = (Path("/proc") / str(pid) / "statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
