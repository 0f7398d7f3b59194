"""transformers models on a device: what they select is what the cpu backend selects from the same bytes.

In every row whose logits have the cpu backend's bits, the keys must be the cpu backend's, one for one. A row whose
logits differ is explained: each differing logit lies within the stated bound of the exact value, and the keys are those
that a stable order of the device's own logits gives. Needs transformers; without it there are no cases.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import cases

import keysieve as ks
from keysieve.check import brute
from keysieve.check.trial import bits16, pool_of
from keysieve.reference.topk import select
from keysieve.spec import PAGE
from keysieve.testing.score_bound import logit_bound

sys.path.append(str(Path(__file__).resolve().parents[1]))

FAMILIES: dict[str, Any] = {}
if importlib.util.find_spec("transformers") is not None:
    from clients.models import FAMILIES as ALL  # type: ignore[import-not-found]  # tests/ is on the path

    FAMILIES = {name: family for name, family in ALL.items() if family.present}

PAIRS = [(name, form) for name in FAMILIES for form in ("fp8_fp32", "fp8_ue8m0", "mxfp4")]


@dataclass
class Compared:
    """An observer of a patched model's steps, and what it has seen.

    Attributes:
        rows: rows with more keys than topk.
        equal: of those, rows whose logits have the cpu backend's bits.
        logits, differing: their logits, and those of them with other bits than the cpu backend's.
        other: rows whose keys are not the cpu backend's.
    """

    rows: int = 0
    equal: int = 0
    logits: int = 0
    differing: int = 0
    other: int = 0
    layers: set[int] = field(default_factory=set)

    def __call__(self, step: Any, positions: torch.Tensor, counts: torch.Tensor) -> None:
        assert positions.is_cuda
        self.layers.add(step.layer)
        on_device = ks.score(
            step.spec, step.query, step.cache, step.weights, step.seq_lens, step.index_table, max_len=step.longest
        ).cpu()
        query = step.query.cpu() if isinstance(step.query, torch.Tensor) else tuple(t.cpu() for t in step.query)
        here = (
            *(query, ks.IndexCache(step.spec, step.cache.data.cpu())),
            *(step.weights.cpu(), step.seq_lens.cpu(), step.index_table.cpu()),
        )
        on_cpu = ks.score(step.spec, *here, max_len=step.longest)
        rows, longest = step.seq_lens.shape[0], step.longest
        indexer = ks.DecodeIndexer(step.spec, rows, longest, next_n=step.next_n, device="cpu")
        wanted = indexer(*here)
        own, number = select(on_device, here[3].tolist(), step.spec.topk)
        assert torch.equal(positions.cpu(), own), "not what a stable order of the device's own logits selects"
        assert torch.equal(counts.cpu(), number)
        assert torch.equal(number, wanted.counts)
        same = (on_device.view(torch.int16) == on_cpu.view(torch.int16)).all(1)
        assert torch.equal(own[same], wanted.rows[same]), "equal logits, other keys"
        selective = here[3] > step.spec.topk
        self.rows += int(selective.sum())
        self.equal += int((selective & same).sum())
        self.other += int((own != wanted.rows).any(1).sum())
        for row in torch.nonzero(~same)[:, 0].tolist():
            self._explain(step, here, row, on_device[row], on_cpu[row])
        self.logits += int(here[3].clamp(min=0).sum())

    def _explain(self, step: Any, here: Any, row: int, got: torch.Tensor, cpu: torch.Tensor) -> None:
        """Every logit of the row that differs lies within the bound around its exact value."""
        codes, cache, weights, lens, table = here
        length = int(lens[row])
        pages = table[row // step.next_n].tolist()
        slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(length)]
        pool, stride = pool_of(cache.data)
        keys, scales = brute.gather_keys(pool, stride, step.spec.key_format, slots)
        codes, words = codes if isinstance(codes, tuple) else (codes, None)
        query = codes.contiguous().view(torch.uint8).numpy()[row]
        blocks = None if words is None else words[row].contiguous().view(torch.uint8).view(-1, 4).numpy()
        found = brute.real_logits(step.spec.key_format, query, blocks, weights[row].numpy(), keys, scales)
        exact, magnitude = torch.from_numpy(found[0]), torch.from_numpy(found[1])
        differs = torch.from_numpy(bits16(got[:length]) != bits16(cpu[:length]))
        excess = (got[:length].double() - exact).abs() - logit_bound(exact, magnitude, step.spec.heads)
        assert float(excess[differs].max()) <= 0, "a logit beyond the stated bound"
        self.differing += int(differs.sum())


def prompt(device: torch.device, *lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of the given lengths, with their attention mask."""
    draw = torch.Generator().manual_seed(1)
    longest = max(lengths)
    ids = torch.randint(2, 96, (len(lengths), longest), generator=draw)
    real = torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(real, ids, 0).to(device), "attention_mask": real.long().to(device)}


@cases(*PAIRS)
def test_selected_keys_are_the_cpu_backends(device: torch.device, case: tuple[str, str]) -> None:
    """A padded batch of two, prompts longer and shorter than topk, then eight decoding steps."""
    from keysieve.integrations.transformers import patch

    family = FAMILIES[case[0]]
    model = family.build(topk=24).to(device)
    seen = Compared()
    with torch.no_grad(), patch(model, key_format=case[1], observer=seen):
        model.generate(**prompt(device, 90, 37), max_new_tokens=9, do_sample=False)
    print(f"  {case}: {seen}")
    assert seen.rows == family.indexers * (90 - 24 + 37 - 24 + 2 * 8)
    assert seen.equal, "no row could be compared key for key"
    # The matrix unit keeps 13 bits below the largest addend: on this data about one logit in 17 rounds another way.
    assert seen.differing <= seen.logits // 8


@cases(*[name for name in FAMILIES if name in ("deepseek_v32", "glm_moe_dsa")])
def test_a_model_that_selects_everything_is_unchanged(device: torch.device, case: str) -> None:
    """With topk at least as large as the context a patched model on the device gives its own logits, bit for bit."""
    from keysieve.integrations.transformers import patch

    model = FAMILIES[case].build(topk=64).to(device)
    inputs = prompt(device, 60, 41)
    with torch.no_grad():
        before = model(**inputs).logits
        with patch(model):
            after = model(**inputs).logits
        narrow = FAMILIES[case].build(topk=16).to(device)
        with patch(narrow):
            other = narrow(**inputs).logits
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))
    assert not torch.equal(other, before), "a smaller topk changes nothing: the comparison cannot fail"
