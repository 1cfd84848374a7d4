"""The whole way: a real engine's publisher, a sidecar process that relays it, a router behind it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from interop_rig import RELEASES, Engine, engine_of
from interop_script import SIZE, Script

from kvevents import AllBlocksCleared, BlockIndex, Event, StorageMedium, decode_batch
from kvevents.frames import Frame, parse_replay_answer, replay_request
from kvevents.index import Oddities
from publisher import Batch, Subscriber
from publisher.config.sidecar_config import RelayConfig, SidecarConfig, SinkConfig, WorkerInfo

pytestmark = pytest.mark.integration

PATIENCE_S = 30.0

_SERVE = """
import sys
from publisher.config.sidecar_config import SidecarConfig, read_config
from publisher.sidecar.process import serve
import msgspec
sys.exit(serve(None, read_config(SidecarConfig, msgspec.json.decode(sys.argv[1]))))
"""


class Site:
    """An engine's sidecar at ipc endpoints, and a router that has joined it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._sink = SinkConfig(
            endpoint=f"ipc://{folder}/out",
            replay_endpoint=f"ipc://{folder}/out-replay",
            heartbeat_s=0.1,
        )
        config = SidecarConfig(
            sinks=(self._sink,),
            relay=RelayConfig(
                endpoint=engine.endpoint,
                replay_endpoint=engine.replay_endpoint,
                worker=WorkerInfo(block_size=SIZE),
            ),
            state_dir=str(folder),
            http_endpoint=None,
        )
        self._command = [sys.executable, "-c", _SERVE, msgspec.json.encode(config).decode()]
        self._log = (folder / "log").open("ab")
        self.start()
        self.router = BlockIndex()
        self.seqs: list[int] = []
        endpoint, replay_endpoint = str(self._sink.endpoint), self._sink.replay_endpoint
        self._subscriber = Subscriber(endpoint, replay_endpoint)

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def until_believed(self, blocks: list[int]) -> None:
        """Until the router holds exactly these on the device."""
        self.until(lambda: self.router.resident[StorageMedium.GPU] == set(blocks))

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{len(self.router)} blocks after {self.seqs[-1:]}"
            for one in self._subscriber.receive(0.02):
                if isinstance(one, Batch):
                    assert one.skipped == ()
                    self.seqs.append(one.seq)
                    self.router.apply(one.batch.events)

    def published(self) -> list[Event]:
        """All events so far: of the log, from the first batch on."""
        with (
            zmq.Context[zmq.Socket[bytes]]() as context,
            context.socket(zmq.DEALER) as dealer,
        ):
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            dealer.connect(str(self._sink.replay_endpoint))
            dealer.send_multipart(replay_request(0))
            events: list[Event] = []
            while isinstance(answer := parse_replay_answer(dealer.recv_multipart()), Frame):
                events += decode_batch(answer.payload).batch.events
        return events

    def close(self) -> None:
        self._subscriber.close()
        self.kill()
        self._log.close()


@contextlib.contextmanager
def site_of(engine: Engine) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kvi-") as folder:
        site = Site(engine, Path(folder))
        try:
            yield site
        finally:
            site.close()


@pytest.mark.parametrize("release", RELEASES[:2])
def test_a_router_holds_what_the_engine_does(release: str) -> None:
    """After a late start, live, after a crash of the sidecar, which clears nothing, after a crash and a
    restart of the engine, and after its death.
    """
    with engine_of(release) as engine:
        script = Script(release)
        engine.publish(script.batches(0, 30))
        with site_of(engine) as site:
            site.until_believed(script.chain)
            engine.publish(script.batches(30, 21))
            site.until_believed(script.chain)
            site.kill()
            engine.publish(script.batches(51, 30))
            site.start()
            site.until_believed(script.chain)
            assert site.router.oddities == Oddities()
            assert site.published().count(AllBlocksCleared()) == 1
            engine.restart()
            script = Script(release, run=1)
            engine.publish(script.batches(0, 11))
            site.until_believed(script.chain)
            engine.crash()
            site.until_believed([])
            assert site.published()[-1] == AllBlocksCleared()
