"""CURVE: who may connect to a sink, and what is open without it."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable
from pathlib import Path

import zmq
from zmq.utils import z85

from publisher.config.endpoint import Endpoint
from publisher.config.keys import read_public_key, read_secret_key
from publisher.config.sidecar_config import ConfigError
from publisher.stream.status import CurveStatus

__all__ = ["Guard", "exposure_warning"]

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_DOMAIN = b"kvevents"
_PER_TURN = 64
_HANDSHAKE_MS = 5000
_FAILURES = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

_log = logging.getLogger("kvevents.curve")

Socket = zmq.Socket[bytes]


# ------------------------------------------------------------------------------------------ guard


class Guard:
    """Lets clients in whose public keys are in a directory, for the sockets of one context.

    It answers ZeroMQ's questions (RFC 27) in the loop of its owner: poll `pollables`, and call `handle`
    when one is readable. Until it is called, nobody new comes in. Protect sockets before they are bound,
    and close them before the guard. Raises ConfigError naming curve.secret_key or curve.client_keys.
    """

    def __init__(
        self, context: zmq.Context[Socket], *, secret_key: str | Path, client_keys: str | Path
    ) -> None:
        self._public, self._secret = read_secret_key("curve.secret_key", secret_key)
        if Path(secret_key).stat().st_mode & stat.S_IROTH:
            _log.warning("curve.secret_key: everybody on this host can read %s", secret_key)
        self._directory = Path(client_keys)
        self._allowed = _read_directory(self._directory)
        self.status = CurveStatus(keys=len(self._allowed))
        self._monitors: list[tuple[Socket, Socket]] = []
        """Each protected socket's, with that socket. Who is not of CURVE is turned away unasked."""
        self._zap = context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        try:
            self._zap.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            self._zap.close()
            raise

    @property
    def server_key(self) -> str:
        """The public key that clients must know."""
        return self._public

    @property
    def pollables(self) -> list[Socket]:
        """Readable when `handle` has something to do. Complete once all sockets are protected."""
        return [self._zap, *(monitor for _, monitor in self._monitors)]

    def protect(self, socket: Socket) -> None:
        """Make a socket that is not bound yet speak nothing but CURVE, with allowed clients."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._monitors.append((socket, socket.get_monitor_socket(_FAILURES)))

    def reload(self) -> None:
        """Read the directory anew. Who is connected stays so.

        Raises ConfigError when a file of it cannot be read; the keys stay as they were.
        """
        self._allowed = _read_directory(self._directory)
        self.status.keys = len(self._allowed)

    def handle(self) -> None:
        """Answer who is asked about, and count who was turned away; a bounded number a turn."""
        for _ in range(_PER_TURN):
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._answer(request)
        for _, monitor in self._monitors:
            for _ in range(_PER_TURN):
                try:
                    monitor.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.status.failed += 1

    def _answer(self, request: list[bytes]) -> None:
        """Of frames: who asks, an empty one, version, id, domain, address, identity, mechanism, key."""
        if len(request) != 9 or request[2] != _ZAP_VERSION:
            return  # not from ZeroMQ, which writes nothing else here
        asker, empty, version, number, _, _, _, mechanism, key = request
        if mechanism == b"CURVE" and key in self._allowed:
            self.status.accepted += 1
            verdict = [b"200", b"OK", b"", b""]
        else:
            self.status.denied += 1
            verdict = [b"400", b"No access", b"", b""]
        self._zap.send_multipart([asker, empty, version, number, *verdict])

    def close(self) -> None:
        """Safe to call twice."""
        for socket, monitor in self._monitors:
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors = []
        self._zap.close()


def _read_directory(directory: Path) -> frozenset[bytes]:
    """The keys in all its *.key files; raises ConfigError when one of those cannot be read."""
    key = "curve.client_keys"
    try:
        paths = sorted(one for one in directory.iterdir() if one.name.endswith(".key"))
    except OSError as error:
        raise ConfigError(f"{key}: {directory}: {error.strerror}") from None
    return frozenset(z85.decode(read_public_key(key, path).encode()) for path in paths)


# --------------------------------------------------------------------------------------- exposure


def exposure_warning(
    endpoints: Iterable[str], *, curve: bool, token_ids: bool = True
) -> str | None:
    """What is open to whom, in one line; None when it is only to this host, or to holders of keys.

    `endpoints`: of sinks, as bound or connected to. `token_ids`: whether any of them sends those.
    """
    open_ones = [one for one in endpoints if not Endpoint.parse("endpoint", one).is_loopback]
    if curve or not open_ones:
        return None
    told = "the prompts' token ids, and " if token_ids else ""
    return (
        f"{', '.join(open_ones)}: without CURVE, whoever reaches this network can read {told}"
        "which prefixes this worker holds"
    )
