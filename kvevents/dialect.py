"""Dialects: how one sink spells its batches, and which blocks it speaks of.

Consumers differ in what they read, and most of them lose a whole batch over one thing that they do not.
A preset is the dialect that one consumer takes whole, and how it wants to be published to besides. What
each of them takes is written down, and where it was run, in docs/consumers.md.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal

import msgspec

from kvevents.events import StorageMedium

__all__ = ["DIALECTS", "NAMESPACES", "PRESETS", "Dialect", "EventForm", "HashForm", "Preset"]

EventForm = Literal["map", "vllm", "array", "mooncake"]
"""`map`: `{"type": "BlockStored", …}`, as docs/wire.md has it. `vllm`: the same as vLLM 0.33 writes it, a
salt among the `extra_keys`. `array`: `["BlockStored", hashes, parent, token_ids, block_size, lora_id,
medium]`, and the LoRA name at 7 where it is told, as engines wrote before maps. `mooncake`: one object an
event, as Mooncake's master writes (kvevents.store_form).
"""

HashForm = Literal["i64", "u64", "bytes"]
"""`bytes`: 8 of them, big-endian. All three have the same bits."""

NAMESPACES: Final = ("lora_name", "cache_salt", "extra_key", "extra_keys")
"""What can tell blocks of equal tokens apart, as fields of BlockStored."""

Media = tuple[tuple[StorageMedium, str], ...]
GPU, CPU, DISK, EXTERNAL = StorageMedium
_ALL: Media = tuple((medium, medium.value) for medium in StorageMedium)
_DEVICE: Media = ((GPU, "GPU"),)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One spelling.

    `media`: those that are told, and as what. Several of one text are told as one: a block is stored
    when it comes to the first of them, and removed when it has left the last. `namespaces`: what of
    `NAMESPACES` is told; blocks that need another, and all after them, are left out, for without it they
    would be taken for others. `blocks_per_event`: at most; None: any number. `token_ids`: False leaves
    them out. `object_key`: see kvevents.store_form.
    """

    event_form: EventForm = "map"
    hash_form: HashForm = "i64"
    media: Media = _ALL
    namespaces: tuple[str, ...] = NAMESPACES
    blocks_per_event: int | None = None
    token_ids: bool = True
    object_key: str = "{digest}"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """What one consumer wants.

    `topic`: a template, see publisher.topic. `replay_frames`: 4, or 3 without the topic.
    `replay_padding`: a replay that begins with a snapshot is padded with at most so many empty batches,
    and begins after the seq asked for where more were needed; None: with any number. `rebase_after`: so
    many seqs after the state was told whole, numbering starts over. `reset_sentinel`: seq 0 comes after
    a message without payload whose seq is 2^64 - 1. `tells_joiners`: whoever subscribes has the state
    told anew, to all: for consumers that ask for no replay. `coalesce_s`: batches of so long are merged
    into one.
    """

    dialect: Dialect = Dialect()
    topic: str = ""
    replay_frames: Literal[3, 4] = 4
    replay_padding: int | None = None
    rebase_after: int | None = None
    reset_sentinel: bool = False
    tells_joiners: bool = False
    coalesce_s: float = 0.0


_DYNAMO = Dialect(namespaces=("lora_name", "cache_salt", "extra_keys"))
_PADDING = 100_000  # about a second of empty batches

PRESETS: Final = MappingProxyType(
    {
        "sglang": Preset(),
        "vllm": Preset(
            dialect=Dialect(
                event_form="vllm",
                hash_form="u64",
                media=((GPU, "GPU"), (CPU, "CPU"), (DISK, "STORAGE"), (EXTERNAL, "STORAGE")),
                namespaces=("lora_name", "cache_salt", "extra_keys"),
            )
        ),
        "dynamo": Preset(dialect=_DYNAMO, replay_padding=_PADDING),
        "dynamo-relay": Preset(dialect=_DYNAMO, tells_joiners=True),
        "llm-d": Preset(
            dialect=Dialect(
                hash_form="bytes",  # an int that packs in fewer than 8 bytes costs the batch
                media=((GPU, "GPU"), (CPU, "CPU")),  # unknown media weigh as much as the device
                namespaces=("lora_name", "extra_keys"),
            ),
            topic="kv@{pod_ip}:8000@{model}",
            rebase_after=100_000,  # it replays from 0, in two minutes at most
        ),
        "aibrix": Preset(
            dialect=Dialect(
                event_form="array",
                media=_DEVICE,  # it takes any removal for one from the device
                namespaces=(),
                blocks_per_event=1,  # it hangs all blocks of an event on the event's parent
            ),
            tells_joiners=True,
        ),
        "mooncake": Preset(
            dialect=Dialect(
                hash_form="u64",
                media=((GPU, "GPU"), (CPU, "CPU_PINNED"), (DISK, "DISK")),
                namespaces=("lora_name",),
            )
        ),
        "mooncake-store": Preset(
            dialect=Dialect(
                event_form="mooncake",
                hash_form="u64",
                media=((DISK, "disk"), (EXTERNAL, "cpu")),
                namespaces=("lora_name",),
            ),
            tells_joiners=True,
        ),
        "vllm-router": Preset(
            dialect=Dialect(
                hash_form="u64",
                media=((GPU, "GPU"), (CPU, "CPU"), (DISK, "DISK"), (EXTERNAL, "DISK")),
                namespaces=("lora_name",),
            ),
            rebase_after=50_000,  # it replays from 0, in five seconds at most
        ),
        "sgl-router": Preset(
            dialect=Dialect(blocks_per_event=65_536), reset_sentinel=True, tells_joiners=True
        ),
        "smg": Preset(
            dialect=Dialect(namespaces=("lora_name",)),
            replay_padding=_PADDING,
            tells_joiners=True,  # the Python relay asks for no history
            coalesce_s=0.1,  # the Rust one begins anew for each live batch that a replay has brought
        ),
        "kthena": Preset(
            dialect=Dialect(event_form="array", media=_DEVICE, namespaces=()),
            topic="kv-events",
            tells_joiners=True,
        ),
        "legacy": Preset(dialect=Dialect(event_form="array", namespaces=()), replay_frames=3),
    }
)
"""By name, the `dialect` of a sink."""

DIALECTS: Final = tuple(PRESETS)
"""The names of all presets."""
