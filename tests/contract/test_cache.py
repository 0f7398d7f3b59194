"""The index cache: golden pages, slots, strides, neighbours, reading back, refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve import IndexerSpec, KeysieveError
from keysieve.cache import IndexCache, bytes_per_token, pages_of_blocks, require_cache, slots_of
from keysieve.quantize import dequantize_keys, quantize_keys

FORMATS = ("fp8_fp32", "fp8_ue8m0", "mxfp4")
GOLDEN = Path(__file__).parent / "golden"
WRITERS: dict[str, tuple[str, dict[str, str]]] = {
    "fp8_ue8m0": ("fp8_ue8m0", {}),
    "fp8_fp32": ("fp8_fp32", {}),
    "fp8_fp32_pow2": ("fp8_fp32", {"scale_rounding": "pow2"}),
    "mxfp4": ("mxfp4", {}),
    "mxfp4_half_to_zero": ("mxfp4", {"fp4_rounding": "half_to_zero"}),
}


def make_pages():
    """The independent page maker that lies beside the golden files."""
    module_spec = importlib.util.spec_from_file_location("make_pages", GOLDEN / "make_pages.py")
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def spec_of(key_format: str) -> IndexerSpec:
    return IndexerSpec(heads=8, topk=16, key_format=key_format)


def random_keys(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 128, generator=generator) * torch.exp2(torch.randint(-6, 7, (n, 1), generator=generator))


def padded_pool(spec: IndexerSpec, pages: int, stride: int, fill: int = 0xA5) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with ``stride`` bytes a page in one allocation full of ``fill``; also the allocation."""
    whole = torch.full((pages * stride + 64,), fill, dtype=torch.uint8)
    shift = -whole.data_ptr() % 16
    shape = (pages, 64, spec.format.width)
    return whole.as_strided(shape, (stride, spec.format.width, 1), shift), whole


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(WRITERS))
def test_golden_page(name: str):
    maker = make_pages()
    golden = bytes.fromhex((GOLDEN / f"{name}.hex").read_text().replace("\n", ""))
    assert maker.page(name) == golden, "the exact rules no longer give the committed page"
    key_format, options = WRITERS[name]
    cache = IndexCache.empty(spec_of(key_format), 3, **options)
    cache.data.fill_(0xEE)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    cache.append(torch.tensor(maker.golden_keys())[order], 64 + order)
    assert bytes(cache.data[1].flatten().tolist()) == golden
    assert bool((cache.data[0] == 0xEE).all())
    assert bool((cache.data[2] == 0xEE).all())


def test_golden_bytes_worked_out_by_hand():
    def page(name: str) -> bytes:
        return bytes.fromhex((GOLDEN / f"{name}.hex").read_text().replace("\n", ""))

    fp8, fp8_fp32, fp4, to_zero = (page(n) for n in ("fp8_ue8m0", "fp8_fp32", "mxfp4", "mxfp4_half_to_zero"))
    assert (len(fp8), len(fp8_fp32), len(fp4), len(to_zero)) == (64 * 132, 64 * 132, 64 * 68, 64 * 68)
    # Token 7 is one -448 at element 3: scale 1, code 0xFE, everything else 0.
    assert fp8[7 * 128 : 8 * 128] == bytes([0, 0, 0, 0xFE]) + bytes(124)
    assert fp8[8192 + 7 * 4 : 8192 + 8 * 4] == bytes([127] * 4)
    assert fp8_fp32[8192 + 7 * 4 : 8192 + 8 * 4] == bytes([0x00, 0x00, 0x80, 0x3F])  # 1.0f
    # Token 5 is zero: 1e-4 / 448 = 2.23e-7 lies between 2**-23 and 2**-22.
    assert fp8[5 * 128 : 6 * 128] == bytes(128)
    assert fp8[8192 + 5 * 4 : 8192 + 6 * 4] == bytes([127 - 22] * 4)
    # Token 9 starts with 6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5 at scale 1: codes 7 then ties.
    assert fp4[9 * 64 : 9 * 64 + 4] == bytes([0x07, 0x22, 0x44, 0x66])
    assert to_zero[9 * 64 : 9 * 64 + 4] == bytes([0x07, 0x21, 0x43, 0x65])
    assert fp4[4096 + 9 * 4] == 127
    # Token 5 in MXFP4: zero codes, scale 2**-126, byte 1.
    assert fp4[5 * 64 : 6 * 64] == bytes(64)
    assert fp4[4096 + 5 * 4 : 4096 + 6 * 4] == bytes([1] * 4)


