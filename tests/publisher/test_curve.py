"""Keys in files, and who may connect: over real sockets, with live batches and replays."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
from pathlib import Path

import pytest
import zmq
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st
from publisher_rig import LOOPBACK, PATIENCE_S, payload_of

from kvevents import AllBlocksCleared
from kvevents.frames import (
    live_frames,
    parse_replay_request,
    replay_answer,
    replay_end,
    replay_request,
)
from publisher import Batch, ConfigError, Subscriber
from publisher.config.keys import is_key, read_public_key, read_secret_key, write_keys
from publisher.sidecar.curve import Guard, exposure_warning
from publisher.subscriber.dial import check_client_keys

pytestmark = pytest.mark.integration

Socket = zmq.Socket[bytes]


class Publisher:
    """A PUB and a replay socket behind a guard, driven by the test's own loop."""

    def __init__(self, folder: Path, *, guarded: bool = True) -> None:
        self.context = zmq.Context[Socket]()
        self.guard = Guard(
            self.context, secret_key=folder / "server.key_secret", client_keys=folder / "clients"
        )
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        if guarded:
            for socket in (self.pub, self.router):
                self.guard.protect(socket)
        self.endpoint, self.replay_endpoint = (
            socket.bind(LOOPBACK).addr for socket in (self.pub, self.router)
        )
        self.poller = zmq.Poller()
        for socket in (self.pub, self.router, *self.guard.pollables):
            self.poller.register(socket, zmq.POLLIN)
        self.subscriptions = self.replays = 0

    def turn(self, timeout_s: float = 0.01) -> None:
        """One turn of a sidecar's loop: publish to whoever subscribed, answer replays."""
        ready = dict(self.poller.poll(int(timeout_s * 1000)))
        if any(one in ready for one in self.guard.pollables):
            self.guard.handle()
        if self.pub in ready:
            self.pub.recv()
            self.subscriptions += 1
            self.pub.send_multipart(live_frames(b"", 1, payload_of()))
        if self.router in ready:
            client, *frames = self.router.recv_multipart()
            start = parse_replay_request(frames).start
            self.replays += 1
            if start == 0:
                payload = payload_of(AllBlocksCleared())
                self.router.send_multipart(
                    [client, *replay_answer(b"", 0, payload, delimited=True)]
                )
            self.router.send_multipart([client, *replay_end(delimited=True)])

    def close(self) -> None:
        """Sockets first, then their guard."""
        self.pub.close(linger=0)
        self.router.close(linger=0)
        self.guard.close()
        self.guard.close()
        self.context.term()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, subscriber: Subscriber) -> list[int]:
        """Until the subscriber has both batches; their seqs."""
        seqs: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(seqs) < 2:
            assert time.monotonic() < deadline, f"{seqs} {self.guard.status}"
            self.turn()
            seqs += [one.seq for one in subscriber.receive(0) if isinstance(one, Batch)]
        return seqs

    def turn_away(self, stranger: Stranger, what: str) -> None:
        """Until both its sockets were turned away; it must have come by nothing."""
        before = getattr(self.guard.status, what)
        deadline = time.monotonic() + PATIENCE_S
        while getattr(self.guard.status, what) < before + 2:
            assert time.monotonic() < deadline, self.guard.status
            self.turn()
        self.pub.send_multipart(live_frames(b"", 1, payload_of()))
        self.turn(0.05)
        assert stranger.received() == 0
        assert (self.subscriptions, self.replays) == (0, 0)


