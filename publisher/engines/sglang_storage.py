"""SGLang's third tier of local files, told as DISK: a HiCacheStorage for its `dynamic` back end.

Pages are kept by `hicache.FileStorage`, under SGLang's own page hashes, as SGLang's host pool lays them
out: bytes that only another pool of the same kind can read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransferResult,
)

from hicache.pool import MLAShape
from hicache.storage import PageFormat, StorageError
from publisher.engines.pages import ToldPages

__all__ = ["SidecarStorage"]

_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_OURS = ("directory", "max_bytes", "min_free_bytes")


class SidecarStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang's, untyped
    """`storage_config`: SGLang's; ours in its `extra_config` are `directory` (needed), `max_bytes` and
    `min_free_bytes`. Raises StorageError that names the key.
    """

    def __init__(self, storage_config: Any, _kwargs: Any = None) -> None:
        self._config = storage_config
        self._options = _read_options(storage_config)
        self._files: ToldPages | None = None

    # ------------------------------------------------------------------------------ host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the directory. Raises StorageError for one that cannot be had."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        form = _format(self._config, mem_pool_host, page)
        options = self._options
        self._files = ToldPages(
            options.directory,
            form,
            max_bytes=options.max_bytes,
            min_free_bytes=options.min_free_bytes,
            told=_is_of_a_publisher(self._config),
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises StorageError for a pool beside the KV pool: its state would be missing."""
        if str(host_pool_name) != str(PoolName.KV):
            raise StorageError(
                f"pool {host_pool_name}: only a model's KV pool can be stored in files"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def files(self) -> ToldPages:
        if self._files is None:
            raise StorageError("register_mem_pool_host: there is no host pool yet")
        return self._files

    # --------------------------------------------------------------------------------- looking

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many leading keys are stored."""
        return self.files.exists_prefix(_keys(keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """None of it can be used where a pool beside the KV pool is asked for too."""
        found = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: found} if found else {}
        others = [one for one in pool_transfers or () if str(one.name) != str(PoolName.KV)]
        usable = 0 if others else found
        return PoolTransferResult(usable, hits, list(range(1, usable + 1)))

    # --------------------------------------------------------------------------------- reading

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Fill flat pages; None for each from the first on that cannot be had."""
        targets = target_locations or [None] * len(keys)
        if any(one is None for one in targets):
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        filled = self.files.read(_keys(keys), lambda place, page: _fill(targets[place], page))
        return [*targets[:filled], *[None] * (len(keys) - filled)]

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Fill the host pool's pages at `host_indices`, a page's worth for each key."""
        firsts = self._firsts(keys, host_indices)
        pool = self.mem_pool_host
        page = pool.get_dummy_flat_data_page()

        def fill(place: int, content: torch.Tensor) -> None:
            _fill(page, content)
            pool.set_from_flat_data_page(firsts[place], page)

        filled = self.files.read(_keys(keys), fill)
        return [place < filled for place in range(len(keys))]

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, extra_info, self.batch_get_v1)

    # --------------------------------------------------------------------------------- writing

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store flat pages that follow each other; whether all are stored now."""
        return self.files.write(_keys(keys), None, lambda place: values[place]) == len(keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store the host pool's pages at `host_indices`."""
        firsts, pool = self._firsts(keys, host_indices), self.mem_pool_host
        before = getattr(extra_info, "prefix_keys", None)
        prefix = None if before is None else _keys(before[-1:])
        stored = self.files.write(
            _keys(keys), prefix, lambda place: pool.get_data_page(firsts[place], flat=True)
        )
        return [place < stored for place in range(len(keys))]

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, extra_info, self.batch_set_v1)

    # ------------------------------------------------------------------------------------- end

    def clear(self) -> bool:  # SGLang's file back end answers too
        """Forget every page."""
        self.files.clear()
        return True

    def close(self) -> None:
        """Let others have the directory; the pages stay. Safe to call twice."""
        if self._files is not None:
            self._files.close()

    def _firsts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        """The index of each page's first token. Raises ValueError for another number of indices."""
        size = self.mem_pool_host.page_size
        if host_indices.numel() != len(keys) * size:
            raise ValueError(
                f"host_indices: {host_indices.numel()} for {len(keys)} pages of {size}"
            )
        return host_indices[::size].tolist()

    def _each(
        self, transfers: Any, extra_info: Any, call: Callable[[Any, Any, Any], list[bool]]
    ) -> dict[str, list[bool]]:
        done: dict[str, list[bool]] = {}
        for one in transfers:
            keys = one.keys or []
            known = str(one.name) == str(PoolName.KV)
            done[one.name] = (
                call(keys, one.host_indices, extra_info) if known else [False] * len(keys)
            )
        return done


@dataclass(frozen=True, slots=True)
class _Options:
    directory: str
    max_bytes: int | None
    min_free_bytes: int


def _keys(keys: Sequence[str]) -> list[bytes]:
    """Raises ValueError for one that is no digest in hex."""
    return [bytes.fromhex(key) for key in keys]


def _fill(page: torch.Tensor, content: torch.Tensor) -> None:
    page.view(torch.uint8).copy_(content)


def _format(config: Any, pool: Any, page: torch.Tensor) -> PageFormat:
    """All that a page's bytes depend on. They are SGLang's: only their number has a meaning here."""
    num_bytes = page.numel() * page.element_size()
    if num_bytes % pool.page_size:
        raise StorageError(f"page_size: {num_bytes} bytes are not {pool.page_size} tokens")
    kind = "latent" if config.is_mla_model else "kv"
    parts = (config.model_name or "model", "sglang", pool.layout, page.dtype, kind)
    ranks = (config.dp_rank, config.attn_cp_rank, config.attn_cp_size, config.should_split_heads)
    stage = (config.tp_rank, config.tp_size, config.pp_rank, config.pp_size)
    model = "|".join(map(str, (*parts, *ranks, *stage)))
    shape = MLAShape(num_layers=1, latent_dim=num_bytes // pool.page_size, dtype=torch.uint8)
    return PageFormat(model, shape, pool.page_size)


def _is_of_a_publisher(config: Any) -> bool:
    """Whether this is one of the ranks of which SGLang has a publisher: one for each cache."""
    return not (config.tp_rank or config.pp_rank or config.attn_cp_rank)


def _read_options(config: Any) -> _Options:
    told = dict(config.extra_config or {})
    for key in told:
        if key not in (*_OF_SGLANG, *_OURS):
            raise StorageError(f"{key}: no such key; there are {', '.join(_OURS)}")
    directory = told.get("directory")
    if not isinstance(directory, str) or not directory:
        raise StorageError(f"directory: {directory!r} is not a path; it is needed")
    for key in ("max_bytes", "min_free_bytes"):
        if key in told and (type(told[key]) is not int or told[key] < 0):
            raise StorageError(f"{key}: {told[key]!r} is not a number of bytes")
    if config.is_mla_model and config.tp_size > 1:
        raise StorageError(
            f"tp_size: {config.tp_size}: of latents SGLang has one rank write for all, and a directory"
            " of files is one rank's"
        )
    return _Options(directory, told.get("max_bytes"), told.get("min_free_bytes", 1 << 30))
