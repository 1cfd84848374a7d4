"""A stream, one line per event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvevents.gaps import Gap, Lost, Restarted
from kvevents.hashing import canonical_hash
from publisher.config import ConfigError, check_endpoint
from publisher.subscriber import Batch, Received, Subscriber, Undecodable

__all__ = ["Earlier", "json_lines", "tail", "text_lines"]

_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Controls and line ends that JSON leaves as they are; outside its strings there are none."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """`count` batches of the stream came before the first one seen. Nobody was asked for them."""

    count: int


def tail(
    endpoint: str,
    replay_endpoint: str | None,
    *,
    topic: str,
    count: int | None,
    as_json: bool,
    timeout_s: float | None,
    write: Callable[[str], None],
    server_key: str | None = None,
    client_keys: tuple[str, str] | None = None,
) -> bool:
    """Write lines until `count` events have been written or nothing came for `timeout_s`; what is said of
    the stream besides is no event.

    `server_key`, `client_keys`: see `Subscriber`. Returns whether anything came at all. Raises
    ConfigError for an endpoint that cannot be.
    """
    for key, address in (("ENDPOINT", endpoint), ("--replay-endpoint", replay_endpoint)):
        if address is not None:
            check_endpoint(key, address)
            if address.startswith("tcp://") and address.endswith((":0", ":*")):
                raise ConfigError(f"{key}: {address!r} is where a publisher binds; name its port")
            if address.startswith("tcp://*"):
                raise ConfigError(f"{key}: {address!r} is where a publisher binds; name a host")
    lines_of = json_lines if as_json else text_lines
    seen, written = False, 0
    with Subscriber(
        endpoint, replay_endpoint, topic=topic, server_key=server_key, client_keys=client_keys
    ) as subscriber:
        while received := subscriber.receive(timeout_s):
            seen = True
            for one in received:
                for line in lines_of(_as_joined(one) if replay_endpoint is None else one):
                    write(line)
                    written += isinstance(one, Batch)
                    if written == count:
                        return True
    return seen


def _as_joined(received: Received) -> Received | Earlier:
    """Without a replay endpoint, all from 0 up to the first batch is missing and nothing is lost."""
    match received:
        case Lost(first=0, count=count):
            return Earlier(count)
    return received


def text_lines(received: Received | Earlier) -> Iterator[str]:
    """One line for each event, or for what went wrong; only characters that can be printed."""
    for line in _text_lines(received):
        if line.isprintable():
            yield line
        else:
            yield "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _text_lines(received: Received | Earlier) -> Iterator[str]:
    match received:
        case Batch():
            stamp = _clock(received.batch.ts)
            for event in received.batch.events:
                yield f"{stamp} {received.seq:>8} {_text(event)}"
            for skipped in received.skipped:
                yield f"{stamp} {received.seq:>8} SKIPPED event {skipped.position}: {skipped.reason}"
        case Undecodable():
            head = received.payload[:16].hex()
            yield f"{'':12} {received.seq:>8} UNDECODABLE {received.reason} ({head}…)"
        case Gap():
            yield f"{'':12} {received.first:>8} GAP {received.count} missing, asking for a replay"
        case Lost():
            yield f"{'':12} {received.first:>8} LOST {received.count} that nobody has any more"
        case Restarted():
            yield f"{'':12} {received.seq:>8} RESTART of the publisher"
        case Earlier():
            came = _number(received.count, "batch came", "batches came")
            yield f"{'':12} {0:>8} {came} before; --replay-endpoint asks for their state"


def json_lines(received: Received | Earlier) -> Iterator[str]:
    """The same as JSON objects. 64-bit hashes are strings: JSON numbers lose their low bits."""
    match received:
        case Batch():
            batch = received.batch
            common = {"ts": batch.ts, "seq": received.seq, "dp_rank": batch.dp_rank}
            common["replayed"] = received.replayed
            for event in batch.events:
                yield _json(common | _plain(event))
            for skipped in received.skipped:
                yield _json(common | {"type": "Skipped", "reason": skipped.reason})
        case Undecodable():
            yield _json(
                {
                    "seq": received.seq,
                    "type": "Undecodable",
                    "reason": received.reason,
                    "payload": received.payload.hex(),
                }
            )
        case Gap() | Lost():
            kind = type(received).__name__
            yield _json({"seq": received.first, "type": kind, "count": received.count})
        case Restarted():
            yield _json({"seq": received.seq, "type": "Restarted"})
        case Earlier():
            yield _json({"seq": 0, "type": "Earlier", "count": received.count})


def _text(event: Event) -> str:
    match event:
        case BlockStored():
            short, parent = _short(event.block_hashes[:1]), event.parent_block_hash
            after = "start" if parent is None else _short([parent])
            extras = "".join(
                f" {name}={value!r}"
                for name in ("lora_name", "cache_salt", "extra_key")
                if (value := getattr(event, name)) is not None
            )
            return (
                f"stored  {event.medium or '-':<10} {_blocks(event.block_hashes)}"
                f"  {short} ← {after:<12} {_number(len(event.token_ids), 'token', 'tokens', 6)}"
                f"{extras}"
            )
        case BlockRemoved():
            return (
                f"removed {event.medium or '-':<10} {_blocks(event.block_hashes)}"
                f"  {_short(event.block_hashes[:1])}"
            )
        case AllBlocksCleared():
            return "cleared"


def _blocks(hashes: list[int | bytes]) -> str:
    """How many; of one width, so that what follows stays in its column."""
    return f"{_number(len(hashes), 'block', 'blocks', 5):<12}"


def _number(count: int, one: str, many: str, width: int = 0) -> str:
    return f"{count:>{width}} {one if count == 1 else many}"


def _short(hashes: list[int | bytes]) -> str:
    """The first 12 hex digits of the first hash."""
    return f"{canonical_hash(hashes[0]) & 2**64 - 1:016x}"[:12] if hashes else "-"


def _plain(event: Event) -> dict[str, object]:
    found: dict[str, object] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "block_hashes":
            value = [_name(one) for one in value]
        elif name == "parent_block_hash" and value is not None:
            value = _name(value)
        elif name == "token_ids":
            value = list(value)
        found[name] = value
    return found


def _name(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _json(fields: dict[str, object]) -> str:
    return msgspec.json.encode(fields).decode().translate(_ESCAPES)


def _clock(ts: float) -> str:
    try:
        moment = time.localtime(ts)
    except (OverflowError, ValueError, OSError):
        return f"{'?':12}"
    return f"{time.strftime('%H:%M:%S', moment)}.{min(999, int(ts % 1 * 1000)):03}"
