"""Kind F: cache formats and quantisation: bytes that are read as something else, plausibly."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracle.score import gather_keys
from oracle.score import logits as brute_force
from oracle.step import expected_step, row_bits

import keysieve as ks
from field.steps import FORMATS, UNSET, check_step, chosen, poisoned, refusal_of, run_step, spec_of
from keysieve.testing import Case, assert_bitwise_equal, assert_untouched, injected_case, random_case

ONE, TWO, THREE = 0x38, 0x40, 0x44
MINUS_ONE, MINUS_FIVE = 0xB8, 0xCA


def one_request(spec: ks.IndexerSpec, cache: torch.Tensor, query: object, weights: torch.Tensor, length: int) -> Case:
    """A case of one request whose pages are 0, 1, .. of ``cache``, rows as many as ``weights`` has."""
    rows = weights.shape[0]
    return Case(
        recipe="built by hand",
        seed=0,
        spec=spec,
        next_n=rows,
        query=query,  # type: ignore[arg-type]  # a tensor or the MXFP4 pair
        cache=cache,
        weights=weights,
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        index_table=torch.arange(cache.shape[0], dtype=torch.int32)[None],
    )


def scores_of(case: Case) -> torch.Tensor:
    """The public ``score`` of a case, bfloat16 ``[rows, max_len]``."""
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    return ks.score(case.spec, *arguments, max_len=case.max_len)


def fp8_query(rows: list[dict[int, dict[int, int]]], heads: int = 8) -> torch.Tensor:
    """E4M3 codes by row: head -> element -> code."""
    query = torch.zeros(len(rows), heads, 128, dtype=torch.uint8)
    for row, by_head in enumerate(rows):
        for head, elements in by_head.items():
            for element, code in elements.items():
                query[row, head, element] = code
    return query.view(torch.float8_e4m3fn)


def unit_weights(rows: int, *used: int, heads: int = 8) -> torch.Tensor:
    weights = torch.zeros(rows, heads)
    weights[:, list(used)] = 1.0
    return weights


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
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_f2_relu_before_the_sum_over_heads(heads: int, numerics: str) -> None:
    """Dots +3 and -5 with weights 1 score 3, not -2; and every pair of heads is summed."""
    cache = torch.zeros(1, 64, 132, dtype=torch.uint8)
    cache.view(-1)[0::128][:64] = ONE  # element 0 of each key; the scale plane follows the 64 keys
    cache.view(-1)[64 * 128 :] = torch.frombuffer(bytearray(struct.pack("<64f", *[1.0] * 64)), dtype=torch.uint8)
    spec = spec_of(heads=heads, topk=4, numerics=numerics)
    for first in range(heads):
        second = (first + 1) % heads
        query = fp8_query([{first: {0: THREE}, second: {0: MINUS_FIVE}}, {first: {0: THREE}, second: {0: TWO}}], heads)
        case = one_request(spec, cache, query, torch.ones(2, heads), 64)
        assert scores_of(case)[:, 0].tolist() == [3.0, 5.0]


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


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal Hadamard matrix of a power-of-two size."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.mark.parametrize("key_format", FORMATS)
def test_f6_rotating_query_and_keys_alike_selects_alike(key_format: str) -> None:
    """No rotation is applied here, so rotating both sides changes scores only by quantisation; one side is garbage.

    Twenty keys stand clear of the rest: rotated query with rotated keys finds exactly them, as unrotated with
    unrotated does; a cache that holds unrotated keys under a rotated query does not.
    """
    spec = spec_of(key_format, heads=8, topk=20)
    gen = torch.Generator().manual_seed(6)
    direction = torch.randn(128, generator=gen)
    direction /= direction.norm()
    q = direction.expand(1, 8, 128) * 4 + 0.05 * torch.randn(1, 8, 128, generator=gen)
    keys = torch.randn(300, 128, generator=gen)
    keys -= (keys @ direction)[:, None] * direction
    winners = sorted(torch.randperm(300, generator=gen)[:20].tolist())
    keys[winners] += 30 * direction
    rotation = hadamard(128)

    def selected(query: torch.Tensor, stored: torch.Tensor) -> list[int]:
        cache = ks.IndexCache.empty(spec, pages=5, device="cpu")
        cache.append(stored, torch.arange(300))
        codes, q_scale = ks.quantize_query(spec, query)
        weights = ks.fold_weights(torch.ones(1, 8), q_scale, 1.0)
        return chosen(run_step(one_request(spec, cache.data, codes, weights, 300)), 0)

    assert selected(q, keys) == winners
    assert selected(q @ rotation, keys @ rotation) == winners
    assert selected(q @ rotation, keys) != winners


@pytest.mark.parametrize("key_format", FORMATS)
def test_f6_append_stores_the_keys_as_they_are(key_format: str) -> None:
    """A unit vector stays a unit vector: one nonzero code at its own element, no rotation hidden in the writer."""
    spec = spec_of(key_format)
    cache = ks.IndexCache.empty(spec, pages=2, device="cpu")
    cache.append(torch.eye(128), torch.arange(128))
    codes, _ = gather_keys(cache.data.numpy(), [0, 1], 128)
    if key_format == "mxfp4":
        low, high = codes & 15, codes >> 4
        elements = torch.stack([torch.from_numpy(low), torch.from_numpy(high)], 2).reshape(128, 128)
    else:
        elements = torch.from_numpy(codes)
    assert_bitwise_equal((elements != 0).int(), torch.eye(128).int(), "nonzero codes")


@pytest.mark.parametrize("head_dim", [32, 64, 127, 256])
def test_f7_other_head_dims_are_refused(head_dim: int) -> None:
    """head_dim is 128: anything else is named, by the spec and by a query of another width."""
    with pytest.raises(ks.KeysieveError, match=r"head_dim.*128"):
        ks.IndexerSpec(heads=32, topk=2048, head_dim=head_dim)
    case = random_case(spec_of(topk=4), [100], seed=7)
    rows = poisoned(1, 4)
    narrow = replace(case, query=torch.zeros(1, 8, head_dim, dtype=torch.uint8).view(torch.float8_e4m3fn))
    with assert_untouched(rows=rows), pytest.raises(ks.KeysieveError, match="query"):
        run_step(narrow, out=rows)
    assert bool((rows == UNSET).all())


@pytest.mark.parametrize("heads", [1, 4, 7, 12, 24, 48, 128, 0, -8])
def test_f8_head_counts_that_no_backend_has_are_refused_at_once(heads: int) -> None:
    """The refusal comes when the spec is made, names the count and says to pad with zero heads."""
    with pytest.raises(ks.KeysieveError, match="heads") as refusal:
        ks.IndexerSpec(heads=heads, topk=2048)
    assert str(heads) in str(refusal.value)
    assert "zero" in str(refusal.value)


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "padded"), [(12, 16), (24, 32), (8, 64)])
def test_f8_zero_heads_change_nothing(heads: int, padded: int, numerics: str) -> None:
    """What the refusal advises is exact: heads of zero query and zero weight leave every logit's bits as they were.

    The brute force sums the real heads only (fp32 numerics), or the padded ones (bf16, whose accumulators alternate).
    """
    spec = spec_of(heads=padded, topk=30, numerics=numerics)
    case = random_case(spec, [200, 130], seed=8)
    assert isinstance(case.query, torch.Tensor)
    case.query.view(torch.uint8)[:, heads:] = 0
    case.weights[:, heads:] = 0
    check_step(case, numerics=numerics)
    if numerics == "fp32":
        codes, scales = gather_keys(case.cache.numpy(), case.index_table[0].tolist(), 200)
        query = case.query[0, :heads].view(torch.uint8).numpy()
        bits = brute_force("fp8_fp32", "fp32", query, None, case.weights[0, :heads].double().numpy(), codes, scales)
        want = torch.from_numpy(bits.view("int16")).view(torch.bfloat16)
        assert_bitwise_equal(scores_of(case)[0], want, "logits without the zero heads")


@pytest.mark.parametrize("key_format", FORMATS)
def test_f9_side_tensors_that_are_slices(key_format: str) -> None:
    """Weights and query cut out of larger tensors: read with their strides, or refused; never silently misread."""
    spec = spec_of(key_format, topk=40)
    case = random_case(spec, [[200, 201], [64, 65]], next_n=2, seed=9)
    want = expected_step(case)

    def cut(tensor: torch.Tensor, dim: int, step: int) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        shape = list(raw.shape)
        shape[dim] = shape[dim] * step + 3
        wide = torch.full(shape, 113, dtype=raw.dtype)
        part = wide.narrow(dim, 1, raw.shape[dim] * step)[(slice(None),) * dim + (slice(None, None, step),)]
        part.copy_(raw)
        return part.view(tensor.dtype) if step == 1 or dim < raw.dim() - 1 else part

    variants = [replace(case, weights=cut(case.weights, dim, step)) for dim in (0, 1) for step in (1, 2)]
    queries = list(case.query) if isinstance(case.query, tuple) else [case.query]
    for which, tensor in enumerate(queries):
        for dim in range(tensor.dim() - 1):
            changed = [cut(t, dim, 2) if i == which else t for i, t in enumerate(queries)]
            variants.append(replace(case, query=(changed[0], changed[1]) if len(changed) == 2 else changed[0]))
    read = 0
    for variant in variants:
        rows = poisoned(case.rows, 40)
        refusal = refusal_of(partial(run_step, variant, out=rows))
        if refusal is not None:
            assert "weights" in refusal or "query" in refusal
            assert bool((rows == UNSET).all())
            continue
        assert_bitwise_equal(rows, want.rows, "rows from sliced tensors")
        read += 1
    assert read >= 1


@pytest.mark.parametrize("key_format", FORMATS)
def test_f9_bfloat16_weights(key_format: str) -> None:
    """Weights may be bfloat16: the same numbers as float32 weights that are exact in it."""
    case = random_case(spec_of(key_format, topk=40), [200, 64], seed=90)
    half = case.weights.to(torch.bfloat16)
    exact = replace(case, weights=half.float())
    out = check_step(exact)
    assert_bitwise_equal(run_step(replace(case, weights=half)).rows, out.rows, "rows with bfloat16 weights")


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


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("key_format", FORMATS)
def test_f_random_bytes_score_as_the_contract_says(key_format: str, heads: int, numerics: str) -> None:
    """Random query, keys, scales and weights in every format, head count and numerics: every logit's bits."""
    spec = spec_of(key_format, heads=heads, topk=64, numerics=numerics)
    case = random_case(spec, [[257, 256, 0], [65, 64, 63]], next_n=3, seed=heads)
    logits = scores_of(case)
    for row in range(case.rows):
        bits = row_bits(case, row, numerics)
        want = torch.from_numpy(bits.view("int16")).view(torch.bfloat16)
        assert_bitwise_equal(logits[row, : len(bits)], want, f"logits of row {row}")
    check_step(case, numerics=numerics)
