"""Block hashes made again from the tokens: whether each is the one that was told.

A chain's digests are kept from its start on: 32 bytes for each block that is held. A block whose
beginning was not told, or not with its tokens, cannot be verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from kvevents.check import cbor
from kvevents.events import BlockStored
from kvevents.hashing import (
    DIGEST_BYTES,
    BlockHash,
    HashFormat,
    canonical_hash,
    chain_seed,
    namespace_seed,
    wire_hash,
)
from kvevents.namespace import Namespace
from kvevents.tokens import TOKEN_BYTES, TokenBytes, TokenIds

__all__ = ["SCHEMES", "Verifier"]

SCHEMES: Final = ("sglang", "dynamo", "vllm-sha256-cbor", "auto")
"""What hashes may be made by. `auto`: whichever of the others fits the first blocks."""

_NONE_HASH: Final = "vllm-none-hash"
_TRIALS: Final = 256
"""After so many blocks that no scheme fits, none is looked for any more."""


class _Fit(NamedTuple):
    """Of one block. `fits`: None where that cannot be told."""

    digest: bytes | None
    fits: bool | None


class _Scheme(Protocol):
    """A way to make hashes."""

    name: str
    chain: str
    """Whose digests are the same."""

    def fit(
        self, event: BlockStored, hashes: Sequence[BlockHash], parent: bytes | None, packed: bytes
    ) -> list[_Fit] | None:
        """Each block of an event; `parent`: the digest before it, None where it is not known. None: not
        one of them can be told.
        """


class _SGLang:
    """`kvevents.hashing`, and what SGLang itself does with an adapter, as far as events tell it."""

    chain = "sglang"

    def __init__(self, name: str, hash_format: HashFormat) -> None:
        self.name, self._format = name, hash_format
        self._folds_adapters = False
        """Whether the adapter's name alone tells its blocks' hashes apart, as here."""
        self._seeds: tuple[Namespace, bytes, bytes | None] | None = None

    def fit(
        self, event: BlockStored, hashes: Sequence[BlockHash], parent: bytes | None, packed: bytes
    ) -> list[_Fit] | None:
        salt = event.cache_salt
        if event.parent_block_hash is None and (keys := _own_keys(event)):
            if salt is not None or len(keys) != 1 or not isinstance(keys[0], str):
                return None
            if self._format is HashFormat.DYNAMO:  # which needs the salt in every block
                return None
            salt = keys[0]  # as vLLM spells it
        namespace = Namespace(event.lora_name, salt, event.extra_key)
        if self._seeds is None or self._seeds[0] != namespace:
            self._seeds = namespace, chain_seed(namespace), namespace_seed(namespace, self._format)
        _, first, seed = self._seeds
        if event.parent_block_hash is None:
            parent = first
        if parent is None:
            return None
        found: list[_Fit] = []
        step = event.block_size * TOKEN_BYTES
        end = 0
        for block_hash in hashes:
            start, end = end, end + step
            parent = sha256(parent + packed[start:end]).digest()
            fits: bool | None = wire_hash(parent, seed) == block_hash
            if event.lora_name is not None:
                self._folds_adapters = self._folds_adapters or bool(fits)
                fits = fits or (False if self._folds_adapters else None)
            found.append(_Fit(parent, fits))
        return found


def _own_keys(event: BlockStored) -> list[Any]:
    """The extra keys of the first block, but for the adapter's name."""
    first = event.extra_keys[0] if event.extra_keys else None
    return [key for key in first or () if key != event.lora_name]


class _VLLM:
    """vLLM's `sha256_cbor`. `hash_seed`: the PYTHONHASHSEED of the engine, if it had one."""

    name = chain = "vllm-sha256-cbor"

    def __init__(self, hash_seed: str | None) -> None:
        seed = _NONE_HASH if hash_seed is None else hash_seed
        self._none_hash = sha256(cbor.encode(seed)).digest()

    def fit(
        self, event: BlockStored, hashes: Sequence[BlockHash], parent: bytes | None, packed: bytes
    ) -> list[_Fit] | None:
        told = event.parent_block_hash
        if told is None:
            parent = self._none_hash
        elif isinstance(told, bytes) and len(told) == DIGEST_BYTES:
            parent = told
        keys = event.extra_keys or [None] * len(hashes)
        if parent is None or len(keys) != len(hashes):
            return None
        found: list[_Fit] = []
        tokens = TokenIds(TokenBytes(packed)).tolist()
        size = event.block_size
        for number, block_hash in enumerate(hashes):
            head = cbor.array_head(3) + cbor.encode(parent)
            head += cbor.encode_ints(tokens[number * size : (number + 1) * size])
            raw = event.block_hashes[number]
            whole = isinstance(raw, bytes) and len(raw) == DIGEST_BYTES
            fits = False
            for entry in _entries(keys[number] or None, event.lora_name):
                parent = sha256(head + cbor.encode(entry)).digest()
                fits = raw == parent if whole else canonical_hash(parent) == block_hash
                if fits:
                    break
            found.append(_Fit(parent, fits))
        return found


