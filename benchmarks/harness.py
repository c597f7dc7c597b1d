# SPDX-License-Identifier: Apache-2.0
"""Timing on a machine that others use too: every round measures every method once, so noise meets all of them.

With one thread on the CPU the clock is that thread's CPU time, which other processes disturb little; else wall time.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch

QUIET_SHARE = 0.25
FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds a call. ``quiet`` is the median of the quietest quarter of the rounds, the others are of all."""

    quiet: float
    median: float
    p10: float
    p90: float
    rounds: int

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Effort:
    """How much to measure, and which methods not.

    round_us: a short method is called again and again within a round until it has taken about this long. slow_us: a
    method slower than this is not warmed up, and takes part in every tenth round only where others are faster. seconds:
    of a case; it may take longer, since every method is measured FEWEST_SAMPLES times in any case.
    """

    rounds: int = 200
    round_us: float = 300.0
    slow_us: float = 20_000.0
    warmup: int = 3
    seconds: float = 10.0
    without: tuple[str, ...] = ()

    @classmethod
    def quick(cls) -> Effort:
        return cls(rounds=5, round_us=50.0, warmup=1, seconds=0.5)


def time_calls(call: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds a call, of ``calls`` calls one after the other; on a GPU until the last has ended."""
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) / calls * 1e6


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compare(
    methods: dict[str, Callable[[], object]],
    device: str,
    effort: Effort,
    before_each: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times all methods in interleaved rounds.

    before_each: untimed work before every single call, such as emptying caches.
    """
    calls, slow = {}, set()
    for name, method in methods.items():
        estimate = time_calls(method, 1, device)
        if estimate > effort.slow_us:
            slow.add(name)
        else:
            for _ in range(effort.warmup):
                method()
            estimate = min(time_calls(method, 1, device) for _ in range(2))
        calls[name] = 1 if before_each else max(1, min(50, int(effort.round_us / max(estimate, 0.1))))
    rare = slow if len(slow) < len(methods) and effort.rounds > 10 * FEWEST_SAMPLES else set()
    samples: dict[str, dict[int, float]] = {name: {} for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle
    end = time.perf_counter() + effort.seconds
    with _no_garbage_collection():
        for i in range(effort.rounds):
            if time.perf_counter() > end and min(map(len, samples.values())) >= FEWEST_SAMPLES:
                break
            shuffle(order)  # nobody always runs after the same neighbour
            for name in order:
                if name in rare and i % 10:
                    continue
                if before_each:
                    before_each()
                elif name not in slow:
                    methods[name]()  # brings its own data and threads back
                samples[name][i] = time_calls(methods[name], calls[name], device)
    return summarize(samples)


def summarize(samples: dict[str, dict[int, float]]) -> dict[str, Timing]:
    """samples: of every method, round -> microseconds.

    A round's noise is the mean, over its methods, of time / the method's median: one number for all methods, so that
    the quietest quarter is the same for everyone and favours nobody.
    """
    medians = {name: statistics.median(times.values()) for name, times in samples.items()}
    noise: dict[int, list[float]] = {}
    for name, times in samples.items():
        for i, t in times.items():
            noise.setdefault(i, []).append(t / medians[name])
    ranked = sorted(noise, key=lambda i: statistics.mean(noise[i]))
    result = {}
    for name, times in samples.items():
        present = [i for i in ranked if i in times]
        quiet = present[: max(1, int(len(present) * QUIET_SHARE))]
        p10, p90 = np.quantile(list(times.values()), [0.1, 0.9])
        result[name] = Timing(
            quiet=statistics.median(times[i] for i in quiet),
            median=medians[name],
            p10=float(p10),
            p90=float(p90),
            rounds=len(times),
        )
    return result
