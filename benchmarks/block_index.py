"""P11: a router's index: events applied, and how much of a prompt is held.

Events are as a subscriber decodes them. Beside it a plain dict from hash to parent and tokens, which is
the least that can be kept: no peer's publisher has an index of its own.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.figures import Figure, absolute, at_least, at_most, spread
from benchmarks.kit.workloads.numbers import percentile, quiet_gc
from benchmarks.kit.workloads.tokens import PER_BLOCK, sequence
from benchmarks.options import Options
from benchmarks.report import run_alone
from kvevents import (
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    TokenIds,
    decode_batch,
    encode_batch,
)
from kvevents.tokens import TOKEN_BYTES, TokenBytes

__all__ = ["NAME", "main", "measure"]

NAME = "block_index"
PAGE_SIZE, ROUNDS = 64, 5
BLOCK_BYTES = PAGE_SIZE * TOKEN_BYTES
EVENT_BLOCKS = (1, 32)
APPLIED, CHUNK, EVENTS_PER_BATCH = 64_000, 16_000, 8
RESIDENT, PROMPT_BLOCKS, QUERIES = 1_000_000, 1000, 300
APPLY_REACH, OVERLAP_REACH = at_least(300_000), at_most(1.0)
GPU = StorageMedium.GPU


def measure(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    for blocks in EVENT_BLOCKS:
        figures += _applied(blocks, options)
    return figures + _overlap(options)


# ---------------------------------------------------------------------------------------- events


def _applied(blocks: int, options: Options) -> list[Figure]:
    """Blocks a second, of stores and then of the removals that empty the index again."""
    num_blocks = options.size(APPLIED, CHUNK)
    found: dict[str, list[list[float]]] = {"store": [[], []], "remove": [[], []]}
    for number in range(options.rounds_or(ROUNDS)):
        ways: list[tuple[int, Callable[[Sequence[Event]], object]]] = [
            (0, BlockIndex().apply),
            (1, _PlainDict().apply),
        ]
        spent = {"store": [0.0, 0.0], "remove": [0.0, 0.0]}
        random = Random(number)
        removals: list[list[Event]] = []
        for first in range(0, num_blocks, CHUNK):
            stores = _decoded(_stored(random, first, CHUNK, blocks))
            removals.append(_decoded(_removed(stores)))
            _time(ways[:: 1 - 2 * (number % 2)], stores, spent["store"])
        for chunk in reversed(removals):
            _time(ways[:: 1 - 2 * (number % 2)], chunk, spent["remove"])
        for kind, seconds in spent.items():
            for way, one in enumerate(seconds):
                found[kind][way].append(num_blocks / one)
    words = {"store": "BlockIndex: stores applied", "remove": "BlockIndex: removals applied"}
    return [
        absolute(
            f"P11.{kind}.{blocks}",
            f"{words[kind]}, events of {blocks} block{'s' * (blocks > 1)} of {PAGE_SIZE} tokens",
            median(ours),
            "blocks/s",
            reach=APPLY_REACH,
            peer="a dict",
            peer_figure=median(theirs),
            spread=spread(ours),
        )
        for kind, (ours, theirs) in found.items()
    ]


def _time(
    ways: Sequence[tuple[int, Callable[[Sequence[Event]], object]]],
    events: list[Event],
    spent: list[float],
) -> None:
    for place, apply in ways:
        with quiet_gc():
            began = perf_counter()
            apply(events)
            spent[place] += perf_counter() - began


class _PlainDict:
    """Hash to parent and tokens; what is told is believed."""

    def __init__(self) -> None:
        self._held: dict[int | bytes, tuple[int | bytes | None, bytes]] = {}

    def apply(self, events: Sequence[Event]) -> None:
        held = self._held
        for event in events:
            if isinstance(event, BlockStored):
                parent, packed = event.parent_block_hash, array("I", event.token_ids).tobytes()
                for at, name in enumerate(event.block_hashes):
                    held[name] = parent, packed[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
                    parent = name
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del held[name]


def _stored(random: Random, first: int, count: int, blocks: int) -> Iterator[Event]:
    """Prompts of `PROMPT_BLOCKS`, told a few blocks at a time."""
    parent: int | None = None
    for at in range(first, first + count, blocks):
        if at % PROMPT_BLOCKS < blocks:
            parent = None
        hashes = _hashes(random, blocks)
        pieces = range(at // 8, at // 8 + blocks * PAGE_SIZE // PER_BLOCK + 1)
        tokens = sequence(pieces, blocks * PAGE_SIZE).tolist()
        yield BlockStored([*hashes], parent, tokens, PAGE_SIZE, medium=GPU)
        parent = hashes[-1]


def _removed(stores: Sequence[Event]) -> Iterator[Event]:
    """The same blocks, children before parents."""
    for event in reversed(stores):
        assert isinstance(event, BlockStored)
        yield BlockRemoved(event.block_hashes[::-1], GPU)


def _decoded(events: Iterator[Event]) -> list[Event]:
    """As they come over the wire."""
    found: list[Event] = []
    batch: list[Event] = []
    for event in events:
        batch.append(event)
        if len(batch) == EVENTS_PER_BATCH:
            found += decode_batch(encode_batch(KVEventBatch(0.0, batch, 0))).batch.events
            batch = []
    return found + batch


def _hashes(random: Random, count: int) -> list[int]:
    return [random.getrandbits(64) - (1 << 63) for _ in range(count)]


# --------------------------------------------------------------------------------------- queries


def _overlap(options: Options) -> list[Figure]:
    """Prompts that are held whole, each of other memory than the one before."""
    resident = options.size(RESIDENT, RESIDENT // 10)
    prompts = resident // PROMPT_BLOCKS
    index = BlockIndex()
    for number in range(prompts):
        random = Random(number)
        packed = _prompt(random)
        index.apply(_pieces(_hashes(random, PROMPT_BLOCKS), packed))
    began = perf_counter()
    index.overlap(_prompt(Random(0)))
    first_s = perf_counter() - began
    asked = Random(1).choices(range(prompts), k=QUERIES)
    forms: dict[str, Callable[[TokenBytes], Any]] = {
        "packed": lambda packed: packed,
        "list": lambda packed: TokenIds(packed).tolist(),
    }
    spent: dict[str, list[float]] = {form: [] for form in forms}
    with quiet_gc():
        for number in asked:
            for form, make in forms.items():
                tokens = make(_prompt(Random(number)))
                began = perf_counter()
                found = index.overlap(tokens)
                spent[form].append((perf_counter() - began) * 1e3)
                assert found.any_medium == PROMPT_BLOCKS, "every block is held"
    words = {"packed": "as packed u32", "list": "as a list of ints, which is packed first"}
    return [
        absolute(
            f"P11.overlap.{form}.p{percent}",
            f"overlap of a prompt of {PROMPT_BLOCKS:,} blocks, {resident:,} resident, {words[form]},"
            f" p{percent}",
            percentile(milliseconds, percent),
            "ms",
            reach=OVERLAP_REACH if percent == 50 else None,
            note=f"the first query makes the table for it: {first_s:.1f} s",
        )
        for form, milliseconds in spent.items()
        for percent in (50, 99)
    ]


def _pieces(names: list[int], packed: TokenBytes) -> Iterator[Event]:
    """A prompt as engines tell it: a stretch of blocks at a time."""
    longest = EVENT_BLOCKS[-1]
    for at in range(0, len(names), longest):
        tokens = packed[at * BLOCK_BYTES : (at + longest) * BLOCK_BYTES]
        yield BlockStored(
            [*names[at : at + longest]],
            names[at - 1] if at else None,
            TokenIds(TokenBytes(tokens)),
            PAGE_SIZE,
            medium=GPU,
        )


def _prompt(random: Random) -> TokenBytes:
    return TokenBytes(random.randbytes(PROMPT_BLOCKS * BLOCK_BYTES))


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
