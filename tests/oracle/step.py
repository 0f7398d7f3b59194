"""The whole step of a case: logits of every row, positions, physical rows, counts, as tensors to compare bits with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keysieve.testing import Case
from oracle.score import gather_keys, logits
from oracle.select import padded, physical_row, select


@dataclass(frozen=True)
class Expected:
    """What the contract says the outputs of a case are: int32 ``[rows, topk]``, ``[rows]``, ``[rows, topk]``."""

    rows: Tensor
    counts: Tensor
    positions: Tensor


def row_bits(case: Case, row: int, numerics: str = "fp32") -> NDArray[np.uint16]:
    """BF16 bits of a row's logits, ``[seq_len]``, computed from the case's bytes."""
    request, length = row // case.next_n, max(case.lengths[row], 0)
    codes, scales = gather_keys(case.cache.numpy(), case.index_table[request].tolist(), length)
    weights = case.weights[row].double().numpy()
    if isinstance(case.query, tuple):
        query = case.query[0][row].numpy()
        query_scales = case.query[1][row].contiguous().unsqueeze(-1).view(torch.uint8).numpy()
    else:
        query, query_scales = case.query[row].view(torch.uint8).numpy(), None
    return logits(case.spec.key_format, numerics, query, query_scales, weights, codes, scales)


def injected_bits(case: Case, row: int) -> NDArray[np.uint16]:
    """BF16 bits of a row's logits as the case's construction fixes them, ``[seq_len]``."""
    assert case.logits is not None
    scores = case.logits[row // case.next_n][: max(case.lengths[row], 0)]
    return scores.view(torch.int16).numpy().view(np.uint16)


def expected_step(case: Case, numerics: str = "fp32", *, from_bytes: bool = False) -> Expected:
    """The outputs of a case. Injected scores are taken as given unless ``from_bytes`` says to compute them."""
    topk = case.spec.topk
    all_rows, all_counts, all_positions = [], [], []
    for row in range(case.rows):
        computed = from_bytes or case.logits is None
        chosen = select(row_bits(case, row, numerics) if computed else injected_bits(case, row), topk)
        if case.kv_table is None:
            physical = chosen
        else:
            table_row = case.kv_table[row // case.next_n].tolist()
            physical = [physical_row(p, table_row, case.kv_page, case.block_rows) for p in chosen]
        all_rows.append(padded(physical, topk))
        all_counts.append(len(chosen))
        all_positions.append(padded(chosen, topk))
    shape = (case.rows, topk)
    return Expected(
        torch.tensor(all_rows, dtype=torch.int32).reshape(shape),
        torch.tensor(all_counts, dtype=torch.int32),
        torch.tensor(all_positions, dtype=torch.int32).reshape(shape),
    )


def expected_logits(case: Case, max_len: int, numerics: str = "fp32") -> Tensor:
    """What the public ``score`` returns: bfloat16 ``[rows, max_len]``, -inf past a row's length."""
    out = np.full((case.rows, max_len), 0xFF80, np.uint16)
    for row in range(case.rows):
        bits = row_bits(case, row, numerics) if case.logits is None else injected_bits(case, row)
        out[row, : len(bits)] = bits
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
