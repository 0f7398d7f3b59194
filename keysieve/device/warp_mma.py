"""A warp's own matrix product: 16 x 8 x 32 E4M3, float32 sums. For what one warp does without its warpgroup.

On Hopper the instruction is made of half-precision products; every E4M3 number is one exactly.
"""

from typing import Any

from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device.ptx import asm


@dsl_user_op
def product_e4m3(a: list[Uint32], b: list[Uint32], sums: list[Float32], *, loc: Any = None, ip: Any = None) -> Any:
    """`sums` + a . b, of lane l. a: rows l / 4 and l / 4 + 8 at depth 4 (l % 4) .., then both at 16 + 4 (l % 4) ..

    b: column l / 4 at the same two depths. sums: row l / 4, columns 2 (l % 4) and the next, then row l / 4 + 8.
    """
    text = (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};"
    )
    shape = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return asm(text, shape, (Float32,) * 4, (*a, *b, *sums), loc=loc, ip=ip)
