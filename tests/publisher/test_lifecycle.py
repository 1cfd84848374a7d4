"""rendezvous, door, child, attendant: who meets whom, who is let in, who looks after it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handler_rig import broken_handler
from hypothesis import given
from hypothesis import strategies as st
from publisher_link_rig import FAKE_SIDECAR, Peer, Refused, store, until, worker_running
from publisher_rig import (
    PATIENCE_S,
    kill,
    make_cache,
    open_fds,
    short_folder,
    still_running,
)

from kvevents import KVEventsError
from publisher import (
    LinkError,
    Respawn,
    Sidecar,
    SidecarClient,
    SidecarState,
    WorkerInfo,
    listen,
)
from publisher.link.messages import (
    VERSION,
    Close,
    Failed,
    Flush,
    Hello,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.link.rendezvous import Taken, private, remove_if_left, shared
from publisher.worker.attendant import Attendant
from publisher.worker.child import MAX_LINE_BYTES, Child, LogLines
from publisher.worker.door import Admitted, Door, Left, Outcome, TurnedAway

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4, dp_rank=3)
QUICK = Respawn(first_s=0.01)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files of a test, which may leave no descriptor and no file in it."""
    before = open_fds()
    with short_folder() as found:
        monkeypatch.setattr("tempfile.tempdir", str(found))
        yield found
        assert not [one for one in threading.enumerate() if "attendant" in one.name]
        assert open_fds() == before
        assert [one for one in found.iterdir() if one.name.startswith("kvevents-")] == []


# ------------------------------------------------------------------------------------- rendezvous


def test_a_private_folder_is_this_users_and_goes_with_its_link(folder: Path) -> None:
    """Mode 0700, a socket's path in it, and nothing of it left after closing, twice."""
    meeting = private()
    assert meeting.path.parent.stat().st_mode & 0o777 == 0o700
    meeting.path.touch()
    meeting.close()
    meeting.close()
    assert list(folder.iterdir()) == []


MEETING_WORKER = """
import sys
from publisher.link.rendezvous import private
meeting = private()
meeting.path.touch()
print(meeting.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_worker_left_is_removed_by_the_next(folder: Path) -> None:
    """R1: a folder whose worker lives stays, however many look; once that is killed the next one made
    takes it away.
    """
    with worker_running(MEETING_WORKER) as worker:
        assert worker.stdout is not None
        left = Path(worker.stdout.readline().strip())
        assert left.parent.parent == folder
        private().close()
        assert not remove_if_left(left)
        assert left.exists()
        kill(worker.pid)
        assert still_running([worker.pid], PATIENCE_S) == set()
        private().close()
        assert not left.parent.exists()


def test_what_is_not_ours_is_never_removed(folder: Path) -> None:
    """A folder of another name, of another user, without a lock, or that is a symbolic link, stays."""
    named, bare, theirs, target = (
        folder / name for name in ("other", "kvevents-link-bare", "kvevents-link-x", "target")
    )
    for one in (named, bare, theirs, target):
        one.mkdir()
    for one in (named, theirs, target):
        (one / "lock").touch()
    link = folder / "kvevents-link-y"
    link.symlink_to(target)
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
    else:
        (theirs / "lock").unlink()
    for one in (named, bare, theirs, link, folder / "kvevents-link-none"):
        assert not remove_if_left(one / "link")
    private().close()
    assert all(one.exists() for one in (named, bare, theirs, target, link))
    for one in (bare, theirs, link):
        one.rename(folder / f"seen-{one.name}")


def test_a_shared_directory_has_one_worker_of_a_rank(folder: Path) -> None:
    """The second is told who has it; another name is free; after the first is closed the name is too,
    and neither socket nor lock is left.
    """
    directory = folder / "pod"
    first = shared(directory, "link-dp0")
    assert directory.stat().st_mode & 0o777 == 0o700
    with pytest.raises(Taken, match=rf"link-dp0\.lock is held by the worker of pid {os.getpid()}$"):
        shared(directory, "link-dp0")
    other = shared(directory, "link-dp1")
    first.close()
    other.close()
    shared(directory, "link-dp0").close()
    assert list(directory.iterdir()) == []


def test_a_lock_that_was_removed_is_not_held(folder: Path) -> None:
    """R2: who locks a file that is at its path no more has nothing; the next takes a new one."""
    first = shared(folder, "x")
    (folder / "x.lock").unlink()
    second = shared(folder, "x")
    with pytest.raises(Taken):
        shared(folder, "x")
    second.close()
    first.close()


@pytest.mark.parametrize("mode", [0o770, 0o705, 0o777, 0o722])
def test_a_directory_open_to_others_is_refused(folder: Path, mode: int) -> None:
    """ValueError naming it and its mode, unless so much access is allowed."""
    directory = folder / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ValueError, match=rf"^directory: {directory} has mode 0{mode:o}"):
        listen(WORKER, directory)
    assert list(directory.iterdir()) == []
    with listen(WORKER, directory, mode=mode) as sidecar:
        assert sidecar.link.stat().st_mode & 0o777 == mode & 0o666


def test_a_directory_that_is_none_of_ours_is_refused(folder: Path) -> None:
    """A file, another user's, or one in a directory that is not there."""
    (folder / "file").touch()
    with pytest.raises(ValueError, match="file is no directory"):
        listen(WORKER, folder / "file")
    with pytest.raises(FileNotFoundError):
        listen(WORKER, folder / "none" / "pod")
    if os.geteuid() == 0:
        (folder / "theirs").mkdir(mode=0o700)
        os.chown(folder / "theirs", 12345, 12345)
        with pytest.raises(ValueError, match=r"theirs is user 12345's, this is user 0$"):
            listen(WORKER, folder / "theirs")


