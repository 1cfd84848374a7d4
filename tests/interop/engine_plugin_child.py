"""A process that is one rank of an engine with our plugin in it.

The engine's real modules load the plugin, make the publisher, and publish; SGLang's also make the
storage, and keep pages in it.

The child of `plugin_rig`: {"engine", "folder", "entry_points", "rank", "ranks", "block_size"}.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from engine_child import MODULES, USED, Codec, Finder
from interop_rpc import Handler, claim_stdout, loads, serve


def use(config: dict[str, Any]) -> None:
    """What the engine's modules use of those that are not there."""
    rank, ranks = config["rank"], config["ranks"]
    parallel = SimpleNamespace(
        pp_rank=0,
        attn_tp_rank=0,
        attn_cp_rank=0,
        attn_dp_size=ranks,
        attn_dp_rank=rank,
        dp_rank=rank,
        num_dp_ranks=ranks,
        attn_dcp_size=1,
    )
    args = SimpleNamespace(served_model_name="org/model", model_path="", size=config["block_size"])
    USED.update(
        {
            "sglang.srt.runtime_context": {
                "get_parallel": lambda: parallel,
                "get_server_args": lambda: args,
            },
            "sglang.srt.arg_groups.overrides": {"kv_event_block_size_of": lambda one: one.size},
            "sglang.srt.managers.io_struct": {
                "hook_custom_types": lambda kind: kind,
                "sock_send": print,
            },
            "sglang.srt.utils": {
                f"is_{kind}": lambda: False for kind in ("cuda", "hip", "mps", "npu", "xpu")
            },
            "sglang.srt.mem_cache.utils": {"get_storage_hash_str": page_hashes},
            "vllm.envs": {"VLLM_PLUGINS": None},
            "vllm.utils.network_utils": {
                "get_ip": lambda: "127.0.0.1",
                "get_tcp_uri": lambda host, port: f"tcp://{host}:{port}",
            },
        }
    )


def page_hashes(tokens: Sequence[int], last: str | None, page_size: int) -> list[str]:
    """SGLang's page hashes, which are native code there."""
    digest, found = bytes.fromhex(last or ""), []
    for at in range(0, len(tokens) - page_size + 1, page_size):
        page = struct.pack(f"<{page_size}I", *tokens[at : at + page_size])
        digest = hashlib.sha256(digest + page).digest()
        found.append(digest.hex())
    return found


def install(entry_points: str) -> None:
    """As an installed package has them."""
    folder = Path(tempfile.mkdtemp(dir=".")).absolute()
    info = folder / "kvevents_plugins-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvevents-plugins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points)
    sys.path.append(str(folder))


