#!/usr/bin/env python3
"""Makes docs/BENCHMARKS.md, its plots and the results in README.md from the records that
tools/bench_peers.py wrote to docs/benchmarks/*.json.

    python3 tools/plot_bench.py            # writes them
    python3 tools/plot_bench.py --check    # exits 1 unless they are what it would write

The same records give the same bytes: nothing is read but them, and SVG is written by hand here, so
that no version of a plotting library changes the files."""
import argparse
import html
import json
import math
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = "normjit"
# In the order of columns and legends. Colours (Okabe and Ito) and shapes differ, for eyes and for
# printers that do not tell colours apart.
IMPLS = {
    OURS: ("normjit", "#0072B2"),
    "cudnn": ("cuDNN", "#009E73"),
    "torch": ("PyTorch eager", "#D55E00"),
    "torch_compile": ("torch.compile", "#CC79A7"),
    "liger": ("Liger", "#E69F00"),
}
OPS = {"layer_norm_bwd": "backward", "layer_norm_fwd": "forward"}
CLIFF = 1.35 # times the interpolated neighbours
NEIGHBOURS = 6
WORST = 10   # shapes that the report names


# ---- records -----------------------------------------------------------------------------------


def load(paths):
    return [record for path in paths for record in json.loads(path.read_text(encoding="utf-8"))]


def metas(records):
    return [record for record in records if record["op"] == "meta"]


def shape_of(record):
    if record["layout"] == "channels-first":
        return f"{record['outer']} x {record['cols']} x {record['inner']}"
    return f"{record['rows']} x {record['cols']}"


def label_of(record):
    return shape_of(record) + ("" if record["layout"] == "packed" else f", {record['layout']}")


def problems(records, suite):
    """{(op, dtype): {label: {impl: record}}} in the order of the records."""
    found = {}
    for record in records:
        if record["op"] != "meta" and record["suite"] == suite:
            group = found.setdefault((record["op"], record["dtype"]), {})
            group.setdefault(label_of(record), {})[record["impl"]] = record
    return found


def rows_of(records, suite):
    """[{impl: record}], one for each problem."""
    return [row for group in problems(records, suite).values() for row in group.values()]


def impls_in(rows):
    """Those that were measured at least once, in the order of IMPLS."""
    return [impl for impl in IMPLS if any(us_of(row, impl) for row in rows)]


def us_of(row, impl):
    """None when it was not measured."""
    return row[impl]["us"] if impl in row else None


def fastest_peer(row):
    return min((record["us"] for impl, record in row.items() if impl != OURS and record["us"]),
               default=None)


def ratio_of(record):
    return record["roofline_us"] / record["us"]


# ---- cliffs ------------------------------------------------------------------------------------


def alignment(cols):
    """What divides cols: how wide an access to a row may be, up to 8 elements."""
    return math.gcd(cols, 8)


def solve3(a, b):
    """x of a 3 x 3 system, by Cramer's rule."""
    def det(m):
        return (m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1]) -
                m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0]) +
                m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0]))

    whole = det(a)
    return [det([[b[i] if k == j else a[i][k] for k in range(3)] for i in range(3)]) / whole
            for j in range(3)]


def interpolate(point, others):
    """A plane through the values of the nearest points, nearer ones weighing more, at `point`. Kept
    within their values: at the rim of the plane nothing is extrapolated."""
    nearest = sorted(others, key=lambda other: math.dist(point, other[0]))[:NEIGHBOURS]
    a = [[0.0] * 3 for _ in range(3)]
    b = [0.0] * 3
    for place, value in nearest:
        weight = 1 / (0.1 + math.dist(point, place)**2)
        basis = (1.0, place[0] - point[0], place[1] - point[1])
        for i in range(3):
            b[i] += weight * basis[i] * value
            for j in range(3):
                a[i][j] += weight * basis[i] * basis[j]
    for i in (1, 2): # where the points do not fix a slope, none is assumed
        a[i][i] += 0.1 * a[0][0]
    values = [value for _, value in nearest]
    return min(max(solve3(a, b)[0], min(values)), max(values))


