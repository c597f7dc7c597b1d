# SPDX-License-Identifier: Apache-2.0
"""segment_mean and sum_of_segment_means against plain Python loops over tokens."""

import itertools
import math
import random
import subprocess
import sys

import pytest
import segscatter
import torch
from segscatter import ContextParallel, segment_mean, sum_of_segment_means
from torch._dynamo.testing import CompileCounterWithBackend


def loop_means(rows, offsets, live, *, denominators=None, empty=0.0):
    """``[K][S]`` Python floats: sum of live tokens / max(denominator, 1), one token at a time."""
    result = []
    for row in rows:
        means = []
        for s, (begin, end) in enumerate(itertools.pairwise(offsets)):
            chosen = [row[t] for t in range(begin, end) if live[t]]
            denominator = len(chosen) if denominators is None else denominators[s]
            means.append(math.fsum(chosen) / max(denominator, 1) if chosen else empty)
        result.append(means)
    return result


def loop_gradient(weights, offsets, live, num_tokens, *, denominators=None):
    """``[K][T]``: the derivative of ``sum_ks weights[k][s] * means[k][s]``."""
    result = []
    for row in weights:
        gradient = [0.0] * num_tokens
        for s, (begin, end) in enumerate(itertools.pairwise(offsets)):
            count = sum(live[begin:end])
            denominator = max(count if denominators is None else denominators[s], 1)
            for t in range(begin, end):
                gradient[t] = row[s] / denominator if live[t] else 0.0
        result.append(gradient)
    return result


class Batch:
    """Random packed segments: some empty, some dead, tokens before the first and behind the last."""

    def __init__(self, rng, *, num_segments=None, max_length=12, num_rows=None, around=3):
        lengths = [rng.randrange(max_length) for _ in range(rng.randrange(9) if num_segments is None else num_segments)]
        self.offsets = [rng.randrange(around + 1)]
        for length in lengths:
            self.offsets.append(self.offsets[-1] + length)
        self.num_segments = len(lengths)
        self.num_tokens = self.offsets[-1] + rng.randrange(around + 1)
        self.num_rows = rng.choice([None, 1, 3]) if num_rows is None else num_rows
        self.rows = [[rng.gauss(0, 3) for _ in range(self.num_tokens)] for _ in range(self.num_rows or 1)]
        share = rng.choice([0.0, 0.3, 0.8, 1.0])
        self.live = [rng.random() < share for _ in range(self.num_tokens)]
        self.cu_seqlens = torch.tensor(self.offsets, dtype=rng.choice([torch.int32, torch.int64]))

    def values(self, dtype=torch.float64):
        values = torch.tensor(self.rows, dtype=dtype).reshape(self.num_rows or 1, self.num_tokens)
        return (values[0] if self.num_rows is None else values).clone().requires_grad_()

    def mask(self, rng):
        """The same live tokens in one of the forms that a mask may have; ``(mask, ignore_index)``."""
        live = torch.tensor(self.live, dtype=torch.bool)
        form = rng.randrange(4)
        if form == 0:
            return live, 0
        if form == 1:
            return live.to(torch.int32).reshape(1, -1), 0
        if form == 2:
            return live.float(), 0
        return torch.where(live, 7, -100), -100

    def shaped(self, rows):
        tensor = torch.tensor(rows, dtype=torch.float64).reshape(self.num_rows or 1, -1)
        return tensor[0] if self.num_rows is None else tensor


