# SPDX-License-Identifier: Apache-2.0
"""A row of 131072 tokens with 128 and 16384 documents, every fourth token live: the size that people pack."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import Problem
from support import check_reduce, gather, gathered, on_device, reduce

NUM_TOKENS, GROUPS = 131072, 8


def reference_problem(documents: int, seed: int) -> Problem:
    rng = random.Random(seed)
    cu = [0, *sorted(rng.randrange(NUM_TOKENS + 1) for _ in range(documents - 1)), NUM_TOKENS]
    ids = [rng.randrange(GROUPS) for _ in range(documents)]
    mask = torch.rand(NUM_TOKENS) < 0.25
    return Problem(torch.randn(NUM_TOKENS), torch.tensor(cu), torch.tensor(ids), GROUPS, {"mask": mask})


@pytest.mark.parametrize("documents", [128, 16384])
def test_reduce(documents: int, seed: int) -> None:
    p = reference_problem(documents, seed)
    check_reduce(p, *reduce(on_device(p)))


def test_gather(seed: int) -> None:
    p = reference_problem(16384, seed)
    source = torch.randn(GROUPS)
    assert torch.equal(gather(source, on_device(p)), gathered(source, p))