LISTENING_WORKER = """
import os, sys
from publisher import WorkerInfo, listen
sidecar = listen(WorkerInfo(block_size=4, dp_rank=3), sys.argv[1])
child, (reading, writing) = 0, os.pipe()
if "fork" in sys.argv:
    child = os.fork()
    if not child:
        os.write(writing, b"x")  # it has let go of its copies
        sys.stdin.read()
        os._exit(0)
    os.read(reading, 1)
print(sidecar.link, child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("forked", [False, True], ids=["", "forked"])
def test_a_killed_workers_link_is_free(folder: Path, *, forked: bool) -> None:
    """Its socket is cleaned and its lock free, though a child that it forked lives; while it lives
    itself, nobody gets in.
    """
    arguments = [str(folder / "pod"), *(["fork"] if forked else [])]
    with worker_running(LISTENING_WORKER, *arguments) as worker:
        assert worker.stdout is not None
        link, child = worker.stdout.readline().split()
        assert Path(link) == folder / "pod" / "link-dp3"
        with pytest.raises(LinkError, match=rf"held by the worker of pid {worker.pid}$"):
            listen(WORKER, folder / "pod")
        with Peer(Path(link)) as peer:
            kill(worker.pid)
            assert peer.hear() is None, "the connection ends with the worker"
        assert still_running([worker.pid], PATIENCE_S) == set()
        if forked:
            assert still_running([int(child)], 0.0) == {int(child)}
        assert Path(link).is_socket()
        with listen(WORKER, folder / "pod") as sidecar, Peer(sidecar.link):
            until(lambda: sidecar.state == SidecarState.READY)


# ------------------------------------------------------------------------------------------- door


class Visit:
    """A door and those who come to it; time is the test's."""

    def __init__(self, folder: Path, only_pid: int | None = None) -> None:
        self.memory = os.memfd_create("ring")
        self.path = folder / "door"
        self.door = Door(self.path, Welcome(VERSION, WORKER, bytes(16)), (self.memory,) * 2)
        self.door.only_pid = only_pid
        self.now = 100.0
        self.guests: list[socket.socket] = []

    def come(
        self, *said: Hello | Ready | Failed | Close, raw: bytes | None = None
    ) -> socket.socket:
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.guests.append(guest)
        guest.settimeout(PATIENCE_S)
        guest.connect(str(self.path))
        for message in said:
            send(guest, message)
        if raw is not None:
            guest.send(raw)
        return guest

    def attend(self) -> list[Outcome]:
        return self.door.attend(self.now)

    def hear(self, guest: socket.socket) -> object:
        message, fds = receive(guest)
        for fd in fds:
            os.close(fd)
        return message

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()
        self.door.close()
        assert not self.path.exists()
        for guest in self.guests:
            guest.close()
        os.close(self.memory)


