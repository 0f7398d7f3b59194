"""Recorded measurements, read, and as tables: ``keysieve bench table FILE...``. Pictures: :mod:`keysieve.bench.plot`.

A file holds one JSON line a measurement, with the fields that ``docs/measurements`` describes; this module only shows
them. The newest line of an op, case and setting wins; lines without a green exactness gate are left out and counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keysieve.checks import refuse, require_choice

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
        for line in lines_of(path):
            if line["exact"] is not True:
                inexact += 1
                continue
            earlier = newest.pop(identity(line), None)
            keep = earlier if earlier and str(earlier.get("date", "")) > str(line.get("date", "")) else line
            newest[identity(line)] = keep
    return Measurements(tuple(newest.values()), inexact)


def lines_of(path: Path) -> Iterator[Line]:
    """The measurements of one file, exact or not; empty lines are passed over.

    Raises:
        KeysieveError: as :func:`read`.
    """
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        refuse("FILE", got=f"{path} ({error.strerror})", accepted="a file of JSON lines", remedy="Check the path.")
    for number, raw in enumerate(text.splitlines(), 1):
        if raw.strip():
            yield _parse(f"{path}:{number}", raw)


def _parse(place: str, raw: str) -> Line:
    try:
        line = json.loads(raw)
        missing = [name for name in ("device", "op", "case", "us", "exact") if name not in line]
    except (json.JSONDecodeError, TypeError) as error:
        refuse("FILE", got=f"{place} ({error})", accepted="one JSON object a line", remedy="Mend the line.")
    if missing:
        refuse("FILE", got=f"{place} without {missing}", accepted="a measurement", remedy="Mend the line.")
    parsed: Line = line
    return parsed


def setting(line: Line) -> list[str]:
    """The setting of a line in parts: format, heads, topk where they play a role, and what is unusual."""
    parts = [str(line.get("format") or "")]
    parts += [f"{line['heads']} heads"] if line.get("heads") else []
    parts += [f"K {line['topk']}"] if line.get("topk") else []
    if line.get("world", 1) != 1:
        parts.append(f"W {line['world']}")
    parts += [str(line[name]) for name in ("entry", "kind", "what") if line.get(name)]
    parts += [f"N {line['topn']}"] if line.get("topn") else []
    parts += [name for name in ("cached", "virtual") if line.get(name)]
    return [part for part in parts if part]


def split(lines: Sequence[Line]) -> tuple[str, list[str]]:
    """What the settings of all lines have in common, and what every line has besides."""
    parts = [setting(line) for line in lines]
    common = [part for part in parts[0] if all(part in other for other in parts)]
    return ", ".join(common), [", ".join(part for part in own if part not in common) for own in parts]


def commit_of(line: Line) -> str:
    """The commit that a line was measured on, shortly; what was changed in the working tree stands behind a plus."""
    commit, plus, changed = str(line.get("commit") or "unknown").partition("+")
    return commit[:7] + plus + changed


def commits(lines: Sequence[Line]) -> str:
    """``keysieve`` and the commits of lines, in order of their dates."""
    known = dict.fromkeys(commit_of(line) for line in sorted(lines, key=lambda line: str(line.get("date", ""))))
    return f"keysieve {', '.join(known)}"


def table(lines: Sequence[Line]) -> list[list[str]]:
    """Header and rows of a table of one op: times in microseconds, the share of the limit, peers and their ratio.

    The setting is what the lines do not have in common; a column that no line fills is left out, and so is the commit
    where all lines have one.
    """
    peers = list(dict.fromkeys(name for line in lines for name in line.get("peers") or {}))
    rows = [["case", "setting", "us", "min..max", "limit", "of limit", *(f"{peer} (x)" for peer in peers), "commit"]]
    several = len({commit_of(line) for line in lines}) > 1
    for line, own in zip(lines, split(lines)[1], strict=True):
        us, limit = float(line["us"]), line.get("limit_us")
        row = [str(line["case"]), own, f"{us:.1f}"]
        row.append(f"{line['us_min']:.1f}..{line['us_max']:.1f}" if "us_min" in line else "")
        row += [f"{limit:.1f}", f"{100 * limit / us:.0f} %"] if limit else ["", ""]
        for peer in peers:
            time = (line.get("peers") or {}).get(peer)
            row.append("" if time is None else f"{time:.1f} ({time / us:.1f})")
        rows.append([*row, commit_of(line) if several else ""])
    filled = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in filled] for row in rows]


def title(device: str, op: str, lines: Sequence[Line]) -> str:
    """What a table or picture of one op is of: device, common setting, dates, commits."""
    days = ", ".join(sorted({str(line.get("date", ""))[:10] for line in lines}))
    return "; ".join(
        part for part in (f"{op} on {device}, microseconds", split(lines)[0], days, commits(lines)) if part
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text columns: words left-aligned, numbers right-aligned."""
    words = ("case", "setting", "commit")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for cell, width, name in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]


def chosen(measured: Measurements, op: str | None) -> list[tuple[str, str]]:
    """(device, op) pairs of the op asked for, of all where none is; an op that the files do not hold is refused."""
    if op is not None and measured.lines:
        known = tuple(dict.fromkeys(line["op"] for line in measured.lines))
        require_choice("--op", op, known, "Name an op that the files hold.")
    return [pair for pair in measured.ops() if op in (None, pair[1])]


def say_left_out(measured: Measurements) -> None:
    """Count the lines that are not shown."""
    if measured.inexact:
        print(f"{measured.inexact} measurements left out: their exactness gate was not green")


def options(prog: str, text: str) -> argparse.ArgumentParser:
    """The options that tables and pictures share."""
    parser = argparse.ArgumentParser(prog=prog, description=text)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines, as benchmarks append them")
    parser.add_argument("--op", default=None, help="only this op (default: every op in the files)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables of recorded measurements; 1 if the files hold none that passed its gate."""
    text = "Tables of recorded measurements, one for each device and op; the newest line of a case counts."
    args = options("keysieve bench table", text).parse_args(argv)
    measured = read(args.files)
    shown = chosen(measured, args.op)
    for device, op in shown:
        lines = measured.of(device, op)
        print(title(device, op, lines))
        print("\n".join(f"  {line}" for line in aligned(table(lines))))
    say_left_out(measured)
    return 0 if shown else 1
