# SPDX-License-Identifier: Apache-2.0
"""Results for people: on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .record import FLOOR, Results, Row

NOISY = 1.5  # p90 / p10
BUSY = 0.05
MANY = 8  # more cases than this become rows of the table instead of columns


def print_row(suite: str, row: Row) -> None:
    print(f"{suite}: {row.case}")
    for name, timing in row.timings.items():
        ratio = "" if name == row.ours else f"{row.ratio(name):9.2f}x"
        print(f"  {timing.quiet:12.1f} us {ratio:10}  {name}")
    for name, why in row.skipped.items():
        print(f"       skipped                {name}: {why}")
    if row.timings and (row.noise > NOISY or (row.others or 0) > BUSY):
        others = "" if row.others is None else f", and other processes had {row.others:.0%} of the machine"
        print(f"       noisy: p90 is {row.noise:.1f} times p10{others}")


def write(results: Results, folder: Path) -> None:
    results.save(folder)
    (folder / f"{results.stem}.md").write_text(markdown(results))


def markdown(results: Results) -> str:
    env = results.environment
    one = env["device"] == "cpu" and env["threads"] == 1
    threads = "1 thread (its CPU time)" if one else f"{env['threads']} threads"
    lines = [
        f"# {results.suite}",
        "",
        f"{env.get('gpu', env['processor'])}, {threads}, torch {env['torch']}, {env['date']}. Microseconds a call: "
        "median of the quietest quarter of interleaved rounds (p10 to p90 of all rounds).",
        "",
    ]
    measured = [row for row in results.rows if row.timings]
    usual = [row for row in measured if set(row.timings) & set(measured[0].timings) - {row.ours}]
    if len(usual) > 1:
        lines += [*table(usual, _cell), ""]
        lines += [f"Times {usual[0].ours}'s:", "", *table(usual, lambda row, name: f"{row.ratio(name):.2f}"), ""]
    own_methods = [row for row in measured if row not in usual] if len(usual) > 1 else measured
    if own_methods:  # cases whose methods are their own
        lines += ["| case | method | us (p10 to p90) | ratio |", "|---|---|---:|---:|"]
        for row in own_methods:
            lines += [f"| {row.case} | {name} | {_cell(row, name)} | {row.ratio(name):.2f} |" for name in row.timings]
        lines.append("")
    if measured:
        noise = sorted(row.noise for row in measured)
        others = sorted(row.others for row in measured if row.others is not None)
        text = f"Noise (p90 / p10, median over the methods): {noise[0]:.2f} to {noise[-1]:.2f}"
        if others:
            text += f"; other processes had {others[0]:.1%} to {others[-1]:.1%} of the machine"
        lines += [f"{text}.", ""]
    if skipped := left_out(results.rows):
        lines += ["Left out:", "", *(f"* {line}" for line in skipped), ""]
    return "\n".join(lines)


def left_out(rows: list[Row]) -> list[str]:
    """Who and why, and in which cases if not in all."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.skipped.items():
            cases.setdefault(f"{name}: {why}", []).append(row.case)
    return [what if len(of) == len(rows) else f"{what} ({'; '.join(of)})" for what, of in sorted(cases.items())]


def table(rows: list[Row], cell: Callable[[Row, str], str]) -> list[str]:
    """Lines of Markdown: methods down and cases across, or the other way round where cases are many."""
    names = list(dict.fromkeys(name for row in rows for name in row.timings))

    def text(row: Row, name: str) -> str:
        return cell(row, name) if name in row.timings else ""

    if len(rows) > MANY:
        head = names
        body = [[row.case, *(text(row, name) for name in names)] for row in rows]
    else:
        head = [row.case for row in rows]
        body = [[name, *(text(row, name) for row in rows)] for name in names]
    return markdown_table(["", *head], body)


def markdown_table(head: list[str], body: list[list[str]]) -> list[str]:
    rule = "|---|" + "---:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(cells)} |" for cells in body)]


def _cell(row: Row, name: str) -> str:
    timing = row.timings[name]
    digits = 0 if timing.quiet >= 100 else 1
    return f"{timing.quiet:.{digits}f} ({timing.p10:.{digits}f} to {timing.p90:.{digits}f})"


def gain(row: Row) -> str:
    """One sentence: what the reader of this case would gain over the best and the slowest of the other ways."""
    ours = row.timings[row.ours].quiet
    others = {name: row.ratio(name) for name in row.timings if name != row.ours and not name.startswith(FLOOR)}
    if not others:
        return f"{row.case}: {row.ours} takes {ours:.1f} us; there is nothing to compare with"
    best, worst = min(others, key=others.get), max(others, key=others.get)
    return (
        f"{row.case}: {row.ours} takes {ours:.1f} us, {others[best]:.1f} times as fast as {best} (the best of "
        f"{len(others)} other ways) and {others[worst]:.1f} times as fast as {worst}"
    )
