# SPDX-License-Identifier: Apache-2.0
"""The operators on real hardware, against float64 index_add_ and torch's own indexing."""

from __future__ import annotations

import gc
import random

import oracle
import pytest
import segscatter
import torch
from oracle import Problem
from problems import MASK_DTYPES, random_problem
from support import reduce
from torch.cuda import _sleep

DEVICE = "cuda"


def token_groups(cu: torch.Tensor, ids: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Group of every token, -1 outside the segments; all on the device of ``cu``."""
    segment = torch.searchsorted(cu, torch.arange(num_tokens, device=cu.device, dtype=cu.dtype), right=True) - 1
    inside = (segment >= 0) & (segment < len(cu) - 1)
    segment = segment.clamp(0, len(cu) - 2)
    return torch.where(inside, segment if ids is None else ids.long()[segment], -1)


def index_add(values, groups, num_groups, live) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums in float64, sums of magnitudes, counts."""
    keep = live & (groups >= 0) & (groups < num_groups)
    sums = torch.zeros(*values.shape[:-1], num_groups, dtype=torch.float64, device=values.device)
    kept = values[..., keep].double()
    return (
        sums.index_add(-1, groups[keep], kept),
        sums.index_add(-1, groups[keep], kept.abs()),
        torch.bincount(groups[keep], minlength=num_groups),
    )


def check(values, cu, ids, num_groups, mask=None, ignore_index=0) -> None:
    sums, counts = segscatter.segment_scatter_reduce(
        values, cu, ids, num_groups, mask=mask, ignore_index=ignore_index, dtype=torch.float64
    )
    num_tokens = values.shape[-1]
    live = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE) if mask is None else mask.reshape(-1) != ignore_index
    groups = token_groups(cu, ids, num_tokens)
    want, scale, want_counts = index_add(values, groups, num_groups, live)
    assert torch.equal(counts, want_counts)
    assert ((sums - want).abs() <= 1e-12 * scale).all()

    source = torch.randn(*values.shape[:-1], num_groups, device=DEVICE)
    out = segscatter.segment_gather(source, cu, ids, num_tokens, mask=mask, ignore_index=ignore_index)
    known = live & (groups >= 0) & (groups < num_groups)
    want_out = torch.where(known, source[..., groups.clamp(0, num_groups - 1)], 0.0)
    assert torch.equal(out, want_out)


