# SPDX-License-Identifier: Apache-2.0
"""What became of every channel: its curve over the run, and the table at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from segscatter import ChannelStat


class ChannelReport:
    """Collects what ``ChannelLossTracker.reduce()`` returns, interval by interval.

    curves: of every channel the (step, mean loss) points, one for each interval in which it had tokens.
    sums, counts: over the whole run, of the channels that had any.
    """

    def __init__(self, channels: Iterable[str]) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {channel: [] for channel in channels}
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, step: int, stats: Mapping[str, ChannelStat]) -> None:
        for channel, stat in stats.items():
            self.curves[channel].append((step, stat.mean))
            self.sums[channel] += stat.sum
            self.counts[channel] += stat.count

    def status(self) -> str:
        """The current loss of every channel."""
        return "  ".join(f"{channel} {points[-1][1]:.2f}" for channel, points in self.curves.items() if points)

    def table(self) -> str:
        total = sum(self.counts.values())
        lines = [f"{'channel':<10}{'mean loss':>10}{'at first':>10}{'at last':>10}{'tokens':>13}{'share':>9}"]
        for channel, points in self.curves.items():
            if not points:
                continue
            count = self.counts[channel]
            lines.append(
                f"{channel:<10}{self.sums[channel] / count:>10.4f}{points[0][1]:>10.4f}{points[-1][1]:>10.4f}"
                f"{count:>13,}{count / total:>9.1%}"
            )
        lines.append(f"{'all':<10}{sum(self.sums.values()) / total:>10.4f}{'':20}{total:>13,}{1:>9.1%}")
        return "\n".join(lines)
