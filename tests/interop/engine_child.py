"""A process that is one engine: its real event structs and typed decoder, and its ZmqEventPublisher.

The child of `interop_rig`: {"engine", "folder", "publisher": options or None}. What the engine's module
imports of the engine, and is not in the folder, becomes a stub.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
from interop_rpc import Handler, claim_stdout, loads, serve

MODULES = {
    "sglang": "sglang.srt.disaggregation.kv_events",
    "vllm": "vllm.distributed.kv_events",
}
USED: dict[str, dict[str, Any]] = {
    "vllm": {"envs": SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True)},
    "vllm.config.utils": {"config": dataclasses.dataclass},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}
"""What is used of a stub, and not only imported."""


class Stub(ModuleType):
    """A package in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an engine's modules in a folder, and stubs for those that are not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in MODULES:
            return None
        place = self.folder / fullname.replace(".", "/")
        if (file := place.with_suffix(".py")).is_file():
            return importlib.util.spec_from_file_location(fullname, file)
        if (file := place / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(
                fullname, file, submodule_search_locations=[str(place)]
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(USED.get(module.__name__, {}))


class Codec:
    """Events as dicts on this side of the wire, the engine's own structs on the other."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._batch = module.KVEventBatch
        self._rank = self._batch.__struct_fields__[2]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(self._batch)

    def batch(self, ts: float, events: list[dict[str, Any]], dp_rank: int | None) -> Any:
        told = [self._event(event) for event in events]
        return self._batch(**{"ts": ts, "events": told, self._rank: dp_rank})

    def _event(self, fields: dict[str, Any]) -> Any:
        """The engine's struct, without the fields it has not."""
        kind = getattr(self._module, fields["type"])
        if fields.get("metadata") is not None:  # SGLang 0.5.18 has another struct for salted stores
            kind = self._module.BlockStoredWithMetadata
            metadata = self._module.BlockStoredMetadata(**fields["metadata"])
            fields = fields | {"metadata": metadata}
        return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})

    def encode(self, ts: float, events: list[dict[str, Any]], dp_rank: int | None) -> bytes:
        return self._encoder.encode(self.batch(ts, events, dp_rank))

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Every field of the engine's structs."""
        batch = self._decoder.decode(payload)
        events = [
            {"type": type(event).__name__}
            | {name: getattr(event, name) for name in event.__struct_fields__}
            for event in batch.events
        ]
        return {"ts": batch.ts, "events": events, "dp_rank": getattr(batch, self._rank)}


def publishing(module: Any, codec: Codec, options: dict[str, Any]) -> Handler:
    """What hands batches to the engine's publisher, and returns when all of them are sent."""
    publisher = module.ZmqEventPublisher(0, **options)

    def publish(batches: list[list[dict[str, Any]]]) -> None:
        for events in batches:
            publisher.publish(codec.batch(time.time(), events, None))
        publisher._event_queue.join()

    return publish


def main() -> None:
    answers = claim_stdout()
    config = loads(sys.argv[1])
    sys.meta_path.insert(0, Finder(Path(config["folder"])))
    module: Any = importlib.import_module(MODULES[config["engine"]])
    codec = Codec(module)
    handlers: dict[str, Handler] = {"encode": codec.encode, "decode": codec.decode}
    if config["publisher"] is not None:
        handlers["publish"] = publishing(module, codec, config["publisher"])
    asyncio.run(serve(answers, handlers))
    os._exit(0)


if __name__ == "__main__":
    main()
