# SPDX-License-Identifier: Apache-2.0
"""A small set of calls for compute-sanitizer, which makes kernels 100 times slower: `sanitize.py [SEED [TOKENS...]]`.

Every kernel family, aligned and unaligned rows, short documents, empty ones, garbage. Results are checked too. Memory
comes straight from the driver, so that the tool sees the bounds of every tensor.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "python"), str(TESTS / "cuda")]

import torch  # noqa: E402
from oracle import Problem  # noqa: E402
from support import check_reduce, gather, gathered, on_device, reduce  # noqa: E402

MASKS = {
    torch.float32: torch.bool,
    torch.bfloat16: torch.int64,
    torch.float16: torch.int32,
    torch.float64: torch.float32,
}


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    rng = random.Random(seed)
    torch.manual_seed(seed)
    calls = 0
    for num_tokens in map(int, sys.argv[2:] or (1500, 9000, 70000)):
        for dtype, mask_dtype in MASKS.items():
            for groups in (8, 60, 2000):
                lengths = [rng.choice([0, 1, 3, 8, 700]) for _ in range(1200)]
                cu = torch.tensor([0, *lengths]).cumsum(0)
                p = Problem(
                    torch.randn(2, num_tokens).to(dtype), cu, torch.randint(-1, groups, (1200,)), groups,
                    {"mask": (torch.rand(num_tokens) < 0.5).to(mask_dtype)},
                )  # fmt: skip
                on = on_device(p, rng.choice([0, 1]))
                check_reduce(p, *reduce(on))
                source = torch.randn(2, groups).to(dtype)
                assert torch.equal(gather(source, on), gathered(source, p))
                on.cu_seqlens = torch.randint(-(2**62), 2**62, (1201,)).cuda()
                reduce(on)
                gather(source, on)
                calls += 4
    cu = torch.arange(0, 9001, 3)
    p = Problem(torch.randn(9000), cu, None, 3000)
    check_reduce(p, *reduce(on_device(p)))
    print(f"{calls + 1} calls are right")


if __name__ == "__main__":
    main()
