# SPDX-License-Identifier: Apache-2.0
"""Programs of users, built with find_package(segscatter) and run by CTest: tests/consumer and examples/cpp, from the
Python package and from `cmake --install`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import segscatter
import torch

ROOT = Path(__file__).resolve().parents[2]
JOBS = os.environ.get("MAX_JOBS", "2")

needs_toolkit = pytest.mark.skipif(
    torch.version.cuda is not None and shutil.which("nvcc") is None,
    reason="find_package(Torch) of a CUDA torch needs the CUDA Toolkit",
)


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(project: str, tree: Path, *options: str, prefixes: list[object]) -> Path:
    """Configures a project of this repository in ``tree``, which it returns."""
    run("cmake", "-S", ROOT / project, "-B", tree, f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}", *options)
    if "CUDA_nvrtc_LIBRARY:FILEPATH=CUDA_nvrtc_LIBRARY-NOTFOUND" in (tree / "CMakeCache.txt").read_text():
        pytest.skip("torch's CMake configuration links NVRTC, which this CUDA Toolkit lacks")
    return tree


def build_and_test(tree: Path) -> dict[str, list[str]]:
    """Builds a configured project and runs its tests; returns the lines that each of them printed."""
    run("cmake", "--build", tree, "--parallel", JOBS)
    said = run("ctest", "--test-dir", tree, "--no-tests=error", "-V")
    printed: dict[str, list[str]] = {}
    names = {}
    for line in said.splitlines():
        if start := re.match(r"\s+Start\s+(\d+): (\S+)", line):
            names[start[1]] = start[2]
        elif output := re.match(r"(\d+): (?!Test (command|timeout)|Working Directory)(.*)", line):
            printed.setdefault(names[output[1]], []).append(output[3])
    return printed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`cmake --install` of what setup.py builds."""
    tree = ROOT / "build" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    if not tree.exists():
        run(sys.executable, ROOT / "setup.py", "build_ext", "--build-lib", tmp_path_factory.mktemp("package"))
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", tree, "--prefix", prefix)
    return prefix


def test_core_without_torch_from_cmake_install(tmp_path: Path) -> None:
    build = ("-DSEGSCATTER_TORCH=OFF", "-DSEGSCATTER_CUDA=OFF", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}")
    run("cmake", "-S", ROOT, "-B", tmp_path / "build", *build)
    run("cmake", "--build", tmp_path / "build", "--parallel", JOBS)
    run("cmake", "--install", tmp_path / "build")
    tree = configure("tests/consumer", tmp_path / "consumer", "-DCOMPONENTS=core", prefixes=[tmp_path / "installed"])
    assert list(build_and_test(tree)) == ["core"]


@needs_toolkit
def test_consumer_from_the_package(tmp_path: Path) -> None:
    prefixes = [segscatter.cmake_prefix_path, torch.utils.cmake_prefix_path]
    tree = configure("tests/consumer", tmp_path, "-DCOMPONENTS=core;torch", prefixes=prefixes)
    assert list(build_and_test(tree)) == ["core", "torch"]


def test_torch_is_an_error_only_where_it_is_required(tmp_path: Path, installed: Path) -> None:
    """No LibTorch among the prefixes: examples/cpp makes do with the core, a consumer of torch is told what to add."""
    nowhere = "-DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON"
    tree = configure("examples/cpp", tmp_path / "examples", nowhere, prefixes=[installed])
    assert list(build_and_test(tree)) == ["channel_means"]
    done = subprocess.run(
        [
            *("cmake", "-S", ROOT / "tests" / "consumer", "-B", tmp_path / "consumer", nowhere),
            *("-DCOMPONENTS=torch", f"-DCMAKE_PREFIX_PATH={installed}"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert f"its component torch needs LibTorch {torch.__version__}, which was not found; add it to" in said


def exported_channel_losses() -> list[float]:
    """What run_exported computes, in float64 and one token after the other."""
    position = torch.arange(1000)
    logits = (torch.outer(position, torch.arange(11)) * 0.37).sin() * 3
    sums = [0.0, 0.0, 0.0]
    for channel, begin, end in [(2, 0, 10), (0, 10, 400), (1, 400, 993)]:
        for t in range(begin, end):
            if t % 5 != 0:
                sums[channel] -= logits[t].double().log_softmax(0)[t % 11].item()
    return sums


@needs_toolkit
def test_examples_from_cmake_install(tmp_path: Path, installed: Path) -> None:
    """The examples, among them a model that AOTInductor compiled, run by C++ and by Python."""
    exported = tmp_path / "channel_loss.pt2"
    prefixes = [installed, torch.utils.cmake_prefix_path]
    tree = configure("examples/cpp", tmp_path / "build", f"-DEXPORTED={exported}", prefixes=prefixes)
    run(sys.executable, ROOT / "examples" / "cpp" / "export_channel_loss.py", exported)
    printed = build_and_test(tree)
    assert printed["channel_means"] == ["code 0.8 5", "prose 2 3"]

    # The model learns: every channel starts near ln(256) and falls; no token is lost.
    logs = [line.split()[2:] for line in printed["train"]]
    assert [[log[i] for i in (0, 3, 6)] for log in logs] == [["cpp", "python", "prose"]] * 4
    for channel in range(3):
        first, *_, last = (float(log[3 * channel + 1]) for log in logs)
        assert 3 < first < 5.6
        assert last < 0.8 * first
    for log in logs:
        tokens = sum(int(log[3 * channel + 2].strip("()")) for channel in range(3))
        assert 30 * 1792 < tokens <= 30 * 2048  # 30 rows, whose padding is shorter than a document

    got = [re.fullmatch(r"channel \d: (\S+) \((\d+)\)", line) for line in printed["run_exported"]]
    want = exported_channel_losses()
    assert [int(line[2]) for line in got] == [312, 474, 8]
    assert [float(line[1]) for line in got] == pytest.approx(want, rel=1e-5)

    model = torch._inductor.aoti_load_package(str(exported))
    logits = torch.tensor([[0.0] * 11, [1.0] + [0.0] * 10, [5.0] * 11])
    sums, counts = model(logits, torch.tensor([3, 0, -100]), torch.tensor([0, 1, 3, 3]), torch.tensor([1, 2, 0]))
    assert counts.tolist() == [0, 1, 1]
    assert sums.tolist() == pytest.approx([0, 2.397895, 1.543040], abs=1e-5)
