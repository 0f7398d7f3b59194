"""One product of 128 keys and n query heads by CuTe's own tcgen05 atoms, to compare the words in its code with ours."""

import contextlib
import io
import tempfile
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as scales
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

M, K = 128, 128


class Atoms:
    """kind: "f8" or "mxf4"."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n = kind, n
        self.dtype = Float8E4M3FN if kind == "f8" else Float4E2M1FN

    @cute.jit
    def entry(self, stream: Any) -> None:
        tile = (M, self.n, K)
        if cutlass.const_expr(self.kind == "f8"):
            op: Any = tcgen05.MmaF8F6F4Op(
                self.dtype,
                self.dtype,
                Float32,
                (M, self.n, 32),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        else:
            op = tcgen05.MmaMXF4Op((M, self.n, 64), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM)
        mma = cute.make_tiled_mma(op)
        a = helpers.make_smem_layout_a(mma, tile, self.dtype, 1)
        b = helpers.make_smem_layout_b(mma, tile, self.dtype, 1)
        self.kernel(mma, a, b).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, a: cute.ComposedLayout, b: cute.ComposedLayout) -> None:
        memory = SmemAllocator()
        barrier = memory.allocate_array(Int64, 1)
        word = memory.allocate_array(Int32, 1)
        keys = mma.make_fragment_A(memory.allocate_tensor(self.dtype, a.outer, 1024, swizzle=a.inner))
        heads = mma.make_fragment_B(memory.allocate_tensor(self.dtype, b.outer, 1024, swizzle=b.inner))
        cute.arch.alloc_tmem(256, word)
        tensor = cute.arch.retrieve_tmem_ptr(Float32, 16, word)
        sums = cute.make_tensor(tensor, mma.make_fragment_C(mma.partition_shape_C((M, self.n))).layout)
        parts: list[Any] = []
        if cutlass.const_expr(self.kind == "mxf4"):
            parts = self.copy_scales(mma, memory, tensor, tcgen05.find_tmem_tensor_col_offset(sums))
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for step in cutlass.range_constexpr(cute.size(keys, mode=[2])):
            if cutlass.const_expr(self.kind == "mxf4"):
                mma.set(tcgen05.Field.SFA, parts[0][(None, None, step)].iterator)
                mma.set(tcgen05.Field.SFB, parts[1][(None, None, step)].iterator)
            cute.gemm(mma, sums, keys[(None, None, step, 0)], heads[(None, None, step, 0)], sums)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
        cute.arch.dealloc_tmem(tensor, 256)

    def copy_scales(self, mma: Any, memory: Any, tensor: Any, column: int) -> list[Any]:
        """Scale words of both operands from shared to tensor memory, behind the sums."""
        tile = (M, self.n, K)
        copy = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), Float8E8M0FNU)
        found = []
        for of_keys in (True, False):
            smem_layout = (scales.make_smem_layout_sfa if of_keys else scales.make_smem_layout_sfb)(mma, tile, 32, 1)
            tmem_layout = (scales.make_tmem_layout_sfa if of_keys else scales.make_tmem_layout_sfb)(
                mma, tile, 32, cute.slice_(smem_layout, (None, None, None, 0))
            )
            source = memory.allocate_tensor(Float8E8M0FNU, smem_layout, 128)
            target = cute.make_tensor(cute.recast_ptr(tensor + column, dtype=Float8E8M0FNU), tmem_layout)
            column = column + tcgen05.find_tmem_tensor_col_offset(target)
            flat = cute.filter_zeros(target)
            tiled = tcgen05.make_s2t_copy(copy, flat)
            mine = tiled.get_slice(0)
            described = tcgen05.get_s2t_smem_desc_tensor(tiled, mine.partition_S(cute.filter_zeros(source)))
            cute.copy(tiled, described[(None, None, None, None, 0)], mine.partition_D(flat))
            found.append(target)
        return found


def compile_atoms(kind: str, n: int) -> str:
    """The PTX."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        options = f"--keep-ptx --keep-cubin --gpu-arch=sm_100a --dump-dir {scratch}"
        compiled = cute.compile(Atoms(kind, n).entry, make_fake_stream(), options=options)
        return str(compiled.__ptx__)
