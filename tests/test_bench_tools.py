#!/usr/bin/env python3
"""Tests of tools/bench_peers.py and tools/plot_bench.py that need neither torch nor a GPU. The
argument is the program bench, whose lists of shapes they read."""
import ctypes
import json
import math
import random
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import bench_peers # noqa: E402
import plot_bench # noqa: E402

BENCH = sys.argv.pop(1)


def listed(suite):
    text = subprocess.run([BENCH, "--suite", suite, "--list", "--json"], check=True,
                          stdout=subprocess.PIPE).stdout
    return [record for record in json.loads(text) if record["op"] != "meta"]


META = {"op": "meta", "date": "2026-01-02", "device": "a card", "command": "a command",
        "torch": "1.2", "not_importable": {"liger": "ModuleNotFoundError: none"}}


def measured(suite, factors):
    """Records as of a card with 2 us of launch and 4 TB/s: each impl takes factors[impl] times the
    elementwise kernel's time."""
    records = [META]
    for shape in listed(suite):
        size = 4 if shape["dtype"] == "f32" else 2
        roofline = 2 + 3 * size * shape["rows"] * shape["cols"] / 4e6
        for impl, factor in factors.items():
            records.append({"suite": suite, **shape, "impl": impl,
                            "us": round(factor * roofline, 3), "roofline_us": round(roofline, 3)})
    return records


def of(records, impl):
    return [record for record in records if record.get("impl") == impl]


class Shapes(unittest.TestCase):
    def test_the_sweep_has_200_shapes_of_every_alignment_within_its_bounds(self):
        shapes = listed("sweep")
        self.assertEqual(len(shapes), 200)
        classes = [plot_bench.alignment(shape["cols"]) for shape in shapes]
        self.assertEqual([classes.count(n) for n in (1, 2, 4, 8)], [50, 25, 25, 100])
        for shape in shapes:
            self.assertTrue(1 <= shape["rows"] <= 300000 and 1 <= shape["cols"] <= 65536)
            self.assertTrue(2**18 <= shape["rows"] * shape["cols"] <= 2**27)

    def test_the_sweep_is_the_same_each_time(self):
        self.assertEqual(listed("sweep"), listed("sweep"))

    def test_a_problem_is_measured_once_under_the_first_suite_that_has_it(self):
        with tempfile.TemporaryDirectory() as folder:
            problems = bench_peers.problems_of(["models", "host", "models"], folder)
        self.assertEqual(len(problems), len({problem for _, problem in problems}))
        suites = [suite for suite, _ in problems]
        self.assertEqual(suites.count("models"), len(listed("models")))
        self.assertEqual(suites, sorted(suites, key=["models", "host"].index))

    def test_every_listed_shape_is_a_problem_and_none_appears_twice(self):
        for suite in ("host", "models", "edge", "sweep"):
            problems = [bench_peers.Problem(**shape) for shape in listed(suite)]
            self.assertEqual(len(set(problems)), len(problems))
            for problem in problems:
                self.assertEqual(math.prod(problem.shape), problem.rows * problem.cols)


class Cliffs(unittest.TestCase):
    def test_a_smooth_sweep_has_none(self):
        records = measured("sweep", {"normjit": 1.2, "torch": 2.5})
        for record in of(records, "normjit"): # slower where rows are short: no cliff
            record["us"] *= 1 + 2 / math.log2(4 + record["cols"])
        found = plot_bench.cliffs(records)
        self.assertEqual(len(found), 200)
        self.assertLess(found[0][0], plot_bench.CLIFF)
        self.assertIn("200 shapes compared with their interpolated neighbours; 0 slower than 1.35",
                      plot_bench.report(records))

    def test_a_planted_one_is_found_and_named_whatever_divides_its_cols(self):
        for divisor in (1, 2, 4, 8):
            records = measured("sweep", {"normjit": 1.2})
            planted = next(r for r in of(records, "normjit")
                           if plot_bench.alignment(r["cols"]) == divisor and r["rows"] > 1000)
            planted["us"] *= 1.6
            over = [pair for pair in plot_bench.cliffs(records) if pair[0] > plot_bench.CLIFF]
            self.assertEqual([record for _, record in over], [planted])
            self.assertAlmostEqual(over[0][0], 1.6, places=2)
            self.assertIn(f"| {plot_bench.label_of(planted)} |", plot_bench.report(records))

    def test_shapes_where_eager_is_faster_are_counted(self):
        records = measured("sweep", {"normjit": 1.0, "torch": 2.0})
        of(records, "torch")[7]["us"] /= 4
        slower, compared = plot_bench.slower_than(records, "torch")
        self.assertEqual(compared, 200)
        self.assertEqual([record for _, record in slower], [of(records, "normjit")[7]])
        self.assertIn("1 of 200 shapes slower than PyTorch eager", plot_bench.report(records))


