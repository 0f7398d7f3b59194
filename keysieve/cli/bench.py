"""``keysieve bench``: measurements, each gated by exactness in the same run, and their tables and plots."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

TOPICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "cpu": (
        "keysieve.bench.cpu",
        (),
        "the cpu backend against the obvious float32 code; peak memory of a million-key row",
    ),
    "table": ("keysieve.bench.report", ("table",), "recorded measurements (JSON lines) as a table"),
    "plot": ("keysieve.bench.report", ("plot",), "recorded measurements as pictures, with the roofline drawn in"),
}
"""Topic -> module with ``main(argv) -> int``, the arguments put before the user's, and what it does."""


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the command line."""
    topics = "\n".join(f"  {name:8} {what}" for name, (_, _, what) in TOPICS.items())
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure, with exactness checked in the same run",
        description=f"Topics (each has its own options: keysieve bench TOPIC --help):\n{topics}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("topic", choices=tuple(TOPICS), nargs="?", metavar="topic", help=f"one of {', '.join(TOPICS)}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the topic's own options")
    parser.add_argument("-h", "--help", action="store_true", help="show this help, or the topic's after a topic")
    parser.set_defaults(run=run, usage=parser.format_help)


def run(args: argparse.Namespace) -> int:
    """Run a topic; its exit code: 0 if all results were exact and within their limits."""
    if args.topic is None:
        print(args.usage())
        return 0 if args.help else 2
    module, before, _ = TOPICS[args.topic]
    code: int = importlib.import_module(module).main([*before, *(["--help"] if args.help else []), *args.options])
    return code
