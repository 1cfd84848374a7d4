"""Who is behind a connection: the first bytes of ZMTP 2 and 3, read with a deadline and a bound.

See https://rfc.zeromq.org/spec/23. We say no more than our version until the peer has named its
mechanism, for a peer that is told another hangs up without naming its own; and never READY, so that no
subscription comes of it.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field

__all__ = ["Foreign", "Greeting", "Peer", "Ready", "Refusal", "Silent", "greet", "looks_like"]
__all__ += ["parse_command", "parse_greeting"]

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION_3 = b"\x03"
_REST = b"\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of our greeting: minor version, mechanism, and that we are no server."""

_GREETING_BYTES, _COMMAND_BYTES = 64, 4096
_MECHANISM = re.compile(rb"[A-Z0-9_.+-]{1,20}")
_SHORT, _LONG = 0x04, 0x06
_TYPES = (
    *("PAIR", "PUB", "SUB", "REQ", "REP", "DEALER", "ROUTER", "PULL", "PUSH"),
    *("XPUB", "XSUB", "STREAM"),
)
_SHOWN = 32
_STARTS = (
    (b"HTTP/", "an HTTP server's answer"),
    (b"\x15\x03", "a TLS alert: the port speaks TLS"),
    (b"\x16\x03", "a TLS handshake"),
    (b"SSH-", "an SSH server"),
    (b"-ERR", "a Redis server's error"),
    (b"RFB ", "a VNC server"),
    (b"AMQP", "an AMQP broker"),
    (b"220 ", "a mail or FTP server"),
    (b"\x01\x00", "ZMTP 1, of before 2011"),
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a peer begins with. `socket_type`: empty where a later READY tells it."""

    version: tuple[int, int]
    mechanism: str
    as_server: bool = False
    socket_type: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The end of a handshake: what the peer says of itself. Empty where it does not."""

    socket_type: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The peer's ERROR."""

    reason: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Bytes that are not ZMTP. `what`: as a person would say it."""

    what: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing, or too little. `closed`: the peer hung up; else it did not answer in time."""

    closed: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that speaks ZMTP. `ready`: what it said after its greeting; None without NULL, or without
    an answer in time.
    """

    greeting: Greeting
    ready: Ready | Refusal | Foreign | Silent | None = field(default=None)

    @property
    def socket_type(self) -> str:
        """Empty while it is not known."""
        if isinstance(self.ready, Ready):
            return self.ready.socket_type
        return self.greeting.socket_type


# ---------------------------------------------------------------------------------------- parsing


def parse_greeting(data: bytes) -> Greeting | Foreign | None:
    """Never raises; None: so far it could be one, and more is needed. At most 64 bytes are looked at."""
    if not data:
        return None
    if data[0] != _SIGNATURE[0]:
        return Foreign(looks_like(data))
    if len(data) <= len(_SIGNATURE):
        return None
    if data[9] != _SIGNATURE[9]:
        return Foreign(looks_like(data))
    revision = data[10]
    if revision < 3:
        if len(data) < 12:
            return None
        if data[11] >= len(_TYPES):
            return Foreign(looks_like(data))
        return Greeting((max(1, revision), 0), "NULL", socket_type=_TYPES[data[11]])
    if len(data) < _GREETING_BYTES:
        return None
    mechanism = data[12:32].rstrip(b"\0")
    if _MECHANISM.fullmatch(mechanism) is None:
        return Foreign(looks_like(data))
    return Greeting((revision, data[11]), mechanism.decode(), as_server=data[32] == 1)


def parse_command(data: bytes) -> Ready | Refusal | Foreign | None:
    """What comes after the greeting. Never raises; None: more is needed."""
    if not data:
        return None
    if data[0] == _SHORT:
        head = 2
    elif data[0] == _LONG:
        head = 9
    else:
        return Foreign("a message before the handshake is over")
    if len(data) < head:
        return None
    size = int.from_bytes(data[1:head], "big")
    if size > _COMMAND_BYTES:
        return Foreign(f"a command of {size} bytes")
    if len(data) < head + size:
        return None
    return _command(data[head : head + size])


def _command(body: bytes) -> Ready | Refusal | Foreign:
    name, rest = _piece(body, 1)
    if name == b"READY":
        return _ready(rest)
    if name == b"ERROR":
        reason, _ = _piece(rest, 1)
        return Refusal(_printable(reason or b""))
    return Foreign(f"the command {_printable(name or b'')!r} in place of READY")


def _ready(rest: bytes) -> Ready | Foreign:
    found = ""
    while rest:
        name, rest = _piece(rest, 1)
        value, rest = _piece(rest, 4)
        if name is None or value is None:
            return Foreign("a READY whose properties are cut off")
        if name.lower() == b"socket-type":
            found = _printable(value)
    return Ready(found)


def _piece(data: bytes, width: int) -> tuple[bytes | None, bytes]:
    """Bytes behind their length in `width` bytes, and the rest; None where it is cut off."""
    end = width + int.from_bytes(data[:width], "big")
    if len(data) < width or len(data) < end:
        return None, b""
    return data[width:end], data[end:]


def looks_like(data: bytes) -> str:
    """What bytes that are not ZMTP are, in words that can be printed."""
    if data[3:5] == b"\x04\x00" and data[:2] == b"\0\0":
        return "HTTP/2 or gRPC"
    for start, what in _STARTS:
        if data.startswith(start):
            return what
    head = data[:_SHOWN]
    if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in head):
        return f"the text {_printable(head)!r}"
    return f"the bytes {head[:12].hex(' ')}"


def _printable(data: bytes) -> str:
    text = data[:_SHOWN].decode("latin-1")
    return "".join(sign if " " <= sign <= "~" else "." for sign in text).strip()


# ---------------------------------------------------------------------------------------- talking


def greet(connection: socket.socket, deadline: float) -> Peer | Foreign | Silent:
    """Begin a handshake, and read what the peer says of itself. Does not close the connection.

    `deadline`: of the monotonic clock. Never raises for what the peer does.
    """
    halfway = (time.monotonic() + deadline) / 2
    told = False
    if not _send(connection, _SIGNATURE + _VERSION_3, deadline):
        return Silent(closed=True)
    data = b""
    while (greeting := parse_greeting(data[:_GREETING_BYTES])) is None:
        piece = _receive(connection, deadline if told else halfway)
        if piece is None and not told:  # a peer that wants all of ours first
            told = _send(connection, _REST, deadline)
            if told:
                continue
        if not piece:
            return Silent(closed=piece == b"")
        data += piece
    if isinstance(greeting, Foreign):
        return greeting
    if greeting.mechanism != "NULL" or greeting.socket_type:
        return Peer(greeting)
    if not told and not _send(connection, _REST, deadline):
        return Peer(greeting, Silent(closed=True))
    return Peer(greeting, _read_command(connection, data[_GREETING_BYTES:], deadline))


def _read_command(
    connection: socket.socket, data: bytes, deadline: float
) -> Ready | Refusal | Foreign | Silent:
    while (command := parse_command(data)) is None:
        piece = _receive(connection, deadline)
        if not piece:
            return Silent(closed=piece == b"")
        data += piece
    return command


def _send(connection: socket.socket, data: bytes, deadline: float) -> bool:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def _receive(connection: socket.socket, deadline: float) -> bytes | None:
    """A piece; None when the time is up, empty when the peer has hung up."""
    if (left_s := deadline - time.monotonic()) <= 0:
        return None
    connection.settimeout(left_s)
    try:
        return connection.recv(_COMMAND_BYTES)
    except TimeoutError:
        return None
    except OSError:
        return b""
