"""README's table, that of docs/measurements/README.md and the pictures of docs/figures, made from the records.

``keysieve bench figures``: nothing is measured and nothing is typed in by hand. Every number comes from a recorded line
with a green exactness gate, and captions name device, versions, commits and dates of the lines that were used.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from keysieve.bench.report import Line, Measurements, commit_of, commits, read
from keysieve.checks import refuse

BEGIN, END = "<!-- measured: begin (keysieve bench figures) -->", "<!-- measured: end -->"
CASES = ("1x4K", "1x128K", "1x1M", "8x128K", "32x128K", "128x4K", "128x32K", "64x64K")
CONTEXTS = {"4K": 4096, "32K": 32768, "64K": 65536, "128K": 131072, "1M": 1 << 20}
DETERMINISTIC = "deep_gemm+flashinfer_deterministic"
SHADES = {"1": "tab:blue", "8": "tab:orange", "32": "tab:green", "64": "tab:purple", "128": "tab:red"}


def usual(measured: Measurements, op: str, **wanted: Any) -> dict[str, Line]:
    """The lines of an op in the usual setting (FP8 with fp32 scales, 32 heads, one device) by case."""
    alone = {"op": op, "topk": 2048, **wanted}
    return {
        line["case"]: line
        for line in measured.lines
        if all(line.get(name) == value for name, value in alone.items())
        and line.get("heads") in (0, 32)
        and line.get("format") in ("", "fp8_fp32")
        and line.get("world", 1) == 1
    }


def readme_block(measured: Measurements) -> str:
    """The Markdown between README's two markers."""
    scores, steps = usual(measured, "score"), usual(measured, "step")
    selects = usual(measured, "select", entry="select", kind="gaussian")
    columns = (
        "requests x keys",
        "score",
        "DeepGEMM + metadata",
        "select",
        "cudnn, deterministic",
        "FlashInfer, deterministic",
        "whole step",
        "DeepGEMM + metadata + FlashInfer",
        "limit",
    )
    rows: list[tuple[str, ...]] = []
    used: list[Line] = []
    for case in CASES:
        three = [scores.get(case), selects.get(case), steps.get(case)]
        used += [line for line in three if line is not None]
        score, select, step = ((line or {}) for line in three)
        rows.append(
            (
                case.replace("x", " x "),
                _us(score.get("us")),
                _pair(score, "deep_gemm_logits", "deep_gemm_metadata"),
                _us(select.get("us")),
                _us(_peer(select, "cudnn_frontend_deterministic_positions")),
                _us(_peer(select, "flashinfer_deterministic")),
                _us(step.get("us")),
                _us(_peer(step, DETERMINISTIC)),
                _us(step.get("limit_us") or score.get("limit_us")),
            )
        )
    origins = {"score": scores, "select": selects, "whole step": steps}
    told = [measured_on(name, lines) for name, lines in origins.items() if lines.keys() & set(CASES)]
    measured_ones = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = [columns, ("---",) * len(columns), *rows]
    lines = ["| " + " | ".join(row[i] for i in measured_ones) + " |" for row in table]
    heading = "Measured on these commits of keysieve, other libraries in the same run as the column left of theirs:"
    return "\n".join([*lines, "", f"{heading} {'. '.join(told)}.", "", versions_of(used)])


def records_block(files: Sequence[Path]) -> str:
    """The Markdown between the two markers of docs/measurements/README.md: every file's records by op and commit."""
    rows = ["| records | op | device | lines | measured on |", "| --- | --- | --- | --- | --- |"]
    for file in files:
        measured = read([file])
        for device, op in measured.ops():
            lines = measured.of(device, op)
            groups = Counter(f"{commit_of(line)} ({str(line.get('date', ''))[:10]})" for line in lines)
            told = "; ".join(f"{n} of {group}" if len(groups) > 1 else group for group, n in groups.items())
            rows.append(f"| [{file.name}]({file.name}) | {op} | {device} | {len(lines)} | {told} |")
    return "\n".join(rows)


