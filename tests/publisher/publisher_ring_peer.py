"""The other end of a ring, in a process that can be killed: `write FD` or `read FD`."""

from __future__ import annotations

import signal
import socket
import struct
import sys

from publisher.link.ring import MIN_RING_BYTES, RingReader, RingWriter


def write(connection: int) -> None:
    """Send the ring's memory over the socket, then write for ever."""
    writer = RingWriter(MIN_RING_BYTES)
    with socket.socket(fileno=connection) as peer:
        socket.send_fds(peer, [b"."], [writer.fd])
        while True:
            number = writer.offered
            size = number * 37 % 900
            word = struct.pack("<I", number * 2654435761 % 2**32)
            writer.write((word * (size // 4 + 1))[:size])


def read(ring: int) -> None:
    """Read three messages, let go of the first, and wait."""
    reader = RingReader(ring)
    reader.read()
    reader.release()
    reader.read()
    reader.read()
    print("released 0, read 1 and 2", flush=True)
    signal.pause()


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](int(sys.argv[2]))
