"""docs/engines.md: every option and file in it is one that we take, and every key it names is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from publisher.cli import main
from publisher.engines.told import Told, read_told

DOC = Path(__file__).parents[2] / "docs" / "engines.md"
TEXT = DOC.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def words(block: str) -> list[str]:
    return shlex.split(block.replace("\\\n", " "))


def after(option: str) -> list[dict[str, Any]]:
    """What follows an option, in every block of shell, as JSON."""
    told = [words(block) for block in blocks("sh")]
    return [json.loads(one[one.index(option) + 1]) for one in told if option in one]


def read(keys: dict[str, Any], environ: dict[str, str]) -> Told:
    return read_told(keys, environ, dialect="sglang")


@pytest.mark.parametrize("keys", after("--kv-events-config"))
def test_the_options(keys: dict[str, Any]) -> None:
    """Each is taken, for as many ranks as are there."""
    told = read(keys, {})
    for rank in range(2):
        told.worker_info(rank, block_size=16, dp_size=2)


def test_the_file(tmp_path: Path) -> None:
    """It says what the text says of it; vLLM's has the block size of its command."""
    path = tmp_path / "kvevents.toml"
    files: list[Told] = []
    for block in blocks("toml"):
        path.write_text(block)
        files.append(read({}, {"KVEVENTS_CONFIG": str(path)}))
    sglang, vllm = files
    assert sglang.config.state_dir == "/var/lib/kvevents"
    assert sglang.worker["worker_id"] == "worker-0"
    (command,) = [words(block) for block in blocks("sh") if block.startswith("KVEVENTS_SIDECAR")]
    size = int(command[command.index("--block-size") + 1])
    assert vllm.worker_info(0).block_size == size
    assert f"KVEVENTS_CONFIG={blocks('toml')[1].split()[1]}" in command


def test_the_relay(capsys: pytest.CaptureFixture[str]) -> None:
    """Its command is one that can be run."""
    (command,) = [words(block) for block in blocks("sh") if block.startswith("kvevents")]
    assert main([*command[1:], "--check"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["relay"]["worker"]["block_size"] == 16


def test_the_storages_keys() -> None:
    """The back end takes the keys of the example, and the table names all of its own."""
    source = (DOC.parents[1] / "publisher/engines/sglang_storage.py").read_text()
    (ours,) = re.findall(r"^_OURS = (\(.*\))$", source, re.MULTILINE)
    (theirs,) = re.findall(r"^_OF_SGLANG = (\(.*\))$", source, re.MULTILINE)
    known = {*re.findall(r'"(\w+)"', ours), *re.findall(r'"(\w+)"', theirs)}
    (extra,) = after("--hicache-storage-backend-extra-config")
    assert set(extra) - {"hicache_storage_pass_prefix_keys"} <= known
    table = TEXT.split("## SGLang's third tier")[1]
    for key in re.findall(r'"(\w+)"', ours):
        assert f"| `{key}` |" in table


def test_its_links() -> None:
    """Lead to headings and files that are there."""
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        file, _, anchor = target.partition("#")
        if file:
            assert (DOC.parent / file).is_file()
        else:
            assert anchor in headings
