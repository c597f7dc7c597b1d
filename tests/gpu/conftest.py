# SPDX-License-Identifier: Apache-2.0
"""Tests that need what the simulator lacks: time, several streams at once, torch's own kernels, much memory.

They share fixtures and helpers with tests/cuda, which run on a GPU too.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "python"), str(TESTS / "cuda")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def seed() -> int:
    """A seed that SEGSCATTER_TEST_SEED can set; pytest shows the printed line of a failed test."""
    value = int(os.environ.get("SEGSCATTER_TEST_SEED", random.randrange(2**31)))
    print(f"SEGSCATTER_TEST_SEED={value}")
    torch.manual_seed(value)
    return value
