"""Says in the log what is wrong with an engine whose own batches come, by a relay or a plugin."""

from __future__ import annotations

import logging
import math

from publisher.once import Once
from publisher.sidecar.pace import Pace
from publisher.sidecar.relay import RelaySource
from publisher.stream.replica import Replica

__all__ = ["EngineWatch"]

_ENGINE_S = 5.0
"""How long an engine that is relayed may be away at first."""
_LINES = (15.0, 8)
"""Of each kind, of things that may happen again and again."""
_SEVERAL = 2
_MORE = 10
"""Times as many, and it is said again."""

_log = logging.getLogger("kvevents.sidecar")


class EngineWatch:
    """Each thing is said once, or again when there is much more of it, or at a pace. `relay`: None for a
    plugin's link. `now`, here and in `check`: monotonic.
    """

    def __init__(self, relay: RelaySource | None, replica: Replica, now: float) -> None:
        self._relay, self._replica = relay, replica
        self._connection_pace, self._restart_pace = Pace(*_LINES), Pace(*_LINES)
        self._replay_pace, self._missed_pace = Pace(*_LINES), Pace(*_LINES)
        self.wake_at = now + _ENGINE_S if relay is not None else math.inf
        """When to call `check` though nothing has come: to say that nobody is there."""
        self._connected = False
        self._said = Once()
        self._restarts = self._departures = self._unanswered = self._given_up = self._missed = 0
        self._orphans_due = 1
        """How many blocks have to be left out until that is said."""

    def check(self, now: float) -> None:
        """After anything may have changed."""
        if self._relay is not None:
            self._check_connection(self._relay, now)
            self._check_topic(self._relay)
            self._check_replays(self._relay, now)
        self._check_batches(now)

    def _check_connection(self, relay: RelaySource, now: float) -> None:
        where = relay.endpoint
        if relay.connected:
            self.wake_at = math.inf
        elif now >= self.wake_at:
            self.wake_at = math.inf
            if relay.strange:
                _log.warning(
                    "relay.endpoint: %s: who is there is no publisher of events: is it the engine's"
                    " replay endpoint?",
                    where,
                )
            else:
                _log.warning(
                    "relay.endpoint: %s: no engine is there: is it up, and does it bind? With another "
                    "address than tcp://*:PORT engines connect, as this relay does",
                    where,
                )
        if relay.connected != self._connected and self._connection_pace.allows(now):
            self._connected = relay.connected
            if relay.connected:
                _log.info("the engine is connected")
            else:
                _log.warning("the engine is not connected any more")
            if relay.connected and relay.replay_endpoint is None and self._said.is_new("no replay"):
                _log.warning(
                    "relay.replay_endpoint: none: what the engine told before, or is lost on the way,"
                    " stays unknown, and so does what it stores behind that"
                )
        if relay.stats.departures != self._departures:
            self._departures = relay.stats.departures
            _log.warning("the engine has not come back: all blocks are cleared")
        if (again := relay.stats.restarts - self._restarts) and self._restart_pace.allows(now):
            self._restarts += again
            _log.warning(
                "the engine has started over, or keeps no more what was missed: all blocks are cleared%s",
                f", {again} times: are two behind one address?" if again > _SEVERAL else "",
            )

    def _check_topic(self, relay: RelaySource) -> None:
        if not relay.topic:
            return
        if relay.other_topic is not None:
            if self._said.is_new("topic"):
                _log.warning(
                    "relay.topic: the engine's is '%s', which does not begin with '%s': nothing comes"
                    " live",
                    relay.other_topic,
                    relay.topic,
                )
        elif (
            not relay.stats.received and relay.stats.gaps >= _SEVERAL and self._said.is_new("topic")
        ):
            _log.warning(
                "relay.topic: nothing comes live that begins with '%s', and replays bring batches: is the"
                " engine's topic another?",
                relay.topic,
            )

    def _check_replays(self, relay: RelaySource, now: float) -> None:
        stats, where = relay.stats, relay.replay_endpoint
        if stats.given_up != self._given_up:
            self._given_up, self._unanswered = stats.given_up, stats.unanswered
            _log.warning("relay.replay_endpoint: %s: given up; what is missing is unknown", where)
        elif stats.unanswered != self._unanswered:
            self._unanswered = stats.unanswered
            if relay.batches_wait and self._replay_pace.allows(now):
                _log.warning("relay.replay_endpoint: %s does not answer; live batches wait", where)

    def _check_batches(self, now: float) -> None:
        replica, foreign = self._replica, self._replica.foreign
        missed = replica.counts.missed - self._missed if self._relay is not None else 0
        if missed and self._missed_pace.allows(now):
            self._missed += missed
            _log.warning(
                "%d batches of the engine cannot be had: what they stored is not told, nor what is stored"
                " behind that",
                missed,
            )
        if foreign.other_block_size is not None and self._said.is_new("block size"):
            _log.warning(
                "block_size: the engine's blocks have %d tokens, not %d: they are left out",
                foreign.other_block_size,
                foreign.block_size,
            )
        if replica.other_rank is not None and self._said.is_new("rank"):
            _log.warning(
                "dp_rank: the engine's batches are of rank %d, and are told as of rank %d (--dp-rank)",
                replica.other_rank,
                replica.dp_rank,
            )
        orphans = foreign.orphans_since_clear
        if not orphans:
            if self._orphans_due > 1:
                _log.info(
                    "all was cleared: nothing that the engine stores from here on is left out"
                )
            self._orphans_due = 1
        elif orphans >= self._orphans_due:
            self._orphans_due = orphans * _MORE
            _log.warning(
                "%d blocks are left out: the engine stored them behind others of which nothing was heard."
                " Routers do not know of such prompts until the engine's cache is flushed (SGLang: POST"
                " /flush_cache)",
                orphans,
            )
