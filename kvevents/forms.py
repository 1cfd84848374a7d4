"""Events as others write them, as the maps of docs/wire.md: arrays of older engines, a store's objects.

Nothing is checked here but what decides how to read on: the fields are converted like any map's.
"""

from __future__ import annotations

import reprlib
from typing import Any

from kvevents.errors import KVEventsError
from kvevents.events import StorageMedium

__all__ = ["fields_of_array", "fields_of_object", "refuse_bigrams", "short"]

_SLOTS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""What follows the type in vLLM's arrays, up to 0.23. SGLang's, up to 0.5.18, are as long as the medium;
with a salt they have a map after it.
"""


def fields_of_array(raw: list[Any]) -> dict[str, Any]:
    """An event as a tagged array. What follows the known slots is ignored, and so is all that follows
    SGLang's map. Raises KVEventsError for an unknown type and for bigrams.
    """
    tag = raw[0] if raw else None
    slots = _SLOTS.get(tag) if isinstance(tag, str) else None
    if slots is None:
        raise KVEventsError(f"type: {short(tag)} is unknown")
    fields = dict(zip(slots, raw[1:], strict=False))
    if isinstance(metadata := fields.get("lora_name"), dict):
        known = slots[: slots.index("lora_name")]
        fields = {name: fields[name] for name in known} | {"cache_salt": metadata.get("cache_salt")}
    refuse_bigrams(fields.get("token_ids"))
    return fields | {"type": tag}


_OBJECT_TYPES = {
    "stored": "BlockStored",
    "removed": "BlockRemoved",
    "cleared": "AllBlocksCleared",
}
_OBJECT_MEDIA = {"cpu": StorageMedium.EXTERNAL, "disk": StorageMedium.DISK}


def fields_of_object(raw: dict[str, Any]) -> dict[str, Any]:
    """An event of Mooncake's master, `{"event_type": "stored", …}`: of an object in a store that workers
    share, so `cpu`, the memory of that store, is EXTERNAL.

    Raises KVEventsError for what does not name blocks. So does a store without a block size, which the
    master itself leaves nil: how many tokens the block has is not told, and the size of another event in
    the batch, perhaps of another model, is no answer.
    """
    event_type = raw["event_type"]
    tag = _OBJECT_TYPES.get(event_type) if isinstance(event_type, str) else None
    if tag is None:
        raise KVEventsError(f"event_type: {short(event_type)} is unknown")
    if tag == "AllBlocksCleared":
        return {"type": tag}
    hashes = raw.get("block_hashes") or raw.get("seq_hashes") or _page_hash(raw)
    if not hashes:
        raise KVEventsError(f"block_hashes: none for the object {short(raw.get('object_key'))}")
    text = raw.get("medium")
    medium = _OBJECT_MEDIA.get(text.lower()) if isinstance(text, str) else None
    if medium is None:
        raise KVEventsError(f"medium: {short(text)} is neither cpu nor disk")
    fields = {"type": tag, "block_hashes": hashes, "medium": medium}
    if tag == "BlockRemoved":
        return fields
    if raw.get("block_size") is None:
        raise KVEventsError("block_size: nil: how many tokens the block has is not told")
    parent, tokens = raw.get("parent_block_hash"), raw.get("token_ids")
    refuse_bigrams(tokens)
    return fields | {
        "parent_block_hash": raw.get("parent_hash") if parent is None else parent,
        "token_ids": [] if tokens is None else tokens,
        "block_size": raw["block_size"],
        "lora_name": raw.get("lora_name"),
        "cache_salt": raw.get("additional_salt"),
    }


def _page_hash(raw: dict[str, Any]) -> list[int]:
    """The block's hash by its page's name, SGLang's: the first 8 bytes of a digest in hex."""
    name = raw.get("connector_block_hash")
    try:
        digest = bytes.fromhex(name) if isinstance(name, str) else b""
    except ValueError:
        return []
    return [int.from_bytes(digest[:8], "big", signed=True)] if len(digest) >= 8 else []


def refuse_bigrams(tokens: object) -> None:
    """Raises KVEventsError for EAGLE's pairs of tokens.

    A block of pairs is named after its tokens and the one that follows them. Told by its tokens alone it
    would be found for prompts that go on otherwise, which the engine does not have.
    """
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        raise KVEventsError("token_ids: pairs of tokens (EAGLE bigrams) are not understood")


def short(value: object) -> str:
    """Bounded in length and in depth: the value comes from a stranger."""
    return reprlib.repr(value)
