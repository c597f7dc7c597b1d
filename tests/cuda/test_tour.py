# SPDX-License-Identifier: Apache-2.0
"""Rows made to visit every branch of every kernel: each value dtype and mask width takes each tour.

The tours name what they are for. coverage.py reports the PTX instructions that no test reached. Gather has one path: it
comes along where that is not another one's turn (GATHER). SEGSCATTER_TOUR_KERNELS=n: each tour takes n kernels, chosen
by SEGSCATTER_TEST_SEED, instead of all.
"""

from __future__ import annotations

import itertools
import math
import os
import random

import pytest
import segscatter
import torch
from oracle import Problem
from support import PATH, accumulate, check_reduce, cuda, gather, gathered, on_device, reduce

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MASKS = [torch.bool, torch.int32, torch.int64]  # 1, 4 and 8 bytes
FORCED_GROUPS = {"one_launch": [11, 600], "two_launches": [11, 600], "documents": [900]}
GATHER = PATH in ("", "documents")
SAMPLE = int(os.environ.get("SEGSCATTER_TOUR_KERNELS", "0"))
GROUPS = FORCED_GROUPS.get(PATH, [8])  # few: every lane has entries of its own. More: every warp has.


def kernels(dtypes=DTYPES, masks=MASKS, groups=GROUPS):
    """One test for every kernel of the path."""
    combinations = list(itertools.product(dtypes, masks, groups))
    if SAMPLE:
        rng = random.Random(os.environ.get("SEGSCATTER_TEST_SEED"))
        combinations = rng.sample(combinations, min(SAMPLE, len(combinations)))
    names = [f"{str(dtype)[6:]}-{str(mask)[6:]}-{n}" for dtype, mask, n in combinations]
    return pytest.mark.parametrize(("dtype", "mask_dtype", "groups"), combinations, ids=names)


def offsets(lengths: list[int], start: int = 0) -> torch.Tensor:
    return torch.tensor([start, *[start + x for x in itertools.accumulate(lengths)]])


def make(dtype, mask_dtype, groups, cu, num_tokens, *, rows=(), dead=(), live=0.6, ignore_index=0, cp=None) -> Problem:
    """Random values, mask and ids (some out of range, many alike); NaN under the mask, and all tokens of the ranges
    `dead`."""
    ids = torch.randint(-1, groups + 1, (len(cu) - 1,))
    ids = torch.where(torch.rand(ids.shape) < 0.5, ids % 3, ids)
    alive = torch.rand(num_tokens) < live
    for begin, end in dead:
        alive[begin:end] = False
    mask = alive if mask_dtype == torch.bool else torch.where(alive, 5, ignore_index).to(mask_dtype)
    values = torch.randn(*rows, num_tokens).to(dtype)
    values[..., ~alive] = float("nan")
    kwargs = {"mask": mask, "ignore_index": ignore_index}
    return Problem(values, cu, ids, groups, {**kwargs, "cp": cp} if cp else kwargs)


def check(p: Problem, offset: int = 0, sum_dtype: torch.dtype = torch.float32, accumulates: bool = False) -> None:
    """Reduce, and accumulate if wanted, and gather if it is the path's turn."""
    on = on_device(p, offset)
    sums, counts = reduce(on, dtype=sum_dtype)
    check_reduce(p, sums, counts)
    if accumulates:
        before = torch.zeros(*p.values.shape[:-1], p.num_groups, dtype=sum_dtype)
        total, live = accumulate(before, torch.ones(p.num_groups, dtype=torch.int64), on)
        assert torch.equal(live, counts + 1)
        check_reduce(p, total, counts)
    if GATHER:
        source = torch.randn(*p.values.shape[:-1], p.num_groups).to(p.values.dtype)
        assert torch.equal(gather(source, on, dtype=p.values.dtype), gathered(source, p))