def cliffs(records):
    """[(times the interpolation, record)], worst first. Each shape of the sweep is compared with
    its neighbours of the same alignment: the time over the roofline's, its logarithm interpolated
    in the plane of log rows and log cols. Dividing by the roofline's time takes out the bytes and
    most of what a launch costs; what is left changes slowly, but at a cliff."""
    classes = {}
    for row in rows_of(records, "sweep"):
        record = row.get(OURS)
        if record and record["us"]:
            place = (math.log2(record["rows"]), math.log2(record["cols"]))
            value = -math.log2(ratio_of(record))
            classes.setdefault(alignment(record["cols"]), []).append((place, value, record))
    found = []
    for points in classes.values():
        for i, (place, value, record) in enumerate(points):
            others = [(p, v) for k, (p, v, _) in enumerate(points) if k != i]
            if len(others) >= 4: # fewer say nothing about a plane
                found.append((2**(value - interpolate(place, others)), record))
    return sorted(found, key=lambda pair: -pair[0])


def slower_than(records, peer):
    """[(ours / theirs, record)] of the sweep's shapes where a peer is faster, worst first; and how
    many were compared."""
    both = [(row[OURS]["us"] / row[peer]["us"], row[OURS]) for row in rows_of(records, "sweep")
            if us_of(row, OURS) and us_of(row, peer)]
    return sorted((pair for pair in both if pair[0] > 1), key=lambda pair: -pair[0]), len(both)


# ---- tables ------------------------------------------------------------------------------------


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value, decimals):
    return "-" if value is None else f"{value:.{decimals}f}"


def times_table(group):
    peers = [impl for impl in impls_in(group.values()) if impl != OURS]
    head = ["rows x cols", "roofline", OURS, f"roofline / {OURS}", *(IMPLS[p][0] for p in peers)]
    if peers:
        head.append(f"fastest peer / {OURS}")
    rows = []
    for label, row in group.items():
        ours, best = us_of(row, OURS), fastest_peer(row)
        roofline = next(iter(row.values()))["roofline_us"]
        cells = [label, number(roofline, 1), number(ours, 1), number(ours and roofline / ours, 2)]
        cells += [number(us_of(row, peer), 1) for peer in peers]
        if peers:
            cells.append(number(best / ours if ours and best else None, 2))
        rows.append(cells)
    return table(head, rows)


