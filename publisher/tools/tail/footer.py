"""What `kvevents tail` says at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from publisher.config.checks import shown
from publisher.tools.columns import byte_size
from publisher.tools.tail.stream import Stream

__all__ = ["footer"]


_NAMES = 16
"""That are listed of what there was."""


def footer(
    streams: Sequence[Stream],
    seconds: float,
    *,
    written: int,
    whole: bool,
    asked: Collection[str],
) -> Iterator[str]:
    """Lines for people. `seconds`: of the run; of captures alone their own time is what counts.
    `written`: how many events were shown, or batches, where those are shown `whole`. `asked`: the options
    that leave something out.
    """

    def of(name: str) -> int:
        return sum(getattr(one, name) for one in streams)

    spans = [(one.first_ns, one.last_ns) for one in streams if one.first_ns]
    if all(one.live is None for one in streams):
        seconds = 0.0
        if spans:
            seconds = max(0, max(s[1] for s in spans) - min(s[0] for s in spans)) / 1e9
    batches, events = of("batches"), of("events")
    how = ", ".join(
        f"{count:,} {word}"
        for count, word in ((of("replayed"), "replayed"), (of("empty"), "empty"))
        if count
    )
    only = f"; {written:,} shown" if asked or written != (batches if whole else events) else ""
    yield (
        f"batches  {batches:,} in {_seconds(seconds)}{_rate(batches, seconds)}"
        f", {byte_size(of('bytes'))}{f'; {how}' if how else ''}{only if whole else ''}"
    )
    kinds = ", ".join(f"{of(name):,} {name}" for name in ("stored", "removed", "cleared"))
    yield f"events   {events:,}{_rate(events, seconds)}: {kinds}{'' if whole else only}"
    if events and not written and (there := _there(streams, asked)):
        yield f"filters  nothing passed; there was {there}"
    yield f"blocks   {of('blocks_stored'):,} stored, {of('blocks_removed'):,} removed"
    yield f"trouble  {_troubles(streams)}"
    for one in streams:
        name = "form" if len(streams) == 1 else one.label
        yield f"{name:<8} {_form(one)}"


def _there(streams: Sequence[Stream], asked: Collection[str]) -> str:
    """Of what was asked for, all that could have been."""
    parts = []
    if "rank" in asked:
        parts.append(f"rank {_list({str(rank) for rank in _all(streams, 'ranks')}, key=int)}")
    if "medium" in asked:
        parts.append(f"medium {_list(_all(streams, 'media'))}")
    if "lora" in asked:
        parts.append(f"adapter {_list({shown(name) for name in _all(streams, 'loras')})}")
    return "; ".join(parts)


def _all(streams: Sequence[Stream], name: str) -> set[Any]:
    return {one for stream in streams for one in getattr(stream, name)}


def _list(names: set[str], key: Callable[[str], Any] | None = None) -> str:
    first = sorted(names, key=key)[:_NAMES]
    more = " and others" if len(names) > _NAMES else ""
    return (", ".join(first) or "none") + more


def _troubles(streams: Sequence[Stream]) -> str:
    parts = []
    for one, many, name in (
        ("gap", "gaps", "gaps"),
        ("batch lost", "batches lost", "lost"),
        ("restart", "restarts", "restarts"),
        ("undecodable batch", "undecodable batches", "undecodable"),
        ("malformed message", "malformed messages", "malformed"),
        ("event skipped", "events skipped", "skipped"),
        ("connection refused", "connections refused", "refused"),
    ):
        if count := sum(getattr(stream, name) for stream in streams):
            parts.append(f"{count:,} {one if count == 1 else many}")
    rules: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for stream in streams:
        rules += stream.findings
        notes += stream.notes
    if count := rules.pop("replay-no-end", 0):
        parts.append(f"{count:,} {'replay' if count == 1 else 'replays'} without an end")
    parts += [f"{count:,} {rule}" for rule, count in rules.most_common()]
    text = ", ".join(parts) or "none"
    if notes:
        text += f"; notes: {', '.join(f'{count:,} {rule}' for rule, count in notes.most_common())}"
    if any(stream.behind and stream.live for stream in streams):
        text += "; we read too slowly, or were stopped: what is missing may be our own loss"
    if any(stream.behind and not stream.live for stream in streams):
        text += (
            "; the recorder read too slowly, or was stopped: what is missing may be its own loss"
        )
    return text


def _form(stream: Stream) -> str:
    text = str(stream.appearance)
    if stream.answers_of:
        frames = " or ".join(map(str, sorted(stream.answers_of)))
        text += f", replays of {frames} frames"
    return text


def _rate(count: int, seconds: float) -> str:
    if seconds < 0.001 or not count:
        return ""
    rate = count / seconds
    return f" ({rate:,.0f}/s)" if rate >= 10 else f" ({rate:.2g}/s)"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest} s" if hours else f"{minutes} min {rest} s"
