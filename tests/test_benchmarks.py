"""The table that the benchmarks write; nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.figures import (
    Figure,
    Reach,
    absolute,
    at_least,
    at_most,
    compared,
    others,
    skipped,
    spread,
)
from benchmarks.kit.lineup import OURS, PUBLISHERS, Lineup
from benchmarks.options import RESULTS, parse
from benchmarks.report import Row, merged, plot, to_row, write

FIGURE = compared(
    "P3.p50.1000", "latency", 150.0, "µs", reach=at_most(1.0), peer="sglang", peer_figure=200.0
)


def written(out: Path, *figures: Figure, whole: bool = False) -> list[dict[str, object]]:
    """What is in latest.json after these were written."""
    write(out, [to_row(figure) for figure in figures], ["Machine: one"], whole=whole)
    rows: list[dict[str, object]] = json.loads((out / "latest.json").read_text())
    return rows


@pytest.mark.parametrize(
    ("reach", "value", "met", "share"),
    [
        (at_most(2.0), 2.0, True, 1.0),
        (at_most(2.0), 3.0, False, 1.5),
        (at_least(2.0), 2.0, True, 1.0),
        (at_least(2.0), 1.0, False, 2.0),
        (at_most(0.0), 0.0, True, None),
        (at_most(0.0), 1.0, False, None),
    ],
)
def test_a_bound_is_kept_or_not(reach: Reach, value: float, met: bool, share: float | None) -> None:
    """The bound itself is met, and a share above 1 is not."""
    assert (reach.met(value), reach.share(value)) == (met, share)


def test_a_figure_is_judged_by_its_ratio_or_by_itself() -> None:
    """Compared by the ratio, which may be given; absolute by the figure, whatever a peer's is."""
    assert (FIGURE.ratio, FIGURE.met, FIGURE.target) == (0.75, True, "≤ 1× sglang")
    given = compared("P1", "w", 1.0, "", reach=at_most(1), peer="off", peer_figure=1.0, ratio=1.2)
    assert (given.ratio, given.met) == (1.2, False)
    alone = absolute("P2", "w", 3.0, "ms", reach=at_most(2), peer="sglang", peer_figure=6.0)
    assert (alone.ratio, alone.met, alone.target) == (0.5, False, "≤ 2 ms")


@pytest.mark.parametrize(
    "figure",
    [
        compared("P3", "w", 1.0, "", reach=at_most(1), peer="sglang", peer_figure=None),
        compared("P3", "w", 1.0, "", reach=None, peer="sglang", peer_figure=2.0),
        skipped("P3", "w", reach=at_most(1), reason="sglang is not installed", peer="sglang"),
    ],
)
def test_nothing_to_compare_with_is_neither_met_nor_missed(figure: Figure) -> None:
    """`met` is null without a peer, without a bound and without a figure."""
    assert to_row(figure)["met"] is None


def test_a_row_has_the_keys_that_readers_rely_on(tmp_path: Path) -> None:
    """Those of latest.json, and no NaN."""
    (row,) = written(tmp_path, FIGURE)
    least = {"id", "work", "target", "figure", "peer_figure", "ratio", "met", "versions"}
    assert row.keys() == least | {"unit", "peer", "note", "spread", "share"}
    assert (row["figure"], row["peer_figure"], row["ratio"], row["met"]) == (
        150.0,
        200.0,
        0.75,
        True,
    )


def test_versions_are_of_all_that_took_part() -> None:
    """The peers' beside ours."""
    figure = absolute("P2", "w", 1.0, "", reach=None, versions={"sglang": "0.5"})
    assert to_row(figure, {"kvevents": "1"})["versions"] == {"sglang": "0.5", "kvevents": "1"}


