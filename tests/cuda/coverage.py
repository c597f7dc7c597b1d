# SPDX-License-Identifier: Apache-2.0
"""Merges the PTX coverage of all runs of simulate.sh: `coverage.py FOLDER [--list]`.

A kernel's PTX is the same for some targets; their runs then count together. A conditional branch counts as soon as it
is reached, taken or not: what it would jump to counts by itself. Instructions that no run reached are reported, unless
coverage_argued.txt says of a row of them why no run can; --list prints all of them, --strict makes them an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ARGUED = Path(__file__).with_name("coverage_argued.txt")
ROW = 20  # how many instructions of a row are looked at


def arguments() -> list[tuple[re.Pattern, re.Pattern]]:
    """Patterns of kernels and of the beginning of a row, its instructions joined by "; ". The reasons are comments."""
    lines = [line for line in ARGUED.read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(map(re.compile, line.split(None, 1))) for line in lines]


def main() -> int:
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    if not files:
        print("coverage: no run has left a record")
        return 1
    texts: dict[tuple[str, str], list[str]] = {}
    hits: dict[tuple[str, str], list[int]] = {}
    targets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in files:
        for name, kernel in json.loads(file.read_text()).items():
            key = tuple(name.split())
            texts[key] = kernel["text"]
            targets[key].add(kernel["target"])
            old = hits.get(key, [0] * len(kernel["text"]))
            hits[key] = [a | b for a, b in zip(old, kernel["hit"], strict=True)]
    for key, text in texts.items():
        for i in range(1, len(text)):
            hits[key][i] |= hits[key][i - 1] and text[i].startswith("@bra")

    argued = arguments()
    total = missed = excused = 0
    for key in sorted(texts):
        name, _ = key
        left = []
        excuse = None  # of the row of missed instructions that goes on here
        for i, (text, hit) in enumerate(zip(texts[key], hits[key], strict=True)):
            total += 1
            if hit:
                excuse = None
                continue
            if excuse is None:
                row = "; ".join(texts[key][i : i + ROW])
                excuse = any(kernel.search(name) and begin.search(row) for kernel, begin in argued)
            if excuse:
                excused += 1
            else:
                left.append((i, text))
        missed += len(left)
        if left:
            print(
                f"coverage: {len(left)} of {len(texts[key])} instructions of {name} ({', '.join(sorted(targets[key]))})"
            )
        if left and "--list" in sys.argv:
            for i, text in left:
                print(f"    {i:5d}  {text}")
    print(
        f"coverage: {total - missed - excused} of {total} PTX instructions of {len(texts)} kernels ran, "
        f"{excused} argued, {missed} missed"
    )
    return missed != 0 and "--strict" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
