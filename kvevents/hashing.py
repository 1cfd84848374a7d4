"""Block hashes: the only place that computes them.

The chain is SGLang's page hash: `digest = SHA256(parent digest ‖ tokens as little-endian u32)`,
without a parent for the first block of a prompt, or after a seed when the prompt has a cache salt.
The 32-byte digest names the page in storage. The wire carries its first 8 bytes, big-endian, signed.

A LoRA name or an extra key is folded into the 64-bit value afterwards (SGLang's namespaced event
hash, `sglang-kv-event-namespace-v1`): two parts, extra key and cache salt, each `00` when absent and
`01 ‖ length as little-endian u64 ‖ text` when present, and for an adapter a third part, its name. The
adapter has a part of its own so that an adapter "x" and an extra key "x" stay apart, and its name
goes in, never a number that depends on the order of loading.

The same content in the same namespace has the same hash in every process, host and tier.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, NewType, TypeGuard

from kvevents.namespace import BASE, Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, pack_tokens

__all__ = [
    "DIGEST_BYTES",
    "BlockHash",
    "HashFormat",
    "are_canonical",
    "block_digests",
    "block_hashes",
    "canonical_hash",
    "chain_seed",
    "namespace_seed",
    "page_key",
    "short_hash",
    "wire_hash",
]

BlockHash = NewType("BlockHash", int)
"""A block's name on the wire: a signed 64-bit integer."""

DIGEST_BYTES = 32
"""Of a SHA-256 digest."""

_first_eight = struct.Struct(">q").unpack_from
_SIGN = 1 << 63
_WRAP = 1 << 64
_INTS = {int}


class HashFormat(StrEnum):
    """How a cache salt shows in the 64-bit value."""

    SGLANG = "sglang"
    """By its seed in the chain alone."""
    DYNAMO = "dynamo"
    """Folded in a second time, as SGLang does under `"format": "dynamo"`."""


def chain_seed(namespace: Namespace) -> bytes:
    """What stands in for the parent digest of a prompt's first block."""
    if namespace.cache_salt is None:
        return b""
    return sha256(b"sglang-cache-salt-v1\0" + namespace.cache_salt.encode()).digest()


def namespace_seed(
    namespace: Namespace, hash_format: HashFormat = HashFormat.SGLANG
) -> bytes | None:
    """The seed to fold into each 64-bit hash; None when the digest's own first bytes are the hash."""
    folded = namespace.extra_key is not None or namespace.lora_name is not None
    if not folded and (hash_format is HashFormat.SGLANG or namespace.cache_salt is None):
        return None
    seed = sha256(b"sglang-kv-event-namespace-v1")
    seed.update(_part(namespace.extra_key))
    seed.update(_part(namespace.cache_salt))
    if namespace.lora_name is not None:
        seed.update(_part(namespace.lora_name))
    return seed.digest()


def block_digests(parent: bytes, tokens: TokenBytes, block_size: int) -> Iterator[bytes]:
    """The digest of each full block of `tokens`, in order; `parent` is the digest before them."""
    step = block_size * TOKEN_BYTES
    for end in range(step, len(tokens) + 1, step):
        parent = sha256(parent + tokens[end - step : end]).digest()
        yield parent


def wire_hash(digest: bytes, seed: bytes | None) -> BlockHash:
    """The signed 64-bit form of a digest; `seed` is that of `namespace_seed`."""
    if seed is not None:
        digest = sha256(seed + digest[:8]).digest()
    return BlockHash(_first_eight(digest)[0])


def page_key(digest: bytes, seed: bytes | None) -> bytes:
    """The 32 bytes that name a block's page in storage: its digest, kept apart by `namespace_seed`.

    What the digest alone does not tell apart, adapters and extra keys, must not share a page either.
    """
    return digest if seed is None else sha256(b"kvevents-page-key-v1" + seed + digest).digest()


def block_hashes(
    tokens: Any,
    block_size: int,
    namespace: Namespace = BASE,
    hash_format: HashFormat = HashFormat.SGLANG,
) -> list[BlockHash]:
    """The wire hash of each full block of a prompt, in order; a partial last block has none.

    Raises ValueError for a block size below 1, and what `pack_tokens` raises.
    """
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is below 1")
    seed = namespace_seed(namespace, hash_format)
    packed = pack_tokens(tokens)
    return [wire_hash(d, seed) for d in block_digests(chain_seed(namespace), packed, block_size)]


def canonical_hash(value: int | bytes) -> BlockHash:
    """The signed 64-bit form of any hash seen on a wire: i64, u64, or bytes (their low 64 bits)."""
    if isinstance(value, bytes):
        value = int.from_bytes(value[-8:], "big")
    return BlockHash(value - _WRAP if value >= _SIGN else value)


def are_canonical(values: Sequence[object]) -> TypeGuard[Sequence[BlockHash]]:
    """Whether these are all signed 64-bit ints, and at least one."""
    if len(values) == 1:
        value = values[0]
        return type(value) is int and -_SIGN <= value < _SIGN
    return (
        set(map(type, values)) == _INTS
        and min(values) >= -_SIGN  # type: ignore[type-var,operator]  # ints
        and max(values) < _SIGN  # type: ignore[type-var,operator]
    )


def _part(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    encoded = text.encode()
    return b"\1" + len(encoded).to_bytes(8, "little") + encoded


def short_hash(value: int | bytes) -> str:
    """As people are shown it: the first 12 of the 16 hex digits of its 64 bits; the last 12, where the
    others are zeros, or engines that count their blocks would have one name for all of them.
    """
    bits = canonical_hash(value) & (_WRAP - 1)
    return f"{bits >> 16 if bits >> 48 else bits:012x}"
