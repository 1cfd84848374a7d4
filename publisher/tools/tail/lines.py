"""A stream as text, one line per event. Only characters that can be printed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.hashing import short_hash
from kvevents.reading import Reading
from publisher.config.checks import shown
from publisher.tools.colour import Paint
from publisher.tools.tail.notice import Notice
from publisher.tools.tail.stream import Stream
from publisher.tools.text import printable

__all__ = ["Lines", "clock"]

_MEDIA = {
    StorageMedium.GPU: "green",
    StorageMedium.CPU: "yellow",
    StorageMedium.DISK: "blue",
    StorageMedium.EXTERNAL: "magenta",
}
_SOURCES = ("cyan", "magenta", "green", "blue", "yellow", "bold cyan", "bold magenta", "bold green")
_NAMES = ("lora_name", "cache_salt", "extra_key")
_MORE = ("group_idx", "kv_cache_spec_kind", "locality", "session_id", "lora_id", "extra_keys")
_FIRST_TOKENS = 8


class Lines:
    """Writes events and what is said between them. `verbose`: 0, 1 or 2.

    The columns of a source and of a rank are there once there is more than one of them.
    """

    whole = False

    def __init__(self, streams: Sequence[Stream], paint: Paint, verbose: int) -> None:
        self._paint, self._verbose = paint, verbose
        self._many = len(streams) > 1
        self._width = max(6, 3 + max((len(one.label) for one in streams), default=0))
        self._styles = {id(one): _SOURCES[at % len(_SOURCES)] for at, one in enumerate(streams)}
        self._media: dict[StorageMedium | None, str] = {None: f"{'-':<10}"}
        for medium, style in _MEDIA.items():
            self._media[medium] = paint(f"{medium:<10}", style)
        self._cleared = paint("cleared", "bold")
        self._reading: Reading | None = None
        self._ranked = False
        self._head = ""

    @property
    def header(self) -> str:
        """What is in the columns."""
        where = ""
        if self._many:
            where = f"{'source':<{self._width}} "
        elif self._ranked:
            where = "rank "
        columns = (
            f"{'time':12} {where}{'seq':>6} {'event':7} {'medium':10} {'blocks':>6} {'hash':12} ←"
            f" {'parent':12} {'tokens':>6}"
        )
        return self._paint(columns, "dim") + "\n"

    def needs_header(self, stream: Stream) -> bool:
        """Whether the columns have just become others."""
        if self._ranked or self._many or len(stream.ranks) < 2:
            return False
        self._ranked = True
        return True

    def begin(self, stream: Stream, reading: Reading) -> None:
        """The batch that the next events are of."""
        self._reading = reading
        ts = 0.0 if reading.batch is None else reading.batch.ts
        self._head = f"{clock(ts)} {self._where(stream, reading.rank)}{reading.seq:>6}"

    def event(self, _position: int, event: Event) -> str:
        """One of its events."""
        if isinstance(event, BlockStored):
            hashes, parent = event.block_hashes, event.parent_block_hash
            line = (
                f"{self._head} stored  {self._media[event.medium]} {len(hashes):>6}"
                f" {short_hash(hashes[0]) if hashes else '-':<12} ←"
                f" {'start' if parent is None else short_hash(parent):<12}"
                f" {len(event.token_ids):>6}"
            )
            if (
                event.lora_name is not None
                or event.cache_salt is not None
                or event.extra_key is not None
            ):
                for name in _NAMES:
                    if (value := getattr(event, name)) is not None:
                        line += printable(f" {name}={shown(value)}")
        elif isinstance(event, BlockRemoved):
            hashes = event.block_hashes
            line = (
                f"{self._head} removed {self._media[event.medium]} {len(hashes):>6}"
                f" {short_hash(hashes[0]) if hashes else '-'}"
            )
        else:
            line = f"{self._head} {self._cleared}"
            if not self._verbose and self._reading is not None and self._reading.told.replayed:
                line += self._paint(" replayed", "dim")  # as before a state that is told: no flush
        if self._verbose:
            line += self._paint(printable(self._more(event)), "dim")
        return line + "\n"

    def notice(self, stream: Stream, notice: Notice) -> str:
        """What is said besides; empty for what was said already."""
        if notice.brief:
            return ""
        where = f"{self._where(stream, None)}"
        at = "" if notice.bare else clock(notice.at_ns / 1e9)
        seq = "" if notice.bare or notice.seq is None else notice.seq
        text = self._paint(printable(notice.text), notice.style)
        return f"{at:12} {where}{seq:>6} {text}\n"

    # ---------------------------------------------------------------------------------- inside

    def _where(self, stream: Stream, rank: int | None) -> str:
        if self._many:
            text = stream.label if rank is None else f"{stream.label}/{rank}"
            return self._paint(f"{text:<{self._width}}", self._styles[id(stream)]) + " "
        if self._ranked:
            return f"{'' if rank is None else rank:>4} "
        return ""

    def _more(self, event: Event) -> str:
        assert self._reading is not None, "an event is of a batch"
        told, batch = self._reading.told, self._reading.batch
        parts = []
        if isinstance(event, BlockStored):
            parts.append(f"size={event.block_size}")
        if told.topic:
            parts.append(f"topic={told.topic.decode('utf-8', 'backslashreplace')}")
        if told.replayed:
            parts.append("replayed")
        elif batch is not None and math.isfinite(batch.ts):
            parts.append(f"lag={(told.at_ns / 1e9 - batch.ts) * 1000:.1f}ms")
        if not isinstance(event, AllBlocksCleared):
            parts.append(f"hashes={','.join(map(short_hash, event.block_hashes))}")
            given = ((name, getattr(event, name, None)) for name in _MORE)
            parts += [f"{name}={shown(value)}" for name, value in given if value is not None]
        if isinstance(event, BlockStored) and len(event.token_ids):
            most = None if self._verbose > 1 else _FIRST_TOKENS
            tokens = list(event.token_ids[:most])
            cut = ",…" if len(tokens) < len(event.token_ids) else ""
            parts.append(f"tokens={','.join(map(str, tokens))}{cut}")
        return " " + " ".join(parts)


def clock(ts: float) -> str:
    """The time of day, to milliseconds; `?` for what is no time."""
    try:
        second = math.floor(ts)
        text = _of_day(second)
    except (OverflowError, ValueError, OSError):
        return f"{'?':12}"
    return f"{text}.{min(999, int((ts - second) * 1000)):03}"


@lru_cache(maxsize=16)
def _of_day(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))
