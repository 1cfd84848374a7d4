"""The demo's summary and its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["bar", "difference", "json_summary", "text_summary"]

_SHOWN = 10
_VERDICTS = {True: "yes", False: "NO", None: "unknown, the router ended"}
Blocks = Mapping[str, list[str]]


def bar(done: int, total: int, width: int = 40) -> str:
    """A progress bar of one line."""
    filled = width * done // max(1, total)
    return f"[{'#' * filled}{'.' * (width - filled)}] {done:,}/{total:,} requests"


def difference(cache: Blocks, router: Blocks) -> list[str]:
    """Where the router's view is not the cache; empty when they are equal."""
    lines = []
    for medium in cache:
        held, believed = set(cache[medium]), set(router.get(medium, ()))
        for blocks, what in (
            (held - believed, "the router does not know of"),
            (believed - held, "the router believes in wrongly"),
        ):
            if blocks:
                some = ", ".join(f"{int(one) & 2**64 - 1:016x}" for one in sorted(blocks)[:_SHOWN])
                more = f", and {len(blocks) - _SHOWN} more" if len(blocks) > _SHOWN else ""
                lines.append(f"{medium}: {len(blocks)} blocks {what}: {some}{more}")
    return lines


def json_summary(worker: Mapping[str, Any], router: Mapping[str, Any] | None) -> dict[str, Any]:
    """The summary as one object. `view_equal` is null when there was no router to ask."""
    summary = dict(worker["summary"])
    summary["events_per_s"] = round(summary["events"] / max(1e-9, summary["seconds"]), 1)
    tiers = summary["tiers"] = {medium: dict(of) for medium, of in summary["tiers"].items()}
    if router is None:
        unknown = dict.fromkeys(("gaps", "replayed", "lost", "router_blocks", "view_equal"))
        for of in tiers.values():
            of["view_equal"] = None
        return {**summary, **unknown}
    view, blocks = router["view"], worker["blocks"]
    for medium, of in tiers.items():
        of["view_equal"] = set(blocks[medium]) == set(view.get(medium, ()))
    return {
        **summary,
        "joined_at": router["joined_at"],
        "gaps": router["gaps"],
        "replayed": router["replayed"],
        "lost": router["lost"],
        "router_blocks": sum(len(held) for held in view.values()),
        "view_equal": not difference(blocks, view),
    }


def text_summary(summary: Mapping[str, Any], buffer_steps: int) -> Iterator[str]:
    """The same for people."""
    rows = {
        "requests": f"{summary['requests']:,} in {summary['seconds']:.1f} s",
        "hit rate": f"{summary['hit_rate']:.1%} of the prompts' pages",
        **{medium: _tier(of) for medium, of in summary["tiers"].items()},
        "events": f"{summary['events']:,} in {summary['batches']:,} batches,"
        f" {summary['events_per_s']:,.0f} a second",
        "publish cost": f"{summary['publish_cpu_us_p50']:,.0f} µs p50,"
        f" {summary['publish_cpu_us_p99']:,.0f} µs p99 of the worker's CPU for a step,"
        f" which tells {summary['blocks_per_step']:,.0f} blocks on average",
        "publish time": f"{summary['publish_us_p50']:,.0f} µs p50, {summary['publish_us_p99']:,.0f} µs"
        " p99 by the clock: what is more is waiting for a core, which copies and sidecar take too",
        "KV pages": f"{summary['checked_pages']:,} read back on a hit,"
        f" {summary['wrong_pages']:,} of them wrong;"
        f" {len(summary['violations'])} invariants of the cache broken",
    }
    if summary["restored_blocks"]:
        rows["store"] = f"{summary['restored_blocks']:,} blocks from an earlier run"
    if summary["storage_error"]:
        rows["store failed"] = summary["storage_error"]
    if summary["too_large"]:
        rows["too large"] = f"{summary['too_large']:,} requests did not fit on the device"
    if summary["refused"]:
        rows["link"] = f"{summary['refused']} refused, {summary['retellings']} re-tellings"
    if summary["worker_mb_when_full"]:
        rows["worker memory"] = (
            f"{summary['worker_mb_when_full']:.0f} MB when the device was full,"
            f" {summary['worker_mb']:.0f} MB at the end"
        )
    if summary["view_equal"] is not None:
        rows["router"] = (
            f"joined late, at seq {summary['joined_at']}, of which the log keeps the last {buffer_steps}:"
            f" {summary['replayed']:,} batches replayed, what was before as a snapshot;"
            f" {summary['gaps']} gaps, {summary['lost']} lost"
        )
    for name, text in rows.items():
        yield f"{name:<14} {text}"
    verdict = _VERDICTS[summary["view_equal"]]
    compared = f" ({summary['resident_blocks']:,} blocks compared)" if summary["view_equal"] else ""
    yield f"router view == cache: {verdict}{compared}"


def _tier(of: Mapping[str, Any]) -> str:
    return (
        f"{of['hits']:6.1%} hits, {of['resident']:>7,} resident, {of['stored']:>7,} stored,"
        f" {of['removed']:>7,} removed; router view equal: {_VERDICTS[of['view_equal']]}"
    )
