"""``keysieve check``: exactness on this machine, for as long as asked."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from keysieve.checks import refuse, require_choice

if TYPE_CHECKING:
    from keysieve.check.runner import Failure, Tally
    from keysieve.check.trial import Scope

DEFAULT_MINUTES = 0.5


def add_parser(subparsers: Any) -> None:
    """Add ``check`` to the command line."""
    text = (
        "Random and adversarial cases (ties, plateaus, special values, ragged lengths, poisoned pages, strides) on "
        "this machine against an independent brute force. A mismatch is made small, printed with the command that "
        "repeats it, and makes the exit code 1."
    )
    parser: argparse.ArgumentParser = subparsers.add_parser("check", help="exactness on this machine", description=text)
    parser.add_argument("--minutes", type=float, default=None, help=f"how long (default {DEFAULT_MINUTES})")
    parser.add_argument("--cases", type=int, default=None, help="stop after this many cases")
    parser.add_argument("--device", default="cpu", help="cpu (default) or a CUDA device")
    parser.add_argument("--backend", default="auto", help="auto (default), cpu, sm90 or sm100")
    parser.add_argument(
        "--numerics",
        choices=("fp32", "bf16"),
        default=None,
        help="of every case; default: both on the CPU, the device's own on a GPU (bf16 on Blackwell)",
    )
    parser.add_argument("--seed", type=int, default=None, help="of the run; default: drawn from the clock, and printed")
    parser.add_argument("--stage", default=None, metavar="A,B", help="only these stages; `--stage help` lists them")
    parser.add_argument("--replay", type=int, default=None, metavar="SEED", help="one case of one --stage, by its seed")
    parser.add_argument("--keep-going", action="store_true", help="go on after a mismatch, up to ten of them")
    parser.add_argument(
        "--protocol",
        choices=("small", "large"),
        nargs="?",
        const="small",
        help="explore the model of the context-parallel exchange exhaustively instead; large: minutes and a few GB",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check; 0 without a mismatch, else 1."""
    if args.protocol:
        from keysieve.dcp import protocol

        return protocol.check(large=args.protocol == "large")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # ranks that share a GPU wait for each other
    from keysieve.check.devices import stages_for
    from keysieve.check.runner import STAGES, Tally, examine, run_cases

    known = {stage.name: stage for stage in STAGES}
    if args.stage == "help":
        for stage in STAGES:
            text, _, _ = (type(stage).__doc__ or "").partition("\n")  # none under python -OO
            print(f"{stage.name:10} {text}")
        return 0
    asked = None if args.stage is None else tuple(args.stage.split(","))
    for name in asked or ():
        require_choice("--stage", name, tuple(known), "`keysieve check --stage help` says what they are.")
    scope = _scope(args, asked)
    here = stages_for(scope)
    for name in asked or ():  # else its cases would be told as mismatches
        remedy = f"Those run on {scope.device}; `keysieve check --protocol` explores the exchange anywhere."
        require_choice("--stage", name, here, remedy)
    names = here if asked is None else asked
    if args.replay is not None:
        if len(names) != 1:
            refuse("--replay", got=f"{len(names)} stages", accepted="one --stage", remedy="Name the case's stage.")
        failure = examine(known[names[0]], args.replay, scope, shrink_seconds=60.0)
        return _report(Tally({names[0]: 1}, [failure] if failure else []), args)
    for name, limit in (("--minutes", args.minutes), ("--cases", args.cases)):
        if limit is not None and not limit > 0:
            refuse(name, got=limit, accepted="more than 0", remedy="No case at all would look like success.")
    base = int(time.time()) if args.seed is None else args.seed
    seconds = 60.0 * args.minutes if args.minutes is not None else None
    if seconds is None and args.cases is None:
        seconds = 60.0 * DEFAULT_MINUTES
    only = f"; numerics {args.numerics}" if args.numerics else ""
    print(f"keysieve check on {scope.device}: stages {', '.join(names)}{only}; seed {base}", flush=True)
    with _Progress(seconds, args.cases) as progress:
        tally = run_cases(
            scope,
            stages=[known[name] for name in names],
            base=base,
            seconds=seconds,
            cases=args.cases,
            progress=progress.show,
            stop_after=10 if args.keep_going else 1,
            shrink_seconds=5.0 if args.keep_going else 20.0,
        )
    return _report(tally, args)


def _scope(args: argparse.Namespace, stages: tuple[str, ...] | None) -> Scope:
    """What may be drawn on the asked-for device; refused with the backend's reason if nothing runs there."""
    import torch

    from keysieve.backends import as_device
    from keysieve.check.devices import scope_for

    torch.set_num_threads(1)  # cases are small; more threads only get in each other's way
    return scope_for(as_device(args.device), args.backend, stages, args.numerics)


def _report(tally: Tally, args: argparse.Namespace) -> int:
    counts = ", ".join(f"{name} {count:,}" for name, count in tally.cases.items())
    print(f"{tally.total:,} cases in {tally.seconds:.1f} s ({counts}): {len(tally.failures)} mismatches")
    for failure in tally.failures:
        print(_failure_text(failure, args), file=sys.stderr)
    return 1 if tally.failures else 0


def _failure_text(failure: Failure, args: argparse.Namespace) -> str:
    where = "" if args.device == "cpu" else f" --device {args.device}"
    backend = "" if args.backend == "auto" else f" --backend {args.backend}"
    numerics = "" if args.numerics is None else f" --numerics {args.numerics}"
    described = failure.description.replace("\n", "\n    ")
    return (
        f"MISMATCH in {failure.stage}: {failure.error}\n"
        f"  smallest case found ({failure.steps} simplifications): {failure.small_error}\n    {described}\n"
        f"  repeat: keysieve check --stage {failure.stage} --replay {failure.seed}{where}{backend}{numerics}"
    )


def _so_far(tally: Tally) -> str:
    return f"{tally.total:,} cases, {len(tally.failures) or 'no'} mismatch{'es' if len(tally.failures) > 1 else ''}"


class _Progress:
    """A bar with rich if it is installed and a terminal is there, else a line every ten seconds."""

    def __init__(self, seconds: float | None, cases: int | None) -> None:
        self._seconds, self._cases = seconds, cases
        self._bar: Any = None
        self._task: Any = None
        self._next = 10.0

    def __enter__(self) -> _Progress:
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            except ImportError:
                return self
            total = self._cases if self._seconds is None else self._seconds
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._task = self._bar.add_task("drawing", total=total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, tally: Tally) -> None:
        """Called after every case."""
        done = tally.total if self._seconds is None else min(tally.seconds, self._seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=_so_far(tally))
        elif tally.seconds >= self._next:
            print(f"  {tally.seconds:6.0f} s  {_so_far(tally)}", flush=True)
            self._next = max(self._next * 1.5, tally.seconds + 10.0)
