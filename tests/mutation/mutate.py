# SPDX-License-Identifier: Apache-2.0
"""Mutation test of the CUDA kernels: breaks them in one small way after another and sees whether the SIMT tests notice.

    python tests/mutation/mutate.py             # all mutants: about an hour on 2 cores
    python tests/mutation/mutate.py --quick     # every barrier and a sample of the rest
    python tests/mutation/mutate.py --list      # what would be tried
    python tests/mutation/mutate.py --only 17   # one of them

A mutant drops a barrier, a clause of a condition or a clamp, turns a strict comparison into a loose one or the other
way round, shifts an index by one, or switches a guard off. All mutants are compiled into one program (every mutated
expression becomes a choice by a global number), in three builds: plain, AddressSanitizer with UBSan, ThreadSanitizer.
A mutant is killed if any of them fails: a wrong answer, other bits under another schedule, a report of a sanitizer or
of the simulator, or much more CPU time than the unchanged kernels need.

Survivors have to be argued for in survivors.txt; the exit status is 0 if they all are.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
KERNELS = pathlib.Path("csrc/core/cuda")
SURVIVORS = pathlib.Path(__file__).with_name("survivors.txt")
# Declarations, constants and tables: nothing that could be broken in a way that only a test would notice.
UNTOUCHED = {"intrinsics.cuh", "kernels.cuh", "policy.h", "reduce_kernels.cuh"}
BARRIERS = ("block_barrier", "warp_barrier", "cluster_arrive", "cluster_wait", "wait_for_previous_kernel")

# Mutants that the patterns below do not make: (file, text, replacement).
EXPLICIT = [
    # Both halves of a cluster barrier together: one alone is refused by the simulator, which proves little.
    ("reduce.cuh", "cluster_arrive();\n  cluster_wait();", ";"),
    # A dead value is multiplied by zero instead of being left out.
    ("sum.cuh", "return float_of_bits(select_bits(bits, flags, i));",
     "return float_of_bits(bits) * (select_bits(~0u, flags, i) ? 1.f : 0.f);"),
    ("sum.cuh", "return flags & (0x80u << (8 * i)) ? value : 0.0;",
     "return value * (flags & (0x80u << (8 * i)) ? 1.0 : 0.0);"),
    # The compensation of the sum is lost.
    ("sum.cuh", "low += other.low;", ";"),
    ("sum.cuh", "low += (high - (sum - added)) + (value - added);", "low += value - added;"),
]  # fmt: skip

TOO_SLOW = "takes too much CPU time"
ARGUED, SURVIVED = "SURVIVED (argued)", "SURVIVED"

# How a build is run: (build, percent of the full effort).
PLAIN, ASAN, TSAN, FULL = ("simt_tests", 8), ("simt_tests_asan", 4), ("simt_tests_tsan", 1), ("simt_tests", 100)


@dataclasses.dataclass
class Mutant:
    number: int
    file: str
    line: int
    original: str
    changed: str
    is_barrier: bool
    occurrence: int  # the same change of the same text may be possible at several places of a file

    def key(self) -> str:
        """What survivors.txt calls it: independent of line numbers."""
        which = f" (#{self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.file}: {squeeze(self.original)}  =>  {squeeze(self.changed)}{which}"


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def blank_comments(text: str) -> str:
    """The same text, comments and string literals as blanks, so that offsets stay."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', lambda match: " " * len(match.group()), text)


def closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError("unbalanced parentheses")


