"""What a test lets an engine publish, and what the engine then holds."""

from __future__ import annotations

from typing import Any

__all__ = ["SIZE", "Script"]

SIZE = 4


def name_of(block: int, run: int) -> int:
    """The hash of a block of a chain, signed: half of them are negative."""
    value = (run * 1_000_003 + block) * 0x9E3779B97F4A7C15 % 2**64
    return value - 2**64 if value >= 2**63 else value


class Script:
    """What an engine publishes in one of its runs: a chain that grows, and loses its newest at times."""

    def __init__(self, release: str, run: int = 0) -> None:
        self._unsigned, self._run = release.startswith("vllm"), run
        self.chain: list[int] = []

    def batch(self, number: int) -> list[dict[str, Any]]:
        events = [self._store()]
        if number % 5 == 4:
            events.append(self._remove())
        return events

    def batches(self, first: int, count: int) -> list[list[dict[str, Any]]]:
        return [self.batch(number) for number in range(first, first + count)]

    def _spell(self, block: int) -> int:
        name = name_of(block, self._run)
        return name % 2**64 if self._unsigned else name

    def _store(self) -> dict[str, Any]:
        block = len(self.chain)
        self.chain.append(name_of(block, self._run))
        return {
            "type": "BlockStored",
            "block_hashes": [self._spell(block)],
            "parent_block_hash": self._spell(block - 1) if block else None,
            "token_ids": [self._run, block, 2, 3],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def _remove(self) -> dict[str, Any]:
        self.chain.pop()
        return {
            "type": "BlockRemoved",
            "block_hashes": [self._spell(len(self.chain))],
            "medium": "GPU",
        }
