# SPDX-License-Identifier: Apache-2.0
"""Drives CMake, which knows all sources, flags and targets. Metadata needs neither torch nor a compiler."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
INSTALL = "pip install --no-build-isolation ."


def version() -> str:
    text = (ROOT / "include" / "segscatter" / "version.h").read_text()
    return re.search(r'SEGSCATTER_VERSION "(.+)"', text)[1]


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project into the package's folder."""

    def run(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                "segscatter is built against the torch that will load it, and this Python cannot import one "
                f"({error}). Install torch first, then run: {INSTALL} "
                "(without --no-build-isolation pip builds in an environment that has no torch)"
            ) from None
        if shutil.which("cmake") is None:
            raise SystemExit(
                f"segscatter needs CMake 3.22 or newer to build. Run: pip install cmake ninja && {INSTALL}"
            )
        if not any(map(shutil.which, ("ninja", "make"))):
            raise SystemExit(f"segscatter needs ninja or make to build. Run: pip install ninja && {INSTALL}")
        # Where ccache is installed, checkouts and unpacked source distributions share what was compiled in any of them.
        os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
        os.environ.setdefault("CCACHE_NOHASHDIR", "1")
        self.build_with(torch.__version__)

    def build_with(self, torch_version: str) -> None:
        source_package = ROOT / "python" / "segscatter"
        package = source_package if self.inplace else Path(self.build_lib).resolve() / "segscatter"
        # One tree for each torch and Python, so that switching between them rebuilds nothing.
        tree = ROOT / "build" / f"torch-{torch_version}-{sys.implementation.cache_tag}"
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(tree)),
            "-DSEGSCATTER_PYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DSEGSCATTER_CUDA={os.environ.get('SEGSCATTER_CUDA', 'AUTO')}",
            f"-DCMAKE_INSTALL_PREFIX={package}",
        ]
        if shutil.which("ninja") and not (tree / "Makefile").exists():
            configure += ["-G", "Ninja"]
        self.call(configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        self.call(["cmake", "--build", str(tree), "--parallel", os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)])
        self.call(["cmake", "--install", str(tree)], stdout=subprocess.DEVNULL)

    def call(self, command: list[str], **options) -> None:
        try:
            subprocess.run(command, check=True, **options)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"segscatter: building failed at: {shlex.join(command)}") from error

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "segscatter"
        return [str(path) for path in package.rglob("*") if path.is_file() and path.suffix != ".py"]


# The extension only makes setuptools call build_ext and tag the wheel with the platform.
setup(version=version(), ext_modules=[Extension("segscatter._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
