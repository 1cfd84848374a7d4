"""The first bytes of ZMTP: real sockets of every type, what is no ZMTP, and bytes of any kind."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from publisher.tools.doctor.zmtp import (
    Foreign,
    Greeting,
    Peer,
    Ready,
    Refusal,
    Silent,
    greet,
    looks_like,
    parse_command,
    parse_greeting,
)

pytestmark = pytest.mark.integration

HEAD = b"\xff" + bytes(8) + b"\x7f"
NULL = HEAD + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
GENEROUS_S = 10.0


def property_of(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def command(name: bytes, rest: bytes, *, long: bool = False) -> bytes:
    body = bytes([len(name)]) + name + rest
    if long:
        return b"\x06" + len(body).to_bytes(8, "big") + body
    return b"\x04" + bytes([len(body)]) + body


@contextlib.contextmanager
def server(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port where each connection is given to `talk`, and closed when that returns."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    talk(connection)

        thread = Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(GENEROUS_S)
        assert not thread.is_alive()


def meet(port: int, seconds: float = GENEROUS_S) -> Peer | Foreign | Silent:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        return greet(connection, time.monotonic() + seconds)


# ----------------------------------------------------------------------------------- real sockets


@pytest.mark.parametrize("kind", ["PUB", "XPUB", "SUB", "XSUB", "ROUTER", "DEALER", "PULL", "REP"])
def test_a_socket_says_its_type(kind: str) -> None:
    """Each type that libzmq binds, without a subscription or a request coming of it."""
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as one:
        one.setsockopt(zmq.LINGER, 0)
        peer = meet(one.bind_to_random_port("tcp://127.0.0.1"))
        assert isinstance(peer, Peer)
        assert peer.socket_type == kind
        assert (peer.greeting.version[0], peer.greeting.mechanism) == (3, "NULL")
        if kind in ("XPUB", "ROUTER"):
            assert one.poll(50) == 0


def test_a_mechanism_is_learnt_without_speaking_it() -> None:
    """A CURVE server names its mechanism, and then nothing more is said."""
    with zmq.Context() as context, context.socket(zmq.PUB) as one:
        public, secret = zmq.curve_keypair()
        one.setsockopt(zmq.CURVE_SERVER, 1)
        one.setsockopt(zmq.CURVE_PUBLICKEY, public)
        one.setsockopt(zmq.CURVE_SECRETKEY, secret)
        peer = meet(one.bind_to_random_port("tcp://127.0.0.1"))
        assert isinstance(peer, Peer)
        assert (peer.greeting.mechanism, peer.ready, peer.socket_type) == ("CURVE", None, "")


# ------------------------------------------------------------------------------------ other servers


def test_a_peer_that_waits_for_all_of_our_greeting_gets_it() -> None:
    """One that says nothing before it has 64 bytes of ours is heard all the same."""

    def talk(connection: socket.socket) -> None:
        got = b""
        while len(got) < 64:
            piece = connection.recv(64)
            if not piece:
                return
            got += piece
        connection.sendall(NULL + READY)
        connection.recv(1)

    with server(talk) as port:
        peer = meet(port, 2.0)
        assert isinstance(peer, Peer)
        assert peer.socket_type == "PUB"


def test_a_peer_that_drips_is_read_byte_by_byte() -> None:
    """Pieces of any size are put together."""

    def talk(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in NULL + READY:
            connection.sendall(bytes([byte]))
        connection.recv(64)

    with server(talk) as port:
        peer = meet(port)
        assert isinstance(peer, Peer)
        assert peer.socket_type == "PUB"


@pytest.mark.parametrize("said", [b"", HEAD, NULL[:63]])
def test_silence_ends_at_the_deadline(said: bytes) -> None:
    """A server that says nothing, or stops midway, costs as long as we gave it."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(said)
        while connection.recv(64):
            pass

    with server(talk) as port:
        before = time.monotonic()
        assert meet(port, 0.2) == Silent(closed=False)
        assert time.monotonic() - before < GENEROUS_S


