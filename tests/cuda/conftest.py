# SPDX-License-Identifier: Apache-2.0
"""Tests of the CUDA build: under the simulator (simulate.sh), or as they are on a GPU (tests/gpu/run.sh).

Tensors are made on the host and moved, because the simulator runs segscatter's kernels and few of torch's.
"""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "python"))  # the oracle and the random problems are shared with the CPU's tests

import simulation  # noqa: E402
from simulation import cudasim  # noqa: E402

CASES = json.loads((TESTS / "cases.json").read_text())
CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ

if cudasim and CACHING:
    cudasim.use_exact_allocator()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simulated: reads the simulator's log")


def pytest_report_header() -> str:
    import segscatter

    device = "none" if not torch.cuda.is_available() else "{}.{}".format(*torch.cuda.get_device_capability())
    return (
        f"{'cudasim' if cudasim else 'GPU'} of compute capability {device}, kernels for "
        f"{segscatter.build_info()['cuda_architectures'] or 'none'}, "
        f"path {os.environ.get('SEGSCATTER_CUDA_PATH') or 'chosen by the plan'}"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/cuda need a CUDA device: a GPU, or tests/cuda/simulate.sh")
    for item in items:
        item.add_marker("gpu")
        if item.get_closest_marker("simulated") and not cudasim:
            item.add_marker(pytest.mark.skip(reason="reads the log of cudasim, and this is a GPU"))


def pytest_sessionfinish() -> None:
    folder = os.environ.get("SEGSCATTER_COVERAGE")
    if cudasim and folder:
        simulation.save_coverage(Path(folder))


@pytest.fixture(autouse=True)
def _clean_simulator():
    """A fault stays until it is reset, as on a device, and would make every later test fail."""
    if cudasim:
        cudasim.reset()
    return


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another one for every test and run, all from SEGSCATTER_TEST_SEED, which a failed test shows."""
    base = os.environ.get("SEGSCATTER_TEST_SEED", str(random.randrange(2**31)))
    print(f"SEGSCATTER_TEST_SEED={base}")
    run = (base, request.node.nodeid, os.environ.get("SEGSCATTER_CUDA_PATH", ""), torch.cuda.get_device_capability())
    value = zlib.crc32(repr(run).encode())
    torch.manual_seed(value)
    return value


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def case(request: pytest.FixtureRequest) -> dict:
    return request.param
