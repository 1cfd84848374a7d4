"""Streams for the tests of the checker: messages made by hand, and a publisher that is sound."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Namespace,
    StorageMedium,
    block_hashes,
)
from kvevents.check import Checker, Finding, Verifier
from kvevents.follower import Follower, Told
from kvevents.frames import live_frames, replay_answer, replay_end, replay_request
from kvevents.message import Channel, Message
from kvevents.reading import read

__all__ = [
    "CLEARED",
    "SIZE",
    "Publisher",
    "answer",
    "asked",
    "checked",
    "end",
    "live",
    "payload",
    "plain",
    "removed",
    "stored",
    "stream",
]

SIZE = 2
CLEARED = AllBlocksCleared()
GPU, CPU, DISK, _ = StorageMedium


def payload(*events: Event, ts: float = 1.0, rank: int = 0) -> bytes:
    """A batch's bytes, also of what our encoder refuses."""
    return msgspec.msgpack.encode([ts, [plain(one) for one in events], rank])


def plain(event: Event) -> dict[str, Any]:
    """An event as a map."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    known = {name: value for name, value in fields.items() if value is not None}
    return {"parent_block_hash": None, **known, "type": type(event).__name__}


def stored(
    hashes: Sequence[int],
    parent: int | None = None,
    medium: StorageMedium = GPU,
    **fields: object,
) -> BlockStored:
    """Blocks of `SIZE`; the tokens are those of their hashes, unless told otherwise."""
    tokens = [token for one in hashes for token in (abs(one) % 1000, 7)]
    told: dict[str, object] = {"token_ids": tokens, "block_size": SIZE, "medium": medium} | fields
    return BlockStored(list(hashes), parent, **told)  # type: ignore[arg-type]  # as it has them


def removed(hashes: Sequence[int], medium: StorageMedium | None = GPU) -> BlockRemoved:
    """Blocks that are gone."""
    return BlockRemoved(list(hashes), medium)


def live(seq: int, data: bytes, at_s: float = 0.0) -> Message:
    """What came from the PUB socket."""
    return Message(int(at_s * 1e9), Channel.LIVE, live_frames(b"", seq, data))


def asked(start: int) -> Message:
    """A request for a replay."""
    return Message(0, Channel.ASKED, replay_request(start))


def answer(seq: int, data: bytes) -> Message:
    """One of a replay's."""
    return Message(0, Channel.ANSWER, replay_answer(b"", seq, data, delimited=True))


def end() -> Message:
    """The replay's last."""
    return Message(0, Channel.ANSWER, replay_end(delimited=True))


def stream(*batches: Sequence[Event], first: int = 0) -> list[Message]:
    """Live batches of one run, a second apart."""
    return [
        live(seq, payload(*events, ts=float(seq + 1)), float(seq))
        for seq, events in enumerate(batches, first)
    ]


def checked(
    messages: Iterable[Message], *, replay: bool = False, verifier: Verifier | None = None
) -> list[Finding]:
    """All that is found in a stream, to its end."""
    follower = Follower(can_replay=replay, start=None)
    checker = Checker(verifier=verifier)
    found: list[Finding] = []
    for message in messages:
        found += checker.message(message)
        for arrival in follower.take(message):
            if isinstance(arrival, Told):
                found += checker.read(read(arrival))
            else:
                found += checker.other(arrival)
    return found + checker.close()


class Publisher:
    """A publisher that keeps its promises, of random prompts; deterministic for a seed.

    `batches`: what it has said, a list of events each, run by run.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._on: dict[StorageMedium, set[tuple[int, ...]]] = {m: set() for m in (GPU, CPU, DISK)}
        self._spaces = (Namespace(), Namespace(lora_name="a"), Namespace(cache_salt="s"))
        self.runs: list[list[list[Event]]] = [[[CLEARED]]]

    def work(self, steps: int) -> None:
        """So many batches more."""
        acts = (self._store, self._store, self._store, self._copy, self._evict, self._evict)
        for _ in range(steps):
            dice = self._random.random()
            if dice < 0.02:
                self.runs[-1].append([CLEARED])
                self._clear()
            elif dice < 0.04:
                self.runs[-1].append([CLEARED, *self._snapshot()])
            elif dice < 0.05:
                self.runs.append([[CLEARED, *self._snapshot()]])
            elif dice < 0.1:
                self.runs[-1].append([])
            else:
                count = self._random.randint(1, 3)
                told = [one for _ in range(count) for one in self._random.choice(acts)()]
                self.runs[-1].append(told)

    def messages(self) -> list[Message]:
        """All of it, live; each run counts from 0."""
        return [message for run in self.runs for message in stream(*run)]

    # Paths are a namespace's number and blocks of tokens, each a number.

    def _clear(self) -> None:
        for held in self._on.values():
            held.clear()

    def _store(self) -> list[Event]:
        space = self._random.randrange(len(self._spaces))
        path = (space, *(self._random.randrange(3) for _ in range(self._random.randint(1, 5))))
        return self._put(path, GPU)

    def _copy(self) -> list[Event]:
        source, target = self._random.sample(sorted(self._on), 2)
        if not self._on[source]:
            return []
        return self._put(self._random.choice(sorted(self._on[source])), target)

    def _put(self, path: tuple[int, ...], medium: StorageMedium) -> list[Event]:
        """Store what of a path is not on the medium; parents are, where their children are."""
        held = self._on[medium]
        known = max((n for n in range(1, len(path) + 1) if path[:n] in held), default=1)
        if known == len(path):
            return []
        held.update(path[:n] for n in range(known + 1, len(path) + 1))
        return [self._event(path, known - 1, medium)]

    def _event(self, path: tuple[int, ...], start: int, medium: StorageMedium) -> BlockStored:
        space = self._spaces[path[0]]
        tokens = [token for block in path[1:] for token in (block, 9)]
        hashes = list(block_hashes(tokens, SIZE, space))
        parent = hashes[start - 1] if start else None
        return stored(
            hashes[start:],
            parent,
            medium,
            token_ids=tokens[start * SIZE :],
            lora_name=space.lora_name,
            cache_salt=space.cache_salt,
        )

    def _evict(self) -> list[Event]:
        medium = self._random.choice(sorted(self._on))
        held = self._on[medium]
        leaves = [
            one for one in held if not any(len(o) > len(one) and o[: len(one)] == one for o in held)
        ]
        if not leaves:
            return []
        path = self._random.choice(sorted(leaves))
        gone = [path]
        held.discard(path)
        while len(path) > 2 and self._random.random() < 0.5:
            path = path[:-1]
            if any(o[: len(path)] == path and o != path for o in held):
                break
            gone.append(path)
            held.discard(path)
        return [removed([self._name(one) for one in gone], medium)]

    def _name(self, path: tuple[int, ...]) -> int:
        tokens = [token for block in path[1:] for token in (block, 9)]
        return block_hashes(tokens, SIZE, self._spaces[path[0]])[-1]

    def _snapshot(self) -> list[Event]:
        told: list[Event] = []
        for medium, held in self._on.items():
            told += [self._event(one, len(one) - 2, medium) for one in sorted(held, key=len)]
        return told
