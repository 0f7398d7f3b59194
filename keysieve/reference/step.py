"""The cpu backend's step: request by request, scores and selection with one request's logits as workspace."""

from __future__ import annotations

import torch

from keysieve.checks import DeviceFault, refuse
from keysieve.inputs import Placement, Selection, Step, compact_elements
from keysieve.plan import Plan
from keysieve.reference.faults import Faults, usable_lengths
from keysieve.reference.rows import physical_rows
from keysieve.reference.score import Scorer, score_step_
from keysieve.reference.topk import select_row_


class CpuRunner:
    """Owns what a ``DecodeIndexer`` on the CPU needs: the logits of one request, and the faults seen so far.

    Args:
        plan: a plan for the cpu backend.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.faults = Faults()
        self._numerics = plan.problem.spec.numerics_on("cpu")
        self._logits = torch.empty(plan.logits_elements, dtype=torch.bfloat16)

    def lengths(self, step: Step, place: Placement) -> list[int]:
        """Usable lengths of every row; a row beyond the limits is empty, with a fault."""
        limits = [(self.plan.problem.max_context, "max_context"), (step.table_keys, "the index table")]
        if place.table_keys is not None:
            limits.append((place.table_keys, "the KV block table"))
        return usable_lengths(step.seq_lens.tolist(), limits, self.faults)

    def run(self, step: Step, place: Placement, out: Selection) -> None:
        """One step without context parallelism: fill ``out`` (every entry of it).

        Raises:
            KeysieveError: the step needs more than ``max_total_keys``; nothing was written.
        """
        lengths = self.lengths(step, place)
        self._check_total(lengths, step)
        positions = torch.empty(out.rows.shape, dtype=torch.int32) if out.positions is None else out.positions
        topk, n = step.spec.topk, step.next_n
        scorer = Scorer(step, self._numerics)
        for request in range(step.requests):
            first = request * n
            of_request = lengths[first : first + n]
            longest = max(of_request)
            logits = self._logits[: n * longest].view(n, longest)
            if longest > topk:  # else every key is taken and no key byte is read
                scorer.score_request(request, of_request, logits, self.faults)
            for j, length in enumerate(of_request):
                out.counts[first + j] = select_row_(logits[j], length, topk, positions[first + j])
        write_rows_(positions, place, out.rows)

    def local_logits(self, step: Step) -> torch.Tensor:
        """BF16 ``[rows, longest]`` over the step's lengths (decode context parallelism: this rank's own keys).

        Raises:
            KeysieveError: a length beyond this rank's index table. The row cannot be left empty on one rank alone.
        """
        lengths = [max(int(length), 0) for length in step.seq_lens.tolist()]
        longest = max(lengths, default=0)
        if longest > step.table_keys:
            refuse(
                "index_table",
                got=f"columns for {step.table_keys} keys, with {longest} keys of a row on this rank",
                accepted="a column for every page that a row needs on this rank",
                remedy="Widen this rank's index table.",
            )
        needed = step.rows * longest
        # A replicated cache whose pages are shared by ranks is scored whole: more than this rank's own keys.
        buffer = self._logits if needed <= self._logits.numel() else torch.empty(needed, dtype=torch.bfloat16)
        logits = buffer[:needed].view(step.rows, longest)
        return score_step_(step, self._numerics, lengths, logits, self.faults)

    def check(self) -> None:
        """Report and forget the faults of all calls since the last check.

        Raises:
            DeviceFault: there were some; the affected rows or keys are named.
        """
        if self.faults:
            raise DeviceFault(self.faults.take())

    def _check_total(self, lengths: list[int], step: Step) -> None:
        bound = self.plan.problem.max_total_keys
        if bound is None:
            return
        needed = compact_elements(lengths, step.next_n, step.spec.topk)
        if needed > bound:
            refuse(
                "max_total_keys",
                got=f"a step that needs {needed} elements of logits",
                accepted=f"at most the {bound} that the indexer was built with",
                remedy="Build the indexer with a larger max_total_keys, or split the batch.",
            )


def write_rows_(positions: torch.Tensor, place: Placement, out: torch.Tensor) -> None:
    """Write the physical rows of ``positions [rows, topk]`` (without a KV table: the positions) into ``out``."""
    if place.kv_table is not None:
        positions = physical_rows(positions, place.kv_table, kv_page=place.kv_page, block_rows=place.block_rows)
    out.copy_(positions)