class Rank:
    """The rank's publisher, and what is asked of it."""

    def __init__(self, engine: str, module: Any, codec: Codec, rank: int) -> None:
        self._engine, self._module, self._codec, self._rank = engine, module, codec, rank
        self.publisher: Any = None
        self._taken: list[Any] = []

    def load(self) -> str:
        """Have the engine load its plugins, as it does in each process, and more than once."""
        plugins: Any = importlib.import_module(
            "sglang.srt.plugins" if self._engine == "sglang" else "vllm.plugins"
        )
        load = plugins.load_plugins if self._engine == "sglang" else plugins.load_general_plugins
        load()
        if self._engine == "sglang":
            plugins._plugins_loaded = False
        else:
            plugins.plugins_loaded = False
        load()
        registry = self._module.EventPublisherFactory._registry
        return str(sorted(f"{name}={kind.__name__}" for name, kind in registry.items()))

    def create(self, config: Any) -> str:
        """The publisher, made by the engine. `config`: SGLang's text, or vLLM's keys."""
        if self._engine == "sglang":
            made: Any = importlib.import_module(
                "sglang.srt.managers.scheduler_components.kv_events_publisher"
            )
            self._scheduler = made.SchedulerKvEventsPublisher(
                kv_events_config=config,
                tree_cache=SimpleNamespace(take_events=self._take),
                send_metrics_from_scheduler=None,
                max_running_requests=1,
                max_total_num_tokens=1,
                get_stats=None,
            )
            self.publisher = self._scheduler.kv_event_publisher
        else:
            kinds: Any = importlib.import_module("vllm.config.kv_events")
            self.publisher = self._module.EventPublisherFactory.create(
                kinds.KVEventsConfig(**config), self._rank
            )
        return type(self.publisher).__name__

    def _take(self) -> list[Any]:
        taken, self._taken = self._taken, []
        return taken

    def publish(self, batches: list[list[dict[str, Any]]]) -> float:
        """As the scheduler does; the longest time that it took of one, in seconds."""
        longest = 0.0
        for events in batches:
            batch = self._codec.batch(time.time(), events, None)
            began = time.perf_counter()
            if self._engine == "sglang":
                self._taken = batch.events
                self._scheduler.publish_kv_events()
            else:
                self.publisher.publish(batch)
            longest = max(longest, time.perf_counter() - began)
        return longest

    def publish_oddities(self) -> None:
        """What no engine should hand over."""
        batch = self._codec.batch(time.time(), [], None)
        for events in ([None], [object(), 5], 7, None):
            batch.events = events
            self.publisher.publish(batch)

    def read(self, events: list[dict[str, Any]]) -> bytes:
        """The engine's objects as ours, without the engine's payload."""
        from publisher.engines.events import EventReader

        objects = self._codec.batch(0.0, events, 0).events
        return msgspec.msgpack.encode((0.0, EventReader().read(objects), 0))

    def describe(self, block_size: int) -> Any:
        if self._engine == "sglang":
            return self._scheduler.local_kv_event_sources(block_size)
        config = self.publisher.get_publisher_config()
        return None if config is None else vars(config)

    def sidecar(self) -> int:
        """Its process id; 0 while there is none."""
        sidecar = self.publisher._sidecar.sidecar
        return 0 if sidecar is None else int(sidecar.pid)

    def shutdown(self) -> None:
        self.publisher.shutdown()
        self.publisher.shutdown()

    def handlers(self) -> dict[str, Handler]:
        return {
            "create": self.create,
            "describe": self.describe,
            "encode": self._codec.encode,
            "decode": self._codec.decode,
            "load": self.load,
            "publish": self.publish,
            "read": self.read,
            "publish_oddities": self.publish_oddities,
            "shutdown": self.shutdown,
            "sidecar": self.sidecar,
        }


