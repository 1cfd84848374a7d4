"""A process that is an engine's publisher: the real ZmqEventPublisher, fed by lines on stdin.

Run by the interpreter of the engines' environment: engine_child.py ENGINE FOLDER OPTIONS. Each line is a
JSON list of batches, each a list of events; it is answered once all are sent. Ends with its stdin. What
the engine's module imports of the engine, and is not in FOLDER, becomes a stub.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
        file = (self.folder / fullname.replace(".", "/")).with_suffix(".py")
        if file.is_file():
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(USED.get(module.__name__, {}))


def build(module: Any, fields: dict[str, Any]) -> Any:
    """The engine's struct of an event, without the fields it has not."""
    kind = getattr(module, fields["type"])
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})


def main() -> None:
    engine, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.meta_path.insert(0, Finder(folder))
    module: Any = importlib.import_module(MODULES[engine])
    publisher = module.ZmqEventPublisher(0, **options)
    print("ready", flush=True)
    for line in sys.stdin:
        for events in json.loads(line):
            told = [build(module, event) for event in events]
            publisher.publish(module.KVEventBatch(ts=time.time(), events=told))
        publisher._event_queue.join()
        print("sent", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
