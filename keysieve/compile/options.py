"""Options every kernel is compiled with; a leaf, so that computing a cache key imports no compiler."""

OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin remarks{ptx}"
"""Compiler options of every kernel, beside target and scratch directory. Part of the cache key."""
