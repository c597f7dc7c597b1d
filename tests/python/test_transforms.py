# SPDX-License-Identifier: Apache-2.0
"""torch.func, autocast and DTensor: what the operators do inside torch's transformations of tensors and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import segscatter
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap loops
CU = torch.tensor([1, 7, 7, 30, 45])
IDS = torch.tensor([1, 0, -1, 1])
MASK = torch.arange(50) % 3 > 0


def reduce(values: Tensor, cu: Tensor = CU, ids: Tensor | None = IDS, mask: Tensor | None = MASK):
    return segscatter.segment_scatter_reduce(values, cu, ids, 3, mask=mask)


def gather(source: Tensor, cu: Tensor = CU, ids: Tensor | None = IDS, mask: Tensor | None = MASK) -> Tensor:
    return segscatter.segment_gather(source, cu, ids, 50, mask=mask)


def check_vmap(function: Callable, arguments: tuple[Tensor, ...], in_dims: tuple[int | None, ...]) -> None:
    """vmap gives what a loop over the batch gives, bit for bit."""
    size = next(a.shape[d] for a, d in zip(arguments, in_dims, strict=True) if d is not None)
    calls = [
        function(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
        for i in range(size)
    ]
    got = vmap(function, in_dims)(*arguments)
    if isinstance(got, Tensor):
        got, calls = (got,), [(call,) for call in calls]
    for part, wanted in zip(got, zip(*calls, strict=True), strict=True):
        assert torch.equal(part, torch.stack(wanted))


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_of_rows(dim: int) -> None:
    check_vmap(reduce, (torch.randn(5, 50).movedim(0, dim),), (dim,))
    check_vmap(gather, (torch.randn(5, 3).movedim(0, dim),), (dim,))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_of_several_rows_at_a_time(dim: int) -> None:
    check_vmap(reduce, (torch.randn(5, 2, 50).movedim(0, dim),), (dim,))
    check_vmap(gather, (torch.randn(5, 2, 3).movedim(0, dim),), (dim,))


def test_vmap_of_other_arguments() -> None:
    """Every element of the batch has documents, channels and a mask of its own."""
    cu = torch.stack([CU, torch.tensor([0, 0, 10, 20, 50])])
    ids = torch.tensor([[1, 0, -1, 1], [2, 2, 0, 1]])
    mask = torch.stack([MASK, ~MASK], dim=1)
    for values, dim in ((torch.randn(50), None), (torch.randn(2, 50), 0)):
        check_vmap(reduce, (values, cu, ids, mask), (dim, 0, 0, 1))
        check_vmap(reduce, (values, cu, IDS, MASK), (dim, 0, None, None))
        check_vmap(lambda v, m: reduce(v, mask=m), (values, mask), (dim, 1))
    check_vmap(gather, (torch.randn(2, 3), cu, ids, mask), (0, 0, 0, 1))
    check_vmap(gather, (torch.randn(3), CU, ids, MASK), (None, None, 0, None))
    check_vmap(lambda m: segscatter.segment_scatter_reduce(torch.ones(50), CU, None, 4, mask=m), (mask,), (1,))


def test_vmap_refuses_what_returns_nothing() -> None:
    sums, counts = torch.ones(4, 3), torch.ones(4, 3, dtype=torch.int64)

    def add(sums: Tensor, counts: Tensor, values: Tensor) -> Tensor:
        segscatter.segment_scatter_accumulate_(sums, counts, values, CU, IDS)
        return sums

    with pytest.raises(RuntimeError, match="Batching rule not implemented for segscatter::segment_scatter_accumulate_"):
        vmap(add)(sums, counts, torch.randn(4, 50))
    assert (sums == 1).all()


def test_levels_that_do_not_batch_the_arguments() -> None:
    """An inner vmap over something else, a derivative, and an outer vmap over the ids."""
    values, ids = torch.randn(2, 50), torch.tensor([[1, 0, -1, 1], [2, 2, 0, 1]])

    def gradient(v: Tensor, i: Tensor) -> Tensor:
        return grad(lambda x: vmap(lambda d: reduce(x, CU, i)[0].square().sum() + 0 * d)(torch.ones(3)).sum())(v)

    got = vmap(gradient)(values, ids)
    for n in range(2):
        sums = reduce(values[n], CU, ids[n])[0]
        torch.testing.assert_close(got[n], 6 * gather(sums, CU, ids[n]))


def test_nested_vmap() -> None:
    values = torch.randn(3, 4, 50)
    sums, counts = vmap(vmap(reduce))(values)
    want, n = reduce(values.flatten(0, 1))
    assert torch.equal(sums, want.unflatten(0, (3, 4)))
    assert torch.equal(counts, n.expand(3, 4, 3))


def test_vmap_says_what_is_wrong_with_arguments() -> None:
    with pytest.raises(ValueError, match="group_ids has 3 elements for the 4 segments"):
        vmap(lambda v: reduce(v, CU, IDS[:3]))(torch.randn(2, 50))
    with pytest.raises(ValueError, match=r"values must have shape \[T\] or \[K, T\]"):
        vmap(reduce)(torch.randn(2, 2, 2, 50))


def test_derivatives_of_torch_func() -> None:
    values, tangent = torch.randn(4, 50, dtype=torch.float64), torch.randn(4, 50, dtype=torch.float64)

    def loss(v: Tensor) -> Tensor:
        return reduce(v)[0].square().sum()

    gradients = torch.stack([2 * gather(reduce(v)[0]) for v in values])  # the derivative, by hand
    torch.testing.assert_close(grad(loss)(values[0]), gradients[0])
    torch.testing.assert_close(vmap(grad(loss))(values), gradients)
    torch.testing.assert_close(
        jvp(lambda v: reduce(v)[0], (values,), (tangent,)), (reduce(values)[0], reduce(tangent)[0])
    )
    jacobian = jacrev(lambda v: reduce(v)[0])(values[0])
    torch.testing.assert_close(jacobian @ tangent[0], reduce(tangent[0])[0])
    hessian = torch.func.hessian(loss)(values[0])
    torch.testing.assert_close(hessian @ tangent[0], 2 * gather(reduce(tangent[0])[0]))
    torch.testing.assert_close(
        jvp(gather, (reduce(values[0])[0],), (reduce(tangent[0])[0],))[1], gather(reduce(tangent[0])[0])
    )


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_operators_alone(autocast_dtype: torch.dtype) -> None:
    """Values come as autocast made them; sums and running sums stay float32 or float64, as without autocast."""
    weight = torch.randn(8, 1, requires_grad=True)
    inputs = torch.randn(50, 8)
    with torch.autocast("cpu", dtype=autocast_dtype):
        losses = (inputs @ weight).squeeze(1)
        assert losses.dtype == autocast_dtype
        sums, counts = reduce(losses)
        assert reduce(losses.double())[0].dtype == torch.float64
        assert segscatter.segment_scatter_reduce(losses, CU, IDS, 3, dtype=torch.float64)[0].dtype == torch.float64
        assert gather(sums).dtype == torch.float32
        running, number = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
        segscatter.segment_scatter_accumulate_(running, number, losses, CU, IDS, mask=MASK)
    want, want_counts = reduce(losses)
    assert sums.dtype == torch.float32
    assert torch.equal(sums, want)
    assert torch.equal(counts, want_counts)
    torch.testing.assert_close(running.float(), want)
    sums.sum().backward()
    live = gather(torch.ones(3))
    torch.testing.assert_close(weight.grad.squeeze(1), (live @ inputs), rtol=0.02, atol=0.2)


@pytest.fixture
def mesh(tmp_path) -> Iterator[object]:
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor_is_refused_and_its_local_tensor_works(mesh) -> None:
    """No placement of values alone says which tokens of which documents a rank holds; cp= and to_local() do."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    values = torch.randn(50)
    sharded = DTensor.from_local(values, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        reduce(sharded)
    cu, ids = (DTensor.from_local(t, mesh, [Replicate()]) for t in (CU, IDS))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"segment_scatter_reduce.*sharding strategy"):
        reduce(sharded, cu, ids, None)
    assert torch.equal(reduce(sharded.to_local())[0], reduce(values)[0])
