# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/performance.md, made from the results that are kept in benchmarks/results.

    python -m benchmarks.tables          # do the documents show these results?
    python -m benchmarks.tables --write  # make them do so

A table stands between ``<!-- benchmarks: NAME -->`` and ``<!-- /benchmarks -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .record import FLOOR, IN_TURN, Results, Row
from .report import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
DOCUMENTS = ("README.md", "docs/performance.md")
PLACE = re.compile(r"(<!-- benchmarks: (\S+) -->\n)(.*?)(<!-- /benchmarks -->)", re.DOTALL)


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 3 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def cell(row: Row, name: str) -> str:
    """Ours and floors in microseconds, others as multiples of ours."""
    if name not in row.timings:
        return ""
    if name == row.ours or name.startswith(FLOOR):
        return microseconds(row.timings[name].quiet)
    return times(row.ratio(name))


def readme(results: Results) -> list[str]:
    rows = [row for row in results.rows if row.coordinates["density"] == 0.25]
    ours = rows[0].ours
    return markdown_table(
        ["documents", *(f"{row.coordinates['documents']}" for row in rows)],
        [
            ["segscatter, us a call from Python", *(cell(row, ours) for row in rows)],
            [
                "against `repeat_interleave` + `index_add_`",
                *(cell(row, "repeat_interleave + index_add_") for row in rows),
            ],
            ["against a loop over documents", *(cell(row, "document loop") for row in rows)],
        ],
    )


def rows_and_methods(results: Results) -> tuple[list[Row], list[str]]:
    """Ours first, floors last."""
    rows = [row for row in results.rows if row.case != IN_TURN and row.timings]
    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    return rows, sorted(names, key=lambda name: (name != rows[0].ours, name.startswith(FLOOR)))


def methods_down(results: Results) -> list[str]:
    rows, names = rows_and_methods(results)
    return markdown_table(
        ["", *(row.case for row in rows)], [[name, *(cell(row, name) for row in rows)] for name in names]
    )


def cases_down(results: Results) -> list[str]:
    rows, names = rows_and_methods(results)
    return markdown_table(["", *names], [[row.case, *(cell(row, name) for name in names)] for row in rows])


def in_turn(results: Results) -> list[str]:
    """The shapes that were measured against each other."""
    row = results.row(IN_TURN)
    return markdown_table(
        ["", "us", f"/ {row.ours}"],
        [[name, microseconds(timing.quiet), f"{row.ratio(name):.2f}"] for name, timing in row.timings.items()],
    )


def pairs(results: Results) -> list[str]:
    """Cases with methods of their own."""
    body = []
    for row in results.rows:
        for name, timing in row.timings.items():
            ratio = "" if name == row.ours else times(row.ratio(name))
            body.append([row.case if name == row.ours else "", name, microseconds(timing.quiet), ratio])
    return markdown_table(["", "", "us", "against ours"], body)


TABLES: dict[str, tuple[str, Callable[[Results], list[str]]]] = {
    "readme": ("reference-cpu-2t", readme),
    "reference": ("reference-cpu-2t", methods_down),
    "peers": ("peers-cpu-2t", methods_down),
    "shapes": ("shapes-cpu-2t", cases_down),
    "shapes-in-turn": ("shapes-cpu-2t", in_turn),
    "scale": ("scale-cpu-2t", cases_down),
    "tracker": ("tracker-cpu-2t", pairs),
    "rl": ("rl-cpu-1t", cases_down),
}


def table(name: str) -> str:
    """Raises KeyError for a name that is not in TABLES."""
    stem, make = TABLES[name]
    return "\n".join(make(Results.load(RESULTS / f"{stem}.json"))) + "\n"


def renewed(text: str) -> str:
    return PLACE.sub(lambda match: match[1] + table(match[2]) + match[4], text)


def stale_tables(text: str) -> list[str]:
    return [name for _, name, found, _ in PLACE.findall(text) if found != table(name)]


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if options.write:
            path.write_text(renewed(text))
        else:
            stale += [f"{name}: the table {table!r} is not what was measured" for table in stale_tables(text)]
    if stale:
        sys.exit("\n".join(stale))


if __name__ == "__main__":
    main()
