"""The table of docs/consumers.md, from what the tests of a run have shown.

`python tests/interop/conformance.py RESULTS` writes it in place; with --check it only compares. RESULTS
has a JSON object a line, as tests/conftest.py writes them: preset, consumer, situation, test, outcome.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

DOC = Path(__file__).parent.parent.parent / "docs" / "consumers.md"
BEGIN, END = "<!-- conformance -->", "<!-- /conformance -->"


def rows_of(results: str) -> dict[tuple[str, str, str], str]:
    """By consumer, preset and situation: passed, unless a test of it did not."""
    found: dict[tuple[str, str, str], str] = {}
    for line in results.splitlines():
        told = json.loads(line)
        key = (told["consumer"], told["preset"], told["situation"])
        if found.get(key, "passed") == "passed":
            found[key] = told["outcome"]
    return found


def table_of(rows: dict[tuple[str, str, str], str]) -> str:
    """Consumers in alphabetical order; what was skipped has no row."""
    lines = ["| consumer | `dialect` | exact in |", "| --- | --- | --- |"]
    situations: dict[tuple[str, str], list[str]] = {}
    for (consumer, preset, situation), outcome in sorted(rows.items()):
        if outcome == "skipped":
            continue
        said = situation if outcome == "passed" else f"**not: {situation}**"
        situations.setdefault((consumer, preset), []).append(said)
    for (consumer, preset), told in situations.items():
        lines.append(f"| {consumer} | `{preset}` | {'; '.join(told)} |")
    return "\n".join(lines)


def main() -> int:
    """0: the table is written, or is as it should be; 1: it is another, or something did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rows = rows_of(options.results.read_text() if options.results.exists() else "")
    shown = [outcome for outcome in rows.values() if outcome != "skipped"]
    if not shown:
        print("nothing was shown of any consumer: none is installed")
        return 0
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}\n{table_of(rows)}\n{END}{after}"
    consumers = {consumer for consumer, _, _ in rows}
    print(f"{len(shown)} situations of {len(consumers)} consumers, {shown.count('passed')} exact")
    if len(shown) < len(rows):
        print(f"{len(rows) - len(shown)} were skipped: docs/consumers.md stays as it is")
        return 0
    if options.check:
        if new != text:
            print("docs/consumers.md: its table is not what was shown")
        return int(new != text or set(shown) != {"passed"})
    DOC.write_text(new)
    return int(set(shown) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
