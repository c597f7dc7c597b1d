# SPDX-License-Identifier: Apache-2.0
"""The picture: one loss curve per channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws without a display
import matplotlib.pyplot as plt

# Okabe and Ito's palette, told apart by colour-blind readers too; the markers help in black and white.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))


def plot_losses(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, path: Path) -> None:
    """Writes a PNG with a curve for every channel through its (step, mean loss) points."""
    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    for (channel, points), (colour, marker) in zip(curves.items(), STYLES, strict=True):
        if not points:
            continue
        steps, losses = zip(*points, strict=True)
        every = max(1, len(points) // 12)
        axes.plot(
            steps, losses, color=colour, marker=marker, markevery=every, markersize=5, linewidth=1.8,
            label=f"{channel} ({losses[-1]:.2f})",
        )  # fmt: skip
    axes.set_title(title)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean loss of the interval (nats per byte)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="channel (last)", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
