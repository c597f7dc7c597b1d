# SPDX-License-Identifier: Apache-2.0
"""Bad input: an error at once, naming the argument, what came and what is wanted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import segscatter
import torch

CU, IDS = torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0])


def reduce(values=None, cu_seqlens=CU, group_ids=IDS, num_groups=2, **kwargs):
    values = torch.ones(6) if values is None else values
    return segscatter.segment_scatter_reduce(values, cu_seqlens, group_ids, num_groups, **kwargs)


BAD_VALUES = [
    ({"values": torch.ones(1, 2, 3)}, r"values must have shape \[T\] or \[K, T\], but has shape \[1, 2, 3\]"),
    ({"values": torch.tensor(1.0)}, r"values must have shape"),
    ({"cu_seqlens": torch.empty(0, dtype=torch.int64)}, r"cu_seqlens is empty, but must hold S \+ 1 offsets"),
    ({"cu_seqlens": CU[None]}, r"cu_seqlens must have one dimension, \[S \+ 1\], but has shape \[1, 4\]"),
    ({"group_ids": IDS[:2]}, r"group_ids has 2 elements for the 3 segments"),
    ({"group_ids": IDS[None]}, r"group_ids must have one dimension, \[S\], but has shape \[1, 3\]"),
    ({"group_ids": None}, r"there are 2 groups for 3 segments"),
    ({"num_groups": -1}, r"num_groups must not be negative, but is -1"),
    ({"mask": torch.ones(3)}, r"mask has 3 elements for 6 tokens"),
    ({"mask": torch.ones(2, 3)}, r"mask must have shape \[T\] or \[1, T\], but has shape \[2, 3\]"),
    ({"mask": torch.ones(6, device="meta")}, r"mask is on meta, but values is on cpu"),
    ({"cu_seqlens": CU.to("meta")}, r"cu_seqlens is on meta, but values is on cpu"),
    ({"group_ids": IDS.to("meta")}, r"group_ids is on meta, but values is on cpu"),
]
BAD_TYPES = [
    ({"values": torch.ones(6, dtype=torch.int32)}, r"values must be float16, bfloat16, float32 or float64, but is Int"),
    ({"cu_seqlens": CU.float()}, r"cu_seqlens must be int32 or int64, but is Float"),
    ({"group_ids": IDS.short()}, r"group_ids must be int32 or int64, but is Short"),
    (
        {"mask": torch.ones(6, dtype=torch.complex64)},
        r"mask must be bool, integer \(but uint64\) or float, but is ComplexFloat",
    ),
    ({"dtype": torch.float16}, r"dtype must be float32 or float64, but is Half"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VALUES)
def test_values(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduce(**change)


@pytest.mark.parametrize(("change", "message"), BAD_TYPES)
def test_types(change: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        reduce(**change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 0), "layout must be one of none, per_document, per_sequence, contiguous, but is 'zigzag'"),
        (("contiguous", 0, 0), "size must be at least 1, but is 0"),
        (("contiguous", 2, 2), r"rank must lie in \[0, 2\), but is 2"),
        (("contiguous", 2, -1), r"rank must lie in \[0, 2\), but is -1"),
        (("none", 2, 0), "layout 'none' means one rank, but size is 2"),
    ],
)
def test_context_parallel(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segscatter.ContextParallel(*arguments)
    layout, size, rank = arguments
    with pytest.raises(ValueError, match=layout if layout == "zigzag" else "cp_"):
        torch.ops.segscatter.segment_scatter_reduce(
            torch.ones(6), CU, IDS, 2, cp_layout=layout, cp_size=size, cp_rank=rank
        )


def test_per_sequence_needs_even_rows() -> None:
    with pytest.raises(ValueError, match="'per_sequence' needs an even number of tokens, but got 5"):
        reduce(torch.ones(5), cp=segscatter.ContextParallel("per_sequence", 2, 0))


@pytest.mark.parametrize(
    ("sums", "counts", "values", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(2).long(), torch.ones(1, 6), ValueError, r"sums must have shape \[K, G\]"),
        (torch.zeros(3, 2), torch.zeros(2).long(), torch.ones(1, 6), ValueError, "sums has 3 rows, but values has 1"),
        (torch.zeros(2), torch.zeros(3).long(), torch.ones(6), ValueError, r"counts must have shape \[2\]"),
        (torch.zeros(2).half(), torch.zeros(2).long(), torch.ones(6), TypeError, "sums must be float32 or float64"),
        (torch.zeros(2), torch.zeros(2).int(), torch.ones(6), TypeError, "counts must be int64, but is Int"),
        (torch.zeros(4)[::2], torch.zeros(2).long(), torch.ones(6), ValueError, "sums must be contiguous"),
        (torch.zeros(2), torch.zeros(4).long()[::2], torch.ones(6), ValueError, "counts must be contiguous"),
        (torch.zeros(2, device="meta"), torch.zeros(2).long(), torch.ones(6), ValueError, "sums is on meta"),
    ],
)
def test_accumulate(sums, counts, values, error, message) -> None:
    with pytest.raises(error, match=message):
        segscatter.segment_scatter_accumulate_(sums, counts, values, CU, IDS)


@pytest.mark.parametrize(
    ("source", "num_tokens", "kwargs", "error", "message"),
    [
        (torch.ones(1, 1, 2), 6, {}, ValueError, r"source must have shape \[G\] or \[K, G\]"),
        (torch.ones(2).int(), 6, {}, TypeError, "source must be float16"),
        (torch.ones(2), -1, {}, ValueError, "num_tokens must not be negative, but is -1"),
        (torch.ones(2), 6, {"mask": torch.ones(5)}, ValueError, "mask has 5 elements for 6 tokens"),
        (torch.ones(2), 6, {"dtype": torch.int32}, TypeError, "dtype must be float16, bfloat16, float32 or float64"),
    ],
)
def test_gather(source, num_tokens, kwargs, error, message) -> None:
    with pytest.raises(error, match=message):
        segscatter.segment_gather(source, CU, IDS, num_tokens, **kwargs)


@pytest.mark.parametrize(
    ("cu", "ids", "kwargs", "message"),
    [
        ([0, 4, 3, 6], [0, 1, 0], {}, "cu_seqlens decreases at position 2: 4, then 3"),
        ([-1, 4, 5, 6], [0, 1, 0], {}, r"cu_seqlens\[0\] is -1, outside the row of 6 tokens"),
        ([0, 2, 4, 7], [0, 1, 0], {}, r"cu_seqlens\[3\] is 7, outside the row of 6 tokens"),
        ([0, 2, 4, 6], [0, 2, 0], {}, r"group_ids\[1\] is 2, outside \[-1, 2\)"),
        ([0, 2, 4, 6], [0, 1, -2], {}, r"group_ids\[2\] is -2, outside \[-1, 2\)"),
        ([0, 4, 6, 12], [0, 1, 0], {"cp": segscatter.ContextParallel("per_document", 2, 0)}, "segment 1 has 2 tokens"),
        ([2, 6, 10, 14], [0, 1, 0], {"cp": segscatter.ContextParallel("per_document", 2, 0)}, "outside the row of 12"),
        ([2, 6, 10, 10], [0, 1, 0], {"cp": segscatter.ContextParallel("per_document", 2, 0)}, "a multiple of 4"),
    ],
)
def test_validate_reports_contents(cu, ids, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        segscatter.validate(torch.tensor(cu), torch.tensor(ids), 2, 6, **kwargs)


def test_validate_accepts_what_is_allowed() -> None:
    segscatter.validate(CU, torch.tensor([0, -1, 1]), 2, 6)
    segscatter.validate(torch.tensor([1, 3, 3, 5], dtype=torch.int32), None, 3, 6)
    segscatter.validate(torch.tensor([0]), None, 0, 0)
    segscatter.validate(torch.tensor([0, 8, 16]), None, 2, 8, cp=segscatter.ContextParallel("per_document", 2, 1))
    segscatter.validate(torch.tensor([0, 3, 16]), None, 2, 8, cp=segscatter.ContextParallel("contiguous", 2, 1))
    with pytest.raises(ValueError, match="there are 2 groups for 3 segments"):
        segscatter.validate(CU, None, 2, 6)


@pytest.mark.parametrize("call", ["reduce", "accumulate", "gather"])
def test_environment_variable_validates_every_call(call: str) -> None:
    code = f"""
