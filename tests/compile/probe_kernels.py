"""A kernel that can be made good or bad in the ways that inspection has to tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from keysieve.device import ptx

ARRAY = 64


@dataclass(frozen=True)
class ProbeConfig:
    threads: int = 128
    shared: int = 0
    programmatic: str = "off"
    indexed_array: bool = False
    broken: bool = False


class Probe:
    def __init__(self, config: ProbeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, out: Int64, n: Int32, chained: Int32, stream: cuda.CUstream) -> None:
        chain: Any = {"off": False, "on": True, "run time": chained}[self.config.programmatic]
        self.kernel.set_name_prefix("probe")
        self.kernel(out, n).launch(
            grid=(1, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=self.config.shared,
            stream=stream,
            use_pdl=chain,
        )

    @cute.kernel
    def kernel(self, out: Int64, n: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.config.broken):
            raise ValueError("broken on purpose")
        ptx.grid_wait()
        value = n
        if cutlass.const_expr(self.config.indexed_array):
            array = cute.make_rmem_tensor((ARRAY,), Int32)
            for i in cutlass.range(ARRAY, unroll=1):
                array[(i * n) % ARRAY] = i + thread
            value = array[n % ARRAY]
        ptx.store(out + Int64(thread) * Int64(4), value)


def build(config: ProbeConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    del arch
    return Probe(config), (Int64(0), Int32(0), Int32(0), make_fake_stream())
