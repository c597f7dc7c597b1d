# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of the kernels, read back from the built library with cuobjdump."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "python" / "segscatter" / "lib" / "libsegscatter.so"

_TYPES = {
    "h": "mask8", "j": "mask32", "m": "mask64", "t": "out16", "d": "float64",
    "Float16": "float16", "BFloat16": "bfloat16", "Float32": "float32", "FloatSum": "float32", "DoubleSum": "float64",
}  # fmt: skip
_PIECE = re.compile(r"Lb([01])E|Li(\d+)E|NS\d_\d+(\w+?)E|([hjmtd])")


def cuobjdump() -> str:
    """The CUDA Toolkit's, or the one inside the triton that CUDA builds of torch bring."""
    if found := shutil.which(
        "cuobjdump", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}"
    ):
        return found
    try:
        import triton
    except ImportError:
        raise FileNotFoundError("cuobjdump is neither on PATH nor, inside triton, in this Python") from None
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def kernel_of(mangled: str) -> str:
    """``reduce_partials<private, float32, mask8>`` of a mangled name."""
    match = re.match(r"_ZN10segscatter4core4cuda\d+([a-z_]+)I(.*?)EEvNS", mangled)
    if not match:
        raise ValueError(f"not a kernel of segscatter: {mangled}")
    name, text, arguments = match[1], match[2] + "E", []
    while text and (piece := _PIECE.match(text)):
        private, number, type_name, letter = piece.groups()
        if private is not None:
            arguments.append("private" if private == "1" else "shared")
        elif number is not None:
            arguments.append(f"{number} threads")
        else:
            arguments.append(_TYPES[type_name or letter])
        text = text[piece.end() :]
    if name == "gather":
        arguments[0] = {"out16": "out16", "mask32": "out32", "mask64": "out64"}[arguments[0]]
    return f"{name}<{', '.join(arguments)}>"


def dump(*options: str) -> str:
    return subprocess.run([cuobjdump(), *options, str(LIBRARY)], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int
    shared: int
    local: int


@cache
def resources() -> dict[str, dict[str, Usage]]:
    """By kernel and architecture, such as "sm_90"."""
    found: dict[str, dict[str, Usage]] = {}
    arch = name = ""
    for line in dump("--dump-resource-usage").splitlines():
        if match := re.match(r"\s*arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif (match := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)) and "segscatter" in name:
            found.setdefault(kernel_of(name), {})[arch] = Usage(*map(int, match.groups()))
            name = ""
    return found


@cache
def ptx() -> dict[int, dict[str, str]]:
    """Text of every kernel, by target (75, 90...) and kernel."""
    found: dict[int, dict[str, str]] = {}
    for module in re.split(r"(?=^\.version )", dump("--dump-ptx"), flags=re.MULTILINE):
        if not (target := re.search(r"^\.target sm_(\d+)", module, re.MULTILINE)):
            continue
        for entry in re.finditer(r"\.entry (\S+?)\(.*?^}", module, re.MULTILINE | re.DOTALL):
            found.setdefault(int(target[1]), {})[kernel_of(entry[1])] = entry[0]
    return found


@cache
def machine_code(arch: str) -> dict[str, str]:
    """SASS of every kernel for one architecture, such as "sm_90"."""
    found: dict[str, str] = {}
    for part in re.split(r"^\s*Function : ", dump("--dump-sass", "--gpu-architecture", arch), flags=re.MULTILINE)[1:]:
        name, _, code = part.partition("\n")
        if "segscatter" in name:
            found[kernel_of(name.strip())] = code
    return found
