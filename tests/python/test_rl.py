# SPDX-License-Identifier: Apache-2.0
"""Reducers of RL trainers against plain Python loops over samples and tokens, written from the formulas."""

import math
import random
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from counting import Operators
from segscatter import rl
from segscatter.rl import SampleReducer, agg_loss, get_sum_of_sample_mean
from torch._dynamo.testing import CompileCounterWithBackend

ROOT = Path(__file__).resolve().parents[2]


class Samples:
    """Random samples: prompts, responses (some empty), masks (some dead), and where context parallel puts tokens."""

    def __init__(self, rng, num_samples=None, max_length=14):
        num_samples = rng.randrange(9) if num_samples is None else num_samples
        self.response_lengths = [rng.choice([0, rng.randrange(max_length)]) for _ in range(num_samples)]
        self.total_lengths = [length + rng.randrange(1, 9) for length in self.response_lengths]
        share = rng.choice([0.0, 0.5, 1.0])
        self.masks = [[int(rng.random() < share) for _ in range(n)] for n in self.response_lengths]
        self.num_tokens = sum(self.response_lengths)

    def values(self, rng, num_rows=None):
        shape = (self.num_tokens,) if num_rows is None else (num_rows, self.num_tokens)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    def weights(self, denominators=None, per_token=False):
        """``[T]``: what the sum of sample means multiplies every token with; it is linear, so this is its gradient."""
        weights = []
        for i, mask in enumerate(self.masks):
            denominator = sum(mask) if denominators is None else denominators[i]
            weights += [live / (1 if per_token else max(denominator, 1)) for live in mask]
        return torch.tensor(weights, dtype=torch.float64)

    def tokens_of_rank(self, size, rank, partition, padded_lengths=None):
        """Positions in the row of responses, in this rank's order: token by token, by the chunk of its logits."""
        mine, start = [], 0
        widths = padded_lengths or self.total_lengths
        for total, length, width in zip(self.total_lengths, self.response_lengths, widths, strict=True):
            chunk = math.ceil(width / (2 * size))
            for token in range(length):
                logit = total - length + token - 1
                number = logit // chunk
                owner = number // 2 if partition == "contiguous" else min(number, 2 * size - 1 - number)
                if owner == rank:
                    mine.append(start + token)
            start += length
        return mine


def check(reducer, values, weights):
    """The reducer is the linear function with these weights, for every row of the values."""
    got = reducer(values)
    products = (values.detach() * weights).unsqueeze(0) if values.dim() == 1 else values.detach() * weights
    wanted = torch.tensor([math.fsum(row) for row in products.tolist()], dtype=torch.float64)
    torch.testing.assert_close(got, wanted.reshape(values.shape[:-1]), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), values)
    torch.testing.assert_close(gradient, weights.expand_as(values), rtol=1e-12, atol=1e-12)


def forms_of_masks(masks):
    yield masks
    yield [torch.tensor(mask, dtype=torch.int32) for mask in masks]
    yield [torch.tensor(mask, dtype=torch.bool) for mask in masks]
    yield tuple(torch.tensor([mask], dtype=torch.int64) for mask in masks)
    yield torch.tensor([live for mask in masks for live in mask], dtype=torch.float32)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_reducer(seed, per_token):
    rng = random.Random(seed)
    samples = Samples(rng)
    values = samples.values(rng, rng.choice([None, 1, 4]))
    group = [rng.choice([0, 1, 5, 2.5]) for _ in samples.masks]
    for masks in forms_of_masks(samples.masks):
        check(
            SampleReducer(samples.response_lengths, masks, per_token=per_token),
            values,
            samples.weights(None, per_token),
        )
        for denominators in [group, torch.tensor(group), [torch.tensor(d) for d in group]]:
            reducer = SampleReducer(samples.response_lengths, masks, denominators=denominators, per_token=per_token)
            check(reducer, values, samples.weights(group, per_token))
    samples.masks = [[1] * n for n in samples.response_lengths]
    check(SampleReducer(torch.tensor(samples.response_lengths, dtype=torch.int64), per_token=per_token), values,
          samples.weights(None, per_token))  # fmt: skip


