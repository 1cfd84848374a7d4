"""A worker's sidecar: started as its child, or let in from elsewhere; looked after until it is closed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from pathlib import Path

from kvevents.records import RecordSource
from publisher.closing import Closing
from publisher.config.sidecar_config import SidecarConfig, WorkerInfo
from publisher.link.rendezvous import Rendezvous, Taken, private, shared
from publisher.worker.attendant import Attendant, Respawn, SidecarState
from publisher.worker.child import serve
from publisher.worker.client import DEFAULT_RING_BYTES, LinkError, SidecarClient
from publisher.worker.door import ABSENT, SLOW

__all__ = ["Sidecar", "listen", "spawn"]

_TERM_S = 1.0
_EXIT_S, _EXIT_TERM_S = 1.2, 0.2  # a process that ends does so within two seconds


class Sidecar(Closing):
    """A worker's sidecar, and what looks after it. `client` is the worker's end of the link.

    Closed at the interpreter's exit at the latest.
    """

    def __init__(self, client: SidecarClient, attendant: Attendant, meeting: Rendezvous) -> None:
        self.client, self._attendant, self._meeting = client, attendant, meeting
        self._closing = threading.RLock()
        self._closed = False
        atexit.register(self._at_exit)
        _close_in_children(self)

    @property
    def pid(self) -> int:
        """The child's process id, of the one started last; without a child, of who was let in last, 0
        before.
        """
        return self._attendant.pid

    @property
    def state(self) -> SidecarState:
        """Whether it is ready, awaited, given up or closed."""
        return self._attendant.state

    @property
    def http_endpoint(self) -> str | None:
        """Where it serves metrics and health, once it is ready; None without HTTP."""
        return self.client.http_endpoint

    @property
    def restarts(self) -> int:
        """How often the child was started again."""
        return self._attendant.restarts

    @property
    def link(self) -> Path:
        """The socket at which a sidecar connects."""
        return self._meeting.path

    def pump(self, source: RecordSource) -> bool:
        """Tell what changed in `source`, each step. See `SidecarClient.pump`."""
        return self.client.pump(source)

    def close(self, timeout_s: float = 5.0) -> int:
        """Leave: the sidecar publishes what is in the ring, and that the worker is gone, and ends.

        Waits for a child at most `timeout_s`, then ends it. Returns the exit code of the last child, 0
        without one. In a process forked since it does nothing. Any thread may call it, at any time,
        also twice.
        """
        return self._close(timeout_s, _TERM_S)

    def _close(self, timeout_s: float, term_s: float) -> int:
        if not self.client.owned:  # a forked child's copy; the sidecar is its parent's
            return 0
        with self._closing:
            if not self._closed:
                self.client.stop()
                self._attendant.leave(timeout_s, term_s)
                self.client.close()
                self._meeting.close()
                atexit.unregister(self._at_exit)
                self._closed = True
        return self._attendant.exit_code

    def _at_exit(self) -> None:
        self._close(_EXIT_S, _EXIT_TERM_S)

    def close_copies(self) -> None:
        """Let go of the descriptors, as a forked child does."""
        with contextlib.suppress(BufferError):  # a thread that is not in this process was writing
            self.client.close_copies()
        self._attendant.close_copies()
        self._meeting.let_go()


def _close_in_children(sidecar: Sidecar) -> None:
    """So that a forked child holds neither the lock nor the connection of a worker that has died."""
    found = weakref.ref(sidecar)

    def close() -> None:
        if (one := found()) is not None:
            one.close_copies()

    os.register_at_fork(after_in_child=close)


def spawn(
    worker: WorkerInfo,
    config: SidecarConfig | None = None,
    *,
    ring_bytes: int = DEFAULT_RING_BYTES,
    ready_s: float = 10.0,
    respawn: Respawn | None = Respawn(),  # noqa: B008  frozen
) -> Sidecar:
    """Start a sidecar and wait until its sockets are bound, at most `ready_s`.

    When it ends it is started again as `respawn` says, with the same link; without, it is given up.
    The child ends when this process does, however it ends. Raises LinkError, with the child's reason
    and no process left, when it does not get ready; ValueError for a ring too small; OSError.
    """
    meeting = private()
    client: SidecarClient | None = None
    attendant: Attendant | None = None
    settings = config or SidecarConfig()
    try:
        client = SidecarClient(meeting.path, worker, ring_bytes=ring_bytes)
        attendant = Attendant(
            client, lambda: serve(meeting.path, settings), respawn, ready_s=ready_s
        )
        in_time = attendant.settled.wait(ready_s)
        if not in_time and attendant.state is not SidecarState.READY:
            raise LinkError(SLOW if client.door.busy else ABSENT)
        if attendant.error:
            raise LinkError(attendant.error)
        return Sidecar(client, attendant, meeting)
    except BaseException:
        if attendant is not None:
            attendant.leave(0.0, 0.0)
        if client is not None:
            client.close()
        meeting.close()
        raise


def listen(
    worker: WorkerInfo,
    directory: Path | str,
    *,
    ring_bytes: int = DEFAULT_RING_BYTES,
    ready_s: float = 10.0,
    mode: int = 0o700,
) -> Sidecar:
    """Wait, in the background, for a sidecar from elsewhere: another container of the pod, say, that
    runs `kvevents serve --link DIRECTORY/link-dp0`. It may come, leave and come again.

    The last part of `directory` is made if it is not there. `mode`: the most access that it may give.
    Raises ValueError for a directory that is another user's or gives more, LinkError when another
    worker of this rank has the link there, ValueError for a ring too small, OSError.
    """
    try:
        meeting = shared(Path(directory), f"link-dp{worker.dp_rank}", mode)
    except Taken as taken:
        raise LinkError(str(taken)) from None
    try:
        client = SidecarClient(meeting.path, worker, ring_bytes=ring_bytes)
        try:
            meeting.path.chmod(mode & 0o666)
            return Sidecar(client, Attendant(client, ready_s=ready_s), meeting)
        except BaseException:
            client.close()
            raise
    except BaseException:
        meeting.close()
        raise
