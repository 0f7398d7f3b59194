"""Tables and plots of recorded measurements: ``keysieve bench table FILE...`` and ``keysieve bench plot FILE...``.

A file holds one JSON line a measurement, with the fields that ``docs/measurements`` describes; this module only shows
them. The newest line of an op, case and setting wins; lines without a green exactness gate are left out and counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keysieve.checks import refuse

Line = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    """What was read.

    Attributes:
        lines: the newest line of every (device, op, case, heads, topk, format, numerics, world), in file order.
        inexact: lines left out because their exactness gate was not green.
    """

    lines: tuple[Line, ...]
    inexact: int

    def ops(self) -> list[tuple[str, str]]:
        """(device, op) pairs that occur, in order."""
        return list(dict.fromkeys((line["device"], line["op"]) for line in self.lines))

    def of(self, device: str, op: str) -> list[Line]:
        return [line for line in self.lines if (line["device"], line["op"]) == (device, op)]


def identity(line: Line) -> tuple[Any, ...]:
    """What makes two lines measurements of the same thing."""
    names = (
        "device",
        "op",
        "case",
        "heads",
        "topk",
        "format",
        "numerics",
        "world",
        "cached",
        "entry",
        "kind",
        "topn",
        "what",
        "virtual",
    )
    return tuple(line.get(name) for name in names)


def read(paths: Iterable[Path]) -> Measurements:
    """Read JSON lines.

    Raises:
        KeysieveError: a file that cannot be read, or a line that is no measurement; the text names file and line.
    """
    newest: dict[tuple[Any, ...], Line] = {}
    inexact = 0
    for path in paths:
        try:
            text = path.read_text()
        except OSError as error:
            refuse("FILE", got=f"{path} ({error.strerror})", accepted="a file of JSON lines", remedy="Check the path.")
        for number, raw in enumerate(text.splitlines(), 1):
            if not raw.strip():
                continue
            line = _parse(path, number, raw)
            if line["exact"] is not True:
                inexact += 1
                continue
            earlier = newest.pop(identity(line), None)
            keep = earlier if earlier and str(earlier.get("date", "")) > str(line.get("date", "")) else line
            newest[identity(line)] = keep
    return Measurements(tuple(newest.values()), inexact)


def _parse(path: Path, number: int, raw: str) -> Line:
    try:
        line = json.loads(raw)
        missing = [name for name in ("device", "op", "case", "us", "exact") if name not in line]
    except (json.JSONDecodeError, TypeError) as error:
        refuse("FILE", got=f"{path}:{number} ({error})", accepted="one JSON object a line", remedy="Mend the line.")
    if missing:
        refuse("FILE", got=f"{path}:{number} without {missing}", accepted="a measurement", remedy="Mend the line.")
    parsed: Line = line
    return parsed


def setting(line: Line) -> str:
    """The setting of a line, shortly: format, heads, topk, and what is unusual."""
    parts = [str(line.get("format", "")), f"{line.get('heads', '?')} heads", f"K {line.get('topk', '?')}"]
    if line.get("world", 1) != 1:
        parts.append(f"W {line['world']}")
    parts += [str(line[name]) for name in ("entry", "kind", "what") if line.get(name)]
    parts += [f"N {line['topn']}"] if line.get("topn") else []
    parts += [name for name in ("cached", "virtual") if line.get(name)]
    return ", ".join(part for part in parts if part)


def table(lines: Sequence[Line]) -> list[list[str]]:
    """Header and rows of a table of one op: times in microseconds, the share of the limit, peers and their ratio."""
    peers = list(dict.fromkeys(name for line in lines for name in line.get("peers") or {}))
    rows = [["case", "setting", "us", "min..max", "limit", "of limit", *(f"{peer} (x)" for peer in peers)]]
    for line in lines:
        us, limit = float(line["us"]), line.get("limit_us")
        row = [str(line["case"]), setting(line), f"{us:.1f}"]
        row.append(f"{line['us_min']:.1f}..{line['us_max']:.1f}" if "us_min" in line else "")
        row += [f"{limit:.1f}", f"{100 * limit / us:.0f} %"] if limit else ["", ""]
        for peer in peers:
            time = (line.get("peers") or {}).get(peer)
            row.append("" if time is None else f"{time:.1f} ({time / us:.1f})")
        rows.append(row)
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text columns: the first two left-aligned, numbers right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def draw(measured: Measurements, device: str, op: str, path: Path) -> None:
    """One picture: a case per column, keysieve and peers as points, the memory or compute limit as a line below.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = sorted(measured.of(device, op), key=lambda line: float(line.get("limit_us") or line["us"]))
    places = range(len(lines))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.55 * len(lines) + 2.5), 4.8), layout="constrained")
    limits = [(x, float(line["limit_us"])) for x, line in zip(places, lines, strict=True) if line.get("limit_us")]
    if limits:
        axes.fill_between([x for x, _ in limits], [y for _, y in limits], alpha=0.15, color="tab:gray", step="mid")
        axes.step(
            [x for x, _ in limits], [y for _, y in limits], where="mid", color="tab:gray", label="limit (roofline)"
        )
    for peer in dict.fromkeys(name for line in lines for name in line.get("peers") or {}):
        known = [
            (x, line["peers"][peer]) for x, line in zip(places, lines, strict=True) if peer in (line["peers"] or {})
        ]
        axes.plot([x for x, _ in known], [y for _, y in known], "o", alpha=0.7, label=peer)
    us = [float(line["us"]) for line in lines]
    axes.plot(places, us, "D", color="black", label="keysieve")
    axes.set_yscale("log")
    axes.set_ylabel("microseconds (median)")
    settings = {setting(line) for line in lines}
    names = [line["case"] if len(settings) == 1 else f"{line['case']}\n{setting(line)}" for line in lines]
    axes.set_xticks(list(places), names, rotation=60, ha="right", fontsize=8)
    axes.set_title(f"{op} on {device}" + (f": {settings.pop()}" if len(settings) == 1 else ""))
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Show recorded measurements; 1 if a file holds none that passed its gate."""
    parser = argparse.ArgumentParser(prog="keysieve bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("table", "plot"))
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines, as benchmarks append them")
    parser.add_argument("--op", default=None, help="only this op")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures (default ./out)")
    args = parser.parse_args(argv)
    measured = read(args.files)
    shown = [pair for pair in measured.ops() if args.op in (None, pair[1])]
    for device, op in shown:
        if args.what == "table":
            print(f"{op} on {device}, microseconds")
            print("\n".join(f"  {line}" for line in aligned(table(measured.of(device, op)))))
        else:
            path = args.out / f"bench-{op}-{'-'.join(device.lower().split())}.png"
            draw(measured, device, op, path)
            print(f"picture: {path}")
    if measured.inexact:
        print(f"{measured.inexact} measurements left out: their exactness gate was not green")
    return 0 if shown else 1
