"""What the sidecar's image must do, alone and with a worker in another container.

    unshare --mount --net --pid --fork --mount-proc python3 -m docker.by_hand.trial WORK

WORK: where `python3 -m docker.by_hand` has made the image. A line for each thing that is so; an
AssertionError at the first that is not.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from docker.by_hand.builder import Image
from docker.by_hand.container import Container, bring_up_loopback, end, mount_volume, say

_READYZ = "http://127.0.0.1:9400/readyz"
_TAIL = ["kvevents", "tail", "tcp://127.0.0.1:5557,5558", "-n", "2", "--timeout", "15"]


def check_root(container: Container) -> None:
    """What may be written to, who it runs as, what is in it."""
    for folder in ("/", "/opt/kvevents", "/etc", "/tmp"):
        assert container.fails(["touch", f"{folder}/x"]), f"{folder} can be written to"
    for volume in container.image.volumes:
        assert not container.fails(["touch", f"{volume}/x"]), f"{volume} cannot be written to"
    say("nothing can be written to but", *container.image.volumes)
    user = container.output(["id", "-u"]).strip()
    assert user == str(container.user) != "0", user
    say("it runs as user", user)
    assert container.fails(["python", "-c", "import torch"]), "torch is there"
    assert not container.fails(["python", "-c", "import publisher"]), "publisher is not there"
    say("publisher can be imported, torch is not there")


def check_life(container: Container) -> None:
    """From its start to its end."""
    image = container.image
    assert container.fails(image.healthcheck), "healthy before anything was started"
    sidecar = container.start([*image.entrypoint, *image.command])
    worker = None
    try:
        container.until(image.healthcheck, "healthy, before there is a worker")
        assert container.is_unanswered(_READYZ), "ready without a worker"
        program = Path(__file__).with_name("worker.py").read_text()
        worker = container.start(["python", "-c", program])
        container.until_answered(_READYZ, "ready, now that there is one")
        told = container.output(_TAIL)
        assert "stored" in told, told
        say("a subscriber gets its events:", told.splitlines()[-1])
        code = end(sidecar)
        assert code == 0, f"it ended with {code} on SIGTERM"
        say("SIGTERM ends it, exit code 0")
    finally:
        for one in (sidecar, worker):
            if one is not None:
                end(one, signal.SIGKILL)


def main() -> int:
    work = Path(sys.argv[1])
    image = Image.load(work)
    bring_up_loopback()
    group = int(image.user.partition(":")[2])
    volumes = {
        path: mount_volume(work / f"volume{place}", group)
        for place, path in enumerate(image.volumes)
    }
    container = Container(image, volumes)
    check_root(container)
    check_life(container)
    return 0


if __name__ == "__main__":
    sys.exit(main())
