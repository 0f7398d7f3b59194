"""What may be drawn on a device: everything on the CPU, a few kernel configurations on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keysieve.backends import supports
from keysieve.check.trial import Scope
from keysieve.checks import UnsupportedError
from keysieve.spec import IndexerSpec

GPU_SPECS = (
    ("fp8_fp32", 32, 1),
    ("fp8_fp32", 64, 2),
    ("fp8_fp32", 8, 3),
    ("fp8_fp32", 16, 8),
    ("fp8_ue8m0", 32, 1),
    ("fp8_ue8m0", 64, 1),
    ("mxfp4", 32, 1),
    ("mxfp4", 64, 2),
)
"""(key_format, heads, next_n) that are checked on a GPU: each is a few kernels to compile or load."""

GPU_REPEATS = 8
ALL_STAGES = ("writers", "queries", "scores", "topk", "steps", "replays", "shards")
WITHOUT_KERNELS = ("writers", "queries")
"""Stages that are torch operations on any device: they need no backend."""

GPU_STAGES = (*ALL_STAGES, "exchange")


def scope_for(
    device: torch.device, backend: str = "auto", stages: Sequence[str] | None = None, numerics: str | None = None
) -> Scope:
    """The scope of a run of ``stages`` (None: all) on ``device``.

    numerics: every case's; None: both on the CPU, elsewhere what a spec without a choice of its own gets there.

    Raises:
        UnsupportedError: no configuration runs there; the text is the reason of the first.
    """
    if device.type == "cpu":
        reason = supports(IndexerSpec(heads=8, topk=8, numerics=numerics), backend=backend, device=device)
        if reason is not None:
            raise UnsupportedError(reason)
        return Scope(device, backend) if numerics is None else Scope(device, backend, numerics=(numerics,))
    if stages is not None and set(stages) <= set(WITHOUT_KERNELS) and torch.cuda.is_available():
        return Scope(device, backend)
    runs: list[tuple[str, int, int]] = []
    reasons: list[str] = []
    for key_format, heads, next_n in GPU_SPECS:
        spec = IndexerSpec(heads=heads, topk=64, key_format=key_format, numerics=numerics)
        reason = supports(spec, next_n, backend, device)
        if reason is None:
            runs.append((key_format, heads, next_n))
        else:
            reasons.append(reason)
    if not runs:
        raise UnsupportedError(reasons[0])
    return Scope(device, backend, tuple(runs), numerics=(numerics,), repeats=GPU_REPEATS)


def stages_for(scope: Scope) -> tuple[str, ...]:
    """Names of the stages that a run on ``scope`` consists of.

    The exchange between context-parallel ranks is kernels' work: on the CPU `keysieve check --protocol` explores it.
    """
    return ALL_STAGES if scope.device.type == "cpu" else GPU_STAGES