class Tables(unittest.TestCase):
    def setUp(self):
        self.records = measured("models", {"normjit": 1.25, "cudnn": 1.5, "torch": 5}) + measured(
            "edge", {"normjit": 1.25, "torch": 5})[1:]

    def test_a_row_has_times_and_ratios(self):
        table = plot_bench.times_table({"8 x 16": {
            "normjit": {"us": 12.0, "roofline_us": 9.0}, "cudnn": {"us": 18.0, "roofline_us": 9.0},
            "torch": {"us": None, "roofline_us": 9.0}, "liger": {"us": 30.0, "roofline_us": 9.0}}})
        self.assertIn("| 8 x 16 | 9.0 | 12.0 | 0.75 | 18.0 | 30.0 | 1.50 |", table)

    def test_what_is_absent_is_said_with_its_reason(self):
        record = of(self.records, "cudnn")[0]
        record.update(us=None, absent="no plan")
        text = plot_bench.document(self.records, [])
        self.assertIn(f"- cuDNN, `no plan`: backward bf16 {plot_bench.label_of(record)}\n", text)
        self.assertIn("Liger could not be imported: `ModuleNotFoundError: none`", text)

    def test_readme_names_each_shape_where_a_peer_is_faster(self):
        self.assertNotIn("a peer is faster", plot_bench.readme_results(self.records))
        record = of(self.records, "cudnn")[3]
        record["us"] /= 2
        of(self.records, "normjit")[5]["us"] = None
        text = " ".join(plot_bench.readme_results(self.records).split())
        missing = plot_bench.label_of(of(self.records, "normjit")[5])
        self.assertIn(f"at 13 of them; at {plot_bench.label_of(record)} a peer is faster; "
                      f"no result at {missing}.", text)

    def test_readme_changes_between_its_marks_alone(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        changed = plot_bench.readme_with(text, "RESULTS")
        before, after = text.split("<!-- results")[0], text.split("<!-- end of results -->")[1]
        self.assertTrue(changed.startswith(before) and changed.endswith(after))
        self.assertIn("-->\nRESULTS\n<!-- end of results -->", changed)

    def test_the_program_writes_files_that_its_check_accepts_until_one_changes(self):
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            (root / "docs/benchmarks").mkdir(parents=True)
            (root / "README.md").write_text("<!-- results -->\n<!-- end of results -->\n",
                                            encoding="utf-8")
            bench_peers.save(root / "docs/benchmarks/card.json", self.records)
            command = [sys.executable, str(ROOT / "tools/plot_bench.py"), "--root", name]
            subprocess.run(command, check=True)
            subprocess.run([*command, "--check"], check=True)
            for path in ("README.md", "docs/BENCHMARKS.md", "docs/benchmarks/backward.svg"):
                text = (root / path).read_text(encoding="utf-8")
                (root / path).write_text(text.replace("0", "1", 1), encoding="utf-8")
                done = subprocess.run([*command, "--check"], stderr=subprocess.PIPE, text=True)
                self.assertEqual(done.returncode, 1)
                self.assertIn(path, done.stderr)
                (root / path).write_text(text, encoding="utf-8")


class Plots(unittest.TestCase):
    def test_plots_are_xml_with_a_mark_for_each_measurement_and_legend_entry(self):
        records = measured("models", {"normjit": 1.25, "cudnn": 1.5, "torch_compile": 3})
        records += measured("sweep", {"normjit": 1.25, "torch": 3})[1:]
        of(records, "cudnn")[0]["us"] = None
        plots = plot_bench.plots_of(records)
        self.assertEqual(sorted(plots), ["backward", "models", "sweep"])
        for name, impls, absent in (("models", 3, 1), ("sweep", 2, 0)):
            root = xml.etree.ElementTree.fromstring(plots[name])
            marks = sum(element.tag.endswith(("circle", "polygon")) for element in root)
            self.assertEqual(marks, impls * len(listed(name)) + impls - absent)
        self.assertIn("a card, 2026-01-02", plots["backward"])
        self.assertEqual(plots, plot_bench.plots_of(records))


class Binding(unittest.TestCase):
    """The library as bench_peers.py calls it, on the host, against the formulas."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.binding = bench_peers.Normjit("cpu", cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def tensor(self, values, *shape):
        buffer = (ctypes.c_float * len(values))(*values)
        self.kept.append(buffer)
        strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
        return buffer, bench_peers.NjTensor(data=ctypes.addressof(buffer), rank=len(shape),
                                            shape=shape, stride=tuple(strides))

    def test_a_backward_through_ctypes_gives_what_the_formulas_give(self):
        rows, cols, rng = 3, 5, random.Random(1)
        self.kept = []

        def draw(n):
            return [rng.uniform(-1, 1) for _ in range(n)]

        problem = bench_peers.Problem("layer_norm_bwd", "f32", "packed", rows, cols, rows, 1)
        x, args_x = self.tensor(draw(rows * cols), rows, cols)
        dy, args_dy = self.tensor(draw(rows * cols), rows, cols)
        gamma, args_gamma = self.tensor(draw(cols), cols)
        mean, args_mean = self.tensor(draw(rows), rows, 1)
        rstd, args_rstd = self.tensor([1.5] * rows, rows, 1)
        dx, args_dx = self.tensor([math.nan] * (rows * cols), rows, cols)
        dgamma, args_dgamma = self.tensor([math.nan] * cols, cols)
        dbeta, args_dbeta = self.tensor([math.nan] * cols, cols)
        args = bench_peers.NjArgs(x=args_x, dy=args_dy, gamma=args_gamma, mean=args_mean,
                                  rstd=args_rstd, dx=args_dx, dgamma=args_dgamma, dbeta=args_dbeta)
        plan = self.binding.select(problem)
        size = self.binding.lib.nj_plan_workspace_size(plan)
        buffer = ctypes.create_string_buffer(size + 16)
        workspace = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 16
        self.binding.run(plan, args, workspace, size, None)
        self.assertIn("backward", self.binding.sku(plan, args).kernel.decode())
        self.binding.release()
        bound = 12 * 8 * 2**-24 # a dozen roundings of numbers below 8
        sums = [[0.0] * cols, [0.0] * cols]
        for r in range(rows):
            at = range(r * cols, (r + 1) * cols)
            xhat = [(x[i] - mean[r]) * rstd[r] for i in at]
            g = [dy[i] * gamma[i - at[0]] for i in at]
            s1, s2 = sum(g) / cols, sum(a * b for a, b in zip(g, xhat)) / cols
            for c, i in enumerate(at):
                expected = rstd[r] * (g[c] - s1 - xhat[c] * s2)
                self.assertAlmostEqual(dx[i], expected, delta=bound)
                sums[0][c] += dy[i] * xhat[c]
                sums[1][c] += dy[i]
        for c in range(cols):
            self.assertAlmostEqual(dgamma[c], sums[0][c], delta=bound)
            self.assertAlmostEqual(dbeta[c], sums[1][c], delta=bound)

    def test_an_error_of_the_library_is_raised_with_its_text(self):
        problem = bench_peers.Problem("layer_norm_bwd", "f32", "packed", 2, 3, -1, 1)
        with self.assertRaisesRegex(RuntimeError, r"nj_plan_select: desc.shape\[0\] = -1"):
            self.binding.select(problem)


if __name__ == "__main__":
    unittest.main()
