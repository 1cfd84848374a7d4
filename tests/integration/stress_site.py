"""Where a run happens: its folder, its ports, and the sidecar's configuration there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from stress_plan import Plan

from kvevents.dialect import PRESETS
from publisher import SidecarConfig, SinkConfig, WorkerInfo

__all__ = [
    "HEARTBEAT_S",
    "LINGER_S",
    "SINKS",
    "Site",
    "sidecar_config",
    "told_media",
    "worker_info",
]

SINKS = (0, 1)
HEARTBEAT_S = 0.1
LINGER_S = 0.5
REPLAY_TIMEOUT_S = 1.0

_RIGS = Path(__file__).parents[1] / "rigs"


@dataclass(frozen=True, slots=True)
class Site:
    """`direct` and `proxied`: of each sink, the ports of PUB and replay socket."""

    folder: Path
    direct: tuple[tuple[int, int], ...]
    proxied: tuple[tuple[int, int], ...]
    http: int

    @classmethod
    def choose(cls, folder: Path) -> Site:
        """With ports that no other process of the tests is given."""
        ports = iter(_free_ports(4 * len(SINKS) + 1))
        direct, proxied = (tuple((next(ports), next(ports)) for _ in SINKS) for _ in range(2))
        for name in ("tmp", "state", "evidence", "logs"):
            (folder / name).mkdir(mode=0o700)
        (folder / "clock").write_bytes(bytes(8))
        return cls(folder, direct, proxied, next(ports))

    @property
    def state(self) -> Path:
        """The sidecar's state directory."""
        return self.folder / "state"

    @property
    def clock(self) -> Path:
        """How far the wall clock is off."""
        return self.folder / "clock"

    def evidence(self, name: str, sink: int) -> Path:
        return self.folder / "evidence" / f"{name}.{sink}"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def costs(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.costs"


def url(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def worker_info(plan: Plan) -> WorkerInfo:
    return WorkerInfo(block_size=plan.page_size, worker_id="stress", model="stress")


def sidecar_config(plan: Plan, site: Site) -> SidecarConfig:
    """Two sinks: one that tells all at once, one of any dialect, that may merge and leave the tokens out.

    Nobody is told anew for having joined: who asks for replays has no need of it.
    """
    (pub, replay), (second_pub, second_replay) = site.direct
    first = SinkConfig(
        name="first",
        endpoint=url(pub),
        replay_endpoint=url(replay),
        heartbeat_s=HEARTBEAT_S,
        hwm=plan.hwm,
        buffer_steps=plan.buffer_steps,
        buffer_bytes=plan.buffer_bytes,
    )
    second = SinkConfig(
        name="second",
        dialect=plan.dialect,
        tells_joiners=False,
        endpoint=url(second_pub),
        replay_endpoint=url(second_replay),
        heartbeat_s=HEARTBEAT_S,
        hwm=plan.hwm,
        buffer_steps=plan.buffer_steps,
        buffer_bytes=plan.buffer_bytes,
        coalesce_s=plan.coalesce_s,
        token_ids=plan.token_ids,
    )
    return SidecarConfig(
        sinks=(first, second),
        linger_s=LINGER_S,
        replay_timeout_s=REPLAY_TIMEOUT_S,
        state_dir=str(site.state),
        http_endpoint=f"http://127.0.0.1:{site.http}",
    )


def told_media(plan: Plan, sink: int) -> tuple[str, ...]:
    """The media that a sink tells of; with no external store, each by itself."""
    dialect = PRESETS[plan.dialect if sink else "sglang"].dialect
    return tuple(medium.value for medium, _ in dialect.media)


def _free_ports(count: int) -> list[int]:
    if str(_RIGS) not in sys.path:  # without pytest
        sys.path.append(str(_RIGS))
    from ports_rig import free_ports

    return free_ports(count)
