# SPDX-License-Identifier: Apache-2.0
"""``python -m segscatter``: what a bug report needs. Exits with 1 if the self-check fails."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import torch

import segscatter
from segscatter import _load, reference


def environment() -> Iterator[tuple[str, object]]:
    info = segscatter.build_info()
    yield "segscatter", info["version"]
    yield "built against torch", info["torch"]
    yield "built with", f"{info['compiler']}, C++{info['cxx_standard']}, {info['build_type']}"
    yield "library", _load.library_path()
    yield "CUDA kernels", f"CUDA {info['cuda']} for {info['cuda_architectures']}" if info["cuda"] else "none"
    try:
        from segscatter import _C

        yield "native module _C", f"loaded ({_C.build_info()['compiler']})"
    except ImportError as error:
        yield "native module _C", f"missing, encoding is slower ({error})"
    yield "torch", torch.__version__
    yield "torch CUDA", torch.version.cuda or "none"
    yield "Python", platform.python_version()
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}", f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    else:
        yield "GPU", "none visible to torch"


def self_check(device: str) -> str:
    """Compares the operators with their plain-torch twins on one random problem; returns "ok" or what is wrong."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5000, generator=generator)
    cuts = torch.randint(0, 5001, (99,), generator=generator).sort().values
    cu_seqlens = torch.cat([torch.tensor([0]), cuts, torch.tensor([5000])])
    group_ids = torch.randint(-1, 8, (100,), generator=generator)
    mask = torch.rand(5000, generator=generator) < 0.5
    want_sums, want_counts = reference.segment_scatter_reduce(values, cu_seqlens, group_ids, 8, mask=mask)
    try:
        sums, counts = segscatter.segment_scatter_reduce(
            values.to(device), cu_seqlens.to(device), group_ids.to(device), 8, mask=mask.to(device)
        )
        if not torch.equal(counts.cpu(), want_counts):
            return f"wrong counts: {counts.tolist()}, not {want_counts.tolist()}"
        torch.testing.assert_close(sums.cpu(), want_sums, rtol=1e-6, atol=1e-6)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "ok"


def main() -> int:
    rows = list(environment())
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    checks = {device: self_check(device) for device in devices}
    rows += [(f"self-check on {device}", outcome) for device, outcome in checks.items()]
    for name, value in rows:
        print(f"{name:<22}{value}")
    return int(any(outcome != "ok" for outcome in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
