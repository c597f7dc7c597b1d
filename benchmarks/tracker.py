# SPDX-License-Identifier: Apache-2.0
"""What a training loop pays around the operator: the tracker, the collator's encoding, the reduction over ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import segscatter
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import cases
from .harness import Effort, Timing, compare, summarize

Result = tuple[str, dict[str, float], dict[str, Timing]]
CHANNELS = [f"channel_{g}" for g in range(8)]
FLUSH_BYTES = 64 << 20


def tracker_suite(device: str, quick: bool, effort: Effort) -> Iterator[Result]:
    yield update(device, effort)
    for fresh in (False, True):
        yield encoding(device, 1024 if quick else 16384, fresh, effort)
    yield cold_call(device, effort)
    for processes in (2,) if quick else (2, 4):
        yield reduction(processes, 5 if quick else 200)


def update(device: str, effort: Effort) -> Result:
    """``update`` against the operator call that it makes."""
    case = cases.make_case("update", 131072, 1024, device=device)
    tracker = segscatter.ChannelLossTracker(segscatter.ChannelRegistry(CHANNELS), device=device)
    groups = tracker.registry.num_groups
    sums = torch.zeros(groups, dtype=torch.float64, device=device)
    counts = torch.zeros(groups, dtype=torch.int64, device=device)

    def operator():
        segscatter.segment_scatter_accumulate_(
            sums, counts, case.losses, case.cu_seqlens, case.group_ids, mask=case.mask
        )

    def whole_update():
        tracker.update(case.losses, case.mask, case.group_ids, cu_seqlens=case.cu_seqlens, mode="train")

    timings = compare({"tracker.update": whole_update, "operator alone": operator}, device, effort)
    return "tracker.update, 1024 documents", case.coordinates, timings


def encoding(device: str, documents: int, fresh: bool, effort: Effort) -> Result:
    """Names of documents to an id tensor: the native encoder against a list comprehension.

    fresh: every name of every call is a new string, as decoders of data sets make them; else few strings are shared.
    """
    registry = segscatter.ChannelRegistry(CHANNELS)
    generator = torch.Generator().manual_seed(cases.SEED)
    names = [CHANNELS[i] for i in torch.randint(len(CHANNELS), (documents,), generator=generator)]
    slots = {name: slot for slot, name in enumerate(registry.names)}

    def comprehension():
        return torch.tensor([slots[name] for name in names], dtype=torch.int32)

    def renew():
        names[:] = [name.encode().decode() for name in names]

    if not torch.equal(registry.encode(names).cpu(), comprehension()):
        raise AssertionError("registry.encode and a list comprehension disagree")
    methods = {"registry.encode": lambda: registry.encode(names), "comprehension + torch.tensor": comprehension}
    kind = "fresh strings" if fresh else "shared strings"
    timings = compare(methods, "cpu", effort, before_each=renew if fresh else None)
    return f"encoding {documents} names, {kind}", {"documents": documents}, timings


def cold_call(device: str, effort: Effort) -> Result:
    """A call after something else has filled the caches (the first two levels of a CPU)."""
    case = cases.make_case("cold", 131072, 1024, device=device)
    other = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def operator():
        segscatter.segment_scatter_reduce(case.losses, case.cu_seqlens, case.group_ids, 8, mask=case.mask)

    timings = compare({"after other work": operator}, device, effort, before_each=lambda: other.add_(1))
    return "one call on cold caches, 1024 documents", case.coordinates, timings


def reduction(processes: int, rounds: int) -> Result:
    """``reduce`` against a gather of dicts as pickled objects, both on gloo with ``processes`` ranks of one thread."""
    with mp.get_context("spawn").Manager() as manager:
        result = manager.dict()
        mp.spawn(_reduction_rank, (processes, rounds, _free_port(), result), nprocs=processes)
        return f"reduce, {processes} processes", {"processes": processes}, summarize(dict(result))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _reduction_rank(rank: int, processes: int, rounds: int, port: int, result) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    tracker = segscatter.ChannelLossTracker(segscatter.ChannelRegistry(CHANNELS), device="cpu")
    case = cases.make_case("reduce", 4096, 64, device="cpu")

    def gather_objects():
        """As trainers aggregate today: lists of losses by name, every rank's pickled and sent to all."""
        local = {name: [1.0 * rank, float(slot + 1)] for slot, name in enumerate(CHANNELS)}
        gathered: list = [None] * processes
        dist.all_gather_object(gathered, local)
        totals: dict[str, list[float]] = {}
        for part in gathered:
            for name, (total, count) in part.items():
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return totals

    samples: dict[str, dict[int, float]] = {"tracker.reduce": {}, "all_gather_object": {}}
    for i in range(-3, rounds):
        tracker.update(case.losses, case.mask, case.group_ids, cu_seqlens=case.cu_seqlens, mode="train")
        for name, call in ("tracker.reduce", lambda: tracker.reduce("train")), ("all_gather_object", gather_objects):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if i >= 0:
                samples[name][i] = (time.perf_counter() - begin) * 1e6
    if rank == 0:
        result.update(samples)
    dist.barrier()
    dist.destroy_process_group()
