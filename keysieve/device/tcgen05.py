"""The fifth-generation matrix unit (sm_100a, sm_103a) as raw PTX: tensor memory, products, scale copies, commits.

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is `lane << 16 | column`. A warp reaches the 32 lanes
that begin at `32 * (warp % 4)` alone.

Three rules of this unit have cost others rare wrong answers; each is settled here rather than left to callers:

* The registers of a tensor-memory load hold the data only after its wait, and nothing ties the two for a compiler.
  `load` is one statement that holds both, so that no use can be scheduled between them.
* A commit tracks the asynchronous operations of the thread that executes it, and no others. `product_*`, `copy_scales`
  and `commit` are plain per-thread instructions. Call them under `with cute.arch.elect_one():` in a converged warp: the
  election among the same lanes falls on the same lane every time.
* `alloc`, `dealloc`, `relinquish` and `load` are `.sync.aligned`: the whole warp executes them together, converged.
"""

from typing import Any

from cutlass import Boolean, Float32, Int64, Uint32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device.ptx import asm

COLUMNS = 512
LANES = 128
TENSOR_SPACE = 6
"""The compiler's number of the address space."""

WIDTHS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Columns that one `32x32b` load can bring, one register each."""


def pieces(columns: int) -> list[tuple[int, int]]:
    """(first column, columns) of the loads that bring `columns` columns: as few as there are."""
    found = []
    at = 0
    while at < columns:
        width = next(w for w in WIDTHS if w <= columns - at)
        found.append((at, width))
        at += width
    return found


@dsl_user_op
def alloc(where: Uint32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Allocate `columns` (a power of two, 32..512); the address is written to shared memory at `where`. Whole warp."""
    text = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};"
    asm(text, "r", (), (where,), loc=loc, ip=ip)


@dsl_user_op
def relinquish(*, loc: Any = None, ip: Any = None) -> None:
    """No more allocations by this block. Whole warp."""
    asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def dealloc(address: Uint32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Give `columns` at `address` back, by the warp that allocated, after everybody's last use. Whole warp."""
    text = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};"
    asm(text, "r", (), (address,), loc=loc, ip=ip)


@dsl_user_op
def fence_before(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's earlier tensor-memory operations before the synchronisation that follows."""
    asm("tcgen05.fence::before_thread_sync;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's later tensor-memory operations after the synchronisation that went before."""
    asm("tcgen05.fence::after_thread_sync;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def commit(barrier: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive once on the shared mbarrier when all earlier products and copies of THIS thread are done. One thread."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    asm(text, "r", (), (barrier,), loc=loc, ip=ip)


def _tensor_pointer(address: Uint32, loc: Any, ip: Any) -> Any:
    """A tensor-memory address as the compiler's pointer type."""
    return llvm.inttoptr(llvm.PointerType.get(TENSOR_SPACE), address.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


# The products are compiler operations, not inline text, so that it knows what they are. In a loop, the election must
# stand inside the loop: CuTe DSL 4.8.1 crashes on a product in a loop that is itself inside the election.


@dsl_user_op
def product_f8(d: Uint32, a: Int64, b: Int64, word: int, accumulate: bool, *, loc: Any = None, ip: Any = None) -> None:
    """D (+)= A x B of 8-bit floats, K = 32. d: tensor-memory address. a, b: shared-memory descriptors. word: the
    instruction descriptor (a Python number). accumulate: add to D, else overwrite it. One thread."""
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F8F6F4,
        nvvm.CTAGroupKind.CTA_1,
        _tensor_pointer(d, loc, ip),
        a.ir_value(loc=loc, ip=ip),
        b.ir_value(loc=loc, ip=ip),
        Uint32(word).ir_value(loc=loc, ip=ip),
        Boolean(accumulate).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def product_mxf4(
    d: Uint32,
    a: Int64,
    b: Int64,
    word: int,
    scale_a: Uint32,
    scale_b: Uint32,
    accumulate: bool,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D (+)= (A * scale_a) x (B * scale_b) of E2M1, K = 64, one UE8M0 scale per 32. scale_*: tensor-memory addresses
    of the scale words; which of a word's bytes are used stands in the instruction descriptor `word`. One thread."""
    nvvm.tcgen05_mma_block_scale(
        nvvm.Tcgen05MMAKind.MXF4,
        nvvm.CTAGroupKind.CTA_1,
        _tensor_pointer(d, loc, ip),
        a.ir_value(loc=loc, ip=ip),
        b.ir_value(loc=loc, ip=ip),
        Uint32(word).ir_value(loc=loc, ip=ip),
        Boolean(accumulate).ir_value(loc=loc, ip=ip),
        _tensor_pointer(scale_a, loc, ip),
        _tensor_pointer(scale_b, loc, ip),
        block_scale=nvvm.Tcgen05MMABlockScale.BLOCK32,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_scales(address: Uint32, descriptor: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """512 bytes of shared memory, 32 rows of 128 bits, to 4 columns of tensor memory, repeated in all four groups of 32
    lanes. Done before this thread's later products, but NOT ordered after its earlier ones: those that read the columns
    must have been waited for. One thread."""
    asm("tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;", "r,l", (), (address, descriptor), loc=loc, ip=ip)


@dsl_user_op
def load(address: Uint32, columns: int, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """`columns` consecutive columns of this thread's lane as float32, waited for. address: lane (the warp's first) and
    column. Whole warp, converged."""
    lines = []
    for first, width in pieces(columns):
        registers = ", ".join(f"${i}" for i in range(first, first + width))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {{{registers}}}, [${columns} + {first}];")
    text = " ".join([*lines, "tcgen05.wait::ld.sync.aligned;"])
    outputs = ",".join(["=&f"] * columns)
    return asm(text, outputs + ",r", (Float32,) * columns, (address,), loc=loc, ip=ip)
