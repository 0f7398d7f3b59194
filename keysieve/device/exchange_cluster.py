"""Words passed between the blocks of a cluster: stores that count themselves in on the receiver's mbarrier.

A cluster barrier with release and acquire costs a GPU-wide fence in every thread; this costs one trip. The receiver's
barrier is armed once with all the bytes it will get; `send` delivers a word and its count together; `receive` waits for
all of them. A block may leave after its last `receive`: nothing more is on its way to it.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import ptx

TRIES = 1 << 22
"""Polls (each may suspend the thread for a while) before `receive` gives up and traps: the other side is dead."""


@dsl_user_op
def arm(barrier: Uint32, nbytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Make the mbarrier at shared address `barrier` complete once, when `nbytes` have arrived. One thread; then
    `publish`."""
    text = (
        "{ mbarrier.init.shared.b64 [$0], 1;"
        f" mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], {nbytes}; }}"
    )
    ptx.asm(text, "r", (), (barrier,), loc=loc, ip=ip)


@dsl_user_op
def publish(*, loc: Any = None, ip: Any = None) -> None:
    """Show armed barriers to the cluster: before this thread's (relaxed) arrival at the cluster barrier."""
    ptx.asm("fence.mbarrier_init.release.cluster;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def send(addr: Uint32, value: Uint32, barrier: Uint32, block: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store `value` at this block's shared address `addr`, but in block `block`, counting 4 bytes on its `barrier`."""
    text = (
        "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, $0, $3; mapa.shared::cluster.u32 b, $2, $3;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $1, [b]; }"
    )
    ptx.asm(text, "r,r,r,r", (), (addr, value, barrier, block), loc=loc, ip=ip)


@dsl_user_op
def send_v2(
    addr: Uint32, a: Uint32, b: Uint32, barrier: Uint32, block: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """`send` of two neighbouring words (8-byte aligned), counting 8 bytes."""
    text = (
        "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, $0, $4; mapa.shared::cluster.u32 b, $3, $4;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [a], {$1, $2}, [b]; }"
    )
    ptx.asm(text, "r,r,r,r,r", (), (addr, a, b, barrier, block), loc=loc, ip=ip)


@dsl_user_op
def send_v4(
    addr: Uint32,
    a: Uint32,
    b: Uint32,
    c: Uint32,
    d: Uint32,
    barrier: Uint32,
    block: Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """`send` of four neighbouring words (16-byte aligned), counting 16 bytes."""
    text = (
        "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, $0, $6; mapa.shared::cluster.u32 b, $5, $6;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$1, $2, $3, $4}, [b]; }"
    )
    ptx.asm(text, "r,r,r,r,r,r,r", (), (addr, a, b, c, d, barrier, block), loc=loc, ip=ip)


@dsl_user_op
def _arrived(barrier: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0; selp.b32 $0, 1, 0, p; }"
    return ptx.asm(text, "=r,r", (Uint32,), (barrier,), loc=loc, ip=ip)[0]


@cute.jit
def receive(barrier: Uint32) -> None:
    """Wait until the barrier's first and only phase is complete; what was sent is then readable. Bounded."""
    done = _arrived(barrier)
    tries = Int32(0)
    while done == Uint32(0) and tries < Int32(TRIES):
        done = _arrived(barrier)
        tries = tries + Int32(1)
    if done == Uint32(0):
        ptx.trap()
