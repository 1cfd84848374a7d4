"""publisher.multipart does what pyzmq's own calls do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from publisher_rig import LOOPBACK, PATIENCE_S, Socket

from publisher.multipart import receive_now, send_now

pytestmark = pytest.mark.integration

MESSAGES = [[b"one"], [b""], [b"", b"\0" * 8, b"payload"], [b"a", b"", b"b", b"x" * 100_000]]


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    """Gone with its sockets after the test."""
    context = zmq.Context[Socket]()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def pair(context: zmq.Context[Socket]) -> tuple[Socket, Socket]:
    """Two ends of one connection."""
    ours, theirs = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    theirs.connect(ours.bind(LOOPBACK).addr)
    return ours, theirs


def test_messages_are_those_of_pyzmq(pair: tuple[Socket, Socket]) -> None:
    """Frame by frame, whichever end is ours."""
    ours, theirs = pair
    for message in MESSAGES:
        assert ours.poll(int(PATIENCE_S * 1000), zmq.POLLOUT)
        send_now(ours, message)
        assert theirs.recv_multipart() == message
        theirs.send_multipart(message)
        assert ours.poll(int(PATIENCE_S * 1000))
        assert receive_now(ours) == message


def test_nothing_waits(context: zmq.Context[Socket], pair: tuple[Socket, Socket]) -> None:
    """With nothing there, and with nobody to send to, it says so at once."""
    with pytest.raises(zmq.Again):
        receive_now(pair[0])
    with context.socket(zmq.DEALER) as alone, pytest.raises(zmq.Again):
        send_now(alone, MESSAGES[-1])
