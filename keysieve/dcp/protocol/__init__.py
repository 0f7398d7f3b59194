"""The exchange protocol as an executable model, explored exhaustively.

``python -m keysieve.dcp.protocol`` explores the small suite; ``--large`` the large one; ``--trace FAULT`` seeds a fault
and prints the shortest way it goes wrong. ``docs/dcp.md`` explains the protocol, what is modelled and why it is safe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from keysieve.dcp.protocol.explorer import Exploration, explore
from keysieve.dcp.protocol.model import Model, Step
from keysieve.dcp.protocol.scenario import FAULTS, Scenario
from keysieve.dcp.protocol.suite import LARGE, SEEDED, SMALL

__all__ = ["FAULTS", "LARGE", "SEEDED", "SMALL", "Exploration", "Model", "Scenario", "Step", "check", "explore", "main"]


def check(*, large: bool = False, json_path: str | None = None, max_states: int = 50_000_000) -> int:
    """Explore the suite and every seeded fault, printing one line each. Returns 0 if all is as it should be.

    A scenario must be sound; a seeded fault must be found. With ``json_path`` one JSON line per run is appended there.
    """
    wrong = total = 0
    for scenario in LARGE if large else SMALL:
        result = explore(Model(scenario), max_states=max_states)
        total += result.states
        wrong += not result.sound
        print(("ok     " if result.sound else "WRONG  ") + result.text(), flush=True)
        _record(result, json_path)
    for fault, scenario in SEEDED.items():
        result = explore(Model(scenario, frozenset({fault}), symmetric=False), max_states=max_states)
        found = result.violation is not None
        wrong += not found
        what = f"found after {result.states:,} states, {len(result.trace)} steps: {result.violation}"
        print(f"ok     fault {fault}: {what}" if found else f"WRONG  fault {fault}: NOT FOUND", flush=True)
        _record(result, json_path)
    print(f"{total:,} states explored without faults; {len(SEEDED)} faults seeded; {wrong} not as it should be")
    return 1 if wrong else 0


def _record(result: Exploration, json_path: str | None) -> None:
    if json_path is None:
        return
    line = asdict(result) | {"sound": result.sound, "trace": len(result.trace), "seconds": round(result.seconds, 2)}
    with open(json_path, "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of ``python -m keysieve.dcp.protocol``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="keysieve.dcp.protocol", description=check.__doc__)
    parser.add_argument("--large", action="store_true", help="the large suite (several minutes, a few GB)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per exploration")
    parser.add_argument("--trace", metavar="FAULT", choices=sorted(FAULTS), help="seed one fault and print its trace")
    args = parser.parse_args(argv)
    if args.trace:
        print(explore(Model(SEEDED[args.trace], frozenset({args.trace}), symmetric=False)).text())
        return 0
    return check(large=args.large, json_path=args.json)
