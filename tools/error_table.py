"""Writes docs/troubleshooting.md's table: every refusal in the code, by argument, with what is accepted and the remedy.

    python tools/error_table.py [--check]

The text is taken from the calls themselves: `refuse`, `message`, the `require_*` of keysieve.checks, and every other
function that hands one of its own parameters to them (its callers' words stand in the table then). What only a running
program knows stands in angle brackets. `--check` fails when a refusal of the code is missing in the page.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- errors: begin (tools/error_table.py) -->", "<!-- errors: end -->"
PARTS = ("argument", "accepted", "remedy")
Row = tuple[str, str, str]
Words = dict[str, list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Template = tuple[Function, tuple[ast.expr | None, ...], Words]  # a function that passes parameters on as parts
LISTED = "one of those that the message lists"
COMPUTED = {f"<names> [{LISTED}]": "the dtype, shape and device that the [API](api.md) names"}  # require_tensor's
SKIPPED = {"checks.py": ("refuse", "message")}  # they pass on what they are given: their callers have the words


def several(*lists: list[str]) -> list[str]:
    """All joinings of one text from each list."""
    joined = [""]
    for texts in lists:
        joined = [head + text for head in joined for text in texts]
    return joined


def unknown(node: ast.expr | None) -> str:
    """What a program computes, named by its expression if that is short, else an ellipsis."""
    match node:
        case None:
            return "…"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"<{name.strip('_')}>"
        case ast.Call(func=ast.Name(id=("str" | "repr" | "describe" | "int" | "list" | "tuple")), args=[only]):
            return unknown(only)
        case ast.Call(func=ast.Attribute(attr="join")):
            return LISTED
        case ast.Call(func=ast.Name(id=name)) if name != "len":
            return f"<{name}>"
        case _ if not any(isinstance(part, ast.Name | ast.Call | ast.Attribute) for part in ast.walk(node)):
            return str(eval(ast.unparse(node), {"__builtins__": {}}))  # arithmetic on numbers
        case _:
            text = ast.unparse(node).replace("self.", "")
            return f"<{text}>" if len(text) <= 32 else "…"


def texts_of(node: ast.expr | None, names: Words) -> list[str]:
    """Every text that an expression can be."""
    match node:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.Constant(value=value) if value is not None:
            return [str(value)]
        case ast.JoinedStr(values=values):
            return several(*(texts_of(value, names) for value in values))
        case ast.FormattedValue(value=value):
            return texts_of(value, names)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return several(texts_of(left, names), texts_of(right, names))
        case ast.IfExp(body=body, orelse=other):
            return texts_of(body, names) + texts_of(other, names)
        case ast.Name(id=name) if name in names:
            return names[name]
        case _:
            return [unknown(node)]


def constants(body: list[ast.stmt], names: Words) -> Words:
    """`names` and what the statements' plain assignments make of them, nested ones too; functions are left out."""
    known: Words = {}
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Name):
                    found = texts_of(value, names | known)
                    if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp) and len(found) < 9:
                        known[target.id] = known.get(target.id, []) + found
    return names | known


def scopes(tree: ast.Module, limits: Words) -> list[tuple[Function | None, Words, list[ast.Call]]]:
    """Every function (None: the module), the texts that its names can be, and the calls in it."""
    found: list[tuple[Function | None, Words, list[ast.Call]]] = []

    def visit(node: ast.AST, function: Function | None, names: Words, calls: list[ast.Call]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                mine = {name: texts for name, texts in names.items() if name not in parameters(child)}
                inner: list[ast.Call] = []
                known = constants(child.body, mine)
                visit(child, child, known, inner)
                found.append((child, known, inner))
            else:
                if isinstance(child, ast.Call):
                    calls.append(child)
                visit(child, function, names, calls)

    names = constants(tree.body, limits)
    top: list[ast.Call] = []
    visit(tree, None, names, top)
    return [*found, (None, names, top)]


def beside(call: ast.Call, function: Function | None, names: Words) -> Words:
    """`names` as the assignments just before a call in its own block leave them."""
    if function is None:
        return names
    for block in (getattr(node, part, None) for node in ast.walk(function) for part in ("body", "orelse")):
        for index, statement in enumerate(block if isinstance(block, list) else ()):
            if isinstance(statement, ast.Expr | ast.Return | ast.Raise) and any(n is call for n in ast.walk(statement)):
                return constants(block[:index], names)
    return names


def parameters(function: Function) -> list[str]:
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def given(call: ast.Call, function: Function | None) -> dict[str, ast.expr]:
    """A call's arguments by parameter; a method's `self` is not counted. function None: `refuse` and `message`."""
    words = {word.arg: word.value for word in call.keywords if word.arg}
    if function is None:
        return dict(zip(PARTS[:1], call.args, strict=False)) | words
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg not in ("self", "cls")]
    defaults = dict(zip(reversed(positional), reversed(function.args.defaults), strict=False))
    defaults |= {a.arg: d for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}
    return defaults | dict(zip(positional, call.args, strict=False)) | words