HELLO = Hello(VERSION, 7)


def let_in(visit: Visit) -> socket.socket:
    guest = visit.come(HELLO)
    visit.attend()
    assert isinstance(visit.hear(guest), Welcome)
    send(guest, Ready(()))
    (outcome,) = visit.attend()
    assert isinstance(outcome, Admitted)
    visit.guests.append(outcome.connection)
    assert outcome.pid == os.getpid()
    return guest


def test_one_has_the_link_until_it_leaves(folder: Path) -> None:
    """D1: a second one is told who has it, already while the first gets ready; when that has left the
    next is welcomed, and told what the one before had bound.
    """
    with Visit(folder) as visit:
        first = visit.come(HELLO)
        assert visit.attend() == []
        for _ in range(2):
            second = visit.come(HELLO)
            taken = f"the link is taken by pid {os.getpid()}"
            assert visit.attend() == [TurnedAway(os.getpid(), taken)]
            assert visit.hear(second) == Failed(taken)
            assert visit.hear(second) is None
            if isinstance(visit.hear(first), Welcome):
                send(first, Ready((), "http://x"))
                (outcome,) = visit.attend()
                assert isinstance(outcome, Admitted)
                visit.guests.append(outcome.connection)
                send(first, Flush(1))  # so that there is something to hear the second time
                send(outcome.connection, Flush(1))
        first.close()
        third = visit.come(HELLO)
        assert visit.attend() == [Left(os.getpid())]
        welcome = visit.hear(third)
        assert isinstance(welcome, Welcome)
        assert welcome.before == Ready((), "http://x")


@pytest.mark.parametrize(
    ("said", "raw", "reason"),
    [
        ([], b"\xc1", "control message"),
        ([], b"\x81\xa4type\xa5Hello\xff", "control message"),
        ([], b"\x82\xa4type\xa6Failed\xa6reason\xa1\xff", "control message"),
        ([], b"x" * 100_000, "control message"),
        ([Close()], None, r"Close\(\), not Hello"),
        ([Hello(VERSION + 1, 7)], None, rf"version={VERSION + 1}.*not Hello of version {VERSION}"),
        ([HELLO, HELLO], None, r"Hello.*, not Ready"),
        ([HELLO, Failed("why")], None, "^why$"),
    ],
)
def test_whoever_says_something_else_is_turned_away(
    folder: Path, said: list[Hello], raw: bytes | None, reason: str
) -> None:
    """With the reason, at once, and the door is free for the next."""
    with Visit(folder) as visit:
        visit.come(*said, raw=raw)
        outcomes = visit.attend() + visit.attend()
        assert [type(one) for one in outcomes] == [TurnedAway]
        assert isinstance(outcomes[0], TurnedAway)
        assert re.search(reason, outcomes[0].reason)
        let_in(visit)


def test_the_silent_and_the_slow_delay_nobody(folder: Path) -> None:
    """D2: with many at the door who say nothing the next is let in at once; each is turned away at its
    own deadline, and the oldest when there are too many.
    """
    with Visit(folder) as visit:
        for _ in range(40):
            visit.come()
            visit.attend()
        let_in(visit)
        assert visit.door.wake_at() == visit.now + 2.0
        visit.now += 2.0
        gone = visit.attend()
        assert len(gone) == 16 - 1
        assert {one.reason for one in gone if isinstance(one, TurnedAway)} == {
            "the sidecar did not get ready in time"
        }
        assert visit.door.wake_at() == float("inf")


def test_one_that_does_not_get_ready_has_its_deadline(folder: Path) -> None:
    """D2: until then the link is taken, and no longer."""
    with Visit(folder) as visit:
        visit.come(HELLO)
        visit.attend()
        visit.now += 9.9
        assert visit.attend() == []
        visit.now += 0.2
        assert [type(one) for one in visit.attend()] == [TurnedAway]
        let_in(visit)


