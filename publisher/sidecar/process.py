"""The sidecar's process: what it opens, in which order, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from publisher.config.endpoint import PATH_BYTES, Endpoint
from publisher.config.sidecar_config import (
    ConfigError,
    SidecarConfig,
    WorkerInfo,
    check_ports,
    check_worker,
    sink_names,
)
from publisher.link.messages import Ready
from publisher.link.rendezvous import remove_if_left
from publisher.sidecar.curve import Guard, exposure_warning
from publisher.sidecar.front import Front
from publisher.sidecar.logs import LineHandler, configure, fields
from publisher.sidecar.loop import Loop
from publisher.sidecar.relay import RelaySource
from publisher.sidecar.signals import Signals
from publisher.sidecar.sink import Sink, SinkError
from publisher.sidecar.source import LinkSource, Source, SourceError
from publisher.stream.core import Core
from publisher.stream.state_folder import StateError, StateFolder, default_root
from publisher.stream.status import SidecarStatus
from publisher.version import VERSION

__all__ = ["serve"]

_CONNECT_S = 10.0
_TAKE_OVER_S = 4.0
"""How long, beyond its linger, to wait for an earlier sidecar to let go of the state."""
_LONGEST_TAKE_OVER_S = 8.0  # a worker waits ten for its sidecar to be ready
_LOOK_AGAIN_S = 0.2
_CLOSE_LINGER_S = 0.2  # what was published last has had the linger to leave

_RANK = re.compile(r"dp(\d{1,9})$")

_log = logging.getLogger("kvevents.sidecar")

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class _Process:
    """What is the same for every worker that this process serves."""

    config: SidecarConfig
    facts: Mapping[str, str]
    signals: Signals
    handler: LineHandler
    front: Front


def serve(
    link: Path | None,
    config: SidecarConfig,
    *,
    facts: Mapping[str, str] | None = None,
    forever: bool = False,
) -> int:
    """Run until the worker is gone or SIGTERM comes; the process's exit code.

    `link`: the worker's socket; None: `config.relay` says where the engine is. `facts`: what topics may
    say besides. `forever`: wait for a worker, and for the next one when it is gone. Raises SourceError
    when there is no worker at `link`.
    """
    if link is not None and len(os.fsencode(link)) > PATH_BYTES:
        raise ConfigError(f"--link: {link}: longer than {PATH_BYTES} bytes")
    _raise_descriptor_limit()
    handler = configure(config.log_format, config.log_level, sys.stderr)
    waits = forever and link is not None
    signals = Signals(ignore_interrupt=not waits and link is not None)
    with contextlib.closing(signals), contextlib.closing(Front(stays=waits)) as front:
        ours = _Process(config, facts or {}, signals, handler, front)
        if link is None:
            return _serve_one(None, ours)
        if waits:
            return _serve_all(link, ours)
        try:
            return _serve_one(link, ours)
        finally:
            remove_if_left(link)  # of a worker that was killed


def _raise_descriptor_limit() -> None:
    """As many as this process may have: each subscriber takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve_all(link: Path, ours: _Process) -> int:
    """One worker after the other, until the process is to end. HTTP is there meanwhile."""
    signals, front = ours.signals, ours.front
    found = _RANK.search(link.name)
    try:
        front.open(ours.config.http_endpoint, int(found[1]) if found else 0, None)
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    said = ""
    while _await_link(link, signals):
        try:
            code = _serve_one(link, ours)
            if code or signals.stopping:
                return code
            said = ""
        except SourceError as error:  # it is gone and has left its socket
            if str(error) != said and not signals.stopping:
                said = str(error)
                _log.info("%s; waiting", error)
            if not _wait(signals):  # its socket may stay there for ever
                return 0
        front.wait()
    return 0


def _await_link(link: Path, signals: Signals) -> bool:
    """Until something is at `link`; False when the process is to end."""
    if not _is_there(link):
        _log.info("waiting for a worker at %s", link)
    while not _is_there(link):
        if not _wait(signals):
            return False
    return True


def _is_there(link: Path) -> bool:
    """Raises ConfigError for a path that cannot be looked at."""
    try:
        return link.exists()
    except OSError as error:
        raise ConfigError(f"--link: {link}: {error.strerror}") from None


def _wait(signals: Signals) -> bool:
    select.select([signals.fd], [], [], _LOOK_AGAIN_S)
    signals.take()
    return not signals.stopping


def _serve_one(link: Path | None, ours: _Process) -> int:
    """For one worker. A reason not to start is said to it, and logged."""
    with contextlib.ExitStack() as state, contextlib.ExitStack() as opened:
        context = Context()
        opened.callback(context.term)
        source: Source
        if link is not None:
            source = LinkSource(link, timeout_s=_CONNECT_S, stopping=lambda: ours.signals.stopping)
        else:
            assert ours.config.relay is not None, "settings: a link or a relay"
            source = RelaySource(ours.config.relay, context=context)
        opened.callback(source.close)
        try:
            loop = _open(state, opened, context, source, link, ours)
        except (ConfigError, SinkError, StateError, OSError) as error:
            _log.error("%s", error)
            if isinstance(source, LinkSource):
                source.failed(str(error))
            return 2
        loop.run()
    return 0


