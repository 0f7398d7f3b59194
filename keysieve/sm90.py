"""The Hopper backend: FP8 caches are scored by ``kernels/sm90_score``, MXFP4 caches by ``kernels/sm90_mxfp4``.

Imported by :mod:`keysieve.backends` when a CUDA device of capability 9.0 is first used; imports no cutlass itself.
"""

from __future__ import annotations

from typing import Any

from keysieve.checks import message
from keysieve.gpu import GpuBackend
from keysieve.kernels import score_words_host, sm90_mxfp4_config, sm90_score_config, sm90_score_host
from keysieve.kernels.base import Kernel
from keysieve.spec import IndexerSpec


class Sm90Backend(GpuBackend):
    """What one process does on its Hopper GPUs."""

    name = "sm90"

    def _no_scorer(self, spec: IndexerSpec, next_n: int) -> str | None:
        if spec.format.is_fp8:
            reason = sm90_score_config.unsupported(spec.heads, next_n, spec.key_format)
        else:
            reason = sm90_mxfp4_config.unsupported(spec.heads, next_n)
        if reason is not None:
            return message("spec", got=spec, accepted=reason, remedy="Use one of these, or device='cpu'.")
        if spec.numerics_on(self.name) != "fp32":
            remedy = "Use numerics=None or 'fp32' on Hopper; 'bf16' runs on the CPU."
            return message("numerics", got=repr(spec.numerics), accepted="'fp32' on sm90", remedy=remedy)
        return None

    def scorer(self, spec: IndexerSpec) -> tuple[Kernel, Any]:
        """The kernel that scores caches of ``spec``, and the module whose functions launch it."""
        if spec.format.is_fp8:
            return sm90_score_config.KERNEL, sm90_score_host
        return sm90_mxfp4_config.KERNEL, score_words_host

    def score_config(self, spec: IndexerSpec, next_n: int, layout: str, weights: str) -> Any:
        """The scorer's configuration for ``spec``; weights: "float32" or "bfloat16"."""
        return sm90_score_config.ScoreConfig(spec.key_format, spec.heads, next_n, layout, weights)


def make() -> Sm90Backend:
    """The backend, for :func:`keysieve.backends.load`."""
    return Sm90Backend()