def test_bytes_per_token_from_one_function():
    assert [bytes_per_token(spec_of(f)) for f in FORMATS] == [132, 132, 68]
    for key_format in FORMATS:
        cache = IndexCache.empty(spec_of(key_format), 2)
        assert cache.data.numel() == 2 * 64 * cache.bytes_per_token == 2 * 64 * bytes_per_token(cache.spec)
        assert cache.data.shape == (2, 64, bytes_per_token(cache.spec))
        assert cache.data.dtype == torch.uint8


# --- slots ---------------------------------------------------------------------------------------------------------


@given(
    slots=st.lists(st.integers(-3, 3 * 64 - 1), max_size=40),
    key_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_append_writes_its_slots_and_nothing_else_last_one_wins(slots: list[int], key_format: str, seed: int):
    spec = spec_of(key_format)
    fmt = spec.format
    cache = IndexCache.empty(spec, 3)
    cache.data.copy_(torch.randint(0, 256, cache.data.shape, generator=torch.Generator().manual_seed(seed)))
    want = bytearray(cache.data.flatten().tolist())
    keys = random_keys(len(slots), seed)
    codes, scales = quantize_keys(spec, keys)
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        page, token = divmod(slot, 64)
        at = page * fmt.page_bytes + token * fmt.key_bytes
        want[at : at + fmt.key_bytes] = bytes(codes[i].tolist())
        at = page * fmt.page_bytes + 64 * fmt.key_bytes + token * 4
        want[at : at + 4] = bytes(scales[i].tolist())
    cache.append(keys, torch.tensor(slots, dtype=torch.int64))
    assert bytes(cache.data.flatten().tolist()) == bytes(want)


def test_many_duplicates_end_with_the_last_key():
    spec = spec_of("fp8_fp32")
    keys = random_keys(5000)
    slots = torch.randint(-1, 130, (5000,), generator=torch.Generator().manual_seed(2))
    first = IndexCache.empty(spec, 4)
    first.data.zero_()
    first.append(keys, slots)
    one_by_one = IndexCache.empty(spec, 4)
    one_by_one.data.zero_()
    for i in range(0, 5000, 7):
        one_by_one.append(keys[i : i + 7], slots[i : i + 7])
    assert torch.equal(first.data, one_by_one.data)


def test_skipping_everything_and_appending_nothing_change_nothing():
    for key_format in FORMATS:
        cache = IndexCache.empty(spec_of(key_format), 1)
        cache.data.copy_(torch.randint(0, 256, cache.data.shape))
        before = cache.data.clone()
        cache.append(random_keys(9), torch.full((9,), -1))
        cache.append(random_keys(0), torch.zeros(0, dtype=torch.int64))
        assert torch.equal(cache.data, before)
    none = IndexCache.empty(spec_of("mxfp4"), 0)
    none.append(random_keys(2), torch.tensor([-1, -5]))
    assert none.page_codes(torch.zeros(0, dtype=torch.int64)).shape == (0, 64, 64)


@pytest.mark.parametrize("key_format", FORMATS)
def test_slot_beyond_the_pool_is_refused_and_nothing_is_written(key_format: str):
    cache = IndexCache.empty(spec_of(key_format), 2)
    cache.data.fill_(7)
    with pytest.raises(KeysieveError, match=r"slots: got 128; accepted: slots below 128"):
        cache.append(random_keys(3), torch.tensor([0, 128, 1]))
    assert bool((cache.data == 7).all())


def test_slots_beyond_the_pool_are_skipped_where_the_host_cannot_look():
    # What append does on a CUDA device, where it may not synchronise, shown on its device-independent part.
    cache = IndexCache.empty(spec_of("fp8_fp32"), 2)
    targets, winners, any_valid = cache._resolve(torch.tensor([5, 128, -1, 9000, 5, 2]))
    assert bool(any_valid)
    writes = {(int(t), int(w)) for t, w in zip(targets, winners, strict=True)}
    assert writes == {(5, 4), (2, 5)}
    targets, _, any_valid = cache._resolve(torch.tensor([128, -1]))
    assert not bool(any_valid)
    assert targets.tolist() == [0, 0]


# --- pools of engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("stride", [None, 38016, 8448 + 16])
def test_padded_page_stride_leaves_the_bytes_between_pages_alone(key_format: str, stride: int | None):
    spec = spec_of(key_format)
    stride = stride or spec.format.page_bytes
    pool, whole = padded_pool(spec, 5, stride)
    cache = IndexCache(spec, pool)
    dense = IndexCache.empty(spec, 5)
    dense.data.fill_(0xA5)
    keys = random_keys(100)
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(3))[:100] + 64
    cache.append(keys, slots)
    dense.append(keys, slots)
    assert cache.page_stride == stride
    assert torch.equal(pool, dense.data)
    assert torch.equal(cache.read(slots), dense.read(slots))
    pages = torch.tensor([4, 1, 1], dtype=torch.int32)
    assert torch.equal(cache.page_codes(pages), dense.page_codes(pages))
    assert torch.equal(cache.page_scales(pages).nan_to_num(), dense.page_scales(pages).nan_to_num())
    pool.fill_(0xA5)  # now only what append wrote outside the pages would differ
    assert bool((whole == 0xA5).all())