class Stranger:
    """One that subscribes and asks for a replay, with a server's key and its own, or without any."""

    def __init__(self, publisher: Publisher, server: Path | None, own: Path | None) -> None:
        self.context = zmq.Context[Socket]()
        self.sockets = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        sub, dealer = self.sockets
        for socket in self.sockets:
            socket.setsockopt(zmq.LINGER, 0)
            if server is not None and own is not None:
                public, secret = read_secret_key("own", own)
                socket.setsockopt_string(zmq.CURVE_SERVERKEY, read_public_key("server", server))
                socket.setsockopt_string(zmq.CURVE_PUBLICKEY, public)
                socket.setsockopt_string(zmq.CURVE_SECRETKEY, secret)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(publisher.endpoint)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(replay_request(0))

    def received(self) -> int:
        """On how many of its sockets something came."""
        return sum(socket.poll(0) != 0 for socket in self.sockets)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's keys, one client that is allowed, and one that is not."""
    write_keys(tmp_path, "server")
    write_keys(tmp_path, "stranger")
    write_keys(tmp_path / "clients", "router")
    return tmp_path


def subscribe(publisher: Publisher, folder: Path, client: str = "clients/router") -> Subscriber:
    """A subscriber with a client's keys."""
    return Subscriber(
        publisher.endpoint,
        publisher.replay_endpoint,
        server_key=read_public_key("server", folder / "server.key"),
        client_keys=read_secret_key("client", folder / f"{client}.key_secret"),
    )


def stranger_of(publisher: Publisher, folder: Path) -> Stranger:
    """One whose key is not among the allowed."""
    return Stranger(publisher, folder / "server.key", folder / "stranger.key_secret")


# ----------------------------------------------------------------------------------------- sockets


def test_an_allowed_client_receives_live_batches_and_replays(folder: Path) -> None:
    """Both sockets let it in, and are counted (107)."""
    with Publisher(folder) as publisher, subscribe(publisher, folder) as subscriber:
        assert publisher.serve(subscriber) == [0, 1]
        status = publisher.guard.status
        assert status.accepted >= 2
        assert (status.denied, status.keys) == (0, 1)


def test_a_client_with_an_unknown_key_receives_nothing(folder: Path) -> None:
    """Neither its subscription nor its request comes through; each attempt is counted (107)."""
    with Publisher(folder) as publisher, stranger_of(publisher, folder) as stranger:
        publisher.turn_away(stranger, "denied")
        assert publisher.guard.status.accepted == 0


def test_a_client_without_keys_receives_nothing(folder: Path) -> None:
    """One that does not speak CURVE is turned away and counted (107)."""
    with Publisher(folder) as publisher, Stranger(publisher, None, None) as stranger:
        publisher.turn_away(stranger, "failed")
        assert publisher.guard.status.accepted == publisher.guard.status.denied == 0


def test_a_client_that_expects_another_server_receives_nothing(folder: Path) -> None:
    """Though its own key is allowed, a key of ours that is out of date opens nothing, and is counted."""
    own = folder / "clients/router.key_secret"
    with (
        Publisher(folder) as publisher,
        Stranger(publisher, folder / "stranger.key", own) as stranger,
    ):
        publisher.turn_away(stranger, "failed")
        assert publisher.guard.status.accepted == 0


def test_a_subscriber_sees_that_it_is_refused(folder: Path) -> None:
    """With keys of the moment, which nobody allowed: refused is a count, not a silence."""
    server_key = read_public_key("server", folder / "server.key")
    with (
        Publisher(folder) as publisher,
        Subscriber(publisher.endpoint, server_key=server_key) as subscriber,
    ):
        deadline = time.monotonic() + PATIENCE_S
        while not subscriber.stats.refused:
            assert time.monotonic() < deadline, publisher.guard.status
            publisher.turn()
            assert subscriber.receive(0) == []
        assert publisher.guard.status.denied == 1


def test_strangers_do_not_keep_an_allowed_client_waiting(folder: Path) -> None:
    """With ten of them at the door, it still gets everything."""
    with Publisher(folder) as publisher, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(stranger_of(publisher, folder))
            stack.enter_context(Stranger(publisher, None, None))
        with subscribe(publisher, folder) as subscriber:
            assert publisher.serve(subscriber) == [0, 1]


