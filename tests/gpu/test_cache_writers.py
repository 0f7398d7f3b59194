"""The index cache and the quantisers on a device: the bytes of the CPU, inside captured graphs too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from harness import cases

from keysieve import IndexCache, IndexerSpec, fold_weights, quantize_query

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
WRITERS: list[tuple[str, dict[str, Any]]] = [
    ("fp8_ue8m0", {}),
    ("fp8_fp32", {}),
    ("fp8_fp32", {"scale_rounding": "pow2"}),
    ("mxfp4", {}),
    ("mxfp4", {"fp4_rounding": "half_to_zero", "amax_floor": 1e-4}),
]


def spec_of(key_format: str) -> IndexerSpec:
    return IndexerSpec(heads=32, topk=64, key_format=key_format)


def some_keys(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Keys of all sizes: ties of every rounding, zeros, NaN, infinities, subnormals."""
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, 128, generator=gen) * torch.exp2(torch.randint(-60, 60, (n, 1), generator=gen).float())
    ties = torch.randint(-96, 97, (n, 128), generator=gen) / 16.0
    keys = torch.where(torch.rand(n, 1, generator=gen) < 0.5, ties, keys)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, 448.0, 6.0])
    pick = special[torch.randint(0, 8, (n, 128), generator=gen)]
    return torch.where(torch.rand(n, 128, generator=gen) < 0.01, pick, keys).to(dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    """float32 bits with every NaN as one: processors give products of NaN different payloads."""
    return torch.where(values.isnan(), torch.full_like(values, float("nan")), values).view(torch.int32)


@cases(*WRITERS)
def test_append_writes_the_bytes_of_the_cpu(device: torch.device, case: tuple[str, dict[str, Any]]) -> None:
    spec, options = spec_of(case[0]), case[1]
    stride = spec.format.page_bytes + 4096 + 16
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        keys = some_keys(4000, seed, dtype)
        slots = torch.randint(-9, 40 * 64, (4000,), generator=torch.Generator().manual_seed(seed))
        wholes = [torch.full((40 * stride,), 0xA5, dtype=torch.uint8, device=where) for where in ("cpu", device)]
        caches = []
        for whole in wholes:
            view = whole.as_strided((40, 64, spec.format.width), (stride, spec.format.width, 1))
            caches.append(IndexCache(spec, view, **options))
            caches[-1].append(keys.to(whole.device), slots.to(whole.device))
        assert torch.equal(wholes[1].cpu(), wholes[0])
        valid = slots[slots >= 0]
        read = caches[1].read(valid.to(device)).cpu()
        assert torch.equal(bits(read), bits(caches[0].read(valid)))
        for _ in range(50):  # duplicates: the last wins in every run
            caches[1].append(keys.to(device), slots.to(device))
            assert torch.equal(wholes[1].cpu(), wholes[0])


def golden_maker() -> Any:
    """The independent page maker beside the golden pages."""
    module_spec = importlib.util.spec_from_file_location("make_pages", GOLDEN / "make_pages.py")
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_golden_pages(device: torch.device) -> None:
    keys = torch.tensor(golden_maker().golden_keys(), device=device)
    for name, (key_format, options) in zip(("fp8_ue8m0", "fp8_fp32", "fp8_fp32_pow2", "mxfp4"), WRITERS, strict=False):
        cache = IndexCache.empty(spec_of(key_format), 2, device, **options)
        cache.append(keys, torch.arange(64, 128, device=device))
        page = bytes.fromhex((GOLDEN / f"{name}.hex").read_text().replace("\n", ""))
        assert bytes(cache.data[1].flatten().tolist()) == page, name


def test_slots_beyond_the_pool_write_nothing(device: torch.device) -> None:
    for key_format in ("fp8_fp32", "mxfp4"):
        spec = spec_of(key_format)
        cache = IndexCache.empty(spec, 2, device)
        cache.data.fill_(7)
        keys = some_keys(3, 1).to(device)
        cache.append(keys, torch.tensor([128, 2**40, -1], device=device))
        assert bool((cache.data == 7).all())
        cache.append(keys, torch.tensor([128, 5, 2**62], device=device))
        changed = IndexCache.empty(spec, 2)
        changed.data.fill_(7)
        changed.append(keys[1:2].cpu(), torch.tensor([5]))
        assert torch.equal(cache.data.cpu(), changed.data)


@cases("fp8_fp32", "fp8_ue8m0", "mxfp4")
def test_append_is_captured_and_follows_its_inputs(device: torch.device, case: str) -> None:
    spec = spec_of(case)
    cache, same = IndexCache.empty(spec, 8, device), IndexCache.empty(spec, 8)
    cache.data.fill_(1)
    same.data.fill_(1)
    keys = torch.zeros(64, 128, device=device)
    slots = torch.full((64,), -1, device=device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cache.append(keys, slots)  # warm-up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(keys, slots)
    for seed in range(20):
        new_keys = some_keys(64, seed)
        new_slots = torch.randint(-4, 8 * 64, (64,), generator=torch.Generator().manual_seed(seed))
        if seed == 7:
            new_slots = torch.full((64,), -1)
        keys.copy_(new_keys)
        slots.copy_(new_slots)
        graph.replay()
        same.append(new_keys, new_slots)
        assert torch.equal(cache.data.cpu(), same.data), f"replay {seed}"


def test_offsets_pass_four_gibibytes(device: torch.device) -> None:
    spec = spec_of("fp8_ue8m0")
    stride, pages = 1 << 26, 70
    whole = torch.empty(stride * pages, dtype=torch.uint8, device=device)
    cache = IndexCache(spec, whole.as_strided((pages, 64, 132), (stride, 132, 1)))
    keys, slots = some_keys(4, 3), torch.tensor([0, 32 * 64 + 3, 65 * 64 + 63, 69 * 64 + 1])
    cache.append(keys.to(device), slots.to(device))
    small = IndexCache.empty(spec, 70)
    small.append(keys, slots)
    want = small.codes(slots)
    for got, expected in zip(cache.codes(slots.to(device)), want, strict=True):
        assert torch.equal(got.cpu(), expected)
    start = 69 * stride
    assert start > 2**32
    assert torch.equal(whole[start + 128 : start + 256].cpu(), want[0][3])


@cases("fp8_fp32", "mxfp4")
def test_queries_and_weights_have_the_bits_of_the_cpu(device: torch.device, case: str) -> None:
    spec = spec_of(case)
    q = some_keys(40 * 32, 9).view(40, 32, 128)
    code, scale = quantize_query(spec, q)
    code_gpu, scale_gpu = quantize_query(spec, q.to(device))
    parts = (code, code_gpu) if isinstance(code, tuple) else ((code,), (code_gpu,))
    for want, got in zip(*parts, strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    assert (scale is None) == (scale_gpu is None)
    w = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    for weights in (w, w.bfloat16()):
        folded = fold_weights(weights.to(device), scale_gpu, 128**-0.5)
        assert torch.equal(bits(folded.cpu()), bits(fold_weights(weights, scale, 128**-0.5)))
