"""Where a socket binds or connects: tcp://HOST:PORT, ipc://PATH, and http://HOST:PORT for HTTP."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace

from publisher.config.checks import ConfigError, check_text, shown

__all__ = ["PATH_BYTES", "Endpoint", "check_target"]

_TCP = re.compile(
    r"(?P<scheme>tcp|http)://"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>\*|[A-Za-z0-9._-]+))"
    r":(?P<port>\*|0|[1-9][0-9]*)",
    re.ASCII,
)
_IPC = "ipc://"
PATH_BYTES = 107
"""Of the path of a unix socket: sockaddr_un, less the final zero."""
_MAX_PORT = 65_535
_IPV4_MAPPED = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address. `str` gives back the text it was parsed from.

    `scheme`: "tcp", "ipc" or "http". `host`: without the brackets of IPv6. `port`: 0 and None, written
    `*`, are any free one. `path`: of ipc; `*` is any free one.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""

    @classmethod
    def parse(cls, key: str, text: object) -> Endpoint:
        """A ZeroMQ endpoint that can be bound. Raises ConfigError unless tcp://HOST:PORT or ipc://PATH."""
        text = _text(key, text)
        if text.startswith(_IPC):
            path = text.removeprefix(_IPC)
            if not 0 < len(path.encode()) <= PATH_BYTES:
                raise ConfigError(f"{key}: {shown(text)} needs a path of 1..{PATH_BYTES} bytes")
            if not path.isprintable():
                raise ConfigError(f"{key}: {shown(text)} is not printable")
            return cls("ipc", path=path)
        return cls._parse(key, text, "tcp", "is neither tcp://HOST:PORT nor ipc://PATH")

    @classmethod
    def parse_http(cls, key: str, text: object) -> Endpoint:
        """Where an HTTP server listens. Raises ConfigError unless http://HOST:PORT, without a wildcard
        `*`.
        """
        text = _text(key, text)
        endpoint = cls._parse(key, text, "http", "is not http://HOST:PORT")
        if endpoint.host == "*" or endpoint.port is None:
            raise ConfigError(f"{key}: {shown(text)} has a *; say http://0.0.0.0:0")
        return endpoint

    @classmethod
    def _parse(cls, key: str, text: str, scheme: str, otherwise: str) -> Endpoint:
        found = _TCP.fullmatch(text)
        if found is None or found["scheme"] != scheme:
            raise ConfigError(f"{key}: {shown(text)} {otherwise}")
        if found["ipv6"] is not None and _packed(found["ipv6"]) is None:
            raise ConfigError(f"{key}: {shown(text)} has no IPv6 address in its brackets")
        port = found["port"]
        if port != "*" and (len(port) > len(str(_MAX_PORT)) or int(port) > _MAX_PORT):
            raise ConfigError(f"{key}: port {port[:12]} of {shown(text)} is not in 0..{_MAX_PORT}")
        return cls(scheme, found["ipv6"] or found["host"], None if port == "*" else int(port))

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"{_IPC}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{'*' if self.port is None else self.port}"

    def for_rank(self, rank: int) -> Endpoint:
        """This for one rank of many: the port plus its rank, a path plus _dpRANK from rank 1 on.

        What takes any free port or path stays. Raises ValueError past port 65535, or past the length of
        a path.
        """
        if rank == 0 or self.is_any:
            return self
        if self.scheme == "ipc":
            path = f"{self.path}_dp{rank}"
            if len(path.encode()) > PATH_BYTES:
                raise ValueError(f"{_IPC}{path} is longer than {PATH_BYTES} bytes")
            return replace(self, path=path)
        assert self.port is not None
        if self.port + rank > _MAX_PORT:
            raise ValueError(f"port {self.port} + rank {rank} of {self} is above {_MAX_PORT}")
        return replace(self, port=self.port + rank)

    @property
    def is_any(self) -> bool:
        """Whether the system picks the port or the path: two such are never one address."""
        return self.path == "*" if self.scheme == "ipc" else not self.port

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of the host: nobody can connect to it."""
        if self.scheme == "ipc":
            return self.path == "*"
        packed = _packed(self.host)
        return self.host == "*" or (packed is not None and not any(packed))

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        packed = _packed(self.host)
        if packed is None:
            return False
        return packed[0] == 127 if len(packed) == 4 else packed == bytes(15) + b"\1"

    def shares_host(self, other: Endpoint) -> bool:
        """Whether one port of both can be one address."""
        if self.is_wildcard or other.is_wildcard:
            return True
        if "localhost" in (self.host, other.host):
            return self.is_loopback and other.is_loopback
        mine, theirs = _packed(self.host), _packed(other.host)
        if mine is None or theirs is None:
            return self.host.lower() == other.host.lower()
        return mine == theirs and self._zone == other._zone

    def takes(self, other: Endpoint) -> bool:
        """Whether both are one address."""
        if self.is_any or other.is_any:
            return False
        if "ipc" in (self.scheme, other.scheme):
            return self.scheme == other.scheme and self.same_path(other)
        return self.port == other.port and self.shares_host(other)

    def same_path(self, other: Endpoint) -> bool:
        """Whether two of ipc are one file, as far as their paths say."""
        return os.path.normpath(self.path) == os.path.normpath(other.path)

    @property
    def _zone(self) -> str:
        return self.host.partition("%")[2]


def check_target(key: str, endpoint: object) -> None:
    """Raises ConfigError unless `endpoint` can be connected to."""
    parsed = Endpoint.parse(key, endpoint)
    if parsed.is_wildcard:
        what = "path" if parsed.scheme == "ipc" else "host"
        raise ConfigError(f"{key}: {shown(endpoint)} cannot be connected to; name a {what}")
    if parsed.is_any:
        raise ConfigError(f"{key}: {shown(endpoint)} cannot be connected to; name its port")


def _text(key: str, text: object) -> str:
    check_text(key, text)
    return str(text)


def _packed(host: str) -> bytes | None:
    """The address in 4 or 16 bytes, IPv4 in IPv6 as IPv4; None for a name."""
    try:
        if ":" not in host:
            return socket.inet_pton(socket.AF_INET, host)
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return None
    return packed[12:] if packed.startswith(_IPV4_MAPPED) else packed
