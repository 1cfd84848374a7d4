"""A stage's file system, made instruction by instruction in a folder that is a root."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from docker.by_hand.context import Context
from docker.by_hand.dockerfile import DockerfileError, Instruction, Stage, expand

__all__ = ["Image", "build"]

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", _CERTIFICATES)
"""What the builder lends a RUN, as Docker does, and takes away again."""
_IN_ROOT = """
set -eu
for file in {network}; do
    [ -e "$file" ] || continue
    [ -e "{root}$file" ] || touch "{root}$file"
    mount --bind "$file" "{root}$file"
done
mount --bind /dev "{root}/dev"
mount -t proc proc "{root}/proc"
exec chroot --userspec={user} "{root}" /bin/sh -c 'cd "$1" && exec /bin/sh -c "$2"' sh "$1" "$2"
"""


@dataclass(slots=True)
class Image:
    """A root, and how to run what is in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def save(self, work: Path) -> None:
        """As `image.json` in a folder."""
        told = json.dumps(asdict(self), default=str, indent=1)
        (work / "image.json").write_text(told + "\n")

    @classmethod
    def load(cls, work: Path) -> Image:
        """What `save` has left there."""
        told = json.loads((work / "image.json").read_text())
        return cls(**told | {"root": Path(told["root"])})


def build(
    stages: list[Stage], base: Path, context: Context, work: Path, arguments: Mapping[str, str]
) -> Image:
    """Carry out all instructions of all stages; the last one's image. `base`: what stands for each image
    that a FROM names; it is copied. Roots are made below `work`. Needs to be root.

    Raises CalledProcessError for a RUN that fails, DockerfileError, OSError.
    """
    images: dict[str, Image] = {}
    image = Image(base)
    for place, stage in enumerate(stages):
        root = work / (stage.name or f"stage{place}")
        subprocess.run(
            [
                "cp",
                "--archive",
                "--reflink=auto",
                images[stage.base].root if stage.base in images else base,
                root,
            ],
            check=True,
        )
        image = Image(root)
        known: dict[str, str] = {}
        for one in stage.instructions:
            print(f"{one.line:>4} {one.keyword} {one.text[:100]}", flush=True)
            _carry_out(one, image, images, known, context, arguments)
        images[stage.name] = image
    return image


def _carry_out(
    one: Instruction,
    image: Image,
    images: Mapping[str, Image],
    known: dict[str, str],
    context: Context,
    arguments: Mapping[str, str],
) -> None:
    variables = known | image.environment

    def filled(text: str) -> str:
        return expand(text, variables)

    match one.keyword:
        case "ARG":
            known |= {name: arguments.get(name, value) for name, value in one.pairs.items()}
        case "ENV":
            image.environment |= {name: filled(value) for name, value in one.pairs.items()}
        case "LABEL":
            image.labels |= {name: filled(value) for name, value in one.pairs.items()}
        case "WORKDIR":
            image.folder = filled(one.text)
            _inside(image.root, image.folder).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = filled(one.text)
        case "VOLUME":
            image.volumes += one.words
        case "EXPOSE":
            image.ports += one.words
        case "ENTRYPOINT":
            image.entrypoint = one.words
        case "CMD":
            image.command = one.words
        case "HEALTHCHECK":
            image.healthcheck = _healthcheck(one)
        case "COPY":
            *names, target = (filled(word) for word in one.words)
            if "from" in one.flags:
                for name in names:
                    _copy(_inside(images[one.flags["from"]].root, name), image, target)
            else:
                _copy_sent(context, names, image, target)
        case "RUN":
            _run(image, one.text, known)
        case other:
            raise DockerfileError(f"line {one.line}: {other} is not carried out")


def _healthcheck(one: Instruction) -> list[str]:
    """What CMD of a HEALTHCHECK runs; in the list form alone."""
    keyword, _, rest = one.text.partition(" ")
    if keyword != "CMD" or not rest.lstrip().startswith("["):
        raise DockerfileError(f"line {one.line}: HEALTHCHECK {one.text}")
    return Instruction(one.line, "CMD", {}, rest.lstrip()).words


def _run(image: Image, script: str, known: Mapping[str, str]) -> None:
    environment = dict(known) | image.environment | {"PIP_CERT": _CERTIFICATES, "HOME": "/root"}
    prepared = _IN_ROOT.format(root=image.root, network=" ".join(_NETWORK), user=image.user)
    arguments = ["unshare", "--mount", "--pid", "--fork", "/bin/sh", "-c", prepared, "sh"]
    subprocess.run([*arguments, image.folder, script], check=True, env=environment)


def _copy_sent(context: Context, names: list[str], image: Image, target: str) -> None:
    for name in names:
        if not context.has(name):
            raise FileNotFoundError(f"{name}: .dockerignore keeps it from the builder")
        _copy(context.root / name, image, target, context.ignored)


def _copy(
    found: Path,
    image: Image,
    target: str,
    ignore: Callable[[str, list[str]], set[str]] | None = None,
) -> None:
    """As COPY does: a folder's content, a file under its name where `target` is a folder's."""
    into = _inside(image.root, target if target.startswith("/") else f"{image.folder}/{target}")
    if found.is_dir():
        shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True, ignore=ignore)
        return
    into = into / found.name if target.endswith("/") else into
    into.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(found, into)


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
