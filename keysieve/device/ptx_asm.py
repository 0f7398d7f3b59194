"""How an inline PTX statement is put into a kernel, and whether a kernel is being built."""

from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

SCOPES = ("cta", "cluster", "gpu", "sys")


def asm(
    template: str,
    constraints: str,
    results: tuple[Any, ...],
    operands: tuple[Any, ...],
    *,
    pure: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> tuple[Any, ...]:
    """Emit one inline PTX statement and return its results.

    results: DSL scalar types, in the order of the output constraints. operands: DSL values. `pure` arithmetic may be
    moved, merged and removed; anything else gets a memory clobber and stays where it is.
    """
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    if not pure:
        constraints = constraints + ",~{memory}" if constraints else "~{memory}"
    types = [result.mlir_type for result in results]
    if not types:
        out_type = None
    elif len(types) == 1:
        out_type = types[0]
    else:
        out_type = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        out_type,
        values,
        template,
        constraints,
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return ()
    if len(types) == 1:
        return (results[0](out),)
    return tuple(
        result(llvm.extractvalue(kind, out, [index], loc=loc, ip=ip))
        for index, (result, kind) in enumerate(zip(results, types, strict=True))
    )


def in_kernel() -> bool:
    """Trace-time: is the code being built inside a device function (True) or host code (False)?

    Helpers that have a plain CPU form use it so that the same function can be tested natively.
    """
    op = ir.InsertionPoint.current.block.owner
    while op is not None:
        name = op.operation.name
        if name in ("gpu.func", "gpu.module", "cuda.kernel"):
            return True
        if name == "builtin.module":
            return False
        op = op.operation.parent
    return False
