# SPDX-License-Identifier: Apache-2.0
"""Compiles a loss by channel ahead of time, for programs without Python: ``export_channel_loss.py channel_loss.pt2``.

``run_exported.cpp`` loads and runs it. Numbers of tokens and documents stay free.
"""

from __future__ import annotations

import sys

import segscatter
import torch
from torch import Tensor

NUM_CHANNELS = 3
VOCABULARY = 11


class ChannelLoss(torch.nn.Module):
    """Sums of the cross-entropy and numbers of labelled tokens, for every channel."""

    def forward(self, logits: Tensor, labels: Tensor, cu_seqlens: Tensor, channel_ids: Tensor) -> tuple[Tensor, Tensor]:
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        return segscatter.segment_scatter_reduce(
            losses, cu_seqlens, channel_ids, NUM_CHANNELS, mask=labels, ignore_index=-100
        )


def export() -> torch.export.ExportedProgram:
    tokens, documents = torch.export.Dim("tokens", min=2), torch.export.Dim("documents", min=2)
    example = (
        torch.zeros(32, VOCABULARY),
        torch.zeros(32, dtype=torch.int64),
        torch.tensor([0, 10, 20, 32]),
        torch.tensor([0, 1, 2]),
    )
    return torch.export.export(
        ChannelLoss(), example, dynamic_shapes=({0: tokens}, {0: tokens}, {0: documents + 1}, {0: documents})
    )


if __name__ == "__main__":
    print(torch._inductor.aoti_compile_and_package(export(), package_path=sys.argv[1]))
