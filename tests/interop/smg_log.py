"""All that a sink can replay, as it was published."""

from __future__ import annotations

import zmq
from interop_waiting import PATIENCE_S

from kvevents.frames import Frame, parse_replay_answer, replay_request

__all__ = ["replayed"]


def replayed(replay_endpoint: str, start: int = 0) -> list[bytes]:
    """The payloads from seq `start` on, a snapshot among them where the log does not go back so far."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        dealer.connect(replay_endpoint)
        dealer.send_multipart(replay_request(start))
        payloads: list[bytes] = []
        while isinstance(answer := parse_replay_answer(dealer.recv_multipart()), Frame):
            payloads.append(answer.payload)
        return payloads