def handed_on(node: ast.expr | None, function: Function | None) -> set[str]:
    """The function's parameters that stand in an expression as they are, or in its text."""
    if node is None or function is None:
        return set()
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names & (set(parameters(function)) - {"self", "cls"})


def together(parts: list[list[str]]) -> list[Row]:
    """One row for each reading: parts chosen by the same branches go in step, others are combined."""
    clean = [[COMPUTED.get(text, " ".join(text.split()).replace("|", "\\|")) for text in part] for part in parts]
    lengths = {len(part) for part in clean if len(part) > 1}
    if len(lengths) == 1:
        (count,) = lengths
        return [
            (a, b, c) for a, b, c in zip(*(part * count if len(part) == 1 else part for part in clean), strict=True)
        ]
    return [(a, b, c) for a in clean[0] for b in clean[1] for c in clean[2]]


def reachable(name: str, call: ast.Call, tree: ast.Module, owner: Function) -> bool:
    """Whether a call by this name is one of this function: it stands in the same file, or is imported from there."""
    if any(node is owner for node in ast.walk(tree)):
        return True
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return isinstance(call.func, ast.Name) and any(alias.name == name for node in imports for alias in node.names)


def refusals(files: list[tuple[Path, ast.Module]]) -> dict[Row, None]:
    """(argument, accepted, remedy) of every refusal, in the words of whoever calls the function that refuses."""
    rows: dict[Row, None] = {}
    leaf = next((tree for path, tree in files if path.name == "spec.py"), ast.Module([], []))
    limits = {name: texts for name, texts in constants(leaf.body, {}).items() if name.isupper()}
    all_scopes = [(path, tree, *scope) for path, tree in files for scope in scopes(tree, limits)]
    open_parts: dict[str, list[Template]] = {"refuse": [], "message": []}
    done: set[tuple[str, int]] = set()
    for _ in range(4):  # functions that call functions that refuse; deeper than that nothing is
        grown = dict(open_parts)
        for path, tree, function, every, calls in all_scopes:
            for call in calls:
                name = called(call)
                if name not in open_parts or (function and function.name in SKIPPED.get(path.name, ())):
                    continue
                if (name, id(call)) in done:
                    continue
                done.add((name, id(call)))
                names = beside(call, function, every)
                for owner, parts, theirs in open_parts[name] or [(None, (), {})]:
                    if owner is not None and not reachable(name, call, tree, owner):
                        continue
                    have = given(call, owner)
                    if owner is None:
                        mine: tuple[ast.expr | None, ...] = tuple(have.get(part) for part in PARTS)
                        texts = [texts_of(part, names) for part in mine]
                    else:
                        words = theirs | {key: texts_of(value, names) for key, value in have.items()}
                        mine = tuple(have.get(part.id) if isinstance(part, ast.Name) else None for part in parts)
                        texts = [texts_of(part, words) for part in parts]
                    passed = handed_on(mine[0], function) | handed_on(mine[2], function)
                    if function is not None and passed and function.name not in ("__init__", "__call__"):
                        keep = tuple(
                            m if handed_on(m, function) or not texts[i] else ast.Constant(" / ".join(texts[i]))
                            for i, m in enumerate(mine)
                        )
                        grown.setdefault(function.name, []).append((function, keep, names))
                        continue
                    rows.update(dict.fromkeys(together(texts)))
        open_parts = grown
    return rows


def table() -> str:
    files = [(path, ast.parse(path.read_text())) for path in sorted((ROOT / "keysieve").rglob("*.py"))]
    lines = ["| argument | accepted | remedy |", "|---|---|---|"]
    lines += [f"| `{argument}` | {accepted} | {remedy} |" for argument, accepted, remedy in sorted(refusals(files))]
    return "\n".join(line.replace("<", "&lt;").replace(">", "&gt;") for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if the table is not current")
    args = parser.parse_args(argv)
    old = PAGE.read_text()
    before, rest = old.split(BEGIN)
    new = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if args.check:
        missing = [line for line in table().splitlines() if line not in old]
        print("\n".join(missing))
        return int(bool(missing))
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
