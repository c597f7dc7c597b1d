# SPDX-License-Identifier: Apache-2.0
"""Bad input on the device: an error before any launch, naming the argument. tests/python has the full list."""

from __future__ import annotations

import pytest
import segscatter
import torch
from simulation import cudasim
from support import run

VALUES, CU, IDS = torch.ones(6), torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"group_ids": IDS[:2]}, ValueError, "group_ids has 2 elements for the 3 segments"),
        ({"mask": torch.ones(3)}, ValueError, "mask has 3 elements for 6 tokens"),
        ({"cu_seqlens": CU[:0]}, ValueError, "cu_seqlens is empty"),
        ({"cu_seqlens": CU.float()}, TypeError, "cu_seqlens must be int32 or int64, but is Float"),
        ({"num_groups": -1}, ValueError, "num_groups must not be negative"),
    ],
)
def test_bad_arguments(change: dict, error: type, message: str) -> None:
    arguments = {"values": VALUES, "cu_seqlens": CU, "group_ids": IDS, "num_groups": 2, **change}
    arguments = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        segscatter.segment_scatter_reduce(**arguments)
    if cudasim:
        assert not cudasim.log("launch")


@pytest.mark.parametrize("name", ["cu_seqlens", "group_ids", "mask"])
def test_tensors_on_two_devices(name: str) -> None:
    arguments = {"cu_seqlens": CU.cuda(), "group_ids": IDS.cuda(), "mask": torch.ones(6).cuda()}
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match=rf"{name} is on cpu, but values is on cuda:0"):
        segscatter.segment_scatter_reduce(VALUES.cuda(), num_groups=2, **arguments)


def test_validate_reads_the_device() -> None:
    cu = torch.tensor([0, 4, 3, 6]).cuda()
    with pytest.raises(ValueError, match="cu_seqlens decreases at position 2: 4, then 3"):
        segscatter.validate(cu, IDS.cuda(), 2, 6)
    segscatter.validate(CU.cuda(), IDS.cuda(), 2, 6)


CALL = (
    "import torch, segscatter\n"
    "x, cu, ids = torch.ones(6).cuda(), torch.tensor([0, 4, {third}]).cuda(), torch.tensor([0, 1]).cuda()\n"
    "print(segscatter.segment_scatter_reduce(x, cu, ids, {groups})[0].cpu()[:2].tolist())"
)


def test_validation_of_every_call() -> None:
    call = CALL.format(third=3, groups=2)
    assert "decreases at position 2" in run(call, SEGSCATTER_VALIDATE="1")


def test_unknown_path() -> None:
    call = CALL.format(third=6, groups=2)
    for path in ("fast", "one_launch:3"):
        message = run(call, SEGSCATTER_CUDA_PATH=path)
        assert "SEGSCATTER_CUDA_PATH must be one_launch, " in message
        assert message.endswith(f"but is {path}")


def test_path_that_sizes_do_not_allow() -> None:
    call = CALL.format(third=6, groups=6000)
    assert "too many groups" in run(call, SEGSCATTER_CUDA_PATH="two_launches")
    assert run(call, SEGSCATTER_CUDA_PATH="") == "[4.0, 2.0]"


@pytest.mark.simulated
def test_no_kernels_for_this_gpu() -> None:
    """A device older than every architecture of the build: the message says what there is and what to set."""
    call = CALL.format(third=6, groups=2)
    message = run(call, CUDASIM_CC="5.0")
    assert "segscatter has no CUDA kernels for this GPU" in message
    assert segscatter.build_info()["cuda_architectures"] in message
    assert "TORCH_CUDA_ARCH_LIST" in message


def test_errors_leave_the_device_usable() -> None:
    with pytest.raises(ValueError):
        segscatter.segment_scatter_reduce(VALUES.cuda(), CU.cuda(), IDS[:2].cuda(), 2)
    sums, _ = segscatter.segment_scatter_reduce(VALUES.cuda(), CU.cuda(), IDS.cuda(), 2)
    assert sums.cpu().tolist() == [4, 2]
