# SPDX-License-Identifier: Apache-2.0
"""What a training loop pays around the operator: the tracker, the collator's encoding, the reduction over ranks."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import segscatter
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from segscatter import reference
from torch import Tensor

from . import baselines, cases, floors
from .harness import Effort, compare, summarize
from .methods import WrongError
from .record import FLOOR, Row

CHANNELS = [f"channel_{g}" for g in range(8)]
FLUSH_BYTES = 64 << 20


def tracker_tasks(device: str, quick: bool) -> Iterator[tuple[str, Callable[[Effort], Row]]]:
    for documents in (1024,) if quick else (128, 1024, 16384):
        name = f"update, {documents} documents"
        yield name, partial(update, name, device, documents)
    names = 1024 if quick else 16384
    for fresh in (False, True):
        name = f"encoding {names} names, {'fresh' if fresh else 'shared'} strings"
        yield name, partial(encoding, name, names, fresh)
    name = "one call on cold caches, 1024 documents"
    yield name, partial(cold_call, name, device)
    for processes in (2,) if quick else (2, 4):
        name = f"reduce, {processes} processes"
        yield name, partial(reduction, name, processes, 5 if quick else 200)


def update(name: str, device: str, documents: int, effort: Effort) -> Row:
    """``update`` against the operator call that it makes, and against the usual way of adding up."""
    case = cases.make_case(name, 131072, documents, device=device)
    tracker = segscatter.ChannelLossTracker(segscatter.ChannelRegistry(CHANNELS), device=device)
    groups = tracker.registry.num_groups
    sums = torch.zeros(groups, dtype=torch.float64, device=device)
    counts = torch.zeros(groups, dtype=torch.int64, device=device)
    running = torch.zeros(groups, 2, device=device)
    ids = case.group_ids.long()

    def operator():
        segscatter.segment_scatter_accumulate_(
            sums, counts, case.losses, case.cu_seqlens, case.group_ids, mask=case.mask
        )

    def whole_update():
        tracker.update(case.losses, case.mask, case.group_ids, cu_seqlens=case.cu_seqlens, mode="train")

    def usual():
        running.add_(reference.baseline_repeat_interleave(case.losses, case.cu_seqlens, ids, groups, case.mask))

    whole_update(), operator(), usual()
    right = cases.right_answer(case)
    counted = {"update": [stat.count for stat in tracker.reduce("train").values()], "operator": counts[:8].tolist()}
    for what, found in (counted | {"usual way": running[:8, 1].tolist()}).items():
        if found != right.counts.tolist():
            raise WrongError(f"{what} counts {found} instead of {right.counts.tolist()}")
    methods = {"tracker.update": whole_update, "operator alone": operator, "repeat_interleave, added up": usual}
    return Row(name, "tracker.update", compare(methods, device, effort), case.coordinates)


def encoding(name: str, documents: int, fresh: bool, effort: Effort) -> Row:
    """Names of documents to an id tensor: the native encoder against Python.

    fresh: every name of every call is a new string, as decoders of data sets make them; else few strings are shared.
    """
    registry = segscatter.ChannelRegistry(CHANNELS)
    generator = torch.Generator().manual_seed(cases.SEED)
    names = [CHANNELS[i] for i in torch.randint(len(CHANNELS), (documents,), generator=generator)]
    slots = {name: slot for slot, name in enumerate(registry.names)}

    def native() -> Tensor:
        return registry.encode(names)

    def comprehension() -> Tensor:
        return torch.tensor([slots[name] for name in names], dtype=torch.int32)

    def mapped() -> Tensor:
        return torch.from_numpy(np.fromiter(map(slots.__getitem__, names), np.int32, len(names)))

    def renew() -> None:
        names[:] = [name.encode().decode() for name in names]

    methods = {
        "registry.encode": native,
        "[slots[name] ...] + torch.tensor": comprehension,
        "map(slots.__getitem__) + numpy.fromiter": mapped,
    }
    for what, method in methods.items():
        if not torch.equal(method(), comprehension()):
            raise WrongError(f"{what} encodes wrongly")
    timings = compare(methods, "cpu", effort, before_each=renew if fresh else None)
    return Row(name, "registry.encode", timings, {"documents": documents})


def cold_call(name: str, device: str, effort: Effort) -> Row:
    """One call after something else has filled the caches (of a CPU: the first two levels)."""
    case = cases.make_case(name, 131072, 1024, device=device)
    other = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)
    methods = {"segscatter": baselines.ours(case), "repeat_interleave + index_add_": baselines.repeat_interleave(case)}
    if device == "cpu":
        methods[f"{FLOOR}C++ read of the bytes"] = floors.read(case)
    timings = compare(methods, device, effort, before_each=lambda: other.add_(1))
    return Row(name, "segscatter", timings, case.coordinates)


def reduction(name: str, processes: int, rounds: int, effort: Effort) -> Row:
    """``reduce`` against a gather of names as objects and an all_reduce, on gloo with ``processes`` of one thread."""
    with tempfile.TemporaryDirectory(prefix="segscatter-benchmark-") as folder:
        result = Path(folder) / "samples.json"
        mp.spawn(_reduction_rank, (processes, rounds, _free_port(), str(result)), nprocs=processes)
        samples = {what: dict(enumerate(times)) for what, times in json.loads(result.read_text()).items()}
    return Row(name, "tracker.reduce", summarize(samples), {"processes": processes})


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def aggregate_by_name(local: dict[str, Tensor]) -> dict[str, list[float]]:
    """As trainers aggregate today: names are gathered as pickled objects, then their sums and counts are reduced."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(local))
    names = sorted(set().union(*everywhere))
    totals = torch.stack([local[name] if name in local else torch.zeros(2) for name in names])
    dist.all_reduce(totals)
    return dict(zip(names, totals.tolist(), strict=True))


def _reduction_rank(rank: int, processes: int, rounds: int, port: int, result: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    tracker = segscatter.ChannelLossTracker(segscatter.ChannelRegistry(CHANNELS), device="cpu")
    case = cases.make_case("reduce", 4096, 64, device="cpu")
    totals = baselines.repeat_interleave(case)()
    local = {name: torch.stack([totals[0][slot], totals[1][slot]]) for slot, name in enumerate(CHANNELS)}
    calls = {"tracker.reduce": lambda: tracker.reduce("train"), "object gather": lambda: aggregate_by_name(local)}
    samples: dict[str, list[float]] = {what: [] for what in calls}
    for i in range(-3, rounds):  # the first three warm up
        tracker.update(case.losses, case.mask, case.group_ids, cu_seqlens=case.cu_seqlens, mode="train")
        found = {}
        for what in list(calls)[:: 1 if i % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            found[what] = calls[what]()
            if i >= 0:
                samples[what].append((time.perf_counter() - begin) * 1e6)
        if {name: stat.count for name, stat in found["tracker.reduce"].items()} != {
            name: count for name, (_, count) in found["object gather"].items()
        }:
            raise WrongError(f"the reductions disagree: {found}")
    if rank == 0:
        Path(result).write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()
