# SPDX-License-Identifier: Apache-2.0
"""Per-channel losses of packed batches: one fused segmented scatter-reduce over ``cu_seqlens``."""

import importlib

from . import _load

_info = _load.load()

from . import reference  # noqa: E402  (the operators must be registered first)
from .channels import ChannelRegistry  # noqa: E402
from .means import segment_mean, sum_of_segment_means  # noqa: E402
from .ops import (  # noqa: E402
    ContextParallel,
    segment_gather,
    segment_scatter_accumulate_,
    segment_scatter_reduce,
    validate,
)
from .tracker import ChannelLossTracker, ChannelStat  # noqa: E402

__version__ = _info["version"]
cmake_prefix_path = str(_load.PACKAGE / "share" / "cmake")


def __getattr__(name: str):
    """Imports the parts for one kind of trainer when they are first used."""
    if name in ("hf", "megatron", "rl", "swift"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_info() -> dict[str, str]:
    """What this installation was built from: versions of segscatter, torch, CUDA and compiler, CUDA architectures."""
    return dict(_info)


__all__ = [
    "ChannelLossTracker",
    "ChannelRegistry",
    "ChannelStat",
    "ContextParallel",
    "build_info",
    "cmake_prefix_path",
    "reference",
    "segment_gather",
    "segment_mean",
    "segment_scatter_accumulate_",
    "segment_scatter_reduce",
    "sum_of_segment_means",
    "validate",
]