def test_a_reload_lets_a_new_client_in(folder: Path) -> None:
    """Not before; and then without a restart of the publisher."""
    with Publisher(folder) as publisher:
        shutil.copy(folder / "stranger.key", folder / "clients")
        with stranger_of(publisher, folder) as stranger:
            publisher.turn_away(stranger, "denied")
        publisher.guard.reload()
        assert publisher.guard.status.keys == 2
        with subscribe(publisher, folder, "stranger") as subscriber:
            assert publisher.serve(subscriber) == [0, 1]


def test_a_reload_shuts_a_removed_client_out(folder: Path) -> None:
    """The next connection of a client whose key is gone is denied."""
    with Publisher(folder) as publisher:
        (folder / "clients" / "router.key").unlink()
        publisher.guard.reload()
        own = folder / "clients/router.key_secret"
        with Stranger(publisher, folder / "server.key", own) as stranger:
            publisher.turn_away(stranger, "denied")


def test_a_reload_that_fails_changes_nothing(folder: Path) -> None:
    """One bad file: the error names it, and the keys stay as they were, all of them."""
    with Publisher(folder) as publisher:
        shutil.copy(folder / "stranger.key", folder / "clients")
        (folder / "clients" / "zbad.key").write_text("garbage")
        with pytest.raises(
            ConfigError, match=r"curve.client_keys: .*zbad.key: it has no public-key"
        ):
            publisher.guard.reload()
        assert publisher.guard.status.keys == 1
        with subscribe(publisher, folder) as subscriber:
            assert publisher.serve(subscriber) == [0, 1]


def test_a_socket_of_the_same_context_may_stay_open_to_all(folder: Path) -> None:
    """Only protected sockets ask the guard; a relay's own subscription goes on in the clear."""
    with (
        Publisher(folder, guarded=False) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
    ):
        assert publisher.serve(subscriber) == [0, 1]
        assert publisher.guard.status.accepted == 0


def test_there_is_one_guard_a_context(folder: Path) -> None:
    """A second is refused, and leaves the first in its place."""
    with Publisher(folder) as publisher:
        with pytest.raises(zmq.ZMQError):
            Guard(
                publisher.context,
                secret_key=folder / "server.key_secret",
                client_keys=folder / "clients",
            )
        with subscribe(publisher, folder) as subscriber:
            assert publisher.serve(subscriber) == [0, 1]


