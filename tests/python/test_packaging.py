# SPDX-License-Identifier: Apache-2.0
"""Building from source: the source distribution, pip, uv, rebuilding, what setup.py passes on, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import segscatter
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, in a folder that holds nothing else."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder)
    archive.unlink()
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def site(unpacked: Path) -> Path:
    """What `pip install` makes of the source distribution; ccache, where there is one, has seen the sources before."""
    site = unpacked.parent / "site"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--target", site)
    run(sys.executable, "-m", "pip", "install", *options, unpacked, cwd=unpacked.parent, SEGSCATTER_CUDA="OFF")
    return site


def check_installed(site: Path) -> None:
    code = """if True:
        import segscatter, torch
        sums, counts = segscatter.segment_scatter_reduce(torch.tensor([1.0, 2, 4]), torch.tensor([0, 1, 3]), None, 2)
        print(segscatter.__file__, segscatter.__version__, sums.tolist(), counts.tolist(), sep="|")
        from segscatter import _C, hf, megatron, rl, swift"""
    printed = run(sys.executable, "-c", code, cwd=site.parent, PYTHONPATH=str(site)).strip()
    assert printed == f"{site}/segscatter/__init__.py|{segscatter.__version__}|[1.0, 6.0]|[1, 2]"
    files = {str(path.relative_to(site / "segscatter")) for path in (site / "segscatter").rglob("*")}
    assert files >= {
        *("include/segscatter/core.h", "include/segscatter/segscatter.h", "lib/libsegscatter.so"),
        *("lib/libsegscatter_core.a", "share/cmake/segscatter/segscatter-config.cmake"),
        *("_build.json", "swift/plugin/segscatter_channel_loss.py"),
    }
    assert not [name for name in files if name.startswith(("csrc", "tests", "lib/cmake"))]


def test_pip_from_the_source_distribution(site: Path) -> None:
    check_installed(site)


def test_uv(unpacked: Path, site: Path) -> None:
    if shutil.which("uv"):
        uv = ["uv"]
    elif importlib.util.find_spec("uv"):
        uv = [sys.executable, "-m", "uv"]
    else:
        pytest.skip("no uv here")
    target = site.parent / "uv"
    options = ("--no-build-isolation", "--no-deps", "--offline", "--python", sys.executable, "--target", target)
    run(*uv, "pip", "install", *options, unpacked, cwd=unpacked.parent, SEGSCATTER_CUDA="OFF")
    check_installed(target)


def test_a_changed_file_is_compiled_alone(unpacked: Path, site: Path) -> None:
    [tree] = (unpacked / "build").glob("torch-*")
    if not (tree / "build.ninja").exists():
        pytest.skip("built with make, which tells less of what it would do")
    assert "no work to do" in run("ninja", "-C", tree, "-n", cwd=tree)
    os.utime(unpacked / "csrc" / "torch" / "meta.cpp")
    would = re.findall(r"^\[\d+/\d+\] (.*)", run("ninja", "-C", tree, "-n", cwd=tree), re.MULTILINE)
    assert would == [
        "Building CXX object csrc/torch/CMakeFiles/segscatter_torch.dir/meta.cpp.o",
        "Linking CXX shared library csrc/torch/libsegscatter.so",
    ]


def tool(folder: Path, name: str, text: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def setup_py(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext`, with nothing on PATH but what the test has put into tmp_path."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAX_JOBS", "CMAKE_ARGS", "SEGSCATTER_CUDA", "CCACHE_BASEDIR")
    }
    command = [sys.executable, ROOT / "setup.py", "build_ext", "--build-lib", tmp_path / "package"]
    environment = kept | {"PATH": str(tmp_path)} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_what_is_passed_on_to_cmake(tmp_path: Path) -> None:
    tool(tmp_path, "ninja")
    tool(tmp_path, "cmake", f'echo "$@" >> {tmp_path}/log; echo "$CCACHE_BASEDIR" >> {tmp_path}/ccache')
    done = setup_py(tmp_path, MAX_JOBS="3", CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Debug '-DX=a b'", SEGSCATTER_CUDA="OFF")
    assert done.returncode == 0, done.stderr
    configure, build, install = (tmp_path / "log").read_text().splitlines()
    tree = ROOT / "build" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    assert configure.startswith(f"-S {ROOT} -B {tree} ")
    assert f"-DPython_EXECUTABLE={sys.executable} -DSEGSCATTER_CUDA=OFF" in configure
    assert configure.endswith("-DCMAKE_BUILD_TYPE=Debug -DX=a b")
    assert build == f"--build {tree} --parallel 3"
    assert install == f"--install {tree}"
    assert (tmp_path / "ccache").read_text().split() == [str(ROOT)] * 3


def test_no_cmake(tmp_path: Path) -> None:
    done = setup_py(tmp_path)
    assert done.returncode != 0
    assert "segscatter needs CMake 3.22 or newer to build. Run: pip install cmake ninja" in done.stderr


def test_no_ninja_and_no_make(tmp_path: Path) -> None:
    tool(tmp_path, "cmake")
    done = setup_py(tmp_path)
    assert done.returncode != 0
    assert "segscatter needs ninja or make to build. Run: pip install ninja" in done.stderr


def test_failed_build_names_the_command(tmp_path: Path) -> None:
    tool(tmp_path, "make")
    tool(tmp_path, "cmake", "exit 1")
    done = setup_py(tmp_path)
    assert done.returncode != 0
    assert f"segscatter: building failed at: cmake -S {ROOT}" in done.stderr
    assert "Traceback" not in done.stderr


def configure(tmp_path: Path, *options: str, **environment: str) -> tuple[bool, str]:
    """Whether CMake succeeded, and what it said, in one line."""
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DSEGSCATTER_CUDA=OFF", *options]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.returncode == 0, " ".join((done.stdout + done.stderr).split())


def test_no_compiler(tmp_path: Path) -> None:
    done, said = configure(tmp_path, "-DSEGSCATTER_TORCH=OFF", CXX="/nowhere/c++")
    assert not done
    assert (
        "segscatter needs a C++ compiler to build and found none that works. Install one (Debian: apt install g++"
        in said
    )


def test_no_torch_for_cmake(tmp_path: Path) -> None:
    tool(tmp_path, "python", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    done, said = configure(tmp_path, f"-DPython_EXECUTABLE={tmp_path / 'python'}")
    assert not done
    assert "segscatter needs torch >= 2.8 to build its operators and found none" in said
    assert "No module named 'torch'" in said


def test_ccache_is_used_when_present(tmp_path: Path) -> None:
    tool(tmp_path, "ccache", 'exec "$@"')
    done, said = configure(tmp_path, "-DSEGSCATTER_TORCH=OFF", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done, said
    rules = [*(tmp_path / "build").glob("build.ninja"), *(tmp_path / "build").rglob("build.make")]
    assert any(f"{tmp_path}/ccache " in path.read_text() for path in rules)