def test_a_childs_link_is_for_it_alone(folder: Path) -> None:
    """Another process is turned away, whatever pid it claims."""
    with Visit(folder, only_pid=1) as visit:
        guest = visit.come(Hello(VERSION, 1))
        (outcome,) = visit.attend()
        assert isinstance(outcome, TurnedAway)
        assert visit.hear(guest) == Failed("this link is for pid 1 alone")


def test_descriptors_that_guests_send_are_closed(folder: Path) -> None:
    """What comes with a message, or with noise, is let go of; the fixture looks."""
    with Visit(folder) as visit:
        for _ in range(3):
            guest = visit.come()
            send(guest, HELLO, (visit.memory,) * 2)
            noisy = visit.come()
            socket.send_fds(noisy, [b"noise"], [visit.memory] * 30)
            visit.attend()
            guest.close()
            visit.attend()


def test_a_process_without_descriptors_keeps_its_guests_waiting(folder: Path) -> None:
    """Whoever cannot be accepted stays in the queue, costs no turns meanwhile, and is let in later."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Visit(folder) as visit:
        guest = visit.come(HELLO)
        highest = max(int(one.split()[0]) for one in open_fds())
        spare = [os.dup(0) for _ in range(highest)]  # no gaps below
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, before[1]))
            (outcome,) = visit.attend()
            assert isinstance(outcome, TurnedAway)
            assert "Too many open files" in outcome.reason
            assert visit.door.fileno() not in dict(visit.door.watched())
            assert visit.now < visit.door.wake_at() <= visit.now + 1.0
            assert visit.attend() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in spare:
                os.close(fd)
        visit.now += 1.0
        assert visit.attend() == []
        assert isinstance(visit.hear(guest), Welcome)


def test_what_is_said_to_nobody_raises_no_signal() -> None:
    """A process for which SIGPIPE is deadly gets an OSError."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.close()
            try:
                send(ours, HELLO)
            except BrokenPipeError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(st.binary(max_size=80))
def test_any_packet_is_a_message_or_an_error(data: bytes) -> None:
    """Whatever bytes come over the control socket, they are a message or a KVEventsError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(data)
        with contextlib.suppress(KVEventsError):
            receive(ours)


# ----------------------------------------------------------------------------------------- listen


def test_a_sidecar_comes_leaves_and_comes_again(folder: Path) -> None:
    """The same stream goes on: what is offered before the first came, and while none is there, waits in
    the ring; numbers go on, and the link is the same.
    """
    with listen(WORKER, folder / "pod") as sidecar:
        client = sidecar.client
        assert (sidecar.pid, sidecar.state) == (0, SidecarState.AWAITED)
        assert client.publish([store(0)])
        with Peer(sidecar.link) as first:
            assert first.welcome.worker == WORKER
            assert first.numbers() == [0]
            until(lambda: client.connected)
            assert (sidecar.pid, sidecar.state) == (os.getpid(), SidecarState.READY)
            assert client.http_endpoint == "http://127.0.0.1:1"
            assert client.publish([store(1)])
            assert first.numbers() == [1]
        until(lambda: sidecar.state == SidecarState.AWAITED)
        assert client.publish([store(2)])
        assert client.publish([store(3)])
        with Peer(sidecar.link) as second:
            assert second.numbers() == [2, 3]
            assert second.welcome.link_id == first.welcome.link_id == client.link_id
            assert second.welcome.before == Ready((), "http://127.0.0.1:1")
            until(lambda: sidecar.state == SidecarState.READY)
            assert client.publish([store(4)])
            assert sidecar.close() == 0
            assert second.hear() == Close()
            assert second.hear() is None
            assert second.numbers() == [4]
        assert client.stats.refused == 0
        assert sidecar.state == SidecarState.CLOSED


def test_the_first_pump_retells_whenever_a_sidecar_comes(folder: Path) -> None:
    """K4: the first message is FRESH though nobody is there yet, and it is there for who comes."""
    cache = make_cache()
    with listen(WORKER, folder / "pod") as sidecar:
        assert sidecar.pump(cache)
        with Peer(sidecar.link) as peer:
            assert [(one.number, one.flags) for one in peer.messages()] == [(0, 1)]


def test_a_ring_that_nobody_reads_fills_and_refuses(folder: Path) -> None:
    """K1: while a sidecar is awaited messages are written as long as there is room, then refused and
    counted; who comes sees the numbers that are missing, and its wish for a re-telling is met.
    """
    cache = make_cache()
    with listen(WORKER, folder / "pod", ring_bytes=4096) as sidecar:
        client, number = sidecar.client, 0
        assert sidecar.pump(cache)
        while client.publish([store(number)]):
            number += 1
        assert not client.publish([store(number)])
        stats = client.stats
        assert (stats.offered, stats.refused) == (number + 3, 2)
        assert stats.offered == client._ring.offered
        with Peer(sidecar.link) as peer:
            assert peer.numbers() == list(range(number + 1))
            assert peer.ring is not None
            assert peer.ring.offered == number + 3
            peer.ring.ask_resync()
            until(lambda: sidecar.pump(cache) and client.stats.retellings)
            assert [(one.number, one.flags) for one in peer.messages()] == [(number + 3, 1)]
            assert client.stats.retellings == 1


def test_a_second_sidecar_is_told_who_has_the_link(folder: Path) -> None:
    """One line, and the first goes on."""
    with listen(WORKER, folder / "pod") as sidecar, Peer(sidecar.link) as first:
        until(lambda: sidecar.state == SidecarState.READY)
        with pytest.raises(Refused, match=rf"^the link is taken by pid {os.getpid()}$"):
            Peer(sidecar.link)
        assert sidecar.client.publish([store(0)])
        assert first.numbers() == [0]


def test_garbage_at_the_link_costs_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say nothing or noise are many; a good one is let in all the same, without waiting
    for their time to be over, and the log does not grow with them.
    """
    monkeypatch.setattr("publisher.worker.door._HELLO_S", 3600.0)
    with listen(WORKER, folder / "pod") as sidecar, contextlib.ExitStack() as stack:
        for number in range(100):
            guest = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            guest.connect(str(sidecar.link))
            if number % 3:
                guest.send(b"\xff" * number)
        with Peer(sidecar.link):
            until(lambda: sidecar.state == SidecarState.READY)
        assert len(caplog.records) < 10


