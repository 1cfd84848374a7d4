"""What one consumer takes, as a description: no behaviour of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvevents.lint.finding import Lost

__all__ = ["Consumer", "Losses", "Replays", "Sequence", "Topic"]

Topic: TypeAlias = Literal["any", "kv@pod@model"] | tuple[bytes, ...]
"""Which topic frames are read: any, llm-d's form, or these alone."""

Cost: TypeAlias = tuple[Lost, str]
"""What is lost, and what the consumer makes of it."""

_ALL = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_NAMESPACES = frozenset({"lora_name", "cache_salt", "extra_key", "extra_keys"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What becomes of a consumer, told in half a sentence; None: it copes.

    `late`: it joins, with a message whose seq is above 0 and that does not begin with AllBlocksCleared.
    `gap`: seqs are missing; `back`: a seq is below the one before. `cleared_gap`, `cleared_back`: the
    same, and the message that shows it begins with AllBlocksCleared.
    """

    late: str | None = None
    gap: str | None = None
    cleared_gap: str | None = None
    back: str | None = None
    cleared_back: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """How seqs are followed.

    `alone`: where no replay is served. `replaying`: where one is; None: it asks for none. `drops_old`:
    what is not above the highest seq so far is dropped, until that is passed. `reset`: whether a message
    with seq 2^64 - 1 makes it start anew. `end`: what one without a payload does otherwise.
    """

    alone: Losses = Losses()
    replaying: Losses | None = None
    drops_old: bool = False
    reset: Literal["never", "by payload", "always"] = "never"
    end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Which answers to a replay request are read. Texts as in `Losses`.

    `frames`: how many, without the identity. `rolled`: the first answer is of a later seq than was asked
    for; `rolled_cleared`: the same, and it begins with AllBlocksCleared. `hole`: a seq is missing, or
    comes again. `empty`: a payload is empty before the end. `no_end`: the end does not come.
    """

    frames: frozenset[int] = frozenset({3, 4})
    rolled: str | None = None
    rolled_cleared: str | None = None
    hole: str | None = None
    empty: str | None = None
    no_end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One consumer, as it was observed at `version`: run, or read from its source.

    What is at its default is no cause of loss, or was not looked at. A `Cost` is what is lost and why;
    None: nothing.
    """

    name: str
    version: str
    observed: Literal["run", "read"] = "run"

    # ------------------------------------------------------------------------------- messages
    topic: Topic = "any"
    frames: tuple[int, int | None] = (3, 3)
    seq_bytes: tuple[int, int | None] = (8, 8)
    max_seq: int = 2**64 - 1
    max_payload: int | None = None
    sequence: Sequence = Sequence()
    replays: Replays | None = None

    # -------------------------------------------------------------------------------- batches
    dropping: str = "drops the batch"
    lengths: tuple[int, int | None] = (2, None)
    ts: frozenset[str] = frozenset({"float", "int"})
    rank: frozenset[str] = frozenset({"int", "nil"})
    nil_rank: Cost | None = None
    no_rank: Cost | None = None
    ranks: tuple[int, int] | None = None
    rank_change: Cost | None = None
    """Another rank than the first batch's."""
    trailing: bool = True
    """Whether bytes may follow the value."""

    # --------------------------------------------------------------------------------- events
    broken: Lost = "batch"
    """What one event costs that cannot be read."""
    forms: frozenset[str] = frozenset({"map", "array"})
    slots: int | None = None
    """The longest BlockStored as an array, tag included."""
    slot_7: frozenset[str] = frozenset({"nil", "text"})
    """What may stand there, behind the medium."""
    tag: str = "type"
    types: frozenset[str] = _ALL
    no_ops: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset({"block_hashes", "token_ids", "block_size"})
    """Keys that a BlockStored must have as a map."""
    removed: frozenset[str] = frozenset({"block_hashes"})
    known: Mapping[str, frozenset[str]] | None = None
    """All the keys that an event of a type may have; None: any."""
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What a field must be, where its being absent is no better."""
    loose: frozenset[str] = frozenset()
    """Fields of a map that may be of any kind."""
    only: Mapping[str, tuple[frozenset[object], str]] = field(default_factory=dict)
    """The values of a field with which a BlockStored is indexed, absent being None; else what it does."""

    # --------------------------------------------------------------------------------- hashes
    negative: bool = True
    large: bool = True
    """Above 2^63 - 1."""
    digests: bool = True
    """Bytes."""
    narrow: bool = True
    """Ints that are packed with fewer than 64 bits."""
    max_hashes: int | None = None
    no_hashes: Cost | None = None
    """None at all in an event."""
    many_hashes: Cost | None = None
    """More than one in a BlockStored."""
    repeated_hash: Cost | None = None
    """Twice in an event, or its own parent."""

    # --------------------------------------------------------------------------------- tokens
    pairs: Cost | None = ("batch", "it reads a list of ids only")
    nil_tokens: bool = False
    """Whether `token_ids` may be nil."""
    no_tokens: Cost | None = None
    token_range: bool = False
    """Whether a token beyond 32 bits costs the batch."""
    few_tokens: Cost | None = None
    many_tokens: Cost | None = None
    """Fewer, or more, than the blocks need."""
    block_size_change: Cost | None = None
    """Another block_size than that of the first event."""

    # ------------------------------------------------------------------------------- for whom
    media: frozenset[str] | None = None
    """Those that it tells apart; None: any."""
    any_case: bool = False
    stored_elsewhere: Cost | None = None
    removed_elsewhere: Cost | None = None
    """A medium that is not in `media`."""
    namespaces: frozenset[str] = _NAMESPACES
    """Which of the fields that keep equal tokens apart it reads."""
    lora_id_alone: Cost | None = None
    """A lora_id without a lora_name."""
