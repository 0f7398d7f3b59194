"""``keysieve bench``: measurements, each gated by exactness in the same run, and their tables and plots."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keysieve.checks import UnsupportedError, refuse


@dataclass(frozen=True)
class Topic:
    """``module`` has ``main(argv) -> int``; ``gpu``: needs one."""

    module: str
    what: str
    gpu: bool = False


TOPICS = {
    "cpu": Topic("keysieve.bench.cpu", "the cpu backend beside the obvious float32 code; memory of a million-key row"),
    "score": Topic("keysieve.bench.score", "the scorer on this GPU, beside DeepGEMM where it is installed", gpu=True),
    "select": Topic(
        "keysieve.bench.select", "the selection kernels on this GPU; --peers: others beside them", gpu=True
    ),
    "step": Topic(
        "keysieve.bench.step", "the whole step on this GPU in a CUDA graph; --peers: others beside it", gpu=True
    ),
    "host": Topic("keysieve.bench.host", "the host time of an eager step on this GPU", gpu=True),
    "local-topk": Topic("keysieve.bench.local_topk", "a rank's local top-N behind its scorer on this GPU", gpu=True),
    "dcp": Topic(
        "keysieve.bench.dcp", "the exchange between this host's GPUs, NCCL beside it; whole sharded steps", gpu=True
    ),
    "dcp-virtual": Topic("keysieve.bench.dcp_virtual", "push and merge of up to 16 ranks on this GPU", gpu=True),
    "dcp-model": Topic("keysieve.bench.dcp_model", "what larger groups should cost, from recorded measurements"),
    "table": Topic("keysieve.bench.report", "recorded measurements (JSON lines) as a table"),
    "figures": Topic("keysieve.bench.figures", "README's tables and docs/figures from docs/measurements"),
    "plot": Topic("keysieve.bench.plot", "recorded measurements as pictures, the roofline drawn in"),
}


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the command line."""
    topics = "\n".join(f"  {name:11} {topic.what}" for name, topic in TOPICS.items())
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
    parser.add_argument("--cpu", action="store_true", help="the cpu backend: the same as the topic cpu")
    parser.set_defaults(run=run, usage=parser.format_help)


def arranged(given: Sequence[str]) -> Sequence[str]:
    """A command line with ``bench --cpu``'s topic written out: argparse would take an option's value for the topic."""
    if not given or given[0] != "bench" or "--cpu" not in given:
        return given
    rest = [word for word in given[1:] if word != "--cpu"]
    named = bool(rest) and not rest[0].startswith("-")
    return given if named else ["bench", "cpu", *rest]


def run(args: argparse.Namespace) -> int:
    """Run a topic; its exit code: 0 if all results were exact and within their limits."""
    if args.cpu or "--cpu" in args.options:
        if args.topic != "cpu":
            remedy = f"`keysieve bench cpu` measures the cpu backend; leave --cpu out for {args.topic}."
            refuse("--cpu", got=f"it with the topic {args.topic}", accepted="no topic, or cpu", remedy=remedy)
        args.options = [word for word in args.options if word != "--cpu"]
    if args.topic is None:
        print(args.usage())
        return 0 if args.help else 2
    topic = TOPICS[args.topic]
    helping = args.help or bool({"-h", "--help"} & set(args.options))
    if topic.gpu and not helping:
        from keysieve.launch import unlaunchable

        reason = unlaunchable("cuda")
        if reason is not None:
            raise UnsupportedError(" ".join((reason, "`keysieve bench --cpu` measures the cpu backend instead.")))
    options = [*(["--help"] if args.help else []), *args.options]
    program = sys.argv[0]
    sys.argv[0] = f"keysieve bench {args.topic}"  # what a topic's parser calls itself
    try:
        code: int = importlib.import_module(topic.module).main(options)
    finally:
        sys.argv[0] = program
    return code
