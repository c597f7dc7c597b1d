# SPDX-License-Identifier: Apache-2.0
"""docs/scaling.md says what is sent."""

from __future__ import annotations

from pathlib import Path

import scaling


def test_traffic_is_as_documented():
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    assert scaling.traffic_table().split("\n", 1)[1] in text  # the doc has a longer header


def test_pickles_are_what_ranks_send(pools):
    """The counted traffic of a real gather: every rank's pickle, padded to the longest, and its size."""
    keys = [f"loss_{name}" for name in scaling.names(8)]
    for sent in pools(2).run(gathered_bytes, keys):
        assert sent == 2 * scaling.pickle_bytes(8)


def gathered_bytes(keys: list[str]) -> int:
    from unittest import mock

    import torch

    received = 0
    real = torch.distributed.all_gather

    def all_gather(outputs, tensor, group=None):
        nonlocal received
        received += sum(t.numel() * t.element_size() for t in outputs)
        return real(outputs, tensor, group=group)

    everywhere = [None] * torch.distributed.get_world_size()
    with mock.patch.object(torch.distributed.distributed_c10d, "all_gather", all_gather):
        torch.distributed.all_gather_object(everywhere, keys)
    return received