# ------------------------------------------------------------------------------------- the child


def fake(link: Path, out: Path, manner: str = "stay") -> Callable[[], Child]:
    return lambda: Child([sys.executable, FAKE_SIDECAR, str(link), str(out), manner])


@contextlib.contextmanager
def attended(
    folder: Path,
    *manners: str,
    respawn: Respawn | None = QUICK,
    ready_s: float = 10.0,
) -> Iterator[tuple[Sidecar, Attendant, Path]]:
    """A worker whose children behave in turn like `manners`, the last for good."""
    meeting, out = private(), folder / "out"
    client = SidecarClient(meeting.path, WORKER, ring_bytes=1 << 16)
    left = list(manners)

    def start() -> Child:
        manner = left.pop(0) if len(left) > 1 else left[0]
        return fake(meeting.path, out, manner)()

    attendant = Attendant(client, start, respawn, ready_s=ready_s)
    with Sidecar(client, attendant, meeting) as sidecar:
        yield sidecar, attendant, out
    out.unlink(missing_ok=True)


def noted(out: Path) -> list[int]:
    """The numbers that the children have noted."""
    if not out.exists():
        return []
    return [int(line.split()[0]) for line in out.read_text().splitlines() if line[0].isdecimal()]


def test_a_killed_child_is_followed_by_one_that_goes_on(folder: Path) -> None:
    """A2: killed again and again in the middle of the traffic, which does not stop: every number is
    read, in order, by one child or the next, and none is refused.
    """
    with attended(folder, "stay") as (sidecar, _, out):
        pids = set()
        for round_ in range(4):
            until(lambda: sidecar.state == SidecarState.READY)
            pids.add(sidecar.pid)
            before = sidecar.pid
            for number in range(50 * round_, 50 * round_ + 50):
                assert sidecar.client.publish([store(number)])
                if number % 50 == 10 * round_:
                    kill(sidecar.pid)
            while sidecar.pid == before:
                time.sleep(0)
        until(lambda: noted(out)[-1:] == [199])
        found = noted(out)
        assert sorted(set(found)) == list(range(200))
        assert all(after - number <= 1 for number, after in itertools.pairwise(found))
        assert len(pids) == sidecar.restarts == 4
        assert sidecar.close() == 0
        assert "Close" in out.read_text()


