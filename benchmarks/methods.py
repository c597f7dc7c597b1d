# SPDX-License-Identifier: Apache-2.0
"""What is measured: segscatter, the usual ways (from ``segscatter.reference``), other libraries, and floors.

A method prepares a call for a case, or raises :class:`SkippedError` with the reason. A call returns sums and counts,
which :func:`checked_calls` compares with float64 before anything is timed; a floor returns nothing to be compared.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import segscatter
import torch
from segscatter import reference

from .cases import Case, right_answer

NATIVE = Path(__file__).parent / "native"
MAX_LOOP_DOCUMENTS = 20_000


class SkippedError(Exception):
    """Why a method cannot be measured here."""


@dataclass(frozen=True)
class Method:
    """tolerance: of sums, relative to the sum of the group's absolute values; None: a floor, with no result."""

    name: str
    prepare: Callable[[Case], Callable[[], object]]
    tolerance: float | None = 5e-5


def _device(case: Case) -> str:
    return case.losses.device.type


def _plain(case: Case) -> None:
    if not case.plain:
        raise SkippedError("takes one row of values and a bool mask")


def _segscatter(case: Case):
    def call():
        return segscatter.segment_scatter_reduce(
            case.losses,
            case.cu_seqlens,
            case.group_ids,
            case.num_groups,
            mask=case.mask,
            ignore_index=case.ignore_index,
        )

    return call


def _document_loop(case: Case):
    _plain(case)
    if case.group_ids.numel() > MAX_LOOP_DOCUMENTS:
        raise SkippedError(f"more than {MAX_LOOP_DOCUMENTS} documents")
    names = case.names

    def call():
        totals = reference.baseline_document_loop(case.losses, case.cu_seqlens, names, case.mask)
        entries = [totals.get(name, (0.0, 0)) for name in case.vocabulary]
        return torch.tensor([s for s, _ in entries], dtype=torch.float64), torch.tensor([n for _, n in entries])

    return call


def _repeat_interleave(case: Case):
    _plain(case)
    ids = case.group_ids.long()  # index_add_ is several times slower with int32

    def call():
        args = case.losses, case.cu_seqlens, ids, case.num_groups, case.mask
        return reference.baseline_repeat_interleave(*args).unbind(-1)

    return call


def _repeat_interleave_names(case: Case):
    _plain(case)
    names, vocabulary = case.names, case.vocabulary

    def call():
        args = case.losses, case.cu_seqlens, names, vocabulary, case.mask
        return reference.baseline_repeat_interleave_names(*args).unbind(-1)

    return call


def _deterministic(case: Case):
    inner = _repeat_interleave(case)

    def call():
        torch.use_deterministic_algorithms(True)
        try:
            return inner()
        finally:
            torch.use_deterministic_algorithms(False)

    return call


def _reference(function):
    def prepare(case: Case):
        _plain(case)
        ids = case.group_ids.long()
        return functools.partial(function, case.losses, case.cu_seqlens, ids, case.num_groups, case.mask)

    return prepare


def _compiled(case: Case):
    _plain(case)
    ids, cu_seqlens = case.group_ids.long(), case.cu_seqlens.long()

    # repeat_interleave has an output of unknown size, at which compilation would stop; searchsorted does the same.
    @functools.partial(torch.compile, fullgraph=True, dynamic=False)
    def vectorised(losses, cu_seqlens, ids, mask):
        position = torch.arange(losses.numel(), device=losses.device)
        token_ids = ids[torch.searchsorted(cu_seqlens, position, right=True) - 1]
        source = torch.stack([torch.where(mask, losses, 0.0), mask.to(losses.dtype)], dim=-1)
        return losses.new_zeros(case.num_groups, 2).index_add(0, token_ids, source)

    def call():
        return vectorised(case.losses, cu_seqlens, ids, case.mask).unbind(-1)

    try:
        call()
    except Exception as error:
        raise SkippedError(f"torch.compile failed: {type(error).__name__}") from error
    return call


