"""The merge on a device, both forms, fed from plain words and from slots: every byte of outputs against the reference.

Words come from the reference's lists, and slots are filled from the host with the tags of the call, so that nothing but
the merge is under test. Ranks share the device; where they ask each other for second lists their merges run together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from harness import cases, poison

from keysieve import sm90
from keysieve.dcp.exchange_memory import ExchangeMemory, VirtualBlocks
from keysieve.dcp.layout import ExchangeLayout
from keysieve.dcp.memory import ExchangeShape
from keysieve.kernels import exchange_host
from keysieve.kernels.exchange_config import HELD, MERGE, ROUNDS, MergeConfig, merge_config, rounds_needed
from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import Merged, merge
from keysieve.spec import candidate_words, pitch_of

TIMEOUT_NS = 3_000_000_000
LIMIT = 1 << 26


class Shape(NamedTuple):
    """world, keys to select, entries of a first list, interleave, global lengths, what the logits are like, planes."""

    world: int
    k: int
    n: int
    interleave: int
    lens: tuple[int, ...]
    kind: str
    planes: int = 1


SHAPES = (
    Shape(1, 2048, 2048, 1, (30000, 70, 0), "gaussian"),
    Shape(2, 64, 32, 1, (500, 0, 64, 33, 700, 1, -3), "gaussian"),
    Shape(2, 2048, 1216, 1, (9000, 0, 2048, 3000, 7001), "gaussian"),
    Shape(2, 2048, 1216, 64, (9000, 2047, 2049, 5000), "few"),
    Shape(2, 2048, 1024, 1, (9000, 0, 2048, 3000), "gaussian"),
    Shape(2, 2048, 1216, 64, (9000, 9000), "equal"),
    Shape(2, 2048, 1216, 4096, (9000, 8192), "one rank"),
    Shape(2, 2048, 1216, 1, (20000, 6000), "any"),
    Shape(2, 2048, 1216, 1, (20000, 6000), "plateau"),
    Shape(2, 2048, 1216, 1, (200000, 300000), "gaussian", 3),
    Shape(2, 4096, 2336, 1, (30000, 70000), "few"),
    Shape(3, 512, 256, 16, (3000, 100, 511, 3000), "few"),
    Shape(4, 2048, 672, 1, (20000, 1, 4000, 30000), "gaussian", 2),
    Shape(5, 2048, 544, 1, (20000, 4000), "one rank"),
    Shape(8, 2048, 352, 1, (40000, 8000, 2048), "few"),
    Shape(9, 2048, 320, 1, (40000, 8000), "plateau"),
    Shape(16, 2048, 224, 64, (50000, 8000, 2048), "one rank"),
    Shape(2, 32, 32, 1, tuple(range(40, 180)), "gaussian"),  # more rows than multiprocessors: they are drawn
)


class Case:
    """Logits of every rank, their first and second lists, and what the reference makes of them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        rows, longest = len(shape.lens), max(shape.lens)
        x = torch.randn(rows, longest, generator=generator)
        if shape.kind == "few":
            x = x.round()
        elif shape.kind == "equal":
            x = torch.ones(rows, longest)
        elif shape.kind == "any":
            x = x.sign() * torch.exp2(torch.randint(-100, 100, (rows, longest), generator=generator).float())
        elif shape.kind == "one rank":
            x[:, (torch.arange(longest) // shape.interleave) % shape.world == shape.world - 1] += 6
        elif shape.kind == "plateau":
            x = (x - 1).clamp_min(0)
        logits = x.bfloat16()
        logits = torch.where(logits == 0, torch.zeros_like(logits), logits)
        self.lens = torch.tensor(shape.lens, dtype=torch.int32)
        self.logits, self.first, self.second = [], [], []
        for rank in range(shape.world):
            local = local_seq_lens(self.lens.clamp_min(0), shape.world, rank, shape.interleave)
            keys = int(local.max())
            mine = torch.full((rows, pitch_of(max(keys, 1))), -9.0, dtype=torch.bfloat16)
            at = global_positions(torch.arange(keys), shape.world, rank, shape.interleave)
            inside = at < longest
            mine[:, :keys][:, inside] = logits[:, at[inside]]
            self.logits.append(mine)
            self.first.append(local_topk(mine, local, shape.n, shape.planes)[0])
            self.second.append(local_topk(mine, local, shape.k, shape.planes)[0])

    def want(self, rank: int) -> Merged:
        shape = self.shape
        lens = self.lens.clamp_min(0)
        second = self.second if shape.n < shape.k else None
        return merge(
            self.first,
            shape.k,
            rank=rank,
            interleave=shape.interleave,
            planes=shape.planes,
            seq_lens=lens,
            second=second,
        )


def forms(shape: Shape, tagged: bool) -> list[MergeConfig]:
    """The configuration that is chosen, and the other form where the lists fit both."""
    words = candidate_words(shape.n, shape.planes)
    chosen = merge_config(shape.world, words, shape.k, tagged)
    held = HELD[0] if shape.world * words <= HELD[0] else HELD[1]
    both = [dataclasses.replace(chosen, rounds=0, held=held)]
    fitting = [rounds for rounds in ROUNDS if rounds_needed(shape.world, words) <= rounds]
    if fitting:
        both.append(dataclasses.replace(chosen, rounds=fitting[0], held=1024 * fitting[0]))
    assert chosen in both
    return both


def merger(device: torch.device, shape: Shape, rank: int, config: MergeConfig) -> exchange_host.Merger:
    backend = sm90.Sm90Backend()

    def make(kernel: Any, ignored: Any) -> Any:
        return backend.launcher(device, kernel, config if kernel is MERGE else ignored)

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return exchange_host.Merger(
        make, k=shape.k, n=shape.n, planes=shape.planes, world=shape.world, rank=rank, interleave=shape.interleave,
        tagged=config.tagged, sms=sms,
    )  # fmt: skip


class Outputs:
    """Poisoned outputs of one rank."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows = len(shape.lens)
        self.out = poison((rows, shape.k), torch.int32, device)
        self.counts = poison((rows,), torch.int32, device)
        self.positions = poison((rows, shape.k), torch.int32, device)

    def check(self, want: Merged, what: object) -> None:
        assert torch.equal(self.counts.cpu(), want.counts), (what, "counts")
        assert torch.equal(self.out.cpu(), want.rows), (what, "rows")
        assert torch.equal(self.positions.cpu(), want.positions), (what, "positions")


@cases(*SHAPES)
def test_merge_of_words_in_memory(device: torch.device, case: Shape) -> None:
    made = Case(case, 1)
    words = torch.stack(made.first).to(device)
    second = torch.stack(made.second).to(device) if case.n < case.k else None
    lens = made.lens.to(device)
    for config in forms(case, False):
        for rank in range(case.world):
            got = Outputs(case, device)
            merger(device, case, rank, config).merge(
                words, lens, 1, second=second, out=got.out, counts=got.counts, positions=got.positions
            )
            got.check(made.want(rank), (config, rank))


def fill_slots(memory: ExchangeMemory, made: Case, tag: int, site: int) -> None:
    """The words of call `tag` in one rank's slots, as all ranks push them."""
    shape, layout = made.shape, memory.layout
    rows = len(shape.lens)
    pairs = layout.shape.pairs
    data = torch.zeros(shape.world, rows, 2 * pairs, dtype=torch.int64)
    for source, words in enumerate(made.first):
        data[source, :, : words.shape[1]] = words.to(torch.int64)
    data[:, :, -2] = rows << 16 | site
    data[:, :, -1] = made.lens.clamp_min(0)
    slots = torch.full((shape.world, rows, pairs, 4), tag, dtype=torch.int64)
    slots[..., 0], slots[..., 2] = data[..., 0::2], data[..., 1::2]
    wrapped = ((slots + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
    begin = layout.slot(tag & 1, 0, 0)
    memory.block[begin : begin + wrapped.numel() * 4].view(torch.int32).copy_(wrapped.flatten())


@cases(*SHAPES)
def test_merge_of_slots(device: torch.device, case: Shape) -> None:
    """Three calls, the tag passing 2^32; second lists are exchanged between the ranks' kernels."""
    layout = ExchangeLayout(ExchangeShape(case.world, len(case.lens), case.k, case.n, case.planes))
    streams: list[Any] = [torch.cuda.Stream(device) for _ in range(case.world)]  # type: ignore[no-untyped-call]
    for config in forms(case, True):
        blocks = VirtualBlocks([device] * case.world)
        memories = [blocks.memory(layout, rank) for rank in range(case.world)]
        mergers = [merger(device, case, rank, config) for rank in range(case.world)]
        for memory in memories:
            memory.preset((1 << 32) - 2)
        for call in range(3):
            made = Case(case, 10 + call)
            lens = made.lens.to(device)
            logits = [one.to(device) for one in made.logits]
            got = [Outputs(case, device) for _ in range(case.world)]
            for memory in memories:
                fill_slots(memory, made, ((1 << 32) - 1 + call) % (1 << 32), call)
            torch.cuda.synchronize(device)
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    mergers[rank].exchange(
                        memories[rank], logits[rank], lens, 1, site=call, limit=LIMIT, local_limit=LIMIT,
                        timeout_ns=TIMEOUT_NS, out=got[rank].out, counts=got[rank].counts,
                        positions=got[rank].positions,
                    )  # fmt: skip
            torch.cuda.synchronize(device)
            for rank in range(case.world):
                got[rank].check(made.want(rank), (config, rank, call))


@cases("plain", "tagged")
def test_rows_of_a_cache(device: torch.device, case: str) -> None:
    """Physical rows by the table of this rank, next_n rows a request, a strided output."""
    shape = Shape(2, 256, 192, 16, (3000, 500, 2500, 40), "gaussian")
    made = Case(shape, 5)
    table = torch.randint(0, 1 << 20, (2, 40), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    for config in forms(shape, case == "tagged"):
        for rank in range(2):
            got, wide = Outputs(shape, device), poison((4, 300), torch.int32, device)
            one = merger(device, shape, rank, config)
            place: dict[str, Any] = {"kv_table": table.to(device), "kv_page": 64, "block_rows": 128}
            if case == "plain":
                second = torch.stack(made.second).to(device)
                one.merge(
                    torch.stack(made.first).to(device), made.lens.to(device), 2, second=second, out=wide[:, :256],
                    counts=got.counts, **place,
                )  # fmt: skip
            else:
                layout = ExchangeLayout(ExchangeShape(2, 4, shape.k, shape.n, 1))
                blocks = VirtualBlocks([device] * 2)
                memory = [blocks.memory(layout, r) for r in range(2)][rank]
                fill_slots(memory, made, 1, 0)
                one.exchange(
                    memory, made.logits[rank].to(device), made.lens.to(device), 2, site=0, limit=LIMIT,
                    local_limit=LIMIT, timeout_ns=TIMEOUT_NS, out=wide[:, :256], counts=got.counts, **place,
                )  # fmt: skip
            want = made.want(rank)
            assert not want.saturated.any()  # nobody answers here
            requests = torch.arange(4) // 2
            local = want.rows.to(torch.int64)
            page = table[requests[:, None], local.clamp_min(0) // 64].to(torch.int64)
            rows = torch.where(local < 0, -1, page * 128 + local % 64).to(torch.int32)
            assert torch.equal(wide[:, :256].cpu(), rows), (config, rank)
            assert torch.equal(wide[:, 256:].cpu(), poison((4, 44), torch.int32, torch.device("cpu")))
