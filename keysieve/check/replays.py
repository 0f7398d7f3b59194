"""Checks that a step depends on its inputs alone: one indexer, fixed buffers, new contents in every step.

On a CUDA device the step is captured into a graph with zero lengths and replayed; on the CPU it is called again. Either
way each step must give what an indexer that has never run gives for the same contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from keysieve.api import DecodeIndexer
from keysieve.check.oracle import StepTrial, arguments
from keysieve.check.steps import describe_step, draw_step, longest, smaller_steps
from keysieve.check.trial import Scope
from keysieve.check.writers import require

Tensors = dict[str, torch.Tensor]


class Replays:
    """``DecodeIndexer`` step after step (in a CUDA graph on a GPU): no trace of the steps before."""

    name = "replays"
    describe = staticmethod(describe_step)

    def draw(self, seed: int, scope: Scope) -> StepTrial:
        return draw_step(seed, scope, spoiled=0.0)

    def smaller(self, trial: StepTrial) -> Iterator[StepTrial]:
        return smaller_steps(trial)

    def run(self, trial: StepTrial, scope: Scope) -> None:
        case, given, paging = arguments(trial, scope)
        rows, topk, limit = case.rows, case.spec.topk, longest(trial.case) + trial.extra
        if rows == 0:
            return
        inputs = _tensors(given, paging)
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        outputs = {
            "out": torch.full((rows, topk), 77, dtype=torch.int32, device=scope.device),
            "positions": torch.full((rows, topk), 77, dtype=torch.int32, device=scope.device),
            "counts": torch.full((rows,), 77, dtype=torch.int32, device=scope.device),
        }

        def indexer() -> DecodeIndexer:
            return DecodeIndexer(case.spec, rows, limit, case.next_n, device=scope.device, backend=scope.backend)

        used = indexer()
        options = {name: value for name, value in paging.items() if name != "kv_table"}
        fixed["seq_lens"].zero_()
        replay = _captured(lambda: _call(used, given[1], fixed, options, outputs), scope)
        for number, contents in enumerate(self._contents(inputs, rows)):
            for name, tensor in contents.items():
                fixed[name].copy_(tensor)
            replay()
            fresh = _call(indexer(), given[1], {n: t.clone() for n, t in fixed.items()}, options, {"positions": True})
            pairs = {"rows": fresh.rows, "positions": fresh.positions, "counts": fresh.counts}
            for name, want in pairs.items():
                got = outputs["out" if name == "rows" else name]
                require(f"{name} of step {number}", got.cpu().numpy(), want.cpu().numpy())

    def _contents(self, inputs: Tensors, rows: int) -> Iterator[Tensors]:
        """What the fixed buffers hold, step after step."""
        lengths = inputs["seq_lens"]
        flat = lengths.reshape(-1)
        odd = torch.where(torch.arange(rows, device=flat.device) % 2 == 0, flat, torch.zeros_like(flat))
        yield inputs
        yield {"seq_lens": lengths // 2}
        yield {"seq_lens": odd.view(lengths.shape)}
        yield {"weights": -inputs["weights"]}
        yield {"seq_lens": torch.zeros_like(lengths)}
        yield {name: tensor.flip(0) for name, tensor in inputs.items() if name != "seq_lens"}
        yield inputs


def _tensors(given: tuple[Any, Any, Any, Any, Any], paging: dict[str, Any]) -> Tensors:
    """The tensors whose contents may change from step to step, by name; an MXFP4 query is two."""
    query, _, weights, lengths, table = given
    pair = query if isinstance(query, tuple) else (query.view(torch.uint8),)
    tensors = {f"query{i}": part for i, part in enumerate(pair)}
    tensors |= {"weights": weights, "seq_lens": lengths, "index_table": table}
    return tensors | ({"kv_table": paging["kv_table"]} if paging else {})


def _call(
    indexer: DecodeIndexer, cache: Any, tensors: Tensors, options: dict[str, Any], outputs: dict[str, Any]
) -> Any:
    query: Any = tensors["query0"]
    if "query1" in tensors:
        query = (query, tensors["query1"])
    return indexer(
        query,
        cache,
        tensors["weights"],
        tensors["seq_lens"],
        tensors["index_table"],
        kv_table=tensors.get("kv_table"),
        **options,
        **outputs,
    )


def _captured(step: Callable[[], Any], scope: Scope) -> Callable[[], Any]:
    """``step`` as a graph replay on a CUDA device, itself elsewhere; it has run once either way."""
    if scope.device.type != "cuda":
        step()
        return step
    side = torch.cuda.Stream(scope.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream(scope.device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(scope.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