def documents(rng: random.Random, num_tokens: int, count: int) -> torch.Tensor:
    cu = [0, *sorted(rng.randrange(num_tokens + 1) for _ in range(count - 1)), num_tokens]
    return torch.tensor(cu, device=DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 255, 2048, 4097, 16384, 50000, 131072, 400001, 2**20 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_random_rows(num_tokens: int, dtype: torch.dtype, seed: int) -> None:
    """Every size class of the plan, few and many documents, groups for each path, identity."""
    rng = random.Random(seed)
    for count in (1, 37, 1024, 20000):
        cu = documents(rng, num_tokens, count).to(rng.choice([torch.int32, torch.int64]))
        for groups in (8, 60, 3000, None):
            ids = None if groups is None else torch.randint(-1, groups + 1, (count,), device=DEVICE)
            values = torch.randn((*rng.choice([(), (3,)]), num_tokens), device=DEVICE).to(dtype)
            mask = torch.rand(num_tokens, device=DEVICE) < rng.choice([0.0, 0.25, 1.0])
            values[..., ~mask] = float("nan")
            check(values, cu, ids, groups or count, mask)


@pytest.mark.parametrize("mask_dtype", MASK_DTYPES, ids=str)
def test_every_mask_dtype(mask_dtype: torch.dtype, seed: int) -> None:
    """Also those that are converted first, which takes a kernel of torch."""
    cu = documents(random.Random(seed), 20000, 100)
    ids = torch.randint(0, 8, (100,), device=DEVICE)
    for ignore_index in (0, 7, -100):
        if (mask_dtype == torch.bool and ignore_index) or (mask_dtype == torch.uint8 and ignore_index < 0):
            continue
        live = torch.rand(20000, device=DEVICE) < 0.5
        mask = live if mask_dtype == torch.bool else torch.where(live, 1, ignore_index).to(mask_dtype)
        check(torch.randn(20000, device=DEVICE), cu, ids, 8, mask, ignore_index)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers on the device, two elements apart."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=DEVICE)
    wide[..., 1] = tensor
    return wide[..., 1]


def test_any_strides(seed: int) -> None:
    """Random calls against the token-by-token oracle, with every tensor in another memory layout."""
    rng = random.Random(seed)
    for _ in range(60):
        p = random_problem(rng, 300)
        ids = None if p.group_ids is None else spread(p.group_ids)
        kwargs = {name: spread(x) if isinstance(x, torch.Tensor) else x for name, x in p.kwargs.items()}
        values = (
            p.values.cuda().t().contiguous().t() if p.values.dim() == 2 and rng.random() < 0.5 else spread(p.values)
        )
        oracle.check_reduce(p, *reduce(Problem(values, spread(p.cu_seqlens), ids, p.num_groups, kwargs)))


def test_no_synchronisation(seed: int) -> None:
    """torch's own watch: any call that waits for the device is an error."""
    rng = random.Random(seed)
    cu, ids = documents(rng, 50000, 300), torch.randint(0, 8, (300,), device=DEVICE)
    values = torch.randn(50000, device=DEVICE, requires_grad=True)
    mask = torch.rand(50000, device=DEVICE) < 0.5
    weight = torch.randn(8, device=DEVICE)
    registry = segscatter.ChannelRegistry(["code", "math"])
    tracker = segscatter.ChannelLossTracker(registry, device=DEVICE)
    names = ["code", "math"] * 150

    def step() -> None:
        sums, _ = segscatter.segment_scatter_reduce(values, cu, ids, 8, mask=mask)
        torch.autograd.grad(sums, values, weight)
        segscatter.segment_scatter_reduce(values, cu, None, 300, mask=mask)
        tracker.update(values, mask, names, cu_seqlens=cu)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(stat.count for stat in tracker.reduce().values()) == 2 * int(mask.sum())


@pytest.mark.parametrize("num_tokens", [3000, 131072, 1500000])
@pytest.mark.parametrize("groups", [8, 5000])
def test_same_bits_every_time(num_tokens: int, groups: int, seed: int) -> None:
    """100 calls in a row, then beside a load that keeps the multiprocessors busy."""
    rng = random.Random(seed)
    cu, ids = documents(rng, num_tokens, 2000), torch.randint(0, groups, (2000,), device=DEVICE)
    values, mask = torch.randn(2, num_tokens, device=DEVICE), torch.rand(num_tokens, device=DEVICE) < 0.5

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return segscatter.segment_scatter_reduce(values, cu, ids, groups, mask=mask, dtype=torch.float64)

    first = call()
    for _ in range(100):
        again = call()
        assert torch.equal(first[0].view(torch.int64), again[0].view(torch.int64))
        assert torch.equal(first[1], again[1])

    load, busy = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    busy.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(busy):
            for _ in range(3):
                load = load @ load.t() * 1e-3
        again = call()
        assert torch.equal(first[0].view(torch.int64), again[0].view(torch.int64))
    torch.cuda.synchronize()


def test_two_streams_at_once(seed: int) -> None:
    """Calls on two streams overlap, each with a workspace of its own, and memory goes back to the pool between them."""
    rng = random.Random(seed)
    num_tokens = 600000
    cu, ids = documents(rng, num_tokens, 3000), torch.randint(0, 8, (3000,), device=DEVICE)
    rows = [torch.randn(num_tokens, device=DEVICE) for _ in range(2)]
    want = [segscatter.segment_scatter_reduce(row, cu, ids, 8) for row in rows]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in rows]
    got: list[list] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(segscatter.segment_scatter_reduce(rows[i], cu, ids, 8))
    torch.cuda.synchronize()
    for i in range(2):
        for sums, counts in got[i]:
            assert torch.equal(sums, want[i][0])
            assert torch.equal(counts, want[i][1])


