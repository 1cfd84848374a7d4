"""The table: on the terminal, and in a folder as latest.md, latest.json and latest.png."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.figures import Figure, shown
from benchmarks.kit.common.table import table
from benchmarks.options import Options, parse

__all__ = ["Row", "merged", "plot", "run", "run_alone", "to_row", "write"]

Measure = Callable[[Options], list[Figure]]
Row = dict[str, Any]
KEYS = (
    *("id", "work", "target", "figure", "unit", "peer", "peer_figure", "ratio", "met", "share"),
    *("spread", "note", "versions"),
)
HOW_TO_READ = """\
Each row is one figure beside what it is to reach. `ratio` is our figure to that of `beside`: a peer on
the same work in the same run, in alternating rounds, or the same loop without us. Figures are medians
of the rounds, those called p99 of each round's p99; in brackets are the least and the greatest of the
rounds. `met` is `no` where a figure falls short, and empty where nothing was to be reached or there was
nothing to compare with. Only figures of one run can be compared: the machine is part of them.

The plot shows how much of its bound each figure takes: left of the line is better than asked."""
_ROOT = Path(__file__).parents[1]
_LIBRARIES = ("msgspec", "pyzmq", "torch", "numpy")
_LEAST_SHARE, _MOST_SHARE = 0.01, 10.0


def run_alone(name: str, measure: Measure, about: str | None) -> int:
    """`python -m benchmarks.NAME`."""
    options, _ = parse(None, f"python -m benchmarks.{name}", about or "")
    return run({name: measure}, options)


def run(works: Mapping[str, Measure], options: Options, *, whole: bool = False) -> int:
    """Measure one work after the other, print the table, and write what there is.

    Returns 1 when one did not finish, else 0. `whole`: these are all the works there are.
    """
    facts = [_machine(), f"Command: `{_command()}`"]
    print("\n".join(facts), flush=True)
    figures: list[Figure] = []
    failed: list[str] = []
    base = _base_versions()
    for name, measure in works.items():
        began = monotonic()
        try:
            found = measure(options)
        except Exception as error:
            traceback.print_exc()
            failed.append(
                f"Did not finish: {name}: {type(error).__name__}: {error}".splitlines()[0]
            )
            continue
        figures += found
        rows = [to_row(figure, base) for figure in found]
        print(f"{name}, {monotonic() - began:.0f} s: {_summary(rows)}", flush=True)
    rows = [to_row(figure, base) for figure in figures]
    print(f"\n{_table(rows)}\n\n{_summary(rows)}")
    facts = [*facts, _versions(rows or [{"versions": base}]), *failed]
    print("\n".join(facts[2:]))
    if options.out is not None:
        plot(options.out / "latest.png", write(options.out, rows, facts, whole=whole))
        print(f"written to {options.out}")
    return 1 if failed else 0


def to_row(figure: Figure, versions: Mapping[str, str] | None = None) -> Row:
    """As it is in latest.json."""
    row = {key: getattr(figure, key) for key in KEYS}
    row["versions"] = {**figure.versions, **(versions or {})}
    return row


def merged(before: Iterable[Row], now: Sequence[Row]) -> list[Row]:
    """The rows of a partial run in the place of those before it, in the order of the works."""
    fresh = {row["id"]: row for row in now}
    rows = [fresh.pop(row["id"], row) for row in before]
    return sorted([*rows, *fresh.values()], key=lambda row: _place(row["id"]))


def _place(row_id: str) -> int:
    found = re.match(r"P(\d+)", row_id)
    return int(found[1]) if found else 1000


def write(
    out: Path, rows: Sequence[Row], facts: Sequence[str], *, whole: bool = False
) -> list[Row]:
    """Markdown and JSON, into `out`. Rows of other works that are there stay, unless these are all there
    are. Returns what is there now.
    """
    out.mkdir(parents=True, exist_ok=True)
    latest = out / "latest.json"
    before = json.loads(latest.read_text()) if latest.exists() and not whole else []
    now = {row["id"] for row in rows}
    if kept := [row["id"] for row in before if row["id"] not in now]:
        facts = [*facts, f"Of earlier runs, whose versions are in latest.json: {', '.join(kept)}"]
    rows = merged(before, rows)
    latest.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    lines = ["# Benchmarks", "", *(f"- {fact}" for fact in facts), "", HOW_TO_READ, ""]
    lines += ["![ratios against targets](latest.png)", "", _summary(rows), "", _table(rows), ""]
    (out / "latest.md").write_text("\n".join(lines))
    return rows


def _table(rows: Sequence[Row]) -> str:
    return table([_cells(row) for row in rows])


def _cells(row: Row) -> dict[str, str]:
    spread = row["spread"]
    figure = f"{shown(row['figure'])} {row['unit']}".rstrip()
    if spread:
        figure += f" ({shown(spread[0])}–{shown(spread[1])})"
    peer = f"{row['peer']}: {shown(row['peer_figure'])}" if row["peer_figure"] is not None else ""
    return {
        "id": row["id"],
        "work": row["work"],
        "figure": figure,
        "beside": peer or row["peer"],
        "ratio": "" if row["ratio"] is None else shown(row["ratio"]),
        "target": row["target"],
        "met": {True: "yes", False: "no", None: ""}[row["met"]],
        "note": row["note"],
    }


def _summary(rows: Sequence[Row]) -> str:
    met = sum(row["met"] is True for row in rows)
    missed = [row["id"] for row in rows if row["met"] is False]
    open_ = sum(row["met"] is None and row["target"][:1] in ("≤", "≥") for row in rows)
    text = f"{met} of {met + len(missed)} targets met"
    if missed:
        text += f"; short: {', '.join(missed)}"
    return text + (f"; not judged: {open_}" if open_ else "")


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Each bar begins at the bound, where the figure takes all that is allowed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    bars = [row for row in rows if row["met"] is not None]
    shares = [min(_MOST_SHARE, max(_LEAST_SHARE, _share(row))) for row in bars]
    figure, axes = plt.subplots(figsize=(9, 1.0 + 0.22 * len(bars)), layout="constrained")
    axes.barh(
        range(len(bars)),
        [share - 1 for share in shares],
        left=1,
        color=["#2a7f62" if row["met"] else "#c8553d" for row in bars],
    )
    axes.set_yticks(range(len(bars)), [row["id"] for row in bars], fontsize=7)
    values = axes.secondary_yaxis("right")
    values.set_yticks(range(len(bars)), [_reached(row) for row in bars], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_SHARE, _MOST_SHARE)
    axes.set_xticks([0.01, 0.1, 1, 10], ["1 %", "10 %", "target", "10×"])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("how much of its bound each figure takes: green is met, red falls short")
    axes.invert_yaxis()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _share(row: Row) -> float:
    """Where there is none, the bound or the figure is 0."""
    if row["share"] is None:
        return _LEAST_SHARE if row["met"] else _MOST_SHARE
    share: float = row["share"]
    return share


def _reached(row: Row) -> str:
    of_ratio = "×" in row["target"] and row["unit"] != "×"
    value = (
        f"{shown(row['ratio'])}×" if of_ratio else f"{shown(row['figure'])} {row['unit']}".rstrip()
    )
    return f"{value} ({row['target']})"


def _machine() -> str:
    system = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    return f"Machine: {_cpu()}, {cores} cores, {system}; load {os.getloadavg()[0]:.2f} at the start"


def _versions(rows: Sequence[Row]) -> str:
    found = {name: text for row in rows for name, text in row["versions"].items()}
    return f"Versions: {', '.join(f'{name} {text}' for name, text in found.items())}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def _base_versions() -> dict[str, str]:
    found = {"kvevents": _revision(), "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _revision() -> str:
    """The version, and the commit where there is one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return version("kvevents")
    return f"{version('kvevents')} ({done.stdout.strip()})"
