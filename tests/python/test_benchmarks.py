# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own promises: fair rounds, right statistics, wrong results never timed, what is left out named."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import (
    baselines,
    cases,
    harness,
    machine,
    native,
    peers,
    plots,
    report,
    rl,
    run,
    suites,
    tables,
    tracker,
)
from benchmarks.harness import Effort, Timing, compare, summarize
from benchmarks.machine import environment
from benchmarks.methods import Method, SkippedError, WrongError, checked_calls, error_of
from benchmarks.record import Results, Row

ROOT = Path(__file__).parents[2]
BRIEF = Effort(rounds=2, round_us=1, warmup=1, seconds=0)


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks choose torch's threads; the tests behind these should not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> cases.Case:
    return cases.make_case("small", 200, 12, device="cpu", lengths=cases.lengths_random, density=0.5, num_groups=3)


class TestHarness:
    def test_every_method_runs_once_a_round_after_changing_neighbours(self):
        ran = []
        methods = {name: lambda name=name: ran.append(name) for name in "abc"}
        timings = compare(methods, "cpu", Effort(rounds=60, round_us=0, warmup=0), before_each=lambda: ran.append("-"))
        assert {timing.rounds for timing in timings.values()} == {60}
        rounds = "".join(ran).partition("-")[2].replace("-", "")
        order = [rounds[i : i + 3] for i in range(0, len(rounds), 3)]
        assert len(order) == 60
        assert all(sorted(one) == ["a", "b", "c"] for one in order)
        assert len(set(order)) == 6, "some order never came"

    def test_the_untimed_work_comes_before_every_call(self):
        ran = []
        compare({"a": lambda: ran.append("a")}, "cpu", Effort(rounds=5, warmup=0), before_each=lambda: ran.append("-"))
        assert "".join(ran).endswith("-a" * 5)

    def test_quick_methods_are_called_until_the_round_is_long(self, monkeypatch):
        monkeypatch.setattr(harness, "time_calls", lambda call, calls, device: (asked.append(calls), 10.0)[1])
        asked: list[int] = []
        compare({"a": lambda: None}, "cpu", Effort(rounds=4, round_us=300, warmup=0))
        assert asked[-4:] == [30] * 4

    def test_slow_methods_join_every_tenth_round(self, monkeypatch):
        times = {"slow": 50_000.0, "fast": 10.0}
        monkeypatch.setattr(harness, "time_calls", lambda call, calls, device: times[call()])
        timings = compare({name: lambda name=name: name for name in times}, "cpu", Effort(rounds=100))
        assert timings["fast"].rounds == 100
        assert timings["slow"].rounds == 10

    def test_out_of_time_there_are_three_samples_of_each(self, monkeypatch):
        times = {"slow": 50_000.0, "fast": 10.0}
        monkeypatch.setattr(harness, "time_calls", lambda call, calls, device: times[call()])
        methods = {name: lambda name=name: name for name in times}
        timings = compare(methods, "cpu", Effort(rounds=100, seconds=0))
        assert timings["slow"].rounds == 3
        assert timings["fast"].rounds == 21
        times["fast"] = 40_000.0  # nobody is fast: all take part in every round
        timings = compare(methods, "cpu", Effort(rounds=100, seconds=0))
        assert {timing.rounds for timing in timings.values()} == {3}

    def test_time_of_a_call(self, monkeypatch):
        clock = iter([1.0, 1.0 + 40e-6])
        monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
        torch.set_num_threads(2)
        called = []
        assert harness.time_calls(lambda: called.append(1), 4, "cpu") == pytest.approx(10.0)
        assert len(called) == 4

    def test_one_thread_is_timed_by_its_own_clock(self, monkeypatch):
        clock = iter([5.0, 5.0 + 7e-6])
        monkeypatch.setattr(harness.time, "thread_time", lambda: next(clock))
        torch.set_num_threads(1)
        assert harness.time_calls(lambda: None, 1, "cpu") == pytest.approx(7.0)

    def test_median_and_quantiles(self):
        timing = summarize({"a": dict(enumerate(float(i) for i in range(101)))})["a"]
        assert timing.median == 50
        assert timing.p10 == pytest.approx(10)
        assert timing.p90 == pytest.approx(90)
        assert timing.rounds == 101

    def test_quiet_rounds_are_the_same_for_all(self):
        """Rounds 0 and 1 are quiet over all; b is at its best in round 7, which is noisy for a and must not count."""
        a = {0: 10.0, 1: 10.2, 2: 20.0, 3: 21.0, 4: 22.0, 5: 23.0, 6: 24.0, 7: 60.0}
        b = {0: 100.0, 1: 101.0, 2: 200.0, 3: 201.0, 4: 202.0, 5: 203.0, 6: 204.0, 7: 90.0}
        timings = summarize({"a": a, "b": b})
        assert timings["a"].quiet == pytest.approx(10.1)
        assert timings["b"].quiet == pytest.approx(100.5)

    def test_a_method_that_missed_the_quietest_rounds(self):
        a = {i: 10.0 + i for i in range(20)}
        timings = summarize({"a": a, "rare": {10: 7.0}})
        assert timings["rare"].quiet == 7
        assert timings["a"].quiet == pytest.approx(12)

    def test_garbage_collection_is_back_on(self):
        states = []
        compare({"a": lambda: states.append(gc.isenabled())}, "cpu", Effort(rounds=1, warmup=0, round_us=0))
        assert states[-1] is False
        assert gc.isenabled()


