# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model on files of this machine and follows the loss of every channel of its data.

    python examples/demo [--steps N] [--seed N] [--out FOLDER] [--quick]

Needs segscatter, torch and what requirements.txt names; no network, no GPU. The exit code is 1 when the figures of the
tracker and of a plain loop over the documents differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl when another program wants the cores

import torch
from check import MAX_RELATIVE_DIFFERENCE, DocumentLoop, Stopwatch
from corpus import installed_sources, load_documents
from model import ByteLM
from packing import PackedRow, mix, pack
from plot import plot_losses
from progress import Progress
from report import ChannelReport
from segscatter import ChannelLossTracker, ChannelRegistry

WEIGHTS = {"python": 0.35, "cpp": 0.30, "prose": 0.20, "data": 0.15}  # of the documents
LEARNING_RATE = 4e-3
WARMUP_STEPS = 15


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python examples/demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default: 240; with --quick 20)")
    parser.add_argument("--seed", type=int, default=0, help="chooses files, their order and the initial weights")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="a few seconds with a smaller model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = 20 if options.quick else 240
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, but is {options.steps}")
    return options


def load_corpus(seed: int) -> dict[str, list[bytes]]:
    corpus = {}
    for source in installed_sources():
        documents = corpus[source.channel] = load_documents(source, seed)
        print(f"{source.channel:<8}{sum(map(len, documents)) / 2**20:4.1f} MiB in {len(documents)} documents")
    return corpus


def train(
    model: ByteLM, rows: Iterable[PackedRow], steps: int, report_every: int
) -> tuple[ChannelReport, DocumentLoop, Stopwatch, Stopwatch]:
    """Trains for ``steps`` rows. Returns the tracker's and the loop's figures, and how long each of the two took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - 0.9 * step / steps)
    )
    registry = ChannelRegistry(list(WEIGHTS))
    tracker, tracker_time = ChannelLossTracker(registry, device="cpu"), Stopwatch()
    loop, loop_time = DocumentLoop(), Stopwatch()
    report, progress = ChannelReport(WEIGHTS), Progress(steps)

    for step, row in enumerate(islice(rows, steps), start=1):
        losses = model.token_losses(row.tokens, row.cu_seqlens)
        optimizer.zero_grad()
        losses[row.loss_mask].mean().backward()
        optimizer.step()
        schedule.step()
        losses = losses.detach()  # for the loop; the tracker does so itself

        # The two take turns in coming first, for the first finds cold caches behind a training step.
        for way in ("tracker", "loop") if step % 2 else ("loop", "tracker"):
            if way == "loop":
                with loop_time.lap():
                    loop.update(losses, row)
                continue
            with tracker_time.lap():
                ids = registry.encode(row.channels)
                tracker.update(losses, row.loss_mask, ids, cu_seqlens=row.cu_seqlens, mode="train")
                if step % report_every == 0 or step == steps:
                    report.add(step, tracker.reduce("train"))
        progress.show(step, report.status())
    return report, loop, tracker_time, loop_time


def agree(report: ChannelReport, loop: DocumentLoop) -> bool:
    """Says how far the tracker's figures are from the loop's; True when near enough."""
    if report.counts != loop.counts:
        print(f"FAILED: the tracker counted {dict(report.counts)} tokens, the loop over documents {loop.counts}")
        return False
    difference = loop.largest_difference(report.sums)
    good = difference <= MAX_RELATIVE_DIFFERENCE
    print(
        f"{'Checked' if good else 'FAILED'} against a plain loop over documents: counts equal, sums differ by "
        f"{difference:.1e} at most (relative, allowed {MAX_RELATIVE_DIFFERENCE:.0e})"
    )
    return good


def main(arguments: list[str] | None = None) -> int:
    start = time.monotonic()
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(min(torch.get_num_threads(), 8))  # more only wait for each other in so small a model
    row_length, report_every = (2048, 5) if options.quick else (8192, 10)
    model = ByteLM(dim=32, layers=1, heads=1) if options.quick else ByteLM()

    rows = pack(mix(load_corpus(options.seed), WEIGHTS, options.seed), row_length)
    size = sum(parameter.numel() for parameter in model.parameters())
    title = f"Byte-level language model, {size:,} parameters, {options.steps} steps of {row_length} tokens"
    print(f"{title}; losses in nats per byte", flush=True)
    report, loop, tracker_time, loop_time = train(model, rows, options.steps, report_every)

    print(f"\n{report.table()}\n")
    good = agree(report, loop)
    print(f"Time for {options.steps} steps of {loop.documents / options.steps:.0f} documents on average:")
    for name, watch in (("segscatter", tracker_time), ("loop", loop_time)):
        print(f"  {name:<12}{1e3 * watch.total:8.1f} ms in all, {1e6 * watch.median:7.1f} us per step (median)")
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "channel_losses.png"
    plot_losses(report.curves, title, picture)
    print(f"Loss curves: {picture}   ({time.monotonic() - start:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
