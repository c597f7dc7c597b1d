# SPDX-License-Identifier: Apache-2.0
"""Rows made to visit every branch of every kernel: each value dtype and mask width takes each tour.

The tours name what they are for. coverage.py reports the PTX instructions that no test reached.
"""

from __future__ import annotations

import itertools
import random

import pytest
import segscatter
import torch
from oracle import Problem
from support import PATH, accumulate, check_reduce, cuda, gather, gathered, on_device, reduce

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MASKS = [torch.bool, torch.int32, torch.int64]  # 1, 4 and 8 bytes
FORCED_GROUPS = {"one_launch": [8, 60], "two_launches": [8, 60], "documents": [900]}
GROUPS = FORCED_GROUPS.get(PATH, [8])  # few: every lane has entries of its own. More: every warp has.


def kernels(dtypes=DTYPES, masks=MASKS, groups=GROUPS):
    """One test for every kernel of the path."""
    combinations = list(itertools.product(dtypes, masks, groups))
    names = [f"{str(dtype)[6:]}-{str(mask)[6:]}-{n}" for dtype, mask, n in combinations]
    return pytest.mark.parametrize(("dtype", "mask_dtype", "groups"), combinations, ids=names)


def offsets(lengths: list[int], start: int = 0) -> torch.Tensor:
    return torch.tensor([start, *[start + x for x in itertools.accumulate(lengths)]])


def make(dtype, mask_dtype, groups, cu, num_tokens, *, rows=(), dead=(), live=0.6, ignore_index=0, cp=None) -> Problem:
    """Random values, ids (some out of range) and mask; NaN under the mask, and all tokens of the ranges `dead`."""
    ids = torch.randint(-1, groups + 1, (len(cu) - 1,))
    alive = torch.rand(num_tokens) < live
    for begin, end in dead:
        alive[begin:end] = False
    mask = alive if mask_dtype == torch.bool else torch.where(alive, 5, ignore_index).to(mask_dtype)
    values = torch.randn(*rows, num_tokens).to(dtype)
    values[..., ~alive] = float("nan")
    kwargs = {"mask": mask, "ignore_index": ignore_index}
    return Problem(values, cu, ids, groups, {**kwargs, "cp": cp} if cp else kwargs)


def check_all(p: Problem, offset: int = 0, sum_dtype: torch.dtype = torch.float32) -> None:
    """Reduce, accumulate and gather."""
    on = on_device(p, offset)
    sums, counts = reduce(on, dtype=sum_dtype)
    check_reduce(p, sums, counts)
    before = torch.zeros(*p.values.shape[:-1], p.num_groups, dtype=torch.float32)
    total, live = accumulate(before, torch.ones(p.num_groups, dtype=torch.int64), on)
    assert torch.equal(live, counts + 1)
    check_reduce(p, total, counts)
    source = torch.randn(*p.values.shape[:-1], p.num_groups).to(p.values.dtype)
    assert torch.equal(gather(source, on, dtype=p.values.dtype), gathered(source, p))


@kernels()
def test_long_and_short_documents(dtype, mask_dtype, groups, seed: int) -> None:
    """Quiet rows, rows with one start, with many, with starts on lane borders only; runs of empty documents that fill
    several windows; more than 1024 boundaries, so that blocks sample pivots; 32-bit offsets and ids."""
    rng = random.Random(seed)
    short = [rng.randint(0, 5) for _ in range(900)]
    eights = [8] * 64
    lengths = [2900, *short, *[0] * 140, *eights, 1700, 0, 1, 0, 255]
    cu = offsets(lengths, start=3)
    p = make(dtype, mask_dtype, groups, cu.int(), int(cu[-1]) + 70, dead=[(600, 1400)])
    p.group_ids = p.group_ids.int()
    check_all(p)


