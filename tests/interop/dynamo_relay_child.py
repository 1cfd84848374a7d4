"""The process behind `dynamo_relay.DynamoRelay`: KvEventPublisher, event plane, KvRouter."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
from typing import Any

from interop_rpc import claim_stdout, loads, serve

MODEL = "org/model"

llm: Any = importlib.import_module("dynamo.llm")
runtime: Any = importlib.import_module("dynamo.runtime")


def model_card(dp_size: int) -> Any:
    card = llm.ModelRuntimeConfig()
    card.total_kv_blocks = 1_000_000
    card.max_num_seqs = 256
    card.max_num_batched_tokens = 1_000_000
    card.enable_local_indexer = True
    card.data_parallel_start_rank = 0
    card.data_parallel_size = dp_size
    card.kv_event_publishing_enabled = True
    return card


async def start_worker(endpoint: Any, block_size: int, dp_size: int) -> asyncio.Future[Any]:
    """Serve an endpoint that does nothing, and register a model without any files for it."""

    async def handler(_request: Any) -> Any:
        yield {}

    serving: asyncio.Future[Any] = asyncio.ensure_future(endpoint.serve_endpoint(handler))
    with tempfile.TemporaryDirectory() as folder:
        await llm.register_model(
            llm.ModelInput.Tokens,
            llm.ModelType.Completions,
            endpoint,
            folder,
            MODEL,
            worker_type=llm.WorkerType.Aggregated,
            kv_cache_block_size=block_size,
            runtime_config=model_card(dp_size),
            skip_model_assets=True,
        )
    return serving


async def main(config: dict[str, Any]) -> None:
    answers = claim_stdout()
    block_size, sources = config["block_size"], config["sources"]
    loop = asyncio.get_running_loop()
    distributed = runtime.DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    endpoint = distributed.endpoint("test.backend.generate")
    serving = await start_worker(endpoint, block_size, len(sources))
    relays = [
        llm.KvEventPublisher(
            endpoint,
            kv_block_size=block_size,
            dp_rank=dp_rank,
            enable_local_indexer=True,
            zmq_endpoint=source,
            zmq_topic="",
        )
        for dp_rank, source in enumerate(sources)
    ]
    router = llm.KvRouter(endpoint, block_size, llm.KvRouterConfig())

    async def dump() -> Any:
        return json.loads(await router.dump_events())

    async def scores(tokens: list[int], lora_name: str | None, cache_salt: str | None) -> Any:
        await dump()  # it comes after the events that were received
        found = await router.get_overlap_scores(
            tokens, lora_name=lora_name, cache_namespace=cache_salt
        )
        return found["workers"]

    await serve(answers, {"dump": dump, "scores": scores}, ready=len(relays))
    serving.cancel()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(loads(sys.argv[1])))
