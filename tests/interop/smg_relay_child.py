"""The process behind SmgRelay: the Python relay, or the Rust one with a gRPC client."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from interop_rpc import claim_stdout, loads, serve
from smg_plain import plain_batch

_grpc: Any = importlib.import_module("grpc")
_FOREVER_S = 30 * 24 * 3600


class Aborted(Exception):
    """The relay ended its stream with a gRPC status."""


class Context:
    """What the Python relay needs of a gRPC call."""

    def cancelled(self) -> bool:
        return False

    async def send_initial_metadata(self, _metadata: Any) -> None:
        """There is nobody to send it to."""

    async def abort(self, code: Any, details: str) -> None:
        raise Aborted(code.name, details)


class PythonRelay:
    """One relay per subscription, as in the servicer: it joins when the subscriber does."""

    address = None

    def __init__(self, config: dict[str, Any]) -> None:
        self._kv_relay: Any = importlib.import_module("smg_grpc_servicer.kv_relay")
        endpoint, replay_endpoint = config["endpoint"], config["replay_endpoint"]
        self._sources = [self._kv_relay.RankSource(0, endpoint, replay_endpoint)]
        self._hash_check = config["hash_check"]
        self._counts = self._kv_relay.Counts()

    async def stream(self) -> AsyncIterator[Any]:
        normalizer = self._kv_relay.Normalizer(self._hash_check)
        self._counts = normalizer.counts
        engine = self._kv_relay.Engine.SGLANG  # without effect on what it reads
        batches = self._kv_relay.relay(self._sources, engine, 0, Context(), normalizer=normalizer)
        async for batch in batches:
            yield batch

    def counts(self) -> dict[str, Any] | None:
        return dataclasses.asdict(self._counts)


class RustRelay:
    """One relay for the server's lifetime. The engine it would serve is never started."""

    def __init__(self, config: dict[str, Any]) -> None:
        servicer: Any = importlib.import_module("smg.servicer")
        self._common: Any = importlib.import_module("smg_grpc_proto.generated.common_pb2")
        stubs: Any = importlib.import_module("smg_grpc_proto.generated.sglang_scheduler_pb2_grpc")
        self._stub = stubs.SglangSchedulerStub
        # Relative paths: a long temporary folder would not fit into a socket's address.
        self._server = servicer.SglangGrpcServer(
            "127.0.0.1:0",
            "ipc://engine",
            "ipc://handshake",
            ".",
            server_args_json=json.dumps({"page_size": config["block_size"]}),
            engine_startup_timeout_secs=_FOREVER_S,
            kv_events_endpoint=config["endpoint"],
            kv_events_replay_endpoint=config["replay_endpoint"],
            kv_events_topic="",
        )
        self.address = self._server.address

    async def stream(self) -> AsyncIterator[Any]:
        request = self._common.SubscribeKvEventsRequest(start_sequence_number=0)
        async with _grpc.aio.insecure_channel(self.address) as channel:
            try:
                async for batch in self._stub(channel).SubscribeKvEvents(request):
                    if not (batch.HasField("load") and batch.load.load_only):
                        yield batch
            except _grpc.aio.AioRpcError as error:
                raise Aborted(error.code().name, error.details()) from None

    def counts(self) -> dict[str, Any] | None:
        return None


class Subscriptions:
    """Numbered from 0."""

    def __init__(self, relay: PythonRelay | RustRelay) -> None:
        self._relay = relay
        self._batches: list[list[dict[str, Any]]] = []
        self._errors: list[list[str] | None] = []
        self._tasks: list[asyncio.Task[None]] = []

    def subscribe(self) -> int:
        number = len(self._batches)
        self._batches.append([])
        self._errors.append(None)
        self._tasks.append(asyncio.ensure_future(self._collect(number)))
        return number

    async def _collect(self, number: int) -> None:
        try:
            async for batch in self._relay.stream():
                self._batches[number].append(plain_batch(batch))
        except Aborted as ended:
            self._errors[number] = list(ended.args)
        except Exception as error:
            self._errors[number] = [type(error).__name__, str(error)]
            raise

    def read(self, number: int, since: int) -> dict[str, Any]:
        return {"batches": self._batches[number][since:], "error": self._errors[number]}

    def counts(self) -> dict[str, Any] | None:
        return self._relay.counts()


async def main(config: dict[str, Any]) -> None:
    answers = claim_stdout()
    relay = RustRelay(config) if config["kind"] == "rust" else PythonRelay(config)
    subscriptions = Subscriptions(relay)
    names = ("subscribe", "read", "counts")
    handlers = {name: getattr(subscriptions, name) for name in names}
    await serve(answers, handlers, ready=relay.address)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(loads(sys.argv[1])))
