"""Runs the fault harness over many seeds: `make stress SECONDS=600 SEED=1`. See docs/stress.md."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import torch
from stress_child import adopt_orphans
from stress_plan import Kind, draw_plan
from stress_run import LIMITS_MB, Outcome, can_mount, run

from publisher.demo.options import BUNDLED_TRACE
from publisher.demo.trace import read_trace

_TRACE_REQUESTS = 2000
_MODELS_SHARE = 0.25
"""Of the time, for the model tests."""

_FAILED, _INTERRUPTED = 1, 130


def main() -> int:
    options = _parse()
    if not can_mount():
        _mount_privately()
    torch.set_num_threads(1)
    requests = read_trace(BUNDLED_TRACE, _TRACE_REQUESTS)
    adopt_orphans()
    gc.freeze()
    until = time.monotonic() + options.seconds * (
        1 - _MODELS_SHARE * (options.models and not options.runs)
    )
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        while len(outcomes) < (options.runs or sys.maxsize) and time.monotonic() < until:
            outcomes.append(run(draw_plan(options.seed + len(outcomes), options.faults), requests))
            print(_line(outcomes[-1]), flush=True)
            if outcomes[-1].problems and options.first:
                break
    except KeyboardInterrupt:
        interrupted = True
    failed = _summarise(outcomes)
    if interrupted:
        return _INTERRUPTED
    if options.models and not options.runs and not failed:
        return _run_models(options.seconds * _MODELS_SHARE + max(0.0, until - time.monotonic()))
    return _FAILED if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Faults at random, by seed.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=1200.0, help="start no run after so long")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; the next has the next"
    )
    parser.add_argument(
        "--runs", type=int, default=0, help="at most; 0: as many as there is time for"
    )
    parser.add_argument(
        "--faults", type=_kinds, default=tuple(Kind), help="only these, by name, with commas"
    )
    parser.add_argument("--first", action="store_true", help="end with the first seed that fails")
    parser.add_argument(
        "--models",
        action="store_true",
        help="run the model tests too, in the last quarter of the time, unless there is --runs",
    )
    return parser.parse_args()


def _kinds(text: str) -> tuple[Kind, ...]:
    return tuple(Kind(name.strip()) for name in text.split(","))


def _mount_privately() -> None:
    """Start anew in a mount namespace of our own, if we may: a disk that gets full is mounted in it, and
    goes away with it.
    """
    for flags in ("-m", "-Urm"):
        command = ["unshare", flags, "--propagation", "private"]
        if (
            shutil.which("unshare")
            and not subprocess.run(
                [*command, "true"], check=False, stderr=subprocess.DEVNULL
            ).returncode
        ):
            os.environ["STRESS_MOUNTS"] = "1"
            os.execvp("unshare", [*command, sys.executable, *sys.argv])


def _line(outcome: Outcome) -> str:
    faults = ", ".join(kind.value for kind in outcome.injected) or "no faults"
    facts = (
        f"seed {outcome.plan.seed}: {outcome.seconds:.1f} s, {outcome.requests} requests, seqs"
        f" {'/'.join(map(str, outcome.seqs))}, {outcome.refused} refused, {outcome.retellings}"
        f" re-tellings, pump {_pump([outcome])}; {faults}"
    )
    if not outcome.problems:
        return f"ok   {facts}"
    lines = "".join(f"\n     {problem}" for problem in outcome.problems)
    return (
        f"FAIL {facts}{lines}\n     again: make stress RUNS=1 SEED={outcome.plan.seed}"
        f"\n     logs:  {outcome.kept}"
    )


def _pump(outcomes: list[Outcome]) -> str:
    """Of the worst run: without, and in brackets with the time that its thread waited for a core."""
    return ", ".join(
        f"{name} {max(one.pump_percentile_us(percent) for one in outcomes)} µs"
        f" ({max(one.pump_percentile_us(percent, with_waits=True) for one in outcomes)})"
        for name, percent in (("p99", 99), ("max", 100))
    )


def _summarise(outcomes: list[Outcome]) -> list[int]:
    """Print what was done; the seeds that failed."""
    injected, skipped = Counter[Kind](), Counter[Kind]()
    peaks: dict[str, float] = {}
    for outcome in outcomes:
        injected += outcome.injected
        skipped += outcome.skipped
        for name, peak in outcome.peaks_mb.items():
            peaks[name] = max(peak, peaks.get(name, 0.0))
    failed = sorted(outcome.plan.seed for outcome in outcomes if outcome.problems)
    print(f"{len(outcomes)} runs, {injected.total()} faults:")
    for kind in Kind:
        if injected[kind] or skipped[kind]:
            left_out = f" ({skipped[kind]} had no object)" if skipped[kind] else ""
            print(f"  {injected[kind]:5} {kind.value}{left_out}")
    if not can_mount():
        print("  disk full was left out: it needs a mount namespace (unshare)")
    if outcomes:
        print(f"pump: {_pump(outcomes)}")
    for name, peak in sorted(peaks.items()):
        print(f"memory of {name}: at most {peak:.0f} MB of {LIMITS_MB[name]}")
    print(f"smallest failing seed: {failed[0]} (of {len(failed)})" if failed else "no seed failed")
    return failed


def _run_models(seconds: float) -> int:
    """The model tests with many examples, as far as they come."""
    print(f"model tests, for at most {seconds:.0f} s:", flush=True)
    command = [sys.executable, "-m", "pytest", "-x", "--timeout=3600", "-k", "model"]
    with subprocess.Popen(command, env={**os.environ, "KVEVENTS_PROFILE": "stress"}) as tests:
        try:
            return tests.wait(seconds)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)
            tests.wait()
    print("the time is up; no model test had failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