class TestChecks:
    def test_right_answer(self):
        case = cases.Case(
            "by hand",
            losses=torch.tensor([1.0, -2.0, float("nan"), 4.0, 8.0]),
            mask=torch.tensor([1, 1, 0, 1, 1]).bool(),
            cu_seqlens=torch.tensor([0, 2, 2, 5]),
            group_ids=torch.tensor([1, 0, 1]),
            num_groups=3,
        )
        answer = cases.right_answer(case)
        assert answer.sums.tolist() == [0, 11, 0]
        assert answer.magnitudes.tolist() == [0, 15, 0]
        assert answer.counts.tolist() == [0, 4, 0]

    def test_error_is_relative_to_the_group(self):
        """A small group beside a large one: the error of either is seen."""
        answer = cases.Answer(np.array([1.0, 1e6]), np.array([1.0, 1e6]), np.array([1, 9]))
        assert error_of((torch.tensor([1.01, 1e6]), torch.tensor([1, 9])), answer) == pytest.approx(0.01, rel=1e-4)

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            (lambda sums, counts: (sums * 1.001, counts), "off by 1.0e-03"),
            (lambda sums, counts: (sums * float("nan"), counts), "off by nan"),
            (lambda sums, counts: (sums, counts - 1), "counts"),
            (lambda sums, counts: (sums[:-1], counts), "shapes"),
        ],
    )
    def test_wrong_methods_are_not_timed(self, small, wrong, reason):
        right = baselines.ours(small)
        methods = [Method("right", baselines.ours), Method("wrong", lambda case: lambda: wrong(*right()))]
        checked = checked_calls(small, methods)
        assert list(checked.calls) == ["right"]
        assert checked.skipped["wrong"].startswith("wrong: ")
        assert reason in checked.skipped["wrong"]

    def test_ours_must_be_right(self, small):
        wrong = Method("segscatter", lambda case: lambda: (torch.zeros(3), torch.zeros(3)), 1e-6, required=True)
        with pytest.raises(WrongError, match="segscatter on small: wrong: counts 0 tokens in a group of"):
            checked_calls(small, [wrong])
        assert suites.SEGSCATTER.required

    def test_what_is_left_out_is_named(self, small):
        def missing(case):
            raise SkippedError("is not installed")

        checked = checked_calls(small, [Method("peer", missing), Method("other", baselines.ours)], without=("other",))
        assert checked.skipped == {"peer": "is not installed", "other": "not asked for"}
        assert not checked.calls

    @pytest.mark.parametrize(
        ("module", "prepare"), [("torch_scatter", peers.torch_scatter), ("fbgemm_gpu", peers.fbgemm)]
    )
    def test_missing_peers_are_named(self, small, monkeypatch, module, prepare):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
        checked = checked_calls(small, [Method("peer", prepare)])
        assert checked.skipped == {"peer": f"{module} is not installed"}

    def test_floors_that_do_not_build_are_named_once(self, small, monkeypatch, tmp_path):
        monkeypatch.setattr(native, "HERE", tmp_path)
        native._build.cache_clear()
        try:
            with pytest.raises(SkippedError, match=r"nothing\.cpp did not build: "):
                native.operators()
        finally:
            native._build.cache_clear()

    @pytest.mark.skipif(not shutil.which("ninja") or not shutil.which("g++"), reason="needs ninja and g++")
    def test_floors_build(self, small):
        """Elsewhere they would be left out by name, so breakage must show here."""
        before = torch.get_num_threads()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            words = np.random.default_rng(threads).integers(0, 2**63, 20_011, dtype=np.uint64)
            assert native.read_bytes()(words.ctypes.data, words.nbytes) == np.bitwise_xor.reduce(words)
        torch.set_num_threads(before)
        checked = checked_calls(small, suites.FLOORS)
        assert list(checked.calls) == [method.name for method in suites.FLOORS]
        assert all(compare(checked.calls, "cpu", BRIEF)[name].rounds == 2 for name in checked.calls)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"lengths": cases.lengths_with_empties},
            {"dtype": torch.bfloat16},
            {"labels": True},
            {"rows": 3},
            {"dtype": torch.float64, "num_groups": 40, "ids": "alternating"},
        ],
        ids=["plain", "empties", "bfloat16", "labels", "rows", "float64"],
    )
    def test_every_method_that_is_here_is_right(self, options):
        """All but those that compile something; a peer may be missing, and nothing else is a reason."""
        case = cases.make_case("mixed", 4000, 30, device="cpu", **options)
        methods = [m for m in suites.ALL_METHODS if m is not suites.COMPILED and m not in suites.FIXED_COSTS]
        checked = checked_calls(case, methods)
        reasons = "not installed|needs a GPU|more than 20000 documents|not implemented for 'Double'"
        assert not {name: why for name, why in checked.skipped.items() if not re.search(reasons, why)}
        assert {"segscatter", "repeat_interleave + index_add_", "bincount x2", "numpy add.reduceat"} <= set(
            checked.errors
        )


