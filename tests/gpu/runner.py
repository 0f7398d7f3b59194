"""Run the device tests without pytest: `python tests/gpu/runner.py [-k TEXT].. [--fail-fast]`.

The same functions that pytest runs from this folder (see `harness.py`). Prints one line a test, then a summary; the
exit status is 1 when anything failed, 2 when no device can be used.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "device"), str(HERE.parents[1])]

import harness  # noqa: E402  # the path above makes it importable


def tests(texts: list[str]) -> Iterator[tuple[str, Callable[..., None], dict[str, Any]]]:
    """(name, function, arguments beside the device) of every test whose name contains one of `texts`. A text with `::`
    names a file, too: the others are not even imported, which takes a minute under a sanitizer."""
    files = [text.partition("::")[0] if "::" in text else "" for text in texts]
    for path in sorted(HERE.glob("test_*.py")):
        if not any(path.stem.endswith(file) for file in files):
            continue
        module = importlib.import_module(path.stem)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("test_") or function.__module__ != module.__name__:
                continue
            listed = getattr(function, "cases", None)
            for arguments in [{}] if listed is None else [{"case": case} for case in listed]:
                label = f"{path.stem}::{name}" + (f"[{arguments['case']}]" if arguments else "")
                if any(text in label for text in texts):
                    yield label, function, arguments


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-k", action="append", metavar="TEXT", help="only tests whose name contains this; may be given several times"
    )
    parser.add_argument("--fail-fast", action="store_true")
    args = parser.parse_args(argv)
    reason = harness.unavailable()
    if reason is not None:
        print(f"device tests cannot run here: {reason}")
        return 2
    device = harness.device()
    passed, failed = 0, []
    for label, function, arguments in tests(args.k or [""]):
        lacking = harness.lacking(function)
        if lacking is not None:
            print(f"skip           {label}: {lacking}", flush=True)
            continue
        start = time.perf_counter()
        try:
            function(device, **arguments)
        except Exception:
            failed.append(label)
            print(f"FAIL {label}\n{traceback.format_exc()}", flush=True)
            if args.fail_fast:
                break
        else:
            passed += 1
            print(f"pass {time.perf_counter() - start:6.2f} s  {label}", flush=True)
    print(f"{passed} passed, {len(failed)} failed" + (": " + ", ".join(failed) if failed else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
