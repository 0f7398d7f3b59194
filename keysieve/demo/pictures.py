"""The demo's two pictures, drawn with matplotlib straight to files (no display is needed)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keysieve.demo.recorder import LayerTrace, Recorder
from keysieve.demo.run import Settings

COLUMNS, LINES = 900, 32
"""Cells of the map at most: neighbouring positions, and neighbouring steps, are averaged into one cell."""

KEPT, LEFT, CUT = "#1f5fa8", "#c9ced6", "#d1495b"


def draw(recorder: Recorder, settings: Settings, folder: Path) -> list[Path]:
    """Draw both pictures into ``folder`` (made if needed); their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    layers = sorted(recorder.layers.items())
    paths = []
    for name, fill, size in (
        ("kept_positions.png", _kept_positions, (13.5, 1.0 + 2.9 * len(layers))),
        ("logits_and_ties.png", _logits_and_ties, (4.6 * len(layers), 7.4)),
    ):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure, layers, settings)
        paths.append(folder / name)
        figure.savefig(paths[-1])
    return paths


def chosen_mask(trace: LayerTrace, positions: int) -> npt.NDArray[np.bool_]:
    """Which positions each decoding step selected: bool ``[steps, positions]``."""
    mask = np.zeros((len(trace.chosen), positions), bool)
    for step, chosen in enumerate(trace.chosen):
        mask[step, chosen] = True
    return mask


def kept_share(mask: npt.NDArray[np.bool_], prompt: int) -> npt.NDArray[np.float64]:
    """Of the steps that could see a position, the share that selected it: ``[positions]``."""
    steps, positions = mask.shape
    # Step i (from 0) has read prompt + i + 1 bytes and sees as many keys.
    could_see = np.clip(prompt + steps - np.arange(positions), 0, steps)
    return np.asarray(mask.sum(0) / np.maximum(could_see, 1))


def favourite_bytes(share: npt.NDArray[np.float64], text: bytes, least: int = 5) -> list[tuple[str, float]]:
    """The bytes whose positions are kept most, with their mean share; only those that occur ``least`` times."""
    by_byte: dict[int, list[float]] = defaultdict(list)
    for value, byte in zip(share, text, strict=True):
        by_byte[byte].append(float(value))
    ranked = sorted(((np.mean(v), b) for b, v in by_byte.items() if len(v) >= least), reverse=True)
    return [(_byte_name(byte), float(value)) for value, byte in ranked[:10]]