class TestSuites:
    def test_tasks_are_named_apart(self):
        for name, suite in suites.SUITES.items():
            for quick in (True, False):
                names = [task.name for task in suite("cpu", quick)]
                assert names, name
                assert len(set(names)) == len(names), name

    def test_reference_is_the_table_of_the_readme(self):
        names = [task.name for task in suites.reference_suite("cpu", quick=False)]
        assert names == [f"{n} documents, {live}" for live in ("25%", "100%") for n in (128, 1024, 4096, 16384)]

    def test_what_does_not_fit_in_memory_is_named(self, monkeypatch):
        monkeypatch.setattr(suites, "free_memory", lambda device: 1 << 30)
        *_, largest = suites.scale_suite("cpu", quick=False)
        row = largest.measure(BRIEF)
        assert "2^28" in row.case
        assert not row.timings
        assert row.skipped == {row.case: "needs 10 GiB of memory"}

    def test_rl(self):
        forward, both = (task.measure(BRIEF) for task in suites.rl_suite("cpu", quick=True) if "K = 1" in task.name)
        assert forward.case.endswith("forward")
        assert both.case.endswith("forward and backward")
        assert set(forward.timings) == {"loop", "padded", "functional", "reducer", "built"}

    def test_rl_contenders_must_agree(self, monkeypatch):
        monkeypatch.setattr(rl, "padded", lambda values, mask: values.sum(-1).sum(-1))
        task = next(iter(suites.rl_suite("cpu", quick=True)))
        with pytest.raises(AssertionError):
            task.measure(BRIEF)

    def test_tracker(self):
        tasks = dict(tracker.tracker_tasks("cpu", quick=True))
        rows = [measure(BRIEF) for name, measure in tasks.items() if not name.startswith("reduce")]
        assert [row.ours for row in rows] == ["tracker.update", "registry.encode", "registry.encode", "segscatter"]
        assert all(set(row.timings) > {row.ours} for row in rows)

    def test_shapes_in_turn(self):
        row = suites.in_turn({"1024 documents": {"num_documents": 9}, "one": {"num_documents": 1}}, 512, "cpu", BRIEF)
        assert row.ratio("1024 documents") == 1
        assert set(row.timings) == {"1024 documents", "one"}


def timing(quiet: float) -> Timing:
    return Timing(quiet=quiet, median=quiet, p10=quiet - 1, p90=quiet + 1, rounds=10)


def row(case: str = "4 documents", ours: float = 10, **coordinates) -> Row:
    timings = {"segscatter": timing(ours), "loop": timing(50), "other": timing(20), "floor: sum": timing(5)}
    coordinates = {"tokens": 64, "documents": 4, "density": 0.25} | coordinates
    return Row(case, "segscatter", timings, coordinates, {"segscatter": 1e-8}, {"peer": "is not installed"})


