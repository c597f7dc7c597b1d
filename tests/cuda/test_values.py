# SPDX-License-Identifier: Apache-2.0
"""Right values: the project's table, random calls against the token-by-token oracle, special values, garbage."""

from __future__ import annotations

import random

import oracle
import pytest
import segscatter
import torch
from oracle import Problem
from problems import VALUE_DTYPES, case_problem, numbers, random_problem
from support import PATH, accumulate, gather, native_mask, on_device, reduce

NAN, INF = float("nan"), float("inf")


def test_cases(case: dict) -> None:
    """Every value dtype, and both index dtypes in turn."""
    for i, dtype in enumerate(VALUE_DTYPES):
        index = (torch.int32, torch.int64)[i % 2]
        p = case_problem(case)
        p.values, p.cu_seqlens = p.values.to(dtype), p.cu_seqlens.to(index)
        p.group_ids = p.group_ids if p.group_ids is None else p.group_ids.to((torch.int64, torch.int32)[i // 2])
        sums, counts = reduce(on_device(p))
        assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(sums, numbers(case["sums"]).to(sums.dtype), rtol=0, atol=0, equal_nan=True)
        assert counts.tolist() == case["counts"]


@pytest.mark.parametrize("part", range(4))
def test_random_calls(part: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        p = native_mask(random_problem(rng))
        on = on_device(p, rng.choice([0, 0, 1]))
        dtype = rng.choice([None, torch.float32, torch.float64])
        sums, counts = reduce(on, dtype=dtype)
        oracle.check_reduce(p, sums, counts)

        source = torch.randn(*p.values.shape[:-1], p.num_groups, dtype=p.values.dtype)
        assert torch.equal(gather(source, on), oracle.gather(source, p, p.values.shape[-1]))

        before = torch.randn(*p.values.shape[:-1], p.num_groups, dtype=dtype or torch.float32)
        total, live = accumulate(before, torch.arange(p.num_groups), on)
        exact = sums if sums.dtype == torch.float64 else reduce(on, dtype=torch.float64)[0]
        torch.testing.assert_close(total, (before.double() + exact).to(before.dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(live, torch.arange(p.num_groups) + counts)


def test_same_bits_every_time(seed: int) -> None:
    p = on_device(native_mask(random_problem(random.Random(seed), 3000)))
    first = reduce(p, dtype=torch.float64)
    for _ in range(3):
        again = reduce(p, dtype=torch.float64)
        assert torch.equal(first[0].view(torch.int64), again[0].view(torch.int64))
        assert torch.equal(first[1], again[1])


def test_special_values() -> None:
    values = torch.tensor([INF, 1, INF, -INF, NAN, 1, -0.0, -0.0])
    p = on_device(Problem(values, torch.tensor([0, 2, 4, 6, 8]), torch.tensor([0, 1, 2, 3]), 4))
    sums, counts = reduce(p)
    assert sums[0] == INF
    assert sums[1:3].isnan().all()
    assert sums[3] == 0
    assert counts.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("segments", [0, 2])
def test_nothing_to_add(segments: int, num_tokens: int) -> None:
    """No groups, rows, segments or tokens: zeros in the right shape, and accumulation adds nothing."""
    cu, ids = torch.zeros(segments + 1, dtype=torch.int64), torch.zeros(segments, dtype=torch.int32)
    for groups, shape in ((0, (num_tokens,)), (5, (0, num_tokens)), (1, (num_tokens,)), (5, (2, num_tokens))):
        p = on_device(Problem(torch.full(shape, NAN), cu, ids, groups))
        sums, counts = reduce(p)
        assert torch.equal(sums, torch.zeros(*shape[:-1], groups))
        assert torch.equal(counts, torch.zeros(groups, dtype=torch.int64))
        ones = torch.ones(*shape[:-1], groups)
        assert torch.equal(gather(ones, p), torch.zeros(shape))
        assert torch.equal(accumulate(ones, counts, p)[0], ones)


@pytest.mark.parametrize("part", range(3))
def test_garbage_is_survived(part: int, seed: int) -> None:
    """Unsorted offsets of any size and wild ids: some result, twice the same, made of nothing but what is there."""
    rng = random.Random(seed)
    extremes = [-(2**63), 2**63 - 1, -1, 2**40, 5, 100]
    num_tokens, segments, groups = rng.randrange(4000), rng.choice([5, 50, 1500]), rng.choice([1, 8, 40])
    cu = torch.tensor([rng.choice([*extremes, rng.randrange(4000)]) for _ in range(segments + 1)])
    ids = torch.tensor([rng.choice([*extremes, 0, groups - 1]) for _ in range(segments)], dtype=torch.int64)
    cp = [None, segscatter.ContextParallel("contiguous", 4, 3), segscatter.ContextParallel("per_document", 2, 1)][part]
    cases = [(ids, groups)] if PATH in ("one_launch", "two_launches") else [(ids, groups), (None, segments)]
    for group_ids, count in cases:
        p = on_device(Problem(torch.ones(num_tokens), cu, group_ids, count, {"cp": cp} if cp else {}))
        once, twice = reduce(p), reduce(p)
        assert torch.equal(once[0], twice[0])
        assert torch.equal(once[1], twice[1])
        assert once[0].isfinite().all()
        assert int(once[1].sum()) <= num_tokens
        out = gather(torch.ones(count), p)
        assert ((out == 0) | (out == 1)).all()


def test_offsets_at_the_ends_of_their_type() -> None:
    """Sorted offsets are clamped to the row, however far off they are."""
    for low, high, dtype in ((-(2**63), 2**63 - 1, torch.int64), (-(2**31), 2**31 - 1, torch.int32)):
        cu = torch.tensor([low, 100, 1500, 2900, high], dtype=dtype)
        p = Problem(torch.randn(3000), cu, torch.tensor([0, 1, 0, 2]), 3)
        oracle.check_reduce(p, *reduce(on_device(p)))
        assert torch.equal(gather(torch.ones(3), on_device(p)), torch.ones(3000))


@pytest.mark.parametrize("layout", ["per_document", "per_sequence", "contiguous"])
def test_context_parallel_ranks_add_up(layout: str, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 4])
    lengths = [rng.randrange(30) * 2 * size for _ in range(rng.randint(1, 9))]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total = int(cu[-1])
    ids = torch.randint(-1, 4, (len(lengths),))
    values, mask = torch.randn(total, dtype=torch.float64), torch.rand(total) < 0.7
    whole = reduce(on_device(Problem(values, cu, ids, 4, {"mask": mask})))
    sums, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    for rank in range(size):
        held = oracle.held_tokens(cu.tolist(), total // size, layout, size, rank)
        cp = segscatter.ContextParallel(layout, size, rank)
        p = on_device(Problem(values[held], cu, ids, 4, {"mask": mask[held], "cp": cp}))
        sums, counts = accumulate(sums, counts, p)
    torch.testing.assert_close(sums, whole[0], rtol=0, atol=1e-12)
    assert torch.equal(counts, whole[1])