class Pages:
    """SGLang's storage, and a host pool of its own, by SGLang's own classes."""

    PAGES, SIZE, LAYERS, HEADS, DIM = 40, 4, 2, 2, 8

    def attach(
        self, extra: dict[str, Any], layout: str = "page_first", **config: Any
    ) -> dict[str, Any]:
        import torch

        self._torch = torch
        storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory: Any = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
        control: Any = importlib.import_module("sglang.srt.managers.cache_controller")
        mha: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
        ranks = {
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
            **dict.fromkeys(("is_mla_model", "enable_storage_metrics"), False),
            "model_name": "org/model",
            **config,
        }
        told = storage.HiCacheStorageConfig(
            is_page_first_layout=layout == "page_first", extra_config=extra, **ranks
        )
        pool = mha.MHATokenToKVPoolHost.__new__(mha.MHATokenToKVPoolHost)
        shapes = {
            "page_first": (2, self.PAGES * self.SIZE, self.LAYERS, self.HEADS, self.DIM),
            "layer_first": (2, self.LAYERS, self.PAGES * self.SIZE, self.HEADS, self.DIM),
        }
        vars(pool).update(
            layout=layout,
            page_size=self.SIZE,
            layer_num=self.LAYERS,
            head_num=self.HEADS,
            head_dim=self.DIM,
            dtype=torch.bfloat16,
            device="cpu",
            pin_memory=False,
            kv_buffer=torch.zeros(shapes[layout], dtype=torch.bfloat16),
        )
        self._pool = pool
        self.backend = factory.StorageBackendFactory.create_backend("dynamic", told, pool)
        self.backend.register_mem_pool_host(pool)
        self.backend.on_host_pools_registered()
        self._info, self._transfer = storage.HiCacheStorageExtraInfo, storage.PoolTransfer
        kind = control.HiCacheController
        self._controller = SimpleNamespace(
            storage_backend=self.backend, storage_host_pool=pool, page_size=self.SIZE
        )
        zero_copy = bool(extra.get("interface_v1"))
        names = ("_page_set_zero_copy", "_page_get_zero_copy")
        if not zero_copy:
            names = ("_generic_page_set", "_generic_page_get")
        self._controller.page_set_func = getattr(kind, names[0]).__get__(self._controller)
        self._controller.page_get_func = getattr(kind, names[1]).__get__(self._controller)
        self._kind = kind
        return {"class": type(self.backend).__name__, "base": storage.HiCacheStorage.__name__}

    def _indices(self, first_page: int, count: int) -> Any:
        first = first_page * self.SIZE
        return self._torch.arange(first, first + count * self.SIZE)

    def backup(self, tokens: list[int], last: str | None, prefix: list[str] | None) -> int:
        """Fill host pages with bytes of these tokens, and have SGLang write them; tokens written."""
        keys = page_hashes(tokens, last, self.SIZE)
        generator = self._torch.Generator().manual_seed(tokens[0])
        for place in range(len(keys)):
            page = self._pool.get_dummy_flat_data_page()
            page.copy_(self._torch.randn(page.shape, generator=generator))
            self._pool.set_from_flat_data_page(place * self.SIZE, page)
        operation = SimpleNamespace(
            prefix_keys=prefix,
            hash_value=keys,
            host_indices=self._indices(0, len(keys)),
            completed_tokens=0,
        )
        self._kind._page_backup(self._controller, operation)
        return int(operation.completed_tokens)

    def hits(self, tokens: list[int]) -> int:
        """How many tokens SGLang finds stored."""
        operation = SimpleNamespace(last_hash=None, token_ids=tokens, prefix_keys=None)
        _, count = self._kind._storage_hit_query(self._controller, operation)
        return int(count)

    def fetch(self, tokens: list[int]) -> int:
        """Have SGLang read pages into the other half of the pool; how many equal what was written."""
        keys = page_hashes(tokens, None, self.SIZE)
        half = self.PAGES // 2
        operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        count = self._controller.page_get_func(operation, keys, self._indices(half, len(keys)))
        equal = [
            self._torch.equal(
                self._pool.get_data_page(place * self.SIZE),
                self._pool.get_data_page((half + place) * self.SIZE),
            )
            for place in range(count)
        ]
        return sum(equal)

    def v2(self, tokens: list[int]) -> dict[str, Any]:
        """The calls of the controller of hybrid models, for a KV pool and another."""
        keys = page_hashes(tokens, None, self.SIZE)
        kv = self._transfer(
            name="kv", keys=keys, host_indices=self._indices(self.PAGES // 2, len(keys))
        )
        other = self._transfer(name="mamba", keys=keys[:1], host_indices=self._indices(0, 1))
        alone = self.backend.batch_exists_v2(keys, [], None)
        beside = self.backend.batch_exists_v2(keys, [other], None)
        return {
            "alone": [alone.kv_hit_pages, alone.restorable_prefix_pages],
            "beside": beside.kv_hit_pages,
            "get": self.backend.batch_get_v2([kv, other]),
            "set": self.backend.batch_set_v2([kv], self._info(prefix_keys=[])),
        }

    def singly(self, tokens: list[int]) -> dict[str, Any]:
        """The calls for one page, and for too few indices, of the first interface."""
        (key,) = page_hashes(tokens, None, self.SIZE)
        page = self._pool.get_dummy_flat_data_page()
        page.copy_(self._torch.arange(page.numel()))
        before = self.backend.exists(key), self.backend.get(key)
        stored = self.backend.set(key, page)
        found = self.backend.get(key)
        try:
            self.backend.batch_set_v1([key], self._indices(0, 1)[:-1])
            said = ""
        except ValueError as error:
            said = str(error)
        return {
            "before": before,
            "stored": stored,
            "exists": self.backend.exists(key),
            "equal": found is not None and self._torch.equal(found, page),
            "said": said,
        }

    def other_pool(self) -> None:
        self.backend.register_mem_host_pool_v2(self._pool, "kv")
        self.backend.register_mem_host_pool_v2(self._pool, "mamba")

    def clear(self) -> bool:
        return bool(self.backend.clear())

    def close(self) -> None:
        self.backend.close()

    def handlers(self) -> dict[str, Handler]:
        return {
            f"pages_{name}": getattr(self, name)
            for name in (
                *("attach", "backup", "hits", "fetch", "v2", "singly"),
                *("other_pool", "clear", "close"),
            )
        }


def main() -> None:
    answers = claim_stdout()
    config = loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    use(config)
    install(config["entry_points"])
    sys.meta_path.insert(0, Finder(Path(config["folder"])))
    module: Any = importlib.import_module(MODULES[config["engine"]])
    rank = Rank(config["engine"], module, Codec(module), config["rank"])
    asyncio.run(serve(answers, rank.handlers() | Pages().handlers()))
    os._exit(0)


if __name__ == "__main__":
    main()
