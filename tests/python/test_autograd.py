# SPDX-License-Identifier: Apache-2.0
"""Derivatives: first and second, backward and forward, with selection instead of multiplication."""

from __future__ import annotations

import random

import oracle
import pytest
import segscatter
import torch
from problems import random_problem
from torch.autograd import forward_ad, gradcheck, gradgradcheck

CU = torch.tensor([1, 7, 7, 30, 45])
IDS = torch.tensor([1, 0, -1, 1])


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CASES = [
    ((50,), IDS, 3, {}),
    ((3, 50), IDS, 2, {"mask": torch.rand(50) < 0.6}),
    ((50,), None, 4, {"mask": torch.randint(-1, 2, (1, 50)), "ignore_index": -1}),
    ((50,), IDS, 2, {"cp": segscatter.ContextParallel("per_sequence", 2, 1)}),
]


@pytest.mark.parametrize(("shape", "ids", "groups", "kwargs"), CASES)
def test_gradcheck_reduce(shape, ids, groups, kwargs) -> None:
    def sums(values):
        return segscatter.segment_scatter_reduce(values, CU, ids, groups, **kwargs)[0]

    values = double(*shape)
    assert gradcheck(sums, (values,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(lambda v: sums(v).square(), (values,))


@pytest.mark.parametrize(("shape", "ids", "groups", "kwargs"), CASES)
def test_gradcheck_gather(shape, ids, groups, kwargs) -> None:
    def spread(source):
        return segscatter.segment_gather(source, CU, ids, shape[-1], **kwargs)

    source = double(*shape[:-1], groups)
    assert gradcheck(spread, (source,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda s: spread(s).square(), (source,))


def test_gradcheck_accumulate() -> None:
    def add(sums, values):
        total, counts = sums.clone(), torch.zeros(3, dtype=torch.int64)
        segscatter.segment_scatter_accumulate_(total, counts, values, CU, IDS)
        return total

    assert gradcheck(add, (double(3), double(50)), check_forward_ad=True)
    assert gradgradcheck(lambda s, v: add(s, v).square(), (double(3), double(50)))


@pytest.mark.parametrize("part", range(4))
def test_gradients_of_random_calls(part: int, seed: int) -> None:
    """The gradient of sum(w * sums) is w gathered: from the oracle, for every dtype."""
    rng = random.Random(seed)
    for _ in range(30):
        p = random_problem(rng, 120)
        values = p.values.clone().requires_grad_()
        sums, counts = segscatter.segment_scatter_reduce(values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs)
        assert not counts.requires_grad
        weight = torch.randn_like(sums)
        (grad,) = torch.autograd.grad(sums, values, weight)
        assert torch.equal(grad, oracle.gather(weight.to(values.dtype), p, values.shape[-1]))


def test_dead_tokens_have_zero_gradient_whatever_they_hold() -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), 4.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    sums, _ = segscatter.segment_scatter_reduce(values, torch.tensor([0, 2, 4]), None, 2, mask=mask)
    sums.sum().backward()
    assert values.grad.tolist() == [1, 0, 0, 1]


def test_gradient_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = torch.randn(50).to(dtype).requires_grad_()
        segscatter.segment_scatter_reduce(values, CU, IDS, 2, dtype=torch.float64)[0].sum().backward()
        assert values.grad.dtype == dtype
        source = torch.randn(2).to(dtype).requires_grad_()
        segscatter.segment_gather(source, CU, IDS, 50, dtype=torch.float32).sum().backward()
        assert source.grad.dtype == dtype


@pytest.mark.parametrize("name", ["cu_seqlens", "group_ids", "mask"])
def test_arguments_changed_before_backward_are_an_error(name: str) -> None:
    arguments = {"cu_seqlens": CU.clone(), "group_ids": IDS.clone(), "mask": torch.ones(50, dtype=torch.int64)}
    values = torch.randn(50, requires_grad=True)
    sums, _ = segscatter.segment_scatter_reduce(values, num_groups=2, **arguments)
    arguments[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums.sum().backward()


def test_accumulate_counts_versions_and_refuses_leaves() -> None:
    sums, counts = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    before = sums._version, counts._version
    segscatter.segment_scatter_accumulate_(sums, counts, torch.ones(50), CU, IDS)
    assert (sums._version, counts._version) == (before[0] + 1, before[1] + 1)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        segscatter.segment_scatter_accumulate_(sums.requires_grad_(), counts, torch.ones(50), CU, IDS)


def test_backward_twice_needs_retain_graph() -> None:
    values = torch.randn(50, requires_grad=True)
    sums, _ = segscatter.segment_scatter_reduce(values, CU, IDS, 2)
    sums.sum().backward(retain_graph=True)
    sums.sum().backward()
    assert values.grad[1] == 2
    with pytest.raises(RuntimeError, match="second time"):
        sums.sum().backward()


def test_torch_func() -> None:
    values = torch.randn(50)

    def loss(v):
        return segscatter.segment_scatter_reduce(v, CU, IDS, 2)[0].square().sum()

    tracked = values.clone().requires_grad_()
    loss(tracked).backward()
    torch.testing.assert_close(torch.func.grad(loss)(values), tracked.grad)
    _, tangent = torch.func.jvp(loss, (values,), (torch.ones(50),))
    torch.testing.assert_close(tangent, tracked.grad.sum())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values, torch.ones(50))
        sums = segscatter.segment_scatter_reduce(dual, CU, IDS, 2)[0]
        assert forward_ad.unpack_dual(sums).tangent.tolist() == [0, 21]


def test_no_graph_without_need() -> None:
    assert not segscatter.segment_scatter_reduce(torch.randn(50), CU, IDS, 2)[0].requires_grad
    with torch.no_grad():
        assert not segscatter.segment_scatter_reduce(torch.randn(50, requires_grad=True), CU, IDS, 2)[0].requires_grad
    with torch.inference_mode():
        segscatter.segment_scatter_accumulate_(
            torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.randn(50), CU, IDS
        )
