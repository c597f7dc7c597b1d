# SPDX-License-Identifier: Apache-2.0
"""Programs of users: find_package(segscatter), from the Python package and from `cmake --install`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import segscatter
import torch

ROOT = Path(__file__).resolve().parents[2]
CORE_OUTPUT = "7 1 2 1"
TORCH_OUTPUT = (
    "7 1 2 1 "  # sums, counts
    "10 0 1 1 "  # gradient
    "1 1 2 2 "  # counts, gathered
    "3 7 2 2 "  # accumulated
    "segment_scatter_reduce: group_ids has 1 elements for the 2 s"
)


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_consumer(kind: str, tree: Path, *prefixes: object) -> list[str]:
    """Configures, builds and runs tests/consumer; returns what it printed, line by line."""
    run(
        *("cmake", "-S", ROOT / "tests" / "consumer", "-B", tree, f"-DCONSUMER={kind}"),
        f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}",
    )
    if (
        kind == "torch"
        and "CUDA_nvrtc_LIBRARY:FILEPATH=CUDA_nvrtc_LIBRARY-NOTFOUND" in (tree / "CMakeCache.txt").read_text()
    ):
        pytest.skip("torch's CMake configuration links NVRTC, which this CUDA Toolkit lacks")
    run("cmake", "--build", tree)
    return run(tree / "consumer").splitlines()


def test_core_from_the_package(tmp_path: Path) -> None:
    assert build_consumer("core", tmp_path, segscatter.cmake_prefix_path) == [CORE_OUTPUT]


def test_core_from_cmake_install(tmp_path: Path) -> None:
    build = ("-DSEGSCATTER_TORCH=OFF", "-DSEGSCATTER_CUDA=OFF", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}")
    run("cmake", "-S", ROOT, "-B", tmp_path / "build", *build)
    run("cmake", "--build", tmp_path / "build", "--parallel", "2")
    run("cmake", "--install", tmp_path / "build")
    assert build_consumer("core", tmp_path / "consumer", tmp_path / "installed") == [CORE_OUTPUT]


@pytest.mark.skipif(
    torch.version.cuda is not None and shutil.which("nvcc") is None,
    reason="find_package(Torch) of a CUDA torch needs the CUDA Toolkit",
)
def test_torch_from_the_package(tmp_path: Path) -> None:
    printed = build_consumer("torch", tmp_path, segscatter.cmake_prefix_path, torch.utils.cmake_prefix_path)
    assert printed == [TORCH_OUTPUT, segscatter.__version__]