def suite_tables(records, suite):
    return "\n\n".join(f"### {OPS[op].capitalize()}, {dtype}\n\n{times_table(group)}"
                       for (op, dtype), group in problems(records, suite).items())


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows):
    """Geometric means over shapes where both were measured."""
    lines = []
    ours = [row for row in rows if us_of(row, OURS)]
    for impl in impls_in(ours):
        if impl == OURS:
            what = "of the roofline's speed"
            ratios = [ratio_of(row[OURS]) for row in ours]
        else:
            what = f"times the time of {OURS}"
            ratios = [us_of(row, impl) / us_of(row, OURS) for row in ours if us_of(row, impl)]
        lines.append(f"- {IMPLS[impl][0]}: {geometric_mean(ratios):.2f} {what} (geometric mean of "
                     f"{len(ratios)} shapes, {min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)


SWEEP = f"""Rows and cols are log-uniform, 2^18 to 2^27 elements; half of the cols are multiples of
8, the others odd, twice odd or four times odd (`bench --suite sweep --list`). A cliff is a shape
much slower than its neighbours of the same alignment: the logarithm of time over roofline time is
interpolated in the plane of log rows and log cols from the nearest {NEIGHBOURS}."""


def cliff_report(records):
    found = cliffs(records)
    over = [pair for pair in found if pair[0] > CLIFF]
    slower, compared = slower_than(records, "torch")
    text = f"""{SWEEP}

- {len(found)} shapes compared with their interpolated neighbours; {len(over)} slower than {CLIFF}
  times, the worst {found[0][0]:.2f} times.
- {len(slower)} of {compared} shapes slower than PyTorch eager.

"""
    rows = [[label_of(r), number(r["us"], 1), number(ratio_of(r), 2), f"{ratio:.2f}",
             r.get("kernel", "-")] for ratio, r in found[:WORST]]
    text += table(["rows x cols", "us", f"roofline / {OURS}", "times the interpolation", "kernel"],
                  rows)
    if slower:
        text += "\n\n" + table(["rows x cols", "us", "times PyTorch eager"],
                               [[label_of(r), number(r["us"], 1), f"{ratio:.2f}"]
                                for ratio, r in slower[:WORST]])
    return text


def absences(records):
    """Who was not measured where, and why. In the sweep the shapes are only counted."""
    reasons = {}
    for record in records:
        if record.get("absent"):
            where = reasons.setdefault((record["impl"], record["absent"]), {})
            if record["suite"] == "sweep":
                where["sweep"] = where.get("sweep", 0) + 1
            else:
                where[f"{OPS[record['op']]} {record['dtype']} {label_of(record)}"] = 1
    lines = [f"- {IMPLS[impl][0]}, `{reason}`: " + "; ".join(
        f"{count} shapes of the sweep" if place == "sweep" else place
        for place, count in where.items()) for (impl, reason), where in reasons.items()]
    for meta in metas(records):
        lines += [f"- {IMPLS[name][0]} could not be imported: `{why}`"
                  for name, why in meta.get("not_importable", {}).items()]
    return "\n".join(dict.fromkeys(lines))


TITLES = {"models": "Hidden sizes of known models", "edge": "Shapes where others fall off",
          "host": "On the CPU"}


def report(records, plots=()):
    """The tables as Markdown. plots: names of SVG files beside it that exist."""
    parts = []

    def plot(name, alt):
        if name in plots:
            parts.append(f"![{alt}](benchmarks/{name}.svg)")

    for suite, title in TITLES.items():
        rows = rows_of(records, suite)
        if not rows:
            continue
        parts += [f"## {title}", summary(rows)]
        plot(suite, f"{title}: roofline time over measured time, for each library and shape")
        parts.append(suite_tables(records, suite))
    if cliffs(records):
        parts += ["## 200 random shapes", cliff_report(records)]
        plot("sweep", "Random shapes: roofline time over measured time, by number of elements")
    missing = absences(records)
    if missing:
        parts += ["## What is absent, and why", missing]
    return "\n\n".join(parts) + "\n"


INTRO = """# Benchmarks

Made by `tools/plot_bench.py` from the records in [benchmarks/](benchmarks/); do not edit by hand.

Microseconds of one call, and ratios. The **roofline** is an elementwise kernel that moves the same
bytes (backward: `dx = x + dy`; forward, and where dy is one number: a copy), the fastest of
several, timed in the same process on the same buffers: `roofline / normjit` 1.00 would be no slower
than that. All libraries of a table ran in one process on the same operands: CUDA-graph replays over
buffer sets that together exceed four times the L2 cache, the graphs taking turns, the median of 7
replays over the number of calls. Each result was checked against float64; one that is wrong is not
timed.

- Backward computes dx, dgamma and dbeta; forward saves mean and rstd (f32).
- Shapes of channels-first are (N, C, S), normalized over C. PyTorch has no such norm: eager, its
  time includes transposing there and back; torch.compile fuses that.
- padded: 64 elements between rows. misaligned: one element past an aligned address. broadcast-dy:
  dy is one number, all its strides are 0.
- cuDNN runs the plan that its heuristics put first.
- Times hold on the card named here; compare within a table."""


def document(records, plots):
    lines = []
    for meta in metas(records):
        lines.append(f"- {meta['date']}, {meta['device']}: `{meta['command']}`")
        named = {key: meta[key] for key in ("normjit", "torch", "cuda", "triton", "cudnn",
                                            "cudnn_frontend", "liger") if key in meta}
        lines.append("  " + "; ".join(f"{key} {value}" for key, value in named.items()))
    return INTRO + "\n\n## The run\n\n" + "\n".join(lines) + "\n\n" + report(records, plots)


# ---- README ------------------------------------------------------------------------------------

HEADLINE = ("models", "layer_norm_bwd", "bf16")


def headline(records):
    """{label: {impl: record}} of the shapes that README.md speaks of."""
    return problems(records, HEADLINE[0]).get(HEADLINE[1:], {})


def readme_results(records):
    """One plot, and one sentence that hides no shape where a peer is faster or ours is missing."""
    group, meta = headline(records), metas(records)[0]
    done = {label: row for label, row in group.items() if us_of(row, OURS)}
    ratios = [ratio_of(row[OURS]) for row in done.values()]
    peers = [IMPLS[impl][0] for impl in impls_in(group.values()) if impl != OURS]
    lost = [label for label, row in done.items()
            if (fastest_peer(row) or math.inf) < us_of(row, OURS)]
    missing = [label for label in group if label not in done]
    sentence = (f"On one {meta['device']}, {meta['date']}, the bf16 backward ran at "
                f"{geometric_mean(ratios):.2f} of the elementwise kernel's speed "
                f"({min(ratios):.2f} to {max(ratios):.2f} over {len(done)} shapes of known models) "
                f"and was faster than {', '.join(peers)} at {len(done) - len(lost)} of them")
    if lost:
        sentence += f"; at {', '.join(lost)} a peer is faster"
    if missing:
        sentence += f"; no result at {', '.join(missing)}"
    sentence += ". [docs/BENCHMARKS.md](docs/BENCHMARKS.md) has every shape, type and layout."
    return ("![LayerNorm backward in bf16: roofline time over measured time, by library and shape]"
            "(docs/benchmarks/backward.svg)\n\n" +
            textwrap.fill(sentence, 100, break_long_words=False, break_on_hyphens=False))


def readme_with(text, results):
    """README.md with the results between its two marks."""
    return re.sub(r"(<!-- results.*?-->\n).*?(<!-- end of results -->)",
                  lambda marks: f"{marks[1]}{results}\n{marks[2]}", text, flags=re.DOTALL)


# ---- plots -------------------------------------------------------------------------------------

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
INK, FAINT, GRID = "#222222", "#666666", "#dddddd"


def marker(impl, x, y, size=5.0):
    """A filled shape, one for each implementation."""
    corners = {
        "cudnn": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        "torch": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
        "torch_compile": [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)],
        "liger": [(0, 1.2), (1.15, -0.9), (-1.15, -0.9)],
    }
    paint = f'fill="{IMPLS[impl][1]}" stroke="#ffffff" stroke-width="0.8"'
    if impl == OURS:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.25 * size:.1f}" {paint}/>'
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners[impl])
    return f'<polygon points="{points}" {paint}/>'


