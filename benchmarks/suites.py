# SPDX-License-Identifier: Apache-2.0
"""Which cases meet which methods. A suite is a list of tasks, so that each can be named, left out or run alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from . import baselines, cases, floors, peers, rl
from .cases import Case
from .harness import Effort, compare
from .methods import Method, checked_calls
from .record import FLOOR, IN_TURN, Row
from .tracker import tracker_tasks

TOKENS = 131072
OURS = "segscatter"

SEGSCATTER = Method(OURS, baselines.ours, 1e-6, required=True)
REPEAT_INTERLEAVE = Method("repeat_interleave + index_add_", baselines.repeat_interleave)
REPEAT_INTERLEAVE_NAMES = Method("the same from list[str]", baselines.repeat_interleave_names)
DOCUMENT_LOOP = Method("document loop", baselines.document_loop)
SEGMENT_REDUCE = Method(
    "segment_reduce x2 + index_add_", baselines.of_reference(baselines.reference.baseline_segment_reduce)
)
COMPILED = Method("torch.compile", baselines.compiled)
PEERS = [
    Method("deterministic index_add_", baselines.deterministic),
    Method("scatter_add_ x2", baselines.of_reference(baselines.reference.baseline_scatter_add)),
    Method("bincount x2", baselines.of_reference(baselines.reference.baseline_bincount)),
    SEGMENT_REDUCE,
    COMPILED,
    Method("torch_scatter segment_csr", peers.torch_scatter),
    Method("fbgemm segment_sum_csr", peers.fbgemm),
    Method("numpy add.reduceat", peers.numpy_reduceat),
]
WHERE_SUM = Method(f"{FLOOR}where(mask, losses, 0).sum()", floors.where_sum, None)
SUM = Method(f"{FLOOR}losses.sum()", floors.sum_of_losses, None)
READ = Method(f"{FLOOR}C++ read of the bytes", floors.read, None)
FIXED_COSTS = [
    Method(f"{FLOOR}segscatter without tokens", floors.without_tokens, None),
    Method(f"{FLOOR}an operator that does nothing", floors.nothing, None),
]
CUDA_ONLY = [
    Method("cub DeviceSegmentedReduce", peers.cub),
    Method(f"{FLOOR}empty kernel", floors.empty_kernel, None),
    Method(f"{FLOOR}copy", floors.copy, None),
]

USUAL = [SEGSCATTER, REPEAT_INTERLEAVE, REPEAT_INTERLEAVE_NAMES, DOCUMENT_LOOP]
FLOORS = [WHERE_SUM, SUM, READ, *FIXED_COSTS]
REFERENCE_METHODS = [*USUAL, *FLOORS, *CUDA_ONLY]
PEERS_METHODS = [SEGSCATTER, REPEAT_INTERLEAVE, *PEERS, *FLOORS, *CUDA_ONLY]
SHAPES_METHODS = [SEGSCATTER, REPEAT_INTERLEAVE, SEGMENT_REDUCE, WHERE_SUM, READ, *CUDA_ONLY]
ALL_METHODS = [*USUAL, *PEERS, *FLOORS, *CUDA_ONLY]


@dataclass(frozen=True)
class Task:
    """One case of a suite, not made yet."""

    name: str
    measure: Callable[[Effort], Row]


def compare_methods(make: Callable[[], Case], contenders: list[Method], effort: Effort) -> Row:
    case = make()
    checked = checked_calls(case, contenders, effort.without)
    timings = compare(checked.calls, case.device, effort)
    return Row(case.name, OURS, timings, case.coordinates, checked.errors, checked.skipped)


def task(contenders: list[Method], name: str, num_tokens: int, num_documents: int, **options) -> Task:
    """options: of :func:`cases.make_case`."""
    make = partial(cases.make_case, name, num_tokens, num_documents, **options)
    return Task(name, partial(compare_methods, make, contenders))


def reference_suite(device: str, quick: bool) -> Iterator[Task]:
    for density in (0.25, 1.0):
        for documents in (128, 1024) if quick else (128, 1024, 4096, 16384):
            name = f"{documents} documents, {density:.0%}"
            yield task(REFERENCE_METHODS, name, TOKENS, documents, device=device, density=density)


def peers_suite(device: str, quick: bool) -> Iterator[Task]:
    for documents in (128,) if quick else (128, 1024, 4096, 16384, TOKENS):
        yield task(PEERS_METHODS, f"{documents} documents", TOKENS, documents, device=device)


def shapes(tokens: int) -> dict[str, dict]:
    """Options of :func:`cases.make_case`."""
    return {
        "one document": {"num_documents": 1},
        "128 documents": {"num_documents": 128},
        "1024 documents": {"num_documents": 1024},
        "1024 documents of random lengths": {"num_documents": 1024, "lengths": cases.lengths_random},
        "16384 documents of random lengths": {"num_documents": tokens // 8, "lengths": cases.lengths_random},
        "documents of one token": {"num_documents": tokens},
        "1024 documents, Zipf": {"num_documents": 1024, "lengths": cases.lengths_zipf},
        "log-normal, median 300": {"num_documents": 0, "lengths": cases.lengths_log_normal},
        "1024 documents, 100k empty ones": {"num_documents": 1024, "lengths": cases.lengths_with_empties},
        "4096 documents, alternating ids": {"num_documents": tokens // 32, "ids": "alternating"},
        "4096 documents, G = 1": {"num_documents": tokens // 32, "num_groups": 1},
        "4096 documents, G = 8": {"num_documents": tokens // 32},
        "4096 documents, G = 64": {"num_documents": tokens // 32, "num_groups": 64},
        "4096 documents, G = 1024": {"num_documents": tokens // 32, "num_groups": 1024},
        "4096 documents, G = 16384": {"num_documents": tokens // 32, "num_groups": 16384},
        "1024 documents, bfloat16": {"num_documents": 1024, "dtype": torch.bfloat16},
        "1024 documents, int64 labels": {"num_documents": 1024, "labels": True},
        "1024 documents, K = 1": {"num_documents": 1024, "rows": 1},
        "1024 documents, K = 4": {"num_documents": 1024, "rows": 4},
    }


def shapes_suite(device: str, quick: bool) -> Iterator[Task]:
    tokens = 8192 if quick else TOKENS
    for name, options in shapes(tokens).items():
        yield task(SHAPES_METHODS, name, tokens, device=device, **options)
    yield Task(IN_TURN, partial(in_turn, shapes(tokens), tokens, device))


def in_turn(options: dict[str, dict], tokens: int, device: str, effort: Effort) -> Row:
    """segscatter alone, its shapes as the methods of one row: what one costs against another, in one run."""
    calls, errors = {}, {}
    for name, values in options.items():
        case = cases.make_case(name, tokens, device=device, **values)
        checked = checked_calls(case, [SEGSCATTER])
        calls[name], errors[name] = checked.calls[OURS], checked.errors[OURS]
    timings = compare(calls, device, effort)
    return Row(IN_TURN, "1024 documents", timings, {"tokens": tokens}, errors)


def scale_suite(device: str, quick: bool) -> Iterator[Task]:
    for log2 in range(10, 14 if quick else 30, 2):
        tokens = 1 << log2
        documents = min(16384, max(1, tokens // 512))
        name = f"T = 2^{log2}, {documents} documents"
        fits = task(SHAPES_METHODS, name, tokens, documents, device=device)
        yield Task(name, partial(if_it_fits, fits, tokens, device))


def if_it_fits(fits: Task, tokens: int, device: str, effort: Effort) -> Row:
    """The baselines' temporaries take up to 30 bytes a token, beside the 5 of the inputs."""
    needed, free = tokens * 40 / 2**30, free_memory(device) / 2**30
    if needed > free:
        return Row(fits.name, OURS, {}, {"tokens": tokens}, {}, {fits.name: f"needs {needed:.0f} GiB of memory"})
    return fits.measure(effort)


