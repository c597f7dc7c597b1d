# SPDX-License-Identifier: Apache-2.0
"""The operators against the project's table of right values and a plain-Python oracle, on every path of the CPU."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import segscatter
import torch
from problems import case_problem, numbers, random_problem, strided
from segscatter import reference

NAN, INF = math.nan, math.inf


def composite(name: str):
    """The fallback for other backends, called on CPU tensors."""
    op = getattr(torch.ops.segscatter, name).default

    def call(*args, cp: segscatter.ContextParallel | None = None, **kwargs):
        if cp:
            kwargs.update(cp_layout=cp.layout, cp_size=cp.size, cp_rank=cp.rank)
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

    return call


REDUCE = {
    "cpu": segscatter.segment_scatter_reduce,
    "reference": reference.segment_scatter_reduce,
    "composite": composite("segment_scatter_reduce"),
}
GATHER = {
    "cpu": segscatter.segment_gather,
    "reference": reference.segment_gather,
    "composite": composite("segment_gather"),
}
ACCUMULATE = {
    "cpu": segscatter.segment_scatter_accumulate_,
    "reference": reference.segment_scatter_accumulate_,
    "composite": composite("segment_scatter_accumulate_"),
}


@pytest.mark.parametrize("path", REDUCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_cases(case: dict, path: str, dtype: torch.dtype, index: torch.dtype) -> None:
    p = case_problem(case)
    ids = p.group_ids if p.group_ids is None else p.group_ids.to(index)
    sums, counts = REDUCE[path](p.values.to(dtype), p.cu_seqlens.to(index), ids, p.num_groups, **p.kwargs)
    torch.testing.assert_close(sums, numbers(case["sums"]).to(sums.dtype), rtol=0, atol=0, equal_nan=True)
    assert counts.tolist() == case["counts"]
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("path", REDUCE)
@pytest.mark.parametrize("part", range(8))
def test_random_calls(path: str, part: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        p = random_problem(rng)
        dtype = rng.choice([None, torch.float32, torch.float64])
        sums, counts = REDUCE[path](p.values, p.cu_seqlens, p.group_ids, p.num_groups, dtype=dtype, **p.kwargs)
        oracle.check_reduce(p, sums, counts)

        source = torch.randn(*p.values.shape[:-1], p.num_groups, dtype=p.values.dtype)
        num_tokens = p.values.shape[-1]
        out = GATHER[path](source, p.cu_seqlens, p.group_ids, num_tokens, **p.kwargs)
        assert torch.equal(out, oracle.gather(source, p, num_tokens))

        before = torch.randn(*p.values.shape[:-1], p.num_groups, dtype=dtype or torch.float32)
        total, live = before.clone(), torch.arange(p.num_groups)
        ACCUMULATE[path](total, live, p.values, p.cu_seqlens, p.group_ids, **p.kwargs)
        exact = (
            sums
            if sums.dtype == torch.float64
            else REDUCE[path](p.values, p.cu_seqlens, p.group_ids, p.num_groups, dtype=torch.float64, **p.kwargs)[0]
        )
        want = (before.double() + exact).to(before.dtype)
        torch.testing.assert_close(total, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(live, torch.arange(p.num_groups) + counts)


@pytest.mark.parametrize("part", range(4))
def test_long_rows(part: int, seed: int) -> None:
    """Several chunks, with documents that cross their borders; few groups, more groups than a table holds, identity."""
    rng = random.Random(seed)
    for num_groups in (3, 5000, None):
        num_tokens = rng.choice([16383, 16384, 16385, 40000, 50000])
        cuts = sorted(rng.choices(range(num_tokens + 1), k=rng.choice([3, 50, 6000])))
        cu = torch.tensor([0, *cuts, num_tokens])
        ids = None if num_groups is None else torch.randint(0, num_groups, (len(cu) - 1,))
        values = torch.randn(2, num_tokens).to(rng.choice([torch.float32, torch.bfloat16, torch.float64]))
        mask = torch.rand(num_tokens) < 0.5
        groups = num_groups or len(cu) - 1
        got = segscatter.segment_scatter_reduce(values, cu, ids, groups, mask=mask, dtype=torch.float64)
        segment = torch.searchsorted(cu, torch.arange(num_tokens), right=True) - 1
        group = segment if ids is None else ids[segment]
        for row in range(2):
            by_group: dict[int, list[float]] = {}
            for g, v in zip(group[mask].tolist(), values[row][mask].double().tolist(), strict=True):
                by_group.setdefault(g, []).append(v)
            for g in range(groups):
                members = by_group.get(g, [])
                assert abs(got[0][row, g] - math.fsum(members)) <= 4e-13 * math.fsum(map(abs, members))
                assert got[1][g] == len(members)


def test_any_strides(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        p = random_problem(rng, 100)
        kwargs = dict(p.kwargs)
        if "mask" in kwargs:
            kwargs["mask"] = strided(rng, kwargs["mask"])
        ids = None if p.group_ids is None else strided(rng, p.group_ids)
        got = segscatter.segment_scatter_reduce(
            strided(rng, p.values), strided(rng, p.cu_seqlens), ids, p.num_groups, **kwargs
        )
        oracle.check_reduce(p, *got)


@pytest.mark.parametrize("path", REDUCE)
def test_special_values(path: str) -> None:
    cu, ids = torch.tensor([0, 2, 4, 6, 8]), torch.tensor([0, 1, 2, 3])
    values = torch.tensor([INF, 1, INF, -INF, NAN, 1, -0.0, -0.0])
    sums, counts = REDUCE[path](values, cu, ids, 4)
    assert sums[0] == INF
    assert sums[1:3].isnan().all()
    assert sums[3] == 0
    assert counts.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("path", REDUCE)
@pytest.mark.parametrize("groups", [0, 1, 5])
@pytest.mark.parametrize("rows", [None, 0, 1, 2])
@pytest.mark.parametrize("segments", [0, 2])
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_nothing_to_add(path: str, groups: int, rows: int | None, segments: int, num_tokens: int) -> None:
    shape = (num_tokens,) if rows is None else (rows, num_tokens)
    cu, ids = torch.zeros(segments + 1, dtype=torch.int64), torch.zeros(segments, dtype=torch.int32)
    sums, counts = REDUCE[path](torch.full(shape, NAN), cu, ids, groups)
    assert torch.equal(sums, torch.zeros(*shape[:-1], groups))
    assert torch.equal(counts, torch.zeros(groups, dtype=torch.int64))
    out = GATHER[path](torch.ones(*shape[:-1], groups), cu, ids, num_tokens)
    assert torch.equal(out, torch.zeros(shape))
    before = torch.ones(*shape[:-1], groups)
    ACCUMULATE[path](before, counts, torch.full(shape, NAN), cu, ids)
    assert torch.equal(before, torch.ones(*shape[:-1], groups))


@pytest.mark.parametrize("path", REDUCE)
@pytest.mark.parametrize("groups", [2, 5000, None])
def test_no_value_rows_still_count(path: str, groups: int | None) -> None:
    cu, mask = torch.tensor([0, 3, 20000]), torch.ones(20000)
    mask[[1, 19000]] = 0
    ids = None if groups is None else torch.tensor([1, 0])
    sums, counts = REDUCE[path](torch.zeros(0, 20000), cu, ids, groups or 2, mask=mask)
    assert sums.shape == (0, groups or 2)
    assert counts[:2].tolist() == ([2, 19996] if ids is None else [19996, 2])
    ACCUMULATE[path](sums, counts, torch.zeros(0, 20000), cu, ids, mask=mask)
    assert counts.sum() == 2 * 19998


@pytest.mark.parametrize("path", REDUCE)
@pytest.mark.parametrize(
    ("mask", "ignore_index", "live"),
    [
        (torch.tensor([156, 1], dtype=torch.uint8), -100, 2),  # 156 is the byte of -100
        (torch.tensor([-100, 1], dtype=torch.int8), 156, 2),
        (torch.tensor([2048, 1], dtype=torch.float16), 2049, 2),  # 2049 rounds to 2048
        (torch.tensor([256, 1], dtype=torch.bfloat16), 257, 2),
        (torch.tensor([2**53, 1], dtype=torch.float64), 2**53 + 1, 2),
        (torch.tensor([2.0**63, 1], dtype=torch.float64), 2**63 - 1, 2),
        (torch.tensor([-(2.0**63), 1], dtype=torch.float32), -(2**63), 1),
        (torch.tensor([-(2.0**63), 1], dtype=torch.float64), -(2**63), 1),
        (torch.tensor([NAN, -0.0], dtype=torch.float32), 0, 1),
        (torch.tensor([True, False]), 1, 1),
    ],
)
def test_masks_compare_as_numbers(path: str, mask: torch.Tensor, ignore_index: int, live: int) -> None:
    cu = torch.tensor([0, 2])
    _, counts = REDUCE[path](torch.ones(2), cu, None, 1, mask=mask, ignore_index=ignore_index)
    assert counts.tolist() == [live]
    out = GATHER[path](torch.ones(1), cu, None, 2, mask=mask, ignore_index=ignore_index)
    assert out.sum() == live


@pytest.mark.parametrize("path", REDUCE)
def test_one_rank_of_a_sequence_holds_all(path: str) -> None:
    cp = segscatter.ContextParallel("per_sequence", 1, 0)
    sums, counts = REDUCE[path](torch.arange(5.0), torch.tensor([0, 2, 5]), None, 2, cp=cp)
    assert sums.tolist() == [1, 9]
    assert counts.tolist() == [2, 3]


@pytest.mark.parametrize("path", REDUCE)
def test_garbage_is_survived(path: str, seed: int) -> None:
    """Unsorted offsets of any size and wild ids: some result, twice the same, and only finite sums of what is there."""
    rng = random.Random(seed)
    extremes = [-(2**63), 2**63 - 1, -1, 2**40, 5, 100]
    for _ in range(60):
        num_tokens, segments, groups = rng.randrange(40000), rng.randrange(50), rng.choice([1, 8, 6000])
        cu = torch.tensor([rng.choice([*extremes, rng.randrange(40000)]) for _ in range(segments + 1)])
        ids = torch.tensor([rng.choice([*extremes, 0, groups - 1]) for _ in range(segments)], dtype=torch.int64)
        cp = rng.choice(
            [None, segscatter.ContextParallel("contiguous", 4, 3), segscatter.ContextParallel("per_document", 2, 1)]
        )
        for group_ids, count in ((ids, groups), (None, segments)):
            once, twice = (REDUCE[path](torch.ones(num_tokens), cu, group_ids, count, cp=cp) for _ in range(2))
            assert torch.equal(once[0], twice[0])
            assert torch.equal(once[1], twice[1])
            assert once[0].isfinite().all()
            out = GATHER[path](torch.ones(count), cu, group_ids, num_tokens, cp=cp)
            assert ((out == 0) | (out == 1)).all()


@pytest.mark.parametrize("layout", ["per_document", "per_sequence", "contiguous"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_add_up(layout: str, size: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        unit = 2 * size
        lengths = [rng.randrange(30) * unit for _ in range(rng.randint(1, 9))]
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        total = int(cu[-1])
        ids = torch.randint(-1, 4, (len(lengths),))
        values, mask = torch.randn(total, dtype=torch.float64), torch.rand(total) < 0.7
        whole = segscatter.segment_scatter_reduce(values, cu, ids, 4, mask=mask)
        sums, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
        for rank in range(size):
            held = oracle.held_tokens(cu.tolist(), total // size, layout, size, rank)
            cp = segscatter.ContextParallel(layout, size, rank)
            segscatter.segment_scatter_accumulate_(sums, counts, values[held], cu, ids, mask=mask[held], cp=cp)
        torch.testing.assert_close(sums, whole[0], rtol=0, atol=1e-12)
        assert torch.equal(counts, whole[1])


@pytest.mark.parametrize("path", GATHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gather_keeps_nan(source_dtype: torch.dtype, dtype: torch.dtype, path: str) -> None:
    """With any mantissa: rounding must not carry out of it."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source_dtype.itemsize]
    all_ones = torch.tensor([-1, torch.iinfo(bits).max], dtype=bits).view(source_dtype)
    for num_tokens in (2, 70):
        cu = torch.tensor([0, num_tokens // 2, num_tokens])
        assert GATHER[path](all_ones, cu, None, num_tokens, dtype=dtype).isnan().all()


def test_counts_past_two_to_the_24th() -> None:
    num_tokens = 2**24 + 3
    ones = torch.ones(1, dtype=torch.bfloat16).expand(num_tokens).contiguous()
    sums, counts = segscatter.segment_scatter_reduce(
        ones, torch.tensor([0, num_tokens]), torch.tensor([0]), 1, dtype=torch.float64
    )
    assert counts.tolist() == [num_tokens]
    assert sums.tolist() == [num_tokens]


def test_more_documents_than_a_table_holds() -> None:
    """131072 one-token documents as 131072 groups, as ids and as identity."""
    size = 131072
    values, cu = torch.randn(size), torch.arange(size + 1, dtype=torch.int32)
    order = torch.randperm(size)
    sums, counts = segscatter.segment_scatter_reduce(values, cu, order, size)
    assert torch.equal(sums[order], values)
    assert counts.eq(1).all()
    assert torch.equal(segscatter.segment_scatter_reduce(values, cu, None, size)[0], values)


HASH_OF_ALL_BITS = """
import hashlib, torch, segscatter
torch.manual_seed(1)
hash = hashlib.sha256()
for groups in (8, 5000, None):
    cu = torch.cat([torch.tensor([0]), torch.randint(0, 70001, (7000,)).sort().values, torch.tensor([70000])])
    ids = None if groups is None else torch.randint(-1, groups, (7001,))
    live = torch.rand(70000) < 0.5
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        values = torch.randn(2, 70000).to(dtype)
        for mask in (None, live, live.int(), live.long(), live.float()):
            for x in segscatter.segment_scatter_reduce(values, cu, ids, groups or 7001, mask=mask, dtype=torch.float64):
                hash.update(x.numpy().tobytes())
print(hash.hexdigest())
"""


def test_same_bits_for_threads_and_instruction_sets() -> None:
    seen = set()
    for capability, threads in (("default", 1), ("avx2", 2), ("avx512", 1), ("avx512", 5)):
        env = {
            "OMP_NUM_THREADS": str(threads),
            "SEGSCATTER_CPU_CAPABILITY": capability,
            "PYTHONPATH": ":".join(sys.path),
        }
        done = subprocess.run([sys.executable, "-c", HASH_OF_ALL_BITS], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout.strip())
    assert len(seen) == 1


def test_deterministic_mode_changes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    values, cu, ids = torch.randn(1000), torch.tensor([0, 10, 500, 1000]), torch.tensor([1, 0, 1])
    plain = segscatter.segment_scatter_reduce(values, cu, ids, 2)
    torch.use_deterministic_algorithms(True)
    try:
        strict = segscatter.segment_scatter_reduce(values, cu, ids, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(plain[0], strict[0])
    assert not recwarn.list


def test_operators_need_no_native_module(tmp_path: Path) -> None:
    """The operators and the registry work where `_C` is missing."""
    code = (
        "import sys; sys.modules['segscatter._C'] = None\n"
        "import torch, segscatter\n"
        "ids = segscatter.ChannelRegistry(['a', 'b']).encode(['b', 'a'])\n"
        "print(segscatter.segment_scatter_reduce(torch.ones(3), torch.tensor([0, 1, 3]), ids, 4)[0].tolist())"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[2.0, 1.0, 0.0, 0.0]", done.stderr


def test_subnormal_float16_where_the_thread_flushes_denormals() -> None:
    """They are normal numbers as float32, whatever the length of a document and so its way through the kernel."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        values = torch.full((2000,), 0x0200, dtype=torch.int16).view(torch.float16)  # 2^-15
        for length in (1, 2, 10, 100, 1000):
            cu = torch.arange(0, 2001, length)
            sums, _ = segscatter.segment_scatter_reduce(values, cu, None, len(cu) - 1, dtype=torch.float64)
            assert sums.unique().tolist() == [length * 2.0**-15]
            ids = torch.zeros(len(cu) - 1, dtype=torch.int64)
            sums, _ = segscatter.segment_scatter_reduce(values, cu, ids, 1, dtype=torch.float64)
            assert sums.tolist() == [2000 * 2.0**-15]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("ignore_index", [0.0, 1.5, "0", None])
def test_ignore_index_is_an_integer(ignore_index: object) -> None:
    with pytest.raises(RuntimeError, match="ignore_index"):
        segscatter.segment_scatter_reduce(
            torch.ones(3), torch.tensor([0, 3]), None, 1, mask=torch.ones(3), ignore_index=ignore_index
        )
