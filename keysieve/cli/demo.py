"""``keysieve demo``: a small model reads a text through keysieve; every selection is verified; two pictures."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keysieve.checks import refuse, require_int
from keysieve.spec import MAX_TOPK

if TYPE_CHECKING:
    from keysieve.demo.ranks import RankReport
    from keysieve.demo.recorder import Recorder
    from keysieve.demo.run import Settings

DEFAULT_BYTES, DEFAULT_STEPS, DEFAULT_TOPK = 2048, 256, 256
MOST_SEED = 2**63 - 1


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to the command line."""
    text = "Read a text with a small transformers glm_moe_dsa model whose keys keysieve selects, and verify all of it."
    parser: argparse.ArgumentParser = subparsers.add_parser("demo", help="the main job on real input", description=text)
    parser.add_argument(
        "--text", type=Path, help="the text to read, any file; default: a story that ships with keysieve"
    )
    parser.add_argument(
        "--bytes", type=int, default=DEFAULT_BYTES, help="read at most this many bytes (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="of these, bytes read one by one (default %(default)s)"
    )
    parser.add_argument("--topk", type=int, default=DEFAULT_TOPK, help="keys a row selects (default %(default)s)")
    formats = ("fp8_fp32", "fp8_ue8m0", "mxfp4")
    parser.add_argument(
        "--key-format", choices=formats, default="fp8_fp32", help="of the index cache (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights (default %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="shard the context over this many processes (default %(default)s)"
    )
    parser.add_argument(
        "--interleave", type=int, default=64, help="with --ranks: consecutive keys on one rank (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default ./%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every selection was exact and every layer attended to nothing else, else 1."""
    # Imported here: the other subcommands need neither rich nor transformers nor matplotlib. All of them are looked for
    # before anything runs: the pictures come last, and a minute of decoding would be lost.
    for package in ("rich", "transformers", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rich.console import Console

    from keysieve.bench.places import require_folder
    from keysieve.demo import pictures, ranks
    from keysieve.demo.run import run as read

    console = Console()
    settings = _settings(args)
    require_folder("--out", args.out)
    source = args.text or "the text that ships with keysieve"
    parts = f"{settings.prompt} as a prompt, then {settings.steps} one by one"
    console.print(f"Reading {len(settings.text)} bytes of {source}: {parts}.")
    begun = time.perf_counter()
    reports: list[RankReport] = []
    if args.ranks == 1:
        with _Bar(console, settings) as bar:
            recorder = read(settings, bar.advance)
    else:
        with ranks.started(settings, args.ranks, args.interleave) as rank_zero, _Bar(console, settings) as bar:
            recorder, reports = rank_zero(bar.advance)
    seconds = time.perf_counter() - begun
    console.print(_summary(recorder, settings, seconds))
    if reports:
        console.print(_ranks_table(recorder, reports))
    for path in pictures.draw(recorder, settings, args.out):
        console.print(f"picture: {path}", soft_wrap=True, highlight=False)
    if any(report.digest != recorder.digest.hexdigest() for report in reports):
        console.print("[bold red]FAILED: the ranks did not select the same keys.")
        return 1
    if not recorder.totals.clean:
        console.print("[bold red]FAILED: a selection was not exact, or a layer attended to a key it had not selected.")
        return 1
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    """The run that was asked for, checked against the text's length."""
    from keysieve.demo.model import read_text
    from keysieve.demo.run import Settings

    remedy = "Choose --steps below --bytes, and a text longer than --steps."
    try:
        text = read_text(args.text)
    except OSError as error:
        refuse("--text", got=f"{args.text} ({error.strerror})", accepted="a readable file", remedy="Check the path.")
    require_int("--topk", args.topk, 1, MAX_TOPK, "Select between 1 and 4096 keys per row.")
    require_int("--seed", args.seed, 0, MOST_SEED, "Leave it out for 0.")
    text = text[: max(args.bytes, 0)]
    if not 0 < args.steps < len(text):
        accepted = f"an int in 1..{max(len(text) - 1, 1)}, for a text of {len(text)} bytes"
        refuse("--steps", got=args.steps, accepted=accepted, remedy=remedy)
    return Settings(text=text, steps=args.steps, topk=args.topk, key_format=args.key_format, seed=args.seed)


class _Bar:
    """The progress bar: bytes read, with the counts that matter beside it."""

    def __init__(self, console: Any, settings: Settings):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._settings = settings
        columns = (
            TextColumn("{task.description:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("bytes; {task.fields[verified]:,} verified, {task.fields[mismatches]} wrong"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("prompt", total=len(settings.text), verified=0, mismatches=0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, done: int, recorder: Recorder) -> None:
        """Show that ``done`` bytes have been read."""
        totals = recorder.totals
        description = "decoding" if done >= self._settings.prompt else "prompt"
        self._progress.update(
            self._task,
            completed=done,
            description=description,
            verified=totals.verified,
            mismatches=totals.mismatches + totals.strays,
        )


def _summary(recorder: Recorder, settings: Settings, seconds: float) -> Any:
    """The table printed at the end."""
    from rich.table import Table

    t = recorder.totals
    table = Table(
        show_header=False,
        title=f"keysieve demo: {settings.key_format}, {settings.topk} keys a row, {len(recorder.layers)} layers",
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("query rows, over all layers", f"{t.rows:,}")
    table.add_row("keys scored", f"{t.scored:,}")
    table.add_row("keys selected", f"{t.selected:,}")
    table.add_row("rows whose cut went through equal keys", f"{t.cut_rows:,}")
    table.add_row("most keys equal to a row's threshold", f"{t.most_equal:,}")
    table.add_section()
    table.add_row("time in score", f"{t.score_seconds:.2f} s")
    table.add_row("time in select", f"{t.select_seconds:.2f} s")
    table.add_row("time in DecodeIndexer (both, to physical rows)", f"{t.step_seconds:.2f} s")
    table.add_row("time of the whole run (model and verification too)", f"{seconds:.1f} s")
    table.add_section()
    table.add_row("selections verified against a stable sort", f"{t.verified:,}")
    table.add_row("mismatches", _verdict(t.mismatches))
    table.add_row("attention rows compared with the selection", f"{t.attended:,}")
    table.add_row("rows that attended to anything else", _verdict(t.strays))
    table.add_row("digest of all selected positions", recorder.digest.hexdigest()[:16])
    return table


def _ranks_table(recorder: Recorder, reports: list[RankReport]) -> Any:
    """What each rank held and won, and whether it selected what rank 0 did."""
    from rich.table import Table

    table = Table(title=f"context sharded over {len(reports)} ranks")
    for name in ("rank", "keys held, each layer", "winners it owns", "same keys selected"):
        table.add_column(name, justify="right")
    for rank, report in enumerate(reports):
        same = report.digest == recorder.digest.hexdigest()
        verdict = "[bold green]yes" if same else "[bold red]NO"
        table.add_row(str(rank), f"{report.keys:,}", f"{report.owned:,}", verdict)
    return table


def _verdict(count: int) -> str:
    return f"[bold green]{count}" if count == 0 else f"[bold red]{count}"
