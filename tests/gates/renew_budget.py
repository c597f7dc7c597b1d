# SPDX-License-Identifier: Apache-2.0
"""Writes budget.json from the library as it is built now: `python tests/gates/renew_budget.py`. Look at the diff."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from binary import resources


def main() -> None:
    release = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    budget = {
        "compiler": next(line.split("release ")[1] for line in release.splitlines() if "release" in line),
        "static_shared": max(usage.shared for kernel in resources().values() for usage in kernel.values()),
        "registers": {
            name: {arch: kernel[arch].registers for arch in sorted(kernel, key=lambda a: int(a[3:].rstrip("af")))}
            for name, kernel in sorted(resources().items())
        },
    }
    lines = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(kernel)}" for name, kernel in budget.pop("registers").items()
    )
    head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in budget.items())
    path = Path(__file__).with_name("budget.json")
    path.write_text(f'{{\n{head},\n  "registers": {{\n{lines}\n  }}\n}}\n')
    print(f"{path.name}: {len(lines.splitlines())} kernels")


if __name__ == "__main__":
    main()
