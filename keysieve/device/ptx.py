"""Inline PTX: the instructions keysieve needs that CuTe DSL has no portable spelling for.

Addresses are plain integers: global ones `Int64` (bytes), shared ones `Uint32` (bytes in the shared window of this
block, see `smem_addr`). Everything that touches memory carries a memory clobber and is never moved or dropped;
arithmetic carries neither, so that the compiler may schedule it.

Unless a docstring says otherwise an instruction is executed by every thread that reaches it. The DSL's own
`cute.copy` of a tensor-map atom elects a lane by itself; the raw bulk copies here do not: wrap them in
`with cute.arch.elect_one():` (warp converged) or test the thread index.
"""

from typing import Any

from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device.ptx_asm import SCOPES

# isort would make a statement of every name that is handed on
# isort: off
from keysieve.device.ptx_asm import asm as asm, in_kernel as in_kernel
from keysieve.device.ptx_memory import (
    atom_global as atom_global,
    atom_shared as atom_shared,
    load as load,
    load_cluster as load_cluster,
    load_pair as load_pair,
    load_shared as load_shared,
    load_shared_u16 as load_shared_u16,
    load_shared_v4 as load_shared_v4,
    load_u16 as load_u16,
    load_v2 as load_v2,
    load_v4 as load_v4,
    map_shared as map_shared,
    red_cluster as red_cluster,
    red_global as red_global,
    red_shared as red_shared,
    store as store,
    store_cluster as store_cluster,
    store_half_below as store_half_below,
    store_pair as store_pair,
    store_shared as store_shared,
    store_shared_u16 as store_shared_u16,
    store_shared_v4 as store_shared_v4,
    store_u16 as store_u16,
    store_v2 as store_v2,
    store_v4 as store_v4,
)
# isort: on


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
def l2_policy(kind: str, share: float = 1.0, *, loc: Any = None, ip: Any = None) -> Int64:
    """An L2 cache policy: "evict_first", "evict_last" or "evict_normal" for a share (0 to 1, a Python number) of the
    lines, none for the others."""
    text = f"createpolicy.fractional.L2::{kind}.b64 $0, {share};"
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
    if scope not in SCOPES:
        raise ValueError(f"fence scope {scope!r}: one of {SCOPES}")
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
def discard_line(addr: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Drop the 128-byte line at a global address, a multiple of 128, from L2 without writing it to memory: its bytes
    are undefined until they are written again."""
    asm("discard.global.L2 [$0], 128;", "l", (), (addr,), loc=loc, ip=ip)


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