@pytest.mark.parametrize("seed", range(60))
def test_values_and_gradients(seed):
    rng = random.Random(seed)
    batch = Batch(rng)
    denominators = rng.choice([None, [rng.choice([0, 1, 2, 7, 0.5, 3.25]) for _ in range(batch.num_segments)]])
    empty = rng.choice([0.0, -1.5, math.nan])
    mask, ignore_index = batch.mask(rng)
    values = batch.values()
    given = None if denominators is None else torch.tensor(denominators, dtype=torch.float64)
    options = {"mask": mask, "ignore_index": ignore_index, "denominators": given}

    means = segment_mean(values, batch.cu_seqlens, empty=empty, **options)
    wanted = loop_means(batch.rows, batch.offsets, batch.live, denominators=denominators, empty=empty)
    torch.testing.assert_close(means, batch.shaped(wanted), rtol=1e-12, atol=1e-12, equal_nan=True)

    weights = [[rng.gauss(0, 1) for _ in range(batch.num_segments)] for _ in batch.rows]
    (gradient,) = torch.autograd.grad((means * batch.shaped(weights)).nansum(), values)
    wanted = loop_gradient(weights, batch.offsets, batch.live, batch.num_tokens, denominators=denominators)
    torch.testing.assert_close(gradient, batch.shaped(wanted), rtol=1e-12, atol=1e-12)

    total = sum_of_segment_means(values, batch.cu_seqlens, **options)
    wanted = loop_means(batch.rows, batch.offsets, batch.live, denominators=denominators)
    sums = [math.fsum(row) for row in wanted]
    wanted = torch.tensor(sums[0] if batch.num_rows is None else sums, dtype=torch.float64)
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(total.sum(), values)
    ones = [[1.0] * batch.num_segments for _ in batch.rows]
    wanted = loop_gradient(ones, batch.offsets, batch.live, batch.num_tokens, denominators=denominators)
    torch.testing.assert_close(gradient, batch.shaped(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("denominators", [None, torch.tensor([4, 4, 1, 0])])
def test_the_documented_example(denominators):
    values = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0], requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 5, 5, 5])
    means = segment_mean(values, cu_seqlens, denominators=denominators)
    assert means.tolist() == ([1.5, 5.0, 0.0, 0.0] if denominators is None else [0.75, 3.75, 0.0, 0.0])
    means.sum().backward()
    third = torch.tensor(1 / 3).item()
    assert values.grad.tolist() == ([0.5, 0.5, third, third, third] if denominators is None else [0.25] * 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_narrow_values_give_float32(dtype, seed):
    rng = random.Random(seed)
    batch = Batch(rng, num_segments=20, max_length=60, num_rows=2)
    values = batch.values(dtype)
    batch.rows = values.double().tolist()
    mask, ignore_index = batch.mask(rng)
    means = segment_mean(values, batch.cu_seqlens, mask=mask, ignore_index=ignore_index)
    assert means.dtype == torch.float32
    wanted = batch.shaped(loop_means(batch.rows, batch.offsets, batch.live))
    torch.testing.assert_close(means.double(), wanted, rtol=2e-7, atol=1e-7)
    means.sum().backward()
    assert values.grad.dtype == dtype
    ones = [[1.0] * batch.num_segments for _ in batch.rows]
    wanted = batch.shaped(loop_gradient(ones, batch.offsets, batch.live, batch.num_tokens))
    torch.testing.assert_close(values.grad, wanted.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_denominators_leave_the_dtype(dtype):
    values = torch.ones(3, requires_grad=True)
    denominators = torch.tensor([2, 4]).to(dtype)
    means = segment_mean(values, torch.tensor([0, 1, 3]), denominators=denominators)
    assert means.dtype == torch.float32
    assert means.tolist() == [0.5, 0.5]
    assert sum_of_segment_means(values, torch.tensor([0, 1, 3]), denominators=denominators).dtype == torch.float32


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_dead_tokens_do_no_harm(poison):
    values = torch.tensor([1.0, poison, 3.0, poison, poison, 5.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1, 0, 0, 1])
    cu_seqlens = torch.tensor([0, 3, 5, 6])
    means = segment_mean(values, cu_seqlens, mask=mask)
    assert means.tolist() == [2.0, 0.0, 5.0]
    (means * torch.tensor([2.0, 3.0, 4.0])).sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 4.0]
    assert sum_of_segment_means(values, cu_seqlens, mask=mask).item() == 7.0


def test_a_live_nan_shows_in_its_own_segment():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    means = segment_mean(values, torch.tensor([0, 1, 2, 3, 4]))
    torch.testing.assert_close(means, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0), (5,)])
