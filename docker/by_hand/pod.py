"""The pod of kubernetes/base, of both images: what its containers must do together.

    unshare --mount --net --pid --fork --mount-proc python3 -m docker.by_hand.pod SIDECAR ENGINE

SIDECAR, ENGINE: where `python3 -m docker.by_hand` has made the images. Arguments, volumes, variables and
probes are those of the manifest. Needs PyYAML.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from docker.by_hand.builder import Image
from docker.by_hand.container import (
    READY_S,
    Container,
    bring_up_loopback,
    end,
    mount_volume,
    say,
    unmount_volume,
)

_BASE = Path(__file__).parents[1] / "kubernetes" / "base"
_FACTS = {"POD_NAME": "engine-0", "POD_IP": "127.0.0.1", "NAMESPACE": "default"}
_PROMPT = list(range(1, 60))


class Member:
    """A container of the pod. `told`: what the manifest says of it."""

    def __init__(self, image: Image, told: dict[str, Any], volumes: dict[str, Path]) -> None:
        mounts = {one["mountPath"]: volumes[one["name"]] for one in told["volumeMounts"]}
        self.container = Container(
            image, mounts, {one["name"]: _FACTS[one["name"]] for one in told["env"]}
        )
        arguments = [one.replace("$(POD_NAME)", _FACTS["POD_NAME"]) for one in told["args"]]
        self._command = [*image.entrypoint, *arguments]
        self._ports = {one["name"]: one["containerPort"] for one in told["ports"]}
        self._told = told

    def start(self) -> subprocess.Popen[bytes]:
        return self.container.start(self._command)

    def probe(self, name: str) -> str:
        """The address that a probe asks."""
        asked = self._told[name]["httpGet"]
        return f"http://127.0.0.1:{self._ports[asked['port']]}{asked['path']}"

    def at(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self._ports[port]}{path}"


def live_blocks(sidecar: Member) -> int:
    """On all tiers, as its metrics say."""
    with urllib.request.urlopen(sidecar.at("kv-http", "/metrics"), timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(
        int(float(one.split()[-1])) for one in lines if one.startswith("kv_events_live_blocks{")
    )


def complete(engine: Member) -> None:
    """Have it answer a prompt. Raises OSError."""
    body = json.dumps({"model": "example", "prompt": _PROMPT, "max_tokens": 4}).encode()
    request = urllib.request.Request(engine.at("http", "/v1/completions"), body)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=READY_S) as response:
        assert json.load(response)["choices"]


def check(sidecar: Member, engine: Member) -> None:
    """From the sidecar's start to the engine's end."""
    at_work = [sidecar.start()]
    try:
        sidecar.container.until_answered(sidecar.probe("startupProbe"), "the sidecar has started")
        readyz = sidecar.at("kv-http", "/readyz")
        assert sidecar.container.is_unanswered(readyz), "ready without an engine"
        at_work.append(engine.start())
        engine.container.until_answered(engine.probe("readinessProbe"), "the engine is ready")
        engine.container.until(
            engine.container.image.healthcheck, "its image's health check says so too"
        )
        sidecar.container.until_answered(readyz, "they have met")
        complete(engine)
        held = wait_for_blocks(sidecar)
        say(f"a prompt of {len(_PROMPT)} tokens is told: {held} blocks on all tiers")
        end(at_work[0], signal.SIGKILL)
        assert not engine.container.is_unanswered(engine.probe("livenessProbe"))
        at_work[0] = sidecar.start()
        sidecar.container.until_answered(readyz, "the sidecar was killed, and is there again")
        assert live_blocks(sidecar) == held
        say("with all that the engine holds")
        codes = [end(one) for one in reversed(at_work)]
        assert codes == [0, 0], codes
        say("SIGTERM ends the engine, then the sidecar; exit codes 0")
    finally:
        for one in at_work:
            end(one, signal.SIGKILL)


def wait_for_blocks(sidecar: Member) -> int:
    """Until it tells of blocks, and of no more; how many."""
    deadline, before = time.monotonic() + READY_S, 0
    while (now := live_blocks(sidecar)) == 0 or now != before:
        assert time.monotonic() < deadline, "no block is told"
        before = now
        time.sleep(1.0)
    return now


def main() -> int:
    pod = yaml.safe_load((_BASE / "statefulset.yaml").read_text())["spec"]["template"]["spec"]
    (of_sidecar,), (of_engine,) = pod["initContainers"], pod["containers"]
    bring_up_loopback()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as mounted:
        volumes = {
            one["name"]: mount_volume(Path(folder, one["name"]), pod["securityContext"]["fsGroup"])
            for one in pod["volumes"]
        }
        for one in volumes.values():
            mounted.callback(unmount_volume, one)
        (volumes["config"] / "sidecar.toml").write_text((_BASE / "sidecar.toml").read_text())
        sidecar = Member(Image.load(Path(sys.argv[1])), of_sidecar, volumes)
        engine = Member(Image.load(Path(sys.argv[2])), of_engine, volumes)
        check(sidecar, engine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