def test_close_waits_until_the_ring_is_empty(folder: Path) -> None:
    """What was offered is read before the child ends, also by one that is only just starting."""
    for killed in (False, True):
        with attended(folder, "stay") as (sidecar, attendant, out):
            assert attendant.settled.wait(PATIENCE_S)
            if killed:
                kill(sidecar.pid)
                until(lambda: sidecar.state == SidecarState.AWAITED or sidecar.restarts)
            for number in range(100):
                assert sidecar.client.publish([store(number)])
            assert sidecar.close(PATIENCE_S) == 0
            assert noted(out) == list(range(100))
            assert sidecar.close() == 0


def test_a_child_that_always_ends_is_given_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A2: after so many in a row; that is logged as an error, once, and visible; what is offered from
    then on is refused, and closing is as ever.
    """
    respawn = Respawn(first_s=0.001, attempts=3)
    with attended(folder, "stay", "die", respawn=respawn) as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        kill(sidecar.pid)
        until(lambda: sidecar.state == SidecarState.GIVEN_UP)
        assert sidecar.restarts == 3
        assert not sidecar.client.publish([store(0)])
        assert sidecar.client.stats.refused == 1
        assert sidecar.client.flush(make_cache(), PATIENCE_S) is None
        errors = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert len(errors) == 1
        assert "is given up, after 4 in a row" in errors[0].getMessage()
        assert sidecar.close() == 3


def test_a_handler_that_raises_costs_its_lines_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A2 for a child whose end, and whose own lines, a handler of the worker's takes badly."""
    with caplog.at_level(logging.INFO), attended(folder, "stay") as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        with broken_handler("kvevents.sidecar") as given:
            kill(pid := sidecar.pid)
            until(lambda: sidecar.pid != pid and sidecar.state == SidecarState.READY)
            until(lambda: "started" in given)
        assert len(given) > 1
        assert sidecar.close() == 0


def test_a_child_is_not_started_again_where_that_is_not_wanted(folder: Path) -> None:
    """Without a policy its end is final."""
    with attended(folder, "stay", respawn=None) as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        kill(sidecar.pid)
        until(lambda: sidecar.state == SidecarState.GIVEN_UP)
        assert sidecar.close() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("manner", "ready_s", "said"),
    [
        ("fail", 10.0, r"^endpoint: it is taken$"),
        ("hang", 0.3, r"^the sidecar did not connect in time$"),
        ("nonsense", 10.0, r"^$"),
    ],
)
def test_why_the_first_child_did_not_get_ready(
    folder: Path, manner: str, ready_s: float, said: str
) -> None:
    """Its own reason, or the deadline; a child that is ready has none."""
    with attended(folder, manner, ready_s=ready_s) as (_, attendant, _out):
        assert attendant.settled.wait(PATIENCE_S)
        assert re.search(said, attendant.error)


def test_a_later_child_that_hangs_is_killed_and_followed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A2: one that does not get ready in time counts as one that ended."""
    with attended(folder, "stay", "hang", "fail", "stay", ready_s=10.0) as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        kill(sidecar.pid)
        until(lambda: sidecar.restarts == 1)
        assert attendant._ready_by <= time.monotonic() + 10.0
        attendant._ready_by = 0.0  # which only the one that hangs needs
        os.eventfd_write(attendant._wake, 1)
        until(lambda: sidecar.restarts == 3 and sidecar.state == SidecarState.READY)
        said = [one.getMessage() for one in caplog.records]
        assert any("did not get ready in time" in one for one in said)
        assert any("endpoint: it is taken" in one for one in said)


def test_a_stopped_child_is_ended_at_the_deadline(folder: Path) -> None:
    """A3: it neither drains nor hears SIGTERM; close is bounded all the same."""
    with attended(folder, "stay") as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        os.kill(sidecar.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert sidecar._close(0.05, 0.05) == -signal.SIGKILL
        assert time.monotonic() - began < 5.0


def test_the_pauses_double_up_to_a_bound() -> None:
    """A2: from a tenth of a second to five, and no start after so many in a row."""
    respawn = Respawn()
    pauses = [respawn.pause(failures) for failures in range(1, 22)]
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert pauses[7:20] == [5.0] * 13
    assert pauses[20] is None


# -------------------------------------------------------------------------------------------- log


def test_a_childs_log_lines_are_this_processes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with its level and its fields, on the logger `kvevents.sidecar`, the last ones too."""
    with caplog.at_level(logging.DEBUG), attended(folder, "stay") as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        assert sidecar.close() == 0
    lines = {one.getMessage(): one for one in caplog.records if one.name == "kvevents.sidecar"}
    assert lines["started"].levelno == logging.INFO
    assert lines["started"].sidecar["time"] == 1.5  # type: ignore[attr-defined]
    assert lines["left in good order"].levelno == logging.WARNING


