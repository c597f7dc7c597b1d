# SPDX-License-Identifier: Apache-2.0
"""Pictures of a suite: lines of time where documents or tokens grow from case to case, and bars of ratios."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .record import FLOOR, IN_TURN, Results, Row


def plot(results: Results, folder: Path) -> list[Path]:
    """Writes ``<stem>.png`` (lines) and ``<stem>-ratios.png`` (bars), as far as they make sense; returns the paths."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    rows = [row for row in results.rows if row.timings]
    if not rows:
        return []
    written = []
    for panels, key, label in lines_of(results.suite, rows):
        written.append(_lines(folder / f"{results.stem}.png", panels, key, label))
    in_turn = [row for row in rows if row.case == IN_TURN]
    comparable = [row for row in rows if row not in in_turn and _others(row)]
    if comparable:
        written.append(_bars(folder / f"{results.stem}-ratios.png", comparable))
    for row in in_turn:
        written.append(_times(folder / f"{results.stem}-in-turn.png", row))
    return written


def _others(row: Row) -> list[str]:
    return [name for name in row.timings if name != row.ours and not name.startswith(FLOOR)]


def lines_of(suite: str, rows: list[Row]) -> Iterable[tuple[dict[str, list[Row]], str, str]]:
    """(panels by title, coordinate, its label): at most one picture."""

    def grows(key: str, panel: list[Row]) -> bool:
        return len({row.coordinates.get(key) for row in panel} - {None}) > 1

    if suite == "scale":
        panels, key, label = {"": rows}, "tokens", "tokens in the row"
    elif suite == "rl":
        panels = {
            f"K = {k}, {'forward and backward' if both else 'forward'}": [
                row
                for row in rows
                if row.coordinates["rows"] == k
                and row.coordinates["tokens"] == rows[0].coordinates["tokens"]
                and row.case.endswith("backward") == both
            ]
            for k in sorted({row.coordinates["rows"] for row in rows})
            for both in (False, True)
        }
        key, label = "documents", f"samples in {rows[0].coordinates['tokens']} tokens"
    elif suite in ("reference", "peers"):
        densities = sorted({row.coordinates["density"] for row in rows})
        panels = {f"{d:.0%} live": [row for row in rows if row.coordinates["density"] == d] for d in densities}
        key, label = "documents", f"documents in {rows[0].coordinates['tokens']} tokens"
    elif suite == "own":
        key, fixed = "documents", "tokens"
        if grows("tokens", rows):
            key, fixed = fixed, key
        values = sorted({row.coordinates[fixed] for row in rows})
        panels = {f"{value} {fixed}": [row for row in rows if row.coordinates[fixed] == value] for value in values}
        label = f"{key} in the row"
    else:
        return
    panels = {title: panel for title, panel in panels.items() if grows(key, panel)}
    if panels:
        yield panels, key, label


def _styles(rows: Iterable[Row]) -> dict[str, dict]:
    """The same look for a method in all pictures of a suite; ours is black, floors are grey."""
    import matplotlib.pyplot as plt

    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    ours = {row.ours for row in rows}
    palette = [color for i, color in enumerate(plt.get_cmap("tab10").colors) if i != 7]  # floors are grey
    palette += ["navy", "darkgreen", "maroon", "gold"]
    others = [n for n in names if n not in ours and not n.startswith(FLOOR)]
    grey = [n for n in names if n.startswith(FLOOR)]
    styles = {n: {"color": "black", "linewidth": 2.5, "marker": "o", "zorder": 3} for n in names if n in ours}
    styles |= {
        n: {"color": palette[i % len(palette)], "marker": "sD^v"[i // len(palette) % 4], "markersize": 4}
        for i, n in enumerate(others)
    }
    for i, name in enumerate(grey):
        styles[name] = {"color": "0.45", "linestyle": ":", "linewidth": 1, "marker": "x+1|_"[i % 5], "markersize": 6}
    return styles


def _microseconds(value: float, _position: int) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3), ("us", 1)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} us"


def _lines(path: Path, panels: dict[str, list[Row]], key: str, label: str) -> Path:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        height,
        columns,
        figsize=(3 + 4.5 * columns, 0.6 + 4.2 * height),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    styles = _styles(row for panel in panels.values() for row in panel)
    drawn = {}
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        places = sorted({row.coordinates[key] for row in rows})
        for name, style in styles.items():
            present = sorted((row for row in rows if name in row.timings), key=lambda row: row.coordinates[key])
            if not present:
                continue
            x, timings = [row.coordinates[key] for row in present], [row.timings[name] for row in present]
            (drawn[name],) = axes.plot(x, [t.quiet for t in timings], **style)
            if not name.startswith(FLOOR):
                axes.fill_between(
                    x, [t.p10 for t in timings], [t.p90 for t in timings], color=style["color"], alpha=0.12, lw=0
                )
        axes.set(xscale="log", yscale="log", xlabel=label, title=title)
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
        powers = key == "tokens" and all(x & (x - 1) == 0 for x in places)
        axes.set_xticklabels([f"$2^{{{x.bit_length() - 1}}}$" if powers else f"{x:,}" for x in places])
        axes.yaxis.set_major_formatter(_microseconds)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a call (band: p10 to p90)")
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    figure.legend(drawn.values(), drawn.keys(), loc="outside right center", fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _bars(path: Path, rows: list[Row]) -> Path:
    """Every case is a block of bars, one for each method that it has; floors are left out."""
    import matplotlib.pyplot as plt

    styles = _styles(rows)
    gap = 0.8
    number = sum(len(_others(row)) + gap for row in rows)
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.17 * number), layout="constrained")
    top, ticks, drawn = 0.0, [], {}
    for row in rows:
        for i, name in enumerate(_others(row)):
            ratio = row.ratio(name)
            drawn[name] = axes.barh(top + i, ratio - 1, 0.9, left=1, color=styles[name]["color"])
            _annotate(axes, f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x", max(ratio, 1), top + i)
        ticks.append(top + (len(_others(row)) - 1) / 2)
        top += len(_others(row)) + gap
    axes.axvline(1, color="black", linewidth=1)
    ours = {row.ours for row in rows}
    least = min(row.ratio(name) for row in rows for name in _others(row))
    most = max(row.ratio(name) for row in rows for name in _others(row))
    axes.set(xscale="log", xlabel=f"time / time of {ours.pop() if len(ours) == 1 else 'ours'}")
    axes.set(xlim=(min(0.9, least * 0.8), max(most, 1) * 1.8), ylim=(top - gap, -1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_yticks(ticks, [row.case for row in rows], fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _times(path: Path, row: Row) -> Path:
    """A bar for each method of one case."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1 + 0.24 * len(row.timings)), layout="constrained")
    for i, (name, timing) in enumerate(row.timings.items()):
        axes.barh(i, timing.quiet, 0.8, color="black" if name == row.ours else "0.55")
        _annotate(axes, f"{timing.quiet:.3g} us, {row.ratio(name):.2f}x", timing.quiet, i)
    most = max(timing.quiet for timing in row.timings.values())
    axes.set(xlabel=f"us a call; times {row.ours}", xlim=(0, most * 1.2), ylim=(len(row.timings) - 0.5, -0.5))
    axes.set_yticks(range(len(row.timings)), list(row.timings), fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _annotate(axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", size=6)
