# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the GoogleTest suites under CTest, plain and with sanitizers; sums up what ran and was skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = os.environ.get("MAX_JOBS", "2")
CONFIGURATIONS = {
    "cpp": ["-DSEGSCATTER_WERROR=ON"],
    "cpp-asan": ["-DSEGSCATTER_SANITIZE=address,undefined", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"],
}


def run(name: str, options: list[str]) -> tuple[int, int]:
    """Returns how many tests passed and how many were skipped; exits if one failed."""
    tree = ROOT / "build" / name
    configure = [
        *("cmake", "-S", ROOT, "-B", tree, "-G", "Ninja"),
        *("-DSEGSCATTER_TORCH=OFF", "-DSEGSCATTER_CUDA=OFF", "-DSEGSCATTER_BUILD_TESTS=ON"),
    ]
    subprocess.run([*configure, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", tree, "--parallel", JOBS], check=True)
    test = ["ctest", "--test-dir", tree, "--parallel", JOBS, "--output-on-failure", "--no-tests=error"]
    done = subprocess.run(test, capture_output=True, text=True)
    print("\n".join(line for line in done.stdout.splitlines() if "Skipped" in line or "tests passed" in line))
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return len(re.findall(r" Passed ", done.stdout)), len(re.findall(r"\*\*\*Skipped ", done.stdout))


def main() -> None:
    chosen = sys.argv[1:] or list(CONFIGURATIONS)
    results = {name: run(name, CONFIGURATIONS[name]) for name in chosen}
    for name, (passed, skipped) in results.items():
        print(f"{name}: {passed} passed, 0 failed, {skipped} skipped")


if __name__ == "__main__":
    main()
