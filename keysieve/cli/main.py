"""The ``keysieve`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import keysieve
from keysieve.checks import DeviceFault, KeysieveError
from keysieve.cli import bench, check, compile, demo, doctor

OPTIONAL = {
    "rich": "cli",
    "matplotlib": "demo",
    "transformers": "demo",
    "cutlass": "gpu",
    "tvm_ffi": "gpu",
}
"""Import name of an optional package -> the extra that installs it."""

REFUSED, MISSING, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141
"""Exit codes: bad arguments (argparse's own too), a package that is not installed, Ctrl-C. 1 is a finding."""


def parser() -> argparse.ArgumentParser:
    """The command line with all subcommands."""
    top = argparse.ArgumentParser(
        prog="keysieve",
        description="Exact, deterministic top-k key selection for DeepSeek Sparse Attention indexers.",
        epilog="Exit codes: 0 all well, 1 a finding, 2 bad arguments, 3 an optional package is missing.",
    )
    top.add_argument("--version", action="version", version=f"keysieve {keysieve.__version__}")
    subparsers = top.add_subparsers(dest="command", metavar="command", required=True)
    for module in (demo, doctor, check, bench, compile):
        module.add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit code. Errors that a user can mend are one line, not a traceback."""
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser().print_help(sys.stderr)
        return REFUSED
    args = parser().parse_args(bench.arranged(given))
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a reader that has left is not a traceback
    except KeysieveError as refusal:
        return _say(f"keysieve {args.command}: {refusal}", REFUSED)
    except DeviceFault as fault:
        return _say(f"keysieve {args.command}: {fault}", 1)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        extra = "demo" if args.command == "demo" else OPTIONAL[package]  # the demo needs several: name them at once
        install = f"pip install 'keysieve[{extra}]'"
        return _say(f"keysieve {args.command}: needs the package {package}, which is not installed: {install}", MISSING)
    except BrokenPipeError:  # the reader of a pipe has seen enough; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _say("", INTERRUPTED)
    return code


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
