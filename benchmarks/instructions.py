# SPDX-License-Identifier: Apache-2.0
"""Executed warp instructions of the reduction, counted by cudasim: the kernels' speed until a GPU says more.

    cudasim --cc 9.0 python -m benchmarks.instructions > benchmarks/results/instructions.md

T = 131072 float32 values, bool mask with 25 % live, 8 groups, random document lengths and ids (int32). Each path is
forced by SEGSCATTER_CUDA_PATH, and so counted in a process of its own. The time to issue them is instructions /
(multiprocessors used x 4 per cycle).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys

import segscatter
import torch

NUM_TOKENS, GROUPS = 131072, 8
DOCUMENTS = (1, 128, 1024, 4096, 16384, 131072)
PATHS = {"one_launch:8": "one launch, cluster of 8", "two_launches": "two launches", "documents": "sums of documents"}
BUDGET = {"one_launch:8": (80, 110, 170, 210, 250, 480), "two_launches": (150, 190, 325, 365, 415, 680)}  # thousands


def count(documents: int) -> list[int]:
    """Instructions of each launch of one call."""
    import cudasim

    rng = random.Random(documents)
    generator = torch.Generator().manual_seed(documents)
    cu = [0, *sorted(rng.randrange(NUM_TOKENS + 1) for _ in range(documents - 1)), NUM_TOKENS]
    values = torch.randn(NUM_TOKENS, generator=generator).cuda()
    mask = (torch.rand(NUM_TOKENS, generator=generator) < 0.25).cuda()
    ids = torch.randint(0, GROUPS, (documents,), generator=generator, dtype=torch.int32).cuda()
    cudasim.reset()
    segscatter.segment_scatter_reduce(values, torch.tensor(cu, dtype=torch.int32).cuda(), ids, GROUPS, mask=mask)
    cudasim.check()
    return [stat.total_warp_instrs for stat in cudasim.stats()]


def count_path(path: str) -> list[list[int]]:
    command = [sys.executable, "-m", "benchmarks.instructions", "--only", path]
    env = {**os.environ, "SEGSCATTER_CUDA_PATH": path}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, list[list[int]]]) -> str:
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    lines = [
        "# Executed warp instructions, in thousands",
        "",
        f"PTX executed by cudasim at compute capability {capability}, nvcc {segscatter.build_info()['cuda']}: "
        "`python -m benchmarks.instructions`.",
        f"T = {NUM_TOKENS} float32, bool mask with 25 % live, {GROUPS} groups, random lengths and ids. "
        "In brackets: the budget.",
        "",
        "| documents | " + " | ".join(f"{n}" for n in DOCUMENTS) + " |",
        "|---" * (len(DOCUMENTS) + 1) + "|",
    ]
    for path, rows in results.items():
        cells = []
        for i, launches in enumerate(rows):
            cell = f"{sum(launches) / 1000:.1f}"
            if len(launches) > 1:
                cell += f" = {' + '.join(f'{n / 1000:.1f}' for n in launches)}"
            cells.append(cell + (f" ({BUDGET[path][i]})" if path in BUDGET else ""))
        lines.append(f"| {PATHS[path]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PATHS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps([count(documents) for documents in DOCUMENTS]))
        return
    print(table({path: count_path(path) for path in PATHS}))


if __name__ == "__main__":
    main()