def test_memory_of_a_call_that_still_runs_is_not_reused(seed: int) -> None:
    """The arguments and the workspace die on the host while the device has not begun."""
    values, cu = torch.randn(600000, device=DEVICE), torch.tensor([0, 600000], device=DEVICE)
    want = segscatter.segment_scatter_reduce(values, cu, None, 1)[0]
    _sleep(20_000_000)
    sums = segscatter.segment_scatter_reduce(values.clone(), cu.clone(), None, 1)[0]
    gc.collect()
    rubbish = [torch.full((600000,), float("nan"), device=DEVICE) for _ in range(4)]
    assert torch.equal(sums, want)
    del rubbish


def test_second_device() -> None:
    """The tensors' device, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    values = torch.randn(5000, device="cuda:1")
    cu, ids = torch.tensor([0, 1000, 5000], device="cuda:1"), torch.tensor([1, 0], device="cuda:1")
    sums, counts = segscatter.segment_scatter_reduce(values, cu, ids, 2)
    assert sums.device == counts.device == values.device
    assert counts.tolist() == [4000, 1000]
    torch.testing.assert_close(
        sums.cpu(), torch.stack([values[1000:].sum(), values[:1000].sum()]).cpu(), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("groups", [2, 5000])
def test_past_two_to_the_31st_token(groups: int) -> None:
    """Token indices of 64 bits: 2^31 + 1000 tokens of bfloat16, with documents that lie on both sides of 2^31."""
    num_tokens = 2**31 + 1000
    need = 2 * num_tokens * 2 + 2**30  # values, and as much again from gather
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
    values = torch.ones(num_tokens, dtype=torch.bfloat16, device=DEVICE)
    cu = torch.tensor([0, 5, 2**31 - 7, 2**31 + 500, num_tokens], device=DEVICE)
    ids = torch.tensor([0, 1, 0, 1], device=DEVICE)
    sums, counts = segscatter.segment_scatter_reduce(values, cu, ids, groups, dtype=torch.float64)
    want = [5 + 507, 2**31 - 12 + 500]
    assert counts[:2].tolist() == want
    assert sums[:2].tolist() == want
    assert not counts[2:].any()
    out = segscatter.segment_gather(torch.tensor([2.0, 3.0], device=DEVICE), cu, ids, num_tokens, dtype=torch.bfloat16)
    assert out[[0, 4, 5, 2**31 - 8, 2**31 - 7, 2**31 + 499, 2**31 + 500, -1]].tolist() == [2, 2, 3, 3, 2, 2, 3, 3]


def test_a_very_long_row_of_a_million_documents() -> None:
    num_tokens, count = 2**24 + 5, 2**20
    cu = documents(random.Random(1), num_tokens, count)
    ids = torch.randint(0, 8, (count,), device=DEVICE)
    check(torch.randn(num_tokens, device=DEVICE), cu, ids, 8)
    check(torch.randn(num_tokens, device=DEVICE), cu, None, count)


def test_compiled(seed: int) -> None:
    """torch.compile keeps the operator, and the generated code around it gives the same gradient."""
    cu, ids = documents(random.Random(seed), 10000, 50), torch.randint(0, 8, (50,), device=DEVICE)
    mask = torch.rand(10000, device=DEVICE) < 0.5
    values = torch.randn(10000, device=DEVICE, requires_grad=True)

    def loss(v: torch.Tensor) -> torch.Tensor:
        sums, counts = segscatter.segment_scatter_reduce(v * 2, cu, ids, 8, mask=mask)
        return (sums / counts.clamp_min(1)).square().sum()

    eager = loss(values)
    (want,) = torch.autograd.grad(eager, values)
    compiled = torch.compile(loss, fullgraph=True)(values)
    (got,) = torch.autograd.grad(compiled, values)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(got, want)
