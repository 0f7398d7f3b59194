"""From tensors to a launch of a scorer that takes the queries' scale words as well (MXFP4): one address in front.

The functions take what `sm90_score_host`'s take, and `words`, int32 [rows, heads], contiguous, for MXFP4 (else None).
"""

from __future__ import annotations

from typing import Any

import torch

from keysieve.checks import describe, refuse
from keysieve.kernels import sm90_score_host
from keysieve.kernels.sm90_score_host import Config, Launch


def score_compact(
    launch: Launch, config: Config, *args: Any, words: torch.Tensor | None = None, **options: Any
) -> None:
    """As `sm90_score_host.score_compact`."""
    sm90_score_host.score_compact(_with_words(launch, config, words), config, *args, **options)


def score_pitched(
    launch: Launch, config: Config, *args: Any, words: torch.Tensor | None = None, **options: Any
) -> None:
    """As `sm90_score_host.score_pitched`."""
    sm90_score_host.score_pitched(_with_words(launch, config, words), config, *args, **options)


def _with_words(launch: Launch, config: Config, words: torch.Tensor | None) -> Launch:
    if words is None and config.key_format == "mxfp4":
        refuse("query", got="no scale words", accepted="(codes, words) for mxfp4", remedy="Pass words=, [rows, heads].")
    if words is not None and not words.is_contiguous():
        refuse("query", got=f"scale words {describe(words)}", accepted="contiguous ones", remedy="Call .contiguous().")
    address = 0 if words is None else words.data_ptr()
    return lambda *integers: launch(address, *integers)