def test_secrets_are_in_no_log_and_no_status(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A guard that accepts, denies, warns and fails to reload says no secret key."""
    server, client = (
        read_secret_key("", folder / name)[1]
        for name in ("server.key_secret", "clients/router.key_secret")
    )
    (folder / "server.key_secret").chmod(0o644)
    with caplog.at_level(logging.DEBUG), Publisher(folder) as publisher:
        with subscribe(publisher, folder) as subscriber:
            publisher.serve(subscriber)
        (folder / "clients" / "bad.key").write_text(f'public-key = "{client}x"')
        with pytest.raises(ConfigError) as error:
            publisher.guard.reload()
        told = f"{publisher.guard.status} {error.value} {caplog.text}"
        assert server not in told
        assert client not in told
        assert "everybody on this host can read" in caplog.text


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"client_keys": ("a", "b")}, "client_keys: they need a server_key"),
        ({"server_key": "short"}, "server_key: it is not a CURVE key"),
        ({"server_key": "k" * 40, "client_keys": ("a", "b")}, "client_keys: they are not two"),
    ],
)
def test_a_subscriber_refuses_keys_that_are_none(keys: dict[str, object], reason: str) -> None:
    """Before it connects, with the argument's name, and without showing what may be a secret."""
    with pytest.raises(ConfigError, match=reason) as error:
        Subscriber(LOOPBACK, **keys)  # type: ignore[arg-type]
    assert "short" not in str(error.value)


# ------------------------------------------------------------------------------------------- files


def test_written_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    """The secret's file has mode 0600 and a new directory 0700, whatever the umask."""
    umask = os.umask(0)
    try:
        public, secret = write_keys(tmp_path / "keys", "router-1")
    finally:
        os.umask(umask)
    assert (public.name, secret.name) == ("router-1.key", "router-1.key_secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    key, secret_key = read_secret_key("k", secret)
    assert read_public_key("k", public) == read_public_key("k", secret) == key
    assert zmq.curve_public(secret_key.encode()).decode() == key
    assert secret_key not in public.read_text()


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    """Where either file is there, both stay as they were, and no half of a pair is left."""
    public, secret = write_keys(tmp_path, "a")
    before = public.read_bytes(), secret.read_bytes()
    with pytest.raises(FileExistsError):
        write_keys(tmp_path, "a")
    assert (public.read_bytes(), secret.read_bytes()) == before
    public.unlink()
    with pytest.raises(FileExistsError):
        write_keys(tmp_path, "a")
    assert not public.exists()
    assert secret.read_bytes() == before[1]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", ".a", "a b", "é", "a" * 65])
def test_a_name_is_one_of_a_file(tmp_path: Path, name: str) -> None:
    """It cannot lead out of the directory, nor hide in it."""
    with pytest.raises(ValueError, match="name: "):
        write_keys(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_files_are_those_of_other_zeromq_programs(tmp_path: Path) -> None:
    """pyzmq's tools read ours, and we read theirs."""
    public, secret = write_keys(tmp_path, "ours")
    key, secret_key = read_secret_key("k", secret)
    assert zmq.auth.load_certificate(public) == (key.encode(), None)
    assert zmq.auth.load_certificate(secret) == (key.encode(), secret_key.encode())
    theirs, their_secret = zmq.auth.create_certificates(tmp_path, "theirs")
    assert read_public_key("k", theirs).encode() == zmq.auth.load_certificate(theirs)[0]
    assert (
        read_secret_key("k", their_secret)[1].encode() == zmq.auth.load_certificate(their_secret)[1]
    )


GOOD = "x" * 40


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no public-key"),
        ("garbage\n", "it has no public-key"),
        ('public-key = "short"', "its public-key is not 40 characters of Z85"),
        (f'public-key = "{GOOD[1:]}~"', "its public-key is not 40 characters of Z85"),
        (f'public-key = "{"#" * 40}"', "its public-key is not 40 characters of Z85"),
        ("x" * 70_000, "it is not a text file of up to 64 KiB"),
        ("\udcff", "it is not a text file of up to 64 KiB"),
    ],
)
def test_a_bad_key_file_is_named(folder: Path, text: str, reason: str) -> None:
    """A guard does not begin with a file of clients that is none: nobody would know who is left out."""
    bad = folder / "clients" / "bad.key"
    bad.write_bytes(text.encode(errors="surrogateescape"))
    context = zmq.Context[Socket]()
    with pytest.raises(ConfigError) as error:
        Guard(context, secret_key=folder / "server.key_secret", client_keys=folder / "clients")
    assert str(error.value) == f"curve.client_keys: {bad}: {reason}"
    context.term()


def test_what_is_no_file_is_named_and_not_waited_for(folder: Path) -> None:
    """A directory, a pipe nobody writes to, a dangling link, a directory that is not there."""
    clients = folder / "clients"
    context = zmq.Context[Socket]()

    def refused(secret: Path = folder / "server.key_secret", clients: Path = clients) -> str:
        with pytest.raises(ConfigError) as error:
            Guard(context, secret_key=secret, client_keys=clients)
        return str(error.value)

    bad = clients / "bad.key"
    bad.mkdir()
    assert str(bad) in refused()
    bad.rmdir()
    os.mkfifo(bad)
    assert str(bad) in refused()
    bad.unlink()
    bad.symlink_to(folder / "nowhere")
    assert refused() == f"curve.client_keys: {bad}: No such file or directory"
    bad.unlink()
    nowhere = folder / "nowhere"
    assert refused(clients=nowhere) == f"curve.client_keys: {nowhere}: No such file or directory"
    assert refused(nowhere) == f"curve.secret_key: {nowhere}: No such file or directory"
    assert refused(folder / "server.key") == (
        f"curve.secret_key: {folder / 'server.key'}: it has no secret-key"
    )
    context.term()


def test_two_keys_that_are_no_pair_are_refused(folder: Path) -> None:
    """A secret file with another's public key would shut every client out, without a reason."""
    mixed = folder / "mixed.key_secret"
    public = read_public_key("k", folder / "stranger.key")
    secret = read_secret_key("k", folder / "server.key_secret")[1]
    mixed.write_text(f'public-key = "{public}"\nsecret-key = "{secret}"\n')
    with pytest.raises(
        ConfigError, match=r"^k: .*mixed\.key_secret: its two keys are not of one pair$"
    ) as error:
        read_secret_key("k", mixed)
    assert secret not in str(error.value)


def test_other_files_beside_the_keys_are_left_alone(folder: Path) -> None:
    """Secrets, notes and editors' backups in the directory of clients are not read."""
    for name in ("router.key_secret", "README", "router.key~", ".router.key.swp"):
        (folder / "clients" / name).write_text("garbage")
    context = zmq.Context[Socket]()
    guard = Guard(context, secret_key=folder / "server.key_secret", client_keys=folder / "clients")
    assert guard.status.keys == 1
    guard.close()
    context.term()


@given(
    st.text(max_size=45)
    | st.text("0123456789abcdefXYZ.-:+=^!/*?&<>()[]{}@%$#", min_size=40, max_size=40)
)
def test_any_text_is_a_key_or_not(text: str) -> None:
    """It is one exactly when ZeroMQ takes it for a socket."""
    with zmq.Context[Socket]() as context, context.socket(zmq.PUB) as socket:
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, text.encode())
            taken = len(text.encode()) == 40
        except (zmq.ZMQError, UnicodeEncodeError):
            taken = False
    assert not is_key(text) or taken