class TestResults:
    def test_survive_a_file(self, tmp_path):
        results = Results("reference", environment("cpu", quick=False), [row()])
        results.save(tmp_path)
        assert Results.load(tmp_path / f"{results.stem}.json") == results

    def test_a_part_is_merged_in_the_suites_order(self, tmp_path):
        env = environment("cpu", quick=False)
        before = Results("own", env, [row("a"), row("b"), row("c")])
        before.save(tmp_path)
        part = Results("own", env | {"date": "tomorrow"}, [row("b", ours=7)])
        merged = part.merged_into(tmp_path / f"{before.stem}.json", ["c", "b", "a"])
        assert [r.case for r in merged.rows] == ["c", "b", "a"]
        assert merged.row("b").timings["segscatter"].quiet == 7
        assert merged.row("a").timings["segscatter"].quiet == 10

    def test_machines_are_not_mixed(self, tmp_path):
        env = environment("cpu", quick=False)
        Results("own", env, [row()]).save(tmp_path)
        part = Results("own", env | {"processor": "another"}, [row()])
        with pytest.raises(ValueError, match="measured with another processor"):
            part.merged_into(tmp_path / f"{part.stem}.json", [])

    @pytest.mark.parametrize("count", [1, 3, 12])
    def test_markdown(self, count):
        text = report.markdown(
            Results("own", environment("cpu", quick=False), [row(f"case {i}") for i in range(count)])
        )
        assert "* peer: is not installed" in text
        assert "10.0 (9.0 to 11.0)" in text
        assert "5.00" in text  # the loop's ratio
        assert all(f"case {i} " in text for i in range(count))
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({line.count("|") for line in block.splitlines()}) == 1

    def test_left_out_in_some_cases(self):
        other = dataclasses.replace(row("other"), skipped={"peer": "is not installed", "loop": "wrong: off by 1.0e-04"})
        assert report.left_out([row(), other]) == ["loop: wrong: off by 1.0e-04 (other)", "peer: is not installed"]

    def test_noise_is_shown(self, capsys):
        report.print_row("own", row())
        assert "noisy" not in capsys.readouterr().out
        timings = dict.fromkeys("abc", Timing(quiet=1, median=2, p10=1, p90=4, rounds=5))
        report.print_row("own", Row("case", "a", timings))
        assert "noisy: p90 is 4.0 times p10\n" in capsys.readouterr().out
        report.print_row("own", dataclasses.replace(row(), others=0.25))
        assert "and other processes had 25% of the machine" in capsys.readouterr().out

    def test_other_processes_are_seen(self):
        """A child that is not waited for is another process; one's own work is not."""
        share = machine.watch_others()
        if share() is None:
            pytest.skip("this system does not count processor time")
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
            share = machine.watch_others()
            time.sleep(1)
            with_child = share()
            child.kill()
        assert with_child > 0.3 / os.cpu_count()

    def test_gain(self):
        assert report.gain(row()) == (
            "4 documents: segscatter takes 10.0 us, 2.0 times as fast as other (the best of 2 other ways) "
            "and 5.0 times as fast as loop"
        )
        alone = Row("case", "segscatter", {"segscatter": timing(10)})
        assert report.gain(alone) == "case: segscatter takes 10.0 us; there is nothing to compare with"

    @pytest.mark.parametrize(
        ("suite", "pictures"),
        [("reference", 2), ("peers", 2), ("scale", 2), ("own", 2), ("shapes", 1), ("tracker", 1), ("rl", 2)],
    )
    def test_pictures(self, tmp_path, suite, pictures):
        pytest.importorskip("matplotlib")
        rows = [row(f"{n} documents", documents=n, tokens=16 * n, rows=1) for n in (1, 4, 16)]
        if suite in ("reference", "peers", "rl", "own"):
            rows = [dataclasses.replace(r, coordinates=r.coordinates | {"tokens": 64}) for r in rows]
        written = plots.plot(Results(suite, environment("cpu", quick=True), rows), tmp_path)
        assert len(written) == pictures
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)

    def test_pictures_of_many_own_shapes(self):
        """A panel for each number of documents, over tokens; without a second point there is no line."""
        rows = [row(f"{t}, {d}", tokens=t, documents=d) for t in (64, 128) for d in (2, 4)] + [
            row("64, 8", documents=8)
        ]
        ((panels, key, _),) = plots.lines_of("own", rows)
        assert key == "tokens"
        assert {title: [r.case for r in panel] for title, panel in panels.items()} == {
            "2 documents": ["64, 2", "128, 2"],
            "4 documents": ["64, 4", "128, 4"],
        }

    def test_nothing_measured_is_no_picture(self, tmp_path):
        nothing = Row("case", "segscatter", {}, skipped={"case": "needs 10 GiB of memory"})
        assert plots.plot(Results("scale", environment("cpu", quick=True), [nothing]), tmp_path) == []
        assert "* case: needs 10 GiB" in report.markdown(Results("scale", environment("cpu", quick=True), [nothing]))