def free_memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def rl_suite(device: str, quick: bool) -> Iterator[Task]:
    sizes = ([8192], [64], [1, 2]) if quick else ([TOKENS], [16, 256, 1024, 4096], [1, 4])
    for tokens, samples, metrics in itertools.product(*sizes):
        for direction in rl.DIRECTIONS:
            name = f"S = {samples}, K = {metrics}, {direction.replace('_', ' and ')}"
            yield Task(name, partial(rl_row, name, tokens, samples, metrics, device, direction))


def rl_row(name: str, tokens: int, samples: int, metrics: int, device: str, direction: str, effort: Effort) -> Row:
    """Losses of reinforcement learning; the reducer is ours."""
    for sizes, calls in rl.cases([tokens], [samples], [metrics], torch.device(device)):
        if sizes["pass"] == direction:
            coordinates = {"tokens": tokens, "documents": samples, "rows": metrics}
            return Row(name, "reducer", compare(calls, device, effort), coordinates)
    raise ValueError(f"direction must be one of {', '.join(rl.DIRECTIONS)}, but is {direction!r}")


def own_suite(
    device: str, tokens: Iterable[int], documents: Iterable[int], *, live: float, groups: int, **options
) -> Iterator[Task]:
    """Shapes of the reader: every way to compute them. options: of :func:`cases.make_case`."""
    for num_tokens, num_documents in itertools.product(tokens, documents):
        split = f"{num_documents} documents" if num_documents else "log-normal lengths"
        name = f"T = {num_tokens}, {split}"
        yield task(
            ALL_METHODS, name, num_tokens, num_documents, device=device, density=live, num_groups=groups, **options
        )


SUITES: dict[str, Callable[[str, bool], Iterable[Task]]] = {
    "reference": reference_suite,
    "peers": peers_suite,
    "shapes": shapes_suite,
    "scale": scale_suite,
    "tracker": lambda device, quick: (Task(name, measure) for name, measure in tracker_tasks(device, quick)),
    "rl": rl_suite,
}
