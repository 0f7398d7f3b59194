"""Leaves that every kernel shares. They import cutlass and nothing of keysieve but `spec` and each other.

| module | what it holds |
|---|---|
| `ptx` | inline PTX: loads and stores with order and scope, tagged pairs, bulk copies, grid dependency, timers, traps |
| `ptx_memory`, `ptx_asm` | parts of `ptx`, which hands their names on |
| `keys` | key16 and its packed forms, candidate words (integers only: they run on the CPU too) |
| `numerics` | pinned float32 and BF16 arithmetic, the two kinds of maximum, conversions |
| `scan` | warp and block scans, histograms, digit search |
| `paged` | 64-bit addresses of pages, keys, scales, table entries |
| `ring` | ring of shared-memory stages guarded by mbarriers, arrival counts derived from the roles |
| `sync` | bounded spins with a report, device flags |
| `warp_mma` | a warp's own small matrix product |
| `report` | layout of what `sync` writes, readable without cutlass |
"""