def _open(
    state: contextlib.ExitStack,
    opened: contextlib.ExitStack,
    context: Context,
    source: Source,
    link: Path | None,
    ours: _Process,
) -> Loop:
    """State first: its lock is let go when an earlier sidecar's sockets are closed, which is when their
    context has ended. Then the sockets; the journal goes on when all of them are there.
    """
    config, front, worker = ours.config, ours.front, source.worker
    before = source.before if isinstance(source, LinkSource) else None
    check_worker(config, worker)
    check_ports(config, worker)
    folder = _state_folder(config, worker, link, ours.signals)
    if folder is not None:
        state.callback(folder.close)
    core = Core(
        worker,
        source.link_id,
        config.sinks,
        sink_names(config),
        folder.path if folder else None,
        clock=time.time,
        with_journal=config.persist == "all",
        may_reset=config.on_lost_state == "reset",
    )
    opened.callback(core.close)
    guard = None
    if config.curve is not None:
        guard = Guard(
            context,
            secret_key=config.curve.secret_key,
            client_keys=config.curve.client_keys,
        )
        opened.callback(guard.close)
    sinks: list[Sink] = []
    for number, one in enumerate(config.sinks):
        kept = before.sinks[number] if before and number < len(before.sinks) else None
        with _naming(config, number):
            sink = Sink(
                context,
                one,
                core.outputs[number],
                worker,
                ours.facts,
                guard=guard,
                before=kept,
                subscriber_timeout_s=config.subscriber_timeout_s,
            )
        opened.callback(sink.close, linger_s=_CLOSE_LINGER_S)
        sinks.append(sink)
    status = SidecarStatus(worker, VERSION, os.getpid(), time.time())
    front.open(config.http_endpoint, worker.dp_rank, before.http_endpoint if before else None)
    front.status = status
    if not front.stays:  # its port is free before the state is
        opened.callback(front.close)
    waits = folder.successor_waits if folder is not None else lambda: False
    loop = Loop(source, core, sinks, config, status, ours.signals, guard, ours.handler, waits)
    loop.begin()
    if isinstance(source, LinkSource):
        source.ready(Ready(tuple(sink.bound for sink in sinks), front.endpoint))
    _say_started(core, sinks, config, front)
    if worker.block_size == 1:
        _log.warning(
            "block_size: 1: each token is a block of its own, on the wire and in every router; pages of"
            " 16 or 64 tokens (SGLang: --page-size) cost a fraction of that"
        )
    return loop


@contextlib.contextmanager
def _naming(config: SidecarConfig, number: int) -> Iterator[None]:
    """Errors of a sink name it where there are several."""
    try:
        yield
    except (SinkError, ConfigError) as error:
        if len(config.sinks) == 1:
            raise
        raise type(error)(f"sinks[{number}].{error}") from None


def _state_folder(
    config: SidecarConfig, worker: WorkerInfo, link: Path | None, signals: Signals
) -> StateFolder | None:
    """Named by what subscribers know the stream by: the worker's id, or the first address that is bound.
    Where that is any free port, or there is none, what is kept ends with the worker: beside the link.
    """
    if config.persist == "none":
        return None
    bound = [sink for sink in config.sinks if sink.mode == "bind"]  # who connects has no address
    address = bound[0].endpoints_of(worker.dp_rank)[0] if bound else ""
    stable = worker.worker_id or (bound and not Endpoint.parse("endpoint", address).is_any)
    root = Path(config.state_dir) if config.state_dir else default_root()
    if not stable and config.state_dir is None:
        if link is None:
            return None
        root = link.parent / "state"
    label = worker.worker_id or address.replace("://", "_").replace(":", "_")
    name = f"{label}-dp{worker.dp_rank}" if stable else f"dp{worker.dp_rank}"
    wait_s = min(config.linger_s + _TAKE_OVER_S, _LONGEST_TAKE_OVER_S)
    return StateFolder(root, name, wait_s=wait_s, stopping=lambda: signals.stopping)


def _say_started(core: Core, sinks: list[Sink], config: SidecarConfig, front: Front) -> None:
    for sink in sinks:
        name, endpoint = sink.status.name, sink.bound.endpoint
        replays = (
            f"replays on {where}" if (where := sink.bound.replay_endpoint) else "has no replay"
        )
        extra = fields(next_seq=sink.output.next_seq, start="warm" if core.warm else "cold")
        if sink.status.mode == "bind":
            _log.info("sink %s publishes on %s, %s", name, endpoint, replays, extra=extra)
        else:
            _log.info(
                "sink %s connects to %s, where the router has to bind, %s",
                name,
                endpoint,
                replays,
                extra=extra,
            )
    if front.endpoint is not None:
        _log.info("metrics and health at %s", front.endpoint)
    warning = exposure_warning(
        [
            address
            for sink in sinks
            for address in (*sink.status.endpoints, sink.bound.replay_endpoint)
            if address is not None
        ],
        curve=config.curve is not None,
        token_ids=any(sink.token_ids for sink in config.sinks),
    )
    if warning is not None:
        _log.warning("%s", warning)
