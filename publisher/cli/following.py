"""What `record`, `check` and `lint` say of what they follow: that they do, and why nothing came."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from publisher.cli.hint import doctor_command
from publisher.cli.parsing import say

if TYPE_CHECKING:
    from publisher.tools.source import Live, Source

__all__ = ["nothing_came", "say_begun", "unreached"]

_MOST_NAMED = 3


def say_begun(
    options: argparse.Namespace, doing: str, sources: Sequence[Source], more: str = ""
) -> None:
    """Where a person sees stderr, and something is live: what is under way, and what ends it."""
    if not sys.stderr.isatty():
        return
    names = [one.address.endpoint for one in _live(sources)]
    if not names:
        return
    if len(names) > _MOST_NAMED:
        names = [f"{len(names)} streams"]
    ends = []
    if options.for_s is not None:
        ends.append(f"for {options.for_s:g} s")
    if options.count is not None:
        count = "1 batch" if options.count == 1 else f"{options.count} batches"
        ends.append(f"until {count} came")
    how = f" {' or '.join(ends)}" if ends else ""
    ctrl_c = "Ctrl-C ends it sooner" if ends else "Ctrl-C ends it"
    say(f"kvevents {options.command}: {doing} {', '.join(names)}{more}{how}; {ctrl_c}")


def unreached(options: argparse.Namespace, sources: Sequence[Source]) -> Iterator[str]:
    """A line for each source that is live and not connected, and what to run. `sources`: of
    `options.sources`, in their order.
    """
    for text, source in zip(options.sources, sources, strict=True):
        for live in _live([source]):
            if not live.connected:
                gone = " any more" if live.follower.connections else ""
                what = f"no connection to {live.address.endpoint}{gone}"
                yield f"{what}; why: {doctor_command(options, text)}"


def nothing_came(options: argparse.Namespace, sources: Sequence[Source]) -> str:
    """That it is so; with what to run where it is one stream, and connected."""
    live = list(_live(sources))
    if len(sources) == 1 and live and live[0].connected:
        return f"nothing came; why: {doctor_command(options, options.sources[0])}"
    return "nothing came"


def _live(sources: Sequence[Source]) -> Iterator[Live]:
    from publisher.tools.source import Live

    return (one for one in sources if isinstance(one, Live))
