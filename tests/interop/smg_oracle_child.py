"""The process behind SmgOracle: the decoder and normalizer of smg-grpc-servicer, without sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from typing import Any

from interop_rpc import claim_stdout, serve
from smg_plain import plain_batch

_relay: Any = importlib.import_module("smg_grpc_servicer.kv_relay")


class Oracle:
    def __init__(self) -> None:
        self.reset(None)

    def reset(self, hash_check: str | None) -> None:
        self._normalizer, self._next_seq = _relay.Normalizer(hash_check), 0

    def decode(self, payload: bytes) -> dict[str, Any]:
        return dataclasses.asdict(_relay.decode_batch(payload))

    def normalize(self, payload: bytes) -> dict[str, Any]:
        batch = _relay.decode_batch(payload)
        told = self._normalizer.normalize_batch(batch, self._next_seq)
        self._next_seq += 1
        return plain_batch(told)

    def counts(self) -> dict[str, Any]:
        return dataclasses.asdict(self._normalizer.counts)

    def chain(self, tokens: list[int], block_size: int) -> list[int]:
        return [published for _, published in _relay.sglang_chain(tokens, block_size)]


def main() -> None:
    answers = claim_stdout()
    oracle = Oracle()
    names = ("reset", "decode", "normalize", "counts", "chain")
    asyncio.run(serve(answers, {name: getattr(oracle, name) for name in names}))


if __name__ == "__main__":
    main()
