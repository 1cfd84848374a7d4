"""`kvevents doctor`: one probe after the other, until it is plain why nothing arrives."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from kvevents.lint import Consumer
from publisher.config.endpoint import Endpoint
from publisher.subscriber.dial import ClientKeys
from publisher.tools.doctor.asking import ask, first_words
from publisher.tools.doctor.content import Content
from publisher.tools.doctor.diagnosis import Arrivals, Finding
from publisher.tools.doctor.judging import (
    enough,
    judge_content,
    judge_fit,
    judge_liveness,
    judge_replay,
    judge_topic,
)
from publisher.tools.doctor.listening import Heard, hear, shake
from publisher.tools.doctor.peers import CURVE, Role, judge_curve, judge_greeting
from publisher.tools.doctor.reach import dial_raw, listen_for, read_address, two_sided, unreached
from publisher.tools.doctor.zmtp import Foreign, Peer, Silent, greet

__all__ = ["Case", "examine"]

_GREET_S = 3.0
_LISTEN_S = 1.0
"""libzmq tries anew ten times as often."""
_NEXT_DOOR_S = 0.5
_PROBES: dict[Role, tuple[str, str]] = {
    "publisher": ("connect", "handshake"),
    "replay": ("replay", "replay"),
}
_BIND = (
    "; if the publisher is one that connects, look again with --bind: we listen there for a second"
)
_NO_REPLAY = (
    "an engine has a replay socket only where its --kv-events-config names a replay_endpoint; "
)


@dataclass(frozen=True, slots=True)
class Case:
    """What there is to look at, as a router would be told. `http`: host and port. `may_bind`: whether we
    may listen where nobody does; a publisher that starts meanwhile finds its port taken.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str = ""
    consumer: Consumer | None = None
    block_size: int | None = None
    http: tuple[str, int] | None = None
    timeout_s: float = 12.0
    may_bind: bool = False
    keys: ClientKeys | None = None


def examine(case: Case) -> Generator[Finding, None, Arrivals]:
    """Findings as they are made; returns what came live. Nothing that a peer does makes it raise."""
    publisher = yield from _visit(case, "publisher", case.endpoint)
    replay = None
    if case.replay_endpoint is not None:
        replay = yield from _visit(case, "replay", case.replay_endpoint)
    elif publisher is not None:
        yield from _look_next_door(case, publisher)
    if publisher is None:
        if case.http is not None:
            yield from ask(*case.http, _parsed(case.endpoint), case.timeout_s, subscribed=False)
        return Arrivals()
    return (yield from _listen(case, publisher, replay))


def _parsed(text: str) -> Endpoint | None:
    found = read_address("", text)
    return found if isinstance(found, Endpoint) else None


# -------------------------------------------------------------------------------------- one socket


def _visit(case: Case, role: Role, text: str) -> Generator[Finding, None, Endpoint | None]:
    """Whether what is wanted is there; None: it is not."""
    probe, handshake = _PROBES[role]
    endpoint = read_address("address" if role == "publisher" else probe, text)
    if isinstance(endpoint, Finding):
        yield replace(endpoint, stops=role == "publisher")
        return None
    reached = dial_raw(endpoint, case.timeout_s)
    if reached.connection is None:
        assert reached.error is not None
        yield from _judge_unreached(case, role, endpoint, reached.error)
        return None
    with reached.connection as connection:
        if role == "publisher":
            yield Finding(probe, "ok", f"{endpoint} accepts connections")
        outcome = greet(connection, _in(case, _GREET_S))
    outcome = _ask_in_http(case, endpoint, outcome)
    judged = judge_greeting(handshake, str(endpoint), role, outcome, keys=case.keys is not None)
    judged = judged or _shake(case, role, handshake, endpoint)
    if role == "publisher" or judged.verdict != "ok":
        yield judged
    return endpoint if judged.verdict != "wrong" else None


def _in(case: Case, seconds: float) -> float:
    return time.monotonic() + min(seconds, case.timeout_s)


