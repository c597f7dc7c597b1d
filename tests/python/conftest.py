# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: devices, seeds that are printed when a test fails, and the project's table of right values."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

CASES = json.loads((Path(__file__).parents[1] / "cases.json").read_text())


def pytest_report_header() -> str:
    import segscatter

    info = segscatter.build_info()
    return (
        f"segscatter {info['version']}, torch {torch.__version__}, CUDA kernels: {info['cuda_architectures'] or 'none'}"
    )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that SEGSCATTER_TEST_SEED can set; pytest shows the printed line of a failed test."""
    value = int(os.environ.get("SEGSCATTER_TEST_SEED", random.randrange(2**31)))
    print(f"SEGSCATTER_TEST_SEED={value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def case(request: pytest.FixtureRequest) -> dict:
    return request.param
