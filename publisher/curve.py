"""CURVE: keys in files, and who may connect to a sink.

Key files have the form of ZeroMQ's certificates, as czmq and pyzmq write them. No secret is ever logged,
shown or part of an error.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from publisher.config import ConfigError
from publisher.endpoint import Endpoint
from publisher.status import CurveStatus

__all__ = [
    "Guard",
    "exposure_warning",
    "is_key",
    "read_public_key",
    "read_secret_key",
    "write_keys",
]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(r"\s*(public|secret)-key\s*=\s*[\"']?([^\"'\s]*)[\"']?\s*")
_KEY_LENGTH = 40
_FILE_BYTES = 64 << 10
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_DOMAIN = b"kvevents"
_PER_TURN = 64
_HANDSHAKE_MS = 5000
_FAILURES = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

_log = logging.getLogger("kvevents.curve")

Socket = zmq.Socket[bytes]


# ------------------------------------------------------------------------------------------ files


def write_keys(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys: NAME.key, to give away, and NAME.key_secret, for its owner's eyes only.

    The directory is made where it is missing. Raises ValueError for a name that is not one of a file,
    FileExistsError rather than overwrite either file, OSError when they cannot be written.
    """
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise ValueError(f"name: {name!r} is not 1..64 of A-Z a-z 0-9 _ - and dots inside")
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    lines = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    _write_new(public_path, f"# CURVE public key of {name}: for the other side.\n{lines}", 0o644)
    try:
        _write_new(
            secret_path,
            f"# CURVE SECRET key of {name}: give it to nobody.\n{lines}"
            f'    secret-key = "{secret.decode()}"\n',
            0o600,
        )
    except BaseException:
        public_path.unlink()
        raise
    return public_path, secret_path


def _write_new(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def read_public_key(key: str, path: str | Path) -> str:
    """The public key in a file of either kind. Raises ConfigError, beginning with `key`, naming it."""
    return _read_keys(key, Path(path), "public")["public"]


def read_secret_key(key: str, path: str | Path) -> tuple[str, str]:
    """The public and the secret key in a file. Raises ConfigError, beginning with `key`, naming it."""
    found = _read_keys(key, Path(path), "secret")
    return found["public"], found["secret"]


def _read_keys(key: str, path: Path, needed: Literal["public", "secret"]) -> dict[str, str]:
    try:
        text = _read_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file of up to 64 KiB"
        raise ConfigError(f"{key}: {path}: {reason}") from None
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    found = {match[1]: match[2] for match in lines if match is not None}
    for wanted in ("public", needed):
        if wanted not in found:
            raise ConfigError(f"{key}: {path}: it has no {wanted}-key")
    for kind, value in found.items():
        if not is_key(value):
            raise ConfigError(
                f"{key}: {path}: its {kind}-key is not {_KEY_LENGTH} characters of Z85"
            )
    if "secret" in found and zmq.curve_public(found["secret"].encode()) != found["public"].encode():
        raise ConfigError(f"{key}: {path}: its two keys are not of one pair")
    return found


def _read_file(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe: do not wait
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError
        data = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise ValueError
    return data.decode()


def is_key(value: str) -> bool:
    """Whether it is Z85 of 32 bytes, spelled as everybody spells those."""
    if len(value) != _KEY_LENGTH:
        return False
    try:
        decoded = z85.decode(value.encode())
    except (KeyError, ValueError, struct.error):
        return False
    return len(decoded) == 32 and z85.encode(decoded) == value.encode()


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
