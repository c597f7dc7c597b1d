# SPDX-License-Identifier: Apache-2.0
"""Measures segscatter against the usual ways, other libraries and floors.

    python -m benchmarks.run --suite reference          # the README's table
    python -m benchmarks.run --suite all --quick        # does everything still run? (no result of use)

Results go to benchmarks/results as JSON, Markdown and PNG (plots need matplotlib). Every measured call is first checked
against float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from . import report
from .harness import Effort
from .suites import SUITES


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=[*SUITES, "all"], required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU (1: the clock is CPU time)")
    parser.add_argument("--quick", action="store_true", help="a few small cases, for breakage and not for numbers")
    parser.add_argument("--seconds", type=float, help="time limit of each case")
    parser.add_argument("--without", action="append", default=[], metavar="METHOD", help="leave out a (slow) method")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("skipped: there is no GPU")
    if options.threads or options.quick:  # where CI shares its cores, waiting for threads would take most of the time
        torch.set_num_threads(options.threads or 1)
    effort = Effort.quick() if options.quick else Effort()
    effort = dataclasses.replace(effort, without=tuple(options.without), seconds=options.seconds or effort.seconds)
    for suite in SUITES if options.suite == "all" else [options.suite]:
        rows = []
        for row in SUITES[suite](options.device, options.quick, effort):
            rows.append(row)
            print(f"{suite}: {row.case}")
            for name, timing in row.timings.items():
                print(f"  {timing.quiet:12.1f} us  {name}")
            for name, why in row.skipped.items():
                print(f"       skipped     {name}: {why}")
            report.write(options.out, suite, options.device, rows, options.quick)  # what is stopped keeps its rows
        report.plot(options.out, suite, options.device, rows)
    if options.device == "cpu" and not torch.cuda.is_available():
        print("skipped: everything on CUDA, for want of a GPU")


if __name__ == "__main__":
    main()
