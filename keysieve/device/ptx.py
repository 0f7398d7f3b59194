"""Inline PTX: the instructions keysieve needs that CuTe DSL has no portable spelling for.

Addresses are plain integers: global ones `Int64` (bytes), shared ones `Uint32` (bytes in the shared window of this
block, see `smem_addr`). Everything that touches memory carries a memory clobber and is never moved or dropped;
arithmetic carries neither, so that the compiler may schedule it.

Unless a docstring says otherwise an instruction is executed by every thread that reaches it. The DSL's own
`cute.copy` of a tensor-map atom elects a lane by itself; the raw bulk copies here do not: wrap them in
`with cute.arch.elect_one():` (warp converged) or test the thread index.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

# PTX type suffix and register class of the scalars that may travel through `load`/`store`.
_SCALARS: dict[Any, tuple[str, str]] = {
    Int32: ("b32", "r"),
    Uint32: ("b32", "r"),
    Float32: ("b32", "f"),
    Int64: ("b64", "l"),
}
_ORDERS = ("relaxed", "acquire", "release", "weak", "volatile")
_SCOPES = ("cta", "cluster", "gpu", "sys")


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


# ---------------------------------------------------------------------------------------------- memory, scalars


def _access(kind: str, order: str, scope: str, space: str) -> str:
    if order not in _ORDERS or (order not in ("weak", "volatile") and scope not in _SCOPES):
        raise ValueError(f"{kind}: order {order!r} (one of {_ORDERS}), scope {scope!r} (one of {_SCOPES})")
    if order in ("weak", "volatile"):
        return f"{kind}{'.volatile' if order == 'volatile' else ''}.{space}"
    return f"{kind}.{order}.{scope}.{space}"


@dsl_user_op
def load(
    addr: Any,
    dtype: Any,
    order: str = "weak",
    scope: str = "gpu",
    *,
    space: str = "global",
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """One scalar (Int32, Uint32, Float32 or Int64) from `addr`, with memory order and scope (trace-time strings).

    order: weak, volatile, relaxed, acquire. space: global (Int64 address) or shared::cta (Uint32 address).
    """
    suffix, reg = _SCALARS[dtype]
    place = "l" if space == "global" else "r"
    text = f"{_access('ld', order, scope, space)}.{suffix} $0, [$1];"
    return asm(text, f"={reg},{place}", (dtype,), (addr,), loc=loc, ip=ip)[0]


@dsl_user_op
def store(
    addr: Any,
    value: Any,
    order: str = "weak",
    scope: str = "gpu",
    *,
    space: str = "global",
    loc: Any = None,
    ip: Any = None,
) -> None:
    """One scalar to `addr`, with memory order and scope. order: weak, volatile, relaxed, release."""
    suffix, reg = _SCALARS[type(value)]
    place = "l" if space == "global" else "r"
    text = f"{_access('st', order, scope, space)}.{suffix} [$0], $1;"
    asm(text, f"{place},{reg}", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def load_u16(addr: Int64, *, loc: Any = None, ip: Any = None) -> Uint32:
    """16 bits from global memory, zero-extended. Address aligned to 2."""
    text = "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    return asm(text, "=r,l", (Uint32,), (addr,), loc=loc, ip=ip)[0]


@dsl_user_op
def store_u16(addr: Int64, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low 16 bits of `value` to global memory. Address aligned to 2."""
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }"
    asm(text, "l,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def store_half_below(
    addr: Int64, word: Uint32, half: int, index: Int32, bound: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store half `half` (0: low, 1: high; a Python number) of `word` to global memory if index < bound: no branch."""
    text = (
        "{ .reg .pred p; .reg .b16 h0, h1; setp.lt.s32 p, $2, $3; mov.b32 {h0, h1}, $1; "
        f"@p st.global.b16 [$0], h{half}; }}"
    )
    asm(text, "l,r,r,r", (), (addr, word, index, bound), loc=loc, ip=ip)


@dsl_user_op
def load_shared_u16(addr: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """16 bits from shared memory, zero-extended."""
    text = "{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    return asm(text, "=r,r", (Uint32,), (addr,), loc=loc, ip=ip)[0]


@dsl_user_op
def store_shared_u16(addr: Uint32, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low 16 bits of `value` to shared memory."""
    text = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h; }"
    asm(text, "r,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def load_shared(addr: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A 32-bit word from shared memory."""
    return asm("ld.shared.b32 $0, [$1];", "=r,r", (Uint32,), (addr,), loc=loc, ip=ip)[0]


@dsl_user_op
def store_shared(addr: Uint32, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """A 32-bit word to shared memory."""
    asm("st.shared.b32 [$0], $1;", "r,r", (), (addr, value), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- memory, vectors


@dsl_user_op
def load_v4(addr: Int64, hint: str = "", *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Four 32-bit words (16 bytes, 16-byte aligned) from global memory.

    hint: "" (weak), "nc" (read-only path), "nc.stream" (read once: no L1 line), "cg" (L2 only).
    """
    forms = {
        "": "ld.global.v4.b32",
        "nc": "ld.global.nc.v4.b32",
        "nc.stream": "ld.global.nc.L1::no_allocate.v4.b32",
        "cg": "ld.global.cg.v4.b32",
    }
    text = forms[hint] + " {$0, $1, $2, $3}, [$4];"
    return asm(text, "=r,=r,=r,=r,l", (Uint32,) * 4, (addr,), loc=loc, ip=ip)


@dsl_user_op
def store_v4(addr: Int64, a: Uint32, b: Uint32, c: Uint32, d: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Four 32-bit words (16-byte aligned) to global memory."""
    asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", (), (addr, a, b, c, d), loc=loc, ip=ip)


@dsl_user_op
def load_v2(addr: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Two 32-bit words (8-byte aligned) from global memory."""
    return asm("ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", (Uint32,) * 2, (addr,), loc=loc, ip=ip)


@dsl_user_op
def store_v2(addr: Int64, a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Two 32-bit words (8-byte aligned) to global memory."""
    asm("st.global.v2.b32 [$0], {$1, $2};", "l,r,r", (), (addr, a, b), loc=loc, ip=ip)


@dsl_user_op
def load_shared_v4(addr: Uint32, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Four 32-bit words (16-byte aligned) from shared memory."""
    text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    return asm(text, "=r,=r,=r,=r,r", (Uint32,) * 4, (addr,), loc=loc, ip=ip)


@dsl_user_op
def store_shared_v4(
    addr: Uint32, a: Uint32, b: Uint32, c: Uint32, d: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Four 32-bit words (16-byte aligned) to shared memory."""
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", (), (addr, a, b, c, d), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- tagged pairs


@dsl_user_op
def store_pair(addr: Int64, w0: Uint32, w1: Uint32, tag: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a tagged pair `(w0, tag, w1, tag)`: 16 bytes, two 64-bit elements, relaxed, system scope.

    Each aligned 64-bit element is single-copy atomic, so a reader that sees the tag in an element has that element's
    word. The two elements may become visible separately: a reader checks both tags.
    """
    text = (
        "{ .reg .b64 lo, hi; mov.b64 lo, {$1, $3}; mov.b64 hi, {$2, $3}; st.relaxed.sys.global.v2.b64 [$0], {lo, hi}; }"
    )
    asm(text, "l,r,r,r", (), (addr, w0, w1, tag), loc=loc, ip=ip)


@dsl_user_op
def load_pair(addr: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Read a tagged pair: `(w0, tag0, w1, tag1)`, relaxed, system scope. Compare *both* tags."""
    text = (
        "{ .reg .b64 lo, hi; ld.relaxed.sys.global.v2.b64 {lo, hi}, [$4]; mov.b64 {$0, $1}, lo; mov.b64 {$2, $3}, hi; }"
    )
    return asm(text, "=r,=r,=r,=r,l", (Uint32,) * 4, (addr,), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- atomics


@dsl_user_op
def atom_shared(addr: Uint32, value: Uint32, op: str = "add", *, loc: Any = None, ip: Any = None) -> Uint32:
    """Shared-memory atomic on a u32, returning the old value. op: add, min, max, exch (u32 forms)."""
    kind = "b32" if op == "exch" else "u32"
    return asm(f"atom.shared.{op}.{kind} $0, [$1], $2;", "=r,r,r", (Uint32,), (addr, value), loc=loc, ip=ip)[0]


@dsl_user_op
def red_shared(addr: Uint32, value: Uint32, op: str = "add", *, loc: Any = None, ip: Any = None) -> None:
    """Shared-memory reduction on a u32 without a result. op: add, min, max, or, and."""
    kind = "b32" if op in ("or", "and") else "u32"
    asm(f"red.shared.{op}.{kind} [$0], $1;", "r,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def red_global(
    addr: Int64,
    value: Uint32,
    op: str = "add",
    order: str = "relaxed",
    scope: str = "gpu",
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Global reduction on a u32 without a result. op: add, min, max, or, and; order: relaxed or release."""
    kind = "b32" if op in ("or", "and") else "u32"
    asm(f"red.{order}.{scope}.global.{op}.{kind} [$0], $1;", "l,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def atom_global(
    addr: Int64,
    value: Uint32,
    op: str = "add",
    order: str = "relaxed",
    scope: str = "gpu",
    *,
    loc: Any = None,
    ip: Any = None,
) -> Uint32:
    """Global atomic on a u32, returning the old value. op: add, min, max, exch; order: relaxed, acquire, acq_rel."""
    kind = "b32" if op == "exch" else "u32"
    text = f"atom.{order}.{scope}.global.{op}.{kind} $0, [$1], $2;"
    return asm(text, "=r,l,r", (Uint32,), (addr, value), loc=loc, ip=ip)[0]


# ---------------------------------------------------------------------------------------------- cluster


@dsl_user_op
def map_shared(addr: Uint32, block: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Cluster-window address of this block's shared address `addr` in block `block` of the cluster."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return asm(text, "=r,r,r", (Uint32,), (addr, block), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def load_cluster(addr: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A 32-bit word from a cluster shared address (see `map_shared`). Order it with cluster barriers."""
    return asm("ld.shared::cluster.b32 $0, [$1];", "=r,r", (Uint32,), (addr,), loc=loc, ip=ip)[0]


@dsl_user_op
def store_cluster(addr: Uint32, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """A 32-bit word to a cluster shared address."""
    asm("st.shared::cluster.b32 [$0], $1;", "r,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def red_cluster(addr: Uint32, value: Uint32, op: str = "add", *, loc: Any = None, ip: Any = None) -> None:
    """Reduction on a u32 at a cluster shared address, without a result."""
    kind = "b32" if op in ("or", "and") else "u32"
    asm(f"red.relaxed.cluster.shared::cluster.{op}.{kind} [$0], $1;", "r,r", (), (addr, value), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- bulk copies


@dsl_user_op
def smem_addr(pointer: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Shared-window address (Uint32, bytes) of a DSL shared-memory pointer."""
    return pointer.toint(loc=loc, ip=ip).to(Uint32, loc=loc, ip=ip)


@dsl_user_op
def bulk_load(
    dst: Uint32, src: Int64, nbytes: Int32, barrier: Uint32, policy: Any = None, *, loc: Any = None, ip: Any = None
) -> None:
    """Bulk copy global -> shared of `nbytes` (a multiple of 16; both ends 16-byte aligned), completing on `barrier`.

    Issued by EVERY thread that reaches it: elect one. policy: Int64 of `l2_policy`, or None.
    """
    head = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if policy is None:
        asm(head + " [$0], [$1], $2, [$3];", "r,l,r,r", (), (dst, src, nbytes, barrier), loc=loc, ip=ip)
    else:
        text = head + ".L2::cache_hint [$0], [$1], $2, [$3], $4;"
        asm(text, "r,l,r,r,l", (), (dst, src, nbytes, barrier, policy), loc=loc, ip=ip)


@dsl_user_op
def bulk_store(dst: Int64, src: Uint32, nbytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Bulk copy shared -> global of `nbytes` (a multiple of 16). EVERY thread that reaches it issues one: elect one.

    Written shared memory must be fenced to the async proxy first; close with `bulk_commit` and `bulk_wait`.
    """
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    asm(text, "l,r,r", (), (dst, src, nbytes), loc=loc, ip=ip)


@dsl_user_op
def bulk_commit(*, loc: Any = None, ip: Any = None) -> None:
    """Close this thread's group of bulk stores."""
    asm("cp.async.bulk.commit_group;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def bulk_wait(pending: int = 0, read: bool = False, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until at most `pending` groups are open; with `read`, only until their sources may be overwritten."""
    asm(f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def l2_policy(kind: str, *, loc: Any = None, ip: Any = None) -> Int64:
    """An L2 cache policy for bulk copies: "evict_first", "evict_last" or "evict_normal"."""
    text = f"createpolicy.fractional.L2::{kind}.b64 $0, 1.0;"
    return asm(text, "=l", (Int64,), (), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def prefetch_l2(addr: Int64, nbytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for `nbytes` (a multiple of 16, 16-byte aligned) to be brought into L2. Elect one thread."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", (), (addr, nbytes), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- order


@dsl_user_op
def grid_wait(*, loc: Any = None, ip: Any = None) -> None:
    """Wait for the kernels this one depends on (programmatic dependent launch): they are complete and visible.

    Nothing that an earlier kernel of the chain touches may be read or written before it.
    """
    asm("griddepcontrol.wait;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def grid_launch_dependents(*, loc: Any = None, ip: Any = None) -> None:
    """Let the next kernel of the chain start. It promises nothing about this kernel's writes: `grid_wait` does."""
    asm("griddepcontrol.launch_dependents;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def fence(scope: str = "gpu", *, loc: Any = None, ip: Any = None) -> None:
    """Acquire-release fence at `scope` (cta, cluster, gpu, sys)."""
    if scope not in _SCOPES:
        raise ValueError(f"fence scope {scope!r}: one of {_SCOPES}")
    asm(f"fence.acq_rel.{scope};", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def fence_async_shared(*, loc: Any = None, ip: Any = None) -> None:
    """Make this thread's shared-memory stores visible to the copy engine and the matrix unit (then: a barrier)."""
    asm("fence.proxy.async.shared::cta;", "", (), (), loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------- integers


@dsl_user_op
def max_u16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise unsigned maximum of two 16-bit halves: one instruction on sm_90 and later."""
    return asm("max.u16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def byte_perm(a: Uint32, b: Uint32, selector: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """`prmt.b32`: four bytes picked from the eight of (a: bytes 0-3, b: bytes 4-7) by the selector's nibbles."""
    return asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (Uint32,), (a, b, selector), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def lanes_below(*, loc: Any = None, ip: Any = None) -> Uint32:
    """Mask with the bits of the lanes below this one."""
    return asm("mov.u32 $0, %lanemask_lt;", "=r", (Uint32,), (), pure=True, loc=loc, ip=ip)[0]


# ---------------------------------------------------------------------------------------------- time, end


@dsl_user_op
def global_ns(*, loc: Any = None, ip: Any = None) -> Int64:
    """The global timer, nanoseconds (its step is some tens of ns to 1 us). Not hoisted, not merged."""
    return asm("mov.u64 $0, %globaltimer;", "=l", (Int64,), (), loc=loc, ip=ip)[0]


@dsl_user_op
def clock(*, loc: Any = None, ip: Any = None) -> Int64:
    """This SM's cycle counter. Not hoisted, not merged."""
    return asm("mov.u64 $0, %clock64;", "=l", (Int64,), (), loc=loc, ip=ip)[0]


@dsl_user_op
def sm_number(*, loc: Any = None, ip: Any = None) -> Int32:
    """Number of the SM that runs this thread."""
    return asm("mov.u32 $0, %smid;", "=r", (Int32,), (), loc=loc, ip=ip)[0]


@dsl_user_op
def prefetch_line(addr: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for the cache line at a global address to be brought into L2."""
    asm("prefetch.global.L2 [$0];", "l", (), (addr,), loc=loc, ip=ip)


@dsl_user_op
def nano_sleep(ns: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Yield the issue slot for about `ns` nanoseconds (0 to 1,000,000)."""
    asm("nanosleep.u32 $0;", "r", (), (ns,), loc=loc, ip=ip)


@dsl_user_op
def trap(*, loc: Any = None, ip: Any = None) -> None:
    """Abort the grid. The context is lost: write the report first (see `sync`)."""
    asm("trap;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def exit_thread(*, loc: Any = None, ip: Any = None) -> None:
    """End this thread. No barrier that counts it may follow."""
    asm("exit;", "", (), (), loc=loc, ip=ip)