def _torch_scatter(case: Case):
    _plain(case)
    try:
        from torch_scatter import segment_csr
    except (ImportError, OSError):
        raise SkippedError("torch_scatter is not installed") from None
    offsets, ids = case.cu_seqlens.long(), case.group_ids.long()

    def call():
        live = case.mask.to(case.losses.dtype)
        documents = segment_csr(torch.stack([case.losses * live, live]), offsets.expand(2, -1))
        total = documents.new_zeros(2, case.num_groups).index_add_(1, ids, documents)
        return total[0], total[1]

    return call


def _fbgemm(case: Case):
    _plain(case)
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):
        raise SkippedError("fbgemm_gpu is not installed") from None
    ids = case.group_ids.long()
    segment_sum = torch.ops.fbgemm.segment_sum_csr

    def call():
        live = case.mask.to(case.losses.dtype)
        documents = torch.stack(
            [segment_sum(1, case.cu_seqlens, case.losses * live), segment_sum(1, case.cu_seqlens, live)]
        )
        total = documents.new_zeros(2, case.num_groups).index_add_(1, ids, documents)
        return total[0], total[1]

    return call


def _numpy(case: Case):
    _plain(case)
    if _device(case) != "cpu":
        raise SkippedError("numpy works on the CPU")
    losses, mask = case.losses.numpy(), case.mask.numpy()
    starts, ids = case.cu_seqlens[:-1].numpy(), case.group_ids.numpy()
    if np.any(np.diff(case.cu_seqlens.numpy()) == 0):
        raise SkippedError("add.reduceat is wrong for empty documents")

    def call():
        sums = np.add.reduceat(np.where(mask, losses, np.float32(0)), starts)
        counts = np.add.reduceat(mask.astype(np.int64), starts)
        group_counts = np.bincount(ids, weights=counts, minlength=case.num_groups)
        group_sums = np.bincount(ids, weights=sums, minlength=case.num_groups)
        return torch.from_numpy(group_sums), torch.from_numpy(group_counts)

    return call


@functools.cache
def _floors_cuda():
    from torch.utils.cpp_extension import load

    try:
        return load("segscatter_benchmark_floors", [str(NATIVE / "floors.cu")], extra_cflags=["-O3"])
    except Exception as error:
        raise SkippedError(f"floors.cu did not build: {type(error).__name__}") from error


def _on_cuda(case: Case) -> None:
    if _device(case) != "cuda":
        raise SkippedError("needs a GPU")


def _cub(case: Case):
    _on_cuda(case)
    _plain(case)
    module, ids = _floors_cuda(), case.group_ids.long()

    def call():
        documents = module.segmented_reduce(case.losses, case.mask, case.cu_seqlens)
        return documents.new_zeros(case.num_groups, 2).index_add_(0, ids, documents).unbind(-1)

    return call


def _empty_kernel(case: Case):
    _on_cuda(case)
    return _floors_cuda().empty_kernel


def _copy(case: Case):
    _on_cuda(case)
    target = torch.empty_like(case.losses)
    return lambda: target.copy_(case.losses)


@functools.cache
def _read_library() -> ctypes.CDLL:
    """Built with g++ on the fly; its OpenMP is the one that torch has loaded."""
    folder = tempfile.TemporaryDirectory(prefix="segscatter-benchmark-")
    library = Path(folder.name) / "read.so"
    command = ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(NATIVE / "read.cpp"), "-o", library]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SkippedError(f"g++ did not build read.cpp: {type(error).__name__}") from error
    loaded = ctypes.CDLL(str(library))
    loaded.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.read_bytes.restype = ctypes.c_uint64
    loaded.folder = folder
    return loaded


def _read(case: Case):
    if _device(case) != "cpu":
        raise SkippedError("reads host memory")
    read = _read_library().read_bytes
    spans = [(t.data_ptr(), t.numel() * t.element_size()) for t in case.tensors()]

    def call():
        for address, size in spans:
            read(address, size)

    return call