def test_offsets_pass_2_to_the_32():
    spec = spec_of("fp8_ue8m0")
    stride, pages = 1 << 24, 300  # five gigabytes of address space, a few pages of memory
    whole = torch.empty(stride * pages, dtype=torch.uint8)
    cache = IndexCache(spec, whole.as_strided((pages, 64, 132), (stride, 132, 1)))
    keys = random_keys(4)
    slots = torch.tensor([0, 129 * 64 + 3, 257 * 64 + 63, 299 * 64 + 1])
    cache.append(keys, slots)
    assert torch.equal(cache.read(slots), dequantize_keys(spec, *quantize_keys(spec, keys)))
    start = 299 * stride
    assert start > 2**32
    assert torch.equal(whole[start + 128 : start + 256], quantize_keys(spec, keys[3:])[0][0])


@pytest.mark.parametrize("key_format", FORMATS)
def test_unaligned_or_misshapen_pools_are_refused(key_format: str):
    spec = spec_of(key_format)
    width, page = spec.format.width, spec.format.page_bytes
    whole = torch.zeros(6 * page, dtype=torch.uint8)
    shift = -whole.data_ptr() % 16
    shape = (2, 64, width)
    good = whole.as_strided(shape, (page, width, 1), shift)
    IndexCache(spec, good)
    bad = {
        "tensor address": whole.as_strided(shape, (page, width, 1), shift + 4),
        "tensor.stride(0)": whole.as_strided(shape, (page + 8, width, 1), shift),
        "tensor strides": whole.as_strided(shape, (2 * page, 2 * width, 1), shift),
        "tensor": good.view(torch.int8),
        "tensor: got uint8[2, 64, 100]": whole.as_strided((2, 64, 100), (page, 100, 1), shift),
    }
    for names, pool in bad.items():
        with pytest.raises(KeysieveError, match="tensor") as error:
            IndexCache(spec, pool)
        assert str(error.value).startswith(names)
    for overlapping in (0, page - 16):
        with pytest.raises(KeysieveError, match=r"tensor\.stride\(0\)"):
            IndexCache(spec, whole.as_strided(shape, (overlapping, width, 1), shift))
    with pytest.raises(KeysieveError, match="tensor"):
        IndexCache(spec, "pool")
    other = spec_of("mxfp4" if spec.format.is_fp8 else "fp8_fp32")
    with pytest.raises(KeysieveError, match=f"{other.format.width}"):
        IndexCache(other, good)


