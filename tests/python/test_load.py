# SPDX-License-Identifier: Apache-2.0
"""What import says when something is wrong, the environment report, and metadata without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import segscatter
import torch
from segscatter import _load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package that a test may break."""
    copy = tmp_path / "segscatter"
    shutil.copytree(_load.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def import_from(package: Path) -> str:
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import segscatter; print(segscatter.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=package.parent)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def rewrite_build_info(package: Path, **changes: str) -> None:
    path = package / "_build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_whole_copy_loads(package: Path) -> None:
    assert import_from(package) == str(package / "__init__.py")


def test_other_torch(package: Path) -> None:
    rewrite_build_info(package, torch="1.13.0")
    error = import_from(package)
    assert (
        f"built against torch 1.13.0, but this is torch {torch.__version__}. Rebuild it: in segscatter's source tree"
        in error
    )


def test_other_cuda(package: Path) -> None:
    rewrite_build_info(package, cuda="99.1")
    assert f"built with CUDA 99.1, but this torch is for CUDA {torch.version.cuda or '(none)'}" in import_from(package)


def test_missing_library(package: Path) -> None:
    (package / "lib" / "libsegscatter.so").unlink()
    assert "segscatter's library is missing" in import_from(package)


def test_broken_library(package: Path) -> None:
    (package / "lib" / "libsegscatter.so").write_bytes(b"not a library")
    error = import_from(package)
    assert "segscatter's library cannot be loaded (built against torch" in error
    assert "source tree, pip install" in error


def test_not_built(package: Path) -> None:
    (package / "_build.json").unlink()
    assert "segscatter is not built" in import_from(package)


def test_report() -> None:
    done = subprocess.run([sys.executable, "-m", "segscatter"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in (segscatter.__version__, torch.__version__, "self-check on cpu     ok", "loaded (gcc"):
        assert wanted in done.stdout


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs a CUDA torch without a GPU")
def test_cuda_torch_without_gpu_is_no_problem() -> None:
    sums, _ = segscatter.segment_scatter_reduce(torch.ones(2), torch.tensor([0, 2]), None, 1)
    assert sums.tolist() == [2]


def test_cuda_tensors_on_a_cpu_build_name_the_fix() -> None:
    """Without a GPU there are no CUDA tensors, but the dispatcher can be asked for its CUDA kernel."""
    if segscatter.build_info()["cuda"]:
        pytest.skip("this build has CUDA kernels")
    op = torch.ops.segscatter.segment_scatter_reduce.default
    with pytest.raises(NotImplementedError, match=r"built without CUDA kernels.*SEGSCATTER_CUDA=ON pip install"):
        op._op_dk(torch._C.DispatchKey.CUDA, torch.ones(2), torch.tensor([0, 2]), None, 1)


def without_torch(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with setuptools but no torch to be found."""
    code = f"import runpy, sys; sys.modules['torch'] = None; {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


def test_metadata_needs_no_torch(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns("build*", ".venv*", ".git", "lib", "_C*", "_build.json")
    )
    done = without_torch(
        f"from setuptools.build_meta import prepare_metadata_for_build_wheel as p; print(p({str(tmp_path)!r}))",
        cwd=source,
    )
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert f"Version: {segscatter.__version__}" in metadata
    assert "Requires-Dist: torch>=2.8" in metadata


def test_building_without_torch_names_the_fix(tmp_path: Path) -> None:
    done = without_torch(
        f"sys.argv = ['setup.py', 'build_ext', '--build-lib', {str(tmp_path)!r}]; runpy.run_path('setup.py')",
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "Install torch first, then run: pip install --no-build-isolation ." in done.stderr


def test_library_has_no_second_openmp_runtime() -> None:
    """Threads come from torch's pool; linking another runtime would start a second one."""
    readelf = shutil.which("readelf")
    if readelf is None or sysconfig.get_platform().startswith("macosx"):
        pytest.skip("no readelf here")
    needed = subprocess.run([readelf, "-d", _load.library_path()], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needed
    assert "libgomp" not in needed
