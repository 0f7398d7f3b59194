"""A cost model of the exchange, fitted to records, and what it expects of larger groups.

    keysieve bench dcp-model [--records docs/measurements/dcp.jsonl] [--figure docs/figures/dcp-scaling.svg]

What exchange and merge add to a step of `rows` rows on W ranks, in microseconds:

    added = push + merge + link
    push  = p0 + p1 * pairs * W * waves            stores: one device (`dcp_virtual`), less what keeping words takes
    merge = m0 + m1 * pairs * W * waves + m2 * W   polls and selection: from one device with all words in place
    link  = l0 + bytes / bandwidth                 what two devices add to that (`dcp`, W = 2); bytes leave each rank

`pairs` are a row's 16-byte pairs (two words, each with its tag; N is the default of W), `waves` = max(1, rows / SMs),
bytes = rows * pairs * 16 * (W - 1). Coefficients are least squares. The error of a prediction is the root mean square
of what the three fits leave, added in quadrature, doubled. Whether a switch with seven peers behaves as one peer does
is not in it: no machine of more than two devices was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keysieve.bench.places import require_file
from keysieve.checks import refuse
from keysieve.spec import candidate_words, default_topn

SMS = 132
TOPK = 2048
WORLDS = (2, 4, 8, 16)
ROWS = (1, 16, 64, 128, 512)


def pairs_of(world: int) -> int:
    """16-byte pairs of a row, with its signature, at the default N and one index plane."""
    return -(-candidate_words(default_topn(TOPK, world), 1) // 2) + 1


def waves(rows: int) -> float:
    return max(1.0, rows / SMS)


def link_bytes(world: int, rows: int) -> float:
    """Bytes that leave a rank."""
    return float(rows * pairs_of(world) * 16 * (world - 1))


@dataclass(frozen=True)
class Fit:
    """Least squares: coefficients of `features`, and the root mean square of what is left, in microseconds."""

    features: Callable[[int, int], list[float]]
    values: tuple[float, ...]
    rms: float

    def at(self, world: int, rows: int) -> float:
        return float(np.dot(self.features(world, rows), self.values))


def fit(points: dict[tuple[int, int], float], features: Callable[[int, int], list[float]]) -> Fit:
    """points: (world, rows) -> microseconds."""
    matrix = np.array([features(*key) for key in points])
    wanted = np.array(list(points.values()))
    found, *_ = np.linalg.lstsq(matrix, wanted, rcond=None)
    left = wanted - matrix @ found
    free = max(len(points) - len(found), 1)
    return Fit(features, tuple(float(v) for v in found), float(np.sqrt((left**2).sum() / free)))


def _work(world: int, rows: int) -> list[float]:
    return [1.0, pairs_of(world) * world * waves(rows) / 1000]


def _merge_work(world: int, rows: int) -> list[float]:
    return [*_work(world, rows), float(world)]


def _link_work(world: int, rows: int) -> list[float]:
    return [1.0, link_bytes(world, rows) / 1e6]


@dataclass(frozen=True)
class Model:
    """The three fits, and the points they were made from."""

    push: Fit
    merge: Fit
    link: Fit
    measured: dict[tuple[int, int], float]

    @property
    def error(self) -> float:
        """Microseconds to allow on either side of a prediction."""
        return 2 * float(np.sqrt(self.push.rms**2 + self.merge.rms**2 + self.link.rms**2))

    def added(self, world: int, rows: int) -> float:
        """Exchange and merge on top of score and local top-N, in microseconds."""
        return self.push.at(world, rows) + self.merge.at(world, rows) + self.link.at(world, rows)


def model(records: list[dict[str, Any]], left_out: int | None = None) -> Model:
    """From the records of `dcp` and `dcp_virtual`; the newest line of a case counts. left_out: a W not to fit to."""
    pushes: dict[tuple[int, int], float] = {}
    merges: dict[tuple[int, int], float] = {}
    measured: dict[tuple[int, int], float] = {}
    for line in records:
        key = (line["world"], line["requests"])
        if line.get("topn") != default_topn(TOPK, line["world"]) or line.get("kind"):
            continue
        if line["op"] == "merge" and line.get("transport") == "one device" and line["world"] != left_out:
            pushes[key] = line["push_us"] - line["offer_us"]
            merges[key] = line["us"]
        if line["op"] == "exchange" and line.get("transport") == "nvlink":
            measured[key] = line["us"]
    push, merge = fit(pushes, _work), fit(merges, _merge_work)
    rest = {key: us - push.at(*key) - merge.at(*key) for key, us in measured.items()}
    return Model(push, merge, fit(rest, _link_work), measured)


def table(found: Model) -> str:
    """Rows of what is expected, beside what was measured."""
    lines = [
        "| rows | " + " | ".join(f"W {w}" for w in WORLDS) + " | measured, W 2 |",
        "|---" * (len(WORLDS) + 2) + "|",
    ]
    for rows in ROWS:
        cells = [f"{found.added(w, rows):.1f} +- {found.error:.1f}" for w in WORLDS]
        known = found.measured.get((2, rows))
        lines.append(f"| {rows} | " + " | ".join(cells) + f" | {'-' if known is None else f'{known:.1f}'} |")
    return "\n".join(lines)


def draw(found: Model, records: list[dict[str, Any]], path: Path) -> None:
    """Left: what exchange and merge add against W. Right: whole steps on 1 and 2 devices, and more as expected."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "keysieve"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for rows in (1, 64, 128, 512):
        expected = [found.added(w, rows) for w in WORLDS]
        drawn = left.errorbar(WORLDS, expected, yerr=found.error, marker="o", capsize=3, ls="--", label=f"{rows} rows")
        if (2, rows) in found.measured:
            left.plot([2], [found.measured[2, rows]], "s", color=drawn[0].get_color(), ms=9, mfc="none")
    left.axhline(8.0, color="grey", lw=0.8)
    left.set(xscale="log", xticks=WORLDS, xticklabels=WORLDS, xlabel="ranks W", ylabel="us added by exchange + merge")
    left.minorticks_off()
    left.set_title("expected (dashed, from W = 2 and one device); squares: measured", fontsize=9)
    left.legend(fontsize=8)
    steps: dict[str, dict[int, float]] = {}
    for line in records:
        if line["op"] == "dcp_step" and "late_rank" not in line and "virtual" not in line:
            steps.setdefault(line["case"], {})[line["world"]] = line["us"]
    for name, times in steps.items():
        if {1, 2} <= set(times):
            more = {w: scaled(times, found, w, int(name.partition("x")[0])) for w in (4, 8)}
            curve = {1: times[1], 2: times[2], **{w: us for w, us in more.items() if us is not None}}
            right.plot(list(curve), [times[1] / (w * us) for w, us in curve.items()], "o--", label=name)
    right.set(
        xscale="log", xticks=(1, 2, 4, 8), xticklabels=(1, 2, 4, 8), xlabel="ranks W", ylabel="scaling efficiency"
    )
    right.set_ylim(0, 1.05)
    right.minorticks_off()
    right.set_title("whole step: W = 1, 2 measured; 4, 8 expected", fontsize=9)
    right.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def scaled(times: dict[int, float], found: Model, world: int, rows: int) -> float | None:
    """A whole step on W ranks, from those on 1 and 2: what W = 2 does not spend on the exchange is taken to consist of
    a fixed part and one that W divides, the latter from the difference of the two. None if two ranks gain nothing: then
    nothing follows for more."""
    divided = 2 * (times[1] - (times[2] - found.added(2, rows)))
    return None if divided <= 0 else times[1] - divided + divided / world + found.added(world, rows)


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
    records = [json.loads(line) for line in args.records.read_text().splitlines() if line.strip()]
    found = model(records)
    per_pair = found.push.values[1], found.merge.values[1]
    print(f"push  = {found.push.values[0]:.2f} + {per_pair[0]:.3f} * kilopairs, left {found.push.rms:.2f} us")
    fixed, per_rank = found.merge.values[0], found.merge.values[2]
    print(f"merge = {fixed:.2f} + {per_pair[1]:.3f} * kilopairs + {per_rank:.3f} * W, left {found.merge.rms:.2f} us")
    speed = 1 / found.link.values[1] if found.link.values[1] > 0 else float("inf")
    print(f"link  = {found.link.values[0]:.2f} + bytes / {speed:.3f} TB/s, left {found.link.rms:.2f} us")
    for world in WORLDS:
        other = model(records, left_out=world)
        same = model(records)
        worst = max(abs(other.merge.at(world, r) - same.merge.at(world, r)) for r in ROWS)
        print(f"merge at W {world} from the other W: at most {worst:.2f} us from the fit to all")
    print(table(found))
    if args.figure is not None:
        draw(found, records, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