def test_one_page_of_a_larger_pool_can_be_wrapped():
    spec = spec_of("fp8_fp32")
    pool = IndexCache.empty(spec, 3)
    pool.data.zero_()
    IndexCache(spec, pool.data[1:2]).append(random_keys(1), torch.tensor([63]))
    assert torch.equal(pool.read(torch.tensor([127])), IndexCache(spec, pool.data[1:2]).read(torch.tensor([63])))
    assert not pool.data[0].any()
    assert not pool.data[2].any()


def test_append_allocates_nothing_proportional_to_the_pool():
    spec = spec_of("fp8_fp32")
    large = IndexCache.empty(spec, 20_000)  # 169 MB
    keys, slots = random_keys(4), torch.tensor([3, 70, 640, 19_999 * 64])
    large.append(keys, slots)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        large.append(keys, slots)
        large.read(slots)
    allocated = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert 0 < allocated < 200_000


# --- slots of tables -----------------------------------------------------------------------------------------------


def test_slots_of_follows_the_table():
    table = torch.tensor([7, 0, 3], dtype=torch.int32)
    positions = torch.tensor([0, 63, 64, 130, -1, 191])
    assert slots_of(table, positions).tolist() == [7 * 64, 7 * 64 + 63, 0, 3 * 64 + 2, -1, 3 * 64 + 63]


def test_manager_blocks_of_ten_pages_map_injectively_and_the_needle_is_found():
    blocks = torch.tensor([[5, 1, 6], [0, 3, -1]], dtype=torch.int32)
    table = pages_of_blocks(blocks, 10)
    assert table.dtype == torch.int32
    assert table.shape == (2, 30)
    assert table[1, 20:].tolist() == [-10] * 10
    assert bool((table[1, 20:] < 0).all())
    positions = torch.arange(1920)
    slots = torch.cat((slots_of(table[0], positions), slots_of(table[1], positions[:1280])))
    assert slots.unique().numel() == 1920 + 1280
    spec = spec_of("fp8_ue8m0")
    cache = IndexCache.empty(spec, 70)
    cache.append(torch.zeros(3200, 128), slots)
    needle = torch.full((1, 128), 3.5)
    cache.append(needle, slots_of(table[0], torch.tensor([1234])))
    held = cache.read(slots)
    assert held.abs().amax(1).nonzero().flatten().tolist() == [1234]
    assert int(slots[1234]) == (1 * 10 + (1234 - 640) // 64) * 64 + 1234 % 64


def test_page_ids_in_the_top_quarter_of_the_pool():
    for key_format in FORMATS:
        spec = spec_of(key_format)
        pool, whole = padded_pool(spec, 64, 4 * 8448)
        cache = IndexCache(spec, pool)
        keys, slots = random_keys(64 * 16), torch.arange(48 * 64, 64 * 64)
        cache.append(keys, slots)
        assert torch.equal(cache.read(slots), dequantize_keys(spec, *quantize_keys(spec, keys)))
        assert bool((whole[: 48 * 4 * 8448] == 0xA5).all())


# --- reading back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_format", FORMATS)
def test_read_back_codes_scales_and_values(key_format: str):
    spec = spec_of(key_format)
    cache = IndexCache.empty(spec, 3)
    keys, slots = random_keys(192).bfloat16(), torch.randperm(192, generator=torch.Generator().manual_seed(5))
    cache.append(keys, slots)
    codes, scales = cache.codes(slots)
    want_codes, want_scales = quantize_keys(spec, keys)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scales, want_scales)
    assert cache.read(slots).dtype == torch.float32
    assert torch.equal(cache.read(slots), dequantize_keys(spec, want_codes, want_scales))
    # Page by page the same: token t of a page is row t.
    pages = torch.tensor([2, 0])
    tokens = (pages[:, None] * 64 + torch.arange(64)).flatten()
    assert torch.equal(cache.page_codes(pages).flatten(0, 1), cache.codes(tokens)[0])
    scale = cache.page_scales(pages).flatten(0, 1)
    assert scale.shape == ((128, 4) if key_format == "mxfp4" else (128,))
    values = dequantize_keys(spec, cache.page_codes(pages), cache.codes(tokens)[1].view(2, 64, 4))
    assert torch.equal(values.flatten(0, 1), cache.read(tokens))


