# SPDX-License-Identifier: Apache-2.0
"""Measures segscatter against the usual ways, other libraries and floors.

    python -m benchmarks.run --suite reference                     # the README's table
    python -m benchmarks.run --documents 300 --tokens 65536        # your shapes: what would you gain?
    python -m benchmarks.run --suite all --quick                   # does everything still run? (no result of use)

Every measured call is first checked against float64. Results are shown, and written to --out as JSON, Markdown and PNG.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path

import torch

from . import cases, plots, report, tables
from .harness import Effort
from .machine import environment, watch_others
from .record import Results
from .suites import COMPILED, CUDA_ONLY, SUITES, Task, own_suite

LENGTHS = {
    "equal": cases.lengths_equal,
    "random": cases.lengths_random,
    "zipf": cases.lengths_zipf,
    "log-normal": cases.lengths_log_normal,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DEFAULTS = {"tokens": [131072], "documents": [1024], "groups": 8, "live": 0.25, "dtype": "float32", "lengths": "equal"}
KEPT = Path(__file__).parent / "results"


def number(kind: type, low: float, high: float, text: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be a number from {low} to {high}, but is {text!r}")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = partial(number, int, 1, 2**31 - 1)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--suite", choices=[*SUITES, "all"])
    what.add_argument("--only", action="append", default=[], metavar="TEXT", help="only cases with TEXT in their name")
    what.add_argument("--list", action="store_true", help="name the cases and measure nothing")
    what.add_argument("--without", action="append", default=[], metavar="METHOD", help="leave out a (slow) method")
    what.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    what.add_argument("--threads", type=count, help="torch's threads on the CPU (1: the clock is CPU time)")
    own = parser.add_argument_group("your shapes (instead of a suite; several values: every combination)")
    own.add_argument("--tokens", type=count, nargs="+", metavar="T", help="in the packed row (131072)")
    own.add_argument("--documents", type=count, nargs="+", metavar="N", help="in the row (1024)")
    own.add_argument("--groups", type=count, metavar="G", help="channels (8)")
    own.add_argument("--live", type=partial(number, float, 0, 1), help="share of tokens with a loss (0.25)")
    own.add_argument("--dtype", choices=DTYPES, help="of the losses (float32)")
    own.add_argument("--lengths", choices=LENGTHS, help="of documents (equal); log-normal: until the row is full")
    own.add_argument("--rows", type=count, metavar="K", help="values of every token (one row)")
    own.add_argument("--labels", action="store_true", help="int64 labels with -100 as the mask, instead of bool")
    how = parser.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="a few small cases, for breakage and not for numbers")
    how.add_argument("--seconds", type=partial(number, float, 0, 1e6), help="time limit of each case (10)")
    how.add_argument("--out", type=Path, help="folder for results (a suite that is not quick: benchmarks/results)")
    options = parser.parse_args(arguments)

    given = [name for name in (*DEFAULTS, "rows", "labels") if getattr(options, name)]
    if options.live is not None and "live" not in given:
        given.append("live")
    if not options.suite and not given:
        parser.error("give --suite, or your shapes with --tokens, --documents...")
    if options.suite and given:
        parser.error(f"--suite {options.suite} has its own shapes: leave out --{given[0]}, or --suite")
    if options.lengths == "log-normal" and options.documents:
        parser.error("--lengths log-normal fills the row, whatever --documents says: leave out one of them")
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.out is None and options.suite and not options.quick:
        options.out = KEPT
    return options


def suites(options: argparse.Namespace) -> dict[str, list[Task]]:
    """The tasks that are asked for, by suite."""
    if options.suite:
        names = SUITES if options.suite == "all" else [options.suite]
        return {name: list(SUITES[name](options.device, options.quick)) for name in names}
    documents = [0] if options.lengths == "log-normal" else options.documents
    shape = {
        "live": options.live,
        "groups": options.groups,
        "dtype": DTYPES[options.dtype],
        "lengths": LENGTHS[options.lengths],
        "rows": options.rows or 0,
        "labels": options.labels,
    }
    return {"own": list(own_suite(options.device, options.tokens, documents, **shape))}


def chosen(tasks: list[Task], only: list[str]) -> list[Task]:
    return [task for task in tasks if not only or any(text in task.name for text in only)]


def run_suite(suite: str, tasks: list[Task], effort: Effort, options: argparse.Namespace) -> None:
    results = Results(suite, environment(options.device, options.quick), [])
    names = [task.name for task in tasks]
    kept = options.out / f"{results.stem}.json" if options.out else None

    def whole() -> Results:
        return results.merged_into(kept, names) if options.only else results

    if kept:
        whole()  # refuses another environment before anything is measured
    for task in chosen(tasks, options.only):
        others = watch_others()
        row = dataclasses.replace(task.measure(effort), others=others())
        results.rows.append(row)
        report.print_row(suite, row)
        if kept:
            report.write(whole(), options.out)  # what is stopped keeps its rows
    if suite == "own":
        print("", *map(report.gain, results.rows), sep="\n")
    if suite == "reference" and not options.only:
        print("\nThe README's table:\n", *tables.readme(results), "", sep="\n")
    if kept:
        for path in plots.plot(whole(), options.out):
            print(f"plotted {path}")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    wanted = suites(options)
    tasks = [task for suite in wanted.values() for task in chosen(suite, options.only)]
    if not tasks:
        sys.exit(f"no case has {' or '.join(options.only)} in its name; --list names them")
    if options.list:
        print("\n".join(f"{suite}: {task.name}" for suite in wanted for task in chosen(wanted[suite], options.only)))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        for suite in wanted:
            for task in chosen(wanted[suite], options.only):
                print(f"skipped (no GPU): {suite}: {task.name}")
        print(f"skipped {len(tasks)} cases on cuda: this machine has no GPU that torch can use")
        return
    if options.threads or options.quick:  # where CI shares its cores, waiting for threads would take most of the time
        torch.set_num_threads(options.threads or 1)
    effort = Effort.quick() if options.quick else Effort()
    seconds = effort.seconds if options.seconds is None else options.seconds
    slow = [COMPILED.name] if options.quick else []  # compiles for longer than all the rest takes
    effort = dataclasses.replace(effort, without=(*options.without, *slow), seconds=seconds)
    for suite, its_tasks in wanted.items():
        if chosen(its_tasks, options.only):
            run_suite(suite, its_tasks, effort, options)
    if options.device == "cpu" and not torch.cuda.is_available():
        names = ", ".join(method.name for method in CUDA_ONLY)
        print(f"skipped: --device cuda, and with it {names}: this machine has no GPU that torch can use")


if __name__ == "__main__":
    main()
