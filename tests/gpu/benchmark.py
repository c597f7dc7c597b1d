# SPDX-License-Identifier: Apache-2.0
"""The benchmark table of a GPU: `benchmark.py [--seconds 90] [--out FILE]`.

Per contender and number of documents: GPU time of a call, by replaying a graph of many calls; CPU time of an eager
call, from issuing many without waiting; kernels of a call, from the profiler. T = 131072 float32 values in 8 groups, a
quarter of them live, random document lengths.

* segscatter, and its paths forced (`SEGSCATTER_CUDA_PATH`, so each in a process of its own);
* repeat_interleave + index_add_: the usual way, with its two synchronisations (they forbid capture: no GPU time);
* segment_reduce, cub: sums of documents only, no mask, groups or counts;
* sum, copy: reading all values once, and reading and writing them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import segscatter
import torch

NUM_TOKENS, GROUPS = 131072, 8
DOCUMENTS = (1, 128, 1024, 4096, 16384, 131072)
CALLS_IN_GRAPH = 20


class Row:
    def __init__(self, documents: int, num_tokens: int = NUM_TOKENS) -> None:
        generator = torch.Generator().manual_seed(documents)
        cuts = torch.randint(0, num_tokens + 1, (documents - 1,), generator=generator).sort()[0]
        self.cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([num_tokens])]).cuda()
        self.ids = torch.randint(0, GROUPS, (documents,), generator=generator).cuda()
        self.values = torch.randn(num_tokens, generator=generator).cuda()
        self.mask = (torch.rand(num_tokens, generator=generator) < 0.25).cuda()
        self.other = torch.empty_like(self.values)
        self.lengths = self.cu.diff()


def segscatter_call(row: Row) -> object:
    return segscatter.segment_scatter_reduce(row.values, row.cu, row.ids, GROUPS, mask=row.mask)


def gather_call(row: Row) -> object:
    return segscatter.segment_gather(row.values[:GROUPS], row.cu, row.ids, len(row.values), mask=row.mask)


def index_add_call(row: Row) -> object:
    groups = torch.repeat_interleave(row.ids, row.cu.diff())[row.mask]
    sums = torch.zeros(GROUPS, device="cuda").index_add_(0, groups, row.values[row.mask])
    return sums, torch.zeros(GROUPS, device="cuda").index_add_(0, groups, torch.ones_like(groups, dtype=torch.float32))


def segment_reduce_call(row: Row) -> object:
    return torch.segment_reduce(row.values, "sum", lengths=row.lengths, unsafe=True)


def build_cub(folder: Path) -> Callable[[Row], object]:
    library = folder / "cub_segmented_sum.so"
    major, minor = torch.cuda.get_device_capability()
    command = [
        "nvcc",
        "-O3",
        "-std=c++17",
        f"-arch=sm_{major}{minor}",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-o",
        str(library),
    ]
    subprocess.run([*command, str(Path(__file__).with_name("cub_segmented_sum.cu"))], check=True)
    function = ctypes.CDLL(str(library)).cub_segmented_sum
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    workspaces: dict[int, torch.Tensor] = {}

    def call(row: Row) -> object:
        segments = len(row.ids)
        size = ctypes.c_size_t(0)
        sums = torch.empty(segments, device="cuda")
        arguments = (
            row.values.data_ptr(),
            sums.data_ptr(),
            segments,
            row.cu.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
        if segments not in workspaces:
            function(None, ctypes.byref(size), *arguments)
            workspaces[segments] = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        size.value = workspaces[segments].numel()
        if function(workspaces[segments].data_ptr(), ctypes.byref(size), *arguments):
            raise RuntimeError("cub_segmented_sum failed")
        return sums

    return call


def gpu_microseconds(call: Callable[[Row], object], row: Row, seconds: float) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(row)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(row) for _ in range(CALLS_IN_GRAPH)]
    graph.replay()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / CALLS_IN_GRAPH)
    del kept
    return statistics.median(times)


def cpu_microseconds(call: Callable[[Row], object], row: Row, seconds: float) -> float:
    """Of a call that synchronises this is the whole time."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            call(row)
        times.append((time.perf_counter() - begin) * 1e6 / 20)
    torch.cuda.synchronize()
    return statistics.median(times)