def text_at(x, y, text, anchor="start", size=12, color=INK, weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}" fill="{color}" {FONT}>{html.escape(text)}</text>')


def line(x0, y0, x1, y1, color=GRID, width=1.0):
    return (f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}" '
            f'stroke-width="{width}"/>')


def legend(impls, x, y):
    parts = []
    for impl in impls:
        parts += [marker(impl, x, y - 4), text_at(x + 11, y, IMPLS[impl][0])]
        x += 120
    return parts


def svg(width, height, title, parts):
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">')
    return "\n".join([head, f"<title>{html.escape(title)}</title>",
                      f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts,
                      "</svg>\n"])


def caption(records):
    meta = metas(records)
    return f"{meta[0]['device']}, {meta[0]['date']}" if meta else ""


def ratio_axis(rows):
    """Where the axis of ratios ends: a little past 1, or past what was measured."""
    return 1.03 * max([1.0] + [ratio_of(r) for row in rows for r in row.values() if r["us"]])


def marks(row, place, size=5.0):
    """A marker for each library, ours on top. place: record -> x, y."""
    order = [impl for impl in IMPLS if impl != OURS] + [OURS]
    return [marker(impl, *place(row[impl]), size) for impl in order if us_of(row, impl)]


def shapes_plot(records, suite, title):
    """A line for each shape, a marker for each library: how close to the roofline it comes."""
    groups = problems(records, suite)
    left, right, top, step, width = 236, 24, 84, 19, 860
    rows = rows_of(records, suite)
    end = ratio_axis(rows)

    def at(ratio):
        return left + (width - left - right) * ratio / end

    lines, y = [], top
    for (op, dtype), group in groups.items():
        y += 12
        lines.append(text_at(left - 12, y, f"{OPS[op]}, {dtype}", "end", weight="bold"))
        for label, row in group.items():
            y += step
            lines += [line(left, y, at(end), y), text_at(left - 12, y + 4, label, "end")]
            lines += marks(row, lambda record, y=y: (at(ratio_of(record)), y))
        y += step
    bottom = y
    axis = []
    for tick in range(int(end * 5) + 1):
        x, one = at(tick / 5), tick == 5
        axis += [line(x, top - 4, x, bottom, INK if one else GRID, 1.4 if one else 1.0),
                 text_at(x, bottom + 18, f"{tick / 5:.1f}", "middle")]
    axis.append(text_at((left + at(end)) / 2, bottom + 38,
                        "speed relative to an elementwise kernel that moves the same bytes",
                        "middle", color=FAINT))
    head = [text_at(16, 26, title, size=16, weight="bold"),
            text_at(width - right, 26, caption(records), "end", color=FAINT),
            *legend(impls_in(rows), 24, 56)]
    return svg(width, bottom + 52, title, head + axis + lines)