@kernels()
def test_unaligned_rows_of_a_context_parallel_rank(dtype, mask_dtype, groups, seed: int) -> None:
    """Scalar loads, two windows of the offset map, two value rows, sums in float64, 33 to 1023 boundaries."""
    cp = segscatter.ContextParallel("per_sequence", 2, 1)
    cu = torch.randint(0, 4600, (60,)).sort()[0]
    p = make(
        dtype, mask_dtype, groups, cu, 2302, rows=(2,), ignore_index=0 if mask_dtype == torch.bool else -100, cp=cp
    )
    check_all(p, offset=1, sum_dtype=torch.float64)


@kernels()
def test_counts_alone(dtype, mask_dtype, groups, seed: int) -> None:
    """No value rows: the mask is all that is read. Few boundaries, documents cut between ranks."""
    cp = segscatter.ContextParallel("per_document", 2, 0)
    p = make(dtype, mask_dtype, groups, torch.tensor([0, 400, 400, 1200, 2000]), 1004, rows=(0,), cp=cp)
    on = on_device(p)
    check_reduce(p, *reduce(on))


@kernels(masks=[torch.bool])
def test_no_mask(dtype, mask_dtype, groups, seed: int) -> None:
    """All tokens live, in the kernels of 1-byte masks; offsets that are not sorted come after sorted ones."""
    cu = torch.cat([torch.tensor([0]), torch.randint(0, 1500, (200,)).sort()[0], torch.tensor([1500])])
    values = torch.randn(1500).to(dtype)
    p = Problem(values, cu, torch.randint(-1, groups, (201,)), groups)
    check_all(p)
    unsorted = torch.cat([cu, torch.tensor([7, 3])])
    on = Problem(cuda(values), cuda(unsorted), torch.randint(0, groups, (203,)).cuda(), groups)
    first, second = reduce(on), reduce(on)
    assert torch.equal(first[1], second[1])
    assert int(first[1].sum()) <= 1500


@pytest.mark.skipif(PATH not in ("two_launches", "documents"), reason="one launch has several steps in shorter rows")
@kernels(groups=GROUPS if PATH in ("two_launches", "documents") else GROUPS[:1])
def test_several_steps_in_two_launches(dtype, mask_dtype, groups, seed: int) -> None:
    """Past 2^19 tokens a warp of these paths takes several steps, and the second kernel a wide block."""
    num_tokens = 2**19 + 700
    cu = torch.tensor([0, 3, 200000, 200001, 430000, num_tokens])
    p = make(dtype, mask_dtype, groups, cu, num_tokens)
    p.group_ids = torch.tensor([1, 0, 1, groups - 1, 3])
    on = on_device(p)
    check_reduce(p, *reduce(on, dtype=torch.float64))
    if PATH == "documents":  # gather needs no second run for the other path
        source = torch.randn(groups).to(dtype)
        assert torch.equal(gather(source, on), gathered(source, p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_per_document(dtype: torch.dtype, seed: int) -> None:
    """group_ids=None: documents of one token and of thousands, some of them longer than 32 warps' runs of tokens."""
    lengths = [300, 1, 0, 2000, 5] if PATH in ("one_launch", "two_launches") else [*([1] * 200), 17500, 0, 3, 40, 600]
    cu = offsets(lengths)
    num_tokens = int(cu[-1]) + 9
    mask = torch.rand(num_tokens) < 0.5
    p = Problem(torch.randn(2, num_tokens).to(dtype), cu, None, len(lengths), {"mask": mask})
    check_all(p, sum_dtype=torch.float64)


@pytest.mark.skipif(PATH != "", reason="gather has one path")
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_gather_converts(source_dtype: torch.dtype, out_dtype: torch.dtype, seed: int) -> None:
    source = torch.tensor([1.5, -3.14159, float("inf"), float("nan"), 1e-30, -70000.0, 2.0**-14 * 1.0001]).to(
        source_dtype
    )
    cu, num_tokens = torch.tensor([0, 2, 3, 4, 5, 6, 7, 8]), 9
    p = Problem(torch.zeros(num_tokens), cu, None, 7)
    got = gather(source, on_device(p), dtype=out_dtype)
    torch.testing.assert_close(got, gathered(source.to(out_dtype), p), rtol=0, atol=0, equal_nan=True)
