"""A cost model of the exchange, fitted to records, and what it expects of larger groups.

    keysieve bench dcp-model [--records docs/measurements/dcp.jsonl] [--figure docs/figures/dcp-scaling.svg]

What exchange and merge add to a step of `rows` rows on W ranks, in microseconds:

    added = alone + link
    alone = a0 + a1 * work + a2 * pairs * W * later + a3 * W  one rank whose peers' words are its own, launches chained
    link  = l0 + bytes / bandwidth                          what devices add: latency, and bytes leaving one at the end

`pairs` are a row's 16-byte pairs (two words, each with its tag; N is the default of W), `work` = pairs * W * rows in
hundred thousands, `later` = max(0, rows / SMs - 1): rows that wait for a multiprocessor. `bytes` are those of the last
min(rows, SMs) rows: what was pushed before travels while kernels work. `alone` is fitted to W = 2 to 16 on one device
(`dcp-virtual --only chain`). The link is fitted to rows that multiprocessors take at once: of two ranks on two devices
(`dcp`), less what a rank alone takes by its fit, and of 2, 4 and 8 ranks on two devices, half on each, less the same
ranks on one (`dcp-virtual --only spread`), where `(W / 2)^2` lists of a row leave a device. In a group of W devices
W - 1 do.

Coefficients are least squares; the errors of `alone` are relative. The error of an expectation is twice the root of the
summed squares of what the two fits leave. A whole step on W devices is the step of one rank whose peers' words are its
own (`dcp-virtual --only steps`) and the link. Whether a switch with seven peers behaves as one peer does is not in it:
no machine of more than two devices was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keysieve.bench.places import require_file
from keysieve.bench.report import lines_of
from keysieve.checks import refuse
from keysieve.spec import candidate_words, default_topn

SMS = 132
TOPK = 2048
CHAIN = "chain"
"""`kind` of the lines of what exchange and merge add to a rank's chained launches, alone."""
WORLDS = (2, 4, 8, 16)
ROWS = (1, 16, 64, 128, 512)


