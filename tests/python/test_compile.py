# SPDX-License-Identifier: Apache-2.0
"""torch.compile, torch.export, opcheck, and no recompilation after the second shape."""

from __future__ import annotations

import pytest
import segscatter
import torch
from problems import case_problem, numbers
from torch._dynamo.testing import CompileCounterWithBackend

CU = torch.tensor([0, 7, 7, 30, 45])
IDS = torch.tensor([1, 0, -1, 1])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def inputs(num_tokens: int, segments: int) -> tuple[torch.Tensor, ...]:
    cuts = torch.randint(0, num_tokens + 1, (segments - 1,)).sort().values
    cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([num_tokens])])
    values = torch.randn(num_tokens, requires_grad=True)
    return values, cu, torch.randint(0, 4, (segments,)), torch.rand(num_tokens) < 0.5


def test_cases_compiled(case: dict) -> None:
    p = case_problem(case)
    compiled = torch.compile(segscatter.segment_scatter_reduce, fullgraph=True, dynamic=True, backend="aot_eager")
    sums, counts = compiled(p.values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs)
    torch.testing.assert_close(sums, numbers(case["sums"]), rtol=0, atol=0, equal_nan=True)
    assert counts.tolist() == case["counts"]


def test_no_recompilation_after_the_second_shape() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(values, cu, ids, mask):
        sums, counts = segscatter.segment_scatter_reduce(values, cu, ids, 4, mask=mask)
        spread = segscatter.segment_gather(sums / counts.clamp(min=1), cu, ids, values.shape[0], mask=mask)
        return (spread * values).sum()

    for step, (num_tokens, segments) in enumerate([(100, 5), (230, 9), (57, 3), (1000, 40), (64, 17)]):
        values, *rest = inputs(num_tokens, segments)
        got = loss(values, *rest)
        (grad,) = torch.autograd.grad(got, values)
        with torch._dynamo.config.patch(disable=True):
            eager = values.detach().requires_grad_()
            sums, counts = segscatter.segment_scatter_reduce(eager, rest[0], rest[1], 4, mask=rest[2])
            spread = segscatter.segment_gather(sums / counts.clamp(min=1), rest[0], rest[1], num_tokens, mask=rest[2])
            want = (spread * eager).sum()
            (want_grad,) = torch.autograd.grad(want, eager)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grad, want_grad)
        if step == 1:
            frames = counter.frame_count
    assert counter.frame_count == frames <= 2


def test_accumulate_compiles_and_mutates() -> None:
    @torch.compile(fullgraph=True)
    def step(sums, counts, values, cu, ids):
        segscatter.segment_scatter_accumulate_(sums, counts, values, cu, ids)
        segscatter.segment_scatter_accumulate_(sums, counts, values, cu, ids)
        return sums * 2

    sums, counts = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    doubled = step(sums, counts, torch.tensor([1.0, 2, 3, 4]), torch.tensor([0, 1, 4]), torch.tensor([1, 0]))
    assert sums.tolist() == [18, 2]
    assert counts.tolist() == [6, 2]
    assert doubled.tolist() == [36, 4]


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductor(mode: str) -> None:
    """The operators between code that Inductor generates, with gradients; the autotuned one in its own mode."""

    def mean_of_channels(hidden, weight, cu, ids, mask):
        losses = torch.nn.functional.softplus(hidden @ weight)
        sums, counts = segscatter.segment_scatter_reduce(losses, cu, ids, 4, mask=mask)
        return (sums / counts.clamp(min=1)).square().sum()

    _, cu, ids, mask = inputs(200, 7)
    hidden, weight = torch.randn(200, 16), torch.randn(16, requires_grad=True)
    want = mean_of_channels(hidden, weight, cu, ids, mask)
    got = torch.compile(mean_of_channels, fullgraph=True, mode=mode)(hidden, weight, cu, ids, mask)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, weight), torch.autograd.grad(want, weight))


def test_export_with_dynamic_sizes(tmp_path) -> None:
    class Losses(torch.nn.Module):
        def forward(self, values, cu, ids, mask):
            return segscatter.segment_scatter_reduce(values, cu, ids, 4, mask=mask)

    values, cu, ids, mask = inputs(100, 5)
    tokens, segments = torch.export.Dim("tokens", min=2), torch.export.Dim("segments", min=2)
    program = torch.export.export(
        Losses(),
        (values.detach(), cu, ids, mask),
        dynamic_shapes=({0: tokens}, {0: segments + 1}, {0: segments}, {0: tokens}),
    )
    torch.export.save(program, tmp_path / "losses.pt2")
    program = torch.export.load(tmp_path / "losses.pt2")
    values, cu, ids, mask = inputs(333, 12)
    got = program.module()(values.detach(), cu, ids, mask)
    want = segscatter.segment_scatter_reduce(values.detach(), cu, ids, 4, mask=mask)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


REDUCE_CALLS = [
    ((torch.randn(50, requires_grad=True), CU, IDS, 3), {}),
    ((torch.randn(50, requires_grad=True), CU.int(), IDS.int(), 3), {"mask": torch.rand(50) < 0.5}),
    ((torch.randn(2, 50, dtype=torch.bfloat16), CU, None, 4), {"dtype": torch.float64}),
    (
        (torch.randn(2, 50, dtype=torch.double, requires_grad=True), CU, IDS, 2),
        {"mask": torch.randint(0, 2, (1, 50)), "cp_layout": "contiguous", "cp_size": 2, "cp_rank": 1},
    ),
    ((torch.randn(0), torch.tensor([0]), torch.zeros(0, dtype=torch.int64), 0), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), REDUCE_CALLS)
def test_opcheck_reduce(args: tuple, kwargs: dict) -> None:
    torch.library.opcheck(torch.ops.segscatter.segment_scatter_reduce.default, args, kwargs)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_accumulate(dtype: torch.dtype, requires_grad: bool) -> None:
    args = (
        torch.zeros(3, dtype=dtype),
        torch.zeros(3, dtype=torch.int64),
        torch.randn(50, requires_grad=requires_grad),
    )
    torch.library.opcheck(
        torch.ops.segscatter.segment_scatter_accumulate_.default, (*args, CU, IDS), {"mask": torch.rand(50) < 0.5}
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_opcheck_gather(dtype: torch.dtype | None) -> None:
    source = torch.randn(2, 3, requires_grad=True)
    torch.library.opcheck(
        torch.ops.segscatter.segment_gather.default,
        (source, CU, IDS, 50),
        {"mask": torch.rand(50) < 0.5, "dtype": dtype},
    )


def test_fake_tensors_check_arguments() -> None:
    with pytest.raises(Exception, match="group_ids has 2 elements for the 4 segments"):
        torch.compile(segscatter.segment_scatter_reduce, fullgraph=True)(torch.randn(50), CU, IDS[:2], 3)
