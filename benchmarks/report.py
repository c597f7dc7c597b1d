# SPDX-License-Identifier: Apache-2.0
"""Results as JSON, a Markdown table and plots."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path

import segscatter
import torch

from .suites import Row

OURS = "segscatter"
FLOOR = "floor: "


def environment(device: str, quick: bool) -> dict[str, object]:
    """What a reader needs to judge the numbers; nothing that names a machine or a path."""
    info = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "segscatter": segscatter.build_info(),
        "quick": quick,
    }
    if device == "cuda":
        info["gpu"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
    return info


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model\t")]
    return f"{len(names)} x {names[0]}, model {models[0]}" if names and models else platform.processor()


def write(folder: Path, suite: str, device: str, rows: list[Row], quick: bool) -> None:
    """``<suite>-<device>-<threads>t.json`` and ``.md`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(folder, suite, device)
    env = environment(device, quick)
    results = [
        {
            "case": row.case,
            **row.coordinates,
            "microseconds": {name: timing.as_dict() for name, timing in row.timings.items()},
            "skipped": row.skipped,
        }
        for row in rows
    ]
    text = json.dumps({"suite": suite, "environment": env, "results": results}, indent=1)
    stem.with_suffix(".json").write_text(text + "\n")
    stem.with_suffix(".md").write_text(markdown(suite, rows, env))


def _stem(folder: Path, suite: str, device: str) -> Path:
    return folder / (f"{suite}-cuda" if device == "cuda" else f"{suite}-cpu-{torch.get_num_threads()}t")


def markdown(suite: str, rows: list[Row], env: dict[str, object]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    where = env.get("gpu", env["processor"])
    one = env["device"] == "cpu" and env["threads"] == 1
    threads = "1 thread (its CPU time)" if one else f"{env['threads']} threads"
    lines = [
        f"# {suite}",
        "",
        f"{where}, {threads}, torch {env['torch']}, {env['date']}. Microseconds a call: median of the quietest quarter "
        "of interleaved rounds (p10 to p90 of all rounds).",
        "",
    ]
    if suite == "tracker":  # every case has its own methods
        lines += ["| case | method | us (p10 to p90) |", "|---|---|---|"]
        lines += [f"| {row.case} | {name} | {_cell(t)} |" for row in rows for name, t in row.timings.items()]
    else:
        lines += ["| |" + "".join(f" {row.case} |" for row in rows), "|---|" + "---|" * len(rows)]
        for name in names:
            cells = [_cell(row.timings[name]) if name in row.timings else "" for row in rows]
            lines.append(f"| {name} |" + "".join(f" {cell} |" for cell in cells))
        lines += ["", "Times segscatter's:", ""]
        lines += ["| |" + "".join(f" {row.case} |" for row in rows), "|---|" + "---|" * len(rows)]
        for name in names:
            cells = [f"{_ratio(row, name):.2f}" if name in row.timings else "" for row in rows]
            lines.append(f"| {name} |" + "".join(f" {cell} |" for cell in cells))
    skipped = {f"{name}: {why}" for row in rows for name, why in row.skipped.items()}
    if skipped:
        lines += ["", "Left out:", ""] + [f"* {line}" for line in sorted(skipped)]
    return "\n".join(lines) + "\n"


def _cell(timing) -> str:
    digits = 0 if timing.quiet >= 100 else 1
    return f"{timing.quiet:.{digits}f} ({timing.p10:.{digits}f} to {timing.p90:.{digits}f})"


def _ratio(row: Row, name: str) -> float:
    return row.timings[name].quiet / row.timings[OURS].quiet


def plot(folder: Path, suite: str, device: str, rows: list[Row]) -> None:
    """``.png`` beside the tables: lines where documents or tokens grow from case to case, else bars of ratios."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    path = _stem(folder, suite, device).with_suffix(".png")
    if suite == "scale":
        _lines(path, rows, "tokens", "tokens in the row")
    elif suite in ("reference", "peers"):
        _lines(path, [r for r in rows if r.coordinates["density"] == 0.25], "documents", "documents in 131072 tokens")
        _bars(path.with_name(path.stem + "-ratios.png"), rows)
    elif suite == "shapes":
        _bars(path, rows)


def _color_and_style(names: list[str]) -> dict[str, dict]:
    import matplotlib.pyplot as plt

    palette = plt.get_cmap("tab10").colors
    others = [n for n in names if n != OURS and not n.startswith(FLOOR)]
    floors = [n for n in names if n.startswith(FLOOR)]
    styles = {OURS: {"color": "black", "linewidth": 2.5, "marker": "o"}}
    styles |= {n: {"color": palette[i % 10], "marker": "s", "markersize": 4} for i, n in enumerate(others)}
    styles |= {n: {"color": str(0.4 + 0.12 * i), "linestyle": "--"} for i, n in enumerate(floors)}
    return styles


def _lines(path: Path, rows: list[Row], key: str, label: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    for name, style in _color_and_style(names).items():
        points = [(row.coordinates[key], row.timings[name]) for row in rows if name in row.timings]
        axes.plot([x for x, _ in points], [t.quiet for _, t in points], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="microseconds a call")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(path: Path, rows: list[Row]) -> None:
    import matplotlib.pyplot as plt

    names = [n for n in dict.fromkeys(n for r in rows for n in r.timings) if n != OURS and not n.startswith(FLOOR)]
    styles = _color_and_style([OURS, *names])
    figure, axes = plt.subplots(figsize=(8, 1 + 0.12 * len(rows) * (len(names) + 1)), layout="constrained")
    height = 1 / (len(names) + 1)
    for i, name in enumerate(names):
        present = [(y, _ratio(row, name)) for y, row in enumerate(rows) if name in row.timings]
        at = [y + (i - (len(names) - 1) / 2) * height for y, _ in present]
        axes.barh(at, [ratio for _, ratio in present], height, label=name, color=styles[name]["color"])
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="time / segscatter's time", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [row.case for row in rows])
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
