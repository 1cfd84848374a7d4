"""Ground truth for the tests, told from tokens with the standard library alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import settings

__all__ = ["reference_hashes", "to_bytes", "to_u64", "trials"]

_Test = TypeVar("_Test", bound=Callable[..., None])


def trials(count: int) -> Callable[[_Test], _Test]:
    """Run a property on `count` examples, or as many times more as the profile asks for."""
    return settings(max_examples=count * max(1, settings().max_examples // 100), deadline=None)


def reference_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    dynamo: bool = False,
) -> list[int]:
    """The signed 64-bit hash of each full block, straight from the description of the algorithm."""
    digest = b""
    if cache_salt:
        digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()
    preimage = b"sglang-kv-event-namespace-v1" + _part(extra_key) + _part(cache_salt)
    if lora_name:
        preimage += _part(lora_name)
    seed = hashlib.sha256(preimage).digest()
    folds = bool(lora_name or extra_key or (dynamo and cache_salt))
    found = []
    for end in range(block_size, len(tokens) + 1, block_size):
        words = [token.to_bytes(4, "little") for token in tokens[end - block_size : end]]
        digest = hashlib.sha256(digest + b"".join(words)).digest()
        name = hashlib.sha256(seed + digest[:8]).digest() if folds else digest
        found.append(int.from_bytes(name[:8], "big", signed=True))
    return found


def to_u64(value: int) -> int:
    """The unsigned reading of a signed 64-bit int."""
    return value % 2**64


def to_bytes(value: int) -> bytes:
    """A 32-byte digest whose low 64 bits are those of `value`."""
    return b"\xab" * 24 + to_u64(value).to_bytes(8, "big")


def _part(text: str | None) -> bytes:
    if not text:
        return b"\0"
    return b"\1" + len(text.encode()).to_bytes(8, "little") + text.encode()