@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_context_parallel_ranks_add_up(seed, size, partition):
    rng = random.Random(seed)
    samples = Samples(rng)
    values = samples.values(rng, rng.choice([None, 3]))
    padded = rng.choice([None, [max(samples.total_lengths, default=0) + 3] * len(samples.masks)])
    group = rng.choice([None, [rng.choice([1, 5, 2.5]) for _ in samples.masks]])
    per_token = rng.random() < 0.3
    masks = rng.choice(list(forms_of_masks(samples.masks)))
    reducers = [
        SampleReducer(
            samples.response_lengths, masks, denominators=group, per_token=per_token, cp_size=size, cp_rank=rank,
            total_lengths=samples.total_lengths, padded_lengths=padded, cp_partition=partition,
        )
        for rank in range(size)
    ]  # fmt: skip
    mine = [samples.tokens_of_rank(size, rank, partition, padded) for rank in range(size)]
    assert sorted(t for tokens in mine for t in tokens) == list(range(samples.num_tokens))
    assert [reducer.num_tokens for reducer in reducers] == [len(tokens) for tokens in mine]
    weights = samples.weights(group, per_token)
    for reducer, tokens in zip(reducers, mine, strict=True):
        check(reducer, values.detach()[..., tokens].requires_grad_(), weights[tokens])
    check(lambda x: sum(r(x[..., t]) for r, t in zip(reducers, mine, strict=True)), values, weights)


def test_first_token_without_a_prompt_is_predicted_by_no_rank():
    reducers = [
        SampleReducer([4], [[1, 1, 1, 1]], total_lengths=[4], cp_size=2, cp_rank=rank, device="cpu") for rank in (0, 1)
    ]
    assert [reducer.num_tokens for reducer in reducers] == [1, 2]
    assert [reducer(torch.ones(reducer.num_tokens)).item() for reducer in reducers] == [0.25, 0.5]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_dead_tokens_do_no_harm(poison):
    reducer = SampleReducer([2, 1, 3], [[1, 0], [0], [0, 1, 1]])
    values = torch.tensor([2.0, poison, poison, poison, 3.0, 5.0], requires_grad=True)
    total = reducer(values)
    assert total.item() == 6.0
    total.backward()
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.5, 0.5]


def test_dtypes():
    reducer = SampleReducer([3, 2], [[1, 1, 0], [1, 1]])
    values = torch.tensor([1.0, 2.0, 99.0, 3.0, 4.0])
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
        x = values.detach().to(dtype, copy=True).requires_grad_()
        total = reducer(x)
        assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert total.item() == 5.0
        total.backward()
        assert x.grad.dtype == dtype
        assert x.grad.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = reducer(values + 1 / 3)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(5 + 2 / 3, rel=1e-6)
    assert reducer(torch.tensor([True, False, True, True, True])).item() == 1.5
    assert reducer(values.long()).item() == 5.0
    fractional = SampleReducer([3, 2], denominators=[2.5, 2.5])
    assert fractional(values).dtype == torch.float32


VIEWS = {"detach", "view", "expand", "squeeze", "unsqueeze", "split", "split_with_sizes", "slice", "select", "empty"}


def launches(operators):
    """Names of the operators that ran, without those that only make a view or reserve memory."""
    names = [name.split("::")[1] for name, _, _ in operators.calls]
    return [name for name in names if name not in VIEWS]