def pairs_of(world: int) -> int:
    """16-byte pairs of a row, with its signature, at the default N and one index plane."""
    return -(-candidate_words(default_topn(TOPK, world), 1) // 2) + 1


def link_megabytes(world: int, rows: int) -> float:
    """Megabytes that leave a rank with the last rows that multiprocessors take at once."""
    return min(rows, SMS) * pairs_of(world) * 16 * (world - 1) / 1e6


def work(world: int, rows: int) -> float:
    """Pairs of all rows from all ranks, in hundred thousands."""
    return pairs_of(world) * world * rows / 1e5


@dataclass(frozen=True)
class Fit:
    """Least squares: coefficients of `features`, and the root mean square of what is left: in microseconds, or
    (`relative`) as a part of the value."""

    features: Callable[[int, int], list[float]]
    values: tuple[float, ...]
    rms: float
    relative: bool

    def at(self, world: int, rows: int) -> float:
        return float(np.dot(self.features(world, rows), self.values))

    def left(self, world: int, rows: int) -> float:
        """Microseconds that the fit is expected to be off."""
        return self.rms * (self.at(world, rows) if self.relative else 1.0)


Points = list[tuple[list[float], float]]


def fit(points: Points, features: Callable[[int, int], list[float]], relative: bool = False) -> Fit:
    """points: features of a measurement, and its microseconds."""
    matrix = np.array([at for at, _ in points])
    wanted = np.array([us for _, us in points])
    weights = 1 / wanted if relative else np.ones_like(wanted)
    found, *_ = np.linalg.lstsq(matrix * weights[:, None], wanted * weights, rcond=None)
    left = (wanted - matrix @ found) * weights
    free = max(len(points) - len(found), 1)
    return Fit(features, tuple(float(v) for v in found), float(np.sqrt((left**2).sum() / free)), relative)


def _alone_work(world: int, rows: int) -> list[float]:
    later = max(0.0, rows / SMS - 1)
    return [1.0, work(world, rows), pairs_of(world) * world * later / 1000, float(world)]


def _link_work(world: int, rows: int) -> list[float]:
    return [1.0, link_megabytes(world, rows)]


@dataclass(frozen=True)
class Model:
    """The two fits, and what was measured over NVLink: (world, rows) -> microseconds."""

    alone: Fit
    link: Fit
    measured: dict[tuple[int, int], float]

    def error(self, world: int, rows: int) -> float:
        """Microseconds to allow on either side of an expectation."""
        return 2 * float(np.hypot(self.alone.left(world, rows), self.link.left(world, rows)))

    def added(self, world: int, rows: int) -> float:
        """Exchange and merge on top of score and local top-N, in microseconds."""
        return self.alone.at(world, rows) + self.link.at(world, rows)


def model(records: list[dict[str, Any]], left_out: int | None = None) -> Model:
    """From the records of `dcp` and `dcp-virtual`; the newest line of a case counts, and over NVLink those of the
    commit that chains were measured of. left_out: a W not to fit to."""
    by_itself: dict[tuple[int, int], float] = {}
    spread: dict[tuple[int, int], float] = {}
    measured: dict[tuple[int, int], float] = {}
    commits = {line.get("commit") for line in records if line.get("kind") == CHAIN}
    for line in records:
        key = (line["world"], line["requests"])
        if line.get("topn") != default_topn(TOPK, line["world"]):
            continue
        what = line["op"], line.get("transport"), line.get("kind")
        if what == ("merge", "one device", CHAIN) and line["world"] != left_out:
            by_itself[key] = line["us"]
        elif what == ("merge", "two devices", None) and line["world"] != left_out:
            spread[key] = line["us"]
        elif what == ("exchange", "nvlink", None) and line.get("commit") in commits:  # other code, other chains
            measured[key] = line["us"]
    if not by_itself or not spread:
        lacking = "chain" if not by_itself else "spread"
        remedy = (
            "Measure with `keysieve bench dcp` on two GPUs and `keysieve bench dcp-virtual --only chain,steps,spread`."
        )
        refuse("--records", got=f"no lines of {lacking}", accepted="lines of both benches", remedy=remedy)
    alone = fit([(_alone_work(*key), us) for key, us in by_itself.items()], _alone_work, relative=True)
    links: Points = [(_link_work(*key), us - alone.at(*key)) for key, us in measured.items() if key[1] <= SMS]
    for (world, rows), us in spread.items():
        lists = (world // 2) ** 2
        if rows <= SMS and lists <= max(WORLDS):  # no rank of a group sends more
            links.append(([1.0, rows * pairs_of(world) * 16 * lists / 1e6], us))
    return Model(alone, fit(links, _link_work), measured)


def table(found: Model) -> str:
    """Rows of what is expected, beside what was measured."""
    lines = [
        "| rows | " + " | ".join(f"W {w}" for w in WORLDS) + " | measured, W 2 |",
        "|---" * (len(WORLDS) + 2) + "|",
    ]
    for rows in ROWS:
        cells = [f"{found.added(w, rows):.1f} +- {found.error(w, rows):.1f}" for w in WORLDS]
        known = found.measured.get((2, rows))
        lines.append(f"| {rows} | " + " | ".join(cells) + f" | {'-' if known is None else f'{known:.1f}'} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Steps:
    """Whole steps of a case, W -> microseconds: over devices, and of one rank whose peers' words are its own."""

    rows: int
    measured: dict[int, float]
    alone: dict[int, float]

    def expected(self, found: Model) -> dict[int, float]:
        """On W devices."""
        return {world: us + max(found.link.at(world, self.rows), 0.0) for world, us in sorted(self.alone.items())}

    def efficiency(self, world: int, us: float) -> float:
        return self.measured[1] / (world * us)


def steps_of(records: list[dict[str, Any]]) -> dict[str, Steps]:
    """By case; the newest line counts."""
    found: dict[str, Steps] = {}
    for line in records:
        if line["op"] == "dcp_step" and "late_rank" not in line:
            steps = found.setdefault(line["case"], Steps(line["requests"], {}, {}))
            (steps.alone if line.get("virtual") else steps.measured)[line["world"]] = line["us"]
    return {name: steps for name, steps in found.items() if 1 in steps.measured}


def step_table(found: Model, steps: dict[str, Steps]) -> str:
    """A row a case and W: measured, expected, efficiency of the one that there is."""
    lines = ["| step | W | measured | one rank alone | expected | efficiency |", "|---" * 6 + "|"]
    for name, x in steps.items():
        expected = x.expected(found)
        for world in sorted({*x.measured, *expected}):
            known, own, thought = x.measured.get(world), x.alone.get(world), expected.get(world)
            part = x.efficiency(world, known if known is not None else expected[world])
            shown = [f"{us:.1f}" if us is not None else "-" for us in (known, own)]
            allowed = 2 * found.link.left(world, x.rows)
            shown.append("-" if thought is None else f"{thought:.1f} +- {allowed:.1f}")
            lines.append(f"| {name} | {world} | " + " | ".join(shown) + f" | {part:.2f} |")
    return "\n".join(lines)


def draw(found: Model, records: list[dict[str, Any]], path: Path) -> None:
    """Left: what exchange and merge add against W. Right: efficiency of whole steps, measured and expected."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "keysieve"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for rows in (1, 64, 128, 512):
        expected = [found.added(w, rows) for w in WORLDS]
        error = [found.error(w, rows) for w in WORLDS]
        drawn = left.errorbar(
            WORLDS, expected, yerr=error, marker="o", capsize=3, ls="--", label=f"{rows} row" + "s" * (rows > 1)
        )
        if (2, rows) in found.measured:
            left.plot([2], [found.measured[2, rows]], "s", color=drawn[0].get_color(), ms=9, mfc="none")
    left.axhline(8.0, color="grey", lw=0.8)
    left.set(xscale="log", xticks=WORLDS, xticklabels=WORLDS, xlabel="ranks W", ylabel="us added by exchange + merge")
    left.minorticks_off()
    left.set_title("expected (dashed, from W = 2 and virtual ranks); squares: measured", fontsize=9)
    left.legend(fontsize=8)
    for name, x in steps_of(records).items():
        curve = {1: x.measured[1], **x.expected(found)}
        parts = [x.efficiency(w, us) for w, us in curve.items()]
        error = [
            p * 2 * found.link.left(w, x.rows) / us if w > 1 else 0.0
            for p, (w, us) in zip(parts, curve.items(), strict=True)
        ]
        drawn = right.errorbar(list(curve), parts, yerr=error, marker="o", capsize=3, ls="--", label=name)
        known = {w: us for w, us in x.measured.items() if w > 1}
        values = [x.efficiency(w, us) for w, us in known.items()]
        right.plot(list(known), values, "s", color=drawn[0].get_color(), ms=9, mfc="none")
    right.set(
        xscale="log", xticks=(1, *WORLDS), xticklabels=(1, *WORLDS), xlabel="ranks W", ylabel="scaling efficiency"
    )
    right.set_ylim(0, 1.05)
    right.minorticks_off()
    right.set_title("whole step: squares measured; dashed: one rank alone, and the link", fontsize=9)
    right.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = Path("docs/measurements/dcp.jsonl")
    parser.add_argument("--records", type=Path, default=where, help=f"what was measured (default: {where})")
    parser.add_argument("--figure", type=Path, default=None, help="an .svg or .png to draw")
    args = parser.parse_args(argv)
    if not args.records.is_file():
        remedy = "Measure with `keysieve bench dcp-virtual` and `keysieve bench dcp`, both with --out."
        refuse("--records", got=f"{args.records}, which is not there", accepted="a file of JSON lines", remedy=remedy)
    require_file("--figure", args.figure)
    records = list(lines_of(args.records))
    found = model(records)
    m, k = found.alone, found.link
    terms = f"{m.values[0]:.2f} + {m.values[1]:.2f} * work + {m.values[2]:.2f} * kilopairs * W * later"
    print(f"alone = {terms} + {m.values[3]:.3f} * W, left {100 * m.rms:.0f} %")
    speed = 1 / k.values[1] if k.values[1] > 0 else float("inf")
    print(f"link  = {k.values[0]:.2f} + bytes / {speed:.2f} TB/s, left {k.rms:.2f} us")
    for world in WORLDS:
        other = model(records, left_out=world)
        worst = max(abs(other.alone.at(world, r) - found.alone.at(world, r)) for r in ROWS)
        print(f"a rank alone at W {world} from the other W: at most {worst:.2f} us from the fit to all")
    print(table(found))
    print(step_table(found, steps_of(records)))
    if args.figure is not None:
        draw(found, records, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