def measured_on(column: str, lines: dict[str, Line]) -> str:
    """The commit and day that a column's lines were measured on; where they differ, with the cases that are of each."""
    groups: dict[str, list[str]] = {}
    for case in CASES:
        if case in lines:
            day = str(lines[case].get("date", ""))[:10]
            groups.setdefault(f"{commit_of(lines[case])} ({day})", []).append(case)
    told = [group if len(groups) == 1 else f"{group} for {', '.join(cases)}" for group, cases in groups.items()]
    return f"*{column}*: {'; '.join(told)}"


def versions_of(lines: Iterable[Line]) -> str:
    """Devices and versions of what ran beside keysieve."""
    lines = list(lines)
    devices = ", ".join(sorted({str(line["device"]) for line in lines}))
    versions = {f"{name} {value}" for line in lines for name, value in (line.get("versions") or {}).items()}
    return f"{devices}; {', '.join(sorted(versions))}."


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _peer(line: dict[str, Any], name: str) -> float | None:
    value: float | None = (line.get("peers") or {}).get(name)
    return value


def _pair(line: dict[str, Any], first: str, second: str) -> str:
    a, b = _peer(line, first), _peer(line, second)
    return "" if a is None or b is None else f"{a:.1f} + {b:.1f}"


def rewritten(text: str, block: str) -> str:
    """A README with the block between its markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        refuse("README", got="no single pair of markers", accepted=f"{BEGIN} ... {END}", remedy="Put the markers back.")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


# ------------------------------------------------------------------------------------------------------------ pictures


def by_context(measured: Measurements, axes: Any) -> list[Line]:
    """Time of a step against context length, a colour for each batch; dashed: its limit; dots: the deterministic
    combination of other libraries."""
    steps = usual(measured, "step")
    used: list[Line] = []
    for batch, colour in SHADES.items():
        known = [(CONTEXTS[size], steps[f"{batch}x{size}"]) for size in CONTEXTS if f"{batch}x{size}" in steps]
        if not known:
            continue
        used += [line for _, line in known]
        axes.plot(
            [n for n, _ in known],
            [x["us"] for _, x in known],
            "D-",
            color=colour,
            label=f"{batch} request" + "s" * (batch != "1"),
        )
        limits = [(n, x["limit_us"]) for n, x in known if x.get("limit_us")]
        axes.plot([n for n, _ in limits], [us for _, us in limits], "_--", color=colour, alpha=0.6)
        others = [(n, _peer(x, DETERMINISTIC)) for n, x in known if _peer(x, DETERMINISTIC)]
        axes.plot([n for n, _ in others], [us for _, us in others], "o:", color=colour, alpha=0.5)
    axes.plot([], [], "k--", label="bytes / read bandwidth")
    if any(_peer(line, DETERMINISTIC) for line in used):
        axes.plot([], [], "ko:", alpha=0.5, label="DeepGEMM + metadata + FlashInfer det.")
    axes.set(xscale="log", yscale="log", xlabel="keys a request", ylabel="microseconds a step")
    axes.set_xticks(list(CONTEXTS.values()), list(CONTEXTS))
    axes.minorticks_off()
    return used


def by_batch(measured: Measurements, axes: Any) -> list[Line]:
    """Share of the limit that a score and a step reach, by case in the order of their bytes."""
    scores, steps = usual(measured, "score"), usual(measured, "step")
    known = [case for case in scores if case in steps and scores[case].get("limit_us") and steps[case].get("limit_us")]
    cases = sorted(known, key=lambda case: (float(steps[case]["limit_us"]), case))
    for shift, (name, lines) in zip((-0.2, 0.2), (("score", scores), ("step", steps)), strict=True):
        shares = [100 * lines[case]["limit_us"] / lines[case]["us"] for case in cases]
        of = commits([lines[case] for case in cases])
        axes.bar([i + shift for i in range(len(cases))], shares, width=0.38, label=f"{name} ({of})")
    axes.axhline(100, color="tab:gray", linestyle="--", label="the limit")
    axes.set_xticks(range(len(cases)), cases, rotation=45, ha="right")
    axes.set(ylabel="% of the limit (bytes / read bandwidth)")
    return [lines[case] for lines in (scores, steps) for case in cases]


def by_rows(measured: Measurements, axes: Any) -> list[Line]:
    """What the exchange and the merge add to a rank's own work, against rows; and the all-gather beside it."""
    # Where W * topn is no more than topk every row needs a second round: that is another measurement.
    lines = [x for x in measured.lines if x["op"] == "exchange" and x.get("topn", x["topk"]) * x["world"] > x["topk"]]
    lines.sort(key=lambda x: int(x["requests"]))
    groups = dict.fromkeys((x["world"], bool(x.get("virtual")), x.get("local_keys", 0)) for x in lines)
    for colour, (world, virtual, keys) in zip(SHADES.values(), groups, strict=False):
        some = [
            x for x in lines if (x["world"], bool(x.get("virtual")), x.get("local_keys", 0)) == (world, virtual, keys)
        ]
        label = f"W = {world}" + (", one GPU" if virtual else "") + (f", {keys >> 10}K keys a rank" if keys else "")
        axes.plot([x["requests"] for x in some], [x["us"] for x in some], "D-", color=colour, label=label)
        gathers = [(x["requests"], _peer(x, "nccl_all_gather_merge")) for x in some]
        known = [(rows, us) for rows, us in gathers if us]
        if known:
            axes.plot(*zip(*known, strict=True), "o:", alpha=0.6, color=colour, label=f"{label}: NCCL + merge")
    axes.set(xscale="log", ylabel="microseconds beyond score + local top-N", xlabel="rows")
    rows = sorted({int(x["requests"]) for x in lines})
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.minorticks_off()
    return lines