def _entries(entry: list[Any] | None, lora_name: str | None) -> Iterator[list[Any] | None]:
    """What a block's extra keys may have been when they were hashed: a salt may be told by itself."""
    own = any(isinstance(key, str) and key != lora_name for key in entry or ())
    if own and entry is not None:
        yield [
            ["cache_salt", key] if isinstance(key, str) and key != lora_name else key
            for key in entry
        ]
    yield entry


class Verifier:
    """One stream's. `scheme`: one of `SCHEMES`; `hash_seed`: PYTHONHASHSEED of a vLLM that has one.

    Raises ValueError for another scheme, and a seed without one that has it.
    """

    def __init__(self, scheme: str = "auto", hash_seed: str | None = None) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"scheme: {scheme!r} is not one of {', '.join(SCHEMES)}")
        if hash_seed is not None and scheme not in ("auto", "vllm-sha256-cbor"):
            raise ValueError(f"hash_seed: {scheme} has none")
        made: dict[str, _Scheme] = {
            "sglang": _SGLang("sglang", HashFormat.SGLANG),
            "dynamo": _SGLang("dynamo", HashFormat.DYNAMO),
            "vllm-sha256-cbor": _VLLM(hash_seed),
        }
        self._schemes = list(made.values()) if scheme == "auto" else [made[scheme]]
        self._chosen = scheme != "auto"
        """Whether one of them is known to be it."""
        self._tried = 0
        self.verified = 0
        """Blocks whose hash is right."""
        self.wrong = 0
        self.unverifiable = 0

    @property
    def scheme(self) -> str | None:
        """What the hashes are made by; None: that is not known, or by nothing that was tried."""
        return self._schemes[0].name if self._chosen else None

    @property
    def gave_up(self) -> bool:
        """Whether blocks came that nothing fits, and none that something does."""
        return not self._chosen and self._tried > 0

    def stored(
        self,
        digests: dict[str, dict[BlockHash, bytes]],
        event: BlockStored,
        hashes: Sequence[BlockHash],
        packed: bytes,
    ) -> Iterator[tuple[BlockHash, str]]:
        """Those whose hash is another's, and why. `digests`: of blocks that are held, by chain; those of
        these blocks are put there. `packed`: the tokens, `block_size` for each hash.
        """
        if not self._chosen and self._tried >= _TRIALS:
            self.unverifiable += len(hashes)
            return
        told = event.parent_block_hash
        before = None if told is None else canonical_hash(told)
        results: list[tuple[_Scheme, list[_Fit]]] = []
        for scheme in self._schemes:
            known = digests.setdefault(scheme.chain, {})
            parent = None if before is None else known.get(before)
            try:
                found = scheme.fit(event, hashes, parent, packed)
            except (TypeError, ValueError, RecursionError):  # names and keys that none are made of
                found = None
            if found is not None:
                results.append((scheme, found))
                known.update(
                    (name, one.digest)
                    for name, one in zip(hashes, found, strict=True)
                    if one.digest is not None
                )
        if not results:
            self.unverifiable += len(hashes)
            return
        if not self._choose(results, len(hashes)):
            self.unverifiable += len(hashes)
            return
        scheme, found = results[0]
        for name, one in zip(hashes, found, strict=True):
            self.verified += one.fits is True
            self.unverifiable += one.fits is None
            if one.fits is False:
                self.wrong += 1
                yield name, f"its hash is not that of its tokens as {scheme.name} makes it"

    def _choose(self, results: list[tuple[_Scheme, list[_Fit]]], blocks: int) -> bool:
        """Leave out of `results` what does not fit where something does; whether anything ever did."""
        fitting = [
            (scheme, found)
            for scheme, found in results
            if any(one.fits for one in found) and not any(one.fits is False for one in found)
        ]
        if fitting:
            self._schemes = [scheme for scheme, _ in fitting]
            self._chosen = True
            results[:] = fitting
        elif not self._chosen:
            self._tried += blocks
        return self._chosen
