"""The Blackwell backend: FP8 and MXFP4 scoring by ``kernels/sm100_score``, selection as on Hopper.

Compiled and inspected, not run: no device of this kind has been at hand. ``docs/blackwell.md`` says what has been
checked without one, and what the owner of one should run first. Imports no cutlass itself.
"""

from __future__ import annotations

from typing import Any

import torch

from keysieve.checks import message, warn_caller
from keysieve.gpu import GpuBackend
from keysieve.kernels import score_words_host, sm100_score_config
from keysieve.kernels.base import Kernel
from keysieve.launch import Launcher
from keysieve.spec import IndexerSpec


class UntriedWarning(UserWarning):
    """Kernels are about to run that have been compiled and inspected, but never run, by those who wrote them."""


class Sm100Backend(GpuBackend):
    """What one process does on its Blackwell GPUs: key formats and numerics of every kind."""

    name = "sm100"

    def _no_scorer(self, spec: IndexerSpec, next_n: int) -> str | None:
        reason = sm100_score_config.unsupported(spec.heads, next_n, spec.key_format)
        if reason is not None:
            return message("spec", got=spec, accepted=reason, remedy="Use one of these, or device='cpu'.")
        return None

    def scorer(self, spec: IndexerSpec) -> tuple[Kernel, Any]:
        """The kernel that scores caches of any ``spec``, and the module whose functions launch it."""
        del spec
        return sm100_score_config.KERNEL, score_words_host

    def score_config(self, spec: IndexerSpec, next_n: int, layout: str, weights: str) -> Any:
        """The scorer's configuration for ``spec``; weights: "float32" or "bfloat16"."""
        numerics = spec.numerics_on(self.name)
        return sm100_score_config.ScoreConfig(spec.key_format, numerics, spec.heads, next_n, layout, weights)

    def launcher(self, device: torch.device, kernel: Any, config: Any) -> Launcher:
        """The launcher of one kernel configuration on ``device``; says once what has not been done."""
        if not self._launchers:
            text = "keysieve's Blackwell kernels are compiled and inspected, not run: run `keysieve check` first"
            warn_caller(f"{text} (docs/blackwell.md)", UntriedWarning)
        return super().launcher(device, kernel, config)


def make() -> Sm100Backend:
    """The backend, for :func:`keysieve.backends.load`."""
    return Sm100Backend()
