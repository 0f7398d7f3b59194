"""Inline PTX, executed: a statement's text becomes a Python function over 32-bit numbers, by the PTX ISA.

What a statement does to memories and to other lanes it asks of a *unit*. A statement whose lanes meet (votes, shuffles,
waits) becomes a generator that yields what it meets for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

M = 0xFFFFFFFF
TOPS = 0x80008000
MEETING = ("vote.sync", "shfl.sync", "try_wait")
"""What a statement has in its text if its lanes meet."""

OPERATIONS = {
    "mov.u32": "{0} = {1}",
    "mov.b32": "{0} = {1}",
    "add.u32": "{0} = {1} + {2} & M",
    "add.s32": "{0} = {1} + {2} & M",
    "sub.u32": "{0} = {1} - {2} & M",
    "mad.lo.u32": "{0} = {1} * {2} + {3} & M",
    "and.b32": "{0} = {1} & {2}",
    "or.b32": "{0} = {1} | {2}",
    "min.u32": "{0} = min({1}, {2})",
    "max.u32": "{0} = max({1}, {2})",
    "popc.b32": "{0} = ({1}).bit_count()",
    "bfind.u32": "{0} = ({1}).bit_length() - 1 & M",
    "setp.ne.u32": "{0} = {1} != {2}",
    "selp.b32": "{0} = {1} if {3} else {2}",
    "prmt.b32": "{0} = permuted({1}, {2}, {3})",
    "cvt.u32.u16": "{0} = {1}",
    "cvt.u16.u32": "{0} = {1} & 0xFFFF",
    "min.u16x2": "{0} = by_halves(min, {1}, {2})",
    "max.u16x2": "{0} = by_halves(max, {1}, {2})",
    "max.s16x2": "{0} = by_halves(max, {1} ^ TOPS, {2} ^ TOPS) ^ TOPS",
    "add.u16x2": "{0} = by_halves(int.__add__, {1}, {2})",
    "add.rn.f16x2": "{0} = by_halves(added_f16, {1}, {2})",
    "vote.sync.ballot.b32": "{0} = yield 'ballot', {1}",
    "shfl.sync.up.b32": "{0} = yield 'up', {1}, {2}",
    "mbarrier.try_wait.parity.shared::cta.b64": "{0} = yield 'phase', {1}, {2}",
    "mbarrier.init.shared.b64": "unit.init({0}, {1})",
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64": "unit.expect({1}, {2})",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": "unit.copy({0}, {1}, {2}, {3})",
    "red.shared.add.u32": "unit.add({0}, {1})",
    "mapa.shared::cluster.u32": "{0} = {1} + ({2} << 32)",  # more bits than the device has: the block is not lost
    "fence.mbarrier_init.release.cluster": "pass",
    **{
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{size}b32": "unit.send({0}, {1}, {2})"
        for size in ("", "v2.", "v4.")
    },
}
ACCESS = re.compile(r"(ld|st)\.(shared|global)(?:\.v(\d))?\.[bu](\d+)")


def by_halves(what: Callable[[int, int], int], a: int, b: int) -> int:
    return what(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (what(a >> 16, b >> 16) & 0xFFFF) << 16


def added_f16(a: int, b: int) -> int:
    x, y = (struct.unpack("<e", struct.pack("<H", half))[0] for half in (a, b))
    total = x + y
    return 0x7FFF if total != total else struct.unpack("<H", struct.pack("<e", total))[0]


def permuted(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: bit 3 of a selector's nibble spreads the byte's sign."""
    source, out = a | b << 32, 0
    for place in range(4):
        pick = selector >> 4 * place & 15
        byte = source >> 8 * (pick & 7) & 0xFF
        out |= (byte if pick < 8 else 0xFF * (byte >> 7)) << 8 * place
    return out


def _operand(text: str) -> str:
    """In Python: `$n` as `on`, a register as `r_name`, several in braces as a tuple, an address without brackets."""
    text = text.strip()
    if text[0] in "{[":
        parts = ", ".join(map(_operand, text[1:-1].split(",")))
        return f"({parts},)" if text[0] == "{" else parts
    if "|" in text:
        return ", ".join(map(_operand, text.split("|")))
    if text == "%lanemask_lt":
        return "unit.lanes_below()"
    return text.replace("$", "o") if text[0] == "$" else text if text[0].isdigit() or text == "_" else f"r_{text}"


def _line(operation: str, operands: list[str]) -> str:
    access = ACCESS.fullmatch(operation)
    if access:
        kind, space, count, bits = access.groups()
        size, many = int(bits) // 8, int(count or 1)
        place, words = operands[kind == "ld"], operands[kind == "st"]
        words = words if many > 1 else f"({words},)"
        if kind == "ld":
            return f"{words} = unit.load_{space}({place}, {size}, {many})"
        return f"unit.store_{space}({place}, {size}, {words})"
    if operation == "mov.b32" and operands[0][0] == "(":
        return f"{operands[0]} = {operands[1]} & 0xFFFF, {operands[1]} >> 16"
    if operation == "mov.b32" and operands[1][0] == "(":
        return f"{operands[0]} = (lambda l, h: l | h << 16)(*{operands[1]})"
    return OPERATIONS[operation].format(*operands)


@cache
def function(text: str, constraints: str) -> Callable[..., Any]:
    """The statement as a function (or generator function) of a unit and its inputs, which returns its outputs."""
    kinds = constraints.split(",") if constraints else []
    outputs = [f"o{i}" for i, kind in enumerate(kinds) if kind[0] == "="]
    inputs = [f"o{i}" for i, kind in enumerate(kinds) if kind[0] != "="]
    body, written = [], False
    inner = text.strip()
    if inner[0] == "{":
        assert inner[-1] == "}"
        inner = inner[1:-1]
    for statement in filter(None, map(str.strip, inner.split(";"))):
        if statement.startswith(".reg"):
            continue
        guard, rest = re.fullmatch(r"(?:@(\w+) )?(.*)", statement).groups()  # type: ignore[union-attr]
        operation, _, operands = rest.partition(" ")
        listed = [_operand(one) for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)]
        read = re.findall(r"\bo\d+\b", " ".join(listed if operation[:2] in ("st", "re", "cp") else listed[1:]))
        shared = any(f"={kind}" in kinds for kind in "rl") and any(one in inputs for one in read)
        assert not (written and shared), f"{text}: an input is read behind an output that may share its register"
        written = written or any(one in listed[0] for one in outputs) if listed else written
        body.append((f"if r_{guard}: " if guard else "") + _line(operation, listed))
    lines = [f"def run(unit, {', '.join(inputs)}):", *body, f"return ({''.join(o + ', ' for o in outputs)})"]
    names: dict[str, Any] = dict(globals())
    exec("\n    ".join(lines), names)
    return names["run"]  # type: ignore[no-any-return]