def test_nothing_to_reduce(shape):
    values = torch.ones(shape, requires_grad=True)
    no_segments, two = torch.tensor([0]), torch.tensor([0, 0, 0])
    assert segment_mean(values, no_segments).shape == (*shape[:-1], 0)
    assert sum_of_segment_means(values, no_segments).shape == shape[:-1]
    means = segment_mean(values, two, empty=9.0)
    assert means.shape == (*shape[:-1], 2)
    assert (means == 9).all()
    total = sum_of_segment_means(values, two)
    assert (total == 0).all()
    (means.sum() + total.sum()).backward()
    assert values.grad.shape == shape
    assert (values.grad == 0).all()


@pytest.mark.parametrize("function", [segment_mean, sum_of_segment_means])
def test_derivatives(function):
    cu_seqlens = torch.tensor([1, 4, 4, 7, 9])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 0, 1])
    denominators = torch.tensor([2.0, 3.0, 1.5, 4.0], dtype=torch.float64, requires_grad=True)

    def means(values, denominators=None):
        return function(values, cu_seqlens, mask=mask, denominators=denominators)

    def curved(values):
        return means(values**3) ** 2

    for shape in [(10,), (2, 10)]:
        values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        values.requires_grad_()
        for f, inputs in [(means, (values,)), (means, (values, denominators)), (curved, (values,))]:
            assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=False)
            assert torch.autograd.gradgradcheck(f, inputs, check_fwd_over_rev=True)


def test_function_transforms():
    cu_seqlens = torch.tensor([0, 2, 5])

    def loss(values):
        return sum_of_segment_means(values**2, cu_seqlens)

    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(torch.func.grad(loss)(values), torch.tensor([1.0, 2.0, 2.0, 8 / 3, 10 / 3]))
    out, tangent = torch.func.jvp(loss, (values,), (torch.ones(5),))
    torch.testing.assert_close(out, torch.tensor(2.5 + 50 / 3))
    torch.testing.assert_close(tangent, torch.tensor(3.0 + 8.0))


def holder(layout, size, offsets, position):
    """The rank that holds a global token; written from what the layouts are, token by token."""
    num_tokens = offsets[-1]
    if layout == "contiguous":
        return position // (num_tokens // size)
    begin, end = 0, num_tokens
    if layout == "per_document":
        begin, end = next((b, e) for b, e in itertools.pairwise(offsets) if b <= position < e)
    piece = (position - begin) // ((end - begin) // (2 * size))
    return min(piece, 2 * size - 1 - piece)


