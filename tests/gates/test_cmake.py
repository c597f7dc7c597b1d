# SPDX-License-Identifier: Apache-2.0
"""Build options, by configuring only. A fake Python answers for the torch to build against."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def fake_python(folder: Path, version: str, cuda: str) -> Path:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nprintf '%s\\n' '{version}' '{cuda}' /nowhere/lib /nowhere/include\n")
    script.chmod(0o755)
    return script


def configure(
    folder: Path, *options: str, torch: tuple[str, str] | None = None, arch_list: str = ""
) -> tuple[bool, str]:
    """Whether CMake succeeded, and what it said, in one line. ``torch``: versions of torch and of its CUDA."""
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), *options]
    if torch is None:
        command.append("-DSEGSCATTER_TORCH=OFF")
    else:
        command.append(f"-DPython_EXECUTABLE={fake_python(folder, *torch)}")
    env = {k: v for k, v in os.environ.items() if k not in ("SEGSCATTER_CUDA", "TORCH_CUDA_ARCH_LIST")}
    done = subprocess.run(command, env={**env, "TORCH_CUDA_ARCH_LIST": arch_list}, capture_output=True, text=True)
    return done.returncode == 0, " ".join((done.stdout + done.stderr).split())


def without_nvcc() -> list[str]:
    """Every search for a program fails; the tools that are there anyway are named."""
    tools = {
        "CMAKE_CXX_COMPILER": shutil.which("c++") or shutil.which("g++"),
        "CMAKE_MAKE_PROGRAM": shutil.which("make"),
    }
    named = [f"-D{name}={path}" for name, path in tools.items()]
    return [*named, "-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY"]


@pytest.mark.parametrize(
    ("arch_list", "message"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST names 'Hopper', which is no compute capability"),
        ("9.0 sm_90", "TORCH_CUDA_ARCH_LIST names 'sm_90', which is no compute capability"),
        ("90", "names '90', which is no compute capability"),
        ("9.0+ptx", "names '9.0+ptx', which is no compute capability"),
        ("7.0 8.0", "names 7.0, but segscatter's kernels need compute capability 7.5 or newer"),
        ("6.1+PTX", "names 6.1+PTX, but segscatter's kernels need"),
    ],
)
@needs_nvcc
def test_bad_architectures(tmp_path: Path, arch_list: str, message: str) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=ON", arch_list=arch_list)
    assert not done
    assert message in said


@pytest.mark.parametrize(
    ("arch_list", "wanted"),
    [
        (
            "8.0;9.0+PTX",
            {"arch=compute_80,code=[sm_80]", "arch=compute_90,code=[sm_90]", "arch=compute_90,code=[compute_90]"},
        ),
        ("8.6, 9.0a", {"arch=compute_86,code=[sm_86]", "arch=compute_90a,code=[sm_90a]"}),
    ],
)
@needs_nvcc
def test_architectures_reach_nvcc(tmp_path: Path, arch_list: str, wanted: set[str]) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=ON", arch_list=arch_list)
    assert done, said
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    line = next(entry["command"] for entry in commands if entry["file"].endswith("combine.cu"))
    found = {part.removeprefix("--generate-code=") for part in line.replace('"', "").split() if "generate-code" in part}
    assert found == wanted
    assert "-warn-spills,-warn-lmem-usage,-Werror" in line


@needs_nvcc
def test_default_architectures(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=ON")
    assert done, said
    assert "kernels for 7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX" in said


def test_unknown_choice(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=maybe")
    assert not done
    assert "SEGSCATTER_CUDA must be AUTO, ON or OFF, but is MAYBE" in said


def test_off_with_a_cuda_torch(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=OFF", *without_nvcc(), torch=("2.14.1", "13.0"))
    assert done, said
    assert "no CUDA kernels (SEGSCATTER_CUDA=OFF)" in said


def test_auto_with_a_cpu_torch(tmp_path: Path) -> None:
    done, said = configure(tmp_path, *without_nvcc(), torch=("2.13.0+cpu", ""))
    assert done, said
    assert "no CUDA kernels (torch 2.13.0+cpu is built without CUDA)" in said


def test_on_with_a_cpu_torch(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=ON", torch=("2.13.0+cpu", ""))
    assert not done
    assert "SEGSCATTER_CUDA=ON, but torch 2.13.0+cpu is built without CUDA" in said


def test_auto_without_nvcc(tmp_path: Path) -> None:
    done, said = configure(tmp_path, *without_nvcc(), torch=("2.14.1", "13.0"))
    assert not done
    assert "no nvcc was found to build CUDA kernels (torch: 2.14.1, its CUDA: 13.0)" in said
    assert "SEGSCATTER_CUDA=OFF" in said


@needs_nvcc
def test_other_major_version(tmp_path: Path) -> None:
    done, said = configure(tmp_path, torch=("2.8.0", "11.8"), arch_list="8.0")
    assert not done
    assert "but torch 2.8.0 is built for CUDA 11.8; their major versions must agree" in said
    assert "SEGSCATTER_CUDA=OFF" in said


def test_old_torch(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_CUDA=OFF", torch=("2.7.1", "12.6"))
    assert not done
    assert "segscatter needs torch >= 2.8, but found 2.7.1" in said