def test_who_hangs_up_is_known() -> None:
    """Before its greeting, and after it."""
    with server(lambda connection: connection.recv(11)) as port:
        assert meet(port) == Silent(closed=True)

    def talk(connection: socket.socket) -> None:
        connection.sendall(NULL)
        connection.recv(11)

    with server(talk) as port:
        peer = meet(port)
        assert isinstance(peer, Peer)
        assert peer.ready == Silent(closed=True)


@pytest.mark.parametrize("begin", [b"", NULL, NULL + b"\x06"])
def test_endless_bytes_are_not_read_for_ever(begin: bytes) -> None:
    """A server that never stops is cut off once it is plain that it is not what we look for."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(begin)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"\x05" * 65_536)

    with server(talk) as port:
        peer = meet(port)
        assert isinstance(peer, Foreign) or isinstance(peer.ready, Foreign)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ parsing


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (HEAD, None),
        (NULL[:40], None),
        (NULL, Greeting((3, 1), "NULL")),
        (HEAD + b"\x01\x01", Greeting((1, 0), "NULL", socket_type="PUB")),
        (HEAD + b"\x01", None),
        (HEAD + b"\x01\xee", Foreign("the bytes ff 00 00 00 00 00 00 00 00 7f 01 ee")),
        (b"\xff" * 64, Foreign("the bytes " + "ff " * 11 + "ff")),
        (NULL.replace(b"NULL", b"nu\x1b!"), Foreign("the bytes " + NULL[:12].hex(" "))),
        (b"HTTP/1.1 400 Bad Request\r\n", Foreign("an HTTP server's answer")),
        (b"\x15\x03\x03\x00\x02", Foreign("a TLS alert: the port speaks TLS")),
        (b"SSH-2.0-OpenSSH", Foreign("an SSH server")),
        (b"hello\r\n", Foreign("the text 'hello..'")),
        (b"\0\0\x12\x04\0\0\0\0\0", Foreign("HTTP/2 or gRPC")),
    ],
)
def test_greetings(data: bytes, expected: object) -> None:
    """What is one, what is the beginning of one, and what else it looks like."""
    assert parse_greeting(data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (READY, Ready("PUB")),
        (READY[:-1], None),
        (command(b"READY", property_of(b"socket-TYPE", b"XPUB"), long=True), Ready("XPUB")),
        (command(b"READY", property_of(b"Identity", b"") + b""), Ready("")),
        (command(b"READY", property_of(b"Socket-Type", b"P\x1b[2J")), Ready("P.[2J")),
        (command(b"READY", b"\x0bSocket"), Foreign("a READY whose properties are cut off")),
        (command(b"ERROR", b"\x03no!"), Refusal("no!")),
        (command(b"ERROR", b"\xff"), Refusal("")),
        (command(b"HELLO", b""), Foreign("the command 'HELLO' in place of READY")),
        (b"\x06" + b"\xff" * 8, Foreign(f"a command of {2**64 - 1} bytes")),
        (b"\x00\x01x", Foreign("a message before the handshake is over")),
    ],
)
def test_commands(data: bytes, expected: object) -> None:
    """READY and ERROR are read, the rest is named; nothing of a peer's can move a cursor."""
    assert parse_command(data) == expected


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: NULL[:12] + rest))
def test_any_bytes_are_a_greeting_or_are_not(data: bytes) -> None:
    """Nothing raises; what one prefix decides, more bytes do not change; and words can be printed."""
    found = parse_greeting(data[:64])
    assert looks_like(data).isprintable()
    if isinstance(found, Foreign):
        assert found.what.isprintable()
    if isinstance(found, Greeting):
        assert parse_greeting(data) == found
        assert found.mechanism.isprintable()
    if found is None:
        assert data[:1] in (b"", b"\xff")
        assert len(data) < 64


@given(
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda rest: command(b"READY", rest))
    | st.binary(max_size=100).map(lambda rest: command(b"ERROR", rest, long=True))
)
def test_any_bytes_are_a_command_or_are_not(data: bytes) -> None:
    """Nothing raises, and a command is the same however much comes behind it."""
    found = parse_command(data)
    if found is not None:
        assert parse_command(data + b"more") == found
    match found:
        case Ready(text) | Refusal(text) | Foreign(text):
            assert text.isprintable()
