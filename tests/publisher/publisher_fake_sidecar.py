"""A sidecar that only reads the ring: PATH OUT MANNER. Notes each number in OUT before it lets go."""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from publisher.link.messages import VERSION, Failed, Hello, Ready, Welcome, receive, send
from publisher.link.ring import RingReader


def main(path: str, out: str, manner: str) -> int:
    """Manners: `stay` until the worker leaves, `die` once ready, `fail`, `hang` before saying a word."""
    print('{"level": "info", "message": "started", "logger": "x", "time": 1.5}', file=sys.stderr)
    if manner == "hang":
        sys.stdin.read()
        select.select([], [], [])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        send(connection, Hello(VERSION, os.getpid()))
        welcome, fds = receive(connection)
        assert isinstance(welcome, Welcome), welcome
        if manner == "fail":
            send(connection, Failed("endpoint: it is taken"))
            return 2
        ring = RingReader(fds[0])
        send(connection, Ready(()))
        if manner == "die":
            return 3
        poller = select.poll()
        for fd in (fds[1], connection.fileno()):
            poller.register(fd, select.POLLIN)
        with Path(out).open("a") as notes:
            while True:
                while (message := ring.read()) is not None:
                    print(message.number, message.flags, file=notes, flush=True)
                    ring.release()
                ready = dict(poller.poll())
                if fds[1] in ready:
                    os.eventfd_read(fds[1])
                elif connection.fileno() in ready:
                    break
            while (message := ring.read()) is not None:
                print(message.number, message.flags, file=notes, flush=True)
                ring.release()
            said, _ = receive(connection)
            print(type(said).__name__, file=notes, flush=True)
        print("left in good order", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