def sweep_plot(records):
    """Every shape of the sweep: the ratio against the number of elements."""
    title = "200 random shapes, backward, bf16"
    rows = rows_of(records, "sweep")
    left, right, top, height, width = 60, 24, 84, 330, 860
    end = ratio_axis(rows)
    low, high = 18, 27 # log2 of the elements

    def place(record):
        elements = math.log2(record["rows"] * record["cols"])
        x = left + (width - left - right) * (elements - low) / (high - low)
        return x, top + height * (1 - ratio_of(record) / end)

    parts = []
    for tick in range(int(end * 5) + 1):
        y, one = top + height * (1 - tick / 5 / end), tick == 5
        parts += [line(left, y, width - right, y, INK if one else GRID, 1.4 if one else 1.0),
                  text_at(left - 8, y + 4, f"{tick / 5:.1f}", "end")]
    for power in range(low, high + 1):
        x = left + (width - left - right) * (power - low) / (high - low)
        parts += [line(x, top, x, top + height),
                  text_at(x, top + height + 18, f"2^{power}", "middle")]
    for row in rows:
        parts += marks(row, place, size=3.2)
    head = [text_at(16, 26, title, size=16, weight="bold"),
            text_at(width - right, 26, caption(records), "end", color=FAINT),
            *legend(impls_in(rows), 24, 56),
            text_at((left + width - right) / 2, top + height + 38,
                    "elements (rows x cols); speed relative to the elementwise kernel", "middle",
                    color=FAINT)]
    return svg(width, top + height + 52, title, head + parts)


def plots_of(records):
    """{name: SVG} for what was measured."""
    found = {suite: shapes_plot(records, suite, title) for suite, title in TITLES.items()
             if rows_of(records, suite)}
    if headline(records):
        chosen = metas(records) + [r for row in headline(records).values() for r in row.values()]
        found["backward"] = shapes_plot(chosen, HEADLINE[0],
                                        "LayerNorm backward at hidden sizes of known models")
    if rows_of(records, "sweep"):
        found["sweep"] = sweep_plot(records)
    return found


# ---- files -------------------------------------------------------------------------------------


def files_of(records, readme):
    """{path in the repository: text}; readme: its present text."""
    plots = plots_of(records)
    made = {f"docs/benchmarks/{name}.svg": text for name, text in plots.items()}
    made["docs/BENCHMARKS.md"] = document(records, plots)
    if headline(records):
        made["README.md"] = readme_with(readme, readme_results(records))
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    chosen = parser.parse_args()
    paths = sorted((chosen.root / "docs/benchmarks").glob("*.json"))
    if not paths:
        sys.exit(f"no records in {chosen.root / 'docs/benchmarks'}")
    readme = (chosen.root / "README.md").read_text(encoding="utf-8")
    stale = []
    for name, text in files_of(load(paths), readme).items():
        path = chosen.root / name
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.exit("not what tools/plot_bench.py makes: " + ", ".join(stale))


if __name__ == "__main__":
    main()