def kernels(call: Callable[[Row], object], row: Row) -> int:
    call(row)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(row)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def attempt(what: str, function: Callable, *arguments):
    """None where this machine or torch cannot do it, so that one contender does not cost the whole table."""
    try:
        return function(*arguments)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"{what}: {error}", file=sys.stderr)
        return None


def measure(name: str, call: Callable[[Row], object], seconds: float, captured: bool = True) -> dict:
    """`seconds` for all rows together."""
    each = seconds / len(DOCUMENTS) / (1 + captured)
    result: dict = {"name": name, "gpu": [], "cpu": [], "kernels": []}
    for documents in DOCUMENTS:
        row = Row(documents)
        result["cpu"].append(attempt(name, cpu_microseconds, call, row, each))
        result["gpu"].append(attempt(name, gpu_microseconds, call, row, each) if captured else None)
        result["kernels"].append(attempt(name, kernels, call, row))
    return result


def forced(path: str, seconds: float) -> dict:
    command = [sys.executable, __file__, "--only", path, "--seconds", str(seconds)]
    done = subprocess.run(
        command, env={**os.environ, "SEGSCATTER_CUDA_PATH": path}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def contenders(seconds: float, folder: Path) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Names, and what measures them in about `seconds`."""

    def here(name: str, make: Callable[[], Callable[[Row], object]], captured: bool = True):
        return name, lambda: measure(name, make(), seconds, captured)

    yield here("segscatter", lambda: segscatter_call)
    for path in ("one_launch", "two_launches", "documents"):
        yield path, functools.partial(forced, path, seconds)
    yield here("segscatter gather", lambda: gather_call)
    yield here("repeat_interleave + index_add_ (waits)", lambda: index_add_call, captured=False)
    yield here("segment_reduce", lambda: segment_reduce_call)
    yield here("cub::DeviceSegmentedReduce", lambda: build_cub(folder))
    yield here("torch.sum", lambda: lambda row: row.values.sum())
    yield here("copy of the values", lambda: lambda row: row.other.copy_(row.values))


def large_row() -> str:
    """Bandwidth of 2^28 tokens in 65536 documents, against a copy."""
    row = Row(65536, 2**28)
    ours = gpu_microseconds(segscatter_call, row, 2)
    copy = gpu_microseconds(lambda r: r.other.copy_(r.values), row, 2)
    return (
        f"T = 2^28, 65536 documents: {ours:.0f} us, {2**28 * 5 / ours / 1e6:.2f} TB/s read; "
        f"copy of the values {copy:.0f} us, {2**28 * 8 / copy / 1e6:.2f} TB/s read and written"
    )


def table(results: list[dict]) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)

    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, segscatter {segscatter.build_info()['version']}",
        "",
        f"T = {NUM_TOKENS} float32, bool mask with 25 % live, {GROUPS} groups; microseconds of a call",
        "",
    ]
    for key, title in (
        ("gpu", "GPU time (graph replay)"),
        ("cpu", "CPU time of an eager call"),
        ("kernels", "Kernels, copies and fills"),
    ):
        lines += [f"| {title} | " + " | ".join(map(str, DOCUMENTS)) + " |", "|---" * (len(DOCUMENTS) + 1) + "|"]
        lines += [f"| {r['name']} | " + " | ".join(map(cell, r[key])) + " |" for r in results]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of measuring, shared among the contenders")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(f"segscatter, {arguments.only}", segscatter_call, arguments.seconds)))
        return
    text = ""
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, contender in contenders(arguments.seconds / 10, Path(folder)):
            result = attempt(name, contender)
            if result is None:
                continue
            results.append(result)
            text = table(results)
            if arguments.out:  # after each, so that running out of time does not cost what has been measured
                arguments.out.write_text(text)
    text += (attempt("large row", large_row) or "T = 2^28: failed") + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
