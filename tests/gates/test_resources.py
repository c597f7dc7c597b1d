# SPDX-License-Identifier: Apache-2.0
"""Registers, stack, local and static shared memory of every kernel on every architecture, against budget.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from binary import LIBRARY, dump, machine_code, ptx, resources

BUDGET_FILE = Path(__file__).with_name("budget.json")
BUDGET = json.loads(BUDGET_FILE.read_text()) if BUDGET_FILE.exists() else {"registers": {}, "static_shared": 0}
RENEW = "if this is intended, run: python tests/gates/renew_budget.py"

# Threads of a block and blocks that a multiprocessor has to take, as in csrc/core/cuda/policy.h.
LAUNCH_BOUNDS = {
    "reduce_cluster": (256, 1),
    "reduce_partials": (128, 2),
    "reduce_documents": (128, 2),
    "gather": (128, 4),
    "combine_partials": (256, 1),
    "combine_documents": (128, 1),
    "combine_documents_by_group": (256, 1),
}


OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", re.MULTILINE)


def test_every_kernel_is_there() -> None:
    """77 kernels: a forgotten instantiation, or one that nobody launches, shows here."""
    assert LIBRARY.exists(), "build first: SEGSCATTER_CUDA=ON python setup.py build_ext --inplace"
    assert sorted(resources()) == sorted(BUDGET["registers"]), RENEW
    architectures = {arch for kernel in resources().values() for arch in kernel}
    for name, kernel in resources().items():
        assert set(kernel) == architectures, name


def test_every_kernel_is_there_once() -> None:
    """A kernel that several files instantiate is compiled several times, for nothing."""
    names = re.findall(r"^\s*Function (_ZN10segscatter\S+):", dump("--dump-resource-usage"), re.MULTILINE)
    architectures = {arch for kernel in resources().values() for arch in kernel}
    assert len(names) == len(resources()) * len(architectures)


def test_no_stack_no_local_memory_no_static_shared_memory() -> None:
    for name, kernel in resources().items():
        for arch, usage in kernel.items():
            assert (usage.stack, usage.local) == (0, 0), (name, arch, usage)
            assert usage.shared <= BUDGET["static_shared"], (name, arch, usage)


def test_registers_within_budget() -> None:
    over = []
    compared = 0
    for name, kernel in resources().items():
        for arch, usage in kernel.items():
            allowed = BUDGET["registers"][name].get(arch)
            if allowed is None:
                continue  # an architecture without a committed budget
            compared += 1
            if usage.registers > allowed:
                over.append(f"{name} {arch}: {usage.registers} registers, budget {allowed}")
    assert compared, f"no architecture of this build has a budget: {sorted(BUDGET['registers'])[0]}"
    assert not over, "\n".join([*over, RENEW])


def test_registers_allow_the_launch() -> None:
    for name, kernel in resources().items():
        threads, blocks = LAUNCH_BOUNDS[name.partition("<")[0]]
        for arch, usage in kernel.items():
            rounded = (usage.registers + 7) // 8 * 8
            assert rounded * threads * blocks <= 65536, (name, arch, usage)


def test_machine_code() -> None:
    """No local memory and no atomics in what really runs, and 16-byte loads of values.

    On one architecture: the disassembler takes its time, and the others' resources tell of local memory.
    """
    architectures = {arch for kernel in resources().values() for arch in kernel}
    arch = "sm_90" if "sm_90" in architectures else max(architectures)
    code = machine_code(arch)
    assert sorted(code) == sorted(resources())
    for name, text in code.items():
        instructions = set(OPCODE.findall(text))
        assert not instructions & {"LDL", "STL"}, (name, "local memory")
        assert not instructions & {"ATOM", "ATOMG", "ATOMS", "RED", "REDG"}, (name, "atomics")
        if name.startswith("reduce_"):
            assert "LDG.E.128" in text, (name, "no 16-byte loads")


def test_all_targets_have_the_same_kernels() -> None:
    assert ptx(), "the library holds no PTX: newer GPUs could not run it"
    for target, kernels in ptx().items():
        assert sorted(kernels) == sorted(resources()), target