class TestCommand:
    def test_cuda_without_a_gpu_names_what_is_skipped(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        run.main(["--suite", "reference", "--device", "cuda"])
        lines = capsys.readouterr().out.splitlines()
        assert "skipped (no GPU): reference: 16384 documents, 100%" in lines
        assert lines[-1].startswith("skipped 8 cases on cuda")

    def test_own_shapes(self, tmp_path, capsys):
        arguments = "--tokens 96 --documents 3 7 --groups 2 --live 0.5 --dtype bfloat16 --labels --rows 2 --threads 1"
        left_out = ["torch.compile", "floor: an operator that does nothing"]
        without = [word for name in left_out for word in ("--without", name)]
        run.main([*arguments.split(), "--seconds", "0", "--out", str(tmp_path), *without])
        out = capsys.readouterr().out
        assert "T = 96, 7 documents: segscatter takes" in out
        results = Results.load(tmp_path / "own-cpu-1t.json")
        assert [r.coordinates for r in results.rows] == [{"tokens": 96, "documents": n, "density": 0.5} for n in (3, 7)]
        assert set(left_out) <= set(results.rows[0].skipped)
        assert (tmp_path / "own-cpu-1t.md").exists()

    def test_only_some_cases(self, capsys):
        run.main(["--suite", "reference", "--only", "4096", "--list"])
        assert capsys.readouterr().out.splitlines() == [
            f"reference: 4096 documents, {live}" for live in ("25%", "100%")
        ]

    def test_the_readmes_table_is_printed(self, monkeypatch, capsys):
        measured = [dataclasses.replace(row(name), case=name) for name in ("128 documents, 25%", "1024 documents, 25%")]
        tasks = [suites.Task(r.case, lambda effort, r=r: r) for r in measured]
        monkeypatch.setitem(run.SUITES, "reference", lambda device, quick: tasks)
        run.main(["--suite", "reference", "--quick"])
        out = capsys.readouterr().out
        assert "| against `repeat_interleave` + `index_add_` |  |  |" in out
        assert "| segscatter, us a call from Python | 10 | 10 |" in out

    def test_quick_does_not_touch_the_kept_results(self):
        assert run.parse(["--suite", "reference", "--quick"]).out is None
        assert run.parse(["--documents", "5"]).out is None
        assert run.parse(["--suite", "reference"]).out == run.KEPT

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give --suite, or your shapes"),
            (["--suite", "scale", "--documents", "4"], "has its own shapes: leave out --documents"),
            (["--suite", "scale", "--live", "0"], "has its own shapes: leave out --live"),
            (["--documents", "0"], "must be a number from 1 to 2147483647, but is '0'"),
            (["--live", "1.5"], "must be a number from 0 to 1, but is '1.5'"),
            (["--live", "nan"], "must be a number from 0 to 1, but is 'nan'"),
            (["--tokens", "many"], "must be a number from 1 to 2147483647, but is 'many'"),
            (["--lengths", "log-normal", "--documents", "4"], "leave out one of them"),
        ],
    )
    def test_bad_options(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            run.parse(arguments)
        assert message in capsys.readouterr().err

    def test_no_such_case(self):
        with pytest.raises(SystemExit, match="no case has 77 in its name"):
            run.main(["--suite", "reference", "--only", "77"])


class TestKeptResults:
    @pytest.mark.parametrize("name", tables.DOCUMENTS)
    def test_documents_show_what_was_measured(self, name):
        text = (ROOT / name).read_text()
        assert tables.PLACE.search(text)
        assert tables.stale_tables(text) == []

    def test_a_changed_number_is_noticed(self):
        text = (ROOT / "README.md").read_text()
        found = tables.PLACE.search(text)
        changed = text[: found.start(3)] + found[3].replace("1", "2") + text[found.end(3) :]
        assert tables.stale_tables(changed) == ["readme"]
        assert tables.renewed(changed) == text

    @pytest.mark.parametrize("path", sorted(run.KEPT.glob("*.json")), ids=lambda path: path.name)
    def test_name_no_machine_and_no_path(self, path):
        content = json.loads(path.read_text())
        assert not content["environment"]["quick"]
        assert not re.search(r"(?:^|[\s\"'])/\w", path.read_text())
        assert socket.gethostname() not in path.read_text()
