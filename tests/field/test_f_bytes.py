"""Kind F, bytes: cache formats that are read as something else, plausibly."""

from __future__ import annotations

import struct

import pytest
import torch
from oracle.score import gather_keys
from oracle.step import row_bits

import keysieve as ks
from field.byhand import MINUS_FIVE, ONE, TWO, fp8_query, one_request, scores_of, unit_weights
from field.steps import FORMATS, check_step, chosen, run_step, spec_of
from keysieve.testing import assert_bitwise_equal, injected_case, random_case


def test_f1_golden_page_fp8_fp32() -> None:
    """All 64 keys, then all 64 float32 scales, written out byte by byte; scale t + 1 makes token t score t + 1.

    A reader that expects key and scale side by side finds plausible numbers here too, but not these.
    """
    page = b"".join(bytes([ONE] + [0] * 127) for _ in range(64)) + struct.pack("<64f", *range(1, 65))
    assert len(page) == 64 * 132
    cache = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(1, 64, 132)
    case = one_request(spec_of(topk=4), cache, fp8_query([{0: {0: ONE}}]), unit_weights(1, 0), 64)
    assert scores_of(case).tolist() == [[float(t) for t in range(1, 65)]]
    assert chosen(check_step(case), 0) == [60, 61, 62, 63]


def test_f1_golden_page_fp8_ue8m0() -> None:
    """The same with a 32-bit word of four equal UE8M0 bytes a token: 2^(b - 127)."""
    page = b"".join(bytes([ONE] + [0] * 127) for _ in range(64))
    page += b"".join(bytes([100 + t] * 4) for t in range(64))
    cache = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(1, 64, 132)
    spec = spec_of("fp8_ue8m0", topk=4)
    case = one_request(spec, cache, fp8_query([{0: {0: ONE}}]), unit_weights(1, 0), 64)
    assert scores_of(case).tolist() == [[2.0 ** (t - 27) for t in range(64)]]
    check_step(case)


