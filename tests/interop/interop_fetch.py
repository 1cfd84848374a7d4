"""Takes the KV-event modules out of the wheels of SGLang and vLLM: interop_fetch.py FOLDER.

Run by the interpreter of the engines' environment; a wheel is downloaded, and deleted at once.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SGLANG = "sglang/srt/disaggregation/kv_events.py"
VLLM, VLLM_CONFIG = "vllm/distributed/kv_events.py", "vllm/config/kv_events.py"
WANTED = {
    "sglang==0.5.23": {SGLANG: "ef80e7165b11280d30bc07a9e3c04de5057ee45e9c94503a3ac432b009a0e421"},
    "sglang==0.5.18": {SGLANG: "656a6340cbccb758720b3c63517c078f943f5a438a7129d12a545d0d292ff8fc"},
    "vllm==0.33.0": {
        VLLM: "82b362a0a7f89318d9127addfce254d537f5078a31aa87beb08493b0953895ee",
        VLLM_CONFIG: "8b0e6d9b2473c185e68fb42a168ab4a096f056c4cda9e6a5653dcf11ab9899b8",
    },
    "vllm==0.23.0": {
        VLLM: "24841685ad6db3543a19b9639eea24e1992ab37c4773c775da9f4140bb813322",
        VLLM_CONFIG: "b1dbaee3e6830e381e9157fe3bab0d65c357da88ff7cdf8b1e4b3a4e75c82a87",
    },
}
"""SHA-256 of each file that was tested."""


def fetch(release: str, files: dict[str, str], folder: Path) -> None:
    """Raises CalledProcessError when there is no such wheel; ends when a file is another."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", scratch]
        subprocess.run([*command, release], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in files.items():
                data = archive.read(name)
                if hashlib.sha256(data).hexdigest() != digest:
                    sys.exit(f"{release}: {name} is not the file that was tested")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)


def main() -> None:
    home = Path(sys.argv[1])
    home.mkdir(parents=True, exist_ok=True)
    for release, files in WANTED.items():
        folder = home / release.replace("==", "-")
        if not all((folder / name).exists() for name in files):
            fetch(release, files, folder)


if __name__ == "__main__":
    main()