@pytest.mark.parametrize("per_token", [False, True])
def test_launches_of_a_call(per_token):
    reducer = SampleReducer([3, 2], [[1, 1, 0], [1, 1]], per_token=per_token)
    values = torch.ones(4, 5, requires_grad=True)
    with Operators() as forward:
        total = reducer(values).sum()
    with Operators() as backward:
        total.backward()
    assert launches(forward) == ["segment_scatter_reduce", *([] if per_token else ["div", "sum"]), "sum"]
    assert launches(backward) == ["ones_like", *([] if per_token else ["div"]), "segment_gather"]


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_one_copy_per_micro_batch(where, cp_size):
    """Built for another device (here the meta device, which has no data to read): one copy, which may not block."""
    masks = [torch.tensor(m, dtype=torch.int32, device=where) for m in [[1, 1, 0], [], [0, 1]]]
    options = {"total_lengths": [5, 2, 4], "cp_size": cp_size, "cp_rank": cp_size - 1, "device": "meta"}
    with Operators() as build:
        reducer = SampleReducer([3, 0, 2], masks, **options)
    copies = [kwargs for name, _, kwargs in build.calls if name == "aten::_to_copy"]
    copies = [kwargs for kwargs in copies if kwargs.get("device") == torch.device("meta")]
    assert len(copies) == 1
    assert copies[0]["non_blocking"] is True
    with Operators() as calls:
        total = reducer(torch.empty(6, reducer.num_tokens, device="meta"))
    assert total.device.type == "meta"
    assert total.shape == (6,)
    assert launches(calls) == ["segment_scatter_reduce", "div", "sum"]


