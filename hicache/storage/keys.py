"""How a page is called in a store: its key, and everything its bytes depend on.

`PageFormat` names keep pages of different models, dtypes, layouts, page sizes and ranks apart: a reader
with another format misses. The SGLang schemes spell names as SGLang 0.5.23 does, for those who look
pages up by its names; they carry neither dtype nor layout, so whoever shares a store must agree on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Self, TypeAlias

import msgspec

from hicache.arguments import check_int, check_kind
from hicache.pool import HostPool, KVShape, PagePool, Shape
from hicache.storage.backend import StorageError

__all__ = [
    "KeyScheme",
    "PageFormat",
    "default_keys",
    "file_keys",
    "sglang_file_keys",
    "sglang_mooncake_keys",
]

KeyScheme: TypeAlias = "Callable[[bytes], tuple[str, ...]]"
"""From a key to its names. Two names: the first half of the page (K) and the second (V)."""

_LAYOUT = "page_first/1"
"""Planes one after the other: K of every layer, V of every layer; in each, token by token."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the bytes of a page depend on besides its tokens.

    `model`: name and revision, as the operator tells models apart. `shape`: what this rank has, that is
    its part of the heads and its stage's layers. Raises ValueError for an empty model, a page size below
    1, and a rank that is not below its size.

    `PageFormat.of(pool, model)` takes shape and page size from a pool.
    """

    model: str
    shape: Shape
    page_size: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        check_kind("model", self.model, str)
        if not self.model:
            raise ValueError("model: empty")
        check_int("page_size", self.page_size, 1)
        _check_rank("tp", self.tp_rank, self.tp_size)
        _check_rank("pp", self.pp_rank, self.pp_size)

    @classmethod
    def of(
        cls, pool: PagePool | HostPool, model: str, *, tp_rank: int = 0, tp_size: int = 1
    ) -> Self:
        """That of a pool's pages. Raises as `PageFormat` does, and TypeError for what is no pool."""
        if not isinstance(pool, PagePool | HostPool):
            raise TypeError(f"pool: a {type(pool).__name__} is neither a PagePool nor a HostPool")
        return cls(model, pool.shape, pool.page_size, tp_rank, tp_size)

    def check(self, pool: HostPool) -> None:
        """Raises StorageError, naming what differs, unless the pool's pages are of this format."""
        for name, has, wanted in (
            ("dtype", pool.shape.dtype, self.shape.dtype),
            ("shape", pool.shape, self.shape),
            ("page_size", pool.page_size, self.page_size),
        ):
            if has != wanted:
                raise StorageError(f"{name}: the pool has {has}, the store is for {wanted}")

    @property
    def is_mla(self) -> bool:
        """Whether every tensor-parallel rank has the same bytes, as with latents."""
        return not isinstance(self.shape, KVShape)

    @property
    def bytes_per_page(self) -> int:
        """All planes."""
        shape = self.shape
        return self.page_size * shape.num_planes * prod(shape.plane_shape) * shape.dtype.itemsize

    @property
    def fingerprint(self) -> str:
        """16 hex digits, the same for the same format on every machine."""
        shape = self.shape
        tp = (0, 1) if self.is_mla else (self.tp_rank, self.tp_size)
        parts = (
            *(self.model, str(shape.dtype), _LAYOUT, self.page_size, shape.num_layers),
            *(shape.num_planes, shape.plane_shape, *tp, self.pp_rank, self.pp_size),
        )
        return sha256(msgspec.msgpack.encode(parts)).hexdigest()[:16]


def default_keys(form: PageFormat) -> KeyScheme:
    """`{key in hex}_{fingerprint}`: a page of another format is never found."""
    suffix = f"_{form.fingerprint}"
    return lambda key: (key.hex() + suffix,)


def file_keys(form: PageFormat) -> KeyScheme:
    """As paths, in a folder of the format's own: `{fingerprint}/{2 digits}/{default key}.kv`.

    Ranks that have the same latents have a folder each, `{fingerprint}_{tp rank}`: a store keeps the
    books of its files alone.
    """
    folder, names = form.fingerprint, default_keys(form)
    if form.is_mla and form.tp_size > 1:
        folder += f"_{form.tp_rank}"
    return lambda key: (f"{folder}/{key.hex()[:2]}/{names(key)[0]}.kv",)


def sglang_file_keys(form: PageFormat) -> KeyScheme:
    """As SGLang's file back end: `{hash}_{model}[_{tp rank}_{tp size}][_{pp size}_{pp rank}].bin`.

    Latents have no tp part, a single stage has no pp part.
    """
    suffix = f"_{_flat(form.model)}"
    if not form.is_mla:
        suffix += f"_{form.tp_rank}_{form.tp_size}"
    if form.pp_size > 1:
        suffix += f"_{form.pp_size}_{form.pp_rank}"
    return lambda key: (f"{key.hex()}{suffix}.bin",)


def sglang_mooncake_keys(form: PageFormat, tag: str = "") -> KeyScheme:
    """As SGLang's Mooncake back end: `[{tag}_]{model}_{hash}_{tp rank}[_{pp rank}]_k` and `…_v`.

    Latents have one object, `[{tag}_]{model}_{hash}_[{pp rank}]_k`. A single stage has no pp part.
    """
    prefix = f"{tag}_" if tag else ""
    prefix += _flat(form.model)
    stage = [str(form.pp_rank)] if form.pp_size > 1 else []
    if form.is_mla:
        suffix = "".join(stage)
        return lambda key: (f"{prefix}_{key.hex()}_{suffix}_k",)
    suffix = "_".join([str(form.tp_rank), *stage])
    return lambda key: (f"{prefix}_{key.hex()}_{suffix}_k", f"{prefix}_{key.hex()}_{suffix}_v")


def _flat(model: str) -> str:
    return model.replace("/", "-")


def _check_rank(kind: str, rank: int, size: int) -> None:
    if size < 1:
        raise ValueError(f"{kind}_size: {size} is below 1")
    if not 0 <= rank < size:
        raise ValueError(f"{kind}_rank: {rank} is not in 0..{size - 1}")
