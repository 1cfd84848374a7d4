"""The `kvevents doctor` to run, and what `state` and `top` say of sources that did not tell all."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from publisher.tools.fleet.fleet import Fleet
    from publisher.tools.source import Sources

__all__ = ["damages", "doctor_command", "unheard"]


def doctor_command(options: argparse.Namespace, source: str) -> str:
    """`kvevents doctor` of one of the sources, as it was given, with what goes with it: a shell takes it
    as it is. `options`: as `add_sources` has them.
    """
    words = ["kvevents", "doctor", source]
    for key, value in (
        ("--replay-endpoint", options.replay_endpoint),
        ("--topic", options.topic or None),
        ("--server-key", options.server_key),
        ("--client-key", options.client_key),
    ):
        if value is not None:
            words += [f"{key}={value}"] if value.startswith("-") else [key, value]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    parts = [one if one.isprintable() and one not in "\\'" else _escaped(one) for one in word]
    return f"$'{''.join(parts)}'"


def _escaped(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode(errors="surrogateescape"))


def unheard(options: argparse.Namespace, sources: Sources, fleet: Fleet) -> Iterator[str]:
    """A line for each source that is live and of which nothing was told, although it is not connected, or
    nothing was told of any: what is so, and what to run.
    """
    from publisher.tools.fleet.fleet import waiting
    from publisher.tools.source import Live

    any_came = any(worker.came for worker in fleet.workers.values())
    for text, source in zip(options.sources, sources.all, strict=True):
        worker = fleet.of(source)
        if not isinstance(source, Live) or worker.came:
            continue
        endpoint = source.address.endpoint
        if worker.held:
            what = f"{worker.name}: {waiting(worker)}"
        elif not source.connected:
            what = f"no connection to {endpoint}{', which refuses us' if worker.refused else ''}"
        elif any_came:
            continue
        else:
            what = f"nothing came from {endpoint}"
        yield f"{what}; why: {doctor_command(options, text)}"


def damages(sources: Sources, fleet: Fleet) -> tuple[list[str], bool]:
    """What was not read of captures, a line each; and whether one of them is damaged."""
    faults = [capture.fault(fleet.of(capture).came) for capture in sources.captures]
    return list(filter(None, faults)), any(
        capture.damaged is not None for capture in sources.captures
    )
