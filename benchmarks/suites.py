# SPDX-License-Identifier: Apache-2.0
"""Which cases meet which methods. A suite yields rows as they are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import cases, methods
from .cases import Case
from .harness import Effort, Timing, compare
from .tracker import tracker_suite

TOKENS = 131072


@dataclass(frozen=True)
class Row:
    """One case: its timings, and what was left out and why."""

    case: str
    coordinates: dict[str, float]
    timings: dict[str, Timing]
    skipped: dict[str, str]


def measure(case: Case, contenders: list[methods.Method], device: str, effort: Effort) -> Row:
    contenders = [method for method in contenders if method.name not in effort.without]
    calls, skipped = methods.checked_calls(case, contenders)
    skipped |= dict.fromkeys(effort.without, "not asked for")
    return Row(case.name, case.coordinates, compare(calls, device, effort), skipped)


def reference_suite(device: str, quick: bool, effort: Effort) -> Iterator[Row]:
    for density in (0.25, 1.0):
        for documents in (128, 1024) if quick else (128, 1024, 4096, 16384):
            name = f"{documents} documents, {density:.0%}"
            case = cases.make_case(name, TOKENS, documents, device=device, density=density)
            yield measure(case, methods.REFERENCE_METHODS, device, effort)


def peers_suite(device: str, quick: bool, effort: Effort) -> Iterator[Row]:
    contenders = [m for m in methods.PEERS if not (quick and m.name == "torch.compile")]
    for documents in (128,) if quick else (128, 1024, 4096, 16384, TOKENS):
        case = cases.make_case(f"{documents} documents", TOKENS, documents, device=device)
        yield measure(case, contenders, device, effort)


def shapes_suite(device: str, quick: bool, effort: Effort) -> Iterator[Row]:
    tokens = 8192 if quick else TOKENS
    shapes = {
        "one document": {"num_documents": 1},
        "128 documents": {"num_documents": 128},
        "1024 documents of random lengths": {"num_documents": 1024, "lengths": cases.lengths_random},
        "16384 documents of random lengths": {"num_documents": tokens // 8, "lengths": cases.lengths_random},
        "documents of one token": {"num_documents": tokens},
        "1024 documents, Zipf": {"num_documents": 1024, "lengths": cases.lengths_zipf},
        "log-normal, median 300": {"num_documents": 0, "lengths": cases.lengths_log_normal},
        "1024 documents, 100k empty ones": {"num_documents": 1024, "lengths": cases.lengths_with_empties},
        "4096 documents, alternating ids": {"num_documents": tokens // 32, "ids": "alternating"},
        "4096 documents, G = 1": {"num_documents": tokens // 32, "num_groups": 1},
        "4096 documents, G = 64": {"num_documents": tokens // 32, "num_groups": 64},
        "4096 documents, G = 1024": {"num_documents": tokens // 32, "num_groups": 1024},
        "4096 documents, G = 16384": {"num_documents": tokens // 32, "num_groups": 16384},
        "1024 documents, bfloat16": {"num_documents": 1024, "dtype": torch.bfloat16},
        "1024 documents, float32": {"num_documents": 1024},
        "1024 documents, int64 labels": {"num_documents": 1024, "labels": True},
        "1024 documents, K = 1": {"num_documents": 1024, "rows": 1},
        "1024 documents, K = 4": {"num_documents": 1024, "rows": 4},
    }
    for name, options in shapes.items():
        case = cases.make_case(name, tokens, device=device, **options)
        contenders = methods.SHAPES_METHODS
        if case.losses.dtype == torch.bfloat16:  # bfloat16 counts stop at 256: the baselines cannot do it
            contenders = [m for m in contenders if m.name == "segscatter" or m.tolerance is None]
        yield measure(case, contenders, device, effort)


def scale_suite(device: str, quick: bool, effort: Effort, max_log2: int = 26) -> Iterator[Row]:
    for log2 in range(10, (14 if quick else max_log2) + 1, 2):
        tokens = 1 << log2
        documents = min(16384, max(1, tokens // 512))
        case = cases.make_case(f"T = 2^{log2}, {documents} documents", tokens, documents, device=device)
        if tokens * 5 > _memory_budget(device):
            return
        yield measure(case, methods.SCALE_METHODS, device, effort)


def _memory_budget(device: str) -> int:
    """Bytes that inputs may take; baselines need about six times as much."""
    return torch.cuda.mem_get_info()[0] // 10 if device == "cuda" else 1 << 31


def tracker_rows(device: str, quick: bool, effort: Effort) -> Iterator[Row]:
    for name, coordinates, timings in tracker_suite(device, quick, effort):
        yield Row(name, coordinates, timings, {})


SUITES = {
    "reference": reference_suite,
    "shapes": shapes_suite,
    "peers": peers_suite,
    "scale": scale_suite,
    "tracker": tracker_rows,
}
