"""Whether anybody is at an address: what its text says, names, connections, and who connects to it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import zmq

from publisher.config.checks import ConfigError, shown
from publisher.config.endpoint import Endpoint
from publisher.tools.doctor.diagnosis import Finding
from publisher.tools.source import meant

__all__ = ["Reached", "dial_raw", "listen_for", "read_address", "two_sided", "unreached"]

Came = Literal["publisher", "other", "nobody", "not ours"]
"""Who connected to an address where we listened; or it is none of this host's, or taken."""

_CONNECT_S = 3.0
_ENGINE_RULE = (
    'our sink has mode = "connect" for routers that bind; SGLang and vLLM connect too, unless their'
    " endpoint has a * (tcp://*:PORT)"
)
_HANDSHAKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ACCEPTED = int(zmq.EVENT_ACCEPTED)


@dataclass(frozen=True, slots=True)
class Reached:
    """The end of an attempt. `connection`: None where there is none, for the reason of `error`."""

    connection: socket.socket | None = None
    error: OSError | None = None


# ------------------------------------------------------------------------------------------- text


def read_address(probe: str, text: str) -> Endpoint | Finding:
    """The address, or what is wrong with it."""
    likely = meant(text)
    if "://" not in text or likely not in (None, text):
        advice = "say tcp://HOST:PORT, or ipc:///absolute/path"
        if likely is not None:
            advice = f"did you mean {likely}?"
        return _wrong(probe, f"{shown(text)} has no scheme", advice)
    try:
        endpoint = Endpoint.parse("", text)
    except ConfigError as error:
        return _wrong(probe, str(error).removeprefix(": "), _spelled(text))
    if endpoint.is_wildcard:
        advice = "name the one path there is"
        if endpoint.scheme == "tcp":
            port = endpoint.port or "PORT"
            advice = (
                f"connect to tcp://HOST:{port}, where HOST is the publisher's (127.0.0.1 on this"
                f" host); or if the router is to listen there, have the publisher connect: {_ENGINE_RULE}"
            )
        return _wrong(probe, f"{text} is where one listens, and nobody can connect to it", advice)
    if endpoint.is_any:
        advice = "name the port that the publisher got; our sidecar logs it, and /state has it"
        return _wrong(probe, f"{text} has no port: 0 is any free one", advice)
    return endpoint


def _spelled(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme in ("http", "https"):
        return "that is HTTP: give it as --http, and the PUB socket's tcp://HOST:PORT as SOURCE"
    if scheme in ("inproc", "pgm", "epgm", "udp", "ws", "wss"):
        return "KV events go over tcp:// or ipc://"
    if scheme in ("tcp", "ipc"):
        return "say tcp://HOST:PORT, or ipc:///absolute/path"
    return f"{scheme}:// is no scheme of theirs; say tcp://{rest}"


def _wrong(probe: str, text: str, advice: str, *, offline: bool = False) -> Finding:
    return Finding(probe, "wrong", text, advice, stops=True, offline=offline)


# ------------------------------------------------------------------------------------- connecting


def dial_raw(endpoint: Endpoint, timeout_s: float) -> Reached:
    """A plain connection. Never raises for what is at the other end, nor takes much longer than told."""
    deadline = time.monotonic() + min(_CONNECT_S, timeout_s)
    try:
        return Reached(_connect(endpoint, deadline))
    except OSError as error:
        return Reached(error=error)


def _connect(endpoint: Endpoint, deadline: float) -> socket.socket:
    if endpoint.scheme == "ipc":
        path = endpoint.path
        address = f"\0{path[1:]}" if path.startswith("@") else path
        return _open(socket.AF_UNIX, address, deadline)
    last: OSError = socket.gaierror(socket.EAI_NONAME, "no address")
    for family, address in _resolve(endpoint, deadline):
        try:
            return _open(family, address, deadline)
        except OSError as error:
            last = error
    raise last


def _open(family: int, address: Any, deadline: float) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(address)
        if family != socket.AF_UNIX and connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "only we are there")
    except BaseException:
        connection.close()
        raise
    return connection


