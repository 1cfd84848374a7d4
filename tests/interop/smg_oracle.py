"""SMG's decoder and normalizer (smg-grpc-servicer), asked about payloads; no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from interop_process import venv_python
from interop_rpc import JsonChild

__all__ = ["SmgOracle"]


class SmgOracle:
    """One stream's decoder. Skips the test where SMG is not installed.

    `hash_check`: "sglang": every hash is computed from its tokens, as a worker does.
    """

    def __init__(self, hash_check: str | None = None) -> None:
        self._child = JsonChild(venv_python("smg"), "smg_oracle_child", {})
        try:
            self._child.ask("reset", hash_check=hash_check)
        except BaseException:
            self._child.stop()
            raise

    def decode(self, payload: bytes) -> dict[str, Any]:
        """{ts, events, dp_rank}; a bad event is of kind "malformed". Raises RemoteError for no batch."""
        found: dict[str, Any] = self._child.ask("decode", payload=payload)
        return found

    def normalize(self, payload: bytes) -> dict[str, Any]:
        """What a gateway would get for the next payload of the stream: {seq, ts, dp_rank, events}."""
        found: dict[str, Any] = self._child.ask("normalize", payload=payload)
        return found

    def counts(self) -> dict[str, Any]:
        """What was forwarded, what was `dropped` by reason, and how the hashes fared."""
        found: dict[str, Any] = self._child.ask("counts")
        return found

    def sglang_chain(self, tokens: Sequence[int], block_size: int) -> list[int]:
        """The hashes that SGLang publishes for these tokens, as SMG computes them."""
        found: list[int] = self._child.ask("chain", tokens=list(tokens), block_size=block_size)
        return found

    def __enter__(self) -> SmgOracle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop()