import torch, segscatter as s
cu, ids = torch.tensor([0, 4, 3]), torch.tensor([0, 1])
try:
    if {call!r} == "reduce": s.segment_scatter_reduce(torch.ones(4), cu, ids, 2)
    sums, counts = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    if {call!r} == "accumulate": s.segment_scatter_accumulate_(sums, counts, torch.ones(4), cu, ids)
    if {call!r} == "gather": s.segment_gather(torch.ones(2), cu, ids, 4)
    print("accepted")
except ValueError as error:
    print(error)
"""
    for value, want in (("1", "decreases at position 2"), ("0", "accepted")):
        env = {**os.environ, "SEGSCATTER_VALIDATE": value, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert want in done.stdout


def test_accumulate_into_its_own_input() -> None:
    sums, counts, ids = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    cu = torch.tensor([0, 1, 2])
    for arguments in (
        (sums, counts, sums, cu, ids),
        (sums, ids, torch.ones(2), cu, ids),
        (sums, cu[1:], torch.ones(2), cu, ids),
    ):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            segscatter.segment_scatter_accumulate_(*arguments)


def test_absurd_context_parallel_size() -> None:
    cp = segscatter.ContextParallel("contiguous", 2**62 + 1, 2**62)
    with pytest.raises(ValueError, match=r"cp_size must lie in \[1, 1048576\], but is 4611686018427387905"):
        reduce(cp=cp)


def test_validate_is_not_lost_in_compiled_code() -> None:
    @torch.compile(backend="eager")
    def check(cu):
        segscatter.validate(cu, None, 2, 4)
        return cu + 1

    with pytest.raises(ValueError, match="decreases at position 2"):
        check(torch.tensor([0, 4, 3]))
