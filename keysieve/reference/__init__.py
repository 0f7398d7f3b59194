"""The reference: every operation in plain PyTorch on the CPU. It is the cpu backend and the oracle of the others."""

from __future__ import annotations

from keysieve.reference.score import score
from keysieve.reference.topk import topk

__all__ = ["score", "topk"]
