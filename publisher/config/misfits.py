"""Settings that its own consumer would not take: what `kvevents serve --check` warns of.

A few events are spelled as each sink would, and looked at as `kvevents lint` looks at a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StorageMedium
from kvevents.frames import live_frames
from kvevents.lint import CONSUMERS, Lint
from kvevents.speller import Speller
from kvevents.view import View
from publisher.config.sidecar_config import ConfigError, SidecarConfig, SinkConfig
from publisher.config.topic import FIELDS, render_topic

__all__ = ["misfits"]

_TOKENS = list(range(1000, 1008))
_HASHES = (-(2**62), 2**62)
"""Of either sign."""


def misfits(config: SidecarConfig, facts: Mapping[str, str]) -> Iterator[str]:
    """One line for each thing that the consumer which a sink is named for would lose or misread, the
    first of its kind. `facts`: what topics may say, as far as it is known.
    """
    for place, sink in enumerate(config.sinks):
        consumer = CONSUMERS.get(sink.dialect)
        if consumer is None or sink.event_form == "mooncake":
            continue
        lint = Lint([consumer], replay=sink.replay_endpoint is not None)
        told: set[str] = set()
        for seq, payload in enumerate(_payloads(sink)):
            for finding in lint.live(live_frames(_topic(sink, facts), seq, payload)):
                if finding.rule not in told:
                    told.add(finding.rule)
                    yield f"sinks[{place}]: {finding}"


def _payloads(sink: SinkConfig) -> Iterator[bytes]:
    dialect = sink.spelling
    view, speller = View(dialect), Speller(dialect, 0)
    stores: list[Event] = [
        BlockStored([*_HASHES], None, _TOKENS, 4, medium=medium) for medium in StorageMedium
    ]
    removals: list[Event] = [BlockRemoved([*_HASHES[::-1]], medium) for medium in StorageMedium]
    every: list[Event] = [AllBlocksCleared(), *stores, *removals]
    for events in ([one] for one in every):
        if told := view.apply(events):
            yield speller.spell(1.0, told)


def _topic(sink: SinkConfig, facts: Mapping[str, str]) -> bytes:
    known = {name: facts.get(name) or "1" for name in FIELDS}
    try:
        return render_topic("topic", sink.topic, known)
    except ConfigError:
        return b""
