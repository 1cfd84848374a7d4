"""How a sink spells a batch: one encoding of the events, among those that consumers read."""

from __future__ import annotations

import msgspec

from kvevents.codec import encode_batch
from kvevents.events import BlockStored, Event, KVEventBatch

__all__ = ["DIALECTS", "Speller"]

DIALECTS = ("sglang",)
"""The names a sink may give. `sglang`: events as maps, signed hashes, every key that SGLang's and vLLM's
decoders need.
"""

_NO_TOKENS: tuple[int, ...] = ()


class Speller:
    """Events to the payloads of one dialect, of one rank.

    `token_ids`: False leaves the tokens out, and with them what was asked of the model. Sinks that spell
    alike share a speller: a batch that is spelled for one of them is not encoded again for the next.
    """

    def __init__(self, dialect: str, dp_rank: int, *, token_ids: bool = True) -> None:
        """Raises ValueError for a dialect that is not in `DIALECTS`."""
        if dialect not in DIALECTS:
            raise ValueError(f"dialect: {dialect!r} is not in {', '.join(DIALECTS)}")
        self._dp_rank, self._token_ids = dp_rank, token_ids
        self._last: tuple[float, list[Event]] | None = None
        self._payload = b""

    def spell(self, ts: float, events: list[Event]) -> bytes:
        """The payload of these events, which must not change any more. `ts`: seconds since the epoch."""
        last = self._last
        if last is None or last[0] != ts or last[1] is not events:
            told = events if self._token_ids else [_redacted(event) for event in events]
            self._payload = encode_batch(KVEventBatch(ts, told, self._dp_rank))
            self._last = (ts, events)
        return self._payload


def _redacted(event: Event) -> Event:
    if not isinstance(event, BlockStored):
        return event
    return msgspec.structs.replace(event, token_ids=_NO_TOKENS)
