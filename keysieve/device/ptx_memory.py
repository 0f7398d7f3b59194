"""Inline PTX that reads and writes memory: scalars, vectors, tagged pairs, atomics, other blocks of a cluster.

Used as `ptx.<name>`: :mod:`keysieve.device.ptx` hands everything on, and says what holds for all of it.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device.ptx_asm import SCOPES, asm

# PTX type suffix and register class of the scalars that may travel through `load`/`store`.
_SCALARS: dict[Any, tuple[str, str]] = {
    Int32: ("b32", "r"),
    Uint32: ("b32", "r"),
    Float32: ("b32", "f"),
    Int64: ("b64", "l"),
}
_ORDERS = ("relaxed", "acquire", "release", "weak", "volatile")


# ---------------------------------------------------------------------------------------------- memory, scalars


def _access(kind: str, order: str, scope: str, space: str) -> str:
    if order not in _ORDERS or (order not in ("weak", "volatile") and scope not in SCOPES):
        raise ValueError(f"{kind}: order {order!r} (one of {_ORDERS}), scope {scope!r} (one of {SCOPES})")
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
    addr: Int64,
    word: Uint32,
    half: int,
    index: Int32,
    bound: Int32,
    policy: Any = None,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store half `half` (0: low, 1: high; a Python number) of `word` to global memory if index < bound: no branch.

    policy: Int64 of `l2_policy`, or None.
    """
    hint, last, more, operands = ("", "", "", ()) if policy is None else (".L2::cache_hint", ", $4", ",l", (policy,))
    text = (
        "{ .reg .pred p; .reg .b16 h0, h1; setp.lt.s32 p, $2, $3; mov.b32 {h0, h1}, $1; "
        f"@p st.global{hint}.b16 [$0], h{half}{last}; }}"
    )
    asm(text, "l,r,r,r" + more, (), (addr, word, index, bound, *operands), loc=loc, ip=ip)


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
def store_v2(addr: Int64, a: Uint32, b: Uint32, policy: Any = None, *, loc: Any = None, ip: Any = None) -> None:
    """Two 32-bit words (8-byte aligned) to global memory. policy: Int64 of `l2_policy`, or None."""
    hint, last, more, operands = ("", "", "", ()) if policy is None else (".L2::cache_hint", ", $3", ",l", (policy,))
    asm(f"st.global{hint}.v2.b32 [$0], {{$1, $2}}{last};", "l,r,r" + more, (), (addr, a, b, *operands), loc=loc, ip=ip)


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
