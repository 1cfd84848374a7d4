"""Connecting to a publisher, as all who listen do it: IPv6, CURVE, and what an error says."""

from __future__ import annotations

import zmq

from publisher.config.checks import ConfigError
from publisher.config.keys import is_key

__all__ = ["ClientKeys", "check_client_keys", "dial"]

ClientKeys = tuple[str, str, str]
"""The server's public key, and our own public and secret one."""

_CURVE_OPTIONS = (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY)
_ALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 3),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""A host that is gone says nothing, and who only listens would wait for ever: it is given up after 14 s,
three heartbeats of a sidecar, and connected to anew.
"""


def check_client_keys(
    server_key: str | None, client_keys: tuple[str, str] | None
) -> ClientKeys | None:
    """The keys for a socket; None without CURVE. Without `client_keys` it gets keys of its own.

    Raises ConfigError for keys that are none.
    """
    if server_key is None:
        if client_keys is not None:
            raise ConfigError("client_keys: they need a server_key")
        return None
    if not is_key(server_key):
        raise ConfigError("server_key: it is not a CURVE key, 40 characters of Z85")
    if client_keys is None:
        public, secret = (key.decode() for key in zmq.curve_keypair())
    else:
        public, secret = client_keys
        if not (is_key(public) and is_key(secret)):
            raise ConfigError("client_keys: they are not two CURVE keys, 40 characters of Z85 each")
    return server_key, public, secret


def dial(socket: zmq.Socket[bytes], key: str, endpoint: str, keys: ClientKeys | None) -> None:
    """Connect `socket`. Raises ConfigError, beginning with `key`, where that cannot be."""
    if keys is not None:
        for option, value in zip(_CURVE_OPTIONS, keys, strict=True):
            socket.setsockopt_string(option, value)
    for setting, number in _ALIVE:
        socket.setsockopt(setting, number)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: {endpoint!r} cannot be connected to: {error.strerror}") from None
