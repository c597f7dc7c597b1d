# SPDX-License-Identifier: Apache-2.0
"""Per-sample losses of RL trainers: sum over samples of masked means, for K metrics, forward and with backward.

    python -m benchmarks.rl                     # the first table of docs/rl.md
    python -m benchmarks.rl --operators         # the second: the operators, a group per segment against 8 groups
    python -m benchmarks.rl --device cuda

Contenders, on the same tokens:

* loop: a Python loop over samples for every metric, as slime has it;
* padded: ``[K, S, longest]`` arithmetic, on values that are padded already;
* functional: ``sum_of_segment_means``, from ``cu_seqlens`` and one mask that are on the device already;
* reducer: a ``SampleReducer`` that is there already;
* built: the same, built anew from S masks before every call (trainers build one for some ten metrics).

Contenders take turns, round by round, and medians are shown; :mod:`benchmarks.harness` has the clock.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from segscatter import segment_gather, segment_scatter_reduce, sum_of_segment_means
from segscatter.rl import SampleReducer
from torch import Tensor

from .harness import Effort, compare


@dataclass
class Case:
    """Samples of random lengths, between 0 and twice the average, and a mask that leaves 80 % of the tokens live."""

    num_tokens: int
    num_samples: int
    num_metrics: int
    device: torch.device

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.num_samples)
        shares = torch.rand(self.num_samples, generator=generator, dtype=torch.float64)
        ends = (shares.cumsum(0) / shares.sum() * self.num_tokens).round().long()
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(self.device)
        self.lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        self.mask = (torch.rand(self.num_tokens, generator=generator) < 0.8).int().to(self.device)
        self.masks = list(self.mask.split(self.lengths))
        shape = (self.num_metrics, self.num_tokens)
        self.values = torch.randn(shape, generator=generator).to(self.device).requires_grad_()
        self.padded = torch.stack([self._pad(row.detach()) for row in self.values]).requires_grad_()
        self.padded_mask = self._pad(self.mask)

    def _pad(self, row: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(row.split(self.lengths), batch_first=True)

    def contenders(self) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
        """Name -> (values to K results, values)."""
        reducer = SampleReducer(self.lengths, self.masks)
        functions = {
            "loop": lambda values: torch.stack([loop(row, self.lengths, self.masks) for row in values]),
            "padded": lambda values: padded(values, self.padded_mask),
            "functional": lambda values: sum_of_segment_means(values, self.cu_seqlens, mask=self.mask),
            "reducer": reducer,
            "built": lambda values: SampleReducer(self.lengths, self.masks)(values),
        }
        return {name: (f, self.padded if name == "padded" else self.values) for name, f in functions.items()}


def loop(values: Tensor, lengths: list[int], masks: list[Tensor]) -> Tensor:
    parts = values.split(lengths)
    return sum((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(parts, masks, strict=True))


def padded(values: Tensor, mask: Tensor) -> Tensor:
    return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum(-1)


def forward(function: Callable[[Tensor], Tensor], values: Tensor) -> None:
    with torch.no_grad():
        function(values)


def forward_backward(function: Callable[[Tensor], Tensor], values: Tensor) -> None:
    values.grad = None
    function(values).sum().backward()


DIRECTIONS = {"forward": forward, "forward_backward": forward_backward}


def measure(calls: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of every call."""
    effort = Effort(rounds=rounds, round_us=1000, slow_us=float("inf"), seconds=float("inf"))
    return {name: timing.median * 1e-6 for name, timing in compare(calls, device.type, effort).items()}


def cases(
    tokens: list[int], samples: list[int], metrics: list[int], device: torch.device
) -> Iterator[tuple[dict[str, int | str], dict[str, Callable[[], None]]]]:
    """Sizes and direction of a case, and what to measure: contenders that were found to agree."""
    for num_tokens, num_samples, num_metrics in itertools.product(tokens, samples, metrics):
        contenders = Case(num_tokens, num_samples, num_metrics, device).contenders()
        wanted = contenders["loop"][0](contenders["loop"][1])
        for function, values in contenders.values():
            torch.testing.assert_close(function(values), wanted, rtol=1e-4, atol=1e-3)
        for name, direction in DIRECTIONS.items():
            sizes = {"T": num_tokens, "S": num_samples, "K": num_metrics, "pass": name}
            yield sizes, {name: partial(direction, *contender) for name, contender in contenders.items()}


def operator_results(num_tokens: int, device: torch.device, rounds: int) -> Iterator[dict[str, float | int]]:
    """The operators with ``group_ids=None`` and with 8 groups, from one segment of all tokens to segments of one."""
    num_groups = 8
    values, mask = torch.randn(num_tokens, device=device), torch.rand(num_tokens, device=device) < 0.8
    for num_segments in [n for n in (1, 16, 256, 4096) if n < num_tokens] + [num_tokens]:
        cuts = torch.randperm(num_tokens - 1)[: num_segments - 1] + 1
        cu = torch.cat([torch.tensor([0, num_tokens]), cuts]).sort().values.to(device)
        ids = torch.randint(0, num_groups, (num_segments,), device=device)
        groupings = {"each": (None, num_segments), "grouped": (ids, num_groups)}
        calls = {}
        for name, (group_ids, count) in groupings.items():
            source = torch.randn(count, device=device)
            calls[f"reduce {name}"] = partial(segment_scatter_reduce, values, cu, group_ids, count, mask=mask)
            calls[f"gather {name}"] = partial(segment_gather, source, cu, group_ids, num_tokens, mask=mask)
        yield {"S": num_segments} | measure(calls, device, rounds)


def print_table(rows: Iterator[dict[str, float | int | str]], ratios: tuple[tuple[str, str], ...] = ()) -> None:
    """Markdown; floats are seconds and shown in microseconds."""
    for i, row in enumerate(rows):
        times = {key: f"{value * 1e6:.0f}" for key, value in row.items() if isinstance(value, float)}
        cells = {key: str(value) for key, value in row.items() if key not in times}
        cells |= {f"{key} us": value for key, value in times.items()}
        cells |= {f"{a} / {b}": f"{row[a] / row[b]:.1f}" for a, b in ratios}
        if i == 0:
            print("|", " | ".join(cells), "|")
            print("|", " | ".join("---" if cell == "pass" else "---:" for cell in cells), "|")
        print("|", " | ".join(cells.values()), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 32768])
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--metrics", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--operators", action="store_true", help="measure the operators themselves")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    if options.operators:
        for num_tokens in options.tokens:
            print_table(operator_results(num_tokens, options.device, options.rounds))
    else:
        measured = cases(options.tokens, options.samples, options.metrics, options.device)
        rows = (sizes | measure(calls, options.device, options.rounds) for sizes, calls in measured)
        print_table(rows, ratios=(("loop", "reducer"), ("padded", "reducer"), ("loop", "built")))


if __name__ == "__main__":
    main()
