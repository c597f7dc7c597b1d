# SPDX-License-Identifier: Apache-2.0
"""What a call costs, from the simulator's log: launches, allocations, and no copies, fills or synchronisation."""

from __future__ import annotations

import json
import os

import pytest
import segscatter
import torch
from oracle import Problem
from simulation import Record, cudasim, kernel_name
from support import PATH, on_device, run

pytestmark = pytest.mark.simulated

KERNELS = {
    "one_launch": [["reduce_cluster"]],
    "two_launches": [["reduce_partials", "combine_partials"]],
    "documents": [["reduce_documents", "combine_documents_by_group"], ["reduce_documents", "combine_documents"]],
}
KERNELS[""] = [kernels for path in KERNELS.values() for kernels in path]


@pytest.fixture(autouse=True)
def _warm() -> None:
    """The first call of a process describes the device."""
    p = on_device(Problem(torch.ones(4), torch.tensor([0, 4]), torch.tensor([0]), 1))
    segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, 1)


def problem(num_tokens: int = 1000, groups: int = 8, rows: int | None = None, ids: bool = True) -> Problem:
    cu = torch.arange(0, num_tokens + 1, max(num_tokens // 40, 1))
    shape = (num_tokens,) if rows is None else (rows, num_tokens)
    segments = len(cu) - 1
    group_ids = torch.randint(0, groups, (segments,)) if ids else None
    mask = torch.rand(num_tokens) < 0.5
    return on_device(Problem(torch.randn(shape), cu, group_ids, groups if ids else segments, {"mask": mask}))


def assert_few_allocations(record: Record, outputs: int) -> None:
    """The outputs, and at most one workspace. The caching allocator counts in blocks, so this looks without it only."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        assert outputs <= len(record.allocated) <= outputs + 1, record.allocated


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("num_tokens", [1000, 20000])
def test_reduce(num_tokens: int, ids: bool, rows: int | None) -> None:
    p = problem(num_tokens, rows=rows, ids=ids)
    with Record() as record:
        segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs)
    assert record.kernels in KERNELS[PATH]
    record.check_nothing_but_kernels()
    assert_few_allocations(record, outputs=2)


def test_deterministic_mode_adds_nothing() -> None:
    """There torch fills what at::empty gives out, in a kernel of its own."""
    p = problem(20000)
    torch.use_deterministic_algorithms(True)
    try:
        with Record() as reduction:
            segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs)
        with Record() as adjoint:
            segscatter.segment_gather(p.values[:8], p.cu_seqlens, p.group_ids, 20000, **p.kwargs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert reduction.kernels in KERNELS[PATH]
    assert adjoint.kernels == ["gather"]
    reduction.check_nothing_but_kernels()
    adjoint.check_nothing_but_kernels()


@pytest.mark.skipif(PATH != "", reason="a forced path says nothing about what the plan chooses")
def test_few_tokens_take_one_launch() -> None:
    p = problem(1000)
    with Record() as record:
        segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, 8, **p.kwargs)
    assert record.kernels == ["reduce_cluster"]
    assert len(record.allocated) <= 2 or "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def test_accumulate_has_no_launch_of_its_own() -> None:
    p = problem()
    sums, counts = torch.zeros(8).cuda(), torch.zeros(8, dtype=torch.int64).cuda()
    with Record() as record:
        segscatter.segment_scatter_accumulate_(sums, counts, p.values, p.cu_seqlens, p.group_ids, **p.kwargs)
    assert record.kernels in KERNELS[PATH]
    record.check_nothing_but_kernels()
    assert_few_allocations(record, outputs=0)


def test_gather_is_one_launch() -> None:
    p = problem()
    source = torch.randn(8).cuda()
    with Record() as record:
        segscatter.segment_gather(source, p.cu_seqlens, p.group_ids, 1000, **p.kwargs)
    assert record.kernels == ["gather"]
    record.check_nothing_but_kernels()
    assert len(record.allocated) <= 1


def test_backward_is_one_launch() -> None:
    p = problem()
    values = p.values.requires_grad_()
    sums, _ = segscatter.segment_scatter_reduce(values, p.cu_seqlens, p.group_ids, 8, **p.kwargs)
    weight = torch.randn(8).cuda()
    with Record() as record:
        torch.autograd.grad(sums, values, weight)
    assert record.kernels == ["gather"]
    record.check_nothing_but_kernels()


def test_nothing_to_write_is_no_launch() -> None:
    empty = on_device(Problem(torch.ones(4), torch.tensor([0, 4]), torch.tensor([0]), 0))
    with Record() as record:
        segscatter.segment_scatter_reduce(empty.values, empty.cu_seqlens, empty.group_ids, 0)
        segscatter.segment_gather(torch.empty(1).cuda(), empty.cu_seqlens, empty.group_ids, 0)
    assert record.kernels == []


@pytest.mark.skipif(PATH == "one_launch", reason="one launch has no second one that could depend on it")
def test_second_launch_is_a_dependent_one() -> None:
    """Programmatic dependent launch from compute capability 9.0 on, and only for the second kernel."""
    p = problem(200000, ids=PATH != "documents")
    with Record() as record:
        segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs)
    assert len(record.launches) == 2
    has_it = torch.cuda.get_device_capability() >= (9, 0)
    dependent = [
        any("programmatic" in attribute.lower() for attribute in launch["attrs"]) for launch in record.launches
    ]
    assert dependent == [False, has_it], record.launches


def test_tracker_update_is_one_operator() -> None:
    registry = segscatter.ChannelRegistry(["code", "math", "web"])
    tracker = segscatter.ChannelLossTracker(registry, device="cuda")
    cu, ids = torch.tensor([0, 100, 400, 1000]).cuda(), registry.encode(["math", "web", "code"]).cuda()
    losses, mask = torch.randn(1000).cuda(), (torch.rand(1000) < 0.5).cuda()
    tracker.update(losses, mask, ids, cu_seqlens=cu, mode="train")
    with Record() as record:
        tracker.update(losses, mask, ids, cu_seqlens=cu, mode="train")
    assert record.kernels in KERNELS[PATH]
    record.check_nothing_but_kernels()
    assert_few_allocations(record, outputs=0)


def test_tracker_update_copies_host_ids_without_blocking() -> None:
    registry = segscatter.ChannelRegistry(["code", "math", "web"])
    tracker = segscatter.ChannelLossTracker(registry, device="cuda")
    losses = torch.randn(1000).cuda()
    cu, ids = torch.tensor([0, 100, 400, 1000]), registry.encode(["math", "web", "code"])
    tracker.update(losses, None, ids, cu_seqlens=cu, mode="train")
    with Record() as record:
        tracker.update(losses, None, ids, cu_seqlens=cu, mode="train")
    assert record.kernels in KERNELS[PATH]
    assert len(record.copies) == 2
    assert all(copy["async"] and copy["pinned"] for copy in record.copies), record.copies
    assert not record.syncs


MEAN = """
import cudasim, json, torch, segscatter
cudasim.emulate("elementwise_kernel", lambda match: ([4], lambda arguments: None))  # counted, not computed
values, cu = torch.randn(1000).cuda(), torch.tensor([0, 400, 400, 1000]).cuda()
mask = (torch.rand(1000) < 0.5).cuda()
segscatter.segment_mean(values, cu, mask=mask)
cudasim.reset()
segscatter.segment_mean(values, cu, mask=mask)
others = [entry for op in ("memcpy", "memset", "sync") for entry in cudasim.log(op)]
print(json.dumps([[launch["name"] for launch in cudasim.log("launch")], others]))
"""


def test_segment_mean_is_one_operator_a_clamp_and_a_division() -> None:
    names, others = json.loads(run(MEAN))
    ours = [kernel_name(name) for name in names if "segscatter" in name]
    assert ours in KERNELS[PATH]
    assert len(names) == len(ours) + 2, names
    assert not others


def test_a_stream_of_ones_own_is_used() -> None:
    p = problem()
    streams = [torch.cuda.Stream() for _ in range(2)]
    used = []
    for stream in streams:
        with torch.cuda.stream(stream), Record() as record:
            sums, _ = segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, 8, **p.kwargs)
            sums.requires_grad_()
            segscatter.segment_gather(sums, p.cu_seqlens, p.group_ids, 1000, **p.kwargs)
        assert len(record.streams) == 1
        used.append(record.streams.pop())
    with Record() as record:
        segscatter.segment_scatter_reduce(p.values, p.cu_seqlens, p.group_ids, 8, **p.kwargs)
    assert len({*used, *record.streams}) == 3
    assert cudasim.fault() is None
