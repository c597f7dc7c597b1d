# SPDX-License-Identifier: Apache-2.0
"""Derivatives on the device: first and second, from weights that the tests choose (torch's own kernels stay out)."""

from __future__ import annotations

import random

import oracle
import pytest
import segscatter
import torch
from problems import random_problem
from support import gather, native_mask, on_device, reduce


@pytest.mark.parametrize("part", range(2))
def test_gradients_of_random_calls(part: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        p = native_mask(random_problem(rng, 120))
        on = on_device(p)
        values = on.values.requires_grad_()
        sums, counts = segscatter.segment_scatter_reduce(values, on.cu_seqlens, on.group_ids, p.num_groups, **on.kwargs)
        assert not counts.requires_grad
        weight = torch.randn(sums.shape, dtype=sums.dtype)
        (grad,) = torch.autograd.grad(sums, values, weight.cuda())
        assert grad.dtype == p.values.dtype
        assert torch.equal(grad.cpu(), oracle.gather(weight.to(p.values.dtype), p, p.values.shape[-1]))


def test_second_derivative(seed: int) -> None:
    """The gradient of gather is reduce, and the gradient of that gradient gather again."""
    p = native_mask(random_problem(random.Random(seed), 120))
    p.values = p.values.double()
    on = on_device(p)
    num_tokens = p.values.shape[-1]
    source = torch.randn(*p.values.shape[:-1], p.num_groups, dtype=torch.float64).cuda().requires_grad_()
    out = segscatter.segment_gather(source, on.cu_seqlens, on.group_ids, num_tokens, **on.kwargs)
    weight = on.values.requires_grad_()
    (grad,) = torch.autograd.grad(out, source, weight, create_graph=True)
    assert torch.equal(grad.detach().cpu(), reduce(on)[0].detach())
    direction = torch.randn(grad.shape, dtype=torch.float64)
    (again,) = torch.autograd.grad(grad, weight, direction.cuda())
    assert torch.equal(again.cpu(), gather(direction, on))


def test_dead_tokens_have_zero_gradient_whatever_they_hold() -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), 4.0]).cuda().requires_grad_()
    mask = torch.tensor([True, False, False, True]).cuda()
    sums, _ = segscatter.segment_scatter_reduce(values, torch.tensor([0, 2, 4]).cuda(), None, 2, mask=mask)
    sums.backward(torch.ones(2).cuda())
    assert values.grad.cpu().tolist() == [1, 0, 0, 1]


def test_a_mask_changed_before_backward_is_an_error() -> None:
    mask = torch.ones(50, dtype=torch.int64).cuda()
    values = torch.randn(50).cuda().requires_grad_()
    cu, ids = torch.tensor([0, 20, 50]).cuda(), torch.tensor([1, 0]).cuda()
    sums, _ = segscatter.segment_scatter_reduce(values, cu, ids, 2, mask=mask)
    mask.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sums, values, torch.ones(2).cuda())
