"""GPU kernels in CuTe DSL, and their registrations.

A kernel `x` is two modules: `x_config` (no cutlass: what can be asked for, and in which configurations) and `x` (the
device code, imported only to compile). `keysieve.compile` finds kernels through `CONFIG_MODULES`; docs/kernels.md says
how to add one.
"""

CONFIG_MODULES: tuple[str, ...] = (
    "keysieve.kernels.tile_offsets_config",
    "keysieve.kernels.sm90_score_config",
    "keysieve.kernels.sm90_mxfp4_config",
    "keysieve.kernels.sm100_score_config",
    "keysieve.kernels.select_config",
    "keysieve.kernels.exchange_config",
    "keysieve.kernels.local_topk_config",
)
"""Modules that hold one `KERNEL` (a `keysieve.kernels.base.Kernel`) or a tuple `KERNELS`."""
