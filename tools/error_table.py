"""Writes docs/troubleshooting.md's table: every refusal in the code, by argument, with what is accepted and the remedy.

    python tools/error_table.py [--check]

The text is taken from the `refuse(...)` calls themselves; what a call computes at run time shows as an ellipsis.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- errors: begin (tools/error_table.py) -->", "<!-- errors: end -->"


def text_of(node: ast.expr | None, names: dict[str, ast.expr]) -> str:
    """A string expression as text; what is not known before the program runs is an ellipsis."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value, names) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left, names) + text_of(right, names)
        case ast.IfExp(body=body, orelse=other):
            return f"{text_of(body, names)} / {text_of(other, names)}"
        case ast.Name(id=name) if name in names:
            return text_of(names[name], {})
        case ast.Constant(value=value) if value is not None:
            return str(value)
        case _:
            return "…"


def refusals(path: Path) -> list[tuple[str, str, str]]:
    """(argument, accepted, remedy) of every refuse call of a file."""
    tree = ast.parse(path.read_text())
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "refuse":
            given = {word.arg: word.value for word in node.keywords}
            argument = node.args[0] if node.args else given.get("argument")
            row = (argument, given.get("accepted"), given.get("remedy"))
            found.append(tuple(" ".join(text_of(item, names).split()).replace("|", "\\|") for item in row))
    return found  # type: ignore[return-value]  # three strings each


def table() -> str:
    rows: dict[tuple[str, str, str], None] = {}
    for path in sorted((ROOT / "keysieve").rglob("*.py")):
        rows.update(dict.fromkeys(refusals(path)))
    lines = ["| argument | accepted | remedy |", "|---|---|---|"]
    lines += [f"| `{argument}` | {accepted} | {remedy} |" for argument, accepted, remedy in sorted(rows)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if the table is not current")
    args = parser.parse_args(argv)
    old = PAGE.read_text()
    before, rest = old.split(BEGIN)
    new = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if args.check:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
