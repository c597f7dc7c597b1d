# SPDX-License-Identifier: Apache-2.0
"""The PTX of every kernel: how it loads, and what it must not contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from binary import LIBRARY, ptx

TARGETS = sorted(ptx()) if LIBRARY.exists() else []
each_target = pytest.mark.parametrize("target", TARGETS)


def kernels(target: int, *prefixes: str) -> Iterator[tuple[str, str]]:
    found = [(name, text) for name, text in ptx()[target].items() if name.startswith(prefixes)]
    assert found, prefixes
    yield from found


def test_there_is_ptx() -> None:
    assert TARGETS, "build with +PTX in TORCH_CUDA_ARCH_LIST"


@each_target
def test_no_local_memory_and_no_calls(target: int) -> None:
    for name, text in kernels(target, ""):
        assert ".local" not in text, name
        assert not re.search(r"\bcall\b", text), name


@each_target
def test_no_atomics(target: int) -> None:
    """Neither of floats, which would make bits depend on the order, nor any other."""
    for name, text in kernels(target, ""):
        assert not re.search(r"^\s*(@!?%p\d+\s+)?(atom|red)\.", text, re.MULTILINE), name


@each_target
def test_nothing_that_the_simulator_misreads(target: int) -> None:
    """cudasim takes ``mov.pred %p, -1`` for false. nvcc makes it of pointers that are null on one way and not on the
    other, which the kernels therefore do without."""
    for name, text in kernels(target, ""):
        assert "mov.pred" not in text, name


@each_target
def test_vector_loads(target: int) -> None:
    """Eight tokens of a lane in pieces of 16 bytes, the 1-byte mask in one of 8."""
    sixteen_bytes = r"v4\.[bfsu]32|v2\.[bfsu]64"
    values = dict.fromkeys(("float16", "bfloat16", "float32"), sixteen_bytes) | {"float64": r"v2\.[bfsu]64"}
    masks = {"mask8": r"v2\.[bsu]32|[bsu]64", "mask32": sixteen_bytes, "mask64": r"v2\.[bsu]64"}
    for name, text in kernels(target, "reduce_"):
        arguments = re.split(r"[<>, ]+", name)
        for wanted in (*(values[a] for a in arguments if a in values), *(masks[a] for a in arguments if a in masks)):
            assert re.search(rf"ld\.global\.({wanted})", text), (name, wanted)


@each_target
def test_float64_arithmetic_stays_out_of_float32_loops(target: int) -> None:
    """Some GPUs have 1/64 of the rate in float64. Sums of floats touch it in their last step only."""
    for name, text in kernels(target, "reduce_", "combine_"):
        if "float64" not in name:
            steps = re.findall(r"\b(?:add|mul|fma)\.(?:rn\.)?f64", text)
            assert len(steps) <= 3, (name, steps)


@each_target
def test_dependent_launch(target: int) -> None:
    """From 9.0 on first kernels let the second one come up, which waits for their end."""
    for name, text in kernels(target, "reduce_partials", "reduce_documents"):
        assert ("griddepcontrol.launch_dependents" in text) == (target >= 90), name
    for name, text in kernels(target, "combine_"):
        assert ("griddepcontrol.wait" in text) == (target >= 90), name
    for name, text in kernels(target, "reduce_cluster", "gather"):
        assert "griddepcontrol" not in text, name


@each_target
def test_cluster_barriers(target: int) -> None:
    """Only the kernel of one launch, and only from 9.0 on, has clusters."""
    for name, text in kernels(target, ""):
        has = name.startswith("reduce_cluster") and target >= 90
        assert ("barrier.cluster.arrive" in text) == has, name
        assert ("barrier.cluster.wait" in text) == has, name
        assert ("mapa" in text) == has, name
