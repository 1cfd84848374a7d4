"""A process that does to every socket what nobody should."""

from __future__ import annotations

import contextlib
import socket
import stat
from random import Random

import zmq
from stress_child import Parent
from stress_site import SINKS, Site, url

__all__ = ["run_vandal"]

_PATIENCE_S = 0.2
_GIANT = 1 << 20
_MOST_OPEN = 64

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0."""

_TYPES = (b"PUB", b"PAIR", b"DEALER", b"REQ", b"XSUB", b"", b"X" * 200)

_Context = zmq.Context[zmq.Socket[bytes]]


def run_vandal(parent: Parent, site: Site) -> None:
    """Obey until told to leave."""
    context = _Context()
    vandal = _Vandal(context, site)
    while True:
        match parent.poll(1.0):
            case ("garbage", seed):
                vandal.throw(Random(seed))
            case ("stuck replay",):
                vandal.get_stuck()
            case ("hang up",):
                vandal.hang_up()
            case ("leave",):
                break
            case _:
                pass
    context.destroy(linger=0)


class _Vandal:
    def __init__(self, context: _Context, site: Site) -> None:
        self._context, self._site = context, site
        self._left_open: list[socket.socket] = []

    def throw(self, random: Random) -> None:
        """A bit of everything at every socket."""
        ports = [port for pair in self._site.direct for port in pair]
        for port in (*ports, self._site.http):
            for data in self._noises(random):
                self._throw_tcp(port, data)
        self._throw_http(random)
        for pub, replay in self._site.direct:
            self._throw_subscriptions(random, pub)
            self._throw_requests(random, replay)
        for path in self._site.folder.rglob("*"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                        self._throw_unix(str(path), kind, random)

    def get_stuck(self) -> None:
        """On each sink a client that asks for everything and takes nothing."""
        for sink in SINKS:
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.setsockopt(zmq.RCVBUF, 4096)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(url(self._site.direct[sink][1]))
            dealer.send_multipart([b"", bytes(8)])

    def hang_up(self) -> None:
        """What was left open, but for the clients that are stuck."""
        for one in self._left_open:
            one.close()
        self._left_open.clear()

    # ---------------------------------------------------------------------------------- inside

    def _noises(self, random: Random) -> list[bytes]:
        return [
            b"",
            random.randbytes(random.randrange(1, 2000)),
            b"\xff" + bytes(8) + b"\x7f" + random.randbytes(100),
            _GREETING + random.randbytes(100),
            _GREETING + b"\x02" + (2**62).to_bytes(8, "big") + random.randbytes(100),
            b"GET / HTTP/1.1\r\n" + b"A: " + random.randbytes(50) + b"\r\n\r\n",
        ]

    def _throw_tcp(self, port: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
            self._left_open.append(one)
            one.sendall(data)
        for old in self._left_open[:-_MOST_OPEN]:
            old.close()
        del self._left_open[:-_MOST_OPEN]

    def _throw_http(self, random: Random) -> None:
        for request in (
            b"GET /metrics HTTP/1.1\r\n\r\n",
            b"GET /metrics HTTP/1.0\r\nHost: x\r\n",  # and never the end
            b"POST /state HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bytes(1000),
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
            random.randbytes(3000) + b"\r\n\r\n",
        ):
            self._throw_tcp(self._site.http, request)

    def _throw_subscriptions(self, random: Random, port: int) -> None:
        """By hand: ZeroMQ itself would keep the subscriptions, and break at a giant one."""
        said = [
            *(b"\1" + random.randbytes(random.randrange(100)) for _ in range(50)),
            random.randbytes(500),
            b"\1" + random.randbytes(4000),
            b"\0" + random.randbytes(10),
            b"\1" + bytes(_GIANT),
        ]
        self._throw_tcp(port, _GREETING + _ready(b"SUB") + b"".join(map(_frame, said)))
        self._throw_tcp(port, _GREETING + _ready(random.choice(_TYPES)) + _frame(bytes(9)) * 99)

    def _throw_requests(self, random: Random, port: int) -> None:
        for frames in (
            [b""],
            [b"", b""],
            [b"", random.randbytes(7)],
            [random.randbytes(9)],
            [b"", b"\xff" * 8],
            [b"", b"\xff" * 8, b"more"],
            [random.randbytes(8)] * 20,
            [b"", random.randbytes(8)],
            [b"", bytes(8)],
            [b"", random.randbytes(5000)],
            [bytes(_GIANT)],
        ):
            kind = zmq.REQ if random.random() < 0.2 else zmq.DEALER
            with self._context.socket(kind) as one:
                one.setsockopt(zmq.SNDTIMEO, int(_PATIENCE_S * 1000))
                one.connect(url(port))
                with contextlib.suppress(zmq.Again):
                    for _ in range(random.choice((1, 10))):
                        one.send_multipart(frames)
                        if kind == zmq.REQ:
                            break
                one.close(linger=int(_PATIENCE_S * 1000))

    def _throw_unix(self, path: str, kind: int, random: Random) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as one:
            one.settimeout(_PATIENCE_S)
            one.connect(path)
            one.sendall(random.randbytes(random.randrange(1, 2000)))


def _frame(data: bytes, *, flags: int = 0) -> bytes:
    """A frame of ZMTP, the last of its message."""
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data


def _ready(kind: bytes) -> bytes:
    """The command that says which kind of socket this is."""
    value = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return _frame(b"\x05READY" + value, flags=4)
