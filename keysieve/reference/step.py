"""The cpu backend's step: request by request, scores and selection with one request's logits as workspace."""

from __future__ import annotations

import threading

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

    path = "PyTorch, request by request: score, then select"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._turn = threading.Lock()  # torch lets other threads run, and all calls use one buffer
        self.faults = Faults()
        self._numerics = plan.problem.spec.numerics_on("cpu")
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self._logits = _logits_buffer(plan.logits_elements)

    def run(self, step: Step, place: Placement, out: Selection) -> None:
        """One step without context parallelism: fill ``out`` (every entry of it).

        A row longer than the tables or than ``max_context`` is empty, with a fault.

        Raises:
            KeysieveError: the step needs more than ``max_total_keys``; nothing was written.
        """
        with self._turn, torch.no_grad():
            self._run(step, place, out)

    def _run(self, step: Step, place: Placement, out: Selection) -> None:
        limits = [(self.plan.problem.max_context, "max_context"), (step.table_keys, step.table_limit())]
        if place.table_keys is not None:
            limits.append((place.table_keys, place.table_limit()))
        faults = Faults()
        lengths = usable_lengths(step.seq_lens.tolist(), limits, faults)
        self._check_total(lengths, step)
        self.faults.extend(faults)
        positions = torch.empty_like(out.rows) if out.positions is None else out.positions
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
        if place.kv_table is not None:
            positions = physical_rows(positions, place.kv_table, kv_page=place.kv_page, block_rows=place.block_rows)
        out.rows.copy_(positions)

    def within_limits(self, step: Step) -> Step:
        """The step with rows longer than ``max_context`` made empty, with a fault: the same on every rank."""
        limits = [(self.plan.problem.max_context, "max_context")]
        lengths = usable_lengths(step.seq_lens.tolist(), limits, self.faults)
        return step.with_lengths(torch.tensor(lengths, dtype=torch.int32, device="cpu"), None)

    def check_local(self, local_lens: torch.Tensor, place: Placement) -> None:
        """Refuse a KV block table too narrow for this rank's lengths (decode context parallelism)."""
        _refuse_narrow("kv_table", place.table_keys, max(local_lens.tolist(), default=0))

    @torch.no_grad()
    def local_logits(self, step: Step) -> torch.Tensor:
        """BF16 ``[rows, longest]`` over the step's lengths (decode context parallelism: this rank's own keys).

        Raises:
            KeysieveError: a length beyond this rank's index table.
        """
        lengths = [max(int(length), 0) for length in step.seq_lens.tolist()]
        longest = max(lengths, default=0)
        _refuse_narrow("index_table", step.table_keys, longest)
        needed = step.rows * longest
        # A replicated cache whose pages are shared by ranks is scored whole: more than this rank's own keys.
        buffer = self._logits if needed <= self._logits.numel() else _logits_buffer(needed)
        return score_step_(step, self._numerics, lengths, buffer[:needed].view(step.rows, longest), self.faults)

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


def _logits_buffer(elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=torch.bfloat16, device="cpu")


def _refuse_narrow(name: str, keys: int | None, longest: int) -> None:
    """Refuse a table of one context-parallel rank: a row cannot be left empty on one rank alone."""
    if keys is not None and longest > keys:
        refuse(
            name,
            got=f"columns for {keys} keys, with {longest} keys of a row on this rank",
            accepted="a column for every page that a row needs on this rank",
            remedy="Widen this rank's table.",
        )