def _byte_name(byte: int) -> str:
    special = {0x20: "\N{OPEN BOX}", 0x0A: "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}
    return special.get(byte, chr(byte) if 0x20 < byte < 0x7F else f"{byte:02x}")


def cells(mask: npt.NDArray[np.bool_], prompt: int) -> tuple[Any, int, int]:
    """``mask [steps, positions]`` averaged into at most LINES x COLUMNS cells; unread cells are masked out.

    Returns the masked array, and the steps and positions of one cell.
    """
    steps, positions = mask.shape
    height, width = max(1, -(-steps // LINES)), max(1, -(-positions // COLUMNS))
    # What has not been read when a step selects can be in no selection: it must not count as "seen and left".
    read = np.arange(positions)[None, :] <= prompt + np.arange(steps)[:, None]
    pad = ((0, -steps % height), (0, -positions % width))
    shape = (-(-steps // height), height, -(-positions // width), width)
    hits = np.pad(mask.astype(float), pad).reshape(shape).sum((1, 3))
    seen = np.pad(read.astype(float), pad).reshape(shape).sum((1, 3))
    return np.ma.masked_array(hits / np.maximum(seen, 1), seen == 0), height, width


def _kept_positions(figure: Any, layers: list[tuple[int, LayerTrace]], settings: Settings) -> None:
    """Per layer: a map of what the decoding steps selected, how often each position was, and favourite bytes."""
    positions, prompt = len(settings.text), settings.prompt
    title = f"Positions selected while reading bytes {prompt} to {positions}: {settings.topk} keys per step and layer"
    figure.suptitle(title, fontsize=12.5)
    grid = figure.add_gridspec(2 * len(layers), 2, width_ratios=(5.2, 1), height_ratios=(3, 1.3) * len(layers))
    for number, (layer, trace) in enumerate(layers):
        mask = chosen_mask(trace, positions)
        share = kept_share(mask, prompt)
        upper = figure.add_subplot(grid[2 * number, 0])
        _map(figure, upper, mask, prompt)
        upper.set_title(f"layer {layer}", loc="left", fontsize=10.5)
        lower = figure.add_subplot(grid[2 * number + 1, 0], sharex=upper)
        lower.fill_between(np.arange(positions), share, step="mid", color=KEPT, linewidth=0)
        # The newest bytes were seen by few steps; their full-height spikes would hide everything else.
        top = max(float(share[:prompt].max(initial=0.0)), 0.05)
        lower.set_ylim(0, 1.35 * top)
        for peak in _peaks(share[:prompt], apart=max(positions // 45, 1)):
            label = (_byte_name(settings.text[peak]), (peak, share[peak]))
            lower.annotate(*label, xytext=(0, 1), textcoords="offset points", ha="center", fontsize=8)
        lower.set_ylabel("share of\nsteps", fontsize=9)
        lower.spines[["top", "right"]].set_visible(False)
        if number == len(layers) - 1:
            lower.set_xlabel("key position (byte of the text); beige: not read yet; letters: the bytes at the peaks")
        _favourites(figure.add_subplot(grid[2 * number : 2 * number + 2, 1]), share[:prompt], settings.text[:prompt])


def _map(figure: Any, axes: Any, mask: npt.NDArray[np.bool_], prompt: int) -> None:
    """The map of one layer: darker is selected more often."""
    density, height, width = cells(mask, prompt)
    image = axes.imshow(
        density,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=max(float(np.quantile(density.compressed(), 0.997)), 1e-9),
        extent=(0, density.shape[1] * width, density.shape[0] * height, 0),
        interpolation="nearest",
    )
    axes.set_facecolor("#f3ece0")
    axes.set_xlim(0, mask.shape[1])
    axes.set_ylim(len(mask), 0)
    axes.set_ylabel("decoding step")
    axes.tick_params(labelbottom=False)
    bar = figure.colorbar(image, ax=axes, pad=0.008, fraction=0.025)
    bar.set_label(f"selected, of\n{height} steps x {width} keys", fontsize=8)


def _peaks(share: npt.NDArray[np.float64], apart: int, count: int = 14) -> list[int]:
    """The positions of the ``count`` largest shares that lie at least ``apart`` from one another."""
    peaks: list[int] = []
    for position in np.argsort(-share, kind="stable"):
        if all(abs(int(position) - peak) >= apart for peak in peaks):
            peaks.append(int(position))
        if len(peaks) == count:
            break
    return peaks


def _favourites(axes: Any, share: npt.NDArray[np.float64], text: bytes) -> None:
    """Bars: which bytes of the prompt the layer keeps returning to."""
    favourites = favourite_bytes(share, text)
    names = [name for name, _ in favourites][::-1]
    values = [value for _, value in favourites][::-1]
    axes.barh(range(len(names)), values, color=KEPT)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    average = float(share.mean()) if len(share) else 0.0
    axes.axvline(average, color=CUT, linewidth=1.2)
    axes.set_title("bytes it keeps most\n(mean share; red: all bytes)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _logits_and_ties(figure: Any, layers: list[tuple[int, LayerTrace]], settings: Settings) -> None:
    """Per layer: the last step's logits around the cut, and how many keys equalled the cut in every step."""
    figure.suptitle(f"Logits and where they are cut: the best {settings.topk} keys of a row", fontsize=12.5)
    axes = figure.subplots(2, len(layers), squeeze=False, height_ratios=(1.35, 1))
    for number, (layer, trace) in enumerate(layers):
        _histogram(axes[0][number], layer, trace, len(settings.text))
        _ties(axes[1][number], trace)
    axes[0][0].set_ylabel("keys")
    axes[1][0].set_ylabel("keys equal to the threshold")


def _histogram(axes: Any, layer: int, trace: LayerTrace, keys: int) -> None:
    """The last row's logits; what lies above the threshold was selected, what equals it was selected in part."""
    logits, tie = trace.logits, trace.threshold
    width = max(float(logits.max() - logits.min()) / 80, 1e-30)
    # The threshold is the edge of a bar, so that no bar holds both what was selected and what was not.
    start = float(logits.min()) if tie is None else tie.value - width * np.ceil((tie.value - logits.min()) / width)
    edges = start + width * (np.arange(83) - 1e-3)
    axes.set_title(f"layer {layer}, last step ({keys} keys)", fontsize=10.5)
    axes.set_xlabel("logit (BF16)")
    axes.locator_params(axis="x", nbins=6)
    axes.spines[["top", "right"]].set_visible(False)
    if tie is None:
        axes.hist(logits, edges, color=KEPT, label=f"selected: all {len(logits)}")
    else:
        above = logits > tie.value
        parts = [logits[above], logits[logits == tie.value], logits[logits < tie.value]]
        labels = [
            f"above: {len(parts[0])}, all selected",
            f"equal: {tie.equal}, of which {tie.taken} selected",
            f"below: {len(parts[2])}",
        ]
        axes.hist(parts, edges, stacked=True, color=(KEPT, CUT, LEFT), label=labels)
        axes.axvline(tie.value, color=CUT, linewidth=1.2)
        note = f" threshold {tie.value:.7g}"
        axes.annotate(note, (tie.value, 0.62), xycoords=("data", "axes fraction"), color=CUT, fontsize=9)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _ties(axes: Any, trace: LayerTrace) -> None:
    """Every decoding step's keys that equal the threshold: those taken, and those left because they come later."""
    steps = np.arange(len(trace.ties))
    taken = np.array([tie.taken for tie in trace.ties])
    equal = np.array([tie.equal for tie in trace.ties])
    axes.bar(steps, taken, width=1.0, color=CUT, label="selected (lower positions)")
    axes.bar(steps, equal - taken, width=1.0, bottom=taken, color=LEFT, label="left out (higher positions)")
    cut = int((taken < equal).sum())
    axes.set_title(f"{cut} of {len(steps)} steps cut through equal keys", fontsize=10)
    axes.set_xlabel("decoding step")
    axes.set_ylim(0, max(float(equal.max(initial=1)) * 1.35, 2))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
