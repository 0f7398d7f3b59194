"""``keysieve doctor``: what this machine can run, and why not the rest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keysieve.doctor import Diagnosis, Fact

BACKEND_CHOICES = ("auto", "cpu", "sm90", "sm100")
_MARKS = {"ok": "[green]ok", "missing": "[red]missing", "note": "[yellow]note"}


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the command line."""
    text = "What this machine can run, and why not the rest. The exit code says whether the asked-for backend works."
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what this machine can run, and why not the rest", description=text
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--backend", choices=BACKEND_CHOICES, default="auto", help="exit 0 if this one works (default: any)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if the asked-for backend works here, else 1."""
    from keysieve.doctor import diagnose

    found = diagnose()
    works = found.works(args.backend)
    if args.json:
        print(json.dumps({"asked_for": args.backend, "works": works, **found.as_dict()}, indent=2))
        return 0 if works else 1
    try:
        _print_rich(found)
    except ImportError:
        print("\n".join(plain_lines(found, get_terminal_size().columns)))
    if args.backend != "auto" and not works:
        reason = next(state.reason for state in found.backends if state.name == args.backend)
        print("\n" + fill(f"{args.backend} does not work here: {reason}", get_terminal_size().columns))
    return 0 if works else 1


def plain_lines(found: Diagnosis, width: int = 80) -> list[str]:
    """The tables without rich, no line longer than ``width``."""
    rows = [(fact.name, fact.status, _told(fact)) for fact in found.facts]
    rows.append(("", "", ""))
    for state in found.backends:
        told = f"{', '.join(state.formats)} on {state.device}" if state.works else f"no: {state.reason}"
        rows.append((f"backend {state.name}", "works" if state.works else "-", told))
    lines, names = [], max(len(name) for name, _, _ in rows)
    for name, status, text in rows:
        folded = wrap(text, width - names - 10, break_on_hyphens=False) or [""]
        lines += [
            f"{name:{names}} {status:8} {folded[0]}".rstrip(),
            *(f"{'':{names + 9}} {part}" for part in folded[1:]),
        ]
    return lines


def _told(fact: Fact) -> str:
    """What was found and why it matters, the home folder as ~."""
    home = f"{Path.home()}/"
    value = f"~/{fact.value[len(home) :]}" if fact.value.startswith(home) else fact.value
    return f"{value} ({fact.why})" if fact.why else value


def _print_rich(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = Table("looked at", "", title="This machine")
    facts.add_column("found, and why it matters", overflow="fold")
    for fact in found.facts:
        facts.add_row(fact.name, _MARKS[fact.status], escape(_told(fact)))
    backends = Table("backend", "", "device", title="Backends")
    backends.add_column("formats, or why not", overflow="fold")
    for state in found.backends:
        told = ", ".join(state.formats) if state.works else escape(state.reason or "")
        backends.add_row(state.name, "[green]works" if state.works else "[red]no", state.device, told)
    console.print(facts)
    console.print(backends)