PICTURES: dict[str, tuple[str, Callable[[Measurements, Any], list[Line]]]] = {
    "step-by-context": ("A step against context length", by_context),
    "share-of-limit": ("How much of the limit is reached", by_batch),
    "dcp-by-rows": ("Context parallelism: exchange and merge", by_rows),
}


def draw(measured: Measurements, folder: Path) -> list[Path]:
    """Write the pictures that there are lines for, as SVG; the same lines give the same bytes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "keysieve", "font.size": 9}):
        for name, (title, fill) in PICTURES.items():
            figure, axes = plt.subplots(figsize=(8.0, 4.6), layout="constrained")
            used = fill(measured, axes)
            if used:
                axes.set_title(title)
                axes.grid(alpha=0.3)
                axes.legend(fontsize=8)
                devices = ", ".join(sorted({line["device"] for line in used}))
                dates = ", ".join(sorted({str(line.get("date", ""))[:10] for line in used}))
                caption = f"{devices}; {dates}; {commits(used)}; docs/measurements"
                figure.supxlabel(caption, fontsize=7, color="gray")
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                made.append(folder / f"{name}.svg")
            plt.close(figure)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite both READMEs' tables and the pictures; with --check only say whether the tables are current."""
    parser = argparse.ArgumentParser(prog="keysieve bench figures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(), help="a checkout of keysieve (default: here)")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a table is not current")
    args = parser.parse_args(argv)
    files = sorted((args.root / "docs" / "measurements").glob("*.jsonl"))
    if not files:
        refuse(
            "--root", got=str(args.root), accepted="a checkout with docs/measurements/*.jsonl", remedy="Run it there."
        )
    measured = read(files)
    blocks = {args.root / "README.md": readme_block(measured), files[0].parent / "README.md": records_block(files)}
    texts = {page: (page.read_text(), rewritten(page.read_text(), block)) for page, block in blocks.items()}
    if args.check:
        stale = [str(page) for page, (old, new) in texts.items() if new != old]
        print("\n".join(f"{page}: its table is not current: keysieve bench figures" for page in stale) or "all current")
        return 1 if stale else 0
    for page, (_, new) in texts.items():
        page.write_text(new)
    for path in draw(measured, args.root / "docs" / "figures"):
        print(f"picture: {path}")
    return 0
