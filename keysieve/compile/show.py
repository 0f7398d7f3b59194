"""`python -m keysieve.compile.show KERNEL [option=value ...] --arch A`: what one configuration compiles to."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from keysieve import compile as kernel_compile
from keysieve.compile.build import Built, bad_notes, build
from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel


def config_of(kernel: Kernel, settings: list[str]) -> Any:
    """A configuration from `option=value` texts, typed like the first admitted configuration's values."""
    model = next(iter(kernel.admitted(kernel.archs[0])))
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        like = getattr(model, name)
        values[name] = text in ("1", "true", "True") if isinstance(like, bool) else type(like)(text)
    return dataclasses.replace(model, **values)


def describe(built: Built) -> str:
    """Registers, memory, launch and notable instructions, as text."""
    lines = [f"{built.symbol} for {built.arch}: {len(built.image):,} bytes ({built.form})"]
    for code in built.facts.kernels:
        lines.append(
            f"  {code.name[:60]}: {code.registers} registers x {code.threads}, local {code.frame_bytes} B, "
            f"static shared {code.static_shared} B, code {code.code_bytes:,} B"
        )
    for launch in built.facts.launches:
        lines.append(
            f"  launch {launch.kernel[:40]}: dynamic shared {launch.dynamic_shared} B, block {launch.block}, "
            f"programmatic {launch.programmatic}, attributes {launch.attributes}"
        )
    tracked = ("wgmma", "tcgen05", "cp.async.bulk", "griddepcontrol", "mbarrier", "ld.local", "st.local", "atom", "red")
    for opcode, count in built.facts.instructions.items():
        if opcode.startswith(tracked):
            lines.append(f"  {count:5} {opcode}")
    problems = built.facts.problems(MAX_BLOCK_SHARED) + bad_notes(built.notes)
    lines.append("  problems: " + ("; ".join(problems) if problems else "none"))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    known = {kernel.name: kernel for kernel in kernel_compile.kernels()}
    parser = argparse.ArgumentParser(prog="python -m keysieve.compile.show", description=__doc__)
    parser.add_argument("kernel", choices=sorted(known))
    parser.add_argument("settings", nargs="*", metavar="option=value")
    parser.add_argument("--arch", default=None)
    parser.add_argument("--ptx", type=Path, help="write the PTX here")
    parser.add_argument("--cubin", type=Path, help="write the cubin here")
    parser.add_argument("--notes", action="store_true", help="print the device assembler's messages")
    args = parser.parse_args(argv)
    kernel = known[args.kernel]
    built = build(kernel, config_of(kernel, args.settings), args.arch or kernel.archs[0], check=False)
    print(describe(built))
    if args.notes:
        print(built.notes)
    if args.ptx:
        args.ptx.write_text(built.ptx)
    if args.cubin:
        args.cubin.write_bytes(built.cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
