"""SGLang 0.5.23: RadixCache, and UnifiedRadixCache in Python or Rust with an optional host tier.

Run as `-m benchmarks.kit.peers.sglang_cache {radix|python|rust}`.
"""

from __future__ import annotations

import argparse
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any

from . import quiet  # noqa: F401  first
from .absent import stand_in

if home := os.environ.get("BENCH_HOME"):  # the first event compiles a SHA-256 extension
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(home) / "build" / "torch_extensions"))
stand_in("IPython", "torchvision", "triton")

import sglang
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base as host_base
from sglang.srt.mem_cache.pool_host import common as host_common
from sglang.srt.mem_cache.pool_host import mha as host_mha
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from .host import serve
from .interface import CachePeer

KINDS = ("radix", "python", "rust")
STEPS = ("match", "load", "lock", "evict", "alloc", "insert", "poll", "take")
ROW = {"dtype": torch.float16, "device": "cpu"}  # one layer, one head of 8: bookkeeping dominates


class HostCopies:
    """Stands in for the CUDA copy between tiers."""

    def __init__(self) -> None:
        self.real = True
        self.tokens = 0

    def __call__(
        self,
        src_layers: Any,
        dst_layers: Any,
        src_indices: Any,
        dst_indices: Any,
        page_size: int,  # noqa: ARG002
    ) -> None:
        self.tokens += len(src_indices)
        if self.real:
            for source, target in zip(src_layers, dst_layers, strict=True):
                target.index_copy_(0, dst_indices, source.index_select(0, src_indices))


def without_cuda() -> HostCopies:
    """Replace the three CUDA calls of the host tier: pin, unpin, copy."""
    copies = HostCopies()
    host_common._cuda_host_register = lambda *_, **__: None
    for module in (host_common, host_mha, host_base):
        module._cuda_host_unregister = lambda *_, **__: None
    host_mha.transfer_kv_direct = copies
    host_mha.require_kvcacheio_ops = lambda *_, **__: None
    return copies


class SGLangCache(CachePeer):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._copies = without_cuda()
        self._policy = "write_through"
        self._cache: Any = None
        self.build(page_size=64, device_tokens=4096, host_ratio=0, events=True)
        self.run_request(array("q", range(640)))  # compiles; not timed
        self.take_events()

    def option(self, name: str, value: str) -> None:
        match name, value:
            case "policy", "write_through" | "write_back" | "write_through_selective":
                self._policy = value
            case "copy", "yes" | "no":
                self._copies.real = value == "yes"
            case _:
                super().option(name, value)

    def build(self, page_size: int, device_tokens: int, host_ratio: float, *, events: bool) -> None:
        if host_ratio and self._kind == "radix":
            raise ValueError("RadixCache has no host tier here; use python or rust")
        arguments = ServerArgs(
            model_path="none",
            page_size=page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_write_policy=self._policy,
            hicache_ratio=host_ratio or 2.0,
        )
        set_global_server_args_for_scheduler(arguments)
        self._page, self._capacity = page_size, device_tokens // page_size * page_size
        pool = MHATokenToKVPool(
            size=device_tokens,
            page_size=page_size,
            head_num=1,
            head_dim=8,
            layer_num=1,
            enable_memory_saver=False,
            **ROW,
        )
        paged = {} if page_size == 1 else {"page_size": page_size}
        allocator = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        self._allocator = allocator(
            size=device_tokens, kvcache=pool, need_sort=False, **ROW, **paged
        )
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=2, max_context_len=256, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self._allocator,
            page_size=page_size,
            enable_kv_cache_events=events,
            eviction_policy="lru",
            tree_components=(ComponentType.FULL,),
            tree_core_backend=None if self._kind == "radix" else self._kind,
        )
        self._cache = (RadixCache if self._kind == "radix" else UnifiedRadixCache)(parameters)
        self._host = bool(host_ratio)
        if self._host:
            self._cache.init_hicache(arguments, parameters)
        self._take = (
            self._cache.kv_events.take if self._kind == "radix" else self._cache.take_events
        )
        self._take()
        self._copies.tokens = 0
        self._ns = dict.fromkeys(STEPS, 0)
        self._tokens = dict.fromkeys(("prompt", "hit", "host_hit", "new", "evicted"), 0)

    def run_request(self, tokens: array[int]) -> None:
        cache, ns, count, length = self._cache, self._ns, self._tokens, len(tokens)
        at = now()
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        node, prefix = match.last_device_node, match.device_prefix_len
        at = self._lap("match", at)
        if self._host and match.host_hit_length:
            if cache.load_back(match.best_match_node):
                cache.ready_to_load_host_cache()
                cache.loading_check()
                node = match.best_match_node
                prefix += match.host_hit_length
                count["host_hit"] += match.host_hit_length
            at = self._lap("load", at)
        lock = cache.inc_lock_ref(node)
        at = self._lap("lock", at)
        if need := length - prefix:
            at = self._store(tokens, node, prefix, at)
        if self._kind == "radix":
            cache.dec_lock_ref(node)
        else:
            cache.dec_lock_ref(node, lock.to_dec_params())
        at = self._lap("lock", at)
        if self._host:
            cache.check_hicache_events()
            ns["poll"] += now() - at
        count["prompt"] += length
        count["hit"] += prefix
        count["new"] += need

    def _store(self, tokens: array[int], node: Any, prefix: int, at: int) -> int:
        need = len(tokens) - prefix
        if (free := self._allocator.available_size()) < need:
            evicted = self._cache.evict(EvictParams(num_tokens=need - free))
            self._tokens["evicted"] += evicted.num_tokens_evicted
        at = self._lap("evict", at)
        pages = self._allocator.alloc(need)
        assert pages is not None, f"no room for {need} tokens"
        if prefix:
            pages = torch.cat([self._cache.path_device_indices(node), pages])
        at = self._lap("alloc", at)
        self._cache.insert(InsertParams(key=RadixKey(tokens), value=pages, prev_prefix_len=prefix))
        return self._lap("insert", at)

    def _lap(self, step: str, since: int) -> int:
        at = now()
        self._ns[step] += at - since
        return at

    def take_events(self) -> Sequence[Any]:
        at = now()
        events: Sequence[Any] = self._take()
        self._lap("take", at)
        return events

    def stats(self) -> dict[str, Any]:
        totals = {f"{name}_tokens": value for name, value in self._tokens.items()}
        return {**totals, "copied_tokens": self._copies.tokens, "calls": dict(self._ns)}

    def check(self) -> None:
        cache = self._cache
        sizes = (cache.evictable_size(), cache.protected_size(), self._allocator.available_size())
        assert sum(sizes) == self._capacity, f"{sizes} do not add up to {self._capacity}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    chosen = parser.parse_args().kind
    torch.set_num_threads(1)
    serve(SGLangCache(chosen), name=f"sglang-{chosen}", version=sglang.__version__)