@pytest.mark.parametrize("layout", ["per_document", "per_sequence", "contiguous"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up(layout, size):
    rng = random.Random(size)
    for _ in range(10):
        unit = 2 * size if layout == "per_document" else 1
        lengths = [unit * rng.randrange(5) for _ in range(6)]
        lengths.append(-sum(lengths) % (2 * size))  # the row divides evenly
        offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        num_tokens = offsets[-1]
        values = torch.randn(2, num_tokens, dtype=torch.float64).requires_grad_()
        mask = torch.rand(num_tokens) < 0.6
        counts = [sum(mask[b:e].tolist()) for b, e in itertools.pairwise(offsets)]
        cu_seqlens = torch.tensor(offsets)
        wanted = segment_mean(values, cu_seqlens, mask=mask)
        wanted_total = sum_of_segment_means(values, cu_seqlens, mask=mask)

        means = totals = 0
        for rank in range(size):
            mine = [t for t in range(num_tokens) if holder(layout, size, offsets, t) == rank]
            options = {
                "mask": mask[mine],
                "denominators": torch.tensor(counts),
                "cp": ContextParallel(layout, size, rank),
            }
            means = means + segment_mean(values[:, mine], cu_seqlens, **options)
            totals = totals + sum_of_segment_means(values[:, mine], cu_seqlens, **options)
        torch.testing.assert_close(means, wanted)
        torch.testing.assert_close(totals, wanted_total)
        weights = torch.randn(means.shape, dtype=torch.float64)
        for got, reference, w in [(means, wanted, weights), (totals, wanted_total, weights[:, 0])]:
            (gradient,) = torch.autograd.grad((got * w).sum(), values, retain_graph=True)
            (wanted_gradient,) = torch.autograd.grad((reference * w).sum(), values, retain_graph=True)
            torch.testing.assert_close(gradient, wanted_gradient)


def train_step(values, cu_seqlens, mask, denominators):
    means = segment_mean(values, cu_seqlens, mask=mask, empty=-1.0)
    return means.sum() + 2 * sum_of_segment_means(values * values, cu_seqlens, mask=mask, denominators=denominators)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_whole_and_once_for_all_sizes(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(train_step, fullgraph=True, backend=counter)
    for seed, num_segments in enumerate([5, 9, 14, 23]):
        rng = random.Random(seed)
        batch = Batch(rng, num_segments=num_segments, num_rows=0)
        live, denominators = torch.tensor(batch.live), torch.arange(num_segments)
        cu_seqlens = batch.cu_seqlens.long()
        eager, fast = (torch.tensor(batch.rows[0]).requires_grad_() for _ in range(2))
        wanted = train_step(eager, cu_seqlens, live, denominators)
        got = compiled(fast, cu_seqlens, live, denominators)
        wanted.backward()
        got.backward()
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(fast.grad, eager.grad)
    assert counter.frame_count <= 2  # the first sizes, then any


def test_bits_do_not_depend_on_threads():
    program = (
        "import sys, torch, segscatter; torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(0)\n"
        "values = torch.randn(3, 200_000).requires_grad_(); mask = torch.rand(200_000) < 0.5\n"
        "cu = torch.cat([torch.tensor([0, 200_000]), torch.randint(0, 200_000, (999,))]).sort().values\n"
        "total = segscatter.sum_of_segment_means(values, cu, mask=mask); total.sum().backward()\n"
        "print(total.view(torch.int32).tolist(), values.grad.view(torch.int32).sum().item())"
    )
    results = {
        subprocess.run([sys.executable, "-c", program, threads], capture_output=True, text=True, check=True).stdout
        for threads in ["1", "2", "3"]
    }
    assert len(results) == 1
    assert results.pop().startswith("[")


@pytest.mark.parametrize("function", [segment_mean, sum_of_segment_means])
def test_bad_arguments(function):
    values, cu_seqlens = torch.zeros(6), torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match=r"denominators must have shape \[S\] = \[2\].*\[3\]"):
        function(values, cu_seqlens, denominators=torch.ones(3))
    with pytest.raises(ValueError, match=r"denominators must have shape \[S\] = \[2\].*\[\]"):
        function(values, cu_seqlens, denominators=torch.tensor(3.0))
    with pytest.raises(TypeError, match=r"denominators must be integer or floating, but are torch\.bool"):
        function(values, cu_seqlens, denominators=torch.tensor([True, True]))
    with pytest.raises(ValueError, match="denominators are on meta, but values are on cpu"):
        function(values, cu_seqlens, denominators=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="denominators must be given for 2 context-parallel ranks"):
        function(values, cu_seqlens, cp=ContextParallel("contiguous", 2, 0))
    with pytest.raises(ValueError, match="mask has 5 elements for 6 tokens"):
        function(values, cu_seqlens, mask=torch.ones(5))
    with pytest.raises(ValueError, match="cu_seqlens is empty"):
        function(values, cu_seqlens[:0])
    with pytest.raises(TypeError, match="values must be float16"):
        function(values.long(), cu_seqlens)


def test_empty_cannot_be_added_up():
    cp = ContextParallel("contiguous", 2, 0)
    with pytest.raises(ValueError, match="empty must be 0 where the results of 2 ranks are added up, but is 1"):
        segment_mean(torch.zeros(6), torch.tensor([0, 12]), denominators=torch.ones(1), empty=1.0, cp=cp)


def test_both_are_exported():
    assert {"segment_mean", "sum_of_segment_means"} <= set(segscatter.__all__)
