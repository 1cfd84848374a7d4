"""What a peer's first words mean for whoever wants events of it, or replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from publisher.tools.doctor.diagnosis import Finding
from publisher.tools.doctor.zmtp import Foreign, Peer, Ready, Refusal, Silent

__all__ = ["CURVE", "Role", "Shake", "judge_curve", "judge_greeting"]

CURVE = "CURVE"

Role = Literal["publisher", "replay"]

_GOOD = {"publisher": ("PUB", "XPUB"), "replay": ("ROUTER",)}
_KINDS = {"publisher": "a publisher's PUB socket", "replay": "a replay socket, a ROUTER"}
_PURPOSES = {
    "PULL": "takes work",
    "PUSH": "hands out work",
    "REP": "answers one request at a time",
    "REQ": "asks",
    "DEALER": "asks, or shares out requests",
    "PAIR": "talks to one peer",
    "STREAM": "speaks plain TCP",
}

Shake = Literal["done", "unknown key", "hung up", "no answer"]
"""How a handshake with keys ended. `unknown key`: ZAP refused ours. `hung up`: it could not read our
first box, or is of a type that does not go with ours.
"""


@dataclass(frozen=True, slots=True)
class _Words:
    probe: str
    where: str
    role: Role

    def wrong(self, text: str, advice: str) -> Finding:
        return Finding(self.probe, "wrong", text, advice, stops=self.role == "publisher")


def judge_greeting(
    probe: str, where: str, role: Role, outcome: Peer | Foreign | Silent, *, keys: bool
) -> Finding | None:
    """None: it speaks CURVE, and so do we; `judge_curve` has more. `keys`: whether we have some."""
    words = _Words(probe, where, role)
    if isinstance(outcome, Foreign):
        text = f"{where} does not speak ZMTP: its first bytes are {outcome.what}"
        return words.wrong(text, f"find the port of {_KINDS[role]}; this is another service's")
    if isinstance(outcome, Silent):
        how = "hangs up" if outcome.closed else "says nothing"
        text = f"{where} accepts connections and {how}: a ZMQ socket greets first"
        advice = (
            "a proxy or a port-forward whose other end is gone? another service's port? a publisher"
            " that is stopped or stuck?"
        )
        return words.wrong(text, advice)
    if (mechanism := _judge_mechanism(words, outcome, keys=keys)) is not None:
        return mechanism
    return None if outcome.greeting.mechanism == CURVE else _judge_type(words, outcome)


def _judge_mechanism(words: _Words, peer: Peer, *, keys: bool) -> Finding | None:
    mechanism = peer.greeting.mechanism
    if mechanism == CURVE and not keys:
        text = f"{words.where} speaks CURVE alone, and no keys are given"
        advice = (
            "give --server-key FILE (the publisher's .key) and --client-key FILE (your own"
            " .key_secret; its .key belongs into the folder of curve.client_keys); the router needs both"
        )
        return words.wrong(text, advice)
    if mechanism == "NULL" and keys:
        text = f"keys are given, and {words.where} speaks no CURVE"
        advice = "leave the keys out, here and in the router; or give the sidecar [curve]"
        return words.wrong(text, advice)
    if mechanism not in ("NULL", CURVE):
        text = f"{words.where} wants {mechanism}, which publishers of KV events do not"
        return words.wrong(text, f"find the port of {_KINDS[words.role]}")
    return None


def _judge_type(words: _Words, peer: Peer) -> Finding:
    where, role, found = words.where, words.role, peer.socket_type
    version = "{}.{}".format(*peer.greeting.version)
    if found in _GOOD[role]:
        return Finding(
            words.probe, "ok", f"{where} is {_a(found)} socket, ZMTP {version}, no CURVE"
        )
    if role == "publisher" and found == "ROUTER":
        return words.wrong(f"{where} is a replay socket (ROUTER), not the PUB socket", _SWAP)
    if role == "replay" and found in _GOOD["publisher"]:
        return words.wrong(f"{where} is a PUB socket, not a replay socket (ROUTER)", _SWAP)
    if found in ("SUB", "XSUB"):
        text = f"a subscriber ({found}) listens at {where}, and two subscribers never meet"
        advice = (
            'the publisher must connect there (mode = "connect" of our sink); or take the address'
            " where the publisher itself listens"
        )
        return words.wrong(text, advice)
    if found:
        purpose = _PURPOSES.get(found, "is something else")
        text = f"{where} is {_a(found)} socket, which {purpose}, not {_KINDS[role]}"
        return words.wrong(text, "look for the port in the publisher's log or configuration")
    return _judge_ready(words, peer)


def _judge_ready(words: _Words, peer: Peer) -> Finding:
    match peer.ready:
        case Refusal(reason):
            text = f"{words.where} refuses us: {reason or 'it does not say why'}"
            return words.wrong(text, "look at its log, and at its access rules (ZAP)")
        case Foreign(what):
            text = f"{words.where} greets as ZMTP does, and goes on with {what}"
        case Silent(closed):
            how = "hangs up" if closed else "says no more"
            text = f"{words.where} greets as ZMTP does, and {how} before it is ready"
        case Ready():
            text = f"{words.where} does not say what type of socket it is"
            return Finding(words.probe, "unknown", text)
        case _:
            text = f"{words.where} does not say what it is"
    return words.wrong(text, "is it a ZMQ socket of this decade, or a proxy in front of one?")


def _a(word: str) -> str:
    return f"an {word}" if word.startswith("X") else f"a {word}"


_SWAP = "swap the two: SOURCE is the PUB socket's address, --replay-endpoint the ROUTER's"


def judge_curve(
    probe: str, where: str, role: Role, shake: Shake, other: Shake | None = None
) -> Finding:
    """`other`: how the handshake of the other role's socket type ended, where this one's was not done."""
    words = _Words(probe, where, role)
    if shake == "done":
        return Finding(probe, "ok", f"{where} speaks CURVE, and takes both keys")
    if shake == "unknown key":
        text = f"{where} does not let our key in"
        advice = (
            "copy the .key that belongs to --client-key into the folder of the sidecar's"
            " curve.client_keys, then send the sidecar SIGHUP"
        )
        return words.wrong(text, advice)
    if shake == "hung up" and other == "done":
        kind = "a replay socket" if role == "publisher" else "the PUB socket"
        return words.wrong(f"{where} takes both keys, and is {kind}", _SWAP)
    if shake == "hung up":
        text = f"{where} cannot read what --server-key encrypts: its key is another"
        advice = "fetch the .key of the pair whose .key_secret is the sidecar's curve.secret_key"
        return words.wrong(text, advice)
    return words.wrong(
        f"{where} speaks CURVE, and does not end the handshake in time",
        "is the sidecar stuck? its /healthz says",
    )
