"""Pictures of recorded measurements: ``keysieve bench plot FILE...``, one for each device and op.

Cases stand below each other, so that their names can be read however many there are; a setting with several cases has
a panel of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from keysieve.bench.places import require_folder
from keysieve.bench.report import Line, chosen, options, read, say_left_out, split, title

_ROW = 0.17  # inches a case
_PANEL = 0.34  # inches around a panel


def panels(lines: Sequence[Line]) -> list[tuple[str, list[tuple[str, Line]]]]:
    """``lines`` as (setting, [(name, line)]): a panel for every setting with several cases, one for all the others.

    A setting's panel stands where it first occurs; cases go by their limit, or by their time without one.
    """
    if len({bool(line.get("cached")) for line in lines}) > 1:  # small cases are: no setting of its own
        lines = [line | {"case": f"{line['case']}, cached"} if line.get("cached") else line for line in lines]
        lines = [line | {"cached": False} for line in lines]
    pairs = list(zip(split(lines)[1], lines, strict=True))
    count = Counter(setting for setting, _ in pairs)
    parts = [
        (setting, by_size([(str(line["case"]), line) for own, line in pairs if own == setting]))
        for setting, times in count.items()
        if times > 1
    ]
    single = [
        (", ".join(part for part in (str(line["case"]), own) if part), line) for own, line in pairs if count[own] == 1
    ]
    if single:
        parts.append(("one case each" if parts else "", by_size(single)))
    return parts


def by_size(named: list[tuple[str, Line]]) -> list[tuple[str, Line]]:
    return sorted(named, key=lambda pair: float(pair[1].get("limit_us") or pair[1]["us"]))


def picture(device: str, op: str, lines: Sequence[Line]) -> Any:
    """A matplotlib figure: a case a row, keysieve and peers as points over time, the limit as a mark before them.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    parts = panels(lines)
    peers = list(dict.fromkeys(name for line in lines for name in line.get("peers") or {}))
    heights = [_ROW * len(cases) + _PANEL for _, cases in parts]
    heading = wrap(title(device, op, lines), 100)
    height = sum(heights) + 1.0 + 0.2 * len(heading) + 0.2 * (1 + len(peers) // 3)
    figure = Figure(figsize=(8.0, height), layout="constrained")
    grid = figure.subplots(len(parts), 1, height_ratios=heights, sharex=True, squeeze=False)
    for axes, (setting, cases) in zip(grid[:, 0], parts, strict=True):
        _panel(axes, cases, peers)
        axes.set_title(setting, loc="left", fontsize=8, fontweight="bold", pad=3)
    grid[-1, 0].set_xlabel("microseconds (median)", fontsize=8)
    # The legend shows what any panel has; a peer may be missing in some.
    marks = {name: mark for axes in grid[:, 0] for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle("\n".join(heading), fontsize=9)
    return figure


def _panel(axes: Any, cases: Sequence[tuple[str, Line]], peers: Sequence[str]) -> None:
    """Cases from the top down over a logarithmic time; the line from limit to keysieve is what is left to gain."""
    places = range(len(cases))
    for place, (_, line) in zip(places, cases, strict=True):
        if line.get("limit_us"):
            axes.plot([line["limit_us"], line["us"]], [place, place], color="tab:gray", alpha=0.4, linewidth=1)
    limits = [(place, line["limit_us"]) for place, (_, line) in zip(places, cases, strict=True) if line.get("limit_us")]
    if limits:
        at, us = zip(*limits, strict=True)
        axes.plot(us, at, "|", color="tab:gray", markersize=8, markeredgewidth=2, label="limit (roofline)")
    for shade, peer in enumerate(peers):
        known = [
            (place, line["peers"][peer])
            for place, (_, line) in zip(places, cases, strict=True)
            if (line.get("peers") or {}).get(peer) is not None
        ]
        if known:
            at, us = zip(*known, strict=True)
            axes.plot(us, at, "o", color=f"C{shade}", alpha=0.7, markersize=5, label=peer)
    axes.plot([line["us"] for _, line in cases], places, "D", color="black", markersize=4.5, label="keysieve")
    axes.set_xscale("log")
    axes.set_yticks(places, [name for name, _ in cases], fontsize=7)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda us, _: f"{us:,.0f}" if us >= 1 else f"{us:g}")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw recorded measurements; 1 if the files hold none that passed its gate."""
    text = (
        "Pictures of recorded measurements, one for each device and op, with the limit (roofline) and peers drawn in."
    )
    parser = options("keysieve bench plot", text)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default: ./out)")
    args = parser.parse_args(argv)
    measured = read(args.files)
    shown = chosen(measured, args.op)
    require_folder("--out", args.out)
    for device, op in shown:
        path = args.out / f"bench-{op}-{'-'.join(device.lower().split())}.png"
        picture(device, op, measured.of(device, op)).savefig(path, dpi=140)
        print(f"picture: {path}")
    say_left_out(measured)
    return 0 if shown else 1
