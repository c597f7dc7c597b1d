# SPDX-License-Identifier: Apache-2.0
"""The tracker that belongs to a trainer."""

from __future__ import annotations

from typing import Any

from ..channels import ChannelRegistry
from ..distributed import Group
from ..tracker import ChannelLossTracker

_ATTRIBUTE = "_segscatter_tracker"
_vocabulary: tuple[str, ...] | None = None


def set_vocabulary(names: tuple[str, ...] | None) -> None:
    """Sets the channels of trackers made from now on; None: they grow."""
    global _vocabulary
    _vocabulary = names


def tracker_of(trainer: Any, group: Group = None) -> ChannelLossTracker:
    """The trainer's tracker, made at the first call; ``group`` is what its sums are reduced over."""
    tracker = getattr(trainer, _ATTRIBUTE, None)
    if tracker is None:
        registry = ChannelRegistry(grow=True) if _vocabulary is None else ChannelRegistry(_vocabulary)
        tracker = ChannelLossTracker(registry, group=group)
        setattr(trainer, _ATTRIBUTE, tracker)
    return tracker


def metrics_since_last_log(tracker: ChannelLossTracker, mode: str) -> dict[str, float]:
    """``{"loss_<channel>": mean}``. Collective."""
    return {f"loss_{name}": stat.mean for name, stat in tracker.reduce(mode).items()}