@given(
    st.lists(
        st.sampled_from((b"", b"a", b"{}", b'{"level":"error","message":"m"}', b"\xff{")),
        max_size=8,
    ),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_lines_are_the_same_however_they_come(lines: list[bytes], cuts: list[int]) -> None:
    """Bytes in any portions give the lines; one of no known form is a warning with its text."""
    data = b"\n".join(lines)
    bounds = sorted(min(cut, len(data)) for cut in [0, *cuts, len(data)])
    reader = LogLines()
    found = []
    for start, end in itertools.pairwise(bounds):
        found += reader.feed(data[start:end])
    found += reader.end()
    assert [(one.level, one.message) for one in found] == [
        ("ERROR", "m") if b"level" in line else ("WARNING", line.decode(errors="backslashreplace"))
        for line in lines
        if line
    ]


def test_a_line_without_end_is_bounded() -> None:
    """Its beginning is kept and the rest forgotten, until it ends."""
    reader = LogLines()
    for _ in range(100):
        assert reader.feed(b"x" * 1000) == []
        assert len(reader._begun) <= MAX_LINE_BYTES
    first, second = reader.feed(b"y\nshort\n")
    assert first.message == "x" * MAX_LINE_BYTES
    assert second.message == "short"


FLOODING = """
import sys
for _ in range(10**4):
    try:
        sys.stderr.write("x" * 999 + chr(10))
    except BlockingIOError:
        pass
"""


def test_a_child_that_floods_its_log_waits_for_nobody() -> None:
    """With nobody reading it, its log fills the pipe and no more: writes fail, the child goes on."""
    child = Child([sys.executable, "-c", FLOODING])
    assert child.wait(PATIENCE_S) is not None
    read = sum(len(child.read_log()) for _ in range(3))
    assert 0 < read <= 70
    child.close_copies()


def test_a_crowd_at_the_door_is_not_in_the_way_of_who_was_welcomed(folder: Path) -> None:
    """D2: whoever has said nothing makes room first, however long the sidecar takes to get ready."""
    with Visit(folder) as visit:
        first = visit.come(HELLO)
        assert visit.attend() == []
        assert isinstance(visit.hear(first), Welcome)
        for _ in range(40):
            visit.come()
        outcomes = [outcome for _ in range(3) for outcome in visit.attend()]
        assert outcomes == [TurnedAway(os.getpid(), "too many at the door")] * 25
        send(first, Ready(()))
        (outcome,) = visit.attend()
        assert isinstance(outcome, Admitted)
        visit.guests.append(outcome.connection)


def test_a_child_that_has_lived_long_begins_anew(folder: Path) -> None:
    """A2: those that ended before it are no more in a row with it, so it is never given up."""
    respawn = Respawn(first_s=0.001, attempts=1, steady_s=0.0)
    with attended(folder, "stay", respawn=respawn) as (sidecar, attendant, _):
        assert attendant.settled.wait(PATIENCE_S)
        for restarts in (1, 2):
            kill(sidecar.pid)
            until(lambda: sidecar.restarts >= restarts or sidecar.state == SidecarState.GIVEN_UP)  # noqa: B023
            until(lambda: sidecar.state != SidecarState.AWAITED)
            assert sidecar.state == SidecarState.READY