def test_f1_golden_page_mxfp4() -> None:
    """Two E2M1 codes a byte, the even element low; byte i of the word scales elements 32 i to 32 i + 31.

    Eight query rows each listen to one element: first and second of every block, so nibble order, block order and the
    scale plane are told apart.
    """
    keys = b"".join(bytes([0x42] + [0] * 15) * 4 for _ in range(64))  # each block: element 0 is 1.0, element 1 is 2.0
    words = b"".join(bytes([110 + t, 111 + t, 113 + t, 116 + t]) for t in range(64))
    assert len(keys + words) == 64 * 68
    cache = torch.frombuffer(bytearray(keys + words), dtype=torch.uint8).view(1, 64, 68)
    codes = torch.zeros(8, 8, 64, dtype=torch.uint8)
    for row in range(8):
        codes[row, 0, 16 * (row // 2)] = 0x02 if row % 2 == 0 else 0x20
    query = (codes, torch.full((8, 8), 0x7F7F7F7F, dtype=torch.int32))
    case = one_request(spec_of("mxfp4", topk=4), cache, query, unit_weights(8, 0), 64)
    base = (110, 111, 113, 116)
    for row, scores in enumerate(scores_of(case).tolist()):
        factor = 1.0 if row % 2 == 0 else 2.0
        assert scores == [factor * 2.0 ** (base[row // 2] + t - 127) for t in range(64)]
    check_step(case)


@pytest.mark.parametrize("key_format", FORMATS)
def test_f1_reading_back_the_golden_bytes(key_format: str) -> None:
    """A reader that swaps nibbles in query and key alike scores correctly; what it reads back is still wrong.

    Element 0 of every key is 1, element 33 is 2, element 127 is -5 (MXFP4: -4), times the token's scale.
    """
    fp8 = bytes([ONE] + [0] * 32 + [TWO] + [0] * 93 + [MINUS_FIVE])
    mxfp4 = bytes([0x02] + [0] * 15 + [0x40] + [0] * 46 + [0xE0])
    words = {
        "fp8_fp32": struct.pack("<64f", *[0.5 * (t + 1) for t in range(64)]),
        "fp8_ue8m0": b"".join(bytes([100 + t] * 4) for t in range(64)),
        "mxfp4": b"".join(bytes([100 + t, 101 + t, 1, 103 + t]) for t in range(64)),
    }[key_format]
    spec = spec_of(key_format)
    page = (mxfp4 if key_format == "mxfp4" else fp8) * 64 + words
    data = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(1, 64, spec.format.width)
    values = ks.IndexCache(spec, data).read(torch.arange(64))
    want = torch.zeros(64, 128)
    for token in range(64):
        one = 0.5 * (token + 1) if key_format == "fp8_fp32" else 2.0 ** (token - 27)
        factors = (1.0, 2.0, 8.0) if key_format == "mxfp4" else (1.0, 1.0, 1.0)
        last = -4.0 if key_format == "mxfp4" else -5.0
        want[token, [0, 33, 127]] = torch.tensor([one * factors[0], 2 * one * factors[1], last * one * factors[2]])
    assert_bitwise_equal(values + 0.0, want, "dequantised keys")


def test_f1_query_scale_words_of_mxfp4() -> None:
    """The query's word has the same byte order as a key's: byte i scales elements 32 i to 32 i + 31."""
    keys = b"".join(bytes([0x02] + [0] * 15) * 4 for _ in range(64))
    words = bytes([127] * 4) * 64
    cache = torch.frombuffer(bytearray(keys + words), dtype=torch.uint8).view(1, 64, 68)
    codes = torch.zeros(4, 8, 64, dtype=torch.uint8)
    for row in range(4):
        codes[row, 3, 16 * row] = 0x02
    word = 127 | 128 << 8 | 130 << 16 | 125 << 24
    query = (codes, torch.full((4, 8), word, dtype=torch.int32))
    case = one_request(spec_of("mxfp4", topk=4), cache, query, unit_weights(4, 3), 64)
    assert scores_of(case)[:, 0].tolist() == [1.0, 2.0, 8.0, 0.25]
    check_step(case)


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("key_format", FORMATS)
def test_f4_scale_bytes_0_and_255(key_format: str, numerics: str) -> None:
    """UE8M0 byte 0 is 2^-127, not zero; 255 is NaN, not infinity, and ranks below -inf. A NaN fp32 scale likewise."""
    spec = spec_of(key_format, topk=3, numerics=numerics)
    scores = torch.tensor([1.0, 2.0, float("-inf"), 0.5])
    case = injected_case(spec, [scores], poison="winner")
    slot = int(case.index_table[0, 0]) * 64
    flat = torch.as_strided(case.cache, (case.cache.untyped_storage().nbytes(),), (1,), 0)
    page, key_bytes = slot // 64 * spec.format.page_bytes, spec.format.key_bytes
    word = page + 64 * key_bytes
    if key_format == "mxfp4":
        # Token 0: one nibble 1.0 in block 0 alone, which scale byte 0 makes 2^-127; the other blocks are empty.
        flat[page : page + key_bytes] = 0
        flat[page] = 0x02
        flat[word : word + 4] = torch.tensor([0, 127, 127, 127], dtype=torch.uint8)
        # Token 1: one scale byte is NaN; its block has no nonzero nibble, and 0 * NaN is NaN.
        flat[page + key_bytes : page + 2 * key_bytes] = 0
        flat[page + key_bytes] = 0x02
        flat[word + 4 : word + 8] = torch.tensor([127, 127, 255, 127], dtype=torch.uint8)
    elif key_format == "fp8_ue8m0":
        flat[word : word + 4] = 0
        flat[word + 4 : word + 8] = 255
    else:
        flat[word : word + 4] = torch.frombuffer(bytearray(struct.pack("<f", 2.0**-127)), dtype=torch.uint8)
        flat[word + 4 : word + 8] = 255
    # Query: whatever the injection's probe says token 0 and 1 score with their new scales, the brute force knows.
    logits = scores_of(case)[0]
    expected = torch.from_numpy(row_bits(case, 0, numerics).view("int16")).view(torch.bfloat16)
    assert_bitwise_equal(logits, expected, "logits")
    assert float(logits[0]) == 2.0**-127
    assert bool(logits[1].isnan())
    out = run_step(case)
    assert chosen(out, 0) == [0, 2, 3]  # NaN loses to -inf


def test_f4_query_scale_bytes_0_and_255() -> None:
    """The same rules hold for the query's MXFP4 scales."""
    keys = b"".join(bytes([0x02] + [0] * 63) for _ in range(64))
    cache = torch.frombuffer(bytearray(keys + bytes([127] * 256)), dtype=torch.uint8).view(1, 64, 68)
    codes = torch.zeros(2, 8, 64, dtype=torch.uint8)
    codes[:, 0, 0] = 0x02
    words = torch.full((2, 8), 0x7F7F7F7F, dtype=torch.int32)
    words[0, 0], words[1, 0] = 0x7F7F7F00, 0x7F7F7FFF
    case = one_request(spec_of("mxfp4", topk=4), cache, (codes, words), unit_weights(2, 0), 64)
    logits = scores_of(case)
    assert logits[0, 0].item() == 2.0**-127
    assert bool(logits[1].isnan().all())


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("key_format", FORMATS)
def test_f4_a_nan_dot_is_not_clamped_away(key_format: str, numerics: str) -> None:
    """max(NaN, 0) is 0 with fmax: a broken key would then look harmless. Every head and row must see NaN."""
    spec = spec_of(key_format, topk=4, numerics=numerics)
    case = random_case(spec, [[70, 70]], next_n=2, seed=4, copies=0.0)
    page = int(case.index_table[0, 0])
    flat = case.cache[page].reshape(-1)
    assert flat.data_ptr() == case.cache[page].data_ptr()
    key_bytes = spec.format.key_bytes
    if key_format == "mxfp4":
        flat[64 * key_bytes + 4 * 9 + 2] = 0xFF
    else:
        flat[9 * key_bytes + 77] = 0xFF
    logits = scores_of(case)
    assert bool(logits[:, 9].isnan().all())
    assert int(logits.isnan().sum()) == 2
    check_step(case, numerics=numerics)


@pytest.mark.parametrize("key_format", FORMATS)
def test_f5_an_all_zero_key(key_format: str) -> None:
    """A block of zeros has no maximum to divide by: the floor gives a finite scale, zero codes and a score of 0."""
    spec = spec_of(key_format, topk=4)
    cache = ks.IndexCache.empty(spec, pages=2, device="cpu")
    cache.data.fill_(0xFF)
    keys = torch.zeros(70, 128)
    keys[3] = -0.0
    keys[5, 64:] = 1.0  # MXFP4: two blocks are zero, two are not
    slots = torch.cat([torch.arange(64), 64 + torch.arange(6)])
    cache.append(keys, slots)
    codes, scales = gather_keys(cache.data.numpy(), [0, 1], 70)
    zero = [token for token in range(70) if token != 5]
    assert bool(((codes[zero] & 0x7F if key_format != "mxfp4" else codes[zero] & 0x77) == 0).all())
    if key_format == "fp8_fp32":
        assert scales[0].tobytes() == struct.pack("<f", torch.tensor(1e-4).div(448.0).item())
    elif key_format == "fp8_ue8m0":
        assert scales[0].tolist() == [105] * 4  # 2^-22 is the smallest power of two with 1e-4 / s <= 448
    else:
        assert scales[0].tolist() == [1] * 4  # 6 * 2^-126 / 6
    base = random_case(spec, [70], seed=5)
    case = one_request(spec, cache.data, base.query, base.weights, 70)
    logits = scores_of(case)[0]
    assert_bitwise_equal(logits[zero], torch.zeros(69, dtype=torch.bfloat16), "scores of zero keys")
    assert bool(logits.isfinite().all())
    check_step(case)


def test_f10_bytes_per_token_come_from_one_place() -> None:
    """A pool sized with the other format's rows is too small or wasteful: 132 and 68, and the tensor agrees."""
    for key_format, width in (("fp8_fp32", 132), ("fp8_ue8m0", 132), ("mxfp4", 68)):
        spec = spec_of(key_format)
        assert spec.format.width == width
        cache = ks.IndexCache.empty(spec, pages=3, device="cpu")
        assert cache.data.dtype == torch.uint8
        assert list(cache.data.shape) == [3, 64, width]
        other = torch.zeros(3, 64, 200 - width, dtype=torch.uint8)
        with pytest.raises(ks.KeysieveError) as refusal:
            ks.IndexCache(spec, other)
        assert str(width) in str(refusal.value)
        assert str(200 - width) in str(refusal.value)