def split_top(text: str, separator: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += {"(": 1, ")": -1, "[": 1, "]": -1, "{": 1, "}": -1}.get(c, 0)
        if depth == 0 and c == separator:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def regions(text: str):
    """Expressions worth changing: (begin, end, constants to put in place of a condition, None for others)."""
    found = []
    for match in re.finditer(r"\b(if|while) \(", text):
        begin = match.end()
        end = closing(text, begin - 1)
        leaves = re.match(r"\)\s*\{?\s*(return|continue|break)\b", text[end:])
        has_else = re.match(r"\)\s*\{[^{}]*\}\s*else", text[end:])
        fixed = [] if match.group(1) == "while" or has_else else ["false"] if leaves else ["true", "false"]
        found.append((begin, end, fixed))
    for match in re.finditer(r"\bfor \(", text):
        begin = match.end()
        parts = split_top(text[begin : closing(text, begin - 1)], ";")
        # Loops over registers have constant bounds, and are unrolled: beyond them is nothing to be found.
        if len(parts) == 3 and parts[1].strip() and not re.fullmatch(r" \w+ < (k\w+|\d+)( / (k\w+|\d+))?", parts[1]):
            start = begin + len(parts[0]) + 1
            found.append((start + 1, start + len(parts[1]), None))
    for match in re.finditer(r"(?:[^=!<>]=|\breturn) ([^;{}\[\]=]|\[[^\]\[]*\]|==|!=|<=|>=)+;", text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        begin = match.start() + (2 if match.group().lstrip()[0] != "r" and "return" not in match.group()[:7] else 6) + 1
        if "constexpr" not in text[line_start : match.start()]:
            found.append((begin, match.end() - 1, None))
    found.sort()
    last = 0
    for begin, end, fixed in found:
        if begin >= last and "[&]" not in text[begin:end]:
            yield begin, end, fixed
            last = end


def operand_bounds(text: str, at: int, length: int) -> tuple[int, int]:
    """Where the operands of the && or || at `at` begin and end."""
    stops = (" && ", " || ", " ? ", " : ", ", ")
    depth, begin = 0, at
    while begin > 0:
        c = text[begin - 1]
        depth += {")": 1, "(": -1}.get(c, 0)
        if depth < 0 or (depth == 0 and any(text.startswith(stop, begin - len(stop)) for stop in stops)):
            break
        begin -= 1
    depth, end = 0, at + length
    while end < len(text):
        c = text[end]
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth < 0 or (depth == 0 and any(text.startswith(stop, end) for stop in stops)):
            break
        end += 1
    return begin, end


def changes(expression: str, fixed: list[str] | None):
    """All ways to break one expression."""
    yield from fixed or []
    for old, new in ((" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > ")):
        for match in re.finditer(re.escape(old), expression):
            yield expression[: match.start()] + new + expression[match.end() :]
    for operator in (" && ", " || "):
        for match in re.finditer(re.escape(operator), expression):
            begin, end = operand_bounds(expression, match.start(), len(operator))
            yield expression[:begin] + expression[match.end() :]
            yield expression[: match.start()] + expression[end:]
    for match in re.finditer(r" [+-] 1(?![\w.])", expression):
        yield expression[: match.start()] + expression[match.end() :]
    for match in re.finditer(r"\b(?:minimum|maximum|clamp|min|max)(?:<[^>]*>)?\(", expression):
        end = closing(expression, match.end() - 1)
        first = split_top(expression[match.end() : end], ",")[0]
        start = match.start() - len("detail::") if expression[: match.start()].endswith("detail::") else match.start()
        yield f"{expression[:start]}({first}){expression[end + 1 :]}"
    for match in re.finditer(r"\bblock_any\(", expression):
        yield expression[: match.start()] + expression[match.end() - 1 :]


def mutate(root: pathlib.Path) -> list[Mutant]:
    """Rewrites the kernels under `root` into ones that can be broken at run time. Returns how."""
    mutants: list[Mutant] = []

    def add(file: str, text: str, at: int, original: str, changed: str, is_barrier: bool = False) -> int:
        number = len(mutants) + 1
        alike = [m for m in mutants if (m.file, m.original, m.changed) == (file, original, changed)]
        line = text.count("\n", 0, at) + 1
        mutants.append(Mutant(number, file, line, original, changed, is_barrier, len(alike) + 1))
        return number

    for path in sorted((root / KERNELS).glob("*.cuh")):
        if path.name in UNTOUCHED:
            continue
        text = path.read_text()
        code = blank_comments(text)
        edits: list[tuple[int, int, str]] = []
        for name in BARRIERS:
            for match in re.finditer(rf"\b{name}\(\);", code):
                number = add(path.name, text, match.start(), match.group(), ";", True)
                edits.append((match.start(), match.end(), f"if (segscatter_mutant != {number}) {match.group()}"))
        explicit = [entry for entry in EXPLICIT if entry[0] == path.name]
        for _, original, changed in explicit:
            at = text.index(original)
            number = add(path.name, text, at, original, changed, "barrier" in original or "cluster" in original)
            inner = original
            for begin, end, new in [edit for edit in edits if at <= edit[0] < at + len(original)]:
                inner = inner.replace(text[begin:end], new, 1)
                edits.remove((begin, end, new))
            edits.append(
                (at, at + len(original), f"if (segscatter_mutant == {number}) {{ {changed} }} else {{ {inner} }}")
            )
        for begin, end, fixed in regions(code):
            if any(begin < edit[1] and edit[0] < end for edit in edits):
                continue
            expression = code[begin:end]
            as_bool = "" if fixed is None else "bool"  # the condition of an if or while may be a pointer or a number
            choice = ""
            for changed in dict.fromkeys(changes(expression, fixed)):
                number = add(path.name, text, begin, expression, changed)
                choice += f"segscatter_mutant == {number} ? {as_bool}({changed}) : "
            if choice:
                edits.append((begin, end, f"({choice}{as_bool}({expression}))"))
        for begin, end, new in sorted(edits, reverse=True):
            text = text[:begin] + new + text[end:]
        path.write_text(text)

    # The number of the mutant, for everything that includes the kernels.
    intrinsics = root / KERNELS / "intrinsics.cuh"
    (root / KERNELS / "mutant.h").write_text(
        "#pragma once\n#include <cstdlib>\n"
        'inline const int segscatter_mutant = std::getenv("SEGSCATTER_MUTANT") '
        '? std::atoi(std::getenv("SEGSCATTER_MUTANT")) : 0;\n'
    )
    intrinsics.write_text(
        intrinsics.read_text().replace("#pragma once", '#pragma once\n#include "csrc/core/cuda/mutant.h"', 1)
    )
    return mutants


def build(root: pathlib.Path, folder: pathlib.Path, jobs: int) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    # Changed conditions compare and combine in ways that deserve warnings.
    configure = ["cmake", "-S", REPOSITORY / "tests/cpp/simt", "-B", folder, *generator,
                 f"-DSEGSCATTER_SIMT_ROOT={root}", "-DCMAKE_CXX_FLAGS=-Wno-error -w"]  # fmt: skip
    for command in (configure, ["cmake", "--build", folder, "--parallel", str(jobs)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout[-6000:]}{result.stderr[-3000:]}")


def run(folder: pathlib.Path, step: tuple[str, int], mutant: int, cpu_seconds: int) -> tuple[bool, str, float]:
    """Runs one build. Returns whether the tests passed, what was said if not, and the CPU seconds that it took."""
    program, percent = step
    environment = dict(
        os.environ,
        SEGSCATTER_MUTANT=str(mutant),
        SEGSCATTER_SIMT_EFFORT=str(percent),
        ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0",
        TSAN_OPTIONS="halt_on_error=1",
    )
    command = [folder / program, "--gtest_fail_fast", "--gtest_brief=1", "--gtest_filter=-Shim*"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1)),
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    said = re.search(r"SIMT: .*|SUMMARY: .*|runtime error: .*|.*Failure\n.*|.*gives other bits", text)
    what = squeeze(said.group())[:100] if said else f"exit status {process.returncode}"
    if process.returncode in (-24, -9):
        what = TOO_SLOW
    return process.returncode == 0, what, usage.ru_utime + usage.ru_stime


def accepted_survivors() -> dict[str, str]:
    """survivors.txt: a line with the mutant's key, then indented lines that say why no test can kill it."""
    accepted, key = {}, None
    for line in SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []:
        if line.startswith("#") or not line.strip():
            continue
        if line[0] != " ":
            key = line.strip()
            accepted[key] = ""
        elif key:
            accepted[key] += line.strip() + " "
    return {key: reason for key, reason in accepted.items() if reason}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every barrier and a sample of the rest")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and stop")
    parser.add_argument("--only", type=int, action="append", help="number of a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=pathlib.Path, help="where to build; kept and used again")
    options = parser.parse_args()

    folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="segscatter-mutation-"))
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "source"
    fresh = folder / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    for name in ("csrc", "include"):
        shutil.copytree(REPOSITORY / name, fresh / name)
    mutants = mutate(fresh)
    for path in (path for path in fresh.rglob("*") if path.is_file()):  # unchanged files keep their times
        target = root / path.relative_to(fresh)
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.rmtree(fresh)

    accepted = accepted_survivors()
    chosen = mutants
    if options.only:
        chosen = [mutant for mutant in mutants if mutant.number in options.only]
    elif options.quick:
        chosen = [m for m in mutants if m.is_barrier or m.number % 12 == 0]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.number:4} {mutant.file}:{mutant.line}: {mutant.key().split(': ', 1)[1]}")
        return 0

    build(root, folder / "build", options.jobs)
    steps = (PLAIN, TSAN, ASAN) if options.quick else (PLAIN, TSAN, ASAN, FULL)
    limits = {}
    for step in steps:
        passed, what, seconds = run(folder / "build", step, 0, 3600)
        if not passed:
            sys.exit(f"the unchanged kernels fail in {step[0]}: {what}")
        limits[step] = int(4 * seconds + 20)
        print(f"unchanged: {step[0]} at {step[1]} %: passes in {seconds:.0f} s of CPU time", flush=True)

    def judge(mutant: Mutant) -> tuple[Mutant, str, str]:
        """The mutant, its fate, and that in more words."""
        order = (TSAN, *[step for step in steps if step != TSAN]) if mutant.is_barrier else steps
        if mutant.key() in accepted:
            order = [step for step in order if step != FULL]
        for step in order:
            passed, what, _ = run(folder / "build", step, mutant.number, limits[step])
            if not passed:
                killer = step[0].removeprefix("simt_tests").strip("_") or "plain"
                return mutant, "time" if what == TOO_SLOW else killer, f"killed by {step[0]}: {what}"
        fate = ARGUED if mutant.key() in accepted else SURVIVED
        return mutant, fate, fate

    survivors = []
    fates: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for mutant, fate, verdict in pool.map(judge, chosen):
            print(f"{mutant.number:4} {mutant.file}:{mutant.line}: {mutant.key().split(': ', 1)[1]}")
            print(f"       {verdict}", flush=True)
            fates[mutant.file][fate] += 1
            if fate == SURVIVED:
                survivors.append(mutant)
    columns = ("plain", "tsan", "asan", "time", ARGUED, SURVIVED)
    print(f"\n{'killed by':16}" + "".join(f"{column:>{len(column) + 3}}" for column in columns))
    for file, counts in fates.items():
        print(f"{file:16}" + "".join(f"{counts[column]:{len(column) + 3}}" for column in columns))
    argued = sum(counts[ARGUED] for counts in fates.values())
    print(f"{len(chosen)} mutants: {len(chosen) - len(survivors) - argued} killed, "
          f"{argued} survived for a reason in survivors.txt, {len(survivors)} survived")  # fmt: skip
    for mutant in survivors:
        print(f"SURVIVED {mutant.number} {mutant.key()}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