def _nothing(case: Case):
    """The same call with the same kinds of arguments and no tokens: dispatch, checks and allocations alone."""
    losses, mask = case.losses[..., :0], case.mask[:0]
    cu_seqlens, ids = case.cu_seqlens[:1], case.group_ids[:0]

    def call():
        segscatter.segment_scatter_reduce(
            losses, cu_seqlens, ids, case.num_groups, mask=mask, ignore_index=case.ignore_index
        )

    return call


def _sum(case: Case):
    return case.losses.sum


def _where_sum(case: Case):
    live = case.mask if case.mask.dtype == torch.bool else case.mask != case.ignore_index
    return lambda: torch.where(live, case.losses, 0).sum()


SEGSCATTER = Method("segscatter", _segscatter, 1e-6)
DOCUMENT_LOOP = Method("document loop", _document_loop)
REPEAT_INTERLEAVE = Method("repeat_interleave + index_add_", _repeat_interleave)
REPEAT_INTERLEAVE_NAMES = Method("the same from list[str]", _repeat_interleave_names)
SEGMENT_REDUCE = Method("segment_reduce x2 + index_add_", _reference(reference.baseline_segment_reduce))
FBGEMM = Method("fbgemm segment_sum_csr", _fbgemm)
READ = Method("floor: C++ read of the bytes", _read, None)
NOTHING = Method("floor: the call without tokens", _nothing, None)
SUM = Method("floor: losses.sum()", _sum, None)
WHERE_SUM = Method("floor: where(mask, losses, 0).sum()", _where_sum, None)
CUDA_ONLY = [
    Method("cub DeviceSegmentedReduce", _cub),
    Method("floor: empty kernel", _empty_kernel, None),
    Method("floor: copy", _copy, None),
]

REFERENCE_METHODS = [
    SEGSCATTER, DOCUMENT_LOOP, REPEAT_INTERLEAVE_NAMES, REPEAT_INTERLEAVE, SUM, WHERE_SUM, NOTHING, READ, *CUDA_ONLY,
]  # fmt: skip
PEERS = [
    SEGSCATTER,
    REPEAT_INTERLEAVE,
    Method("deterministic index_add_", _deterministic),
    Method("scatter_add_ x2", _reference(reference.baseline_scatter_add)),
    Method("bincount x2", _reference(reference.baseline_bincount)),
    SEGMENT_REDUCE,
    Method("torch.compile", _compiled),
    Method("torch_scatter segment_csr", _torch_scatter),
    FBGEMM,
    Method("numpy add.reduceat", _numpy),
    WHERE_SUM,
    NOTHING,
    READ,
    *CUDA_ONLY,
]
SHAPES_METHODS = [SEGSCATTER, REPEAT_INTERLEAVE, SEGMENT_REDUCE, WHERE_SUM, READ, *CUDA_ONLY]
SCALE_METHODS = [SEGSCATTER, REPEAT_INTERLEAVE, SEGMENT_REDUCE, WHERE_SUM, READ, *CUDA_ONLY]


def check(case: Case, method: Method, result, answer) -> None:
    """Raises AssertionError where counts differ or sums are off."""
    sums, counts = (part.double().cpu().numpy() for part in result)
    right_sums, right_counts = answer
    if not np.array_equal(counts, right_counts):
        raise AssertionError(f"{method.name} counts wrongly on {case.name}")
    error = np.abs(sums - right_sums).max(initial=0.0) / max(np.abs(right_sums).max(initial=0.0), 1e-30)
    if not error <= method.tolerance:
        raise AssertionError(f"{method.name} is off by {error:.1e} on {case.name}")


def checked_calls(case: Case, methods: list[Method]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Calls that gave the right answer once, and why the others are left out. Raises where segscatter is wrong."""
    answer = right_answer(case)
    calls, skipped = {}, {}
    for method in methods:
        try:
            call = method.prepare(case)
            if method.tolerance is not None:
                check(case, method, call(), answer)
            calls[method.name] = call
        except SkippedError as reason:
            skipped[method.name] = str(reason)
        except AssertionError as error:
            if method is SEGSCATTER:
                raise
            skipped[method.name] = f"wrong: {error}"
    return calls, skipped
