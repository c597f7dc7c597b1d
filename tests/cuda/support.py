# SPDX-License-Identifier: Apache-2.0
"""Problems on the device, and an oracle for rows that are too long for the token-by-token one."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import oracle
import segscatter
import torch
from oracle import Problem

PATH = os.environ.get("SEGSCATTER_CUDA_PATH", "")  # what the library was told to do; empty: what its plan chooses

# torch's own kernels convert masks of other types and copy strided tensors; the simulator has only those of segscatter.
NATIVE_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32)


def cuda(tensor: torch.Tensor | None, offset: int = 0) -> torch.Tensor | None:
    """A copy on the device that begins ``offset`` elements behind an aligned address."""
    if tensor is None or not offset:
        return None if tensor is None else tensor.cuda()
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + offset, dtype=tensor.dtype)
    wide[..., offset:] = tensor
    return wide.cuda()[..., offset:]


def on_device(p: Problem, offset: int = 0) -> Problem:
    """The same problem with every tensor on the device; values and mask begin ``offset`` elements off alignment."""
    kwargs = dict(p.kwargs)
    if "mask" in kwargs:
        kwargs["mask"] = cuda(kwargs["mask"], offset)
    return Problem(cuda(p.values, offset), p.cu_seqlens.cuda(), cuda(p.group_ids), p.num_groups, kwargs)


def reduce(p: Problem, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on a problem that is on the device; results come back to the host."""
    sums, counts = segscatter.segment_scatter_reduce(
        p.values, p.cu_seqlens, p.group_ids, p.num_groups, **p.kwargs, **more
    )
    return sums.cpu(), counts.cpu()


def accumulate(sums: torch.Tensor, counts: torch.Tensor, p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``sums`` and ``counts`` (on the host) become."""
    sums, counts = sums.cuda(), counts.cuda()
    segscatter.segment_scatter_accumulate_(sums, counts, p.values, p.cu_seqlens, p.group_ids, **p.kwargs)
    return sums.cpu(), counts.cpu()


def gather(source: torch.Tensor, p: Problem, **more) -> torch.Tensor:
    out = segscatter.segment_gather(source.cuda(), p.cu_seqlens, p.group_ids, p.values.shape[-1], **p.kwargs, **more)
    return out.cpu()


def native_mask(p: Problem) -> Problem:
    """The same problem with a mask that the kernels read as it is."""
    mask = p.kwargs.get("mask")
    if mask is not None and mask.dtype not in NATIVE_MASKS:
        p.kwargs["mask"] = mask.to(torch.float32 if mask.dtype.is_floating_point else torch.int64)
    return p


def run(code: str, **environment: str) -> str:
    """The last line that a new process prints, or of its error message where it fails."""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


# ---- long rows -------------------------------------------------------------------------------------------------------


def documents_of(p: Problem) -> list[tuple[int, int, int]]:
    """Begin and end among the tokens held here and group of every document that counts somewhere."""
    cp = p.kwargs.get("cp")
    num_tokens = p.values.shape[-1]
    cu = p.cu_seqlens.tolist()
    if cp and cp.layout != "none":  # count the tokens held before every offset, one by one
        held = oracle.held_tokens(cu, num_tokens, cp.layout, cp.size, cp.rank)
        before = [0] * (max([*cu, num_tokens * cp.size]) + 1)
        for token in held:
            if token >= 0:
                before[token + 1] = 1
        for t in range(1, len(before)):
            before[t] += before[t - 1]
        cu = [before[max(x, 0)] for x in cu]
    cu = [min(max(x, 0), num_tokens) for x in cu]
    ids = range(len(cu) - 1) if p.group_ids is None else p.group_ids.tolist()
    return [
        (begin, end, group)
        for begin, end, group in zip(cu[:-1], cu[1:], ids, strict=True)
        if 0 <= group < p.num_groups and begin < end
    ]


def live_tokens(p: Problem) -> list[bool]:
    mask = p.kwargs.get("mask")
    if mask is None:
        return [True] * p.values.shape[-1]
    ignore = p.kwargs.get("ignore_index", 0)
    return [mark != ignore for mark in mask.reshape(-1).tolist()]


def check_reduce(p: Problem, sums: torch.Tensor, counts: torch.Tensor) -> None:
    """As oracle.check_reduce, in time that is linear in tokens and documents."""
    live = live_tokens(p)
    members: list[list[int]] = [[] for _ in range(p.num_groups)]
    for begin, end, group in documents_of(p):
        members[group] += [t for t in range(begin, end) if live[t]]
    assert counts.tolist() == [len(tokens) for tokens in members]
    assert sums.shape == (*p.values.shape[:-1], p.num_groups)
    rounding = 2.0**-24 if sums.dtype == torch.float32 else 2.0**-53
    rows = p.values.double().reshape(-1, p.values.shape[-1]).tolist() if p.values.numel() else []
    for row, got in zip(rows, sums.double().reshape(len(rows), p.num_groups).tolist(), strict=True):
        for group, tokens in enumerate(members):
            numbers = [row[t] for t in tokens]
            want = oracle.exact_sum(numbers)
            if math.isfinite(want):
                scale = math.fsum(map(abs, numbers))
                assert abs(got[group] - want) <= rounding * abs(want) + 4e-13 * scale, (group, got[group], want)
            else:
                assert got[group] == want or (math.isnan(got[group]) and math.isnan(want)), (group, got[group], want)


def gathered(source: torch.Tensor, p: Problem) -> torch.Tensor:
    """What segment_gather has to return, in the dtype of ``source``."""
    out = torch.zeros(*source.shape[:-1], p.values.shape[-1], dtype=source.dtype)
    for begin, end, group in documents_of(p):
        out[..., begin:end] = source[..., group, None]
    out[..., ~torch.tensor(live_tokens(p), dtype=torch.bool)] = 0
    return out