def _resolve(endpoint: Endpoint, deadline: float) -> list[tuple[int, Any]]:
    """Addresses of a name, as libzmq would try them. A resolver that takes too long is left to itself."""
    found: list[list[tuple[int, Any]] | OSError] = []

    def look() -> None:
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        try:
            told = socket.getaddrinfo(
                endpoint.host, endpoint.port, family=family, type=socket.SOCK_STREAM
            )
            found.append([(one[0], one[4]) for one in told])
        except OSError as error:
            found.append(error)
        except UnicodeError:
            found.append(socket.gaierror(socket.EAI_NONAME, "not a host name"))

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(max(0.001, deadline - time.monotonic()))
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def unreached(probe: str, endpoint: Endpoint, error: OSError) -> Finding:
    """Why there is no connection, and what to look at."""
    if isinstance(error, socket.gaierror):
        text = f"the name {endpoint.host} cannot be resolved: {error.strerror}"
        advice = "look for a typo; in Kubernetes, for the Service or pod, and its namespace"
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            advice += "; a host with IPv6 alone has to be given as tcp://[ADDRESS]:PORT"
        return _wrong(probe, text, advice, offline=True)
    if endpoint.scheme == "ipc":
        return _unreached_ipc(probe, endpoint, error)
    where = _where(endpoint)
    if isinstance(error, ConnectionRefusedError):
        there = "does it bind the address of this network, not 127.0.0.1"
        if endpoint.is_loopback:
            there = "is it on this host (in a container, 127.0.0.1 is the container's own)"
        advice = (
            f"is the publisher up, {there}, and is this its port (rank N adds N)? SGLang and vLLM"
            " listen only where their endpoint has a * (tcp://*:PORT), and else connect"
        )
        return _wrong(probe, f"nobody listens at {where}", advice, offline=True)
    if isinstance(error, TimeoutError):
        advice = "a firewall or NetworkPolicy drops it, or the address is of a host that is gone"
        return _wrong(probe, f"{where} does not answer", advice, offline=True)
    text = f"{where} cannot be reached: {error.strerror or error}"
    return _wrong(probe, text, "is this host's network the publisher's?", offline=True)


def _unreached_ipc(probe: str, endpoint: Endpoint, error: OSError) -> Finding:
    path = Path(endpoint.path)
    what = f"nobody listens at ipc://{path}"
    if isinstance(error, PermissionError):
        text = f"we may not connect to ipc://{path}"
        advice = "run as the publisher's user, or open the socket and its folder to this one"
        return _wrong(probe, text, advice, offline=True)
    if endpoint.path.startswith("@"):
        return _wrong(probe, what, "is the publisher up, in this network namespace?", offline=True)
    try:
        mode = path.stat().st_mode
    except OSError:
        text = f"there is no file {path}"
        advice = (
            "is the publisher up, and in a container, is its folder mounted in both? Rank N's path"
            " ends with _dpN"
        )
        return _wrong(probe, text, advice, offline=True)
    if not stat.S_ISSOCK(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no socket"
        return _wrong(probe, f"{path} is {kind}", "name the publisher's socket", offline=True)
    if isinstance(error, TimeoutError):
        return _wrong(probe, f"ipc://{path} does not answer", "is it stopped?", offline=True)
    advice = "its publisher is gone and left the file behind: start it again"
    return _wrong(probe, what, advice, offline=True)


def _where(endpoint: Endpoint) -> str:
    return str(endpoint).removeprefix("tcp://")


# ------------------------------------------------------------------------------------ the other side


def listen_for(endpoint: Endpoint, seconds: float) -> Came:
    """Listen at an address where nobody does, as a router that binds would, for so long at most.

    Leaves a file of ipc alone that is there already.
    """
    if endpoint.scheme == "ipc" and os.path.lexists(endpoint.path):
        return "not ours"
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
        sub = stack.enter_context(context.socket(zmq.SUB))
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.IPV6, ":" in endpoint.host)
        monitor = stack.enter_context(sub.get_monitor_socket(_HANDSHAKEN | _ACCEPTED))
        stack.callback(sub.disable_monitor)
        try:
            for one in _local(endpoint):
                sub.bind(one)
        except (zmq.ZMQError, OSError):
            return "not ours"
        if endpoint.scheme == "ipc":
            stack.callback(_unlink, Path(endpoint.path), _inode(Path(endpoint.path)))
        deadline, came = time.monotonic() + seconds, False
        while (left_s := deadline - time.monotonic()) > 0:
            if not monitor.poll(int(left_s * 1000) + 1):
                break
            event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
            if event == _HANDSHAKEN:
                return "publisher"
            came = True
        return "other" if came else "nobody"


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _unlink(path: Path, inode: int | None) -> None:
    """The file of a socket, which libzmq leaves; not another's that took its place meanwhile."""
    if inode is not None and _inode(path) == inode:
        with contextlib.suppress(OSError):
            path.unlink()


def _local(endpoint: Endpoint) -> Iterator[str]:
    """To bind: libzmq takes no names there."""
    if endpoint.scheme == "ipc":
        yield str(endpoint)
        return
    _, address = _resolve(endpoint, time.monotonic() + _CONNECT_S)[0]
    yield str(Endpoint("tcp", str(address[0]), endpoint.port))


def two_sided(endpoint: Endpoint, came: Came) -> Finding | None:
    """What it means that somebody connected to us."""
    if came == "publisher":
        text = f"a publisher connects to {endpoint}, and the router does not listen there"
        advice = (
            f'let the router bind {endpoint}, or else the publisher: mode = "bind" of our sink, an'
            " endpoint with a * of SGLang or vLLM. Two that connect never meet"
        )
        return _wrong("two-sided", text, advice, offline=True)
    if came == "other":
        text = f"something connects to {endpoint} that is no publisher, most likely a router"
        advice = "it waits for a publisher to bind there: start it, or look at its address"
        return Finding("two-sided", "unknown", text, advice)
    return None