def _ask_in_http(
    case: Case, endpoint: Endpoint, outcome: Peer | Foreign | Silent
) -> Peer | Foreign | Silent:
    """Many servers say nothing until they are asked in their own way."""
    if not isinstance(outcome, Silent):
        return outcome
    reached = dial_raw(endpoint, case.timeout_s)
    if reached.connection is None:
        return outcome
    with reached.connection as connection:
        words = first_words(connection, _in(case, 1.0))
    return outcome if words is None else Foreign(words)


def _shake(case: Case, role: Role, probe: str, endpoint: Endpoint) -> Finding:
    assert case.keys is not None
    done = shake(role, str(endpoint), case.keys, case.timeout_s)
    other = None
    if done == "hung up":
        others: Role = "replay" if role == "publisher" else "publisher"
        other = shake(others, str(endpoint), case.keys, case.timeout_s)
    return judge_curve(probe, str(endpoint), role, done, other)


def _judge_unreached(
    case: Case, role: Role, endpoint: Endpoint, error: OSError
) -> Iterator[Finding]:
    """Nobody listens there; does a publisher connect?"""
    found = unreached(_PROBES[role][0], endpoint, error)
    if role == "replay":
        yield replace(found, stops=False, advice=_NO_REPLAY + found.advice)
        return
    other_side = None
    if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
        if case.may_bind:
            other_side = two_sided(endpoint, listen_for(endpoint, min(_LISTEN_S, case.timeout_s)))
        else:
            found = replace(found, advice=found.advice + _BIND)
    yield replace(found, stops=other_side is None or not other_side.stops)
    if other_side is not None:
        yield other_side


def _look_next_door(case: Case, endpoint: Endpoint) -> Iterator[Finding]:
    """A replay socket that nobody has named is mostly at the next port."""
    late = "no replay endpoint is given: who joins late knows nothing of what was stored before"
    if endpoint.scheme != "tcp" or not endpoint.port or endpoint.port >= 65_535:
        yield Finding("replay", "unknown", late)
        return
    next_door = replace(endpoint, port=endpoint.port + 1)
    reached = dial_raw(next_door, min(_NEXT_DOOR_S, case.timeout_s))
    advice = ""
    if reached.connection is not None:
        with reached.connection as connection:
            peer = greet(connection, _in(case, _NEXT_DOOR_S))
        if isinstance(peer, Peer) and peer.socket_type == "ROUTER":
            advice = f"{next_door} is a replay socket: --replay-endpoint {next_door}"
        elif isinstance(peer, Peer) and peer.greeting.mechanism == CURVE:
            advice = f"{next_door} speaks CURVE: its replay socket? --replay-endpoint {next_door}"
    yield Finding("replay", "unknown", late, advice)


# -------------------------------------------------------------------------------------- the stream


def _listen(
    case: Case, publisher: Endpoint, replay: Endpoint | None
) -> Generator[Finding, None, Arrivals]:
    asked: list[Finding] = []

    def meanwhile() -> None:
        if case.http is not None:
            asked.extend(ask(*case.http, publisher, case.timeout_s, subscribed=True))

    def satisfied(live: Content, told: Content) -> float | None:
        return enough(live, told, case.topic, judged=case.consumer is not None)

    heard = hear(
        str(publisher),
        None if replay is None else str(replay),
        case.keys,
        case.timeout_s,
        satisfied,
        meanwhile,
    )
    if replay is not None:
        yield judge_replay(str(replay), heard)
    for one in asked:
        yield replace(one, stops=one.stops and not heard.live.stored)
    yield from _judge(case, heard)
    return Arrivals(heard.live.batches, heard.live.events)


def _judge(case: Case, heard: Heard) -> Iterator[Finding]:
    yield judge_liveness(heard)
    yield from judge_topic(heard, case.topic, case.consumer)
    yield from judge_content(heard, case.block_size)
    if case.consumer is not None and (heard.live.messages or heard.told.batches):
        yield from judge_fit(heard, case.consumer)