def test_special_scale_bytes_read_as_they_are():
    for key_format in ("fp8_ue8m0", "mxfp4"):
        cache = IndexCache.empty(spec_of(key_format), 1)
        cache.append(torch.ones(2, 128), torch.tensor([0, 1]))
        raw = cache.data.view(-1)
        offset = cache.format.scale_offset
        raw[offset : offset + 4] = 0
        raw[offset + 4 : offset + 8] = 255
        scales = cache.page_scales(torch.tensor([0]))[0]
        assert bool((scales[0] == 2.0**-127).all())
        assert bool(torch.isnan(scales[1]).all())
        values = cache.read(torch.tensor([0, 1]))
        assert bool((values[0] > 0).all())
        assert bool(torch.isnan(values[1]).all())


def test_reading_outside_the_pool_is_refused():
    cache = IndexCache.empty(spec_of("fp8_fp32"), 1)
    for slot in (-1, 64):
        with pytest.raises(KeysieveError, match=f"slots: got {slot}"):
            cache.read(torch.tensor([slot]))


# --- other refusals ------------------------------------------------------------------------------------------------


def test_append_refuses_what_does_not_fit_and_says_what_does():
    cache = IndexCache.empty(spec_of("fp8_fp32"), 1)
    cache.data.fill_(3)
    keys, slots = random_keys(4), torch.arange(4)
    for names, call in {
        "keys: got float64": lambda: cache.append(keys.double(), slots),
        "keys: got float32[4, 64]": lambda: cache.append(keys[:, :64], slots),
        "slots: got int32": lambda: cache.append(keys, slots.int()),
        "slots: got int64[3]": lambda: cache.append(keys, slots[:3]),
        "keys: got float32[4, 128] stride (128, 1) on meta": lambda: cache.append(keys.to("meta"), slots),
    }.items():
        with pytest.raises(KeysieveError) as error:
            call()
        assert str(error.value).startswith(names)
    assert bool((cache.data == 3).all())


def test_options_are_checked_when_the_cache_is_made():
    with pytest.raises(KeysieveError, match="scale_rounding"):
        IndexCache.empty(spec_of("mxfp4"), 1, scale_rounding="plain")
    with pytest.raises(KeysieveError, match="pages"):
        IndexCache.empty(spec_of("mxfp4"), -1)


def test_require_cache_compares_formats_not_heads():
    cache = IndexCache.empty(spec_of("fp8_fp32"), 1)
    assert require_cache(IndexerSpec(heads=64, topk=2048), cache) is cache
    with pytest.raises(KeysieveError, match=r"cache: got fp8_fp32 \(132 bytes a token\); accepted: mxfp4"):
        require_cache(spec_of("mxfp4"), cache)
    with pytest.raises(KeysieveError, match="an IndexCache"):
        require_cache(spec_of("mxfp4"), cache.data)
    with pytest.raises(KeysieveError, match="on meta"):
        require_cache(spec_of("fp8_fp32"), cache, torch.device("meta"))