def test_a_partial_run_replaces_its_own_rows(tmp_path: Path) -> None:
    """The others stay, in the order of the works; a whole run leaves nothing of before."""
    eleven = absolute("P11.apply", "w", 1.0, "blocks/s", reach=at_least(2))
    written(tmp_path, eleven, FIGURE)
    better = absolute("P11.apply", "w", 3.0, "blocks/s", reach=at_least(2))
    rows = written(tmp_path, better, absolute("P2", "w", 1.0, "", reach=None))
    assert [(row["id"], row["figure"]) for row in rows] == [
        ("P2", 1.0),
        ("P3.p50.1000", 150.0),
        ("P11.apply", 3.0),
    ]
    assert "earlier runs" in (tmp_path / "latest.md").read_text()
    assert [row["id"] for row in written(tmp_path, FIGURE, whole=True)] == ["P3.p50.1000"]


def test_merging_changes_neither_list() -> None:
    """Rows are taken as they are."""
    before: list[Row] = [{"id": "P1"}]
    now: list[Row] = [{"id": "P1", "figure": 1}, {"id": "other"}]
    assert merged(before, now) == [{"id": "P1", "figure": 1}, {"id": "other"}]
    assert before == [{"id": "P1"}]


def test_the_markdown_says_how_to_read_it(tmp_path: Path) -> None:
    """Machine, a legend, what fell short, why something was skipped."""
    short = absolute("P2", "work | of 2", 3.0, "ms", reach=at_most(2), spread=(2.5, 4.0))
    written(tmp_path, FIGURE, short, skipped("P4", "w", reach=at_most(1), reason="no compiler"))
    text = (tmp_path / "latest.md").read_text()
    for said in (
        "- Machine: one",
        "`ratio` is",
        "1 of 2 targets met; short: P2; not judged: 1",
        "3 ms (2.5–4)",
        "skipped: no compiler",
        "work \\| of 2",
    ):
        assert said in text


def test_the_plot_is_drawn_of_what_was_judged(tmp_path: Path) -> None:
    """Also without a share."""
    zero = absolute("P2", "w", 1.0, "", reach=at_most(0))
    plot(tmp_path / "latest.png", [to_row(figure) for figure in (FIGURE, zero)])
    assert (tmp_path / "latest.png").stat().st_size > 1000


def test_peers_that_are_not_installed_are_absent_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours takes part all the same, in this interpreter."""
    monkeypatch.setenv("BENCH_HOME", str(tmp_path))
    lineup = Lineup(PUBLISHERS)
    assert list(lineup.commands) == [OURS]
    assert lineup.absent["sglang"] == "sglang is not installed"
    assert Lineup(PUBLISHERS, peers=False).absent["vllm"] == "without peers, as asked"


def test_a_peer_takes_part_once_its_installation_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """install.sh writes `installed` last."""
    monkeypatch.setenv("BENCH_HOME", str(tmp_path))
    (tmp_path / "venvs/vllm").mkdir(parents=True)
    assert "vllm" in Lineup(PUBLISHERS).absent
    (tmp_path / "venvs/vllm/installed").touch()
    assert Lineup(PUBLISHERS).commands["vllm"][0] == str(tmp_path / "venvs/vllm/bin/python")
    assert list(Lineup(PUBLISHERS, only=("vllm",)).commands) == ["vllm"]


def test_a_quick_run_keeps_its_figures_to_itself() -> None:
    """Unless a folder is named; others write where the results are."""
    assert parse(["--quick"], "bench", "")[0].out is None
    assert parse([], "bench", "")[0].out == RESULTS
    options, names = parse(["pace", "--quick", "--out", "x"], "bench", "", ("pace", "flood"))
    assert (options.out, names, options.rounds_or(3)) == (Path("x"), ["pace"], 1)
    with pytest.raises(SystemExit):
        parse(["paces"], "bench", "", ("pace", "flood"))


@pytest.mark.parametrize(
    ("absent", "note"), [({}, "sglang 2 ms"), ({"vllm": "broken"}, "sglang 2 ms; no vllm: broken")]
)
def test_a_note_says_what_the_others_reached(absent: Mapping[str, str], note: str) -> None:
    """Medians, and why some are missing."""
    values = {OURS: [9.0], "sglang": [1.0, 3.0, 2.0]}
    assert others(values, ours=OURS, unit=" ms", absent=absent) == note
    assert (spread(values["sglang"]), spread(values[OURS])) == ((1.0, 3.0), None)
