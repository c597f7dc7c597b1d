# SPDX-License-Identifier: Apache-2.0
"""Capture into a CUDA graph, and replay with other data. Under the simulator this needs its --caching mode."""

from __future__ import annotations

import pytest
import segscatter
import torch
from conftest import CACHING
from oracle import Problem
from simulation import Record, cudasim
from support import PATH, check_reduce, gathered, on_device

pytestmark = pytest.mark.skipif(not CACHING, reason="capture needs a caching allocator: cudasim --caching")

NUM_TOKENS, SEGMENTS, GROUPS = 3000, 60, 8


def new_data(dtype: torch.dtype, rows: tuple[int, ...] = ()) -> Problem:
    cu = torch.cat(
        [torch.tensor([0]), torch.randint(0, NUM_TOKENS, (SEGMENTS - 1,)).sort()[0], torch.tensor([NUM_TOKENS])]
    )
    mask = torch.rand(NUM_TOKENS) < 0.5
    values = torch.randn(*rows, NUM_TOKENS).to(dtype)
    values[..., ~mask] = float("nan")
    return Problem(values, cu, torch.randint(-1, GROUPS, (SEGMENTS,)), GROUPS, {"mask": mask})


def copy_into(held: Problem, p: Problem) -> None:
    held.values.copy_(p.values)
    held.cu_seqlens.copy_(p.cu_seqlens)
    held.group_ids.copy_(p.group_ids)
    held.kwargs["mask"].copy_(p.kwargs["mask"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_with_new_data(dtype: torch.dtype, seed: int) -> None:
    """Reduce, accumulate and gather in one graph; every replay sees what the tensors hold by then."""
    held = on_device(new_data(dtype, (2,)))
    total, live = torch.zeros(2, GROUPS, dtype=torch.float64).cuda(), torch.zeros(GROUPS, dtype=torch.int64).cuda()

    def step() -> tuple[torch.Tensor, ...]:
        arguments = (held.values, held.cu_seqlens, held.group_ids)
        sums, counts = segscatter.segment_scatter_reduce(*arguments, GROUPS, dtype=torch.float64, **held.kwargs)
        segscatter.segment_scatter_accumulate_(total, live, *arguments, **held.kwargs)
        out = segscatter.segment_gather(sums, *arguments[1:], NUM_TOKENS, **held.kwargs)
        return sums, counts, out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums, counts, out = step()
    total.zero_()
    live.zero_()

    expected_total, expected_live = torch.zeros(2, GROUPS, dtype=torch.float64), torch.zeros(GROUPS, dtype=torch.int64)
    for _ in range(3):
        p = new_data(dtype, (2,))
        copy_into(held, p)
        if cudasim:
            with Record() as record:
                graph.replay()
            assert len(record.launches) == {"one_launch": 3}.get(PATH, 5) or (PATH == "" and len(record.launches) <= 5)
            record.check_nothing_but_kernels()
        else:
            graph.replay()
        check_reduce(p, sums.cpu(), counts.cpu())
        assert torch.equal(out.cpu(), gathered(sums.cpu(), p))
        expected_total += sums.cpu()
        expected_live += counts.cpu()
        eager = segscatter.segment_scatter_reduce(
            held.values, held.cu_seqlens, held.group_ids, GROUPS, dtype=torch.float64, **held.kwargs
        )
        assert torch.equal(eager[0].cpu(), sums.cpu())  # the same bits
    torch.testing.assert_close(total.cpu(), expected_total, rtol=1e-12, atol=1e-12)
    assert torch.equal(live.cpu(), expected_live)


def test_backward_in_a_graph(seed: int) -> None:
    held = on_device(new_data(torch.float32))
    values, weight = held.values.requires_grad_(), torch.randn(GROUPS)
    on_weight = weight.cuda()

    def step() -> torch.Tensor:
        sums, _ = segscatter.segment_scatter_reduce(values, held.cu_seqlens, held.group_ids, GROUPS, **held.kwargs)
        return torch.autograd.grad(sums, values, on_weight)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = step()
    p = new_data(torch.float32)
    with torch.no_grad():
        copy_into(held, p)
    graph.replay()
    assert torch.equal(grad.cpu(), gathered(weight, p))