def fake_module(monkeypatch, name, **members):
    """A module in sys.modules, with its parents."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def fake_megatron(monkeypatch, size, rank):
    def context_parallel_rank():
        assert size > 1  # slime asks for it only then
        return rank

    members = {"get_context_parallel_world_size": lambda: size, "get_context_parallel_rank": context_parallel_rank}
    fake_module(monkeypatch, "megatron.core", mpu=types.SimpleNamespace(**members))


@pytest.mark.parametrize("seed", range(6))
def test_slime_arguments(monkeypatch, seed):
    """Every way in which versions of slime pass the same arguments."""
    rng = random.Random(seed)
    samples = Samples(rng, num_samples=5)
    values = samples.values(rng)
    masks = [torch.tensor(mask, dtype=torch.int32) for mask in samples.masks]
    lists = (samples.total_lengths, samples.response_lengths, masks)
    group = [torch.tensor(rng.choice([0, 3, 8])) for _ in masks]
    numbers = [d.item() for d in group]
    widths = [max(samples.total_lengths) + 5] * len(masks)
    fake_megatron(monkeypatch, 1, 0)
    reducer_for = get_sum_of_sample_mean
    for reducer in [reducer_for(*lists), reducer_for(*lists, None), reducer_for(*lists, False, "bshd", widths)]:
        check(reducer, values, samples.weights())
    for reducer in [
        reducer_for(*lists, group),
        reducer_for(*lists, torch.stack(group), False, "thd", None),
        reducer_for(*lists, sample_denoms=group, qkv_format="thd"),
    ]:
        check(reducer, values, samples.weights(numbers))
    for reducer in [
        reducer_for(*lists, True),
        reducer_for(*lists, True, "thd", None),
        reducer_for(*lists, calculate_per_token_loss=True),
        reducer_for(*lists, group, True),
        reducer_for(*lists, None, True, "bshd", widths),
    ]:
        check(reducer, values, samples.weights(per_token=True))


@pytest.mark.parametrize("setting", [None, "zigzag", "contiguous"])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("seed", range(3))
def test_slime_context_parallel(monkeypatch, seed, qkv_format, setting):
    """Size, rank and partition come from Megatron and slime."""
    rng = random.Random(seed)
    samples = Samples(rng, num_samples=6)
    values = samples.values(rng)
    masks = [torch.tensor(mask) for mask in samples.masks]
    widths = [max(samples.total_lengths) + 5] * len(masks) if qkv_format == "bshd" else None
    members = {} if setting is None else {"get_cp_partition_mode": lambda: setting}
    fake_module(monkeypatch, "slime.backends.megatron_utils.cp_utils", **members)
    for rank in range(2):
        fake_megatron(monkeypatch, 2, rank)
        reducer = get_sum_of_sample_mean(
            samples.total_lengths, samples.response_lengths, masks, qkv_format=qkv_format, max_seq_lens=widths
        )
        mine = samples.tokens_of_rank(2, rank, setting or "zigzag", widths)
        check(reducer, values.detach()[mine].requires_grad_(), samples.weights()[mine])


def test_slime_without_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    reducer = get_sum_of_sample_mean([3, 3], [2, 1], [torch.ones(2), torch.ones(1)])
    assert reducer(torch.tensor([1.0, 3.0, 5.0])).item() == 7.0
    reducer = get_sum_of_sample_mean([3], [1], [torch.ones(1)], cp_size=2, cp_rank=0)
    assert reducer.num_tokens == 0
    assert reducer(torch.ones(0, requires_grad=True)).requires_grad


def test_bad_arguments_of_reducers(monkeypatch):
    def fails(error, pattern, *args, **kwargs):
        with pytest.raises(error, match=pattern):
            SampleReducer(*args, **kwargs)

    fails(ValueError, r"loss_masks\[1\] has 3 elements, but response_lengths\[1\] is 2", [1, 2], [[1], [1, 1, 1]])
    fails(ValueError, "there are 1 loss_masks for 2 response_lengths", [1, 2], [[1]])
    fails(ValueError, "one element for each of the 3 tokens of response_lengths, but have 4", [1, 2], torch.ones(4))
    fails(ValueError, "must be 0 or 1 everywhere", [2], [[1.0, 0.5]])
    fails(ValueError, "must be 0 or 1 everywhere", [2], [[1, 2]])
    fails(ValueError, "must be 0 or 1 everywhere", [1, 1], torch.tensor([-1, 1]))
    fails(ValueError, "must be 0 or 1 everywhere", [2], torch.tensor([1.0, math.nan]))
    fails(ValueError, "response_lengths must not be negative, but number 1 is -2", [1, -2])
    fails(TypeError, r"response_lengths must be integers, but are torch\.float32", [1.0])
    fails(ValueError, r"response_lengths must have shape \[S\]", torch.ones(2, 2, dtype=torch.int64))
    fails(ValueError, "response_lengths must be on the host, but are on meta", torch.ones(2, device="meta").long())
    fails(ValueError, r"denominators must have shape \[S\] = \[2\]", [1, 2], denominators=[3])
    fails(TypeError, "denominators must be integer or floating", [1, 2], denominators=[True, False])
    fails(ValueError, "total_lengths must be given with context parallel", [1, 2], cp_size=2)
    fails(ValueError, r"total_lengths must have shape \[S\] = \[2\]", [1, 2], cp_size=2, total_lengths=[3])
    fails(ValueError, "total_lengths must not be less than response_lengths, but number 1 is 1 and 2", [1, 2],
          cp_size=2, total_lengths=[3, 1])  # fmt: skip
    fails(ValueError, "padded_lengths must not be less than total_lengths, but number 0 is 2 and 3", [1, 2],
          cp_size=2, total_lengths=[3, 3], padded_lengths=[2, 3])  # fmt: skip
    fails(ValueError, "cp_rank is 2 and cp_size is 2", [1], cp_size=2, cp_rank=2, total_lengths=[3])
    fails(ValueError, "cp_rank is 1 and cp_size is 1", [1], cp_rank=1, total_lengths=[3])
    fails(ValueError, "cp_partition must be 'zigzag' or 'contiguous', but is 'x'", [1], cp_size=2, total_lengths=[3],
          cp_partition="x")  # fmt: skip
    fails(ValueError, "mask is on meta, but the values will be on cpu", [2], torch.ones(2, device="meta"), device="cpu")
    with pytest.raises(ValueError, match=r"T = 3, the tokens of 2 samples on this rank, but have shape \[4\]"):
        SampleReducer([1, 2])(torch.ones(4))
    with pytest.raises(ValueError, match=r"T = 3.*have shape \[\]"):
        SampleReducer([1, 2])(torch.tensor(1.0))

    monkeypatch.setenv("SEGSCATTER_VALIDATE", "1")
    fails(RuntimeError, r"(?i)meta tensor", [2], torch.ones(2, device="meta"))  # masks on a device are then read

    lists = ([3], [1], [torch.ones(1)])
    for error, pattern, options, named in [
        (TypeError, "argument 'qkv' is not known", (), {"qkv": "thd"}),
        (TypeError, "argument 'sample_denoms' is given twice", (None,), {"sample_denoms": None}),
        (TypeError, "at most 7 arguments", (None, False, "thd", None, 1), {}),
        (TypeError, "at most 6 arguments", (False, "thd", None, 1), {}),
        (ValueError, "qkv_format must be 'thd' or 'bshd', but is 'x'", (), {"qkv_format": "x"}),
        (ValueError, "max_seq_lens must be given", (False, "bshd"), {"cp_size": 2, "cp_rank": 0}),
        (ValueError, "must be given together", (), {"cp_size": 2}),
    ]:
        with pytest.raises(error, match=pattern):
            get_sum_of_sample_mean(*lists, *options, **named)


def loop_aggregate(rows, masks, mode, *, dp_size=1, num_tokens=None, num_sequences=None, scale=None):
    """The aggregation modes, one token at a time, as a function of lists of tensors' elements."""
    sums, counts = [], []
    for row, mask in zip(rows, masks, strict=True):
        chosen = [x for x, live in zip(row, mask, strict=True) if live]
        counts.append(len(chosen))
        sums.append(sum(chosen) if chosen else 0.0)
    alive = [n for n in counts if n > 0]
    num_tokens = sum(counts) if num_tokens is None else num_tokens
    num_sequences = len(alive) if num_sequences is None else num_sequences
    if mode == "token-mean":
        return sum(sums) / max(num_tokens, 1) * dp_size
    if mode == "seq-mean-token-mean":
        sums = [total / n for total, n in zip(sums, counts, strict=True) if n > 0]
    return sum(sums) / max(num_sequences, 1) * dp_size / (scale if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("mode", rl.AGGREGATION_MODES)
@pytest.mark.parametrize("seed", range(12))
def test_aggregation_of_padded_and_packed(seed, mode):
    rng = random.Random(seed)
    num_rows, length = rng.randrange(1, 6), rng.randrange(1, 9)
    lengths = [rng.randrange(length + 1) for _ in range(num_rows)]
    masks = [[int(t < n and rng.random() < 0.7) for t in range(length)] for n in lengths]
    if rng.random() < 0.2:
        masks = [[0] * length for _ in masks]
    mask = torch.tensor(masks, dtype=rng.choice([torch.bool, torch.int64, torch.float32]))
    num_metrics = rng.choice([None, 2])
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(num_metrics or 1, num_rows, length, dtype=torch.float64, generator=generator)
    matrix[:, mask == 0] = math.nan  # as padding may be
    matrix = (matrix if num_metrics else matrix[0]).requires_grad_()
    num_tokens, num_sequences = rng.choice([(None, None), (31, 7), (torch.tensor(31), torch.tensor([7.0]))])
    dp_size = 1 if num_tokens is None else rng.choice([1, 4])
    scale = rng.choice([None, 12.5])
    options = {"dp_size": dp_size, "batch_num_tokens": num_tokens, "global_batch_size": num_sequences}
    known = {} if num_tokens is None else {"num_tokens": 31, "num_sequences": 7}

    leaf = matrix.detach().reshape(-1, num_rows, length).clone().requires_grad_()
    wanted = torch.stack(
        [
            loop_aggregate(m, masks, mode, dp_size=dp_size, scale=scale or length, **known) + 0 * m.nan_to_num().sum()
            for m in leaf
        ]
    )
    (wanted_gradient,) = torch.autograd.grad(wanted.nan_to_num().sum(), leaf)
    wanted = wanted.detach().reshape(matrix.shape[:-2])

    got = agg_loss(matrix, mask, mode, loss_scale_factor=scale, **options)
    torch.testing.assert_close(got, wanted)
    (gradient,) = torch.autograd.grad(got.sum(), matrix)
    torch.testing.assert_close(gradient, wanted_gradient.reshape(matrix.shape))

    inside = [r * length + t for r, n in enumerate(lengths) for t in range(n)]
    packed, packed_mask = matrix.flatten(-2)[..., inside], mask.flatten()[inside]
    cu_seqlens = torch.tensor([sum(lengths[:i]) for i in range(num_rows + 1)], dtype=torch.int32)
    got = agg_loss(packed, packed_mask, mode, loss_scale_factor=scale or length, cu_seqlens=cu_seqlens, **options)
    torch.testing.assert_close(got, wanted)
    (gradient,) = torch.autograd.grad(got.sum(), matrix)
    torch.testing.assert_close(gradient, wanted_gradient.reshape(matrix.shape))


@pytest.mark.parametrize("mode", rl.AGGREGATION_MODES)
def test_data_parallel_ranks_and_micro_batches(mode):
    """Averaged over ranks and added over micro-batches, as gradients are, losses give the loss of the whole batch."""
    rng = random.Random(0)
    matrix = torch.randn(12, 7, dtype=torch.float64)
    mask = torch.tensor([[int(rng.random() < share) for _ in range(7)] for share in [0.0, 0.4, 1.0] * 4])
    whole = agg_loss(matrix, mask, mode)
    counts = {"batch_num_tokens": mask.sum(), "global_batch_size": int((mask.sum(-1) > 0).sum())}
    ranks = []
    for rank in range(3):
        parts = [slice(4 * rank, 4 * rank + 1), slice(4 * rank + 1, 4 * rank + 4)]
        ranks.append(sum(agg_loss(matrix[part], mask[part], mode, dp_size=3, **counts) for part in parts))
    torch.testing.assert_close(sum(ranks) / 3, whole)


def test_aggregation_gives_float32_and_no_nan():
    matrix = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    for mode in rl.AGGREGATION_MODES:
        total = agg_loss(matrix, torch.zeros(2, 3), mode)
        assert total.dtype == torch.float32
        assert total.item() == 0.0
        (gradient,) = torch.autograd.grad(total, matrix)
        assert gradient.dtype == torch.bfloat16
        assert (gradient == 0).all()
        assert agg_loss(torch.ones(2, 0), torch.ones(2, 0), mode).item() == 0.0
        assert agg_loss(matrix, None, mode).item() == pytest.approx(
            {"seq-mean-token-sum": 3.0}.get(mode, 1.0), rel=1e-6
        )


def test_bad_arguments_of_aggregation():
    matrix, mask, packed, cu_seqlens = torch.ones(2, 3), torch.ones(2, 3), torch.ones(6), torch.tensor([0, 2, 6])
    for pattern, call in [
        ("loss_agg_mode must be one of token-mean, .* but is 'mean'", lambda: agg_loss(matrix, mask, "mean")),
        ("batch_num_tokens must be given for .*dp_size 2", lambda: agg_loss(matrix, mask, "token-mean", 2)),
        (
            "global_batch_size must be given for .*dp_size 2",
            lambda: agg_loss(matrix, mask, "seq-mean-token-mean", 2, 5),
        ),
        ("dp_size must be at least 1, but is 0", lambda: agg_loss(matrix, mask, "token-mean", 0)),
        (r"loss_mat must have shape \[B, T\]", lambda: agg_loss(packed, None, "token-mean")),
        (r"loss_mask must have shape \[2, 3\], but has shape \[3\]", lambda: agg_loss(matrix, mask[0], "token-mean")),
        (
            "loss_scale_factor must be given",
            lambda: agg_loss(packed, None, "seq-mean-token-sum-norm", cu_seqlens=cu_seqlens),
        ),
        (
            "loss_scale_factor must be positive, but is 0",
            lambda: agg_loss(matrix, mask, "seq-mean-token-sum-norm", loss_scale_factor=0),
        ),
        ("mask has 5 elements for 6", lambda: agg_loss(packed, packed[:5], "token-mean", cu_seqlens=cu_seqlens)),
    ]:
        with pytest.raises(ValueError, match=pattern):
            call()


def test_compiles_whole():
    """The reducer is built outside, as trainers do; calls and aggregation compile with any sizes."""
    torch._dynamo.reset()

    def losses(reducer, packed, padded, mask):
        by_sample = reducer(torch.stack([packed, packed * packed]))
        return by_sample.sum() + sum(agg_loss(padded, mask, mode) for mode in rl.AGGREGATION_MODES)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(losses, fullgraph=True, backend=counter, dynamic=True)
    for rows, length in [(3, 4), (5, 7), (8, 6)]:
        lengths = [length - i % 2 for i in range(rows)]
        reducer = SampleReducer(lengths, [[i % 3 != 0 for i in range(n)] for n in lengths])
        mask = torch.rand(rows, length) < 0.5
        results = []
        for function in [losses, compiled]:
            packed = torch.linspace(0, 1, sum(lengths)).requires_grad_()
            padded = torch.linspace(1, 2, rows * length).reshape(rows, length).requires_grad_()
            total = function(reducer, packed, padded, mask)
            total.backward()
            results.append((total.detach(), packed.grad, padded.grad))
        torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count <= 2


def snippets(path):
    """The Python blocks of a page, behind as many empty lines as stand before them."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield "\n" * text[: match.start(1)].count("\n") + match[1]


def test_documentation(monkeypatch):
    """The page's Python blocks, top to bottom, next to modules with the names of slime and verl."""

    def theirs(*args, **kwargs):
        raise AssertionError("replaced by what the page installs")

    monkeypatch.setitem(sys.modules, "megatron", None)
    slime_function = types.FunctionType(theirs.__code__, {})
    fake_module(monkeypatch, "slime.backends.megatron_utils.cp_utils", get_sum_of_sample_mean=slime_function)
    utils = sys.modules["slime.backends.megatron_utils"]
    importers = [types.ModuleType(f"{utils.__name__}.{name}") for name in ("loss", "data")]
    for module in importers:
        module.get_sum_of_sample_mean = slime_function
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "slime.missing", None)
    fake_module(monkeypatch, "verl.trainer.ppo.core_algos", agg_loss=theirs)
    others = types.ModuleType("verl.other")
    others.agg_loss = print  # a namesake that is not verl's
    monkeypatch.setitem(sys.modules, others.__name__, others)

    page = ROOT / "docs" / "rl.md"
    blocks = list(snippets(page))
    assert len(blocks) >= 9
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)

    assert sys.modules["slime.backends.megatron_utils.cp_utils"].get_sum_of_sample_mean is get_sum_of_sample_mean
    assert all(module.get_sum_of_sample_mean is get_sum_of_sample_mean for module in importers)
    assert sys.modules["verl.trainer.ppo.core_algos"].agg_loss is agg_loss
    assert others.agg_loss is print


def test_example(capsys):
    history = runpy.run_path(str(ROOT / "examples" / "rl_grpo.py"))["train"](steps=21)
    assert history[0] < 0.2
    assert history[-1] > 0.8
    assert "step  20" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--samples", "5", "--metrics", "2"], ["--operators"]])
def test_benchmark(options):
    """It runs, and its contenders agree (which it checks itself)."""
    command = [sys.executable, "-m", "benchmarks.rl", "--tokens", "600", "--rounds", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, rule, *rows = done.stdout.splitlines()
    assert len(rows) >= 2
    assert {line.count("|") for line in [head, rule, *rows]} == {head.count("|")}