VARIANTS = {  # offset and id types, and what the offsets go through
    "int32": (torch.int32, torch.int32, None),
    "int64": (torch.int64, torch.int64, None),
    "identity": (torch.int32, None, None),
    "per_document-int32": (torch.int32, torch.int64, ("per_document", 2, 1)),
    "per_document-int64": (torch.int64, torch.int32, ("per_document", 2, 0)),
    "per_sequence-int32": (torch.int32, torch.int32, ("per_sequence", 2, 1)),
    "per_sequence-int64": (torch.int64, torch.int32, ("per_sequence", 2, 0)),
    "contiguous-int32": (torch.int32, torch.int32, ("contiguous", 2, 1)),
    "contiguous-int64": (torch.int64, torch.int64, ("contiguous", 2, 1)),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


STEP = 2048  # a multiple of what a warp of any kernel takes in one go


def make_variant(variant: str, dtype, mask_dtype, groups: int, lengths: list[int], **more) -> Problem:
    """Documents of about these lengths on this rank, behind and before some tokens of no document. A negative length:
    up to the next multiple of -length tokens of this rank."""
    offset_type, id_type, cp = VARIANTS[variant]
    if id_type is None:
        lengths = [*lengths[-8:], *lengths][:groups]  # every document is a group
    size = cp[1] if cp else 1
    cu = [0 if cp else 3]
    for length in lengths:
        held = length if length >= 0 else -cu[-1] // size % -length
        cu.append(cu[-1] + ((held + 1) // 2 * 2 * size if cp else held))
    num_tokens = cu[-1] // size + (0 if cp else 70)
    cp = segscatter.ContextParallel(*cp) if cp else None
    p = make(dtype, mask_dtype, groups, torch.tensor(cu, dtype=offset_type), num_tokens, cp=cp, **more)
    p.group_ids = None if id_type is None else p.group_ids.to(id_type)
    return p


@kernels()
@variants
def test_long_and_short_documents(variant, dtype, mask_dtype, groups, seed: int) -> None:
    """Quiet rows, rows with one start, with many, with starts on lane and row borders only; runs of empty documents
    that fill several windows; more than 1024 boundaries, so that blocks sample pivots, at most every second boundary;
    one and two value rows."""
    rng = random.Random(seed)
    short = [rng.randint(0, 5) for _ in range(900)]
    borders = [-STEP, *[8] * 64, *[256] * 5, -STEP, 256, 2048, 256, 256, 1, -STEP, 1536]
    lengths = [2900, *short, *[0] * 960, *borders, 1700, 0, 1, 0, 255]
    rows = (2,) if variant == "int64" else ()
    check(make_variant(variant, dtype, mask_dtype, groups, lengths, dead=[(600, 1400)], rows=rows))


@kernels()
@variants
def test_windows_that_end_where_a_warp_begins(variant, dtype, mask_dtype, groups, seed: int) -> None:
    """31 empty documents, then documents of one token: where a warp begins, the 32 boundaries of its first window have
    all been reached. Fewer than 1024 boundaries, so that every warp searches alone."""
    check(make_variant(variant, dtype, mask_dtype, groups, [-256, *[0] * 30, *[1] * 990]), accumulates=True)


@kernels()
@pytest.mark.parametrize("many", [False, True])
def test_offsets_of_more_than_32_bits(many, dtype, mask_dtype, groups, seed: int) -> None:
    """Divided by the number of ranks, as 64-bit numbers: documents far beyond the row are empty. Few boundaries, and so
    many that blocks sample pivots."""
    cp = segscatter.ContextParallel("per_document", 2, 0)
    rng = random.Random(seed)
    lengths = [4 * rng.randrange(40) for _ in range(25)]
    near = offsets([*lengths, *[0] * 200, 4, 8] if many else [*[0] * 31, *lengths])
    p = make(dtype, mask_dtype, groups, near, int(near[-1]) // 2, cp=cp)
    num_far = 1790 if many else 40
    far = 2**33 + 4 * torch.arange(num_far)
    on = on_device(p)
    on.cu_seqlens = torch.cat([near, far]).cuda()
    on.group_ids = torch.cat([p.group_ids, torch.randint(0, groups, (num_far,))]).cuda()
    check_reduce(p, *reduce(on))
    if GATHER:
        source = torch.randn(groups).to(dtype)
        assert torch.equal(gather(source, on), gathered(source, p))


@kernels()
def test_unaligned_rows_of_a_context_parallel_rank(dtype, mask_dtype, groups, seed: int) -> None:
    """Scalar loads, two windows of the offset map, two value rows, sums in float64, 33 to 1023 boundaries."""
    cp = segscatter.ContextParallel("per_sequence", 2, 1)
    cu = torch.randint(0, 4600, (60,)).sort()[0]
    p = make(
        dtype, mask_dtype, groups, cu, 2302, rows=(2,), ignore_index=0 if mask_dtype == torch.bool else -100, cp=cp
    )
    check(p, offset=1, sum_dtype=torch.float64, accumulates=True)


@kernels()
def test_counts_alone(dtype, mask_dtype, groups, seed: int) -> None:
    """No value rows: the mask is all that is read. Few boundaries, documents cut between ranks; a row for a cluster of
    four blocks. Fewer groups, too, whose sums in shared memory take 11 and 7 steps to clear."""
    cp = segscatter.ContextParallel("per_document", 2, 0)
    for n in {groups, min(groups, 13), min(groups, 8)}:
        p = make(dtype, mask_dtype, n, torch.tensor([0, 2000, 2000, 6000, 10000]), 5004, rows=(0,), cp=cp)
        check_reduce(p, *reduce(on_device(p)))


@kernels(masks=[torch.bool])
def test_no_mask(dtype, mask_dtype, groups, seed: int) -> None:
    """All tokens live, in the kernels of 1-byte masks; offsets that are not sorted come after sorted ones."""
    cu = torch.cat([torch.tensor([0]), torch.randint(0, 1500, (200,)).sort()[0], torch.tensor([1500])])
    values = torch.randn(1500).to(dtype)
    p = Problem(values, cu, torch.randint(-1, groups, (201,)), groups)
    check(p, accumulates=True)
    unsorted = torch.cat([cu, torch.tensor([7, 3])])
    on = Problem(cuda(values), cuda(unsorted), torch.randint(0, groups, (203,)).cuda(), groups)
    first, second = reduce(on), reduce(on)
    assert torch.equal(first[1], second[1])
    assert int(first[1].sum()) <= 1500


@pytest.mark.skipif(PATH == "", reason="the plan takes two launches for such a row, which a run of their own tests")
@kernels()
def test_warps_of_several_steps(dtype, mask_dtype, groups, seed: int) -> None:
    """In a long row a warp takes several steps, and the second kernel a wide block. Documents that begin in a step, and
    between steps, rows and warps."""
    num_tokens = 2**19 + 700
    # Tokens of a warp, a run of them, and tokens of a step: with many blocks, and in clusters of 16, 8 and 1 block.
    warps = [(1024, 400, 512), (4352, 20, 1024), (8448, 15, 1024), (65792, 3, 1024)]
    starts = {0, 3, num_tokens}
    for tokens, run, step in warps:
        places = [(0, 2), (0, 2.01), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 0)]  # run, half steps
        starts |= {(run + more) * tokens + int(halves * step / 2) for more, halves in places}
    cu = torch.tensor([start for start in sorted(starts) if start <= num_tokens])
    p = make(dtype, mask_dtype, groups, cu, num_tokens, rows=(2,))
    p.group_ids = torch.arange(len(cu) - 1) % groups
    check(p, sum_dtype=torch.float64)
    if mask_dtype == torch.bool:  # the kernels of 1-byte masks serve calls without one, too
        p.values, p.kwargs = torch.randn(num_tokens).to(dtype), {}
        check(p, sum_dtype=torch.float64)


@pytest.mark.skipif(PATH == "one_launch", reason="has one way to write results, which shorter rows take")
@pytest.mark.parametrize("rows", [(), (2,)], ids=str)
@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_long_rows(dtype, sum_dtype, rows, seed: int) -> None:
    """The second kernel with a wide block: every type of sums, written and added to, in one row and several."""
    num_tokens = 2**18 + 2100
    check(
        make(dtype, torch.bool, 8, torch.tensor([0, 100000, 200000, num_tokens]), num_tokens, rows=rows),
        sum_dtype=sum_dtype,
        accumulates=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cp", [None, ("per_document", 2, 1), ("per_sequence", 2, 0)], ids=str)
@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64])
def test_a_group_per_document(offset_type, cp, dtype: torch.dtype, seed: int) -> None:
    """group_ids=None: documents of one token to thousands, of up to 31 and of more than 32 warps' runs of tokens."""
    lengths = [300, 1, 0, 2000, 5]
    if PATH not in ("one_launch", "two_launches"):
        lengths = [*([1] * 200), 17500, 0, 3, 40, 600, 15900]
    size = cp[1] if cp else 1
    cu = offsets([length * 2 * size if cp else length for length in lengths])
    num_tokens = int(cu[-1]) // size + (0 if cp else 9)
    mask = torch.rand(num_tokens) < 0.5
    kwargs = {"mask": mask, **({"cp": segscatter.ContextParallel(*cp)} if cp else {})}
    p = Problem(torch.randn(2, num_tokens).to(dtype), cu.to(offset_type), None, len(lengths), kwargs)
    check(p, sum_dtype=torch.float64, accumulates=True)
    if cp:  # two more documents, far beyond the row
        on = on_device(p)
        sums, counts = reduce(on)
        p.cu_seqlens = torch.cat([cu, torch.tensor([2**33, 2**33 + 4])])
        p.num_groups += 2
        more_sums, more_counts = reduce(on_device(p))
        assert torch.equal(more_sums, torch.nn.functional.pad(sums, (0, 2)))
        assert torch.equal(more_counts, torch.nn.functional.pad(counts, (0, 2)))


@pytest.mark.skipif(PATH != "two_launches", reason="the only path that adds up sums of chunks")
@pytest.mark.parametrize("num_tokens", [190000, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_chunks_per_lane(dtype: torch.dtype, num_tokens: int, seed: int) -> None:
    """Three and four for every lane of the second kernel, which are the most before its block gets wider."""
    check(make(dtype, torch.bool, 8, torch.tensor([0, 40000, num_tokens - 5]), num_tokens))


@pytest.mark.skipif(PATH != "documents", reason="the other paths do not add up warps' shares of documents")
@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_document_of_many_warps(dtype: torch.dtype, has_ids: bool, seed: int) -> None:
    """1023 warps' runs of tokens, as many as a row has before these get longer: 32 for most lanes of a warp."""
    cu = torch.tensor([0, 10, 10, 2**19 - 300])
    ids = torch.tensor([1, 0, 2]) if has_ids else None
    check(Problem(torch.randn(2**19).to(dtype), cu, ids, 3, {"mask": torch.rand(2**19) < 0.5}))


@pytest.mark.skipif(PATH != "", reason="gather has one path")
@pytest.mark.parametrize("source_dtype", DTYPES)
@kernels()
def test_gather_converts(dtype, mask_dtype, groups, source_dtype: torch.dtype, seed: int) -> None:
    """From every type to every type, wherever a document may start: at the first token of a warp, of its second step,
    of a lane, later. Steps are of 512 tokens, and a row of 2^19 tokens is the shortest in which a warp takes two."""
    lengths = [-256, *[8] * 64, *[256] * 5, 700, *[1] * 30, *[3] * 30, 0, 90, -1024, 512, 2560, 512, 2**19]
    p = make_variant("int32", dtype, mask_dtype, 8, lengths)
    p.group_ids[[-3, -1]] = torch.tensor([-1, 5], dtype=torch.int32)  # those that begin with a second step
    special = [1.5, -3.14159, math.inf, math.nan, 1e-30, -70000.0, 2.0**-14 * 1.0001, 0.0]
    source = torch.tensor(special).to(source_dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source.element_size()]
    source.view(bits)[3] = -1  # NaN with a mantissa that rounding must not carry out of
    got = gather(source, on_device(p), dtype=dtype)
    torch.testing.assert_close(got, gathered(source.to(dtype), p), rtol=0, atol=0, equal_nan=True)