# ---------------------------------------------------------------------------------------- exposure


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://127.9.9.9:1", "tcp://[::1]:5557", "ipc:///run/kv"]
)
def test_what_only_this_host_reaches_is_not_exposed(endpoint: str) -> None:
    """Loopback of both families, and ipc (107)."""
    assert exposure_warning([endpoint], curve=False) is None


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://[::]:5557", "tcp://10.0.0.7:1", "tcp://h:1"],
)
def test_what_others_reach_is_said_with_what_they_can_read(endpoint: str) -> None:
    """One line that names the endpoint and the prompts; nothing with CURVE (107)."""
    said = exposure_warning(["tcp://127.0.0.1:1", endpoint], curve=False)
    assert said is not None
    assert said.startswith(f"{endpoint}: without CURVE, ")
    assert "token ids" in said
    assert "\n" not in said
    assert exposure_warning([endpoint], curve=True) is None


def test_redacted_prompts_are_not_said_to_be_exposed() -> None:
    """With token ids left out, the warning is about the prefixes alone (107)."""
    said = exposure_warning(["tcp://0.0.0.0:5557"], curve=False, token_ids=False)
    assert said is not None
    assert "token ids" not in said


@pytest.mark.parametrize("place", [0, 1])
def test_each_of_a_clients_keys_is_looked_at(place: int) -> None:
    """A secret key that is none is an error that names the setting, and does not show it."""
    keys = [key.decode() for key in zmq.curve_keypair()]
    keys[place] = keys[place][1:]
    server, _ = (key.decode() for key in zmq.curve_keypair())
    with pytest.raises(ConfigError, match=r"^client_keys: ") as error:
        check_client_keys(server, (keys[0], keys[1]))
    assert keys[place] not in str(error.value)


def test_who_does_not_say_hello_is_not_waited_for_long(folder: Path) -> None:
    """On each protected socket: five seconds, not the half minute that ZeroMQ would give."""
    with Publisher(folder) as publisher:
        for socket in (publisher.pub, publisher.router):
            assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 5000
            assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
