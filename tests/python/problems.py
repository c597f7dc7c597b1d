# SPDX-License-Identifier: Apache-2.0
"""Calls to test with: the table of right values, and random ones of every kind that the contract allows."""

from __future__ import annotations

import random

import segscatter
import torch
from oracle import Problem

VALUE_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MASK_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
LAYOUTS = ["none", "per_document", "per_sequence", "contiguous"]


def numbers(data: list) -> torch.Tensor:
    """Numbers of the table of right values, where "nan" and "inf" are strings."""
    if data and isinstance(data[0], list):
        return torch.stack([numbers(row) for row in data])
    return torch.tensor([float(x) for x in data])


def case_problem(case: dict) -> Problem:
    """An entry of the table of right values as a call."""
    kwargs = {"ignore_index": case.get("ignore_index", 0)}
    if "mask" in case:
        kwargs["mask"] = torch.tensor(case["mask"])
    if "cp" in case:
        kwargs["cp"] = segscatter.ContextParallel(*case["cp"])
    ids = None if case["group_ids"] is None else torch.tensor(case["group_ids"])
    return Problem(numbers(case["values"]), torch.tensor(case["cu_seqlens"]), ids, case["num_groups"], kwargs)


def document_lengths(rng: random.Random, total: int) -> list[int]:
    """Lengths that add up to at most ``total``: equal, wild, tiny, or with many empties."""
    kind = rng.choice(["one", "equal", "random", "short", "empties"])
    if kind == "one" or total == 0:
        return [total]
    if kind == "equal":
        length = rng.randint(1, total)
        return [length] * (total // length)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = {"random": rng.randint(0, total), "short": rng.randint(0, 5), "empties": rng.choice([0, 0, 0, 7])}[
            kind
        ]
        lengths.append(min(length, total - sum(lengths)))
        if rng.random() < 0.002:
            break  # the rest of the row is padding
    return lengths


def random_mask(rng: random.Random, num_tokens: int, ignore_index: int) -> torch.Tensor:
    dtype = rng.choice(MASK_DTYPES)
    live = torch.rand(num_tokens) < rng.choice([0.0, 0.25, 0.9, 1.0])
    if dtype == torch.bool:
        return live
    ignored = torch.tensor(ignore_index).to(dtype)  # wraps where the type cannot hold it: then nothing is ignored
    return torch.where(live, torch.ones((), dtype=dtype), ignored)


def random_problem(rng: random.Random, max_tokens: int = 300) -> Problem:
    """A call with valid contents; ids may be out of range, values under the mask NaN or Inf."""
    cp = None
    if rng.random() < 0.5:
        size = rng.choice([1, 2, 4])
        layout = rng.choice(LAYOUTS[1:])
        cp = segscatter.ContextParallel(layout, size, rng.randrange(size))
    size = cp.size if cp else 1
    unit = 2 * size if cp and cp.layout == "per_document" else 1
    total = rng.randrange(max_tokens + 1) // (2 * size) * (2 * size) if cp else rng.randrange(max_tokens + 1)
    lengths = [n * unit for n in document_lengths(rng, total // unit)]
    padding = 0
    if cp is None:
        start = rng.choice([0, 0, rng.randint(0, 3)])
        padding = rng.choice([0, 0, rng.randint(0, 9)])
    else:
        start = 0
    num_tokens = total // size + start + padding
    cu = [start]
    for length in lengths:
        cu.append(cu[-1] + length)
    num_groups = rng.choice([1, 2, 8, 40])
    index = rng.choice([torch.int32, torch.int64])
    cu_seqlens = torch.tensor(cu, dtype=index)
    group_ids: torch.Tensor | None = torch.tensor(
        [rng.randint(-1, num_groups) if rng.random() < 0.1 else rng.randrange(num_groups) for _ in lengths],
        dtype=rng.choice([torch.int32, torch.int64]),
    )
    if rng.random() < 0.3:
        group_ids, num_groups = None, len(lengths)
    rows = rng.choice([None, None, 1, 3])
    shape = (num_tokens,) if rows is None else (rows, num_tokens)
    values = torch.randn(shape).to(rng.choice(VALUE_DTYPES))
    kwargs: dict = {"cp": cp} if cp else {}
    if rng.random() < 0.7:
        kwargs["ignore_index"] = rng.choice([0, -100, 7, 2049, 2**24 + 1, 2**53 + 1])
        mask = random_mask(rng, num_tokens, kwargs["ignore_index"])
        kwargs["mask"] = mask if rng.random() < 0.7 else mask[None]
        dead = torch.tensor([x == kwargs["ignore_index"] for x in mask.tolist()], dtype=torch.bool)
        if rng.random() < 0.5:
            values[..., dead] = rng.choice([float("nan"), float("inf")])
    return Problem(values, cu_seqlens, group_ids, num_groups, kwargs)


def strided(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in another memory layout."""
    kind = rng.choice(["step", "rows", "offset"])
    if kind == "step":
        wide = torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)
        wide[..., 1] = tensor
        return wide[..., 1]
    if kind == "rows" and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    wide[..., 3:] = tensor
    return wide[..., 3:]
